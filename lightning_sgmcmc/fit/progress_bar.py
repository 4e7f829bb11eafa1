"""Entries of the progress bar for a sampling run."""

import time
from shutil import get_terminal_size
from typing import Any

import pytorch_lightning as pl
from rich.table import Column

from lightning_sgmcmc.chains.chains import chains_of, sampler_of
from lightning_sgmcmc.chains.state import ObservedEnergy, Stage
from lightning_sgmcmc.fit.safeguards import Safeguards
from lightning_sgmcmc.tensors import mean_of

SECONDS_BETWEEN_READINGS = 0.25
"""Seconds between refreshes: reading the NLL synchronizes the device, and no reader needs it more often."""
WIDE = 120
"""Columns of a terminal that has room for all entries."""


class SamplingProgress(pl.Callback):
    """Adds NLL, number of samples and, on a wide terminal, more to any progress bar that asks `get_metrics`."""

    def __init__(self, safeguards: Safeguards) -> None:
        self._safeguards = safeguards
        self._begin()

    def _begin(self) -> None:
        self._from_device: dict[str, str] = {}
        self._next_reading = 0.0
        self._is_wide = get_terminal_size().columns >= WIDE

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        if stage != "fit" or bar is None:
            return
        self._begin()
        _restore(bar)  # after an earlier, interrupted fit
        _omit_unlimited_epochs(trainer, bar)
        own_items = bar.get_metrics

        def get_metrics(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
            _keep_on_one_line(bar)
            others = own_items(trainer, pl_module)
            others.pop("v_num", None)
            return {**self.items(trainer, pl_module), **others}

        bar.get_metrics = get_metrics  # type: ignore[method-assign]

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        if stage == "fit" and bar is not None:
            _restore(bar)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def items(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, str]:
        """Return the progress bar's entries for the current step; NLL and temperature are means over chains."""
        chains, sampler = chains_of(module), sampler_of(module)
        progress = chains.progress
        if sampler.step_count == 0:
            return {}
        now = time.monotonic()
        if now >= self._next_reading or trainer.is_last_batch:
            self._next_reading = now + SECONDS_BETWEEN_READINGS
            self._from_device = {"nll": short_number(mean_nll(chains.observed))}
            validation = _validation_nll(trainer, module)
            if validation is not None:
                self._from_device["val"] = short_number(validation)
            if self._is_wide:
                self._from_device["temperature"] = f"{mean_of(sampler.param_groups[0]['temperature']):.3g}"
        samples = str(self._safeguards.samples)
        if not self._is_wide and progress.stage is Stage.WARM_START:
            return {**self._from_device, "stage": progress.stage.value}
        if not self._is_wide:
            return {**self._from_device, "n": samples}
        cycle = {} if progress.num_cycles is None else {"cycle": f"{progress.cycle + 1}/{progress.num_cycles}"}
        return {**self._from_device, **cycle, "stage": progress.stage.value, "samples": samples}


def mean_nll(observed: ObservedEnergy) -> float:
    """Return the last mini-batch's mean of -log p(y|x,θ) over data and chains, in nats; without the prior."""
    return (observed.mean_potential + observed.log_prior / observed.num_data).mean().item()


def _validation_nll(trainer: pl.Trainer, module: pl.LightningModule) -> float | None:
    evaluation = getattr(module, "evaluations", {}).get("val")
    if evaluation is not None and evaluation.bma:
        return float(evaluation.bma["nll"])
    value = trainer.callback_metrics.get("val/nll")
    return None if value is None else float(value)


def _restore(bar: Any) -> None:
    for name in ("get_metrics", "_get_train_description"):
        bar.__dict__.pop(name, None)


def _omit_unlimited_epochs(trainer: pl.Trainer, bar: Any) -> None:
    """Let a Rich bar of a run that `max_steps` ends show "Epoch 3" where it has "Epoch 3/-2"."""
    describe = getattr(bar, "_get_train_description", None)
    if describe is not None and trainer.max_epochs == -1:
        bar._get_train_description = lambda epoch: describe(epoch).replace("/-2", "   ")


def _keep_on_one_line(bar: Any) -> None:
    """Let a Rich bar shrink the bar itself instead of wrapping the entries."""
    column = getattr(bar, "_metric_component", None)
    if column is not None and column.get_table_column().no_wrap is False:
        column._table_column = Column(no_wrap=True)


def short_number(value: float) -> str:
    """Return a number of any size in at most nine characters, not counting signs."""
    return f"{value:.3e}" if abs(value) >= 1e6 else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
