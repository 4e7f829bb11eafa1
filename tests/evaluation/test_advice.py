"""One verdict and one next step: no all-clear beside a finding, and no advice that a callback does not allow."""

import itertools
from typing import Any

import pytest
import torch

from lightning_sgmcmc import Categorical
from lightning_sgmcmc.callbacks import AutoSampling
from lightning_sgmcmc.evaluation.loader_average import Evaluation
from lightning_sgmcmc.evaluation.sentences import Claim, advice_on
from lightning_sgmcmc.health.findings import Finding, FindingKind
from lightning_sgmcmc.health.held_out import with_held_out
from lightning_sgmcmc.health.report import HealthReport, advise
from tests.evaluation.test_sentences import DATA, classified, evaluated

HOT = Finding(FindingKind.KINETIC, "kinetic temperature: 2", "above", None, "use a smaller lr")
COLD, POSTERIOR = "cold ensemble", "posterior sample"


def improving(gains: tuple[float, ...]) -> Evaluation:
    """Samples whose logits are right, and sharper by so much in each quarter of the run."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(DATA, 3, generator=generator)
    target = logits.argmax(1)
    outputs = [gain * logits + 0.1 * torch.randn(DATA, 3, generator=generator) for gain in gains for _ in range(6)]
    return evaluated(Categorical(), outputs, target)


@pytest.mark.parametrize(("gains", "longer"), [((0.1, 0.3, 0.6, 1.2), True), ((0.1, 1.2, 1.2, 1.2), False)])
def test_train_longer_only_where_samples_become_better_to_the_end(gains: tuple[float, ...], longer: bool) -> None:
    report = HealthReport(kind=COLD, verdict="ok")
    found = advice_on(improving(gains), report, Claim(COLD))
    assert found.next.startswith("train longer, since later samples are better") == longer
    assert found.level == "neutral", "an ensemble is never called healthy"


def test_excess_variance_in_a_run_that_still_improves_has_one_remedy() -> None:
    """Smaller steps alone would train less, and a longer run alone would stay as hot: both come in one advice."""
    report = HealthReport(kind=COLD).with_findings(HOT).with_remedies([AutoSampling().remedy])
    quarters = improving((0.1, 0.3, 0.6, 1.2))
    found = with_held_out(report, quarters)
    assert {FindingKind.KINETIC, FindingKind.TREND} <= {finding.kind for finding in found.findings}
    assert found.verdict == "warning", "the average is underconfident"
    assert advice_on(quarters, report, Claim(COLD)).next == found.advice
    assert found.advice == "halve the step size and train twice as long: AutoSampling(lr=0.005)"


def test_networks_of_an_optimization_have_no_trend() -> None:
    found = advice_on(improving((0.1, 0.3, 0.6, 1.2)), None, Claim("deep ensemble", is_optimized=True))
    assert "train longer" not in found.next


@pytest.mark.parametrize("kind", [COLD, POSTERIOR, None])
@pytest.mark.parametrize("severity", ["problem", "note"])
@pytest.mark.parametrize("finding", list(FindingKind))
def test_only_a_posterior_without_a_finding_is_healthy(finding: FindingKind, severity: Any, kind: str | None) -> None:
    report = HealthReport(verdict="ok", kind=kind).with_findings(
        Finding(finding, "x: y", remedy="do", severity=severity)
    )
    found = advise(report, kind)
    assert found.level != "good"
    assert not found.verdict.startswith("Healthy")
    assert found.next.startswith("do") or (severity == "note" and kind == COLD)
    assert report.advice == ("do" if found.next.startswith("do") else ""), "health.json names the same step"
    assert advise(HealthReport(verdict="ok", kind=kind), kind).level == ("good" if kind == POSTERIOR else "neutral")


def test_heat_is_a_note_where_an_ensemble_is_calibrated_and_a_problem_elsewhere() -> None:
    good, sharp = classified(1), classified(1, 3.0)
    for kind, evaluation, severity in ((COLD, good, "note"), (COLD, sharp, "problem"), (POSTERIOR, good, "problem")):
        report = with_held_out(HealthReport(kind=kind, verdict="ok").with_findings(HOT), evaluation)
        (hot,) = (finding for finding in report.findings if finding.kind is FindingKind.KINETIC)
        assert hot.severity == severity
        assert (report.verdict == "warning") == (severity == "problem")
    assert "smaller lr" not in advise(with_held_out(HealthReport(kind=COLD).with_findings(HOT), good), COLD).next


def test_other_data_replace_the_findings_on_held_out_data() -> None:
    report = with_held_out(HealthReport(kind=POSTERIOR, verdict="ok"), classified(1, 3.0))
    assert [finding.kind for finding in report.findings] == [FindingKind.CALIBRATION]
    assert with_held_out(report, classified(1)).findings == ()


@pytest.mark.parametrize(("sharpen", "remedy"), [(12.0, "calibrate the predictions"), (-1.0, "train longer")])
def test_overconfident_predictions_that_are_mostly_right_are_to_be_calibrated(sharpen: float, remedy: str) -> None:
    """Their NLL is above guessing's, as after too long a training; those that are mostly wrong have learned nothing."""
    evaluation = classified(1, sharpen)
    assert evaluation.bma["nll"] > evaluation.guessing["nll"]
    found = advice_on(evaluation, HealthReport(kind=COLD, verdict="ok"), Claim(COLD))
    assert found.next.startswith(remedy)


def test_the_most_frequent_class_is_no_success() -> None:
    """Nine of ten are of class 0, and the average predicts it everywhere, with a little knowledge of who is not."""
    generator = torch.Generator().manual_seed(0)
    target = (torch.arange(DATA) % 10 == 0).long()
    rare = target + 0.5 * torch.randn(DATA, generator=generator)
    outputs = [torch.stack([3.5 - 0.5 * rare, rare], 1) for _ in range(2)]
    evaluation = evaluated(Categorical(), outputs, target)
    assert evaluation.bma["accuracy"] == evaluation.guessing["accuracy"]
    assert evaluation.bma["nll"] < evaluation.guessing["nll"]
    found = advice_on(evaluation, HealthReport(kind=COLD, verdict="ok"), Claim(COLD))
    assert "choose classes by the costs of errors" in found.next


def test_advice_to_a_user_of_auto_sampling_names_its_arguments() -> None:
    """Its user passes neither sampler nor lr to the module, and `sgmcmc tune` has nothing to tune."""
    callback = AutoSampling(lr=0.02)
    for kind, side in itertools.product(FindingKind, ("above", "below", None)):
        finding = Finding(kind, f"{kind.value}: x", side, remedy="use a smaller lr (`sgmcmc tune` finds one)")
        report = HealthReport().with_findings(finding).with_remedies([callback.remedy])
        if kind in (FindingKind.DIVERGENCE, FindingKind.AT_CHANCE) and side != "below":
            assert report.advice == "use a smaller step size: AutoSampling(lr=0.01)"
        elif finding.is_heat:
            assert report.advice == "halve the step size and train twice as long: AutoSampling(lr=0.01)"
    adapting = Finding(FindingKind.PRECONDITIONER, "preconditioner: x", remedy="pass adapt", severity="note")
    assert HealthReport().with_findings(adapting).with_remedies([callback.remedy]).advice == ""
