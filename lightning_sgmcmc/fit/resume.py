"""Exact resume: the state of a run beyond that of sampler, schedule and callbacks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sgmcmc.batches.loader import ChainBatches, ResumableLoader, flat_loaders
from lightning_sgmcmc.chains.callback import RunCallback
from lightning_sgmcmc.chains.chains import Chains, chain_model, chains_of, sampler_of
from lightning_sgmcmc.chains.layout import FitSeeds
from lightning_sgmcmc.chains.trainer import declared, instances_of, is_probe
from lightning_sgmcmc.fit.checkpoints import OF_LIGHTNING, PLACE, ProcessGenerators, check_entries, check_loops
from lightning_sgmcmc.fit.loggers import log_settings
from lightning_sgmcmc.fit.settings import (
    Settings,
    check_ranks,
    check_saved,
    check_settings,
    differences,
    is_allowed,
    is_seeded,
    settings_of,
)
from lightning_sgmcmc.seeding import derive_seed, reseed

ACCUMULATED = "accumulated_gradients"
MEAN_POTENTIAL = "mean_potential of the micro-batches"


class ExactResume(RunCallback):
    """Makes every batch of a run a function of the checkpoint and the seed; every `BayesianModule` adds it to its run.

    * The default generators (dropout, augmentation on the device) are seeded before each batch by (seed, rank, batch),
      and are after the fit where plain Lightning would leave them.
    * A `ResumableLoader` gets the fit's seed. A checkpoint keeps the run's seed and the number of the fit.
    * A checkpoint between the micro-batches of an accumulated step keeps their gradients; one that an error within a
      step saves goes back to where that step began.
    * Lightning's own counts of batches and epochs, which drift in a run that resumes several times, are repaired.
    * A run resumes only with the checkpoint's settings: prior, likelihood, temperature, N, lr, seed, sampler and its
      options, schedule and its arguments, and data. Ranks must agree on N and the data.

    Args:
        allow: names of settings that may differ from the checkpoint's ("lr", "prior", "sampler.friction", "schedule",
            …); this run's values apply, except of the seed. Pass `ExactResume(allow=["lr"])` to the trainer.

    Raises:
        ValueError: at the start of a fit from a checkpoint, if settings differ, with a list of both values.
    """

    entries: ClassVar[Mapping[str, Any]] = {
        "batches": int,
        "fits": int,
        "place": dict,
        "loaders": list,
        "settings": dict,
        "run_seed": int | None,
    }

    def __init__(self, allow: Sequence[str] = ()) -> None:
        if isinstance(allow, str):
            raise TypeError(f"allow must be a list of names, got {allow!r}: pass [{allow!r}]")
        self.allow = tuple(allow)
        self._settings: Settings = {}
        """This run's, at rank zero."""
        self._saved_settings: Settings | None = None
        """The checkpoint's; None unless a checkpoint is loaded."""
        self._new_options: list[dict[str, Any]] = []
        """For each parameter group, the options that replace the checkpoint's."""
        self._batches = 0
        """Batches that the run has trained on, including micro-batches."""
        self._batches_before = 0
        """Batches that were trained on before this fit or resume."""
        self._has_length = False
        self._place = Place()
        self._generators = ProcessGenerators()
        self._seed = 0
        self._run_seed: int | None = None
        self._fits = 0
        """The module's fits before this one."""
        self._chains: list[str] = []
        """Global indices of the chains of this process; ranks that share a chain draw an epoch's order alike."""
        self._streams: list[str] = []
        """Names of the chains' random streams."""
        self._device = torch.device("cpu")
        self._accumulated: dict[str, Tensor] = {}
        """State from a checkpoint between micro-batches: gradients by parameter, and the mean potential."""
        self._loaders: list[ResumableLoader] = []
        self._positions: list[dict[str, Any]] = []
        """The loaders' states in the checkpoint."""
        self._reached: list[int] = []
        """Batches of each loader that the run has trained on, or left out at an epoch's end."""
        self._steps_when_begun: int | None = None
        """Optimizer steps when the present batch began, None between two batches."""
        self._awaits_batches = False
        """Whether the first batch is to show if the chains share batches."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._batches, self._accumulated, self._loaders, self._positions = 0, {}, [], []
            counts = trainer.fit_loop.epoch_loop.batch_progress.total
            self._place = Place(before=counts.completed, steps_before=trainer.global_step)
            self._settings, self._saved_settings, self._new_options = {}, None, []
            self._reached, self._steps_when_begun = [], None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.check(trainer, pl_module)

    def check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the settings with the checkpoint's and among ranks, once; raise ValueError if they differ."""
        if self._settings:
            return
        sampler = sampler_of(pl_module)
        own = check_ranks(trainer, settings_of(trainer, chain_model(pl_module), sampler))
        if getattr(getattr(trainer, "datamodule", None), "restores_data", False):
            own = {name: value for name, value in own.items() if name not in ("num_data", "data")}
        saved = self._saved_settings
        if saved is not None:
            check_settings(saved, own, is_seeded(chain_model(pl_module)), self.allow)
            changed = [name for name in differences(saved, own, False) if is_allowed(name, self.allow)]
            options = [name.removeprefix("sampler.") for name in changed if name.startswith(("lr", "sampler."))]
            self._new_options = [{name: group[name] for name in options} for group in sampler.param_groups]
        self._settings = own
        chains_of(pl_module).progress.steps_before = self._place.steps_before

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        chains, sampler = chains_of(pl_module), sampler_of(pl_module)
        self._generators.begin(trainer, pl_module.device)
        for group, options in zip(sampler.param_groups, self._new_options, strict=False):
            group.update(options | ({"initial_lr": options["lr"]} if "lr" in options else {}))
        resumes, self._batches_before = self._saved_settings is not None, self._batches
        self._run_seed, self._fits, self._seed = chains.seeds.run, chains.seeds.fits, sampler.seed
        self._settings["seed"] = chains.seeds.run if resumes else chains.seeds.stated
        log_settings(trainer, chains.model, self._settings | {"seed": self._seed})
        layout = chains.layout
        self._streams = [layout.stream(chain) for chain in layout.chains]
        self._chains = [str(chain) for chain in layout.chains]
        self._device = pl_module.device
        self._has_length = math.isfinite(trainer.num_training_batches)
        self._prepare_loaders(trainer, chains)
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

    def _note_positions(self) -> None:
        self._reached = [loader.position for loader in self._loaders]

    def begin_chain(self, index: int) -> None:
        """Seed the default generators before a chain's part of a step, by its index in this process."""
        reseed(derive_seed(self._seed, "batch", self._streams[index], self._batches), self._device)

    def _prepare_loaders(self, trainer: pl.Trainer, chains: Chains) -> None:
        loaders = flat_loaders(trainer.train_dataloader)
        own = range(1) if chains.shared_batch else chains.layout.chains
        self._loaders = [loader for loader in loaders if isinstance(loader, ResumableLoader)]
        # Lightning does not load their states at an epoch's end, nor if they were requested early.
        for loader, position in zip(self._loaders, self._positions, strict=False):
            loader.load_state_dict(position)
        for loader in loaders:
            if isinstance(loader, ResumableLoader):
                loader.adopt_seed(self._seed, self._fits)
                loader.adopt_chains(own)
            elif isinstance(loader, torch.utils.data.DataLoader):
                self._generators.seed_workers(loader, self._seed)
        self._note_positions()
        self._awaits_batches = len(self._loaders) < len(loaders) and len(own) > 1
        if len(self._loaders) < len(loaders) and trainer.checkpoint_callbacks:
            rank_zero_warn(
                "With a plain DataLoader, resuming is bit-exact only from checkpoints at the end of an epoch: pass a "
                "datamodule (DatasetDataModule accepts any data set) or a ResumableLoader to resume exactly from any "
                "step."
            )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._place.begins_epoch = True
        self._generators.begin_epoch(trainer)
        self._adopt_reloaded(trainer, chains_of(pl_module))
        self._reseed("epoch")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._generators.begin_validation(trainer)

    def _adopt_reloaded(self, trainer: pl.Trainer, chains: Chains) -> None:
        """Let loaders that the trainer has made since the last epoch continue where the earlier ones stopped."""
        present = [loader for loader in flat_loaders(trainer.train_dataloader) if isinstance(loader, ResumableLoader)]
        if all(any(loader is known for known in self._loaders) for loader in present):
            return
        self._close_loaders()
        self._positions = []
        self._prepare_loaders(trainer, chains)
        for loader in self._loaders:
            loader.start_at(self._batches)
        self._note_positions()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._steps_when_begun = trainer.global_step
        self._reseed("batch")
        if self._awaits_batches and not isinstance(batch, ChainBatches):
            rank_zero_warn(
                "The training loader has only one data order, so all chains of a process see the same batches: pass a "
                "datamodule (DatasetDataModule accepts any data set) or a ResumableLoader for separate batches, or "
                "shared_batch=True."
            )
        self._awaits_batches = False

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._count_batch(trainer)

    def _count_batch(self, trainer: pl.Trainer) -> None:
        self._steps_when_begun = None
        self._batches += 1
        self._place.count(trainer)
        self._note_positions()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note_positions()
        self._place.end_epoch(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave_batch(trainer, pl_module)
        self._end(trainer, pl_module)

    def _leave_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After an error within a batch, count it if its step is made, else go back to where its step began."""
        begun, self._steps_when_begun = self._steps_when_begun, None
        if begun is None:
            return
        if trainer.global_step > begun:
            self._count_batch(trainer)
            return
        within = 0 if self._place.begins_epoch else self._place.in_epoch % trainer.accumulate_grad_batches
        self._batches -= within
        self._place.in_epoch -= within
        self._reached = [position - within for position in self._reached]
        chains_of(pl_module).accumulation.accumulating = False
        guard = sampler_of(pl_module).guard
        if guard is not None:
            guard.leave_step()

    def _end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the process's generators back, and count the fit if it has made a step."""
        if not self._generators.is_kept:
            return
        self._generators.end()
        self._close_loaders()
        if self._batches > self._batches_before and not is_probe(trainer):
            chains_of(pl_module).seeds.end_fit()

    def _reseed(self, purpose: str) -> None:
        names = self._chains if purpose == "epoch" else self._streams
        reseed(derive_seed(self._seed, purpose, *names, self._batches), self._device)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._end(trainer, pl_module)  # a fit that Lightning's tuner has left calls no other hook

    def _close_loaders(self) -> None:
        for loader in self._loaders:
            loader.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self._batches,
            "run_seed": self._run_seed,
            "fits": self._fits,
            "place": self._place.state_dict(),
            "has_length": self._has_length,
            "loaders": [
                loader.state_dict() | {"batches": reached}
                for loader, reached in zip(self._loaders, self._reached, strict=True)
            ],
            "settings": self._settings,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches, self._positions = state_dict["batches"], state_dict["loaders"]
        self._saved_settings = state_dict["settings"]
        check_saved(self._saved_settings)

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
        check_loops(checkpoint.get("loops", {}).get("fit_loop"), trainer.fit_loop.state_dict(), "loops.fit_loop")
        saved: Mapping[str, Tensor] = checkpoint.get(ACCUMULATED, {})
        layout = chains_of(pl_module).layout
        self._accumulated = {name: layout.own_unreduced(tensor) for name, tensor in saved.items()}
        own = checkpoint["callbacks"].get(self.state_key)
        if own is None:  # plain Lightning wrote the checkpoint
            chains_of(pl_module).seeds.resume(None, 0)
            return
        chains_of(pl_module).seeds.resume(own["run_seed"], own["fits"])
        check_loops(own["place"], Place().state_dict(), PLACE)
        place = {name: own["place"][name] for name in Place().state_dict()}
        self._place = Place(**place, begins_epoch=place["is_over"])
        if own["batches"] > 0 and own["has_length"]:
            repair_loop_counts(checkpoint["loops"]["fit_loop"], own["batches"], self._place, accumulating=bool(saved))


def count_saved_fit(seeds: FitSeeds, checkpoint: Mapping[str, Any], trainer: pl.Trainer | None) -> None:
    """Let a module's coming fit be the one after a checkpoint's; a checkpoint of plain Lightning has none."""
    states, own = checkpoint.get("callbacks", {}), ExactResume()
    check_entries(own, own.entries, states)
    for callback in declared(trainer) if trainer is not None else ():
        check_entries(callback, callback.entries, states)
    for keeper in instances_of(trainer, ModelCheckpoint) if trainer is not None else ():
        check_entries(keeper, OF_LIGHTNING, states)
    if own.state_key in states:
        seeds.resume(None, max(seeds.fits, states[own.state_key]["fits"] + 1))


def check_continues(checkpoint: Mapping[str, Any], path: str, name: str) -> None:
    """Raise unless a chain can continue from a checkpoint."""
    states = checkpoint.get("optimizer_states") or []
    if states and not any("sampler" in state for state in states):
        raise ValueError(
            f"ckpt_path={path!r} is a checkpoint of an optimizer, not of a sampler, so no chain can continue from it: "
            f"start from its weights by chain_start=[{path!r}] (one entry for each chain) or "
            f"{name}.load_from_checkpoint({path!r}), and omit ckpt_path"
        )


def check_resume(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Compare a run's settings with its checkpoint's now, before anything of the run is changed; see `ExactResume`."""
    for callback in instances_of(trainer, ExactResume):
        callback.check(trainer, module)


# -- loop counts -------------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """Where a run is, by its own counts of epochs over all fits of the trainer, and of batches in the epoch."""

    epoch: int = 0
    in_epoch: int = 0
    is_over: bool = False
    before: int = 0
    """Batches of the trainer's earlier fits."""
    steps_before: int = 0
    begins_epoch: bool = True

    def count(self, trainer: pl.Trainer) -> None:
        """Count a batch that has ended; the first of an epoch begins it."""
        if self.begins_epoch:
            self.epoch, self.in_epoch, self.begins_epoch = trainer.current_epoch, 0, False
        self.in_epoch += 1
        self.is_over = trainer.is_last_batch

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """End an epoch that a callback has cut short; a run that ends in mid-epoch may go on there."""
        by_steps = 0 <= trainer.max_steps <= trainer.global_step
        self.is_over = self.is_over or not (by_steps or trainer.should_stop)

    def state_dict(self) -> dict[str, int | bool]:
        """Return the place as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "begins_epoch"}


def repair_loop_counts(fit_loop: dict[str, Any], batches: int, place: Place, accumulating: bool) -> None:
    """Set the counts of a saved fit loop, in place, as if the run had never stopped at the end of its last batch."""
    total, over = place.before + batches, place.is_over
    # Within an epoch as in the hook at a batch's end; after one as before the next, whose hooks are still to be called.
    pending = int(not over)
    within, epochs = (0, place.epoch + 1) if over else (place.in_epoch, place.epoch)
    progress = fit_loop["epoch_loop.batch_progress"]
    _set_counts(progress, "total", begun=total, processed=total, ended=total - pending)
    _set_counts(progress, "current", begun=within, processed=within, ended=within - pending)
    progress["is_last_batch"] = False
    for count in ("total", "current"):
        _set_counts(fit_loop["epoch_progress"], count, begun=epochs + pending, processed=epochs, ended=epochs)
    steps = fit_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = steps if accumulating or over else steps - 1


def _set_counts(progress: dict[str, Any], count: str, begun: int, processed: int, ended: int) -> None:
    progress[count].update(ready=begun, started=begun, processed=processed, completed=ended)
