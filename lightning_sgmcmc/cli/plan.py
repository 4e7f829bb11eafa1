"""`sgmcmc plan`: what a configuration's fit will reach and cost, without training."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
from rich.table import Table

from lightning_sgmcmc.callbacks import BayesianModelAverage, PosteriorDashboard, PredictionWriter, RunSummary
from lightning_sgmcmc.callbacks.sample_collector import SampleCollector
from lightning_sgmcmc.chains.chains import chains_of
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.cli.config_file import ConfigFile
from lightning_sgmcmc.cli.exits import Mistake
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.planning import RunPlan
from lightning_sgmcmc.run.plan import plan_of
from lightning_sgmcmc.run.results import plain_console
from lightning_sgmcmc.run.trainer import callbacks_of

AFTERWARDS = (
    ConfigFile,
    SampleCollector,
    BayesianModelAverage,
    PosteriorDashboard,
    PredictionWriter,
    RunSummary,
    pl.callbacks.Checkpoint,
    pl.callbacks.LearningRateMonitor,
    pl.callbacks.ModelSummary,
    pl.callbacks.ProgressBar,
    pl.callbacks.Timer,
)
"""Callbacks that a plan does not depend on; some write files."""


class _Planned(Exception):
    """Ends a fit before its first step."""


class _Plan(pl.Callback):
    """Makes the plan when the fit would begin, and ends it."""

    plan: RunPlan | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.plan = plan_of(trainer, pl_module)
        raise _Planned


def plan(
    trainer: pl.Trainer,
    make_trainer: Callable[..., pl.Trainer],
    model: BayesianModule,
    datamodule: pl.LightningDataModule | None = None,
) -> RunPlan:
    """Print the plan of a configuration's fit as a table, and return it; nothing is trained or written.

    Args:
        trainer: the configuration's trainer.
        make_trainer: makes a trainer of the same configuration; keyword arguments replace entries.
        model: the module.
        datamodule: its data.

    Raises:
        Mistake: for a configuration without a schedule, or with `fast_dev_run`.
    """
    planner = _Plan()
    ranks = {"devices": 1, "num_nodes": 1, "strategy": "auto"} if trainer.world_size > 1 else {}
    alone = make_trainer(
        callbacks=[*(c for c in callbacks_of(trainer) if not isinstance(c, AFTERWARDS)), planner],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **ranks,
    )
    with contextlib.suppress(_Planned):
        alone.fit(model, datamodule=datamodule)
    found = planner.plan
    if found is None:
        raise Mistake(
            "there is nothing to plan: add a CyclicalSchedule or a SamplingSchedule to trainer.callbacks, and omit "
            "fast_dev_run"
        )
    found = _on_all_ranks(found, trainer, model)
    if trainer.is_global_zero:
        _print(found)
    return found


def _on_all_ranks(found: RunPlan, trainer: pl.Trainer, model: BayesianModule) -> RunPlan:
    """Return the plan for the chains of all processes."""
    times = layout_of(trainer, chains_of(model).num_chains).total_chains // max(found.chains, 1)
    if trainer.world_size == 1:
        return found
    note = "Planned on one device: ranks that share their data make fewer steps in an epoch."
    if times <= 1:
        return replace(found, notes=(*found.notes, note))
    return replace(
        found,
        chains=found.chains * times,
        samples=None if found.samples is None else found.samples * times,
        independent_draws=None if found.independent_draws is None else found.independent_draws * times,
        disk_bytes=None if found.disk_bytes is None else found.disk_bytes * times,
    )


def _print(found: RunPlan) -> None:
    console = plain_console()
    table: Any = Table(title="Plan of the run", show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right")
    for name, value in found.rows():
        table.add_row(name, value)
    console.print(table)
    for sentence in (*(f"Warning: {text}." for text in found.warnings), *found.notes):
        console.print(sentence, highlight=False)
