"""The process that a run shares with other libraries: its cores, their messages, and what they leave behind."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import BatchSampler, DataLoader


def usable_cores() -> int:
    """Return the number of cores that this process may use, ≥ 1."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


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
