"""A short run at a step size, and what limits it."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth
from lightning_sgmcmc.callbacks.schedule import StepControls
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.diagnostics.findings import FindingKind
from lightning_sgmcmc.diagnostics.health import HealthReport, Temperatures
from lightning_sgmcmc.diagnostics.verdict import OFTEN_ACCEPTED
from lightning_sgmcmc.run.guard import NonFiniteEnergyError
from lightning_sgmcmc.tune.proposal import Limit, Probe, tail_mean
from lightning_sgmcmc.tune.runs import STILL, Energies, FixedControls, RunForm, ShortRuns, State
from lightning_sgmcmc.tune.training import Training

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
        heat = self._heat(report, total) if self.runs.acceptance is None else self._rejections()
        limit, reason = self._exploration(found) or heat or self._chance(report) or (None, "")
        share = max(report.gradient_noise_share.values(), default=None)
        nll, density = self._validation()
        if self.form.is_steady:
            density = None  # a smaller step leaves the chain colder, so validation data would choose a temperature
        energies = found.of(Stage.SAMPLING)
        energy = float(energies.mean()) if len(energies) else None
        probe = Probe(lr, total.kinetic, total.configurational, share, energy, nll, limit, reason, density)
        return replace(probe, acceptance=self.runs.acceptance)

    def _rejections(self) -> tuple[Limit, str] | None:
        """Return whether the run's test, which makes the law exact at any heat of the steps, rejects too many."""
        rate = self.runs.acceptance
        if rate is None or rate >= OFTEN_ACCEPTED:
            return None
        return Limit.ACCEPTANCE, f"acceptance: {rate:.2g} of the trajectories, wanted {OFTEN_ACCEPTED:g}"

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

    def _chance(self, report: HealthReport) -> tuple[Limit, str] | None:
        """Return whether the model is at chance."""
        chance = next((f for f in report.findings if f.kind is FindingKind.AT_CHANCE), None)
        return None if chance is None else (Limit.CHANCE, chance.sentence)
