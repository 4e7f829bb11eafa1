"""A posterior in one line, and where a path's samples are."""

from collections.abc import Sequence
from pathlib import Path

from lightning_sgmcmc.chains.sample import SampleRecord
from lightning_sgmcmc.posterior.manifest import MANIFEST

SHOWN = 10
"""Samples in a notebook's table."""


def summary(records: Sequence[SampleRecord]) -> str:
    """Return the number of samples, of their chains, and their steps."""
    if not records:
        return "no samples"
    chains, steps = len({r.chain for r in records}), [r.step for r in records]
    of = f"of {chains} chains, " if chains > 1 else ""
    return f"{len(records)} sample{'s' if len(records) > 1 else ''} {of}from step {min(steps)} to {max(steps)}"


def samples_in(path: Path) -> Path:
    """Return a store's folder: the path itself, or `samples` in a run's folder."""
    inner = path / "samples"
    return inner if not (path / MANIFEST).exists() and (inner / MANIFEST).exists() else path
