"""The verdict on a run: is it at chance, relaxed, too large for its data, mixed, better with more samples?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lightning_sgmcmc.diagnostics.draws import MIXED, ChainDiagnostics
from lightning_sgmcmc.health.estimates import Estimates
from lightning_sgmcmc.health.findings import SMALLER_LR, STILL_FALLING, Finding, FindingKind, Severity
from lightning_sgmcmc.health.report import (
    COLD,
    DEEP,
    POSTERIOR,
    SNAPSHOT,
    HealthReport,
    RunMeasures,
    TemperatureKind,
    Temperatures,
)
from lightning_sgmcmc.planning.plan import COLD_BELOW, COOL_SHARE, HOT_SHARE, LEAST_RELAXATION_TIMES, WANTED

FLAT = 0.05
"""Root mean square of κ - 1 below which a contour is said to do nothing: steps differ by less than 5 %."""
LEAST_STEPS = 500
"""Steps before a contour is judged."""
DOMINANT_WEIGHT = 0.9
"""Share of one sample in all weights above which the average is called useless."""
FEW_SAMPLES = 10
"""Samples before the weights are judged."""
AT_CHANCE = 0.05
"""A model gains less than this share of the energy of chance (in regression, this many nats) over a guess."""
LONGEST = 10.0
"""A run is not advised to be longer than this many times."""
FEWEST_DRAWS = 20
"""With fewer draws of a chain, R-hat and ESS of predictions are not measurable."""
HOT_ABOVE = 2.0
"""A chain that is certainly hotter than so many τ is neither a posterior sample nor a cold ensemble."""
FEW_PARAMETERS = 1000
"""NUTS with the gradients of all data is advised for at most so many."""
LOST_SHARE = 0.25
"""A target has too many parameters for the data if its thermal energy is `HOT_SHARE` of the energy of chance, and its
samples lose this share."""
MISSED, LEAST_WEIGHED = 0.1, 50
"""A contour's weights miss what was expected if their efficiency is lower by this, of so many samples at least."""
LEAST_SHARE = 2e-3
"""A configurational temperature below this share of τ is called near 0, and measures no relaxation time."""
SELDOM_ACCEPTED = 0.1
"""Trajectories of a `MetropolisTest` are seldom accepted if a smaller share than this is."""
OFTEN_ACCEPTED = 0.65
"""Where a smaller share of trajectories is accepted, rejections slow a chain down (Beskos et al. 2013, for HMC)."""
WORSE_BY = 0.1
"""The average is worse with more samples if it loses this share of what averaging gains."""
TREND = 3.0
"""Standard errors by which the later half of the samples is worse."""


@dataclass(frozen=True)
class ContourUse:
    """What a contour did.

    Attributes:
        spread: root mean square of κ - 1 over the run's energies, at the last π.
        steps: steps that it learned from, for each π.
        samples: weighted samples, for each constant of the weights.
        efficiency: (Σw)²/(S·Σw²) of the samples' weights, None without samples.
        largest_share: share of the largest weight, None without samples.
        promised: the efficiency that a choice from the warm-up expected, None without one.
    """

    spread: float
    steps: int
    samples: int = 0
    efficiency: float | None = None
    largest_share: float | None = None
    promised: float | None = None


@dataclass(frozen=True)
class AverageGrowth:
    """How the model average's NLL, in nats per example, changed with the number of samples, lowest with `best` of them.

    `single` is the NLL of each sample, and `certain` whether the difference's interval over the data is off zero.
    """

    best: int
    count: int
    best_nll: float
    nll: float
    single: Sequence[float]
    certain: bool = True


class ParameterMixing(NamedTuple):
    """How the sampled number that mixes worst does: its name, split R-hat, the R-hat that draws of one law rarely
    exceed, bulk effective sample size, and the count of all sampled numbers."""

    name: str
    rhat: float
    limit: float
    ess: float
    sampled: int

    @property
    def sentence(self) -> str:
        """The measured values."""
        return (
            f"R-hat of {self.name} is {self.rhat:.2f}, but should be below {self.limit:.2f} (effective sample size "
            f"{self.ess:.0f})"
        )


class EarlyEnergy(NamedTuple):
    """Mean energies, in nats: of the first quarter of the samples, of the others, and by how much they may differ by
    chance."""

    first: float
    later: float
    error: float


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run besides its steps; an unknown part is None.

    Attributes:
        temperature: τ of the sampling stages, 0 for an optimization; None uses the observed one.
        num_chains: chains of the run.
        num_data: N.
        chance_nll: NLL per example of a model that knows the labels' frequencies alone, in nats.
        has_classes: whether that is an entropy, so that a share of it is meaningful.
        prior_norm: the factors (a, b) with ‖θ‖²/(d·σ²) = a - b·log p(θ).
        relaxation_times: those that the plan expects.
        is_cyclical: whether a schedule explores between its sampling stages.
        contour: what a contour did, which flattens the density of energies; None without one.
        predictions: diagnostics of the predictions along the chains.
        rhat_limit: R-hat that mixed chains of this length rarely exceed.
        parameters: how the parameters mix, None for a network with hidden units, whose parameters are not identified.
        early: energies of the first samples and of the others, None without comparable samples.
        growth: how the average changed with its samples.
        cold_below: a temperature at most this is a cold posterior's by intention.
        baseline: what a baseline calls itself, None for a run that samples.
        is_full_batch: whether a batch has all data and the network drops nothing out, so gradients have no noise.
        adapting: the sampler whose preconditioner adapts while samples are drawn, None without.
        acceptance: mean acceptance probability of a `MetropolisTest`, None without. The test makes the law exact, so
            no excess variance or clipping of the steps is a finding.
        has_hidden: whether some weights follow others, so that units between them may be dead.
        has_moved_target: whether the run had several scales of the prior or several temperatures. Energies have the
            prior's constant and grow with the temperature, so they are not compared.
    """

    temperature: float | None = None
    num_chains: int = 1
    num_data: int | None = None
    chance_nll: float | None = None
    has_classes: bool = True
    prior_norm: tuple[float, float] | None = None
    relaxation_times: float | None = None
    is_cyclical: bool = False
    contour: ContourUse | None = None
    predictions: ChainDiagnostics | None = None
    rhat_limit: float = math.inf
    parameters: ParameterMixing | None = None
    early: EarlyEnergy | None = None
    growth: AverageGrowth | None = None
    cold_below: float = 0.1
    baseline: str | None = None
    is_full_batch: bool = False
    adapting: str | None = None
    acceptance: float | None = None
    has_hidden: bool = True
    has_moved_target: bool = False

    @property
    def is_flattened(self) -> bool:
        """Whether a contour flattens the density of energies."""
        return self.contour is not None

    @property
    def is_steady(self) -> bool:
        """Whether energies of equilibrium keep their mean: cycles start anew, a flat histogram of energies is a walk,
        and another prior or temperature has another mean."""
        return not (self.is_cyclical or self.is_flattened or self.has_moved_target)

    @property
    def chance_energy(self) -> float | None:
        """N times the NLL of chance, None unless there are classes."""
        if self.num_data is None or self.chance_nll is None or not self.has_classes:
            return None
        return self.num_data * self.chance_nll

    def covered(self, total: Temperatures | None, tau: float) -> float | None:
        """Return the relaxation times of the plan, or with a test, whose rejections it ignores, the measured ones.

        A chain that starts at an optimum has T = τ·(1 - e^(-2t)) after t relaxation times.
        """
        if self.relaxation_times is not None and self.acceptance is None:
            return self.relaxation_times
        if total is None or total.configurational is None or total.configurational_interval is None:
            return None
        share = total.configurational / tau
        return -math.log1p(-share) / 2 if LEAST_SHARE < share < 0.95 else None

    def relaxation_remedy(self, covered: float | None, reached: float, heat: float) -> str:
        """Return what to do about a chain that has not relaxed and has reached a temperature; `heat` is τ·d/2."""
        if self.acceptance is not None and self.acceptance < OFTEN_ACCEPTED:
            return (
                f"use a smaller lr or larger batches, since MetropolisTest accepts {self.acceptance:.2g} of the "
                "trajectories and each rejection turns the chain back, or no MetropolisTest"
            )
        at = "near 0" if reached <= 0 else f"{reached:.2g}"
        cold = f"call the samples a cold ensemble of temperature {at}"
        chance = self.chance_energy
        if chance is not None and heat > chance:
            return f"{cold}: longer runs reach a thermal energy of {heat:,.0f} nats, and guessing costs {chance:,.0f}"
        factor = WANTED / covered if covered else math.inf
        if factor > LONGEST:
            return f"{cold} (the posterior needs {f'{factor:.0f} times the' if factor < 1e6 else 'far more'} steps)"
        return f"sample {math.ceil(factor)} times as long" if factor > 1 else "use a longer burn-in"


def judge(report: HealthReport, facts: RunFacts, estimates: Estimates | None) -> HealthReport:
    """Return the report with the findings on the run as a whole, its numbers, and what its samples are."""
    measures = _measures(report, facts, estimates)
    report = replace(report, run=measures)
    kind, reason = _kind(report, facts)
    report = replace(report, kind=kind, reason=reason)
    found = [_acceptance(facts), *contour_findings(facts.contour), _chains(report, facts), _average(facts)]
    if estimates is not None:
        found += [
            _early(report, facts, estimates),
            _at_chance(report, facts, estimates),
            _target(report, facts, estimates),
            _preconditioner(facts),
        ]
    return report.with_findings(*found)


def _measures(report: HealthReport, facts: RunFacts, estimates: Estimates | None) -> RunMeasures:
    nll = estimates.mean_nll(facts.num_data) if estimates is not None and facts.num_data is not None else None
    heat = report.temperature * estimates.observations.dimension / 2 if estimates is not None else None
    norm = None
    if facts.prior_norm is not None and estimates is not None and (log_prior := estimates.mean_log_prior()) is not None:
        norm = facts.prior_norm[0] - facts.prior_norm[1] * log_prior
    found = facts.predictions
    return RunMeasures(
        nll=None if nll is None else nll[0],
        chance_nll=facts.chance_nll,
        heat=heat,
        relaxation_times=facts.covered(report.total, report.temperature),
        prior_norm=norm,
        rhat=found.rhat if found is not None and math.isfinite(found.rhat) else None,
        ess=found.ess_bulk if found is not None and math.isfinite(found.ess_bulk) else None,
        acceptance=facts.acceptance,
    )


# -- what the samples are ---------------------------------------------------------------------------------------------


def _kind(report: HealthReport, facts: RunFacts) -> tuple[str | None, str]:
    """Return the kind of the samples and the measurement that says so."""
    tau = report.temperature if facts.temperature is None else facts.temperature
    if facts.baseline is not None:
        return facts.baseline, "its networks come from an optimization (temperature 0)"
    if tau == 0:
        return (DEEP if facts.num_chains > 1 else SNAPSHOT), "the states are those of an optimization (temperature 0)"
    total, planned, measured = report.total, facts.relaxation_times, report.run.relaxation_times
    reached = total.configurational if total is not None and total.configurational_interval is not None else None
    if tau >= 1 and total is not None and not facts.is_cyclical and facts.acceptance is None:
        temperatures: tuple[TemperatureKind, ...] = ("configurational", "kinetic")
        for which in temperatures:
            value, interval = total.measured(which)
            if interval is not None and interval[0] > HOT_ABOVE * tau:
                return None, f"its {which} temperature is {value:.3g}, above the target's {tau:.3g}"
    if reached is None and planned is not None and planned < LEAST_RELAXATION_TIMES:
        return COLD, f"a sampling stage covers {planned:.2g} of {WANTED:g} required relaxation times"
    if reached is None and tau >= 1:
        return None, "its temperatures were not measurable in this run"
    if reached is not None and reached < COLD_BELOW * tau:
        times = "" if measured is None else f", as after {measured:.2g} of {WANTED:g} required relaxation times"
        at = "near 0" if reached <= LEAST_SHARE * tau else f"{reached:.2g}"
        return COLD, f"its configurational temperature is {at} of {tau:.3g}{times}"
    if tau < 1:
        return COLD, f"the target's temperature is {tau:.3g}, the posterior's 1"
    reason = f"the configurational temperature is {reached:.3g}, the target's {tau:.3g}"
    if facts.parameters is not None:
        own = facts.parameters
        reason += (
            f"; of its parameters {own.name} mixes worst: R-hat {own.rhat:.2f}, effective sample size {own.ess:.0f}"
        )
    elif facts.num_chains > 1 and facts.predictions is None and not facts.is_cyclical:
        needed = "BayesianModelAverage with validation data" if facts.has_hidden else "a SampleCollector"
        reason += (
            f"; whether its {facts.num_chains} chains agree was not measured, for which pass {needed}, and draw "
            f"{FEWEST_DRAWS} samples of each chain"
        )
    return POSTERIOR, reason


# -- findings ---------------------------------------------------------------------------------------------------------


def contour_findings(use: ContourUse | None) -> tuple[Finding, ...]:
    """Return the findings on a contour; none without one."""
    if use is None:
        return ()
    found, share = [], use.largest_share
    if use.samples >= FEW_SAMPLES and share is not None and share > DOMINANT_WEIGHT:
        sentence = (
            f"contour: one of {use.samples} samples has {100 * share:.0f} % of the weight, so the average "
            "is that sample"
        )
        remedy = "take a smaller zeta (`auto=True` finds one), or a weight_exponent below 1"
        found.append(Finding(FindingKind.CONTOUR, sentence, "above", remedy=remedy))
    elif use.samples >= LEAST_WEIGHED and use.efficiency is not None and use.efficiency < (use.promised or 0) - MISSED:
        sentence = (
            f"contour: the effective sample size is {100 * use.efficiency:.0f} % of the {use.samples} samples, where "
            f"{100 * (use.promised or 0):.0f} % was expected, so the run's energies have another law than the warm-up's"
        )
        remedy = "use a longer warm-up (the schedule's burn-in), or a smaller spread and a larger efficiency as goals"
        found.append(Finding(FindingKind.CONTOUR, sentence, "above", remedy=remedy, severity="note"))
    if use.steps >= LEAST_STEPS and use.spread < FLAT:
        worth = (
            ""
            if use.efficiency is None
            else f", and the effective sample size is {100 * use.efficiency:.0f} % of the samples"
        )
        sentence = (
            f"contour: it does nothing: κ differs from 1 by {use.spread:.2g} (root mean square over {use.steps:,} "
            f"steps){worth}: the run is one without a contour"
        )
        remedy = (
            "remove it and run more chains; or, where barriers are to be crossed, less noise in the energies (larger "
            "batches, VarianceReducedEnergy) or fewer sampled weights"
        )
        found.append(Finding(FindingKind.CONTOUR, sentence, "below", remedy=remedy, severity="note"))
    return tuple(found)


def _at_chance(report: HealthReport, facts: RunFacts, estimates: Estimates) -> Finding | None:
    nll = None if facts.num_data is None else estimates.mean_nll(facts.num_data)
    if nll is None or facts.chance_nll is None or facts.num_data is None:
        return None
    least_gain = AT_CHANCE * (facts.chance_nll if facts.has_classes else 1.0)
    if facts.chance_nll - (nll[0] - nll[1]) >= least_gain:
        return None
    if facts.has_classes and facts.chance_nll == 0:
        sentence = "at chance: the labels of the first batches are all of one class, so there is nothing to learn"
        return Finding(FindingKind.AT_CHANCE, sentence, "above", remedy="pass data of two classes or more")
    heat, chance = report.run.heat, facts.chance_energy
    if not facts.has_hidden and heat is not None and nll[0] - nll[1] <= facts.chance_nll + heat / facts.num_data:
        return None  # the inputs say little, as a posterior of few weights should show
    known = "labels' frequencies" if facts.has_classes else "mean of the targets"
    sentence = (
        f"at chance: the training data's mean NLL is {nll[0]:.3g} nats per example, and guessing by the "
        f"{known} has {facts.chance_nll:.3g}"
    )
    remedy = f"{SMALLER_LR} and start again, since dead units do not recover" if facts.has_hidden else SMALLER_LR
    if facts.is_steady and estimates.is_cooling():
        remedy = STILL_FALLING
    is_heated = any(finding.is_heat for finding in report.findings)
    if heat is not None and chance is not None and heat > HOT_SHARE * chance and not is_heated:
        remedy = _cooler(report, heat, chance)
    return Finding(FindingKind.AT_CHANCE, sentence, "above", remedy=remedy)


def _target(report: HealthReport, facts: RunFacts, estimates: Estimates) -> Finding | None:
    """Return the finding of a target whose thermal energy is so large that its samples lose what the data say."""
    heat, chance, nll = report.run.heat, facts.chance_energy, report.run.nll
    if heat is None or chance is None or nll is None or facts.num_data is None or heat < HOT_SHARE * chance:
        return None
    if any(finding.is_heat for finding in report.findings) or facts.is_flattened:
        return None  # the step may be the cause, or the contour raises energies
    if nll * facts.num_data < LOST_SHARE * chance or (estimates.drift() <= 0 and report.kind != POSTERIOR):
        return None
    sentence = (
        f"target: too many parameters for the data: at temperature {report.temperature:.3g} their thermal energy is "
        f"{heat:,.0f} nats, and guessing costs {chance:,.0f}: its samples have an NLL of {nll:.3g} on the training "
        f"data, guesses {facts.chance_nll:.3g}, "
        "and no step size changes that"
    )
    return Finding(FindingKind.TARGET, sentence, "above", remedy=_cooler(report, heat, chance))


def _cooler(report: HealthReport, heat: float, chance: float) -> str:
    """Return the remedy for a target with too much thermal energy: as in the plan."""
    return f"lower the temperature (to {report.temperature * COOL_SHARE * chance / heat:.1g}), or use a narrower prior"


def _chains(report: HealthReport, facts: RunFacts) -> Finding | None:
    found = facts.predictions
    if facts.is_cyclical or report.kind not in (POSTERIOR, None):
        return None  # an ensemble's members should differ
    if found is None or facts.num_chains < 2:
        return _parameters(facts)
    if not math.isfinite(found.rhat) or found.rhat <= facts.rhat_limit:
        return _parameters(facts)
    sentence = (
        f"chains: they disagree on their predictions: R-hat is {found.rhat:.2f}, but should be below "
        f"{facts.rhat_limit:.2f} (effective sample size {found.ess_bulk:.0f})"
    )
    return Finding(FindingKind.CHAINS, sentence, "above", remedy=_until_mixed(found.rhat, facts))


def _until_mixed(rhat: float, facts: RunFacts) -> str:
    factor = (rhat**2 - 1) / (MIXED**2 - 1)
    longer = f"sample {math.ceil(factor)} times as long"
    return longer if factor <= LONGEST or facts.num_chains < 2 else f"treat them as separate modes, or {longer}"


def _parameters(facts: RunFacts) -> Finding | None:
    """Return the finding of parameters that do not mix, a note where the chains agree on their predictions."""
    own = facts.parameters
    if own is None or own.rhat <= own.limit:
        return None
    of = "they disagree on a parameter" if facts.num_chains > 1 else "parts of the one chain disagree on a parameter"
    remedy = _until_mixed(own.rhat, facts)
    if own.sampled <= FEW_PARAMETERS:
        remedy += ", or draw by NUTS: reference.sample(module, data)"
    severity: Severity = "problem" if facts.predictions is None else "note"
    sentence = f"chains: {of}: {own.sentence}"
    return Finding(FindingKind.CHAINS, sentence, "above", own.name.partition("[")[0], remedy, severity)


def _early(report: HealthReport, facts: RunFacts, estimates: Estimates) -> Finding | None:
    """Return the finding of first samples that are from the way to the posterior, which `ChainHealth` leaves out of its
    other measurements and which count among the samples."""
    early, known = facts.early, {finding.kind for finding in report.findings}
    if early is None or not facts.is_steady or report.kind not in (POSTERIOR, None) or FindingKind.ENERGY in known:
        return None
    thermal = report.tolerance * report.temperature * estimates.observations.dimension
    if early.first - early.later <= early.error + thermal:
        return None
    sentence = (
        f"energy: its mean is {early.first:.6g} nats in the first quarter of the samples and {early.later:.6g} in the "
        "others, so the first are from the way to the posterior"
    )
    remedy = "use a longer burn-in, or leave the first quarter out: posterior[len(posterior) // 4 :]"
    return Finding(FindingKind.ENERGY, sentence, "below", remedy=remedy)


def _average(facts: RunFacts) -> Finding | None:
    growth = facts.growth
    if growth is None or not growth.certain or growth.best >= growth.count:
        return None
    single = np.asarray(growth.single)
    gain = float(single.mean()) - growth.best_nll
    if growth.nll - growth.best_nll <= WORSE_BY * max(gain, 0.0) or not _is_worsening(single):
        return None
    sentence = (
        f"average: its NLL is {growth.nll:.4f} with all {growth.count} samples, and was {growth.best_nll:.4f} with the "
        f"first {growth.best}: later samples are worse"
    )
    return Finding(FindingKind.AVERAGE, sentence, "above", remedy=f"stop after about {growth.best} samples")


def _preconditioner(facts: RunFacts) -> Finding | None:
    if facts.adapting is None:
        return None
    sentence = (
        f"preconditioner: that of {facts.adapting} adapts while samples are drawn, and the divergence Γ is omitted, so "
        "the samples' distribution is not exact at any step size"
    )
    remedy = "pass adapt='burn-in' to the sampler, which freezes it in the sampling stages"
    return Finding(FindingKind.PRECONDITIONER, sentence, remedy=remedy, severity="note")


def _acceptance(facts: RunFacts) -> Finding | None:
    if facts.acceptance is None or facts.acceptance >= SELDOM_ACCEPTED:
        return None
    sentence = f"acceptance: MetropolisTest accepted {facts.acceptance:.2g} of the trajectories, so chains move seldom"
    remedy = f"{SMALLER_LR}, larger batches or fewer steps in a trajectory, and a WarmStart"
    return Finding(FindingKind.ACCEPTANCE, sentence, "below", remedy=remedy)


def _is_worsening(single: np.ndarray) -> bool:
    """Return whether the later half of the samples is certainly worse than the earlier one."""
    half = len(single) // 2
    if half < 3:
        return False
    parts = single[:half], single[-half:]
    error = math.hypot(*(float(part.std(ddof=1)) / math.sqrt(half) for part in parts))
    return bool(parts[1].mean() - parts[0].mean() > TREND * error)
