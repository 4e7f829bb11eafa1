"""Held and switched batches in loaders, trainers, chains and ranks."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, Categorical, ResumableLoader, SwitchingBatchSampler, SwitchingOrder
from lightning_sgmcmc.batches.loader import ChainBatches
from lightning_sgmcmc.callbacks import SamplingSchedule
from tests.support.problems import BATCH, NUM_DATA, Ordered, data, network
from tests.support.recorders import Seen
from tests.support.switching import order, states
from tests.support.trainers import quiet_trainer

HELD = partial(SwitchingOrder, switching_time=1.0, time_step=0.02)


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
