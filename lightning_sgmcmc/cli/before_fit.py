"""`sgmcmc plan` and `sgmcmc tune`: what a configuration's fit will reach and cost, and which lr to set."""

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lightning_sgmcmc.callbacks import BayesianModelAverage, PosteriorDashboard, PredictionWriter, RunSummary
from lightning_sgmcmc.callbacks.sample_collector import SampleCollector
from lightning_sgmcmc.chains.callback import RunCallback
from lightning_sgmcmc.chains.chains import chain_model, chains_of
from lightning_sgmcmc.chains.layout import layout_of
from lightning_sgmcmc.chains.trainer import callbacks_of, run_folder
from lightning_sgmcmc.chains.weights import check_batch
from lightning_sgmcmc.cli.exits import Mistake
from lightning_sgmcmc.files import write_output
from lightning_sgmcmc.fit.results import plain_console
from lightning_sgmcmc.health.callback import ChainHealth
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import cli, pl
from lightning_sgmcmc.planning import RunPlan
from lightning_sgmcmc.planning.of_trainer import plan_of, schedule_of
from lightning_sgmcmc.tune import StepProposal, propose_lr

if TYPE_CHECKING:
    from pytorch_lightning.cli import SaveConfigCallback
else:
    SaveConfigCallback = cli.SaveConfigCallback

AFTERWARDS = (
    SaveConfigCallback,
    SampleCollector,
    BayesianModelAverage,
    ChainHealth,
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
OUTPUT = "tune.json"


class _Planned(Exception):
    """Ends a fit once it is planned."""


class _Plan(RunCallback):
    """Makes the plan when the fit would begin, or when its first steps have given its length, and ends it.

    The network and the likelihood see the first batch, so that a plan of data that do not fit them raises an error.
    """

    plan: RunPlan | None = None

    def acts_in(self, step: int) -> bool:
        return False  # so that the first steps have the speed of the fit's

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *args: Any) -> None:
        schedule = schedule_of(trainer)
        if schedule is None or schedule.has_length:
            check_batch(chain_model(pl_module), chains_of(pl_module).stacked, batch)
            self._plan(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        schedule = schedule_of(trainer)
        if schedule is not None and schedule.has_length:
            self._plan(trainer, pl_module)

    def _plan(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.plan = plan_of(trainer, chain_model(pl_module))
        raise _Planned


def plan(
    trainer: pl.Trainer,
    make_trainer: Callable[..., pl.Trainer],
    model: BayesianModule,
    datamodule: pl.LightningDataModule | None = None,
) -> RunPlan:
    """Print the plan of a configuration's fit as a table, and return it; nothing is written.

    Nothing is trained either, but that a time of the run is turned into steps by the speed of its first ones.
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


# -- tune -------------------------------------------------------------------------------------------------------------


class TuningTrainer(pl.Trainer):
    """Lightning's trainer, with the arguments of `sgmcmc plan` and `sgmcmc tune` for the command line's parser."""

    resume_command: str | None = None
    """The command that continues the run; `SamplingCLI` sets it."""

    def plan(self, model: BayesianModule, datamodule: pl.LightningDataModule | None = None) -> None:
        """Print what a fit will reach and cost, without training."""
        raise NotImplementedError("plan is a command: call sgmcmc plan, or read module.plan during or after a fit")

    def tune(
        self,
        model: BayesianModule,
        datamodule: pl.LightningDataModule | None = None,
        steps: int | None = None,
        burn_in_steps: int | None = None,
        tolerance: float = 0.2,
        max_probes: int = 10,
    ) -> None:
        """Propose the setting of lr from short runs.

        Args:
            steps: optimizer steps of a probe; null is an eighth of the run's, between 100 and 500.
            burn_in_steps: optimizer steps at temperature 0 before the probes; null is the same as steps.
        """
        raise NotImplementedError("tune is a command: call sgmcmc tune, or lightning_sgmcmc.tune.propose_lr")


def tune(trainer: pl.Trainer, make_trainer: Callable[..., pl.Trainer], model: BayesianModule, **options: Any) -> None:
    """Propose the setting of lr, print the table and write `tune.json` to the run's folder."""
    proposal = propose_lr(model, make_trainer=make_trainer, **options)
    folder = run_folder(trainer)
    if not trainer.is_global_zero:
        return
    path = folder / OUTPUT
    write_output(path, (json.dumps(proposal.as_json(), indent=2) + "\n").encode())
    console = plain_console()
    console.print(_table(proposal, path))
    _print_setting(console, proposal)


def _table(proposal: StepProposal, path: Path) -> Table:
    table = Table(title="Short runs by step size", caption=str(path), padding=(0, 1, 0, 0))
    has_errors = any(probe.energy_variance is not None for probe in proposal.probes)
    has_tests = any(probe.acceptance is not None for probe in proposal.probes)
    own = "ΔE var." if has_errors else "accepted" if has_tests else "kinetic"
    for column in ("lr", "val nll", own, "config.", "noise", "energy"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for probe in proposal.probes:
        numbers = (
            probe.nll,
            probe.energy_variance if has_errors else probe.acceptance if has_tests else probe.kinetic,
            probe.configurational,
            probe.noise_share,
        )
        cells = ["–" if value is None else f"{value:.3g}" for value in numbers]
        energy = "–" if probe.energy is None else f"{probe.energy:.5g}"
        chosen = " ←" if probe.lr == proposal.lr else ""
        table.add_row(f"{probe.lr:.3g}", *cells, energy, probe.verdict + chosen)
    return table


def _print_setting(console: Console, proposal: StepProposal) -> None:
    setting = proposal.setting
    text = f"{setting:.3g}" if isinstance(setting, float) else json.dumps(setting)
    console.print(f"Proposed: --model.init_args.lr={text}", highlight=False, soft_wrap=True)
    if proposal.friction is not None:
        console.print(f"and the sampler's friction: {proposal.friction:.3g}", highlight=False)
    what = "the limit is" if proposal.is_healthy else "no step was healthy, and what binds is"
    console.print(f"{what.capitalize()}: {proposal.limit}. {proposal.reason}", highlight=False)
    share = "" if math.isinf(proposal.run_steps) else f", and the run has {proposal.run_steps:,.0f}"
    console.print(f"The short runs took {proposal.steps_made:,} steps{share}.", highlight=False)
    console.print("Whether the run is long enough at this lr, `sgmcmc plan` reports.", highlight=False)
