"""`propose_lr`: the setting of lr for a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from lightning_sgmcmc.chains.chains import values_of
from lightning_sgmcmc.checks import check_count, check_positive
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.run.guard import NonFiniteEnergyError
from lightning_sgmcmc.samplers.sampler import NO_COLD_LIMIT
from lightning_sgmcmc.tune.mclmc import EnergyProber, choose_by_energy, solve
from lightning_sgmcmc.tune.probes import Prober
from lightning_sgmcmc.tune.proposal import (
    Limit,
    Probe,
    StepProposal,
    choose,
    repeat_longer,
    scaled,
    search,
    tail_mean,
)
from lightning_sgmcmc.tune.runs import RunForm, ShortRuns
from lightning_sgmcmc.tune.training import Training

MIN_STEPS = 100
"""The fewest steps of a probe."""
MAX_STEPS = 500
"""The most steps of a probe whose length is not given."""
LONGER = 4
"""A probe that decides by validation data is so many times as long, or as long as the run's first stages."""
RUN_SHARE = 8
"""A probe whose length is not given has the run's steps over this number."""


def propose_lr(
    module: BayesianModule,
    train_dataloaders: Any = None,
    datamodule: pl.LightningDataModule | None = None,
    val_dataloaders: Any = None,
    *,
    steps: int | None = None,
    burn_in_steps: int | None = None,
    tolerance: float = 0.2,
    max_probes: int = 10,
    make_trainer: Callable[..., pl.Trainer] = pl.Trainer,
) -> StepProposal:
    """Return the setting of the module's lr for a run: the largest at which short runs are healthy.

    `make_trainer` makes the run's trainer, so that its schedule, length, batches, accumulation, clipping, warm start
    and the callbacks that change the gradient's noise (`EWSG`, `ControlVariates`, …) are known. The call first
    optimizes from the run's start in some steps at several step sizes, and continues from the best with a step that
    shrinks; so the module's own lr may be wrong by many powers of ten. From the state that it reached, each probe runs
    the first cycle, or burn-in and sampling, in short form. A probe is unhealthy

    * if the first steps from the run's start raise the energy, or the exploration stage (the full lr at temperature 0)
      diverges or ends with less than half of what had been learned ("exploration");
    * if a `MetropolisTest` accepts less than 0.65 of the trajectories ("acceptance"), where the chains sample: they are
      moved there without it, at the largest step that is right without it;
    * if `ChainHealth` finds heat in the sampling stage, if the estimate of a tensor's mini-batch noise is above
      tolerance times the injected noise, the kinetic temperature of all tensors together above τ·(1 + tolerance), or
      the energy above that of d harmonic coordinates, U_0 + τ·(1 + tolerance)·d/2, with U_0 the energy of the
      warmed-up state ("gradient noise", "discretization"), or if the model is at chance.

    Temperatures below τ do not count: they depend on the length of the run. Step sizes are tried by factors of two up
    or down until health changes, and twice between. Where a run ends in one stage of sampling at a constant step, the
    proposal is the largest healthy one: a smaller step only leaves the chain colder, and whether that predicts better
    is a question of the temperature. In other runs it is the largest healthy one that trains within the first stage
    and whose average predicts the validation data as well as the best, within noise. Short runs favour small steps, so
    where these data speak against the largest healthy step, longer probes decide. If none is healthy, it is the best of
    those tried.

    `MCLMC` and `pMCLMC`, which cannot heat, get the lr at which the energy error of a step has a variance of 5e-4 for
    each coordinate (Robnik et al. 2023), from probes at step sizes that the law lr⁶ corrects. Both ends of a step are
    taken on the step's own mini-batch (see `lightning_sgmcmc.tune.mclmc.EnergyErrors`), so the energies' noise
    between batches does not count. They also get a friction, from the width of the positions in the probes; all
    chains get one.

    The call restores the module: parameters and buffers, lr, evaluations.

    Args:
        module: the module; its lr is a number, or numbers by pattern and chain, which are scaled together.
        train_dataloaders: training data, or
        datamodule: the datamodule that has them and validation data.
        val_dataloaders: validation data; the test data are never used.
        steps: optimizer steps of a probe, at least 100; None is an eighth of the run's, between 100 and 500.
        burn_in_steps: optimizer steps at temperature 0 before the probes; None is the same as steps.
        tolerance: accepted relative deviation of temperatures.
        max_probes: the largest number of probes.
        make_trainer: makes the run's trainer, such as `functools.partial(Trainer, max_epochs=200, callbacks=[…])`;
            keyword arguments replace its own.

    Raises:
        ValueError: for an argument out of range, a module at temperature 0, a schedule that the sampler refuses, or a
            run of which no probe could begin.
        TypeError: if the module is not a `BayesianModule`.
    """
    _check_arguments(module, steps, burn_in_steps, tolerance, max_probes)
    data: dict[str, Any] = {"train_dataloaders": train_dataloaders, "datamodule": datamodule}
    if val_dataloaders is not None:
        data["val_dataloaders"] = val_dataloaders
    runs = ShortRuns(module, data, make_trainer)
    _check_temperature(module, runs)
    module.configure_model()  # stacks several chains, for good
    with runs.restored():
        start = runs.state()
        energies, setting = runs.look()
        runs.set_state(start)
        setting = dict(setting) if hasattr(setting, "items") else setting
        given = max(values_of(setting))
        form = RunForm(runs.schedule, runs.length._replace(lr=setting if isinstance(setting, int | float) else given))
        length = steps or _length(runs.length.steps)
        energy, error = tail_mean(energies, 1.0), float(energies.mean(1).std()) / len(energies) ** 0.5
        training = Training(runs, setting, given, energy, error)
        _check_stages(form, runs)
        training.warm_up(length if burn_in_steps is None else burn_in_steps)
        rank_zero_info(f"Warmed up: energy {energy:.6g} to {training.energy:.6g} nats.")
        if runs.is_microcanonical:
            probes = solve(EnergyProber(runs, training, form, length, tolerance), training.lr, max_probes)
            lr, friction, is_healthy, reason = choose_by_energy(probes)
            return _proposal(runs, setting, lr, Limit.ENERGY_ERROR, is_healthy, reason, probes, friction)
        prober = Prober(runs, training, form, length, tolerance)
        least = training.time / form.lead if form.lead > 1 else 0.0
        first = _heat(prober, least, max_probes) if runs.is_tested else training.lr
        probes = search(prober, first, least, max_probes)
        longer = replace(prober, steps=max(length, min(LONGER * length, form.stage_end)))
        if longer.steps > length:
            probes = repeat_longer(probes, longer, least, training.lr)
        _check_refusals(probes)
        lr, limit, is_healthy, reason = choose(probes, least, training.lr)
        return _proposal(runs, setting, lr, limit, is_healthy, reason, probes)


def _proposal(
    runs: ShortRuns,
    setting: Any,
    lr: float,
    limit: Limit,
    is_healthy: bool,
    reason: str,
    probes: Sequence[Probe],
    friction: float | None = None,
) -> StepProposal:
    """Return the proposal, with the module's setting in proportion."""
    setting = scaled(setting, lr / max(values_of(setting)))
    ordered = tuple(sorted(probes, key=lambda p: p.lr))
    return StepProposal(lr, setting, limit, is_healthy, reason, ordered, runs.steps_made, runs.length.steps, friction)


def _length(run_steps: float) -> int:
    return int(max(MIN_STEPS, min(MAX_STEPS, run_steps // RUN_SHARE)))


def _check_arguments(
    module: Any, steps: int | None, burn_in_steps: int | None, tolerance: float, max_probes: int
) -> None:
    if not isinstance(module, BayesianModule):
        raise TypeError(
            f"propose_lr works with a BayesianModule, got {type(module).__name__}: derive the module from "
            "lightning_sgmcmc.BayesianModule"
        )
    check_count("steps", steps, least=MIN_STEPS)
    check_count("burn_in_steps", burn_in_steps, least=0)
    check_positive("tolerance", tolerance)
    check_count("max_probes", max_probes, optional=False)
    numbers = [number for number in values_of(module.lr) if number is not None]
    if any(number == 0 for number in numbers):
        raise ValueError("lr is 0: set the module's lr to a step size to start the search from")


def _heat(prober: Prober, least: float, max_probes: int) -> float:
    """Move the chains from the optimum towards typical states without their test; return the largest right step.

    At an optimum the mini-batch noise is smaller than where a chain samples, so a test would accept more.
    """
    runs, training = prober.runs, prober.training
    untested = replace(prober, tested=False)
    lr, *_ = choose(search(untested, training.lr, least, max_probes), least, training.lr)
    runs.set_state(training.state)
    training.set_lr(lr)
    steps = LONGER * prober.steps
    try:
        energies = runs.fit(prober.form.steady(steps), steps, with_noise=True, tested=False)
    except NonFiniteEnergyError:  # no step was healthy
        return lr
    training.state, training.energy = runs.state(), tail_mean(energies.of())
    rank_zero_info(f"Without MetropolisTest at lr={lr:.3g}: energy {training.energy:.6g} nats.")
    return lr


def _check_refusals(probes: Sequence[Probe]) -> None:
    """Raise if the smallest step is refused too: then the reason is not the step."""
    smallest = min(probes, key=lambda probe: probe.lr)
    if smallest.refusal and not any(probe.healthy for probe in probes):
        raise ValueError(f"no short run could begin: {smallest.refusal}")


def _check_stages(form: RunForm, runs: ShortRuns) -> None:
    """Raise for a schedule with a cold stage and a sampler that makes no step there."""
    if form.explores and not runs.module.sampler.has_cold_limit:
        raise ValueError(NO_COLD_LIMIT.format(type(runs.module.sampler).__name__))


def _check_temperature(module: BayesianModule, runs: ShortRuns) -> None:
    own = getattr(runs.schedule, "temperature", None)
    temperature = module.temperature if own is None else own
    if not any(values_of(temperature)):
        raise ValueError("at temperature 0 the chain does not sample, so no step is too hot: set temperature")
