"""The process that a run shares with other libraries: its cores, and the silence of their messages."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


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
