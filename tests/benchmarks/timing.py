"""Paired timings: alternatives run in turns, so that a drift of the machine's speed hits all of them alike."""

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Mapping

import torch


def measure_quietly() -> None:
    """Compute with one thread, without messages of Lightning and of this library."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "lightning_sgmcmc"):
        logging.getLogger(name).setLevel(logging.ERROR)


def interleaved(alternatives: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every alternative once a round; return the seconds that each reported, without those of a first round."""
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(rounds + 1):
        for name, run in alternatives.items():
            taken = run()
            if turn > 0:
                seconds[name].append(taken)
    return seconds


def ratios(seconds: Mapping[str, list[float]], name: str, reference: str) -> tuple[float, float, float]:
    """Return the median, least and largest ratio of an alternative to the reference of the same round."""
    paired = [a / b for a, b in zip(seconds[name], seconds[reference], strict=True)]
    return statistics.median(paired), min(paired), max(paired)


def timed(step: Callable[[], object], count: int) -> float:
    """Return the mean seconds of a call."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count
