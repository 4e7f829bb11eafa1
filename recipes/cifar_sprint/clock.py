"""The training time of a fit."""

import math
import time
from typing import Any

import torch

from lightning_sgmcmc import BayesianModule
from lightning_sgmcmc.callbacks import SamplerCallback
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.shared.records import Recording

UNTIMED, TIMED = 10, 60
"""Steps before the clock starts, in which a network is compiled, and the last step of a trial that measures speed."""


class Clock(Recording, SamplerCallback):
    """Measures the training time of a fit, and notes it at each drawing.

    It is processor time on a CPU, where other programs run beside it, and elapsed time on a GPU. The first ten steps,
    in which a network is compiled, count as long as the mean of the others.
    """

    recorded = ("spent", "steps", "drawn")

    def reset(self) -> None:
        self.spent = 0.0
        """Seconds of the timed steps."""
        self.steps = 0
        self.drawn: list[float] = []
        """Seconds at each drawing."""

    @property
    def seconds(self) -> float:
        """Training time of all steps so far; NaN before the first timed one."""
        timed = self.steps - UNTIMED
        return self.spent * self.steps / timed if timed > 0 else math.nan

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._on_gpu = pl_module.device.type == "cuda"
        self._last = self._now()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._count()
        self.steps += 1
        if self.steps == UNTIMED:
            self._wait()
            self._last = self._now()
        elif self.steps == TIMED:
            self._wait()
            self._count()

    def on_posterior_samples(self, trainer: pl.Trainer, pl_module: BayesianModule, drawing: Any) -> None:
        self._wait()  # a drawing waits anyway
        self._count()
        self.drawn.append(self.seconds)

    def _wait(self) -> None:
        """Wait until a GPU has ended its work."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def _count(self) -> None:
        """Add the time since the last count, if the clock has started."""
        now = self._now()
        if self.steps >= UNTIMED:
            self.spent += now - self._last
        self._last = now

    def _now(self) -> float:
        return time.perf_counter() if self._on_gpu else time.process_time()
