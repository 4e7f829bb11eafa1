"""Entries of the progress bar for a sampling run."""

import time
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from lightning_sgmcmc.chains.chains import chains_of, sampler_of
from lightning_sgmcmc.run.safeguards import Safeguards

SECONDS_BETWEEN_READINGS = 0.25
"""Seconds between refreshes: reading the energy synchronizes the device, and no reader needs it more often."""


class SamplingProgress(pl.Callback):
    """Adds energy, temperature, cycle, stage and the number of samples to any progress bar of the trainer.

    `BayesianModule` adds it if the trainer has a bar. Both of Lightning's bars, and any other whose items come from
    `get_metrics`, show the entries without configuration; they replace Lightning's version number. Entries are computed
    only when the bar requests them. Energy and temperature are on the device, so they are read at most four times a
    second, and at an epoch's last batch: other steps cost no synchronization.

    Args:
        safeguards: the callback that counts the samples.
    """

    def __init__(self, safeguards: Safeguards) -> None:
        self._safeguards = safeguards
        self._begin()

    def _begin(self) -> None:
        self._from_device: dict[str, str] = {}
        self._next_reading = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        if stage != "fit" or bar is None:
            return
        self._begin()
        bar.__dict__.pop("get_metrics", None)  # of an earlier, interrupted fit
        own_items = bar.get_metrics

        def get_metrics(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
            others = own_items(trainer, pl_module)
            others.pop("v_num", None)
            return {**self.items(trainer, pl_module), **others}

        bar.get_metrics = get_metrics  # type: ignore[method-assign]

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        if stage == "fit" and bar is not None:
            bar.__dict__.pop("get_metrics", None)

    def items(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, str]:
        """Return the progress bar's entries for the current step; energy and temperature are means over chains."""
        chains, sampler = chains_of(module), sampler_of(module)
        progress = chains.progress
        if sampler.step_count == 0:
            return {}
        now = time.monotonic()
        if now >= self._next_reading or trainer.is_last_batch:
            self._next_reading = now + SECONDS_BETWEEN_READINGS
            self._from_device = {
                "energy": short_number(chains.observed.energy.mean().item()),
                "temperature": f"{_mean(sampler.param_groups[0]['temperature']):.3g}",
            }
        cycle = {} if progress.num_cycles is None else {"cycle": f"{progress.cycle + 1}/{progress.num_cycles}"}
        return {**self._from_device, **cycle, "stage": progress.stage.value, "samples": str(self._safeguards.samples)}


def short_number(value: float) -> str:
    """Return a number of any size in at most nine characters, not counting signs."""
    if abs(value) >= 1e6:
        return f"{value:.3e}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.4g}"


def _mean(value: "float | Tensor") -> float:
    return value.mean().item() if isinstance(value, Tensor) else float(value)
