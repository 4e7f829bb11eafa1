"""What a run shows of itself: its settings in every logger, W&B without a login, and entries of the progress bar."""

import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from shutil import get_terminal_size
from typing import Any

from rich.table import Column
from rich.text import Text

from lightning_sgmcmc.chains.chains import chains_of, sampler_of
from lightning_sgmcmc.chains.state import ObservedEnergy, Stage
from lightning_sgmcmc.chains.trainer import callbacks_of, log_values
from lightning_sgmcmc.fit.results import versions
from lightning_sgmcmc.fit.safeguards import Safeguards
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import pl, rank_zero_info
from lightning_sgmcmc.tensors import mean_of

Logger = pl.loggers.Logger
WandbLogger = pl.loggers.WandbLogger

# -- offline -----------------------------------------------------------------------------------------------------------


def stay_offline_without_login(loggers: Iterable[Logger]) -> None:
    """Make W&B loggers, before their experiments start, record offline if no user is logged in and no mode chosen."""
    undecided = [
        logger
        for logger in loggers
        if isinstance(logger, WandbLogger)
        and logger._experiment is None
        and not logger._offline
        and logger._wandb_init.get("mode") is None
    ]
    if undecided and not os.environ.get("WANDB_MODE") and not _logged_in():
        for logger in undecided:
            logger._wandb_init["mode"] = "offline"  # W&B reads WANDB_MODE before it prompts for a login
        rank_zero_info(
            "No user is logged in to W&B, so this run is recorded offline: `wandb sync` uploads it later, and "
            "`wandb login` records the next run online."
        )


def _logged_in() -> bool:
    """Return whether W&B has credentials, without a prompt and without the network."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return wandb.api.api_key is not None


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def log_settings(trainer: pl.Trainer, model: EnergyModel, settings: dict[str, Any]) -> None:
    """Write what determines a run's draws to every logger, as `run.…`, once its sampler, N and seed are known."""
    if not trainer.loggers:
        return
    chains = chains_of(model)
    plain = {k: v for k, v in model.recorded_arguments().items() if isinstance(v, str | int | float | bool)}
    known = {name: value for name, value in settings.items() if name != "data"}
    values = {
        "model": type(model).__name__,
        **plain,
        **known,
        "num_chains": chains.layout.total_chains,
        "num_parameters": sum(p.numel() for p in chains.trainable.values()) // chains.num_chains,
        "callbacks": ", ".join(type(callback).__name__ for callback in callbacks_of(trainer)),
        "batch_size": getattr(trainer.train_dataloader, "batch_size", None),
        "precision": str(trainer.precision),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "max_steps": trainer.estimated_stepping_batches,
        **{f"version.{name}": found or "unknown" for name, found in versions().items()},
    }
    log_values(trainer, "run", values)


# -- progress bar ------------------------------------------------------------------------------------------------------


SECONDS_BETWEEN_READINGS = 0.25
"""Seconds between new entries: reading the NLL synchronizes the device, and a bar asks for its entries every step."""
WIDE = 120
"""Columns of a terminal that has room for all entries."""


class SamplingProgress(pl.Callback):
    """Adds NLL, that of validation data once it is known, number of samples and, on a wide terminal, more to any
    progress bar that asks `get_metrics`."""

    def __init__(self, safeguards: Safeguards) -> None:
        self._safeguards = safeguards
        self._begin()

    def _begin(self) -> None:
        self._shown: dict[str, Any] = {}
        self._next_reading = 0.0
        self._readings: deque[tuple[float, int]] = deque(maxlen=8)
        """Times of the last readings, and batches so far."""
        self._is_wide = get_terminal_size().columns >= WIDE

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        if stage != "fit" or bar is None:
            return
        self._begin()
        _restore(bar)  # after an earlier, interrupted fit
        _omit_unlimited_epochs(trainer, bar)
        self._show_speed(bar)
        own_items = bar.get_metrics

        def get_metrics(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
            now = time.monotonic()
            if now >= self._next_reading or trainer.is_last_batch:
                self._readings.append((now, trainer.fit_loop.total_batch_idx))
                _keep_on_one_line(bar)
                own, others = self.items(trainer, pl_module), own_items(trainer, pl_module)
                others.pop("v_num", None)
                self._shown = {**own, **others}
                self._next_reading = now + SECONDS_BETWEEN_READINGS if own else 0.0
            return dict(self._shown)

        bar.get_metrics = get_metrics  # type: ignore[method-assign]

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        bar = trainer.progress_bar_callback
        if stage == "fit" and bar is not None:
            _restore(bar)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def _show_speed(self, bar: Any) -> None:
        """Let a Rich bar show the batches of the run in a second: its own count those that it saw of an epoch, and most
        epochs have none."""
        configure = getattr(bar, "configure_columns", None)  # of Rich
        if configure is None:
            return

        def columns(trainer: pl.Trainer) -> list[Any]:
            found: list[Any] = configure(trainer)
            for column in found:
                if type(column).__name__ == "ProcessingSpeedColumn":
                    column.render = partial(self._speed, bar, column, column.render)
            return found

        bar.configure_columns = columns

    def _speed(self, bar: Any, column: Any, own: Callable[[Any], Any], task: Any) -> Any:
        if task.id != bar.train_progress_bar_id or len(self._readings) < 2:
            return own(task)
        (begun, first), (now, last) = self._readings[0], self._readings[-1]
        speed = (last - first) / max(now - begun, 1e-9)
        return Text(f"{speed:.2f}it/s" if speed < 1000 else f"{speed:.0f}it/s", style=column.style)

    def items(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, str]:
        """Return the progress bar's entries for the current step; NLL and temperature are means over chains."""
        chains, sampler = chains_of(module), sampler_of(module)
        progress = chains.progress
        if sampler.step_count == 0:
            return {}
        validation = _validation_nll(trainer, module)
        found = {} if validation is None else {"val_nll": short_number(validation)}
        if self._is_wide or not found:
            found = {"nll": short_number(mean_nll(chains.observed)), **found}
        samples = str(self._safeguards.samples)
        if not self._is_wide and progress.stage is Stage.WARM_START:
            return {**found, "stage": progress.stage.value}
        if not self._is_wide:
            return {**found, "samples": samples}
        found["temperature"] = f"{mean_of(sampler.param_groups[0]['temperature']):.3g}"
        cycle = {} if progress.num_cycles is None else {"cycle": f"{progress.cycle + 1}/{progress.num_cycles}"}
        return {**found, **cycle, "stage": progress.stage.value, "samples": samples}


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
    for name in ("get_metrics", "_get_train_description", "configure_columns"):
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
