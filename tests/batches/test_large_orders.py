"""Orders of so many data that their permutation is computed where it is wanted: a permutation, mixed, at any place."""

import functools
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_sgmcmc import ResumableLoader
from lightning_sgmcmc.batches import BatchOrder, CyclicOrder, OrderSpec, SwitchingOrder, SymmetricOrder, orders
from lightning_sgmcmc.batches.orders import LARGEST_DRAWN, Permutation
from lightning_sgmcmc.seeding import derive_seed

BILLION = 10**9


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the permutation of few data too, some places at a time."""
    monkeypatch.setattr(orders, "LARGEST_DRAWN", 0)
    monkeypatch.setattr(orders, "WINDOW", 7)


def epoch_of(order: BatchOrder, number: int = 0) -> list[int]:
    first = number * order.batches_per_epoch
    return torch.cat([order.indices(first + k) for k in range(order.batches_per_epoch)]).tolist()


def chi_square(values: Tensor, bins: int) -> float:
    """Return the statistic of whole numbers in [0, bins), standardised to mean 0 and variance 1."""
    counts, wanted = torch.bincount(values, minlength=bins).double(), len(values) / bins
    return (float(((counts - wanted).square() / wanted).sum()) - (bins - 1)) / (2 * (bins - 1)) ** 0.5


def test_up_to_a_million_data_the_order_is_torchs() -> None:
    for count in (1, 1000, LARGEST_DRAWN):
        order = BatchOrder(OrderSpec(count, count, seed=3, chain=2))
        generator = torch.Generator().manual_seed(derive_seed(3, "data order", 2, 0))
        assert torch.equal(order.indices(0), torch.randperm(count, generator=generator))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12, 97, 1000, 4096])
def test_it_is_a_permutation(count: int, computed: None) -> None:
    """... of each epoch its own."""
    order = BatchOrder(OrderSpec(count, 10, seed=1))
    epochs = [epoch_of(order, number) for number in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert count < 10 or epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize(("count", "ranks"), [(60, 4), (61, 4), (22, 5), (3, 7)])
def test_each_rank_has_its_share(count: int, ranks: int, computed: None) -> None:
    """Every `ranks`-th datum of the same permutation, which begins again where the ranks do not divide N."""
    whole = epoch_of(BatchOrder(OrderSpec(count, 4, seed=1)))
    filled = (whole * ranks)[: -(-count // ranks) * ranks]
    for rank in range(ranks):
        order = BatchOrder(OrderSpec(count, 4, seed=1, num_replicas=ranks, rank=rank))
        assert epoch_of(order) == filled[rank::ranks]


@pytest.mark.parametrize("make", [CyclicOrder, SymmetricOrder])
def test_sweeps_repeat_and_turn(make: Any, computed: None) -> None:
    order = make(OrderSpec(61, 9, 3))
    length = order.batches_per_epoch
    sweeps = [[order.indices(sweep * length + k).tolist() for k in range(length)] for sweep in range(4)]
    assert all(sorted(i for batch in sweep for i in batch) == list(range(61)) for sweep in sweeps)
    assert sweeps[1] == (sweeps[0] if make is CyclicOrder else sweeps[0][::-1])
    assert (sweeps[2] == sweeps[0]) == (make is CyclicOrder)
    assert {len(batch) for batch in sweeps[0]} == {8, 9}


def test_a_switching_split_has_every_datum(computed: None) -> None:
    make = functools.partial(SwitchingOrder, switching_time=1e-9, time_step=1.0)
    orders_of_ranks = [make(OrderSpec(60, 6, 3, num_replicas=2, rank=rank)) for rank in range(2)]
    taken = {tuple(order.indices(k).tolist()) for order in orders_of_ranks for k in range(200)}
    assert sorted(i for batch in taken for i in batch) == list(range(60))


def test_numbers_are_mixed() -> None:
    """At what places neighbours and distant numbers are, and what is at neighbouring places: all as by chance.

    Statistics of chi-square tests, standardised, of 40 keys each; beyond 5 at 1 in 10⁵.
    """
    count, bins = LARGEST_DRAWN + 7, 64
    side = 1001  # of the network's square
    for step in (1, 2, side - 1, side, 500 * side, count // 2):
        at, distances, pairs = [], [], []
        for key in range(40):
            permutation = Permutation(count, derive_seed(key, "mixing"))
            first, second = (permutation[range(own, own + 5000 * 199, 199)] for own in (0, step))
            at.append(first * bins // count)
            distances.append((second - first) % count * bins // count)
            pairs.append((first * 8 // count) * 8 + second * 8 // count)
        for values in (at, distances, pairs):
            assert abs(chi_square(torch.cat(values), bins)) < 5, step


def test_every_permutation_of_few_data_is_as_likely(computed: None) -> None:
    """The first two of five data over 2,000 keys: 20 ordered pairs."""
    found = torch.stack([Permutation(5, derive_seed(key, "few"))[range(2)] for key in range(2000)])
    names, numbers = (found[:, 0] * 5 + found[:, 1]).unique(return_inverse=True)
    assert len(names) == 20
    assert abs(chi_square(numbers, 20)) < 5


def test_a_billion_data_cost_what_a_batch_costs() -> None:
    """Random access in milliseconds (a permutation of them takes minutes and 8 GB); every batch comes again."""
    made = [BatchOrder(OrderSpec(BILLION, 100, seed=2, num_replicas=2, rank=rank)) for rank in range(2)]
    places = [0, 4_999_999, 3, 5_000_000, 123_456_789]
    start = time.perf_counter()
    found = {place: [order.indices(place) for order in made] for place in places}
    assert time.perf_counter() - start < 2
    for place in reversed(places):
        assert all(torch.equal(order.indices(place), own) for order, own in zip(made, found[place], strict=True))
    taken = torch.cat([own for of_ranks in found.values() for own in of_ranks])
    assert len(taken) == 1000
    assert len(taken.unique()) > 995, "three epochs, in each of which a datum comes once"
    assert 0 <= int(taken.min()) < BILLION // 50 < BILLION - BILLION // 50 < int(taken.max()) < BILLION


def test_a_loader_continues_within_an_epoch(computed: None) -> None:
    def loader() -> ResumableLoader:
        return ResumableLoader(TensorDataset(torch.arange(61)), 9, seed=4)

    whole = loader()
    batches = [batch[0].tolist() for _ in range(3) for batch in whole]
    stopped = loader()
    for _, _ in zip(range(10), (batch for _ in range(2) for batch in stopped), strict=False):
        pass
    again = loader()
    again.load_state_dict(stopped.state_dict())
    assert [batch[0].tolist() for batch in again] == batches[stopped.position : stopped.position + 7]
