"""`sgmcmc tune`: propose the setting of lr for a configuration."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from rich.console import Console
from rich.table import Table

from lightning_sgmcmc.files import write_output
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.folder import run_folder
from lightning_sgmcmc.run.results import plain_console
from lightning_sgmcmc.tune import StepProposal, propose_lr

OUTPUT = "tune.json"


class TuningTrainer(pl.Trainer):
    """Lightning's trainer, with the arguments of `sgmcmc plan` and `sgmcmc tune` for the command line's parser."""

    resume_command: str | None = None
    """The command that continues the run; `SamplingCLI` sets it."""

    def plan(self, model: BayesianModule, datamodule: pl.LightningDataModule | None = None) -> None:
        """Print what a fit will reach and cost, without training.

        Args:
            model: the module.
            datamodule: its data.
        """
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
            model: the module.
            datamodule: its data.
            steps: optimizer steps of a probe; null is an eighth of the run's, between 100 and 500.
            burn_in_steps: optimizer steps at temperature 0 before the probes; null is the same as steps.
            tolerance: accepted relative deviation of temperatures.
            max_probes: the largest number of probes.
        """
        raise NotImplementedError("tune is a command: call sgmcmc tune, or lightning_sgmcmc.tune.propose_lr")


def tune(trainer: pl.Trainer, make_trainer: Callable[..., pl.Trainer], model: BayesianModule, **options: Any) -> None:
    """Propose the setting of lr, print the table and write `tune.json` to the run's folder.

    Args:
        trainer: the configuration's trainer, with its folder.
        make_trainer: makes a trainer of the same configuration; keyword arguments replace entries.
        model: the module.
        options: the arguments of `propose_lr`.
    """
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
