"""`sgmcmc tune`: propose a step size for a configuration."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from rich.console import Console
from rich.table import Table

from lightning_sgmcmc.callbacks.schedule import schedule_of
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.folder import run_folder
from lightning_sgmcmc.tune import StepProposal, propose_lr

OUTPUT = "tune.json"


class TuningTrainer(pl.Trainer):
    """Lightning's trainer, with the arguments of `sgmcmc plan` and `sgmcmc tune` for the command line's parser."""

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
        steps: int = 500,
        burn_in_steps: int = 500,
        tolerance: float = 0.2,
        max_probes: int = 10,
    ) -> None:
        """Propose a step size from short runs.

        Args:
            model: the module.
            datamodule: its data.
            steps: optimizer steps of a probe.
            burn_in_steps: optimizer steps at temperature 0 before the probes.
            tolerance: accepted relative deviation of temperatures.
            max_probes: the largest number of probes.
        """
        raise NotImplementedError("tune is a command: call sgmcmc tune, or lightning_sgmcmc.tune.propose_lr")


def tune(trainer: pl.Trainer, make_trainer: Callable[..., pl.Trainer], model: BayesianModule, **options: Any) -> None:
    """Propose a step size, print the table and write `tune.json` to the run's folder.

    Args:
        trainer: the configuration's trainer, with its callbacks and folder.
        make_trainer: makes a trainer of the same configuration; keyword arguments replace entries.
        model: the module.
        options: the arguments of `propose_lr`.
    """
    proposal = propose_lr(model, make_trainer=make_trainer, **options)
    schedule = schedule_of(trainer)
    factor = 1.0 if schedule is None else schedule.sampling_lr_factor
    folder = run_folder(trainer)
    if not trainer.is_global_zero:
        return
    setting = None if proposal.lr is None else proposal.lr / factor
    result = {
        "lr": proposal.lr,
        "is_bounded": proposal.is_bounded,
        "sampling_lr_factor": factor,
        "setting": setting,
        "probes": [asdict(probe) for probe in proposal.probes],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / OUTPUT
    path.write_text(json.dumps(result, indent=2) + "\n")
    console = Console()
    console.print(_table(proposal, path))
    if setting is None:
        _print_failure(console, proposal, options.get("tolerance", 0.2))
    else:
        _print_setting(console, proposal, setting, factor)


def _table(proposal: StepProposal, path: Path) -> Table:
    table = Table(title="Temperatures, share of gradient noise and energy by step size", caption=str(path))
    for column in ("lr", "kinetic", "configurational", "noise", "energy"):
        table.add_column(column, justify="right")
    table.add_column("verdict", no_wrap=True)
    for probe in proposal.probes:
        numbers = (probe.kinetic, probe.configurational, probe.noise_share)
        cells = ["–" if value is None else f"{value:.3g}" for value in numbers]
        energy = "–" if probe.energy is None else f"{probe.energy:.6g}"
        table.add_row(f"{probe.lr:.4g}", *cells, energy, probe.verdict)
    return table


def _print_failure(console: Console, proposal: StepProposal, tolerance: float) -> None:
    console.print(
        f"No step down to lr={proposal.probes[0].lr:.3g} was within {tolerance:.0%} of the target temperature: use "
        "more data per batch, more burn-in steps, or a smaller --model.init_args.lr to start from."
    )


def _print_setting(console: Console, proposal: StepProposal, setting: float, factor: float) -> None:
    console.print(f"Proposed: --model.init_args.lr={setting:.3g}", highlight=False)
    if factor != 1:
        console.print(f"(The cyclical schedule samples at up to {factor:.3g} of it, lr={proposal.lr:.3g}.)")
    if not proposal.is_bounded:
        console.print("It is the largest step tried; a larger one may be healthy too (raise --max_probes).")
    console.print(
        "The proposal limits the heat from mini-batch noise and discretization. Whether the chain is long enough, the "
        "ChainHealth callback reports during the run."
    )
