"""Stage `samples`: what a step costs that draws samples, and predictions from the samples."""

import statistics
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from tests.benchmarks.gpu.setting import RandomImages, Say, Setting, fit, module

EVERY = 5


class StepTimes(pl.Callback):
    """Milliseconds of each step, the device waited for at both ends; samples are drawn within a step."""

    def __init__(self, setting: Setting) -> None:
        self.size = setting
        self.drawing: list[float] = []
        self.ordinary: list[float] = []
        self._begun = 0.0
        self._step = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._end()
        self._step = trainer.global_step + 1
        self._begun = time.perf_counter()

    def on_train_end(self, *args: Any) -> None:
        self._end()

    def _end(self) -> None:
        self.size.wait()
        if self._step > EVERY:  # the first drawing is a warm-up
            times = self.ordinary if self._step % EVERY else self.drawing
            times.append((time.perf_counter() - self._begun) * 1e3)


def run(setting: Setting, case: str, say: Say) -> None:
    """Record the milliseconds that a drawing of the chains' samples adds to a step, part by part, and predictions'.

    Args:
        setting: the measurement's.
        case: number of chains.
        say: records.
    """
    chains = int(case)
    data = RandomImages(setting, held_out=10_000)
    setting.turn()
    with TemporaryDirectory() as folder:
        parts: dict[str, list[pl.Callback]] = {
            "drawn": [],
            "drawn and written": [SampleCollector(f"{folder}/written")],
            "drawn, written and evaluated": [SampleCollector(f"{folder}/all"), BayesianModelAverage()],
        }
        for name, callbacks in parts.items():
            times, measured = StepTimes(setting), module(setting, chains, compile=False)
            fit(setting, measured, data, 4 * EVERY, [SamplingSchedule(every_n_steps=EVERY), *callbacks, times])
            added = statistics.median(times.drawing) - statistics.median(times.ordinary)
            say(f"{chains} chains, {name}", added_ms=added, drawing_ms=times.drawing)
        stored = Posterior.load(f"{folder}/all", net=setting.network(), device=setting.device)
        _predictions(setting, stored[-6:].in_memory(), data, say)


def _predictions(setting: Setting, posterior: Posterior, data: RandomImages, say: Say) -> None:
    """Record `Posterior.predict` of six samples: many images, and one image against six bare passes."""
    images = data.transform()(data.splits[1].inputs.to(setting.device))
    network = setting.network().to(setting.device).eval()
    count = len(posterior)
    say(f"predict, {len(images)} images, {count} samples", **_timed(setting, lambda: posterior.predict(images)))
    one = images[:1]

    def bare() -> None:
        with torch.no_grad():
            for _ in range(count):
                nn.functional.softmax(network(one), -1)

    served, passes = _timed(setting, lambda: posterior.predict(one)), _timed(setting, bare)
    say(f"predict, 1 image, {count} samples", **served, bare_ms=passes["wall_ms"])


def _timed(setting: Setting, call: Callable[[], object]) -> dict[str, float]:
    times = []
    for _ in range(2 if setting.tiny else 12):
        setting.wait()
        began = time.perf_counter()
        call()
        setting.wait()
        times.append((time.perf_counter() - began) * 1e3)
    return {"first_ms": times[0], "wall_ms": statistics.median(times[1:])}
