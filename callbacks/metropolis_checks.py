"""What a run needs so that the Metropolis test of its trajectories makes its law exact."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from lightning_sgmcmc.batches.rows import fault_of_order, has_short_steps
from lightning_sgmcmc.callbacks.schedule import Schedule, is_optimization
from lightning_sgmcmc.evaluation.passes import differs_in_training
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.run.trainer import callbacks_of, fit_steps, is_probe
from lightning_sgmcmc.samplers.reversible import ReversibleLangevin

FOREIGN = {
    "set controls": "changes the sampled law, and the test is of exp(-U/τ)",
    "choose gradient": "chooses a step's batch by the state, so a trajectory is not the same backwards",
    "snapshot gradients": "uses gradients of a snapshot, which a trajectory backwards would not have",
    "expand samples": "replaces the tested states by draws of its own",
}
"""Subjects of callbacks with which a test cannot be combined, and why."""

MOST_STEPS = 1_000_000
"""Steps of a run for which the schedule is compared with the trajectories."""


def check_run(trainer: pl.Trainer, module: BayesianModule, sampler: ReversibleLangevin, steps: int) -> None:
    """Raise for a run whose law a test of trajectories cannot make exact.

    Args:
        trainer: the run's.
        module: the run's.
        sampler: its sampler.
        steps: K, steps of a trajectory; 0 if unknown.

    Raises:
        ValueError: see `MetropolisTest`.
    """
    if steps == 0:
        raise ValueError(
            "the training loader has no length, so a trajectory of an epoch has no known steps: pass every_n_steps"
        )
    if is_optimization(trainer, module):
        raise ValueError("MetropolisTest needs a temperature above 0: at 0 there is no law to be exact about")
    if isinstance(module.prior, HierarchicalPrior):
        raise ValueError(
            "HierarchicalPrior draws its scales between steps, so U changes within a trajectory: use GaussianPrior"
        )
    if trainer.lr_scheduler_configs:
        scheduler = type(trainer.lr_scheduler_configs[0].scheduler).__name__
        raise ValueError(f"{scheduler} changes the step size within trajectories of MetropolisTest: remove it")
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer)):
        raise ValueError(
            "GradientAccumulationScheduler changes the data of a step, so a trajectory is not the same backwards: set "
            "the trainer's accumulate_grad_batches instead"
        )
    for subject, reason in FOREIGN.items():
        holder = module.chains.claims.holder(subject)
        if holder is not None:
            name = type(holder).__name__
            raise ValueError(f"MetropolisTest and {name} cannot be combined: {name} {reason}; remove one of them")


def check_trajectories(
    trainer: pl.Trainer, module: BayesianModule, sampler: ReversibleLangevin, schedule: Schedule, steps: int
) -> None:
    """Raise for trajectories that do not move, or that the batches or the schedule make unlike their reverse.

    Args:
        trainer: the run's.
        module: the run's.
        sampler: its sampler.
        schedule: its schedule, laid out.
        steps: K, steps of a trajectory.

    Raises:
        ValueError: with the reason and the remedy.
    """
    if steps < sampler.least_steps:
        raise ValueError(
            f"a trajectory of {steps} step does not move with {type(sampler).__name__}: pass every_n_steps of "
            f"at least {sampler.least_steps}, or use sampler=AMAGOLD"
        )
    length = fit_steps(trainer) - module.chains.progress.warm_steps
    fault = fault_of_order(trainer, steps) or fault_of_schedule(schedule, steps, length)
    if fault is not None:
        raise ValueError(f"the trajectories of MetropolisTest must be as likely backwards, but {fault}")


def warn_of_other_laws(trainer: pl.Trainer, module: BayesianModule) -> None:
    """Warn of a network or of batches with which the tested law is another one, or not quite exact."""
    if is_probe(trainer):
        return
    if differs_in_training(module):
        rank_zero_warn(
            "MetropolisTest computes energies in evaluation mode, so with dropout the law is that of the network "
            "without it, and few trajectories are accepted; with BatchNorm, whose statistics change within a "
            "trajectory, the law is not exact: use other layers, or module.eval() for BatchNorm."
        )
    if has_short_steps(trainer):
        rank_zero_warn(
            "The last step of an epoch has fewer data than the others, so trajectories are not quite the same "
            "backwards, and the law of MetropolisTest is not quite exact: pass drop_last=True, or a batch_size "
            "that divides the data."
        )


def fault_of_schedule(schedule: Schedule, trajectory: int, steps: float) -> str | None:
    """Return why a schedule does not fit trajectories, and the remedy; None if it does.

    Args:
        schedule: the run's, laid out.
        trajectory: K, steps of a trajectory.
        steps: steps of the schedule.
    """
    held: Any = None
    for step in range(1, int(min(steps, MOST_STEPS)) + 1):
        lr_factor, temperature, _, temperature_factor = schedule.controls(step)
        now = temperature if temperature == 0 else (lr_factor, temperature, temperature_factor)
        if step % trajectory == 1 or trajectory == 1:
            held = now
        elif now != held:
            return (
                f"{type(schedule).__name__} changes the step size or the temperature with step {step}, within a "
                f"trajectory of {trajectory} steps: keep them constant (SamplingSchedule), and let stages end with "
                "trajectories"
            )
        if step % trajectory and schedule.draws(step):
            return (
                f"{type(schedule).__name__} draws a sample at step {step}, within a trajectory of {trajectory} steps: "
                f"let draws be multiples of {trajectory} steps apart, after as many of burn-in, or pass every_n_steps"
            )
    return None
