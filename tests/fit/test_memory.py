"""Memory of a run: no step leaves an object behind, and a sample leaves a bounded record.

The long measurement with every logger is `python -m tests.benchmarks.memory`.
"""

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import SGHMC, ContourRules, UnderdampedLangevin
from lightning_sgmcmc.callbacks import (
    EWSG,
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    ControlVariates,
    CovarianceFriction,
    PosteriorDashboard,
    ReplicaExchange,
    SampleCollector,
    SamplingSchedule,
    VarianceReducedEnergy,
)
from tests.support.problems import Data, Plain
from tests.support.trainers import quiet_trainer

FIRST, LAST = 60, 140
CONTOUR = functools.partial(ContourGradient, ContourRules(zeta=0.75), first_edge=20.0, width=2.0, num_bins=30)
LANGEVIN = {"sampler": functools.partial(UnderdampedLangevin, friction=2.0), "lr": 0.002}


@dataclass
class Reading:
    """What is alive: tensors, and objects that Python's collector tracks (tensors, containers, instances)."""

    tensors: int
    objects: int


class Readings(pl.Callback):
    """Reads what is alive at two steps."""

    def __init__(self) -> None:
        self.taken: dict[int, Reading] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step in (FIRST, LAST) and step not in self.taken:
            gc.collect()
            alive = gc.get_objects()
            self.taken[step] = Reading(sum(issubclass(type(thing), torch.Tensor) for thing in alive), len(alive))


class Leak(pl.Callback):
    """Keeps each step's energy in a list of its own."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.kept.append([pl_module.chains.observed.energy.item()])


def growth(module: Plain, callbacks: list[pl.Callback]) -> Reading:
    """Return by how much the alive things have grown between the two steps of a fit."""
    gc.collect()
    gc.freeze()  # what other tests left alive is not counted
    readings = Readings()
    trainer = quiet_trainer(max_steps=LAST + 10, callbacks=[*callbacks, readings], log_every_n_steps=1000)
    trainer.fit(module, datamodule=Data())
    first, last = readings.taken[FIRST], readings.taken[LAST]
    return Reading(last.tensors - first.tensors, last.objects - first.objects)


def common(folder: Path, every: int) -> list[pl.Callback]:
    return [
        SamplingSchedule(every_n_steps=every),
        SampleCollector(folder / "samples", max_samples=5),
        BayesianModelAverage(),
        PosteriorDashboard(every="end", figures=[]),
    ]


CASES: dict[str, tuple[dict[str, Any], Callable[[], list[pl.Callback]]]] = {
    "contour, EWSG": ({"sampler": SGHMC}, lambda: [CONTOUR(), EWSG(1), VarianceReducedEnergy(0, 2), ChainHealth(5)]),
    "two chains": (
        {"num_chains": 2},
        lambda: [ReplicaExchange([1.0, 2.0], [1.0, 1.2]), ControlVariates(0, 2, energy=True)],
    ),
    "friction": (LANGEVIN, lambda: [CovarianceFriction(0, 2), EWSG(1)]),
}


@pytest.mark.by_default("two chains")
@pytest.mark.parametrize("case", CASES)
def test_a_step_leaves_nothing(case: str, tmp_path: Path) -> None:
    """80 steps without a sample: as many tensors as before, and less than one container for every fourth step."""
    options, callbacks = CASES[case]
    grown = growth(Plain(**options), [*common(tmp_path, LAST + 10), *callbacks()])
    assert grown.tensors <= 2, grown
    assert grown.objects < (LAST - FIRST) / 4, grown


@pytest.mark.slow
def test_a_sample_leaves_a_bounded_record(tmp_path: Path) -> None:
    """8 samples, of which five are kept: their metrics and 32 log densities of each, and no sample's weights."""
    grown = growth(Plain(sampler=SGHMC), common(tmp_path, 10))
    assert grown.tensors <= 8 + 2, grown
    assert grown.objects < 8 * 10, grown


def test_a_leak_would_be_seen() -> None:
    assert growth(Plain(), [Leak()]).objects >= LAST - FIRST
