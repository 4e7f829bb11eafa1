"""What a progress bar says of a sampling run."""

import time
from typing import TYPE_CHECKING, Any, cast

import pytorch_lightning as pl
from torch import Tensor

from lightning_sgmcmc.run.handover import SampleHandover

if TYPE_CHECKING:
    from lightning_sgmcmc.module import BayesianModule


SECONDS_BETWEEN_READINGS = 0.25
"""Reading the energy waits for the device, and nobody reads a bar more often than this."""


class SamplingProgress(pl.Callback):
    """Adds energy, temperature, cycle, stage and the number of samples to the trainer's progress bar, whichever it is.

    `BayesianModule` adds it where the trainer has a bar. So both of Lightning's bars, and any other whose items come
    from `get_metrics`, have them without configuration; Lightning's version number gives way. The items are made where
    the bar asks for them and nowhere else. Energy and temperature are on the device, so they are read at most four
    times a second, and at an epoch's last batch: other steps cost no synchronization.

    Args:
        handover: who counts the samples.
    """

    def __init__(self, handover: SampleHandover) -> None:
        self._handover = handover
        self._begin()

    def _begin(self) -> None:
        self._from_device: dict[str, str] = {}
        self._next_reading = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        if stage != "fit" or bar is None:
            return
        self._begin()
        bar.__dict__.pop("get_metrics", None)  # of an earlier fit that was broken off
        own_items = bar.get_metrics

        def get_metrics(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
            others = own_items(trainer, pl_module)
            others.pop("v_num", None)
            return {**self.items(trainer, cast("BayesianModule", pl_module)), **others}

        bar.get_metrics = get_metrics  # type: ignore[method-assign]

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        if stage == "fit" and bar is not None:
            bar.__dict__.pop("get_metrics", None)

    def items(self, trainer: pl.Trainer, module: "BayesianModule") -> dict[str, str]:
        """Return what there is to say of the running fit, as text: energy and temperature are means over chains."""
        state, sampler = module.chain_state, module.sampler
        if sampler.step_count == 0:
            return {}
        now = time.monotonic()
        if now >= self._next_reading or trainer.is_last_batch:
            self._next_reading = now + SECONDS_BETWEEN_READINGS
            self._from_device = {
                "energy": short_number(state.energy.mean().item()),
                "temperature": f"{_mean(sampler.param_groups[0]['temperature']):.3g}",
            }
        cycle = {} if state.num_cycles is None else {"cycle": f"{state.cycle + 1}/{state.num_cycles}"}
        return {**self._from_device, **cycle, "stage": state.stage, "samples": str(self._handover.samples)}


def short_number(value: float) -> str:
    """Return a number of any size in at most nine characters, signs apart."""
    if abs(value) >= 1e6:
        return f"{value:.3e}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.4g}"


def _mean(value: "float | Tensor") -> float:
    return value.mean().item() if isinstance(value, Tensor) else float(value)
