"""What comes in a fit whose steps are made in blocks: batches, several at once, controls, and the ends of epochs.

A schedule sets step size and temperature by the number of a step alone. Those of the coming steps are therefore known
before the steps are made, and so is the next step whose states are samples.

What Lightning does between two epochs takes longer than an epoch of a small network with few data. Where no callback,
logger, validation or checkpoint acts there, the next epoch begins within a block: the counts go on, this library's
callbacks are called, and the loader's next pass begins, as in Lightning's own loop.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from lightning_sgmcmc.batches.loader import ChainBatches, ResumableLoader
from lightning_sgmcmc.chains.callback import PlannedSchedule, RunCallback
from lightning_sgmcmc.chains.chains import ChainModel, sampler_of
from lightning_sgmcmc.chains.row_steps import Controls
from lightning_sgmcmc.chains.trainer import callbacks_of, declared, log_interval
from lightning_sgmcmc.namespace import fabric, pl
from lightning_sgmcmc.process import room_for_data
from lightning_sgmcmc.tensors import sent, version_of

_set_sampler_epoch = fabric.utilities.data._set_sampler_epoch
LearningRateMonitor = pl.callbacks.LearningRateMonitor
ModelCheckpoint = pl.callbacks.ModelCheckpoint
ProgressBar = pl.callbacks.ProgressBar
Timer = pl.callbacks.Timer

START, END = "on_train_epoch_start", "on_train_epoch_end"
SEEN = (ModelCheckpoint, ProgressBar, LearningRateMonitor)
"""Lightning's callbacks, which act in the steps and ends of epochs that it sees."""
LIGHTNING = f"{pl.__name__}."
OWN = f"{__name__.partition('.')[0]}."


# -- batches -----------------------------------------------------------------------------------------------------------


class RowsOfTensors:
    """Gathers the rows of a batch of a `TensorDataset` at once, in place of item by item; the batch is the same."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def fetch(self, rows: list[int]) -> list[Tensor]:
        """Return the batch of some rows."""
        at = torch.from_numpy(np.array(rows, dtype=np.int64))
        return [tensor[at] for tensor in self._tensors]


class DataOnDevice:
    """Copies of the data on a GPU, of which batches consist there: to gather a batch in the host's memory and to send
    it takes longer than the steps of a small network.

    A copy is made again when its data have changed. Data that would take more than a share of the free memory are not
    copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}

    def copies_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the device, or as they are."""
        there = [tensor for tensor in tensors if tensor.device != self.device]
        if not there or self.device.type != "cuda":
            return list(tensors)
        if any(self._copy_of(tensor) is None for tensor in there):
            size = sum(tensor.nbytes for tensor in there)
            if size >= room_for_data(self.device):
                return list(tensors)
            self._known = {id(own): (own, version_of(own), own.to(self.device)) for own in there}
        return [tensor if (copy := self._copy_of(tensor)) is None else copy for tensor in tensors]

    def _copy_of(self, tensor: Tensor) -> Tensor | None:
        own, version, copy = self._known.get(id(tensor), (None, 0, None))
        return copy if own is tensor and version == version_of(tensor) else None


class Taken:
    """Batches of some steps.

    A step's batches are one batch or, if it chooses among J candidates, J batches, each of as many.

    Attributes:
        sizes: data of each batch and chain; empty if they differ between chains.
        each: batches of a step; the last step may have fewer.
        axis: 0 if chains have batches of their own, else None.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        rows: Sequence[tuple[Tensor, list[int]]],
        kind: type,
        size: int | None,
        each: int,
    ) -> None:
        self._tensors, self._rows, self._kind, self.each = tensors, rows, kind, each
        self.count = len(rows[0][1])
        """The number of batches."""
        self.axis = None if len(rows) == 1 else 0
        sizes = rows[0][1]
        self.sizes = sizes if all([own == sizes for _, own in rows]) else []
        self._size = max(min(size or 0, tensors[0].shape[0]), *sizes)  # a batch may be all data, and fewer than wished

    @property
    def structure(self) -> pytree.TreeSpec:
        """What the tensors of a batch are the leaves of."""
        return pytree.tree_structure(self._kind(self._tensors))

    def is_like(self, other: "Taken") -> bool:
        """Return whether the batches have one size, and are of the same data."""
        same = all([one is own for one, own in zip(self._tensors, other._tensors, strict=True)])
        return same and self._size == other._size and self.axis == other.axis

    def batches_of(self, step: int) -> range:
        """Return the places of a step's batches; a number below 0 counts from the last step."""
        first = step % math.ceil(self.count / self.each) * self.each
        return range(first, min(first + self.each, self.count))

    @torch.no_grad()
    def parts(
        self, following: Sequence["Taken"], candidates: int, data: "DataOnDevice", memory: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Return the tensors of the batches of these steps and of those that follow, shape (K, ..., B, ...).

        They have an axis of candidates after that of steps if there are several, and one of chains before B if chains
        have batches of their own. Shorter batches are filled up with copies of their first datum.

        Args:
            memory: where they are put if they suit it, each of that shape or for more steps.
        """
        chains = range(len(self._rows))
        filled = [[own._filled(own._rows[chain][0], candidates) for own in (self, *following)] for chain in chains]
        of_chains = [torch.cat(own) if following else own[0] for own in filled]
        at = of_chains[0] if self.axis is None else torch.stack(of_chains, -2)
        flat, tensors, rooms = at.flatten(), data.copies_of(self._tensors), dict(enumerate(memory))
        found = [
            torch.index_select(tensor, 0, sent(flat, tensor.device), out=_room_in(rooms.get(place), at, tensor))
            for place, tensor in enumerate(tensors)
        ]
        return [sent(part, data.device).view(*at.shape, *part.shape[1:]) for part in found]

    def _filled(self, rows: Tensor, candidates: int) -> Tensor:
        """Return the data of all steps, shape (K, B) or (K, J, B)."""
        size, sizes = self._size, self.sizes
        missing = size * len(sizes) - rows.shape[0]
        if 0 < missing == size - sizes[-1]:  # only the last one is short
            rows = torch.cat([rows, rows[-sizes[-1] :][:1].expand(missing)])
        elif missing:
            rows = torch.cat([torch.cat([own, own[:1].expand(size - own.shape[0])]) for own in rows.split(sizes)])
        return self._of_steps(rows.view(-1, size), candidates)

    def _of_steps(self, batches: Tensor, candidates: int) -> Tensor:
        """Return numbers of each batch, shape (n, B), as those of steps; copies of the last fill up the last step."""
        lacking = -len(batches) % self.each
        whole = torch.cat([batches, batches[-1:].expand(lacking, -1)]) if lacking else batches
        return whole.reshape(-1, *([candidates] if candidates > 1 else []), whole.shape[1] * self.each // candidates)

    @property
    def ends_short(self) -> bool:
        """Whether the last step is filled up."""
        return bool(self.sizes) and (self.sizes[-1] < self._size or self.count % self.each > 0)

    def weights(self, factors: Sequence[float | None], dtype: torch.dtype, candidates: int = 1) -> Tensor:
        """Return the weights of the data's log-likelihoods in Ũ/N, shape (K, B) or (K, J, B), by each batch's factor,
        see `DataWeights`."""
        own = [1 / size if factor is None else factor for size, factor in zip(self.sizes, factors, strict=True)]
        counts = self.in_candidates([1] * self.count, candidates).repeat_interleave(self.each // candidates, 1)
        averaged = torch.tensor(own, dtype=dtype) / counts.flatten()[: self.count]
        is_own = torch.arange(self._size) < torch.tensor(self.sizes)[:, None]
        found = self._of_steps(is_own * averaged[:, None], candidates)
        if lacking := -self.count % self.each:
            found.view(-1, self._size)[-lacking:] = 0
        return found

    def in_candidates(self, numbers: list[int], candidates: int) -> Tensor:
        """Return the sum of the numbers of each candidate's batches, shape (K, J)."""
        lacking = -len(numbers) % self.each
        return torch.tensor(numbers + [0] * lacking).view(-1, candidates, self.each // candidates).sum(-1)

    def batch(self, place: int) -> Any:
        """Return a step's batch as the loader would."""
        at = [rows.split(sizes)[place] for rows, sizes in self._rows]
        own = [self._kind(tensor[rows] for tensor in self._tensors) for rows in at]
        return own[0] if len(own) == 1 else ChainBatches(own)


def _room_in(memory: Tensor | None, rows: Tensor, tensor: Tensor) -> Tensor | None:
    """Return the part of some memory that takes such rows of a tensor, one after the other, if it suits them."""
    shape = *rows.shape[1:], *tensor.shape[1:]
    if memory is None or memory.shape[1:] != shape or len(memory) < len(rows) or not memory.is_contiguous():
        return None
    is_alike = (memory.dtype, memory.device) == (tensor.dtype, tensor.device)
    return memory[: len(rows)].view(-1, *tensor.shape[1:]) if is_alike else None


class RowsOfPass:
    """Takes batches of tensors in memory out of a trainer's pass over its only loader, several at once.

    Args:
        taken: returns, for each chain, the indices of the next batches, one after the other, and their sizes.
        kind: the class of a batch, list or tuple.
        size: data in a batch that is not short, None if unknown.
        chains: how many have batches of their own; 1 for one that all share.
    """

    def __init__(
        self,
        fetcher: Any,
        tensors: Sequence[Tensor],
        taken: Callable[[int], list[tuple[Tensor, list[int]]]],
        kind: type,
        size: int | None,
        chains: int = 1,
    ) -> None:
        self._fetcher = fetcher
        self._tensors = tensors
        self._taken = taken
        self._kind = kind
        self._size = size
        self._chains = chains

    @property
    def numbers(self) -> int:
        """Numbers of the next batches of all chains."""
        rows = len(self._tensors[0]) if self._size is None else self._size
        return max(1, self._chains * rows * sum(tensor[0].numel() for tensor in self._tensors))

    @property
    def is_done(self) -> bool:
        """Whether the pass's last batch is taken."""
        return bool(self._fetcher.done)

    def take(self, count: int, each: int = 1) -> Taken:
        """Return the next batches, of steps with so many each."""
        taken = Taken(self._tensors, self._taken(count), self._kind, self._size, each)
        self._fetcher.fetched += count
        self._fetcher.done = self._fetcher.fetched >= self._fetcher.length
        self._fetcher.iterator._iterator._idx += count
        return taken


def rows_of_pass(fetcher: Any) -> RowsOfPass | None:
    """Return a pass over tensors in memory, None for other data; a plain loader gathers each batch at once from now
    on."""
    combined = fetcher.combined_loader
    passes, loaders = getattr(combined._iterator, "iterators", []), combined.flattened
    if (
        len(passes) != 1
        or len(loaders) != 1
        or fetcher.length is None
        or not isinstance(combined.iterables, type(loaders[0]))
    ):
        return None
    (own,), (loader,) = passes, loaders
    if isinstance(loader, ResumableLoader):
        tensors = loader.plain_tensors
        batches = loader.kind_of_batch, loader.batch_size, len(loader.chains)
        return None if tensors is None else RowsOfPass(fetcher, tensors, loader.take, *batches)
    if type(loader) is not DataLoader or type(own) is not _SingleProcessDataLoaderIter or loader.pin_memory:
        return None
    if (
        loader.collate_fn is not default_collate
        or type(loader.dataset) is not TensorDataset
        or loader.batch_sampler is None
    ):
        return None
    if not isinstance(own._dataset_fetcher, RowsOfTensors):
        own._dataset_fetcher = RowsOfTensors(loader.dataset)

    def take(count: int) -> list[tuple[Tensor, list[int]]]:
        own._num_yielded += count
        batches = [next(own._sampler_iter) for _ in range(count)]
        rows = np.fromiter(itertools.chain.from_iterable(batches), np.int64)
        return [(torch.from_numpy(rows), [len(batch) for batch in batches])]

    return RowsOfPass(fetcher, loader.dataset.tensors, take, list, loader.batch_size)


# -- ends of epochs ----------------------------------------------------------------------------------------------------


class HiddenEpochs:
    """Ends epochs of a fit and begins the next ones, where nothing else acts between them."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self._module = module
        callbacks = callbacks_of(trainer)
        self._hooks = {name: hooks_of(trainer, name) for name in (START, END)}
        self._acting = [c for c in callbacks if not isinstance(c, SEEN) and (defines(c, START) or defines(c, END))]
        self._keepers = [c._every_n_epochs for c in callbacks if isinstance(c, ModelCheckpoint)]
        self._may_turn = (
            trainer.reload_dataloaders_every_n_epochs == 0
            and not module.replaces(START)
            and not module.replaces(END)
            and all(_is_known_to_act(callback) for callback in callbacks)
        )

    @property
    def only_counts(self) -> bool:
        """Whether nothing that happens between two epochs looks at the state of the chains."""
        return all(isinstance(callback, RunCallback) and callback.only_counts for callback in self._acting)

    def hides(self, has_validation: bool) -> bool:
        """Return whether the present epoch's end may be one that Lightning does not see, in a fit that has batches to
        validate with or not."""
        trainer, loops = self._trainer, self._trainer.fit_loop
        loop, coming = loops.epoch_loop, trainer.current_epoch + 1
        if not self._may_turn or loops.restarting or loop.restarting or loops.is_resuming:
            return False
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= coming:
            return False
        if any(every >= 1 and coming % every == 0 for every in self._keepers):
            return False
        if has_validation and loop._should_check_val_epoch():
            return False
        return not any(True for _ in loop._results.valid_items())  # what is logged of an epoch is reduced at its end

    def turn(self, fetcher: Any) -> None:
        """End the epoch whose last batch is made, and begin the next one."""
        trainer, module, loops = self._trainer, self._module, self._trainer.fit_loop
        loop, epochs = loops.epoch_loop, loops.epoch_progress
        trainer._logger_connector.epoch_end_reached()
        epochs.increment_processed()
        for hook in self._hooks[END]:
            hook(trainer, module)
        epochs.increment_completed()
        for loader in fetcher.combined_loader.flattened:
            _set_sampler_epoch(loader, epochs.current.processed)
        epochs.increment_ready()
        for hook in self._hooks[START]:
            hook(trainer, module)
        epochs.increment_started()
        loop.batch_progress.reset_on_run()
        loop.scheduler_progress.reset_on_run()
        loop.automatic_optimization.optim_progress.reset_on_run()
        loop.val_loop.batch_progress.total.reset()
        iter(fetcher)


def validates(trainer: Any) -> bool:
    """Return whether a fit has batches to validate with, as far as that is known."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return trainer.enable_validation and (loop._combined_loader is None or not loop.skip)


def _is_known_to_act(callback: pl.Callback) -> bool:
    """Return whether it is known what a callback does between epochs."""
    if isinstance(callback, ModelCheckpoint | ProgressBar):
        hooks = {START, END}
        return not hooks & vars(callback).keys() and all(
            definer(callback, name).__module__.startswith(LIGHTNING) for name in hooks
        )
    if isinstance(callback, Timer) and callback._interval == "epoch":
        return False  # it may end the run there
    return all(is_known(callback, name) for name in (START, END))


# -- controls, and the next step that is seen --------------------------------------------------------------------------


class ComingControls:
    """The controls of the steps that follow the sampler's last one.

    Args:
        acting: the callbacks that may change the schedule's controls.
    """

    def __init__(self, trainer: pl.Trainer, module: ChainModel, acting: Sequence[RunCallback]) -> None:
        self._module, self._sampler, self._acting = module, sampler_of(module), acting
        self._schedule: PlannedSchedule | None = next(
            (plan for callback in declared(trainer) if (plan := callback.as_schedule()) is not None), None
        )

    def apply(self, step: int) -> None:
        """Set the schedule's controls of a step, the sampler's so many-th."""
        own = self._own(step)
        if self._schedule is not None and own > 0:
            self._schedule.apply(own, self._module, self._sampler)

    def of_steps(self, count: int) -> tuple[list[Controls], int, Any]:
        """Return the controls of the coming steps, up to the first with others than numbers that differ, how many
        these are, and what the controls are."""
        sampler = self._sampler
        groups = sampler.param_groups
        controls = [Controls([], []) for _ in groups]
        first, form = sampler.step_count + 1, None
        ahead = 0
        while ahead < count:
            self.apply(first + ahead)
            changed = [self._changed(group) for group in groups]
            own = [(sampler.is_noisy(g), g.get("adapting"), type(g["lr"]), type(g["temperature"])) for g in changed]
            if form is not None and own != form:
                self.apply(first + ahead - 1)
                return controls, ahead, form
            form = own
            alike = min(self.steps_alike(first + ahead), count - ahead)
            for kept, group in zip(controls, changed, strict=True):
                kept.lr.extend([group["lr"]] * alike)
                kept.temperature.extend([group["temperature"]] * alike)
            ahead += alike
        return controls, count, form

    def until_samples(self, most: int) -> int | None:
        """Return how many of the coming steps come up to the next whose states are samples, None if it is not among
        so many."""
        schedule, own = self._schedule, self._own(self._sampler.step_count)
        if schedule is None:
            return None
        return next((ahead for ahead in range(max(1, 1 - own), most + 1) if schedule.draws(own + ahead)), None)

    def _changed(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group with the controls of the coming steps, which callbacks may change."""
        for callback in self._acting:
            group = {**group, **changed} if (changed := callback.step_controls(group)) else group
        return group

    def steps_alike(self, step: int) -> int:
        """Return how many steps, from one on, have the same controls."""
        own = self._own(step)
        return self._schedule.steps_alike(own) if self._schedule is not None and own > 0 else 1

    def _own(self, step: int) -> int:
        """Return a step's number in the schedule, from 1; below that it belongs to a warm start."""
        return step - self._module.chains.progress.warm_steps


class NextSeen:
    """Finds the next step that Lightning must see: one that is logged, saved, shown, validated after, or a sample."""

    def __init__(self, trainer: Any, controls: ComingControls, epochs: HiddenEpochs) -> None:
        self._trainer, self._controls, self._epochs = trainer, controls, epochs
        self._loop: Any = trainer.fit_loop.epoch_loop
        keepers = [c for c in callbacks_of(trainer) if isinstance(c, ModelCheckpoint)]
        self._keepers = [keeper._every_n_train_steps for keeper in keepers]
        self._clocks = [(k, k._train_time_interval.total_seconds()) for k in keepers if k._train_time_interval]
        """Checkpoints by time, and their seconds."""
        self._rates = [getattr(c, "refresh_rate", 1) for c in callbacks_of(trainer) if isinstance(c, ProgressBar)]
        self._has_validation = False

    def begin(self) -> None:
        """Note whether the fit validates, before steps are made."""
        self._has_validation = validates(self._trainer)

    @property
    def left(self) -> int:
        """The number of steps up to the end of the present epoch, with that of the coming batch."""
        each = self._trainer.accumulate_grad_batches
        return math.ceil(self._trainer.num_training_batches / each) - (self._loop.batch_idx + 1) // each

    def within(self, most: int, late: bool) -> tuple[int, bool]:
        """Return how many of the coming steps, of so many, come up to the next that Lightning sees or that ends an
        epoch, and whether Lightning sees that.

        Args:
            late: whether progress bars wait for a step.
        """
        trainer, loop = self._trainer, self._loop
        batch, each = loop.batch_idx + 1, trainer.accumulate_grad_batches
        now = time.monotonic() if self._clocks else 0.0
        is_time = any(now - (keeper._last_time_checked or 0.0) >= interval for keeper, interval in self._clocks)
        if trainer.should_stop or trainer.received_sigterm or is_time:
            return 1, True
        due, every = self._due(), trainer.val_check_batch
        may_validate = self._has_validation and loop._should_check_val_epoch()
        if may_validate and every is not None and not math.isinf(every):
            ahead = every - (loop.total_batch_idx + 1 if trainer.check_val_every_n_epoch is None else batch) % every
            due.append(math.ceil((batch % each + ahead) / each))
        end = self.left
        if late:
            due.append(next((ahead for ahead in range(1, end) if self._shows((batch // each + ahead) * each)), end))
        count = min(most, end, *due)
        if (samples := self._controls.until_samples(count)) is not None:
            count = samples
            due.append(samples)
        is_seen = count in due or (count == end and not self.hides_epoch())
        return count, is_seen

    def _due(self) -> list[int]:
        """Return in how many steps come those that Lightning sees for their number in the run."""
        trainer, step = self._trainer, self._trainer.global_step
        due = [every - step % every for every in self._keepers if every >= 1]
        if trainer.max_steps >= 0:
            due.append(max(1, trainer.max_steps - step))
        if trainer.loggers:
            interval = log_interval(trainer)
            due.append(interval - self._loop._batches_that_stepped % interval)
        return due

    def unseen(self, most: int) -> int:
        """Return how many of the coming steps, of so many, Lightning sees only if it sees their epoch's end."""
        count = min([most, *[due - 1 for due in self._due()]])
        samples = self._controls.until_samples(count)
        return count if samples is None else samples - 1

    def hides_epoch(self) -> bool:
        """Return whether the present epoch's end may be hidden from Lightning, see `HiddenEpochs`."""
        return self._epochs.hides(self._has_validation)

    def _shows(self, coming: int) -> bool:
        """Return whether progress bars show the coming step."""
        return all(rate < 1 or coming % rate == 0 for rate in self._rates)


# -- hooks of callbacks ------------------------------------------------------------------------------------------------


def idle(*arguments: Any, **named: Any) -> None:
    """Stands for an empty hook: whoever else calls it can, and Lightning leaves it out."""


def is_known(callback: pl.Callback, name: str) -> bool:
    """Return whether a callback's hook is Lightning's empty one, or one of this library or of its timer."""
    if vars(callback).get(name, idle) is not idle:
        return False
    kind = definer(callback, name)
    return kind in (pl.Callback, Timer) or (isinstance(callback, RunCallback) and kind.__module__.startswith(OWN))


def definer(part: Any, name: str) -> type:
    """Return the class from which an object has a method."""
    return next((kind for kind in type(part).__mro__ if name in vars(kind)), object)


def hooks_of(trainer: pl.Trainer, name: str) -> list[Callable[..., Any]]:
    """Return the hooks of a name that are called in blocks: those of all callbacks but of Lightning's that it sees."""
    called = [callback for callback in callbacks_of(trainer) if not isinstance(callback, SEEN)]
    return [getattr(callback, name) for callback in called if defines(callback, name)]


def defines(callback: pl.Callback, name: str) -> bool:
    """Return whether a callback's class has a hook of its own in the place of the empty one."""
    return getattr(type(callback), name, None) is not getattr(pl.Callback, name)
