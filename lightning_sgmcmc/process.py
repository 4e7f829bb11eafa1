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
