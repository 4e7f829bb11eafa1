"""Held and switched batches: their law, and their place in loaders, trainers, chains and ranks.

False alarms: Kolmogorov-Smirnov and chi-square tests at p < 1e-4. Seeds are fixed.
"""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from scipy import linalg, stats
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, Categorical, ResumableLoader, SwitchingBatchSampler, SwitchingOrder
from lightning_sgmcmc.batches.order import OrderSpec
from lightning_sgmcmc.batches.per_chain import ChainBatches
from lightning_sgmcmc.batches.switching import CHUNK
from lightning_sgmcmc.callbacks import SamplingSchedule
from tests.support.problems import BATCH, NUM_DATA, Ordered, data, network
from tests.support.recorders import Seen
from tests.support.trainers import quiet_trainer

HELD = partial(SwitchingOrder, switching_time=1.0, time_step=0.02)


def order(
    eta: float = 1.0, dt: Any = 0.02, num_data: int = NUM_DATA, batch: int = BATCH, **options: Any
) -> SwitchingOrder:
    return SwitchingOrder(OrderSpec(num_data, batch, 3, **options), switching_time=eta, time_step=dt)


def states(made: SwitchingOrder, count: int) -> torch.Tensor:
    return torch.tensor([made.state(k) for k in range(count)])


# -- the split --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_data", "batch", "ranks"), [(60, 8, 1), (61, 8, 1), (64, 8, 2), (61, 7, 3), (3, 5, 1), (2, 1, 3)]
)
def test_the_data_are_split_once_into_equal_batches(num_data: int, batch: int, ranks: int) -> None:
    made = [order(1e-6, 1.0, num_data, batch, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    count = made[0].batches_per_epoch
    of_state: dict[int, torch.Tensor] = {}
    for k in range(40 * count):
        whole = torch.cat([one.indices(k) for one in made])
        assert {len(one.indices(k)) for one in made} == {len(whole) // ranks}
        assert torch.equal(of_state.setdefault(made[0].state(k), whole), whole)
    assert set(of_state) == set(range(count))
    assert len(made[0].indices(0)) <= batch
    taken = torch.cat(list(of_state.values())).bincount(minlength=num_data)
    assert len(taken) == num_data
    assert int(taken.min()) == 1 or num_data < count * ranks
    assert int(taken.sum()) - num_data < count * ranks, "no more data twice than are needed for equal batches"


def test_every_chain_and_seed_has_its_own_split_and_switching() -> None:
    made = [order(), order(chain=1), SwitchingOrder(OrderSpec(NUM_DATA, BATCH, 4), switching_time=1.0, time_step=0.02)]
    splits = [one._batches for one in made]
    paths = [states(one, 300) for one in made]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(splits[a], splits[b])
        assert not torch.equal(paths[a], paths[b])
    assert torch.equal(states(order(), 300), paths[0])


# -- the law of the switching -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [3.0, 0.3, 1e-4])
def test_the_transition_matrix_is_that_of_the_continuous_chain(eta: float) -> None:
    """Counts of (state, next state) against exp(Q·dt), from slow switching to independent batches."""
    made, steps, dt = order(eta, 0.05, num_data=4, batch=1), 40_000, 0.05
    path = states(made, steps)
    found = torch.bincount(4 * path[:-1] + path[1:], minlength=16).double().view(4, 4)
    matrix = linalg.expm((np.ones((4, 4)) - 4 * np.eye(4)) / eta * dt)
    for row, expected in zip(found, matrix, strict=True):
        assert stats.chisquare(row, expected * float(row.sum())).pvalue > 1e-4


def test_states_three_steps_apart_are_those_of_a_markov_chain() -> None:
    """Pairs three steps apart against exp(3Q·dt), across the chunks' borders too."""
    made, eta, dt = order(0.5, 0.05, num_data=3, batch=1), 0.5, 0.05
    path = states(made, 40 * CHUNK)
    matrix = linalg.expm((np.ones((3, 3)) - 3 * np.eye(3)) / eta * 3 * dt)
    for one, other in ((path[:-3], path[3:]), (path[CHUNK - 2 :: CHUNK][:-1], path[CHUNK + 1 :: CHUNK])):
        stays = int((one == other).sum())
        assert stats.binomtest(stays, len(one), matrix[0, 0]).pvalue > 1e-4


@pytest.mark.parametrize("count", [2, 6])
def test_holding_times_are_exponential_and_the_next_state_uniform(count: int) -> None:
    """With 500 steps to a mean holding time η/(S-1): rounding to steps moves the distribution function by 0.002, and
    the test sees 0.04 for 3,000 holdings."""
    eta, mean = 1.0, 1.0 / (count - 1)
    dt = mean / 500
    made = order(eta, dt, num_data=count, batch=1)
    path = states(made, 1_500_000)
    jumps = (path.diff() != 0).nonzero()[:, 0]
    holding = jumps.diff()[:3000].double() * dt
    assert len(holding) > 2500
    assert stats.kstest(holding, stats.expon(scale=mean).cdf).pvalue > 1e-4
    if count > 2:
        moves = torch.bincount(((path[jumps + 1] - path[jumps]) % count) - 1, minlength=count - 1)
        assert stats.chisquare(moves).pvalue > 1e-4
    first = [
        SwitchingOrder(OrderSpec(count, 1, seed), switching_time=eta, time_step=dt).state(0) for seed in range(600)
    ]
    assert stats.chisquare(np.bincount(first, minlength=count)).pvalue > 1e-4


def test_a_time_step_may_change_from_step_to_step() -> None:
    """A schedule that stands still, and then runs: no switch while no time passes, then the law of the step's time."""
    made = order(0.4, lambda k: 0.0 if k < 3000 else 0.1, num_data=5, batch=1)
    path = states(made, 24_000)
    assert (path[:3000] == path[0]).all()
    stays = float((path[3000:-1] == path[3001:]).double().sum())
    share = linalg.expm((np.ones((5, 5)) - 5 * np.eye(5)) / 0.4 * 0.1)[0, 0]
    assert stats.binomtest(int(stays), 20_999, share).pvalue > 1e-4
    # A function that returns a number gives what the number gives.
    assert torch.equal(states(order(dt=lambda k: 0.02), 2000), states(order(), 2000))


def test_step_k_advances_by_its_own_time() -> None:
    """Only the step k = 2 takes time, so the state may change at the position 2 alone (counted from 0)."""
    changes = set()
    for chain in range(40):
        path = states(order(0.01, lambda k: 1.0 if k == 2 else 0.0, num_data=9, batch=1, chain=chain), 6)
        changes |= set((path.diff() != 0).nonzero()[:, 0].tolist())
    assert changes == {1}  # between positions 1 and 2


@pytest.mark.parametrize("eta", [1.0, 1e5])
def test_any_position_can_be_asked_for_at_once(eta: float) -> None:
    path = states(order(eta), 5 * CHUNK)
    for position in (4 * CHUNK + 7, 3, 2 * CHUNK, 5 * CHUNK - 1, CHUNK - 1):
        assert order(eta).state(position) == path[position]
    made = order(eta)
    for position in (4000, 10, 5000, 1023, 1024):
        assert made.state(position) == path[position]


def test_a_batch_is_held_across_the_borders_of_chunks() -> None:
    """The state goes on from one chunk to the next, and over many: changes are as seldom there as elsewhere."""
    assert len(states(order(1e9), 4 * CHUNK).unique()) == 1
    changes, borders = 0, range(CHUNK, 4 * CHUNK, CHUNK)
    for chain in range(200):
        made = order(10.0, chain=chain)
        changes += sum(made.state(at - 1) != made.state(at) for at in borders)
    share = 7 / 8 * -np.expm1(-8 * 0.02 / 10.0)
    assert stats.binomtest(changes, 200 * len(borders), share).pvalue > 1e-4


def test_one_batch_is_held_for_ever() -> None:
    made = order(batch=NUM_DATA)
    assert made.batches_per_epoch == 1
    assert torch.equal(made.indices(0).sort().values, torch.arange(NUM_DATA))
    assert torch.equal(made.indices(0), made.indices(3000))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"switching_time": 0.0}, ValueError, "switching_time must be positive, got 0"),
        ({"switching_time": -1.0}, ValueError, "switching_time must be a finite number and not negative, got -1"),
        ({"switching_time": float("inf")}, ValueError, "switching_time must be a finite number"),
        ({"switching_time": "long"}, TypeError, "switching_time must be a number"),
        ({"time_step": 0.0}, ValueError, "time_step must be positive, got 0"),
        ({"time_step": None}, TypeError, "time_step must be a number"),
        ({"drop_last": True}, ValueError, "would leave out the same 4 of 60 data for the whole run"),
    ],
)
def test_mistakes(change: dict[str, Any], error: type[Exception], message: str) -> None:
    options: dict[str, Any] = {"switching_time": 1.0, "time_step": 0.1} | change
    spec = OrderSpec(NUM_DATA, BATCH, 0, drop_last=options.pop("drop_last", False))
    with pytest.raises(error, match=message):
        SwitchingOrder(spec, **options)


def test_a_schedule_of_senseless_times_is_refused() -> None:
    for bad in (-0.1, float("nan")):
        with pytest.raises(ValueError, match=r"time_step must be finite and not negative, got .* at the step 7"):
            order(dt=lambda k, bad=bad: bad if k == 7 else 0.1).state(0)


# -- loaders ----------------------------------------------------------------------------------------------------------


def numbered(num_data: int = NUM_DATA) -> TensorDataset:
    return TensorDataset(torch.arange(num_data))


def taken(loader: Any, passes: int) -> list[list[int]]:
    return [batch[0].tolist() for _ in range(passes) for batch in loader]


def test_a_loader_with_a_worker_gives_the_same_batches() -> None:
    plain, fetching = (ResumableLoader(numbered(), BATCH, seed=3, num_workers=n, order=HELD) for n in (0, 1))
    batches = taken(plain, 5)
    assert batches == taken(fetching, 5)
    fetching.close()
    made = order()
    assert batches == [made.indices(k).tolist() for k in range(40)]
    assert any(a == b for a, b in itertools.pairwise(batches))
    assert len({tuple(batch) for batch in batches}) > 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_goes_on_anywhere_by_its_one_number(workers: int) -> None:
    whole = taken(ResumableLoader(numbered(), BATCH, seed=3, order=HELD), 6)
    first = ResumableLoader(numbered(), BATCH, seed=3, num_workers=workers, order=HELD)
    taken(first, 2)
    part = iter(first)
    for _ in range(5):
        next(part)
    state = first.state_dict()
    first.close()
    again = ResumableLoader(numbered(), BATCH, num_workers=workers, order=HELD)
    again.load_state_dict(state)
    assert taken(again, 3) == whole[21:45]
    again.close()


def test_chains_get_batches_of_their_own_and_of_one_size() -> None:
    loader = ResumableLoader(numbered(61), BATCH, seed=3, order=HELD)
    loader.adopt_chains([4, 7])
    batches = [batch for _ in range(3) for batch in loader]
    assert all(isinstance(batch, ChainBatches) for batch in batches)
    for place, chain in enumerate((4, 7)):
        own = order(num_data=61, chain=chain)
        assert [b[place][0].tolist() for b in batches] == [own.indices(k).tolist() for k in range(24)]


def test_a_batch_sampler_of_a_plain_loader() -> None:
    def sampler(**change: Any) -> SwitchingBatchSampler:
        options: dict[str, Any] = {"switching_time": 1.0, "time_step": 0.02, "seed": 3}
        return SwitchingBatchSampler(NUM_DATA, BATCH, **(options | change))

    first = sampler()
    loader = DataLoader(numbered(), batch_sampler=first)
    assert len(first) == len(loader) == 8
    whole = taken(loader, 6)
    made = order()
    assert whole == [made.indices(k).tolist() for k in range(48)]
    assert first.state_dict() == {"batches": 48, "seed": 3, "length": 8}
    again = sampler()
    again.load_state_dict({"batches": 19, "seed": 3, "length": 8})
    assert taken(DataLoader(numbered(), batch_sampler=again), 3) == whole[19:43]
    with pytest.raises(ValueError, match="the state's seed is 3, this sampler's is 4"):
        sampler(seed=4).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="the state's length is 8, this sampler's is 1"):
        SwitchingBatchSampler(8, 8, switching_time=1.0, time_step=1.0, seed=3).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="rank must be between 0 and 1, got 2"):
        sampler(num_replicas=2, rank=2)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        SwitchingBatchSampler(8, 0, switching_time=1.0, time_step=1.0)


# -- training ---------------------------------------------------------------------------------------------------------


def fit(seen: Seen, chains: int, ckpt_path: Path | None = None, loader: Any = None, **options: Any) -> BayesianModule:
    module = BayesianModule(
        net=network(), likelihood=Categorical(), sampler=SGLD, lr=0.05, seed=3, num_chains=chains, num_data=NUM_DATA
    )
    settings: dict[str, Any] = {"max_steps": 30, "enable_checkpointing": True, "num_sanity_val_steps": 0} | options
    trainer = quiet_trainer(callbacks=[SamplingSchedule(every_n_steps=5), seen], **settings)
    given = {"datamodule": Ordered(HELD)} if loader is None else {"train_dataloaders": loader}
    trainer.fit(module, ckpt_path=ckpt_path, **given)
    return module


@pytest.mark.parametrize("chains", [1, 2])
def test_a_fit_holds_batches_and_goes_on_exactly(tmp_path: Path, chains: int) -> None:
    """Of one chain and of two, stopped in mid-epoch and in the middle of a holding time."""
    seen = Seen(tmp_path, at=(13, 22))
    whole = fit(seen, chains)
    inputs = data(NUM_DATA, 0).inputs
    for place in range(chains):
        own = order(chain=place)
        for k, batch in enumerate(seen.batches):
            torch.testing.assert_close(batch[place], inputs[own.indices(k)])
    for at in (13, 22):
        rest = Seen()
        resumed = fit(rest, chains, tmp_path / f"{at}.ckpt")
        assert all(torch.equal(a, b) for a, b in zip(seen.batches[at:], rest.batches, strict=True))
        for name, tensor in whole.state_dict().items():
            assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_accumulated_micro_batches_are_positions_of_the_order() -> None:
    """Of the eight batches of an epoch, three and three and two make a step."""
    seen = Seen()
    fit(seen, 1, max_steps=6, accumulate_grad_batches=3)
    inputs, own = data(NUM_DATA, 0).inputs, order()
    assert len(seen.batches) == 16
    assert all(torch.equal(batch[0], inputs[own.indices(k)]) for k, batch in enumerate(seen.batches))


def test_two_ranks_switch_together(tmp_path: Path) -> None:
    """Two data-parallel processes (gloo): each has its share of the batch that both hold."""
    fit(Seen(tmp_path), 1, strategy="ddp_fork", devices=2)
    inputs = data(NUM_DATA, 0).inputs
    orders = [order(num_replicas=2, rank=rank) for rank in range(2)]
    paths = [states(one, 30) for one in orders]
    assert torch.equal(*paths)
    assert 1 < len(paths[0].unique()) <= 4
    for rank, own in enumerate(orders):
        batches = torch.cat(torch.load(tmp_path / f"rank{rank}.pt", weights_only=True))
        assert all(torch.equal(batches[k], inputs[own.indices(k)]) for k in range(30))
    held = torch.cat([own.indices(0) for own in orders])
    assert len(held.unique()) == len(held) == 16


def plain_loader(rank: int = 0, ranks: int = 1) -> Any:
    split = data(NUM_DATA, 0)
    sampler = SwitchingBatchSampler(
        NUM_DATA, BATCH, switching_time=1.0, time_step=0.02, seed=3, num_replicas=ranks, rank=rank
    )
    return DataLoader(TensorDataset(split.inputs, split.targets), batch_sampler=sampler)


def test_a_batch_sampler_under_a_trainer() -> None:
    """It trains, with a warning that a run cannot go on from any step."""
    seen = Seen()
    with pytest.warns(UserWarning, match="resuming is bit-exact only from checkpoints at the end of an epoch"):
        fit(seen, 1, loader=plain_loader())
    inputs, own = data(NUM_DATA, 0).inputs, order()
    assert all(torch.equal(batch[0], inputs[own.indices(k)]) for k, batch in enumerate(seen.batches))


def test_lightning_refuses_a_batch_sampler_on_two_ranks(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="use_distributed_sampler=False"):
        fit(Seen(tmp_path), 1, loader=plain_loader(), strategy="ddp_fork", devices=2)


class RankLoaders(pl.LightningDataModule):
    """A batch sampler of each rank's own."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return plain_loader(self.trainer.global_rank, self.trainer.world_size)


def test_a_batch_sampler_on_two_ranks(tmp_path: Path) -> None:
    fit(Seen(tmp_path), 1, loader=RankLoaders(), strategy="ddp_fork", devices=2, use_distributed_sampler=False)
    inputs = data(NUM_DATA, 0).inputs
    for rank in range(2):
        own = order(num_replicas=2, rank=rank)
        batches = torch.cat(torch.load(tmp_path / f"rank{rank}.pt", weights_only=True))
        assert all(torch.equal(batches[k], inputs[own.indices(k)]) for k in range(30))


class Stateful(pl.LightningDataModule):
    """A plain loader whose batch sampler's position is in the checkpoints."""

    num_data = NUM_DATA

    def __init__(self) -> None:
        super().__init__()
        self.sampler = SwitchingBatchSampler(NUM_DATA, BATCH, switching_time=1.0, time_step=0.02, seed=3)

    def train_dataloader(self) -> Any:
        split = data(NUM_DATA, 0)
        return DataLoader(TensorDataset(split.inputs, split.targets), batch_sampler=self.sampler)

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state_dict)


@pytest.mark.parametrize("at", [8, 13])
def test_a_batch_sampler_goes_on_where_a_datamodule_keeps_its_state(tmp_path: Path, at: int) -> None:
    """At the end of an epoch and within one; without that state the batches begin anew."""
    seen, rest, lost = Seen(tmp_path, at=(at,)), Seen(), Seen()
    whole = fit(seen, 1, loader=Stateful())
    resumed = fit(rest, 1, tmp_path / f"{at}.ckpt", loader=Stateful())
    assert all(torch.equal(a, b) for a, b in zip(seen.batches[at:], rest.batches, strict=True))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    fit(lost, 1, tmp_path / f"{at}.ckpt", loader=plain_loader())
    assert all(torch.equal(a, b) for a, b in zip(seen.batches, lost.batches, strict=False))
    assert not all(torch.equal(a, b) for a, b in zip(seen.batches[at:], lost.batches, strict=True))
