"""The process that a run shares with other libraries: its cores, their messages, and what they leave behind."""

import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader


def usable_cores() -> int:
    """Return the number of cores that this process may use, ≥ 1."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def check_main_is_guarded() -> None:
    """Raise where a process that is to load data runs the user's script again, as it does on macOS and Windows."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # while it imports the script
        raise RuntimeError(
            "a process of a data loader with num_workers > 0, or of a spawning strategy, runs this script again, as on "
            "macOS and Windows: put what the script does below `if __name__ == '__main__':`, or use num_workers=0"
        )


# -- memory ------------------------------------------------------------------------------------------------------------


SHARE_OF_DATA = 0.25
"""Of a GPU's free memory that data may take; more stay in the host's."""
UNKNOWN = 2 * 2**30
"""Bytes of host memory that count as free where the system does not say it."""
LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""A control group's limit, what it uses, and what of that is only a cache of files, in versions 2 and 1."""


def free_memory(device: torch.device | None = None) -> int:
    """Return the free bytes of a CUDA device, or of host memory within the limits of this process's control groups."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_memory(Path("/"))


def room_for_data(device: torch.device) -> int:
    """Return the bytes that data may take on a device beside a network: a share of a GPU's free memory, else none."""
    if device.type != "cuda":
        return 0
    with suppress(RuntimeError):  # of a device whose free memory is unknown
        return int(SHARE_OF_DATA * free_memory(device))
    return 0


def free_host_memory(root: Path) -> int:
    """Return the bytes of host memory that are free, by a system's files below a root."""
    available = _number_in(root / "proc/meminfo", "MemAvailable:")
    if available is not None:
        free = available * 1024
    else:  # of the free pages, without caches
        names = getattr(os, "sysconf_names", {})
        pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in names and root == Path("/") else 0
        free = pages * os.sysconf("SC_PAGE_SIZE") if pages > 0 else UNKNOWN
    for folder in _groups(root):
        for most, used, cached in LIMITS:
            limit, present = _number_in(folder / most), _number_in(folder / used)
            if limit is not None and present is not None:
                free = min(free, limit - present + (_number_in(folder / "memory.stat", cached) or 0))
    return max(0, free)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups for memory, and of those above them."""
    lines = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
    for controllers, path in [line[1:] for line in lines if len(line) == 3]:
        if controllers == "" or "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            folder = top / path.strip("/")
            yield from (one for one in (folder, *folder.parents) if one == top or top in one.parents)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _number_in(path: Path, name: str = "") -> int | None:
    """Return the number after a name in a file, or the file's own number; None without one, such as "max"."""
    for line in _lines(path):
        words = line.split()
        number = words[1:2] if name and words[:1] == [name] else words[:1] if not name else []
        if number and number[0].isdigit():
            return int(number[0])
    return None


# -- silence -----------------------------------------------------------------------------------------------------------


@contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Suppress all warnings, and the messages of some loggers up to warnings."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def without_messages(names: tuple[str, ...], beginnings: tuple[str, ...]) -> Iterator[None]:
    """Drop the messages of some loggers, and of those below them, that begin so."""

    def keeps(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginnings)

    handlers = [handler for name in ("", *names) for handler in logging.getLogger(name).handlers]
    for handler in handlers:
        handler.addFilter(keeps)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(keeps)


@contextmanager
def printing_anything() -> Iterator[None]:
    """Print "?" for characters that the output's encoding lacks, such as τ in a file on Windows, and raise no error."""
    stream: Any = sys.stdout
    strict = getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure")
    if strict:
        stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        if strict and not stream.closed:
            stream.reconfigure(errors="strict")


# -- what Lightning leaves ---------------------------------------------------------------------------------------------

RECORDING = ("__init__", "__setattr__", "__delattr__")
"""The methods of loaders that Lightning replaces while a hook makes them, to record their arguments."""


def end_recording() -> None:
    """Give the classes of loaders their own methods back, which a hook that raises leaves replaced.

    Lightning takes loaders that are made later in the process for those of a hook, and `trainer.predict` fails with
    "more than one `__init__` argument" for `DataLoader(data, 50)`.
    """
    left: list[type] = [DataLoader, BatchSampler]
    while left:
        cls = left.pop()
        left += cls.__subclasses__()
        for name in RECORDING:
            own: Any = None
            method: Any = cls.__dict__.get(name)
            while _records(method):
                own = method = method.__wrapped__
            if own is not None:
                setattr(cls, name, own)
            if f"__old{name}" in cls.__dict__:
                delattr(cls, f"__old{name}")


def _records(method: Any) -> bool:
    module = getattr(method, "__globals__", {}).get("__name__", "")
    return module.endswith("fabric.utilities.data") and hasattr(method, "__wrapped__")
