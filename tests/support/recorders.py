"""Callbacks that write down what a run does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc import BayesianModule
from lightning_sgmcmc.batches.loader import ChainBatches
from lightning_sgmcmc.callbacks import SamplerCallback
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.subsampling.control_variates import rows_of
from tests.support.problems import Array


class Draws(SamplerCallback):
    """Keeps the first parameter of every sample."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        self.values.append(next(iter(sample.parameters.values())))

    def array(self, chains: int = 1) -> Array:
        """Return the draws, (S, D, d), one chain's after the other's."""
        by_step = torch.stack(self.values).double()
        return by_step.unflatten(0, (-1, chains)).transpose(0, 1).flatten(0, 1).cpu().numpy()


class Samples(SamplerCallback):
    def __init__(self) -> None:
        self.samples: list[PosteriorSample] = []

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        self.samples.append(sample)


class SaveEverywhere(pl.callbacks.Checkpoint):
    """Saves a checkpoint behind every batch, micro-batches included, every validation and every epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches = 0

    def _save(self, trainer: pl.Trainer, what: str) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{self.batches:03d}-{what}.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.batches += 1
        self._save(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer, "epoch")


class Energies(SamplerCallback):
    """The corrected and the plain energies of each step, (C,) each, by epoch."""

    def __init__(self) -> None:
        self.corrected: list[list[torch.Tensor]] = []
        self.plain: list[list[torch.Tensor]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.corrected.append([])
        self.plain.append([])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        observed = pl_module.chains.observed
        energy = observed.energy.double()
        self.plain[-1].append(energy)
        correction = observed.correction
        self.corrected[-1].append(energy + correction if correction is not None else energy)


class Gradients(SamplerCallback):
    """The gradients that the sampler gets, (C, d) each, by epoch."""

    def __init__(self) -> None:
        self.by_epoch: list[list[Tensor]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.by_epoch.append([])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in pl_module.parameters()]
        self.by_epoch[-1].append(rows_of(gradients, pl_module.num_chains).clone())


class Nudge(SamplerCallback):
    """Moves the chains off their snapshot, at the end of the second epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and trainer.is_last_batch:
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.mul_(1.1)


class Each(SamplerCallback):
    """Calls `look(*arguments of the hook)` at each call of a hook, and keeps what it returns."""

    def __init__(self, hook: str, look: Callable[..., Any]) -> None:
        self.seen: list[Any] = []
        setattr(self, hook, lambda *arguments: self.seen.append(look(*arguments)))


class Dump(pl.Callback):
    """Writes `look(pl_module)` of each rank at the end: the processes that hold it are gone after the fit."""

    def __init__(self, folder: Path, look: Callable[[Any], Any]) -> None:
        self.folder = folder
        self.look = look

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.folder.mkdir(exist_ok=True)
        torch.save(self.look(pl_module), self.folder / f"rank{trainer.global_rank}.pt")

    @staticmethod
    def read(folder: Path) -> list[Any]:
        """Return what was written, by rank."""
        return [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank*.pt"))]


class Seen(pl.callbacks.Checkpoint):
    """Keeps the inputs that each step saw, (C, B, …), and saves checkpoints after some batches.

    Each of several ranks writes its own to rankR.pt.
    """

    def __init__(self, folder: Path | None = None, at: tuple[int, ...] = ()) -> None:
        self.folder, self.at = folder, at
        self.batches: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        parts = list(batch) if isinstance(batch, ChainBatches) else [batch]
        self.batches.append(torch.stack([part[0] for part in parts]))
        if len(self.batches) in self.at and self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{len(self.batches)}.ckpt")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.world_size > 1 and self.folder is not None:
            torch.save(self.batches, self.folder / f"rank{trainer.global_rank}.pt")
