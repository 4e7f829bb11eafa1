"""What a step of chains costs beside one of plain Lightning, and how much memory they take."""

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc import BayesianModule
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.lora_text.networks import fit, plain_lora, sampled_lora
from lightning_sgmcmc.recipes.lora_text.settings import Settings
from lightning_sgmcmc.recipes.lora_text.texts import Paragraphs
from lightning_sgmcmc.recipes.shared.results import Row


class Clock(pl.Callback):
    """Measures the mean CPU seconds of a step, from the ninth to the fifteenth.

    The library looks at the batches 1, 2, 4, 8, … of a fit by a pass of its own, which counts in no long run.
    """

    first = 8

    def __init__(self) -> None:
        self.start, self.seconds = 0.0, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.first:
            self.start = time.process_time()
        self.seconds = (time.process_time() - self.start) / max(1, trainer.global_step - self.first)


def costs(settings: Settings, weights: dict[str, Tensor], train: Paragraphs, out: Path) -> list[Row]:
    """Return ratios of steps, measured in turns against drifts of the machine's speed, and of memory."""
    torch.set_num_threads(1)

    def seconds(make: Callable[[], pl.LightningModule], sampled: bool) -> float:
        clock = Clock()
        own = [
            SamplingSchedule(every_n_steps=settings.timed + Clock.first),
            SampleCollector(out / "timed"),
            BayesianModelAverage(),
            RunSummary(),
        ]
        callbacks = [*own, PosteriorDashboard(figures=())] if sampled else []
        fit(make(), train, settings.timed + Clock.first, settings.batch, *callbacks, clock)
        return clock.seconds

    alternatives: dict[str, Callable[[], float]] = {
        "plain": lambda: seconds(lambda: plain_lora(settings, weights), False),
        "1 chain": lambda: seconds(lambda: sampled_lora(settings, weights, 0, 1), True),
        f"{settings.chains} chains": lambda: seconds(lambda: sampled_lora(settings, weights, 0, settings.chains), True),
    }
    taken: dict[str, list[float]] = {name: [] for name in alternatives}
    for turn in range(settings.rounds + 1):
        for name, measure in alternatives.items():
            once = measure()
            if turn > 0:  # the first round warms up
                taken[name].append(once)
    rows = []
    for name in list(alternatives)[1:]:
        ratio = statistics.median(a / b for a, b in zip(taken[name], taken["plain"], strict=True))
        rows.append(Row(f"SGHMC, {name}", "CPU seconds of a step / of plain LoRA's", ratio))
    alone, together = (_bytes_of(sampled_lora(settings, weights, 0, chains), train) for chains in (1, settings.chains))
    rows.append(Row(f"SGHMC, {settings.chains} chains", "bytes of the module / one network's", together / alone))
    return rows


def _bytes_of(module: BayesianModule, train: Paragraphs) -> int:
    """Return the bytes of a module's tensors once its chains are made."""
    made = copy.copy(module)
    made.configure_model()
    return sum(tensor.nbytes for tensor in made.state_dict().values())
