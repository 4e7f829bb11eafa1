"""Exact resume: the state of a run beyond that of sampler, schedule and callbacks, and the settings that it keeps."""

import inspect
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_sgmcmc.batches.inputs import leaves_of
from lightning_sgmcmc.batches.loader import ChainBatches, ResumableLoader, flat_loaders
from lightning_sgmcmc.chains.callback import RunCallback, text_of
from lightning_sgmcmc.chains.chains import ChainModel, Chains, chain_model, chains_of, sampler_of
from lightning_sgmcmc.chains.layout import FitSeeds, layout_of
from lightning_sgmcmc.chains.row_steps import Controls
from lightning_sgmcmc.chains.starts import text_of_start
from lightning_sgmcmc.chains.trainer import declared, instances_of, is_probe
from lightning_sgmcmc.fit.checkpoints import (
    OF_LIGHTNING,
    ProcessGenerators,
    RunPlace,
    check_entries,
    check_loops,
    repair_loop_counts,
)
from lightning_sgmcmc.fit.loggers import log_settings
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.factories import name_of
from lightning_sgmcmc.samplers.sampler import CONTROLS
from lightning_sgmcmc.seeding import derive_seed, device_text, reseed, reseed_everything, unchanged_generators

ModelCheckpoint = pl.callbacks.ModelCheckpoint

Settings = dict[str, Any]
"""What decides the draws of a run, by name, as plain data."""
ITEMS = 8
TOLERANCE = 1e-3
"""Relative difference of equal data: decoders and augmentation round differently on different machines."""
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
        self._place = RunPlace()
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
            self._place = RunPlace(before=counts.completed, steps_before=trainer.global_step)
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
            changed = check_settings(saved, own, is_seeded(chain_model(pl_module)), self.allow)
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
        others = [loader for loader in loaders if not isinstance(loader, ResumableLoader)]
        self._awaits_batches = len(own) > 1 and not all(map(_has_one_batch, others))
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
        self._count_batches(trainer)

    @property
    def only_counts(self) -> bool:
        return True

    def free_steps(self, first: int, most: int) -> int:
        return 0 if self._awaits_batches else most  # for which `pass_over` is called

    def pass_over(self, trainer: pl.Trainer, batches: int, controls: Sequence[Controls]) -> None:
        self._count_batches(trainer, batches)

    def _count_batches(self, trainer: pl.Trainer, number: int = 1) -> None:
        self._steps_when_begun = None
        self._batches += number
        self._place.count(trainer, number)
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
            self._count_batches(trainer)
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
        self._place = RunPlace.from_saved(own["place"])
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
    states, kind = checkpoint.get("optimizer_states"), "is a checkpoint of an optimizer, not of a sampler"
    if states is None:
        kind = "has weights alone (save_weights_only=True)"
    if states is None or (states and not any("sampler" in state for state in states)):
        raise ValueError(
            f"ckpt_path={path!r} {kind}, so no chain can continue from it: "
            f"start from its weights by chain_start=[{path!r}] (one entry for each chain) or "
            f"{name}.load_from_checkpoint({path!r}), and omit ckpt_path"
        )


def check_resume(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Compare a run's settings with its checkpoint's now, before anything of the run is changed; see `ExactResume`."""
    for callback in instances_of(trainer, ExactResume):
        callback.check(trainer, module)


# -- settings ----------------------------------------------------------------------------------------------------------


def settings_of(trainer: pl.Trainer, module: ChainModel, sampler: Sampler) -> Settings:
    """Return a run's settings by name, as plain data."""
    settings: Settings = {
        "prior": text_of(module.prior),
        "likelihood": text_of(module.likelihood),
        "temperature": _plain(module.temperature),
        "num_data": module.num_data,
        "lr": _lr(module.lr, sampler),
        "seed": module.chains.seeds.stated,
        "sampler": name_of(type(sampler)),
        "chain_start": text_of_start(module.chains.start),
        "sampled": _sampled(module.chains),
    }
    for name in inspect.signature(type(sampler)).parameters:
        values = [group[name] for group in sampler.param_groups if name in group]
        if values and name not in ("params", *CONTROLS) and not any(isinstance(v, Tensor) for v in values):
            settings[f"sampler.{name}"] = _collapsed([_plain(value) for value in values])
    for callback in declared(trainer):
        settings |= {name: _plain(value) for name, value in callback.settings().items()}
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    if isinstance(trainer.train_dataloader, ResumableLoader):
        settings["order"] = text_of(trainer.train_dataloader.order)
    settings["data"] = fingerprint(trainer.train_dataloader)
    return settings


def _sampled(chains: Chains) -> str:
    """Return which parameters are sampled, as text."""
    if not chains.sharing.names:
        return "all"
    return f"{len(chains.trainable)} tensors, crc32 {zlib.crc32(' '.join(chains.trainable).encode()):08x}"


def differences(saved: Settings, own: Settings, seed_given: bool) -> list[str]:
    """Return the names of the settings that differ and that both have; a run without a seed takes the checkpoint's."""
    names = [name for name in own if name in saved and (name != "seed" or seed_given)]
    return [
        name
        for name in names
        if not (is_same_data(saved[name], own[name]) if name == "data" else saved[name] == own[name])
    ]


def check_settings(saved: Settings, own: Settings, seed_given: bool, allow: Sequence[str]) -> list[str]:
    """Return which allowed settings differ from the checkpoint's, and raise if others do; a part stands for its own."""
    unknown = [name for name in allow if not any(is_allowed(key, [name]) for key in own)]
    if unknown:
        raise ValueError(f"allow={list(allow)} names no setting '{unknown[0]}': the settings are {', '.join(own)}")
    different = differences(saved, own, seed_given)
    names = [name for name in different if not is_allowed(name, allow)]
    if not names:
        return different
    listed = "; ".join(f"{name} {_shown(name, saved)} there, {_shown(name, own)} here" for name in names)
    raise ValueError(
        f"the checkpoint is of a run with other settings ({listed}): resume with its settings, start a new run, or "
        f"pass the callback ExactResume(allow={names})"
    )


def is_allowed(name: str, allow: Iterable[str]) -> bool:
    """Return whether a setting, or the part that it belongs to, is among the allowed names."""
    return any(name == one or name.startswith(f"{one}.") for one in allow)


def check_ranks(trainer: pl.Trainer, settings: Settings) -> Settings:
    """Return rank zero's settings; raise unless ranks agree on N, on divided data, and on a shared chain's device."""
    if trainer.world_size == 1 or not torch.distributed.is_initialized():
        return settings
    everyone: list[Any] = [None] * trainer.world_size
    device = f"{device_text(trainer.strategy.root_device)} (torch {torch.__version__})"
    torch.distributed.all_gather_object(everyone, (settings, device))
    first, loader = everyone[0][0], trainer.train_dataloader
    divided = isinstance(loader, ResumableLoader) or isinstance(getattr(loader, "sampler", None), DistributedSampler)
    ranks_per_chain = layout_of(trainer, 1).ranks_per_chain
    for rank, (other, own_device) in enumerate(everyone):
        sharing = rank - rank % ranks_per_chain
        if own_device != everyone[sharing][1]:
            raise ValueError(
                f"rank {rank} runs on {own_device} and rank {sharing} on {everyone[sharing][1]}, whose random numbers "
                "differ, and they share a chain: use one kind of device and one torch for them, or a chain for each "
                "rank (strategy='chains')"
            )
        if other["num_data"] != first["num_data"]:
            raise ValueError(
                f"rank {rank} has {other['num_data']} training data and rank 0 has {first['num_data']}, so they would "
                "sample different posteriors: give every rank the whole data set, of which each takes its share"
            )
        if divided and not is_same_data(other["data"], first["data"]):
            raise ValueError(
                f"rank {rank} has other training data than rank 0: give every rank the same data set, of which each "
                "takes its share"
            )
    return dict(first)


def is_seeded(module: ChainModel) -> bool:
    """Return whether a run was given a seed, by the module's argument or by `seed_everything`."""
    return module.chains.seeds.given is not None or "PL_GLOBAL_SEED" in os.environ


def _plain(value: Any) -> Any:
    """Return numbers, texts and lists of them as they are, and anything else as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else text_of(value)


def _lr(given: Any, sampler: Sampler) -> Any:
    """Return the step size, or one for each chain of the run, or one for each parameter group."""
    values = [group["lr"] for group in sampler.param_groups]
    if isinstance(given, Sequence | Mapping) or any(isinstance(value, Tensor) for value in values):
        return _plain(given)
    return _collapsed([float(value) for value in values])


def _collapsed(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else values


def check_saved(settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless the settings in a checkpoint are plain data."""
    data = settings.get("data", {"length": None, "numbers": []})
    try:
        json.dumps(settings)
        sound = all(isinstance(number, int | float) for number in data["numbers"]) and "length" in data
    except (TypeError, ValueError, LookupError, RecursionError):
        sound = False
    if not sound:
        raise ValueError("the checkpoint is damaged: its settings are no plain data; resume from another")


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    value = settings[name]
    if name != "data":
        return str(value)
    return f"{value['length']} items beginning with {[float(f'{x:.4g}') for x in value['numbers'][:2]]}"


# -- data --------------------------------------------------------------------------------------------------------------


def _has_one_batch(loader: Any) -> bool:
    """Return whether each batch has all data, so that chains that share their batches share no noise."""
    size, data = getattr(loader, "batch_size", None), getattr(loader, "dataset", None)
    return size is not None and isinstance(data, Sized) and len(data) <= size


def fingerprint(loader: Any) -> dict[str, Any]:
    """Return the length of a loader's data set and, if known, one number for each part of a few of its data."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, ResumableLoader | DataLoader) or not hasattr(dataset, "__len__"):
        return {"length": None, "numbers": []}
    length = len(dataset)  # type: ignore[arg-type]
    indices = sorted({round(place * (length - 1) / (ITEMS - 1)) for place in range(ITEMS)}) if length else []
    in_memory = hasattr(dataset, "whole_batch") or hasattr(dataset, "tensors")
    # A data set that only workers read may hold files that must not be opened before.
    if not indices or not (in_memory or loader.num_workers == 0):
        return {"length": length, "numbers": []}
    device = getattr(dataset, "device", None)
    try:
        with unchanged_generators([device] if isinstance(device, torch.device) else []):
            numbers, again = _numbers(dataset, indices, device), _numbers(dataset, indices, device)
    except Exception:  # whatever a data set raises for plain indices: then its data have no numbers
        numbers, again = [], []
    return {"length": length, "numbers": numbers if numbers == again else []}


def is_same_data(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two fingerprints may be of the same data."""
    if first["length"] != second["length"] and None not in (first["length"], second["length"]):
        return False
    one, other = first["numbers"], second["numbers"]
    if not one or not other:
        return True
    close = (math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in zip(one, other, strict=False))
    return len(one) == len(other) and all(close)


def _numbers(dataset: Any, indices: Sequence[int], device: Any) -> list[float]:
    reseed_everything(0)
    if isinstance(device, torch.device):
        reseed(0, device)
    batch = dataset.whole_batch(indices) if hasattr(dataset, "whole_batch") else [dataset[i] for i in indices]
    return [number for leaf in leaves_of(batch) for number in _number(leaf)]


def _number(leaf: Any) -> list[float]:
    """Return a number that depends on all entries of a tensor or array, and on their order."""
    try:
        values = leaf.detach() if isinstance(leaf, Tensor) else torch.as_tensor(np.asarray(leaf))
        values = values.reshape(-1).cpu().double().nan_to_num()
    except (TypeError, ValueError, RuntimeError):
        return []
    weights = torch.linspace(1, 2, len(values), dtype=torch.float64)
    return [float(values @ weights) / max(1, len(values))]
