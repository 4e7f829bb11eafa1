"""A short run at a step size, and what limits it."""

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.diagnostics.findings import FindingKind
from lightning_sgmcmc.diagnostics.health import HealthReport, Temperatures
from lightning_sgmcmc.run.guard import NonFiniteEnergyError
from lightning_sgmcmc.tune.proposal import Limit, Probe, tail_mean
from lightning_sgmcmc.tune.runs import Energies, ShortRuns
from lightning_sgmcmc.tune.short_form import RunForm
from lightning_sgmcmc.tune.training import Training

KEPT_SHARE = 0.5
"""The share of what was learned that an exploration stage must keep."""


@dataclass
class Prober:
    """Makes probes from the warmed-up state.

    Args:
        runs: makes the fits.
        training: the warmed-up state.
        form: the run's stages.
        steps: optimizer steps of a probe.
        tolerance: accepted relative deviation of temperatures.
    """

    runs: ShortRuns
    training: Training
    form: RunForm
    steps: int
    tolerance: float

    def __call__(self, lr: float) -> Probe:
        """Return the probe of a step size."""
        if not self.training.is_warm and self.form.lead > 1 and not self.training.trains(lr):
            reason = f"the first steps from the run's start do not lower the energy at lr={lr:.3g}"
            return Probe(lr, limit=Limit.EXPLORATION if self.form.explores else Limit.DISCRETIZATION, reason=reason)
        self.runs.set_state(self.training.state)
        self.training.set_lr(lr)
        module = self.runs.module
        module.health, module.evaluations = None, {}
        health = ChainHealth(every_n_steps=max(1, min(20, self.steps // 100)), tolerance=self.tolerance, warn=False)
        try:
            found = self.runs.fit(
                self.form.short(self.steps), self.steps, BayesianModelAverage(), health, with_noise=True
            )
        except ValueError as error:  # the sampler refuses the step
            return Probe(lr, limit=Limit.DISCRETIZATION, reason=f"refused: {error}")
        except NonFiniteEnergyError as error:
            exploring = module.chains.progress.stage is Stage.EXPLORATION
            limit = Limit.EXPLORATION if exploring else Limit.DISCRETIZATION
            return Probe(lr, limit=limit, reason=f"divergence: {error}")
        return self._judge(lr, found)

    def _judge(self, lr: float, found: Energies) -> Probe:
        report = self.runs.module.health
        assert report is not None
        total = report.total or Temperatures()
        limit, reason = self._exploration(found) or self._heat(report, total) or (None, "")
        share = max(report.gradient_noise_share.values(), default=None)
        nll, density = self._validation()
        energies = found.of(Stage.SAMPLING)
        energy = float(energies.mean()) if len(energies) else None
        return Probe(lr, total.kinetic, total.configurational, share, energy, nll, limit, reason, density)

    def _validation(self) -> tuple[float | None, Tensor | None]:
        evaluation = self.runs.module.evaluations.get("val")
        if evaluation is None or evaluation.average is None:
            return None, None
        density = evaluation.average.log_density.double().cpu()
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

    def _heat(self, report: HealthReport, total: Temperatures) -> tuple[Limit, str] | None:
        """Return what heats the sampling stage."""
        heat = next((finding for finding in report.findings if finding.is_heat), None)
        if heat is not None:
            noise = any(finding.kind is FindingKind.GRADIENT_NOISE for finding in report.findings)
            return (Limit.GRADIENT_NOISE if noise else Limit.DISCRETIZATION), heat.sentence
        limit, energy = report.temperature * (1 + self.tolerance), report.energy
        if total.kinetic is not None and total.kinetic > limit:
            return Limit.DISCRETIZATION, f"kinetic temperature: {total.kinetic:.3g} in all tensors together"
        if energy.mean is not None and energy.std is not None:
            numel = sum(entry.numel or 0 for entry in report.tensors.values())
            highest = self.training.energy + limit * numel / 2
            if energy.mean - energy.std > highest:
                reason = f"energy: {energy.mean:.6g} is above the expected {highest:.6g}"
                return Limit.DISCRETIZATION, reason
        chance = next((f for f in report.findings if f.kind is FindingKind.AT_CHANCE), None)
        return None if chance is None else (Limit.CHANCE, chance.sentence)
