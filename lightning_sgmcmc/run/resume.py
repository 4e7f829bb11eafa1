"""Exact resume: the state of a run beyond that of sampler, schedule and callbacks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.per_chain import ChainBatches
from lightning_sgmcmc.chains.chains import Chains, chains_of, sampler_of
from lightning_sgmcmc.run.hyperparameters import log_settings
from lightning_sgmcmc.run.settings import (
    Settings,
    check_ranks,
    check_settings,
    differences,
    is_allowed,
    is_seeded,
    settings_of,
)
from lightning_sgmcmc.run.trainer import callbacks_of
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed, reseed

ACCUMULATED = "accumulated_gradients"
MEAN_POTENTIAL = "mean_potential of the micro-batches"


class ExactResume(pl.Callback):
    """Makes every batch of a run a function of the checkpoint and the seed; every `BayesianModule` adds it to its run.

    * The default generators (dropout, augmentation on the device) are seeded before each batch by (seed, rank, batch).
    * A `ResumableLoader` gets the run's seed.
    * A checkpoint between the micro-batches of an accumulated step keeps their gradients.
    * Lightning's own counts of batches and epochs, which drift in a run that resumes several times, are repaired. A
      run that is limited by epochs ends at their number of optimizer steps.
    * A run resumes only with the checkpoint's settings: prior, likelihood, temperature, N, lr, seed, sampler and its
      options, schedule and its arguments, and data. Ranks must agree on N and the data.

    Args:
        allow: names of settings that may differ from the checkpoint's ("lr", "prior", "sampler.friction", "schedule",
            …); this run's values apply, except of the seed. Pass `ExactResume(allow=["lr"])` to the trainer.

    Raises:
        ValueError: at the start of a fit from a checkpoint, if settings differ, with a list of both values.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        if isinstance(allow, str):
            raise TypeError(f"allow must be a list of names, got {allow!r}: pass [{allow!r}]")
        self.allow = tuple(allow)
        self._settings: Settings = {}
        """This run's, at rank zero."""
        self._saved_settings: Settings | None = None
        """The checkpoint's; None unless a checkpoint is loaded, empty if an earlier version wrote it."""
        self._new_options: list[dict[str, Any]] = []
        """For each parameter group, the options that replace the checkpoint's."""
        self._batches = 0
        """Batches that the run has trained on, including micro-batches."""
        self._epoch_length: int | None = None
        """Batches in an epoch, if known."""
        self._seed = 0
        self._streams: list[str] = []
        """Names of the chains' random streams in this process."""
        self._device = torch.device("cpu")
        self._accumulated: dict[str, Tensor] = {}
        """State from a checkpoint between micro-batches: gradients by parameter, and the mean potential."""
        self._loaders: list[ResumableLoader] = []
        self._positions: list[dict[str, Any]] = []
        """The loaders' states in the checkpoint."""
        self._limited_steps = False
        self._awaits_batches = False
        """Whether the first batch is to show if the chains share batches."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._batches, self._accumulated, self._loaders, self._positions = 0, {}, [], []
            self._settings, self._saved_settings, self._new_options = {}, None, []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.check(trainer, pl_module)

    def check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the settings with the checkpoint's and among ranks, once in a fit.

        Raises:
            ValueError: if they differ.
        """
        if self._settings:
            return
        sampler = sampler_of(pl_module)
        own = check_ranks(trainer, settings_of(trainer, pl_module, sampler))
        if getattr(getattr(trainer, "datamodule", None), "restores_data", False):
            own = {name: value for name, value in own.items() if name not in ("num_data", "data")}
        saved = self._saved_settings
        if saved == {}:
            rank_zero_info(
                "An earlier version wrote the checkpoint, without the run's settings: they are not compared with this "
                "run's."
            )
        elif saved is not None:
            check_settings(saved, own, is_seeded(pl_module), self.allow)
            changed = [name for name in differences(saved, own, False) if is_allowed(name, self.allow)]
            options = [name.removeprefix("sampler.") for name in changed if name.startswith(("lr", "sampler."))]
            self._new_options = [{name: group[name] for name in options} for group in sampler.param_groups]
        self._settings = own

    def _apply_new_options(self, sampler: Sampler) -> None:
        for group, options in zip(sampler.param_groups, self._new_options, strict=False):
            group.update(options)
            if "lr" in options:
                group["initial_lr"] = options["lr"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        chains = chains_of(pl_module)
        self._apply_new_options(sampler_of(pl_module))
        self._settings["seed"] = sampler_of(pl_module).seed
        log_settings(trainer, chains.model, self._settings)
        self._seed = sampler_of(pl_module).seed  # from the checkpoint, if any
        layout = chains.layout
        self._streams = [layout.stream(chain) for chain in layout.chains]
        self._device = pl_module.device
        length = trainer.num_training_batches
        self._epoch_length = int(length) if math.isfinite(length) else None
        self._prepare_loaders(trainer, layout.chains if not chains.shared_batch else range(1))
        self._end_by_steps(trainer)
        self._restore_accumulated(chains)
        chains.claims.claim("seed chain", self, self.begin_chain)
        self._reseed("epoch")

    def _restore_accumulated(self, chains: Chains) -> None:
        parameters = dict(chains.model.named_parameters())
        for name, tensor in self._accumulated.items():
            if name == MEAN_POTENTIAL:
                chains.observed.mean_potential = tensor.to(chains.model.device)
            else:
                parameters[name].grad = tensor.to(parameters[name].device)
        if self._accumulated:
            chains.spread_gradients()
        self._accumulated = {}

    def begin_chain(self, index: int) -> None:
        """Seed the default generators before a chain's part of a step, by its index in this process."""
        reseed(derive_seed(self._seed, "batch", self._streams[index], self._batches), self._device)

    def _prepare_loaders(self, trainer: pl.Trainer, chains: Sequence[int]) -> None:
        loaders = _flat(trainer.train_dataloader)
        self._loaders = [loader for loader in loaders if isinstance(loader, ResumableLoader)]
        # Lightning does not load their states at an epoch's end, nor if they were requested early.
        for loader, position in zip(self._loaders, self._positions, strict=False):
            loader.load_state_dict(position)
        for loader in loaders:
            if isinstance(loader, ResumableLoader):
                loader.adopt_seed(self._seed)
                loader.adopt_chains(chains)
            elif isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
                # Each epoch begins by drawing the workers' seed; later draws should not depend on it.
                loader.generator = torch.Generator().manual_seed(derive_seed(self._seed, "workers"))
        self._awaits_batches = len(self._loaders) < len(loaders) and len(chains) > 1
        if len(self._loaders) < len(loaders) and trainer.checkpoint_callbacks:
            rank_zero_warn(
                "With a plain DataLoader, resuming is bit-exact only from checkpoints at the end of an epoch: pass a "
                "datamodule (DatasetDataModule accepts any data set) or a ResumableLoader to resume exactly from any "
                "step."
            )

    def _end_by_steps(self, trainer: pl.Trainer) -> None:
        by_epochs = trainer.max_steps == -1 and trainer.max_epochs not in (None, -1)
        changing = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks_of(trainer))
        if by_epochs and self._epoch_length is not None and not changing:
            trainer.fit_loop.epoch_loop.max_steps = int(trainer.estimated_stepping_batches)
            self._limited_steps = True

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._adopt_reloaded(trainer, chains_of(pl_module))
        self._reseed("epoch")

    def _adopt_reloaded(self, trainer: pl.Trainer, chains: Chains) -> None:
        """Let loaders that the trainer has made since the last epoch continue where the earlier ones stopped."""
        present = [loader for loader in _flat(trainer.train_dataloader) if isinstance(loader, ResumableLoader)]
        if all(any(loader is known for known in self._loaders) for loader in present):
            return
        self._close_loaders()
        self._positions = []
        self._prepare_loaders(trainer, chains.layout.chains if not chains.shared_batch else range(1))
        for loader in self._loaders:
            loader.start_at(self._batches)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._reseed("batch")
        if self._awaits_batches:
            self._awaits_batches = False
            _warn_of_shared(batch)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1

    def _reseed(self, purpose: str) -> None:
        reseed(derive_seed(self._seed, purpose, *self._streams, self._batches), self._device)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self._limited_steps:
            trainer.fit_loop.epoch_loop.max_steps, self._limited_steps = -1, False
        self._close_loaders()

    def _close_loaders(self) -> None:
        for loader in self._loaders:
            loader.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self._batches,
            "epoch_length": self._epoch_length,
            "loaders": [loader.state_dict() for loader in self._loaders],
            "settings": self._settings,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches, self._positions = state_dict["batches"], state_dict["loaders"]
        self._saved_settings = state_dict.get("settings", {})

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        chains = chains_of(pl_module)
        if not chains.accumulation.accumulating:
            return
        chains.collect_gradients()
        kept = {name: p.grad.detach() for name, p in pl_module.named_parameters() if p.grad is not None}
        kept[MEAN_POTENTIAL] = chains.observed.mean_potential
        checkpoint[ACCUMULATED] = {name: chains.layout.gather_unreduced(tensor) for name, tensor in kept.items()}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        saved: Mapping[str, Tensor] = checkpoint.get(ACCUMULATED, {})
        layout = chains_of(pl_module).layout
        self._accumulated = {name: layout.own_unreduced(tensor) for name, tensor in saved.items()}
        own = checkpoint["callbacks"].get(self.state_key, {})
        if own.get("epoch_length") and own["batches"] > 0:
            repair_loop_counts(
                checkpoint["loops"]["fit_loop"], own["batches"], own["epoch_length"], accumulating=bool(saved)
            )


def check_resume(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Compare a run's settings with its checkpoint's now, before anything of the run is changed; see `ExactResume`."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, ExactResume):
            callback.check(trainer, module)


def _warn_of_shared(batch: Any) -> None:
    """Warn that chains share a batch, unless it holds one for each chain."""
    if not isinstance(batch, ChainBatches):
        rank_zero_warn(
            "The training loader has only one data order, so all chains of a process see the same batches: pass a "
            "datamodule (DatasetDataModule accepts any data set) or a ResumableLoader for separate batches, or "
            "shared_batch=True."
        )


def repair_loop_counts(fit_loop: dict[str, Any], batches: int, epoch_length: int, accumulating: bool) -> None:
    """Set the counts of a saved fit loop as if the run had never stopped, at the end of its last batch.

    Args:
        fit_loop: the loop's part of a checkpoint; changed in place.
        batches: batches that the run has trained on, > 0.
        epoch_length: batches of an epoch.
        accumulating: whether the last batch was not the last of its step.
    """
    epoch, before = divmod(batches - 1, epoch_length)
    last = before + 1 == epoch_length
    _set_counts(fit_loop["epoch_loop.batch_progress"], "total", begun=batches, processed=batches, ended=batches - 1)
    _set_counts(fit_loop["epoch_loop.batch_progress"], "current", begun=before + 1, processed=before + 1, ended=before)
    fit_loop["epoch_loop.batch_progress"]["is_last_batch"] = last
    for count in ("total", "current"):
        _set_counts(fit_loop["epoch_progress"], count, begun=epoch + 1, processed=epoch, ended=epoch)
    steps = fit_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = steps if accumulating else steps - 1


def _set_counts(progress: dict[str, Any], count: str, begun: int, processed: int, ended: int) -> None:
    progress[count].update(ready=begun, started=begun, processed=processed, completed=ended)


def _flat(loaders: Any) -> list[Any]:
    """Return the loaders in the trainer's training loader, which may be a collection."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    return [part for loader in loaders for part in _flat(loader)] if isinstance(loaders, list | tuple) else [loaders]
