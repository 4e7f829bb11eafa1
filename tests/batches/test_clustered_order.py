"""Stratified mini-batches: what they hold, that they are unbiased, and by how much they are less noisy."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.orders import BatchOrder, ClusteredOrder, OrderSpec, cluster_data

SIZES = (1, 5, 13, 21)  # N = 40
CASES = [(40, 8), (40, 7), (40, 6), (40, 40), (40, 50), (40, 2), (40, 1)]


def labels_of(sizes: tuple[int, ...] = SIZES) -> Tensor:
    """Cluster numbers with gaps between them, in mixed order."""
    labels = torch.cat([torch.full((size,), 3 * c - 1) for c, size in enumerate(sizes)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]


def epoch_of(order: BatchOrder, epoch: int = 0) -> list[Tensor]:
    first = epoch * order.batches_per_epoch
    return [order.indices(first + position) for position in range(order.batches_per_epoch)]


@pytest.mark.parametrize(("num_data", "batch_size"), CASES)
def test_an_epoch_is_a_permutation_in_batches_of_the_plain_sizes(num_data: int, batch_size: int) -> None:
    order = ClusteredOrder(OrderSpec(num_data, batch_size, seed=1), clusters=labels_of())
    plain = BatchOrder(OrderSpec(num_data, batch_size, seed=1))
    for epoch in range(5):
        batches = epoch_of(order, epoch)
        assert torch.cat(batches).sort().values.tolist() == list(range(num_data))
        assert [len(batch) for batch in batches] == [len(batch) for batch in epoch_of(plain, epoch)]
    assert not torch.equal(torch.cat(epoch_of(order, 0)), torch.cat(epoch_of(order, 1)))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num_data", "batch_size"), CASES)
def test_every_batch_holds_each_clusters_share(num_data: int, batch_size: int, drop_last: bool) -> None:
    """... rounded down or up; also the data that drop_last leaves out."""
    if drop_last and batch_size > num_data:
        pytest.skip("no batch is left")
    labels = labels_of()
    order = ClusteredOrder(OrderSpec(num_data, batch_size, seed=2, drop_last=drop_last), clusters=labels)
    for epoch in range(20):
        batches = epoch_of(order, epoch)
        if drop_last:
            assert all(len(batch) == batch_size for batch in batches)
            left = set(range(num_data)) - set(torch.cat(batches).tolist())
            assert len(left) == num_data % batch_size
            batches.append(torch.tensor(sorted(left), dtype=torch.int64))
        for batch in batches:
            for label in labels.unique():
                share = int((labels == label).sum()) * len(batch) / num_data
                assert math.floor(share) <= int((labels[batch] == label).sum()) <= math.ceil(share)


def test_the_mean_over_an_epoch_is_the_datas() -> None:
    values = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    order = ClusteredOrder(OrderSpec(40, 8, seed=3), clusters=labels_of())
    for epoch in range(3):
        means = torch.stack([values[batch].mean(0) for batch in epoch_of(order, epoch)])
        torch.testing.assert_close(means.mean(0), values.mean(0), rtol=1e-14, atol=1e-15)


@pytest.mark.by_default("7-1")
@pytest.mark.parametrize(("batch_size", "replicas"), [(7, 1), (4, 3)])
def test_every_datum_has_the_same_chance_to_be_in_a_batch(batch_size: int, replicas: int) -> None:
    """In every batch of the epoch, of each replica; the largest of the z-scores, false alarms at 1 in 1,000.

    N = 40 is not divisible by either; three replicas hold 42 data, two of them twice.
    """
    epochs, scores = 4000, []
    share = math.ceil(40 / replicas)
    for rank in range(replicas):
        order = ClusteredOrder(OrderSpec(40, batch_size, 4, num_replicas=replicas, rank=rank), clusters=labels_of())
        counts = torch.zeros(order.batches_per_epoch, 40, dtype=torch.float64)
        for epoch in range(epochs):
            for position, batch in enumerate(epoch_of(order, epoch)):
                counts[position] += batch.bincount(minlength=40)
        sizes = [min(batch_size, share - batch_size * b) for b in range(order.batches_per_epoch)]
        chance = torch.tensor(sizes, dtype=torch.float64)[:, None] / 40
        scores.append((counts - epochs * chance) / (epochs * chance * (1 - chance)).sqrt())
    largest = torch.cat(scores).abs()
    # A datum twice in one batch makes the binomial variance a little small: the bound for it is 5 % wider.
    level = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - 1e-3 / 2 / largest.numel(), dtype=torch.float64))
    assert float(largest.max()) < float(level) * (1.0 if replicas == 1 else 1.05)


def test_the_variance_is_that_within_the_clusters() -> None:
    """Two batches of disjoint data of 4,000 epochs: 5 standard errors of a variance, false alarms at 1 in 10^6."""
    sizes, size, num_data = (8, 16, 24, 32), 10, 80
    labels = labels_of(sizes)
    generator = torch.Generator().manual_seed(2)
    values = 5.0 * labels.double() + torch.randn(num_data, dtype=torch.float64, generator=generator)
    exact = 0.0
    for label in labels.unique():
        own = values[labels == label]
        taken = size * len(own) / num_data
        assert taken == int(taken)
        exact += (len(own) / num_data) ** 2 * (1 - taken / len(own)) * float(own.var()) / taken
    plain_exact = (1 - size / num_data) * float(values.var()) / size
    measured = {}
    for name, order in (
        ("clustered", ClusteredOrder(OrderSpec(num_data, size, 5), clusters=labels)),
        ("plain", BatchOrder(OrderSpec(num_data, size, 5))),
    ):
        means = torch.stack([values[order.indices(epoch * 8)].mean() for epoch in range(4000)])
        squares = (means - values.mean()).square()
        measured[name] = (float(squares.mean()), float(squares.std()) / 4000**0.5)
    for name, truth in (("clustered", exact), ("plain", plain_exact)):
        value, error = measured[name]
        assert abs(value - truth) < 5 * error
        assert error < 0.05 * truth
    assert exact < 0.01 * plain_exact


def test_roundings_cost_little() -> None:
    """Clusters that do not divide the batches: still far below the plain order's variance."""
    labels = labels_of()
    values = 5.0 * labels.double()
    order = ClusteredOrder(OrderSpec(40, 7, 6), clusters=labels)
    means = torch.stack([values[order.indices(6 * epoch + epoch % 5)].mean() for epoch in range(1000)])
    assert float((means - values.mean()).square().mean()) < 0.35 * (1 - 7 / 40) * float(values.var()) / 7


def test_one_cluster_is_a_plain_order_and_many_are_no_error() -> None:
    for labels in (torch.zeros(40, dtype=torch.int64), torch.arange(40)):
        order = ClusteredOrder(OrderSpec(40, 7, seed=0), clusters=labels)
        assert torch.cat(epoch_of(order)).sort().values.tolist() == list(range(40))


def test_clusters_are_not_tied_to_each_other() -> None:
    """Four data of four clusters in batches of two: every pair meets (that one does not in 100 epochs: 1 in 10^17)."""
    order = ClusteredOrder(OrderSpec(4, 2, seed=0), clusters=torch.arange(4))
    pairs = {tuple(sorted(order.indices(batch).tolist())) for batch in range(0, 200, 2)}
    assert len(pairs) == 6


def test_the_order_is_a_function_of_seed_chain_epoch_and_position() -> None:
    def epoch(seed: int = 0, chain: int = 0, number: int = 0) -> list[list[int]]:
        order = ClusteredOrder(OrderSpec(40, 8, seed, chain), clusters=labels_of())
        return [batch.tolist() for batch in epoch_of(order, number)]

    assert epoch() == epoch()
    orders = [epoch(), epoch(seed=1), epoch(chain=1), epoch(number=1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    order = ClusteredOrder(OrderSpec(40, 7, seed=0), clusters=labels_of())
    forwards = [order.indices(batch).tolist() for batch in range(18)]
    assert [order.indices(batch).tolist() for batch in reversed(range(18))][::-1] == forwards


@pytest.mark.parametrize(("num_data", "replicas"), [(40, 2), (41, 2), (40, 3), (2, 4)])
def test_replicas_share_a_stratified_batch(num_data: int, replicas: int) -> None:
    labels = labels_of() if num_data == 40 else torch.arange(num_data) % 3
    for drop_last in (False, True):
        if drop_last and num_data < 4 * replicas:
            continue
        orders = [
            ClusteredOrder(OrderSpec(num_data, 4, 7, 0, drop_last, replicas, rank), clusters=labels)
            for rank in range(replicas)
        ]
        parts = [epoch_of(order) for order in orders]
        assert len({tuple(len(batch) for batch in part) for part in parts}) == 1
        seen = torch.cat([batch for part in parts for batch in part])
        padded = -(-num_data // replicas) * replicas
        if not drop_last:
            counts = seen.bincount(minlength=num_data)
            assert len(seen) == padded
            assert set(counts.tolist()) <= {padded // num_data, -(-padded // num_data)}
        elif num_data == padded:
            assert len(seen.unique()) == len(seen) == num_data // (4 * replicas) * 4 * replicas
        if num_data != 40:
            continue
        extra = num_data != padded  # a datum twice moves the shares
        for position in range(len(parts[0])):
            for part in ([torch.cat([p[position] for p in parts])], [p[position] for p in parts]):
                for batch in part:
                    for label in labels.unique():
                        share = int((labels == label).sum()) * len(batch) / num_data
                        within = 1 + extra + (len(part) > 1)  # a share of a rounded number is rounded once more
                        assert abs(int((labels[batch] == label).sum()) - share) < within


def test_two_replicas_together_are_one_process_with_twice_the_batch() -> None:
    whole = ClusteredOrder(OrderSpec(40, 8, 8), clusters=labels_of())
    halves = [ClusteredOrder(OrderSpec(40, 4, 8, num_replicas=2, rank=rank), clusters=labels_of()) for rank in range(2)]
    for batch in range(10):
        parts = [half.indices(batch) for half in halves]
        assert not set(parts[0].tolist()) & set(parts[1].tolist())
        assert torch.cat(parts).sort().values.tolist() == whole.indices(batch).sort().values.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(workers: int) -> None:
    order = functools.partial(ClusteredOrder, clusters=labels_of())
    dataset = TensorDataset(torch.arange(40))

    def batches(loader: ResumableLoader, count: int) -> list[list[int]]:
        return [batch[0].tolist() for batch in itertools.islice(loader, count)]

    straight = ResumableLoader(dataset, 7, seed=2, order=order)
    expected = batches(straight, 6) + batches(straight, 6)
    pieces = ResumableLoader(dataset, 7, seed=2, order=order)
    found = batches(pieces, 4)
    other = ResumableLoader(dataset, 7, num_workers=workers, order=order)
    other.load_state_dict(pieces.state_dict())
    found += batches(other, 2) + batches(other, 6)
    other.close()
    assert found == expected


def test_every_chain_has_an_order_of_its_own() -> None:
    loader = ResumableLoader(
        TensorDataset(torch.arange(40)), 8, seed=2, order=functools.partial(ClusteredOrder, clusters=labels_of())
    )
    loader.adopt_chains([0, 5])
    for number, chains in enumerate(loader):
        for chain, batch in zip((0, 5), chains, strict=True):
            own = ClusteredOrder(OrderSpec(40, 8, 2, chain), clusters=labels_of())
            assert torch.equal(batch[0], own.indices(number))
        assert not torch.equal(chains[0][0], chains[1][0])


def test_clusters_of_separated_data_are_found() -> None:
    generator = torch.Generator().manual_seed(3)
    truth = torch.arange(300) % 3
    inputs = 20.0 * torch.eye(3)[truth].view(300, 1, 3) + torch.randn(300, 1, 3, generator=generator)
    found = cluster_data(inputs, 3, seed=0)
    assert found.dtype == torch.int64
    assert sorted(found.unique().tolist()) == [0, 1, 2]
    pairs = {(int(a), int(b)) for a, b in zip(truth, found, strict=True)}
    assert len(pairs) == 3
    assert torch.equal(found, cluster_data(inputs, 3, seed=0))
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    cluster_data(inputs, 3, seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_mistakes() -> None:
    def make(clusters: Any) -> Any:
        return lambda: ClusteredOrder(OrderSpec(40, 8, 0), clusters=clusters)

    for build, message in (
        (
            make(torch.zeros(39, dtype=torch.int64)),
            r"one number for each of the 40 training data, got the shape \(39,\)",
        ),
        (make(torch.zeros(40)), "clusters must be whole numbers, got torch.float32"),
        (lambda: cluster_data(torch.zeros(5, 2), 6, 0), "num_clusters must be at most the number of data 5, got 6"),
        (lambda: cluster_data(torch.zeros(5, 2), 0, 0), "num_clusters must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            build()
