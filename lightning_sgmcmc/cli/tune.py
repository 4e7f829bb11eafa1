"""`sgmcmc tune`: propose a step size for a configuration."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from lightning_sgmcmc.callbacks import CyclicalSchedule
from lightning_sgmcmc.callbacks.schedule import schedule_of
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.folder import run_folder
from lightning_sgmcmc.tune import StepProposal, propose_lr

# -- the command line -------------------------------------------------------------------------------------------------


class TuningTrainer(pl.Trainer):
    """Lightning's trainer, with the arguments of `sgmcmc tune`; the command line itself makes the probes."""

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
            max_probes: the most probes to make.
        """
        raise NotImplementedError("tune is a command: call sgmcmc tune, or lightning_sgmcmc.tune.propose_lr")


def tune(trainer: pl.Trainer, make_trainer: Callable[..., pl.Trainer], model: BayesianModule, **options: Any) -> None:
    """Propose a step size, print the table, write `tune.json` into the run's folder.

    Args:
        trainer: the trainer of the configuration, whose callbacks and folder are meant.
        make_trainer: makes a trainer of the same configuration, with keyword arguments replaced.
        model: the module.
        options: the arguments of `propose_lr`.
    """
    proposal = propose_lr(model, make_trainer=make_trainer, **options)
    factor = _sampling_lr_factor(trainer)
    folder = run_folder(trainer)
    if not trainer.is_global_zero:
        return
    folder.mkdir(parents=True, exist_ok=True)
    setting = None if proposal.lr is None else proposal.lr / factor
    result = {
        "lr": proposal.lr,
        "is_bounded": proposal.is_bounded,
        "sampling_lr_factor": factor,
        "setting": setting,
        "probes": [asdict(probe) for probe in proposal.probes],
    }
    (folder / "tune.json").write_text(json.dumps(result, indent=2) + "\n")
    _print(proposal, setting, factor, folder, options.get("tolerance", 0.2))


def _sampling_lr_factor(trainer: pl.Trainer) -> float:
    """Return the largest step size of the sampling stage over the configured lr."""
    schedule = schedule_of(trainer)
    if isinstance(schedule, CyclicalSchedule):
        return (math.cos(math.pi * schedule.exploration) + 1) / 2
    return 1.0


def _print(proposal: StepProposal, setting: float | None, factor: float, folder: Path, tolerance: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="Temperatures, share of gradient noise and energy by step size", caption=str(folder / "tune.json")
    )
    for column in ("lr", "kinetic", "configurational", "noise", "energy"):
        table.add_column(column, justify="right")
    table.add_column("verdict", no_wrap=True)
    for probe in proposal.probes:
        numbers = (probe.kinetic, probe.configurational, probe.noise_share)
        cells = ["–" if value is None else f"{value:.3g}" for value in numbers]
        energy = "–" if probe.energy is None else f"{probe.energy:.6g}"
        verdict = "healthy" if probe.healthy else probe.reason.split(":")[0]
        table.add_row(f"{probe.lr:.4g}", *cells, energy, verdict)
    console = Console()
    console.print(table)
    if setting is None:
        console.print(
            f"No step down to lr={proposal.probes[0].lr:.3g} was within {tolerance:.0%} of the target temperature: "
            "take more data per batch, more burn-in steps, or a smaller --model.init_args.lr to begin with."
        )
        return
    console.print(f"Proposed: --model.init_args.lr={setting:.3g}", highlight=False)
    if factor != 1:
        console.print(f"(the cyclical schedule samples at up to {factor:.3g} of it, lr={proposal.lr:.3g})")
    if not proposal.is_bounded:
        console.print("It is the largest step tried; a larger one may do as well (raise --max_probes).")
    console.print(
        "It bounds the heat of the step (mini-batch noise and discretization); whether the chain is long enough, the "
        "ChainHealth callback says during the run."
    )
