"""A short run at a step size, and what limits it; before it, the warmed-up state from which it begins."""

import copy
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth, WarmStart
from lightning_sgmcmc.chains.schedule import StepControls
from lightning_sgmcmc.chains.state import NonFiniteEnergyError, Stage
from lightning_sgmcmc.health.findings import FindingKind
from lightning_sgmcmc.health.report import HealthReport, Temperatures
from lightning_sgmcmc.health.verdict import OFTEN_ACCEPTED
from lightning_sgmcmc.namespace import rank_zero_info
from lightning_sgmcmc.tune.proposal import Limit, Probe, scaled, tail_mean
from lightning_sgmcmc.tune.runs import COLD, STILL, Energies, FixedControls, RunForm, ShortRuns, State, optimization

TRIAL_STEPS = 50
"""Optimizer steps of a trial."""
MAX_TRIALS = 14
FACTOR = 8.0
"""Between the step sizes of two trials; far from the right one it is the square."""
LEARNED = 0.05
"""The share of the energy to lose that a trained chain may still have."""


@dataclass(frozen=True)
class Trial:
    """Steps of optimization from the start: mean Ũ of the last third, infinite if they diverged, and its error."""

    lr: float
    energy: float
    error: float
    state: State

    @property
    def bound(self) -> float:
        """An energy that is certainly not lower."""
        return self.energy + 2 * self.error


@dataclass
class Training:
    """Trials of optimization, and the warmed-up state that they led to, with the lowest Ũ.

    `setting` is the module's lr, `given` the largest number in it, and `lr` what lowers the start's energy most.
    """

    runs: ShortRuns
    setting: Any
    given: float
    start_energy: float
    start_error: float = 0.0
    energy: float = math.inf
    state: State = field(default_factory=list)
    lr: float = 0.0
    _trials: dict[float, Trial] = field(default_factory=dict)
    _curve: list[tuple[float, float]] = field(default_factory=list)

    def set_lr(self, lr: float) -> None:
        """Set the module's lr, all its patterns and chains in proportion."""
        self.runs.module.lr = scaled(self.setting, lr / self.given)

    def warm_up(self, steps: int) -> None:
        """Find a good state and a step size that trains, by trials and a burn-in of some steps."""
        self._start = self.runs.state()
        self._warm_start(steps)
        self.state, self.energy = self._start, self.start_energy
        best = self._best_trial()
        self.lr = best.lr
        if best.energy < self.start_energy or not math.isfinite(self.start_energy):
            self.state, self.energy = best.state, best.energy
        self._burn_in(best.lr, steps)

    def _warm_start(self, steps: int) -> None:
        """Begin where the run's warm start leads, in short form."""
        given = self.runs.warm_start
        if not isinstance(given, WarmStart):
            return
        short = copy.copy(given)
        short.steps, short.epochs, short.early_stopping = max(1, min(steps, given.steps or steps)), None, None
        short.reset()
        last = STILL if self.runs.is_microcanonical else COLD  # a hot step would leave the optimum
        energy = tail_mean(self.runs.try_fit(optimization(1, controls=last), short.steps + 1, short)[1:])
        if energy < self.start_energy:
            self._start, self.start_energy = self.runs.state(), energy
            self.is_warm = True
        else:
            self.runs.set_state(self._start)

    is_warm = False
    """Whether the run's chains begin to sample from a warm start."""

    def trial(self, lr: float) -> Trial:
        """Optimize from the start at the full lr, once for each lr."""
        if lr in self._trials:
            return self._trials[lr]
        self.runs.set_state(self._start)
        self.set_lr(lr)
        energies = self.runs.try_fit(optimization(TRIAL_STEPS, controls=self.runs.training_controls), TRIAL_STEPS)
        energy, error = tail_mean(energies), 0.0
        if math.isfinite(energy):
            last = energies[-max(2, len(energies) // 3) :].mean(1)
            error = float(last.std()) / math.sqrt(len(last))
            means, width = energies.mean(1).tolist(), max(1, len(energies) // 5)
            for end in range(width, len(means) + 1, width):
                self._curve.append((lr * (end - width / 2), sum(means[end - width : end]) / width))
        self._trials[lr] = Trial(lr, energy, error, self.runs.state())
        return self._trials[lr]

    def trains(self, lr: float) -> bool:
        """Return whether optimization at the full lr from the run's start does not raise its energy."""
        found = self.trial(lr)
        return found.energy - 2 * found.error <= self.start_energy + 2 * self.start_error

    def _best_trial(self) -> Trial:
        """Raise or lower the step size until the best one is between two worse ones."""
        lr = 2.0 ** round(math.log2(self.given))
        tried = [self.trial(lr)]
        while len(tried) < MAX_TRIALS:
            best = self._best(tried)
            above = [t for t in tried if t.lr > best.lr]
            below = [t for t in tried if t.lr < best.lr]
            gain = self.start_energy - best.energy
            is_far = gain < 0.01 * abs(self.start_energy)
            if math.isinf(best.energy) or not (above or is_far or below):
                tried.append(self.trial(min(t.lr for t in tried) / FACTOR if math.isinf(best.energy) else lr * FACTOR))
            elif not above:
                tried.append(self.trial(best.lr * FACTOR ** (2 if is_far else 1)))
            elif min(t.lr for t in above) > best.lr * FACTOR * 1.01:
                tried.append(self.trial(best.lr * FACTOR))
            elif not below:
                tried.append(self.trial(best.lr / FACTOR))
            else:
                break
        return self._best(tried)

    @staticmethod
    def _best(tried: list[Trial]) -> Trial:
        """Return the largest step size whose energy is as low as the lowest, beyond noise."""
        lowest = min(tried, key=lambda t: t.bound)
        if math.isinf(lowest.energy):
            return min(tried, key=lambda t: t.lr)
        return max((t for t in tried if t.energy - 2 * t.error <= lowest.bound), key=lambda t: t.lr)

    def _burn_in(self, lr: float, steps: int) -> None:
        """Optimize from the best state with a step that shrinks; keep the result only if its energy is lower."""
        factor = 0.5
        for _ in range(3 if steps > 0 else 0):
            self.runs.set_state(self.state)
            self.set_lr(lr * factor)
            energy = tail_mean(self.runs.try_fit(optimization(steps, True, self.runs.training_controls), steps))
            if energy < self.energy:
                reached = min(TRIAL_STEPS * lr, max((time for time, _ in self._curve), default=0.0))
                self._curve.append((reached + lr * factor * steps / 2, energy))
                self.state, self.energy = self.runs.state(), energy
                return
            factor /= 10

    @property
    def time(self) -> float:
        """lr times steps after which a chain is trained, 0 if the run begins with a warm start."""
        gain = self.start_energy - self.energy
        if self.is_warm or not gain > 0 or not self._curve:
            return 0.0
        enough = self.energy + LEARNED * gain
        return min((time for time, energy in self._curve if energy <= enough), default=0.0)


STILL_STEPS = 150
"""Steps of no length that fill a preconditioner's average.

A fit's sampler begins with an average of 0. At an optimum, where gradients are small, its first steps would move the
parameters so far that a probe of any length saw heat, which a run that begins elsewhere does not have."""
REPEATS = 1
"""Further runs of a probe in which only positions are hot, each from the end of the last."""
KEPT_SHARE = 0.5
"""The share of what was learned that an exploration stage must keep."""
LEAST_TRAJECTORIES = 8
"""Of a probe with a `MetropolisTest`."""


@dataclass
class Prober:
    """Makes probes of some steps from the warmed-up state; `tested`: the run's `MetropolisTest` takes part."""

    runs: ShortRuns
    training: Training
    form: RunForm
    steps: int
    tolerance: float
    tested: bool = True

    def __call__(self, lr: float) -> Probe:
        """Return the probe of a step size."""
        probe = self._repeated(lr)
        rank_zero_info(f"lr={lr:.3g}: {probe.verdict}")
        return probe

    def _repeated(self, lr: float) -> Probe:
        if not self.training.is_warm and self.form.lead > 1 and not self.training.trains(lr):
            reason = f"the first steps from the run's start do not lower the energy at lr={lr:.3g}"
            return Probe(lr, limit=Limit.EXPLORATION if self.form.explores else Limit.DISCRETIZATION, reason=reason)
        state = self.training.state
        for _ in range(1 + REPEATS):
            probe = self._probe(lr, state)
            if not self._is_passing(probe):
                break
            state = self.runs.state()
        return probe

    def _probe(self, lr: float, state: State) -> Probe:
        """Return the probe of a step size from a state."""
        self.runs.set_state(state)
        self.training.set_lr(lr)
        module = self.runs.module
        module.health, module.evaluations = None, {}
        health = ChainHealth(every_n_steps=max(1, min(20, self.steps // 100)), tolerance=self.tolerance, warn=False)
        first = self._first_steps()
        trajectory = self.runs.trajectory if self.tested else 1
        steps = trajectory * max(LEAST_TRAJECTORIES, math.ceil(self.steps / trajectory))
        schedule = self.form.short(steps, first, trajectory)
        try:
            found = self._fit(schedule, len(first) + steps, health)
        except ValueError as error:  # the sampler refuses the step
            return Probe(lr, limit=Limit.DISCRETIZATION, reason=f"refused: {error}", refusal=str(error))
        except NonFiniteEnergyError as error:
            exploring = module.chains.progress.stage is Stage.EXPLORATION
            limit = Limit.EXPLORATION if exploring else Limit.DISCRETIZATION
            return Probe(lr, limit=limit, reason=f"divergence: {error}")
        return self._judge(lr, found)

    def _first_steps(self) -> list[StepControls]:
        """Return the controls of the steps before a probe, in which a preconditioner is estimated."""
        return [STILL] * STILL_STEPS if self.runs.has_preconditioner else []

    def _fit(self, schedule: FixedControls, steps: int, health: ChainHealth) -> Energies:
        callbacks = [BayesianModelAverage(), health]
        return self.runs.fit(schedule, steps, *callbacks, with_noise=True, tested=self.tested)

    def _is_passing(self, probe: Probe) -> bool:
        """Return whether only positions are hot: that may be the memory of the start.

        A step that is too large heats momenta and steps at once. Energies and configurational temperatures may also
        overshoot on the way from an optimum, the more so with a preconditioner, which is large there.
        """
        report = self.runs.module.health
        if report is None or probe.limit is not Limit.DISCRETIZATION or probe.energy is None or self.form.explores:
            return False
        if probe.kinetic is not None and probe.kinetic > report.temperature * (1 + self.tolerance):
            return False
        return not any(f.is_heat and f.kind is not FindingKind.CONFIGURATIONAL for f in report.findings)

    def _judge(self, lr: float, found: Energies) -> Probe:
        report = self.runs.module.health
        assert report is not None
        total = report.total or Temperatures()
        rate, heat = self.runs.acceptance, None
        if rate is None:
            heat = self._heat(report, total)
        elif rate < OFTEN_ACCEPTED:  # the test makes the law exact at any heat of the steps
            wanted = f"acceptance: {rate:.2g} of the trajectories, wanted {OFTEN_ACCEPTED:g}"
            heat = Limit.ACCEPTANCE, wanted
        at_chance = [(Limit.CHANCE, f.sentence) for f in report.findings if f.kind is FindingKind.AT_CHANCE]
        limit, reason = self._exploration(found) or heat or next(iter(at_chance), (None, ""))
        share = max(report.gradient_noise_share.values(), default=None)
        nll, density = self._validation()
        if self.form.is_steady:
            density = None  # a smaller step leaves the chain colder, so validation data would choose a temperature
        energies = found.of(Stage.SAMPLING)
        energy = float(energies.mean()) if len(energies) else None
        probe = Probe(lr, total.kinetic, total.configurational, share, energy, nll, limit, reason, density)
        return replace(probe, acceptance=rate)

    def _validation(self) -> tuple[float | None, Tensor | None]:
        evaluation = self.runs.module.evaluations.get("val")
        if evaluation is None or evaluation.average is None:
            return None, None
        density = evaluation.average.log_density.cpu().double()
        nll = -float(density.mean())
        return (nll, density) if math.isfinite(nll) else (None, None)

    def _exploration(self, found: Energies) -> tuple[Limit, str] | None:
        """Return what is wrong with the exploration stage."""
        energies = found.of(Stage.EXPLORATION)
        if not len(energies):
            return None
        start = self.training.start_energy
        if self.runs.chance is not None:
            start = min(start, self.runs.chance - self._log_prior)
        highest = self.training.energy + (1 - KEPT_SHARE) * max(start - self.training.energy, 0.0)
        end = tail_mean(energies, 0.25)
        if end <= max(highest, self.training.energy + 0.01 * abs(self.training.energy)):
            return None
        return Limit.EXPLORATION, f"exploration ends at {end:.6g} nats, from {self.training.energy:.6g}"

    @cached_property
    def _log_prior(self) -> float:
        """log p(θ) of the warmed-up state, which all probes share."""
        module = self.runs.module
        present = self.runs.state()
        self.runs.set_state(self.training.state)
        with module.at_chain(0):
            log_prior = float(module.log_prior())
        self.runs.set_state(present)
        return log_prior

    def _noise(self, report: HealthReport) -> tuple[str, float]:
        """Return the tensor with the most mini-batch noise, and its relative contribution to the temperature.

        A finding needs an interval beyond the tolerance, and that of a short run is wide. The run's own is narrow, so
        the estimate decides here.
        """
        sampler = self.runs.module.sampler
        laws = [sampler.law(group) or sampler.langevin_law(group) for group in sampler.param_groups]
        allowance = max(law.gradient_noise_allowance for law in laws)
        if math.isinf(allowance) or not report.gradient_noise_share:
            return "", 0.0
        name, share = max(report.gradient_noise_share.items(), key=lambda pair: pair[1])
        return name, share / max(1 - share, 1e-9) * (1 - allowance) - allowance

    def _heat(self, report: HealthReport, total: Temperatures) -> tuple[Limit, str] | None:
        """Return what heats the sampling stage."""
        heat = next((finding for finding in report.findings if finding.is_heat), None)
        if heat is not None:
            noise = any(finding.kind is FindingKind.GRADIENT_NOISE for finding in report.findings)
            return (Limit.GRADIENT_NOISE if noise else Limit.DISCRETIZATION), heat.sentence
        noisiest, excess = self._noise(report)
        if excess > self.tolerance:
            return Limit.GRADIENT_NOISE, f"gradient noise: {excess:.0%} of the injected noise in {noisiest}"
        limit, energy = report.temperature * (1 + self.tolerance), report.energy
        if total.kinetic is not None and total.kinetic > limit:
            return Limit.DISCRETIZATION, f"kinetic temperature: {total.kinetic:.3g} in all tensors together"
        if energy.mean is not None and energy.std is not None:
            numel = sum(entry.numel or 0 for entry in report.tensors.values())
            highest = self.training.energy + limit * numel / 2
            if energy.mean - energy.std > highest:
                reason = f"energy: {energy.mean:.6g} is above the expected {highest:.6g}"
                return Limit.DISCRETIZATION, reason
        return None
