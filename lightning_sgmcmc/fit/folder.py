"""Folders of this run, of its samples and of earlier runs."""

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sgmcmc.chains.samples import SampleRecord
from lightning_sgmcmc.chains.trainer import EVALUATIONS, run_folder
from lightning_sgmcmc.files import flush_folder, free_name, is_regular, remove_left_over
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.lock import StoreLock
from lightning_sgmcmc.posterior.manifest import MANIFEST, aside_folders, next_aside, records_from
from lightning_sgmcmc.tables import Columns


def newest_store(trainer: pl.Trainer) -> Path | None:
    """Return the store with samples of this run's folder, else the newest one of the runs beside it, or None."""
    if trainer in EVALUATIONS:
        return EVALUATIONS[trainer][1]
    folder = run_folder(trainer)
    if has_samples(folder / "samples"):
        return folder / "samples"
    stores = [path.parent for path in folder.parent.glob(f"*/samples/{MANIFEST}") if has_samples(path.parent)]
    return max(stores, key=lambda store: (store / MANIFEST).stat().st_mtime, default=None)


def has_samples(store: Path) -> bool:
    """Return whether a folder is a store with a sample: its manifest has a complete line after the header."""
    manifest = store / MANIFEST
    return manifest.is_file() and manifest.read_bytes().count(b"\n") > 1


def evaluate_beside(trainer: pl.Trainer, store: Path, stage: str) -> None:
    """Make a trainer without a fit read a run's samples, and write to a new folder named by `stage` in that run's."""
    folder = free_name(store.parent / stage)
    parent = run_folder(trainer).parent
    EVALUATIONS[trainer] = (folder, store)
    if folder.is_relative_to(parent):
        _use_folder(trainer, folder.relative_to(parent))


def _use_folder(trainer: pl.Trainer, version: Path) -> None:
    """Make loggers with one folder per run write to the folder `version`, below that of all their runs."""
    for logger in trainer.loggers:
        if hasattr(logger, "_version") and isinstance(getattr(logger, "log_dir", None), str):
            logger._version = str(version)  # loggers accept it only in the constructor


def newest_checkpoint(trainer: pl.Trainer) -> Path | None:
    """Return the newest complete checkpoint of the callbacks' folders, else of the runs beside this one, or None."""
    folders = {str(folder) for c in trainer.checkpoint_callbacks if (folder := getattr(c, "dirpath", None))}
    candidates = [path for folder in folders for path in Path(folder).glob("*.ckpt")]
    if not folders:
        candidates = list(run_folder(trainer).parent.glob("*/checkpoints/*.ckpt"))
    # A truncated file, such as an incomplete copy, is not a zip archive.
    complete = [path for path in candidates if path.is_file() and zipfile.is_zipfile(path)]
    return max(complete, key=lambda path: path.stat().st_mtime, default=None)


def continue_run_of(trainer: pl.Trainer, checkpoint: Path) -> None:
    """Make loggers with numbered folders write to that of a checkpoint's run, and move files in the way aside."""
    folder = checkpoint.parent.parent
    if folder.parent != run_folder(trainer).parent:
        return  # the checkpoints are kept elsewhere
    _use_folder(trainer, Path(folder.name))
    metrics = folder / "metrics.csv"  # Lightning's CSVLogger overwrites its file
    if trainer.is_global_zero and metrics.exists():
        metrics.rename(free_name(metrics))


# -- sample folder -----------------------------------------------------------------------------------------------------

LEVELS = 3
"""Folders above a checkpoint, and parts of a store's path, that are searched for a moved run's samples."""


def begin_store(
    path: Path,
    description: Any,
    columns: Columns | None = None,
    shared: Mapping[str, Tensor] | None = None,
) -> StoreLock:
    """Create an empty store for a new run, and move the samples of an earlier run aside."""
    lock = StoreLock(path)
    remove_left_over(path)
    if (path / MANIFEST).exists():
        aside = next_aside(path)
        path.rename(aside)
        flush_folder(path.parent)
        rank_zero_info(f"The samples of an earlier run in {path} were moved to {aside}")
        lock.release()
        lock = StoreLock(path)
    DiskStore.create(path, description, columns, shared)
    return lock


def find_store(saved: dict[str, Any], dirpath: Path | None, checkpoint: str | Path | None) -> Path:
    """Return the folder of a checkpoint's samples: the given one, one beside it (it may be moved), or the recorded."""
    _check_saved(saved)
    recorded = Path(saved["path"])
    if dirpath is not None:
        candidates = [dirpath]
    else:
        tails = [Path(*recorded.parts[-length:]) for length in range(1, min(LEVELS, len(recorded.parts) - 1) + 1)]
        folders = list(Path(checkpoint).absolute().parents)[:LEVELS] if checkpoint else []
        candidates = [folder / tail for folder in folders for tail in tails] + [recorded]
        candidates += [aside for candidate in candidates for aside in aside_folders(candidate)]
    foreign = None
    best = (-1, candidates[0] if dirpath is not None else recorded)
    for path in candidates:
        if not (path / MANIFEST).exists():
            continue
        store = DiskStore(path)
        if saved["run"] != store.run_id:
            foreign = path
            continue
        count = _samples_there(saved, store)
        if count >= saved["count"]:
            return path
        best = max(best, (count, path), key=lambda pair: pair[0])
    if best[0] < 0 and foreign is not None:
        stores = (aside for aside in aside_folders(foreign) if (aside / MANIFEST).exists())
        theirs = next((aside for aside in stores if DiskStore(aside).run_id == saved["run"]), None)
        remedy = f"pass dirpath='{theirs}', where its own are" if theirs else "pass the folder of its own as dirpath"
        raise ValueError(f"{foreign} holds the samples of another run than the checkpoint's: {remedy}")
    raise ValueError(
        f"the checkpoint refers to {saved['count']} samples in {best[1]}, which holds {max(best[0], 0)}: restore the "
        "folder, or start a new run"
    )


def continue_store(path: Path, saved: dict[str, Any]) -> StoreLock:
    """Set a store to a checkpoint's samples, and move later ones aside."""
    lock = StoreLock(path)
    remove_left_over(path)
    store = DiskStore(path)
    aside = store.set_aside(_records_of(saved, store))
    if aside is not None:
        rank_zero_info(f"{len(DiskStore(aside))} samples in {path} were drawn after the checkpoint: moved to {aside}")
    return lock


def on_rank_zero(trainer: pl.Trainer, function: Callable[[], Any]) -> Any:
    """Call a function on rank zero, and wait for it on all ranks; return its result there, None elsewhere."""
    result, error = None, None
    if trainer.is_global_zero:
        try:
            result = function()
        except Exception as raised:
            error = raised
    message = trainer.strategy.broadcast(None if error is None else str(error))
    if error is not None:
        raise error
    if message is not None:
        raise RuntimeError(f"rank 0 failed: {message}")
    return result


def _records_of(saved: dict[str, Any], store: DiskStore) -> list[SampleRecord]:
    if "records" in saved:
        records = records_from(saved["records"])
        _check_energies(records, store)
        return records
    return [record for record in store.records if record.step <= saved["last_step"]]


def _check_energies(records: list[SampleRecord], store: DiskStore) -> None:
    """Raise ValueError if a checkpoint's record of a sample has another energy than the store's."""
    energies = {record.file: record.energy for record in store.records}
    for record in records:
        energy = energies.get(record.file, record.energy)
        if repr(energy) != repr(record.energy):  # as text, since NaN is not equal to itself
            raise ValueError(
                f"the checkpoint's record of {record.file} has the energy {record.energy}, and that in {store.path} "
                f"{energy}: resume from another checkpoint, or start a new run"
            )


def _check_saved(saved: Any) -> None:
    """Raise ValueError unless a collector's state in a checkpoint has the right form."""
    kinds = {"path": str, "count": int, "last_step": int, "records": list, "run": str}
    given = saved if isinstance(saved, dict) else {}
    needed = ("path", "count", "last_step", "run")
    wrong = [name for name in needed if name not in given]
    wrong += [name for name, kind in kinds.items() if name in given and not isinstance(given[name], kind)]
    if wrong:
        raise ValueError(f"the checkpoint's entry on its samples is damaged: {wrong[0]} is missing or has a wrong type")


def _samples_there(saved: dict[str, Any], store: DiskStore) -> int:
    """Return how many of a checkpoint's samples a store holds."""
    records = _records_of(saved, store)
    return sum(is_regular(store.path / r.file) for r in records) if "records" in saved else len(records)
