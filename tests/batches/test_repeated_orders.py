"""Orders that repeat their batches: fixed cyclic and symmetric, in loaders, trainers, chains and ranks."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch.utils.data import TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, ResumableLoader, UnderdampedLangevin
from lightning_sgmcmc.batches import BatchOrder, CyclicOrder, OrderSpec, SymmetricOrder
from lightning_sgmcmc.batches.loader import ChainBatches
from lightning_sgmcmc.callbacks import EWSG, SamplingSchedule
from lightning_sgmcmc.tune.runs import Energies
from tests.support.problems import BATCH, NUM_DATA, Ordered, data, network
from tests.support.recorders import Seen
from tests.support.trainers import quiet_trainer

ORDERS: list[Any] = [CyclicOrder, SymmetricOrder]
UBU = functools.partial(UnderdampedLangevin, friction=5.0, integrator="ubu")


def epochs(order: BatchOrder, count: int) -> list[list[list[int]]]:
    """Return the batches of the first epochs."""
    length = order.batches_per_epoch
    return [[order.indices(epoch * length + k).tolist() for k in range(length)] for epoch in range(count)]


# -- the orders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("num_data", "batch", "ranks"), [(60, 8, 1), (61, 9, 1), (22, 4, 4), (7, 7, 1), (3, 1, 2)])
def test_a_sweep_has_every_datum_in_even_batches(order: Any, num_data: int, batch: int, ranks: int) -> None:
    """... and the few that fill up the replicas' shares twice; in as many batches as `BatchOrder` has."""
    made = [order(OrderSpec(num_data, batch, 3, num_replicas=ranks, rank=rank)) for rank in range(ranks)]
    plain = BatchOrder(OrderSpec(num_data, batch, 3, num_replicas=ranks))
    assert made[0].batches_per_epoch == plain.batches_per_epoch
    for sweep in zip(*(epochs(one, 3) for one in made), strict=True):
        sizes = [[len(b) for b in own] for own in sweep]
        assert all(own == sizes[0] for own in sizes)
        assert max(sizes[0]) - min(sizes[0]) <= 1
        assert max(sizes[0]) <= batch
        taken = torch.tensor([i for own in sweep for b in own for i in b]).bincount(minlength=num_data)
        assert int(taken.min()) >= 1
        assert int(taken.sum()) == -(-num_data // ranks) * ranks


@pytest.mark.parametrize("batch", [8, 9])
def test_a_cycle_repeats_and_symmetric_sweeps_are_palindromes(batch: int) -> None:
    """Of eight and of seven batches, of even and odd numbers of them."""
    spec = OrderSpec(NUM_DATA, batch, 3)
    cycle = epochs(CyclicOrder(spec), 4)
    assert all(epoch == cycle[0] for epoch in cycle)
    pairs = epochs(SymmetricOrder(spec), 6)
    for forth, back in zip(pairs[::2], pairs[1::2], strict=True):
        assert back == forth[::-1]
    assert pairs[0] != pairs[2] != pairs[4] != pairs[0]


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_is_a_function_of_seed_chain_and_position(order: Any) -> None:
    def made(seed: int = 0, chain: int = 0) -> Any:
        return order(OrderSpec(50, 8, seed, chain))

    whole = epochs(made(), 4)
    flat = [batch for epoch in whole for batch in epoch]
    anywhere = made()
    for k in (27, 3, 14, 13, 0, 20, 8):
        assert anywhere.indices(k).tolist() == flat[k]
    starts = [whole[0], epochs(made(seed=1), 1)[0], epochs(made(chain=1), 1)[0]]
    assert all(a != b for i, a in enumerate(starts) for b in starts[:i])


def test_every_symmetric_order_is_equally_likely() -> None:
    """Chi-square test of the first datum over 2,000 pairs of sweeps of 10 data; false alarms at 1 in 1,000."""
    order = SymmetricOrder(OrderSpec(10, 1, seed=5))
    counts = torch.bincount(torch.tensor([int(order.indices(20 * k)) for k in range(2000)]), minlength=10).double()
    assert float(((counts - 200) ** 2 / 200).sum()) < 27.9


def test_left_out_data_are_others_in_each_pair_or_refused() -> None:
    order = SymmetricOrder(OrderSpec(50, 8, 0, drop_last=True))
    kept = [sorted(i for batch in epoch for i in batch) for epoch in epochs(order, 4)]
    assert {len(batch) for epoch in epochs(order, 4) for batch in epoch} == {8}
    assert kept[0] == kept[1] != kept[2]
    with pytest.raises(ValueError, match="drop_last=True would leave out the same 2 of 50 data for the whole run"):
        CyclicOrder(OrderSpec(50, 8, 0, drop_last=True))
    CyclicOrder(OrderSpec(48, 8, 0, drop_last=True))


# -- loaders ----------------------------------------------------------------------------------------------------------


def taken(loader: Any, passes: int) -> list[list[int]]:
    return [batch[0].tolist() for _ in range(passes) for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_a_loader_continues_anywhere_by_its_one_number(order: Any, workers: int) -> None:
    numbers = TensorDataset(torch.arange(61))
    whole = taken(ResumableLoader(numbers, 8, seed=3, order=order), 6)
    assert whole == [b for epoch in epochs(order(OrderSpec(61, 8, 3)), 6) for b in epoch]
    first = ResumableLoader(numbers, 8, seed=3, num_workers=workers, order=order)
    taken(first, 1)
    for _ in itertools.islice(first, 5):
        pass
    state = first.state_dict()
    first.close()
    again = ResumableLoader(numbers, 8, num_workers=workers, order=order)
    again.load_state_dict(state)
    assert taken(again, 3) == whole[13:37]
    again.close()


@pytest.mark.parametrize("order", ORDERS)
def test_uneven_batches_of_several_chains_stack(order: Any) -> None:
    loader = ResumableLoader(TensorDataset(torch.arange(61)), 9, seed=3, order=order)
    loader.adopt_chains([4, 7])
    for _ in range(2):
        for batch in loader:
            assert isinstance(batch, ChainBatches)
            assert batch.stacked()[0].shape[0] == 2
            assert batch[0][0].tolist() != batch[1][0].tolist()


# -- training ---------------------------------------------------------------------------------------------------------


def fit(seen: Seen, order: Any, chains: int = 1, path: Path | None = None, more: Any = (), **options: Any) -> Any:
    module = BayesianModule(
        net=network(),
        likelihood=Categorical(),
        sampler=UBU,
        lr=0.01,
        seed=3,
        num_chains=chains,
    )
    settings: dict[str, Any] = {"max_steps": 30, "enable_checkpointing": True, "num_sanity_val_steps": 0} | options
    trainer = quiet_trainer(callbacks=[SamplingSchedule(every_n_steps=5), *more, seen], **settings)
    trainer.fit(module, ckpt_path=path, datamodule=Ordered(order))
    return module


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_a_fit_takes_the_order_and_continues_exactly(tmp_path: Path, order: Any, chains: int) -> None:
    """Of one chain and of two, with eight batches an epoch: in mid-epoch, between the sweeps of a pair, after it."""
    seen = Seen(tmp_path, at=(8, 13, 16))
    whole = fit(seen, order, chains)
    inputs = data(NUM_DATA, 0).inputs
    for place in range(chains):
        own = order(OrderSpec(NUM_DATA, BATCH, 3, place))
        for k, batch in enumerate(seen.batches):
            assert torch.equal(batch[place], inputs[own.indices(k)])
    for at in seen.at:
        rest = Seen()
        resumed = fit(rest, order, chains, tmp_path / f"{at}.ckpt")
        assert all(torch.equal(a, b) for a, b in zip(seen.batches[at:], rest.batches, strict=True))
        for name, tensor in whole.state_dict().items():
            assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_chains_may_share_the_batches_of_one_order() -> None:
    seen = Seen()
    module = BayesianModule(
        net=network(), likelihood=Categorical(), sampler=UBU, lr=0.01, seed=3, num_chains=2, shared_batch=True
    )
    quiet_trainer(max_steps=12, enable_checkpointing=True, callbacks=[seen]).fit(
        module, datamodule=Ordered(CyclicOrder)
    )
    own, inputs = CyclicOrder(OrderSpec(NUM_DATA, BATCH, 3)), data(NUM_DATA, 0).inputs
    assert all(torch.equal(batch[0], inputs[own.indices(k)]) for k, batch in enumerate(seen.batches))


def test_another_order_cannot_continue_a_checkpoint(tmp_path: Path) -> None:
    fit(Seen(tmp_path, at=(9,)), CyclicOrder)
    with pytest.raises(ValueError, match=r"other settings \(order CyclicOrder there, SymmetricOrder here\)"):
        fit(Seen(), SymmetricOrder, path=tmp_path / "9.ckpt")


@pytest.mark.parametrize("order", ORDERS)
def test_two_ranks_share_the_batches(tmp_path: Path, order: Any) -> None:
    """Two data-parallel processes (gloo), each with its part of the same batches."""
    fit(Seen(tmp_path), order, strategy="ddp_fork", devices=2)
    inputs = data(NUM_DATA, 0).inputs
    for rank in range(2):
        own = order(OrderSpec(NUM_DATA, BATCH, 3, num_replicas=2, rank=rank))
        batches = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert len(batches) == 30
        assert all(torch.equal(batch[0], inputs[own.indices(k)]) for k, batch in enumerate(batches))


# -- accumulated batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_accumulated_batches_that_divide_an_epoch_come_again_together(order: Any) -> None:
    seen = Seen()
    fit(seen, order, max_steps=8, accumulate_grad_batches=4)
    steps = [torch.cat([b[0] for b in seen.batches[k : k + 4]]) for k in range(0, 32, 4)]
    found = [{tuple(row) for row in step.tolist()} for step in steps]
    back = (0, 1) if order is CyclicOrder else (1, 0)
    assert found[2] == found[back[0]]
    assert found[3] == found[back[1]]


@pytest.mark.parametrize("order", ORDERS)
def test_accumulated_batches_that_do_not_divide_an_epoch_are_refused(order: Any) -> None:
    refusal = f"{order.__name__} repeats its 8 batches, but a step has 3 of the 8 of an epoch"
    with pytest.raises(ValueError, match=refusal):
        fit(Seen(), order, accumulate_grad_batches=3)
    with pytest.raises(ValueError, match=refusal):
        fit(Seen(), order, more=[EWSG(num_proposals=2)])
    with pytest.raises(ValueError, match=refusal):
        fit(Seen(), order, more=[GradientAccumulationScheduler({0: 1, 2: 3})])
    with pytest.raises(ValueError, match="a step has 2 of the 5 of an epoch"):
        fit(Seen(), order, accumulate_grad_batches=2, limit_train_batches=5)
    fit(Seen(), BatchOrder, max_steps=6, accumulate_grad_batches=3)
    fit(Seen(), order, max_steps=6, accumulate_grad_batches=3, more=[Energies()])  # a tuner's short run
