"""Checkpoints: a file is complete or absent, and what comes from elsewhere has the form that readers expect."""

import pickle
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zipfile import is_zipfile

import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_sgmcmc.batches.loader import ResumableLoader, flat_loaders
from lightning_sgmcmc.chains.joined import GappyFile, JoinedRows
from lightning_sgmcmc.chains.layout import dist_is_used
from lightning_sgmcmc.files import (
    check_regular,
    free_space,
    is_remote,
    is_secret,
    make_folder,
    megabytes,
    plain_path,
    remove_left_over,
    write_atomically,
)
from lightning_sgmcmc.namespace import fabric, pl
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.manifest import MANIFEST
from lightning_sgmcmc.seeding import GeneratorStates, derive_seed

if TYPE_CHECKING:
    from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
else:
    TorchCheckpointIO = fabric.plugins.io.torch_io.TorchCheckpointIO
pl_load = fabric.utilities.cloud_io._load
get_filesystem = fabric.utilities.cloud_io.get_filesystem


def check_common(what: str, find: Callable[[], Path | None], mark: Callable[[Path], Any]) -> Any:
    """Return what `find` does, or raise its error, once all ranks have seen the same there by `mark`; all call it."""
    distributed = dist_is_used()
    path, error, seen = None, None, None
    try:
        path = find()
        seen = mark(path) if distributed and path is not None else None
    except ValueError as raised:
        error = raised
    if distributed:
        own = (socket.gethostname(), str((path or Path()).absolute()), seen)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        _compare(what, everyone)
    if error is not None:
        raise error
    return path


def _compare(what: str, everyone: list[Any]) -> None:
    node, where, first = everyone[0]
    for rank, (own_node, own_where, mark) in enumerate(everyone):
        if mark == first:
            continue
        seer, blind = ((0, node, where), (rank, own_node, own_where))
        if first is None:
            seer, blind = blind, seer
        sees = "does not see" if None in (mark, first) else "sees other files than"
        raise ValueError(
            f"rank {blind[0]} on node {blind[1]} (in {blind[2]}) {sees} {what} of rank {seer[0]} on node {seer[1]} (in "
            f"{seer[2]}): ranks read the run's samples and checkpoints, so let default_root_dir, dirpath and ckpt_path "
            "name a folder that all nodes share, or run on one node"
        )


def mark_of_store(path: Path) -> str | None:
    """Return what identifies a store, None if there is none."""
    if not (path / MANIFEST).exists():
        return None
    return DiskStore(path, skip_damaged=True).run_id


def _mark_of_checkpoint(path: Path) -> str | None:
    if path.is_file():
        return f"{path.stat().st_size} bytes"
    return "a folder" if path.is_dir() else None


# -- checkpoints -------------------------------------------------------------------------------------------------------


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file in the same folder and renames it, so that a kill leaves the old one."""

    def __init__(self, maps: bool = False) -> None:
        super().__init__()
        self._maps = maps
        """Whether each process reads only a part of a checkpoint, so that the file is mapped into memory."""

    def joins(self, path: Any) -> bool:
        """Return whether a checkpoint there can have gaps, which other processes fill."""
        return isinstance(get_filesystem(path), LocalFileSystem)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: Any,
        storage_options: Any | None = None,
        joined: JoinedRows | None = None,
    ) -> None:
        """Write a checkpoint, without holding its bytes; other processes write the tensors of `joined`."""
        if storage_options is not None or not self.joins(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place, size = plain_path(path), 0

        def write(file: BinaryIO) -> None:
            nonlocal size
            gappy: Any = GappyFile(file, [] if joined is None else joined.wholes)
            torch.save(checkpoint, gappy)
            size = gappy.size
            gappy.check()
            if joined is not None and gappy.has_all_gaps:
                joined.write(Path(file.name), gappy.offsets)
            elif joined is not None:
                joined.fill()
                file.seek(0)
                torch.save(checkpoint, file)

        try:
            make_folder(place.parent)
            write_atomically(place, write)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the checkpoint {place}{f' of {megabytes(size)}' if size else ''} could not be written: "
                f"{error.strerror}{free_space(place.parent)}; earlier checkpoints and samples are complete: free "
                "or repair the disk, and resume from the last one",
            ) from error

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return a checkpoint's content; weights_only=False unpickles any object, which runs its code."""
        file_system = get_filesystem(path)
        if isinstance(file_system, LocalFileSystem):
            check_common("the checkpoint", lambda: plain_path(path), _mark_of_checkpoint)  # ranks read it together
        if not file_system.exists(path):
            raise FileNotFoundError(f"Checkpoint file not found: {path}: pass the path of an existing one as ckpt_path")
        try:
            if isinstance(file_system, LocalFileSystem):
                check_regular(plain_path(path).resolve())
            content = self._load(path, map_location, weights_only is not False)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"the checkpoint {path} contains more than tensors and plain data ({_first_line(error)}): if you trust "
                "its writer, pass weights_only=False to the trainer's method; otherwise do not use it"
            ) from error
        except Exception as error:  # a damaged archive can raise anything
            raise ValueError(f"the checkpoint {path} is damaged ({_first_line(error)}): resume from another") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} is not a checkpoint: it contains a {type(content).__name__}")
        _check_form(content, path)
        return content

    def _load(self, path: Any, map_location: Any, weights_only: bool) -> Any:
        mapped = self._maps and isinstance(get_filesystem(path), LocalFileSystem) and is_zipfile(plain_path(path))
        if not mapped:
            return pl_load(path, map_location=map_location, weights_only=weights_only)
        content = torch.load(plain_path(path), map_location=map_location, weights_only=weights_only, mmap=True)
        if isinstance(content, dict):  # the strategy copies its part of these; what others keep must outlive the file
            for name in content.keys() - {"state_dict", "optimizer_states"}:
                content[name] = pytree.tree_map_only(torch.Tensor, torch.clone, content[name])
        return content

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint file; a folder, and a path with '..', which only a foreign checkpoint names, is kept."""
        if not isinstance(get_filesystem(path), LocalFileSystem):
            super().remove_checkpoint(path)
            return
        place = plain_path(path)
        if ".." not in place.parts and (place.is_symlink() or place.is_file()):
            place.unlink()


FORM: dict[str, Any] = {
    "state_dict": dict,
    "pytorch-lightning_version": str,
    "epoch": int,
    "global_step": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
"""Entries of a checkpoint, and their types."""
NEEDED = ("state_dict", "pytorch-lightning_version", "global_step")
"""Those that Lightning reads of every checkpoint."""


def _check_form(content: dict[str, Any], path: Any) -> None:
    """Raise ValueError unless a checkpoint has what Lightning reads without a check of its own."""
    wrong = next((f"{name!r} is missing" for name in NEEDED if name not in content), None)
    for name, kind in FORM.items() if wrong is None else ():
        if not isinstance(content.get(name, kind()), kind):
            wrong = wrong or f"{name!r} is a {type(content[name]).__name__}"
    for name, value in content["state_dict"].items() if wrong is None else ():
        if not isinstance(value, torch.Tensor) and not str(name).endswith("_extra_state"):
            wrong = f"{name!r} of its state is no tensor"
    if wrong is not None:
        raise ValueError(
            f"{path} is damaged, or no checkpoint of Lightning: {wrong[:200]}; resume from another, or pass a file "
            "with a state as chain_start=[…]"
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")[:200] or type(error).__name__


# -- what else of a checkpoint is read without another check ----------------------------------------------------------

OF_LIGHTNING: dict[str, Any] = {
    "best_model_path": str,
    "kth_best_model_path": str,
    "last_model_path": str,
    "best_k_models": dict,
    "dirpath": str | None,
}
"""Entries of a `ModelCheckpoint` in a checkpoint, which Lightning reads without a check."""
PLACE = "callbacks.ExactResume.place"
"""The entry of a checkpoint with the run's own counts."""


def check_loops(saved: Any, own: Any, place: str = "loops") -> None:
    """Raise ValueError unless the loops' state, which Lightning reads unchecked, has the form of a trainer's own."""
    if isinstance(own, dict):
        if not isinstance(saved, dict):
            raise ValueError(_damaged(place, saved))
        for name, value in own.items():
            # Lightning's counts have grown in number, so a checkpoint of an older Lightning lacks some.
            needed = isinstance(value, dict) or place == PLACE or name == "completed"
            if needed or name in saved:
                check_loops(saved.get(name), value, f"{place}.{name}")
    elif isinstance(own, int) and not (isinstance(saved, int) and -1 <= saved < 2**62):
        raise ValueError(_damaged(place, saved))


def check_entries(callback: pl.Callback, entries: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Raise ValueError unless a callback's state in a checkpoint has entries of these types."""
    if not entries or callback.state_key not in states:
        return
    name, saved = type(callback).__name__, states[callback.state_key]
    if not isinstance(saved, dict):
        raise ValueError(_damaged(f"callbacks.{name}", saved))
    for entry, kind in entries.items():
        value = saved.get(entry)
        if not isinstance(value, kind) or (isinstance(value, int) and not 0 <= value < 2**64):
            raise ValueError(_damaged(f"callbacks.{name}.{entry}", value))


def _damaged(place: str, saved: Any) -> str:
    return f"the checkpoint is damaged: its {place} is {str(saved)[:40]!r}; resume from another"


def keep_constructor_arguments(checkpoint: dict[str, Any], module: pl.LightningModule) -> None:
    """Add the constructor's arguments that are plain data and no secrets to a checkpoint."""
    if "_hparams_name" in vars(module) or module.hparams:
        return  # the user has saved some by `save_hyperparameters`
    arguments: dict[str, Any] = getattr(module, "_arguments", {})
    kept = {n: v for n, v in arguments.items() if _is_plain(v) and not (isinstance(v, str) and is_secret(n))}
    checkpoint[module.CHECKPOINT_HYPER_PARAMS_KEY] = kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


def protect_checkpoints(trainer: pl.Trainer) -> None:
    """Make a trainer write checkpoints with `AtomicCheckpointIO`, unless the user chose another plugin."""
    strategy = trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO(maps=hasattr(strategy, "chain_layout") and trainer.world_size > 1)


def clean_checkpoints(trainer: pl.Trainer) -> None:
    """Delete the half-written checkpoints of killed processes from the trainer's folders."""
    folders = {str(folder) for c in trainer.checkpoint_callbacks if (folder := getattr(c, "dirpath", None))}
    for folder in folders if trainer.is_global_zero else ():
        if not is_remote(folder):
            remove_left_over(Path(folder))


def last_good_checkpoint(trainer: pl.Trainer) -> Path | str | None:
    """Return the newest checkpoint file of this run, else the one that it resumed from, else None."""
    names: set[str] = {str(trainer.ckpt_path)} if trainer.ckpt_path else set()
    for callback in trainer.checkpoint_callbacks:
        for attribute in ("last_model_path", "best_model_path", "_last_checkpoint_saved"):
            names.add(str(getattr(callback, attribute, "") or ""))
        names.update(getattr(callback, "best_k_models", ()))
    paths = [Path(name) for name in names if name and Path(name).is_file()]
    remote = [name for name in sorted(names) if is_remote(name)]
    return max(paths, key=lambda path: path.stat().st_mtime, default=remote[-1] if remote else None)


def describe_checkpoint(trainer: pl.Trainer) -> str:
    """Return a clause that names the checkpoint to resume from, for error messages."""
    path = last_good_checkpoint(trainer)
    return f"the last good checkpoint is {path}" if path is not None else "there is no checkpoint to resume from"


# -- loop counts -------------------------------------------------------------------------------------------------------


@dataclass
class RunPlace:
    """Where a run is, by its own counts of epochs over all fits of the trainer, and of batches in the epoch."""

    epoch: int = 0
    in_epoch: int = 0
    is_over: bool = False
    before: int = 0
    """Batches of the trainer's earlier fits."""
    steps_before: int = 0
    begins_epoch: bool = True

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> "RunPlace":
        """Return the place that a checkpoint has kept."""
        check_loops(saved, cls().state_dict(), PLACE)
        own = {name: saved[name] for name in cls().state_dict()}
        return cls(**own, begins_epoch=own["is_over"])

    def count(self, trainer: pl.Trainer, batches: int = 1) -> None:
        """Count batches of one epoch that have ended; the first of an epoch begins it."""
        if self.begins_epoch:
            self.epoch, self.in_epoch, self.begins_epoch = trainer.current_epoch, 0, False
        self.in_epoch += batches
        self.is_over = trainer.is_last_batch

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """End an epoch that a callback has cut short; a run that ends in mid-epoch may go on there."""
        by_steps = 0 <= trainer.max_steps <= trainer.global_step
        self.is_over = self.is_over or not (by_steps or trainer.should_stop)

    def state_dict(self) -> dict[str, int | bool]:
        """Return the place as plain data."""
        return {name: value for name, value in asdict(self).items() if name != "begins_epoch"}


def repair_loop_counts(fit_loop: dict[str, Any], batches: int, place: RunPlace, accumulating: bool) -> None:
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


# -- generators --------------------------------------------------------------------------------------------------------


class ProcessGenerators:
    """Keeps a process's default generators during a fit; what loaders draw from torch's is drawn from a copy."""

    def __init__(self) -> None:
        self._states: GeneratorStates | None = None
        self._own = torch.Generator()
        """Where torch's default generator of the CPU would be."""
        self._lent: list[DataLoader[Any]] = []
        """Loaders that draw their workers' seeds from a generator of the run."""
        self._loaders: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is in no fit. A generator's pickled state is a tensor that nothing holds: a process that is spawned
        # would find its shared memory closed.
        return ProcessGenerators, ()

    def begin(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Keep the generators, at the start of training."""
        self._states = GeneratorStates([device])
        self._own.set_state(torch.default_generator.get_state())
        self._loaders = flat_loaders(trainer.train_dataloader)

    def seed_workers(self, loader: DataLoader[Any], seed: int) -> None:
        """Give a loader without a generator one of the run, so that later draws do not depend on its workers' seed."""
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
        if self.is_kept:
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
