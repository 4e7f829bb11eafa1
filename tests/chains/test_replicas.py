"""Ranks that share their chains average rows of gradients themselves: as torch's wrapper does, without it (gloo)."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, ChainStrategy
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from tests.support.comparisons import assert_equal_trees
from tests.support.problems import Even
from tests.support.trainers import quiet_trainer


class Drift(nn.Module):
    """Has a buffer that a step reads and that follows the rank's own data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = x + self.level
        if self.training:
            self.level = 0.9 * self.level + 0.1 * x.detach().square().mean()
        return moved


class Net(BayesianModule):
    def __init__(self, num_chains: int = 1, **options: Any) -> None:
        super().__init__(likelihood=Categorical(), num_chains=num_chains, lr=0.02, seed=3, **options)
        width = 6
        self.net = nn.Sequential(
            nn.Linear(5, width), nn.BatchNorm1d(width), *([Drift()] if num_chains == 1 else []), nn.Linear(width, 3)
        )


class Wrapped(DDPStrategy):
    """Torch's wrapper, since the library leaves it out of Lightning's own class alone."""


class WrappedChains(ChainStrategy):
    configure_ddp = DDPStrategy.configure_ddp


class Look(pl.Callback):
    """Keeps how a step is done, and what rank 0 and its fellow have at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reductions = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        own = torch.distributed.all_reduce

        def counted(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            self.reductions += tensor.numel() > 10  # the others are of what to stop for
            return own(tensor, *arguments, **named)

        torch.distributed.all_reduce = counted  # in this process, which ends with the fit

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        found = {
            "state": pl_module.state_dict(),
            "momenta": [dict(state) for state in pl_module.sampler.state_dict()["state"].values()],
            "is_wrapped": isinstance(trainer.strategy.model, DistributedDataParallel),
            "rows": pl_module.chains.flat is not None,
            "reductions": self.reductions,
        }
        torch.save(found, self.folder / f"{trainer.global_rank}.pt")


def fit(folder: Path, strategy: Any, chains: int, execution: Any = "loop", **options: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    trainer = quiet_trainer(
        max_steps=12,
        devices=2,
        strategy=strategy,
        callbacks=[SamplingSchedule(every_n_steps=4), SampleCollector(folder / "samples"), Look(folder)],
        **options,
    )
    torch.manual_seed(0)
    trainer.fit(Net(chains, sampler=SGHMC, chain_execution=execution), datamodule=Even(8))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


STRATEGIES: dict[str, tuple[Any, Any]] = {
    "ddp": (Wrapped, DDPStrategy),
    "groups": (WrappedChains, ChainStrategy),
}


@pytest.mark.by_default("ddp-1")
@pytest.mark.parametrize(
    ("kind", "chains", "execution", "options"),
    [
        ("ddp", 1, "loop", {}),
        ("ddp", 2, "loop", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("groups", 2, "vmap", {}),
        ("groups", 1, "loop", {"accumulate_grad_batches": 2}),
    ],
    ids=["ddp-1", "ddp-1-accumulated", "groups-2", "groups-1"],
)
def test_the_draws_are_those_of_torchs_wrapper(
    tmp_path: Path, kind: str, chains: int, execution: str, options: dict[str, Any]
) -> None:
    """Bit for bit with two ranks, whose halves a sum adds exactly; all ranks end with the same chains, by one reduction
    of all gradients a step."""
    wrapper, ours = STRATEGIES[kind]
    more = {"ranks_per_chain": 2} if kind == "groups" else {}
    expected = fit(tmp_path / "wrapped", wrapper(start_method="fork", **more), chains, execution, **options)
    found = fit(tmp_path / "rows", ours(start_method="fork", **more), chains, execution, **options)
    assert [one["is_wrapped"] for one in expected + found] == [True, True, False, False]
    assert [one["rows"] for one in expected + found] == [False, False, chains > 1, chains > 1]
    assert [one["reductions"] for one in found] == [12] * 2
    for one, other in zip(expected, found, strict=True):
        assert_equal_trees(other["momenta"], one["momenta"])
        sampled = {name for name in one["state"] if "running" not in name and "level" not in name}
        assert_equal_trees(*({name: each["state"][name] for name in sampled} for each in (other, one)))
    assert_equal_trees(found[0]["state"], expected[0]["state"])
