"""The verdict on a run as a whole: one ranked list, one advice, and the right name."""

import dataclasses
from typing import Any

import pytest
import torch

from lightning_sgmcmc.diagnostics.draws import ChainDiagnostics
from lightning_sgmcmc.health.assessment import assess
from lightning_sgmcmc.health.estimates import Observations
from lightning_sgmcmc.health.findings import Finding, FindingKind
from lightning_sgmcmc.health.report import HealthReport
from lightning_sgmcmc.health.verdict import AverageGrowth, ContourUse, RunFacts
from tests.diagnostics.test_health import record

DIMENSION = 8456
"""Parameters in the tests' record."""


def seen(nll: float = 0.3, num_data: int = 10_000, tau: float = 1.0, **trouble: Any) -> Observations:
    """A record with a mean NLL per datum of the training data."""
    found = record(**trouble)
    energies = found.energies - found.energies.mean() + nll * num_data
    return dataclasses.replace(
        found,
        energies=energies + 50,
        square_energies=(energies + 50).square() + 100,
        log_priors=torch.full_like(energies, 50.0) * -1,
        temperature=tau,
    )


def facts(**known: Any) -> RunFacts:
    return RunFacts(**{"num_data": 10_000, "chance_nll": 2.3, "num_chains": 2, **known})


def test_a_right_run_is_a_posterior_sample_without_a_finding() -> None:
    mixed = ChainDiagnostics(1.01, 200.0, 150.0)
    growth = AverageGrowth(9, 10, 0.30, 0.3001, [0.4, 0.41] * 5)
    report = assess(seen(), 1, facts=facts(predictions=mixed, rhat_limit=1.05, growth=growth, prior_norm=(1.5, 0.01)))
    assert (report.verdict, report.findings, report.advice, report.kind) == ("ok", (), "", "posterior sample")
    assert report.run.nll == pytest.approx(0.3)
    assert report.run.heat == pytest.approx(DIMENSION / 2)
    assert report.run.prior_norm == pytest.approx(1.5 + 0.5)
    assert (report.run.rhat, report.run.ess) == (1.01, 200.0)


CASES = [
    ({"nll": 2.29}, {}, FindingKind.AT_CHANCE, "start again"),
    ({"nll": 2.29, "num_data": 2000}, {"num_data": 2000}, FindingKind.AT_CHANCE, "lower the temperature (to 0.1)"),
    ({"nll": 0.02}, {"chance_nll": 0.0, "has_classes": True}, FindingKind.AT_CHANCE, "data of two classes or more"),
    ({"nll": 1.2, "num_data": 2000}, {"num_data": 2000}, FindingKind.TARGET, "lower the temperature (to 0.1)"),
    ({}, {"predictions": ChainDiagnostics(1.3, 9.0, 9.0), "rhat_limit": 1.05}, FindingKind.CHAINS, "7 times as long"),
    ({}, {"growth": AverageGrowth(5, 12, 0.417, 0.429, [0.43] * 6 + [0.6] * 6)}, FindingKind.AVERAGE, "after about 5"),
]  # fmt: skip


@pytest.mark.parametrize(("measured", "known", "kind", "words"), CASES)
def test_each_trouble_of_a_run_is_found(
    measured: dict[str, float], known: dict[str, Any], kind: FindingKind, words: str
) -> None:
    report = assess(seen(**measured), 1, facts=facts(**known))
    assert report.verdict == "warning"
    assert report.findings[0].kind == kind
    assert report.findings[0].sentence.startswith(f"{kind.value}: ")
    assert words in report.advice


def test_one_advice_the_cause_comes_first() -> None:
    """A hot run that has also drifted and not relaxed is told one thing: a smaller lr, never a larger one."""
    many = seen(kinetic=1.8, configurational=0.4, noise=0.8, drift=1.0, nll=2.29, num_data=10**6)
    report = assess(many, 1, facts=facts(num_data=10**6))
    kinds = [finding.kind for finding in report.findings]
    assert kinds[:3] == [FindingKind.AT_CHANCE, FindingKind.KINETIC, FindingKind.GRADIENT_NOISE]
    assert {FindingKind.ENERGY, FindingKind.RELAXATION} <= set(kinds)
    assert "smaller lr" in report.advice
    assert not any("larger lr" in finding.text for finding in report.findings)
    assert [finding.rank for finding in report.findings] == sorted(finding.rank for finding in report.findings)


def test_a_test_of_trajectories_removes_the_heat_of_their_steps() -> None:
    """Mini-batch noise heats the momenta between tests, and the law of the tested states stays; unless none passes."""
    hot = seen(kinetic=1.8, noise=0.8)
    assert assess(hot, 1, facts=facts()).verdict == "warning"
    report = assess(hot, 1, facts=facts(acceptance=0.7))
    assert (report.verdict, report.findings, report.run.acceptance) == ("ok", (), 0.7)
    seldom = assess(hot, 1, facts=facts(acceptance=0.02))
    assert [finding.kind for finding in seldom.findings] == [FindingKind.ACCEPTANCE]
    assert "accepted 0.02 of the trajectories" in seldom.findings[0].text
    assert HealthReport.from_json(seldom.as_json()) == seldom
    cold = assess(seen(configurational=0.04), 1, facts=facts(acceptance=0.2, relaxation_times=5.0))
    assert cold.run.relaxation_times == pytest.approx(0.02, rel=0.05), "the plan knows no rejections"
    assert "MetropolisTest accepts 0.2 of the trajectories" in cold.advice


@pytest.mark.parametrize(("tau", "cyclical"), [(1.0, True), (1e-4, False)])
def test_a_cold_ensemble_is_a_note(tau: float, cyclical: bool) -> None:
    report = assess(seen(configurational=0.04, tau=tau), 1, facts=facts(is_cyclical=cyclical))
    assert (report.verdict, report.kind) == ("ok", "cold ensemble")
    (note,) = report.findings
    assert (note.kind, note.severity) == (FindingKind.RELAXATION, "note")
    assert (report.warnings, report.notes) == ([], [note.sentence])
    assert note.remedy.startswith(f"call the samples a cold ensemble of temperature {0.04 * tau:.2g}"), note.remedy
    assert report.advice == "", "it is one, so there is nothing to do"
    assert "0.02 relaxation times" in note.sentence


def test_a_target_with_more_heat_than_data_is_not_sampled_longer() -> None:
    """8,456 weights take up 4,228 nats, and 1,000 data are worth 2,300: the advice is not a longer run."""
    known = facts(num_data=1000, is_cyclical=True)
    report = assess(seen(configurational=0.3, num_data=1000), 1, facts=known)
    assert "longer runs reach a thermal energy of 4,228 nats, and guessing costs 2,300" in report.findings[0].remedy


@pytest.mark.parametrize(
    ("known", "kind"),
    [
        (facts(temperature=0.0), "deep ensemble"),
        (facts(temperature=0.0, num_chains=1), "snapshot ensemble"),
        (facts(temperature=0.5), "cold ensemble"),
    ],
)
def test_names_by_the_temperature(known: RunFacts, kind: str) -> None:
    assert assess(seen(), 1, facts=known).kind == kind


def test_members_of_an_ensemble_may_differ() -> None:
    apart = facts(predictions=ChainDiagnostics(3.0, 4.0, 4.0), rhat_limit=1.05, is_cyclical=True)
    assert assess(seen(), 1, facts=apart).findings == ()
    flat = assess(seen(drift=1.0), 1, facts=facts(contour=ContourUse(spread=0.5, steps=1000)))
    assert flat.findings == (), "a contour's walk through the energies is no drift"


def test_an_interval_that_says_nothing_is_not_shown() -> None:
    """A few steps with an outlier: the interval was 0.0015 to 434 at τ = 1e-4, and above the target."""
    found = record()
    values = found.values.clone()
    values[:, 0] = 0.0
    values[3, 0] = 24.0
    report = assess(dataclasses.replace(found, values=values), 1)
    assert report.total is not None
    assert report.total.kinetic_interval is None
    assert not [finding for finding in report.findings if finding.kind == FindingKind.KINETIC]
    assert all(tensor.kinetic_interval is None for tensor in report.tensors.values())


def test_notes_do_not_hide_problems() -> None:
    note = Finding(FindingKind.RELAXATION, "relaxation: cold", "below", None, "call it cold", "note")
    report = HealthReport(verdict="ok").with_findings(note)
    assert (report.verdict, report.advice) == ("ok", "call it cold")
    worse = report.with_divergence()
    assert (worse.verdict, worse.findings[1]) == ("warning", note)
    assert HealthReport.from_json(worse.as_json()) == worse
