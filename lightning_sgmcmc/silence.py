"""Silence of other libraries, whose messages would repeat or contradict this library's own."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Suppress all warnings, and the messages of some loggers up to warnings.

    Args:
        names: of the loggers.
    """
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
