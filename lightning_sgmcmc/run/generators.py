"""The process's default generators: a fit seeds them for each batch, and leaves them where plain Lightning would."""

from collections.abc import Iterable
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_sgmcmc.batches.loader import ResumableLoader, flat_loaders
from lightning_sgmcmc.seeding import GeneratorStates, derive_seed


class ProcessGenerators:
    """Keeps a process's default generators during a fit.

    What loaders draw from torch's at the start of each pass, as in plain Lightning, is drawn from a copy.
    """

    def __init__(self) -> None:
        self._states: GeneratorStates | None = None
        self._own = torch.Generator()
        """Where torch's default generator of the CPU would be."""
        self._lent: list[DataLoader[Any]] = []
        """Loaders that draw their workers' seeds from a generator of the run."""
        self._loaders: list[Any] = []

    def begin(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Keep the generators, at the start of training.

        Args:
            trainer: the run's.
            device: the module's.
        """
        self._states = GeneratorStates([device])
        self._own.set_state(torch.default_generator.get_state())
        self._loaders = flat_loaders(trainer.train_dataloader)

    def seed_workers(self, loader: DataLoader[Any], seed: int) -> None:
        """Give a loader without a generator one of the run during the fit: a pass begins by drawing the workers' seed,
        and later draws should not depend on it."""
        if loader.generator is None:
            loader.generator = torch.Generator().manual_seed(derive_seed(seed, "workers"))
            self._lent.append(loader)

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        """Draw from the copy what the training loaders draw in this epoch; training made the first pass before."""
        loaders, loop = flat_loaders(trainer.train_dataloader), trainer.fit_loop
        known = all(any(loader is one for one in self._loaders) for loader in loaders)
        self._loaders = loaders
        resumes = getattr(loop, "is_resuming", False) or loop.epoch_loop.restarting
        passes = (not known) + (trainer.current_epoch > 0 and not resumes)
        self._draw(loaders, passes)

    def begin_validation(self, trainer: pl.Trainer) -> None:
        """Draw from the copy what the validation loaders draw in a pass."""
        if self._states is not None:
            self._draw(flat_loaders(trainer.val_dataloaders), 1)

    def _draw(self, loaders: Iterable[Any], passes: int) -> None:
        for loader in loaders:
            if not isinstance(loader, DataLoader | ResumableLoader):
                continue
            has_workers, lent = loader.num_workers > 0, any(loader is one for one in self._lent)
            for _ in range(passes):
                if isinstance(loader, ResumableLoader) or loader.generator is None or lent:
                    _number(self._own)
                if has_workers:
                    self._draw_order(loader)
            if not has_workers:
                self._draw_order(loader)

    def _draw_order(self, loader: Any) -> None:
        sampler = getattr(loader, "sampler", None)
        if getattr(sampler, "generator", self) is not None:
            return
        if isinstance(sampler, RandomSampler):
            _number(self._own)
        elif isinstance(sampler, SubsetRandomSampler):
            torch.randperm(len(sampler.indices), generator=self._own)
        elif isinstance(sampler, WeightedRandomSampler):
            torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=self._own)

    @property
    def is_kept(self) -> bool:
        """Whether a fit is in training."""
        return self._states is not None

    def end(self) -> None:
        """Put the generators back, at the end of a fit however it ends; repeated calls do nothing."""
        for loader in self._lent:
            loader.generator = None
        self._lent, self._loaders = [], []
        if self._states is None:
            return
        self._states.restore()
        torch.default_generator.set_state(self._own.get_state())
        self._states = None


def _number(generator: torch.Generator) -> None:
    torch.empty((), dtype=torch.int64).random_(generator=generator)
