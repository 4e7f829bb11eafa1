"""A constant with a known energy, fits on loaders of it, and what their steps record."""

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

from lightning_sgmcmc import BayesianModule, Gaussian, GaussianPrior
from lightning_sgmcmc.evaluation.passes import fresh_energies, full_energies, has_fresh_batches
from tests.support.trainers import quiet_trainer

ROWS = 105
STD, PRIOR = 1.0, 4.0


class Constant(nn.Module):
    """One output for all inputs: with a Gaussian likelihood the mean of the targets' law."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.full((1,), 0.3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.mean)

    def forward(self, x: Tensor) -> Tensor:
        return self.mean.expand(len(x), 1)


def targets(count: int = ROWS) -> Tensor:
    """Targets whose last rows differ from the others, so that unequal weights show."""
    y = torch.randn(count, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y[-(count % 20 or 1) :] += 9
    return y


def pairs(y: Tensor) -> TensorDataset:
    return TensorDataset(torch.zeros(len(y), 1, dtype=torch.float64), y)


ALL = pairs(targets())
WITH_HELD_OUT: Dataset[Any] = ConcatDataset([ALL, pairs(targets() + 50)])


def energy(mean: Tensor, y: Tensor) -> float:
    """U at a mean, by hand."""
    unit = 0.5 * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    likelihood = (0.5 * ((y - mean) / STD) ** 2 + unit + torch.log(torch.tensor(STD, dtype=torch.float64))).sum()
    prior = 0.5 * (mean / PRIOR) ** 2 + unit + torch.log(torch.tensor(PRIOR, dtype=torch.float64))
    return float(likelihood + prior.sum())


class Energies(pl.Callback):
    """Records each step's energies and data, and at the end those of all data and of a fresh batch."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, Tensor]] = []
        self.full: Tensor | None = None
        self.fresh: Tensor | None = None
        self._size = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        observed, chains = pl_module.chains.observed, pl_module.chains
        self._size += observed.batch_size
        if not chains.accumulation.accumulating:
            self.steps.append((trainer.current_epoch, self._size, observed.energy.clone()))
            self._size = 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if has_fresh_batches(trainer):
            self.full = full_energies(trainer, pl_module.chains, True, "a test")
            self.fresh = fresh_energies(trainer, pl_module.chains, pl_module.sampler, True)

    def of_epoch(self, epoch: int, by_size: bool) -> Tensor:
        """Return the mean of an epoch's energies, of each chain."""
        own = [(size, found) for number, size, found in self.steps if number == epoch]
        weights = torch.tensor([size if by_size else 1 for size, _ in own], dtype=torch.float64)
        return (weights[:, None] * torch.stack([found for _, found in own])).sum(0) / weights.sum()


def module(**options: Any) -> BayesianModule:
    """A module that does not move, so that all energies of an epoch are at one state."""
    options = {"net": Constant(), "likelihood": Gaussian(std=STD)} | options
    return BayesianModule(prior=GaussianPrior(std=PRIOR), lr=1e-30, temperature=0.0, **options).double()


def fit(model: BayesianModule, data: Any, **options: Any) -> Energies:
    seen = Energies()
    source = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {"train_dataloaders": data}
    options = {"max_epochs": 2, "precision": "64-true"} | options
    quiet_trainer(callbacks=[seen], num_sanity_val_steps=0, **options).fit(model, **source)
    return seen


class Stream(IterableDataset[Any]):
    """Rows one after another, in each worker."""

    def __init__(self, data: Any, divided: bool = True) -> None:
        self.data, self.divided = data, divided

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        step = info.num_workers if info is not None and self.divided else 1
        return iter([self.data[i] for i in range(info.id if info and self.divided else 0, len(self.data), step)])
