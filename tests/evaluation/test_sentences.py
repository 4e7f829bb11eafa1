"""Five sentences of a run: their numbers are those of the data, with their truths."""

from typing import Any

import pytest
import torch
from scipy.stats import norm, poisson
from sklearn.dummy import DummyClassifier
from sklearn.metrics import brier_score_loss, log_loss
from torch import Tensor

from lightning_sgmcmc import Categorical, Gaussian, Poisson
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.evaluation.loader_average import Evaluation, LoaderAverage
from lightning_sgmcmc.evaluation.sentences import NAMES, Claim, five_sentences
from lightning_sgmcmc.health.findings import Finding, FindingKind
from lightning_sgmcmc.health.report import HealthReport
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.tables import TargetScaling

DATA = 400


class Silent(EnergyModel):
    """A model of which only the likelihood is used."""


def evaluated(
    likelihood: Any,
    outputs: list[Tensor],
    target: Tensor,
    cycles: list[int] | None = None,
    own: bool = False,
    scaling: TargetScaling = TargetScaling(),  # noqa: B008, it is frozen
) -> Evaluation:
    """Return the evaluation of samples with these outputs on the targets."""
    module = Silent(torch.nn.Identity(), likelihood, None)
    average = LoaderAverage("uniform")
    for index, output in enumerate(outputs):
        cycle = 0 if cycles is None else cycles[index]
        sample = PosteriorSample(index, cycle, 0, 0.0, 0.0, {"w": torch.zeros(1)}, {})
        terms = likelihood.terms(output) | likelihood.target_terms(output, target)
        density = likelihood.log_prob(output, target)
        scores = ({}, density, None) if own else (terms, density, target)
        average.add(module, sample, scores, scaling, 0.0, {})
    return average.evaluation


def classified(count: int = 6, sharpen: float = 1.0, cycles: list[int] | None = None) -> Evaluation:
    """Samples whose average is calibrated if not sharpened: labels are drawn from the logits' own softmax."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(DATA, 5, generator=generator)
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    noise = 0.0 if count == 1 else 1.0
    outputs = [sharpen * (logits + noise * torch.randn(DATA, 5, generator=generator)) for _ in range(count)]
    return evaluated(Categorical(), outputs, target, cycles)


@pytest.mark.parametrize("bias", [3.0, 0.0])
def test_guessing_is_that_of_scikit_learn(bias: float) -> None:
    """Classes that the outputs know nothing of, with and without an average that is better than their shares."""
    generator = torch.Generator().manual_seed(0)
    target = (torch.rand(DATA, generator=generator) < 0.1).long()
    outputs = [torch.stack([torch.full((DATA,), bias), 0.3 * torch.randn(DATA, generator=generator)], 1)]
    evaluation = evaluated(Categorical(), outputs, target)
    labels = target.numpy()
    dummy = DummyClassifier(strategy="prior").fit(labels[:, None], labels)
    shares = dummy.predict_proba(labels[:, None])
    assert evaluation.guessing["nll"] == pytest.approx(log_loss(labels, shares), rel=1e-5)
    assert evaluation.guessing["accuracy"] == pytest.approx(dummy.score(labels[:, None], labels))
    assert evaluation.guessing["brier"] == pytest.approx(2 * brier_score_loss(labels, shares[:, 1]), rel=1e-5)
    said = five_sentences(evaluation, "test data", None, Claim())
    assert f"guessing {evaluation.guessing['accuracy']:.1%}" in said["quality"]
    assert f"guessing {evaluation.guessing['nll']:.3g}" in said["quality"]
    assert "no better than guessing" in said["next"]


@pytest.mark.parametrize("missing", [None, -999.0])
def test_guessing_leaves_out_what_is_not_observed(missing: float | None) -> None:
    target = torch.randn(DATA, 1, generator=torch.Generator().manual_seed(0)) + 3
    target[::5] = torch.nan
    known = target[~target.isnan()]
    if missing is not None:
        target[::10] = missing
    evaluation = evaluated(Gaussian(std=0.1, missing=missing), [target.nan_to_num()] * 2, target)
    assert evaluation.guessing["rmse"] == pytest.approx(float(known.std(correction=0)), rel=1e-4)


def test_guessing_numbers_in_their_units() -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(DATA, 2, generator=generator) * torch.tensor([1.0, 2.0])
    target[::7, 1] = torch.nan
    outputs = [target.nan_to_num() + 0.1 * torch.randn(DATA, 2, generator=generator) for _ in range(2)]
    scaling = TargetScaling((5.0, 0.0), (10.0, 1.0))
    evaluation = evaluated(Gaussian(std=0.1), outputs, target, scaling=scaling)
    known = [(column[~column.isnan()] * std).numpy() for column, std in zip(target.T, scaling.std, strict=True)]
    for name, column in zip(("rmse_0", "rmse_1"), known, strict=True):
        assert evaluation.guessing[name] == pytest.approx(column.std(), rel=1e-4)
    density = sum(norm.logpdf(column, column.mean(), column.std()).sum() for column in known)
    assert evaluation.guessing["nll"] == pytest.approx(-density / DATA, rel=1e-4)
    assert "no better than guessing" not in five_sentences(evaluation, "test data", None, Claim())["next"]


def test_guessing_counts() -> None:
    target = torch.poisson(torch.full((DATA, 1), 2.5), generator=torch.Generator().manual_seed(0))
    evaluation = evaluated(Poisson(), [torch.full((DATA, 1), 1.0)], target)
    expected = -poisson.logpmf(target.numpy(), float(target.mean())).mean()
    assert evaluation.guessing["nll"] == pytest.approx(expected, rel=1e-5)


def test_classes() -> None:
    evaluation = classified(6, cycles=[0, 0, 1, 1, 2, 2])
    said = five_sentences(evaluation, "test data", None, Claim())
    assert tuple(said) == NAMES
    assert said["quality"].startswith(f"Accuracy {evaluation.bma['accuracy']:.1%} (95 %: ")
    assert f"NLL {evaluation.bma['nll']:.3g} (95 %: " in said["quality"]
    assert f"on {DATA} test data." in said["quality"]
    best = min(member["nll"] for member in evaluation.members)
    assert evaluation.best_single["nll"] == pytest.approx(best)
    assert evaluation.first_cycle == evaluation.running[1]
    assert (
        f"better than its mean single sample by {evaluation.single['nll'] - evaluation.bma['nll']:.3g} ("
        in said["gain"]
    )
    first = evaluation.running[1]["nll"] - evaluation.bma["nll"]  # whether it is significant depends on torch's labels
    assert f"first cycle's average by {first:.3g} (" in said["gain"] or f"average (+{first:.2g}, 95 %" in said["gain"]
    assert "ChainHealth" in said["sampled"] + said["next"]


def test_one_datum_and_one_class_are_not_compared_by_hindsight() -> None:
    """One datum has no interval. Labels of one class are known to a guess that has seen them, so no model beats it."""
    single = evaluated(Gaussian(1.0), [torch.zeros(1, 1), torch.ones(1, 1)], torch.ones(1, 1))
    one = five_sentences(single, "test data", None, Claim())
    assert "nan" not in " ".join(one.values())
    assert "not known to differ from its mean single sample" in one["gain"]
    sure = torch.tensor([[3.0, 0.0]]).expand(DATA, 2)
    evaluation = evaluated(Categorical(), [sure, 0.9 * sure], torch.zeros(DATA, dtype=torch.long))
    said = five_sentences(evaluation, "test data", None, Claim())
    assert "guessing" not in said["next"]
    assert "guessing 0)" in said["quality"]


def test_calibration_is_judged_against_chance() -> None:
    """The exact predictive is within chance (a seed of the 95 %), the sharpened one is not."""
    right, sharp = (five_sentences(classified(1, s), "test data", None, Claim())["calibration"] for s in (1.0, 3.0))
    assert right.endswith("calibrated within chance.")
    assert sharp.endswith("overconfident.")
    sharpened = five_sentences(classified(1, 3.0), "test data", HealthReport(verdict="ok"), Claim("posterior sample"))
    assert sharpened["next"].startswith("Next: calibrate the predictions"), (
        "no all-clear beside an overconfident average"
    )


def test_what_is_not_better_is_said() -> None:
    """A sample added to its own copies changes nothing; worse samples make the average worse than the first."""
    torch.manual_seed(0)
    target = torch.randint(5, (DATA,))
    good = 4.0 * torch.nn.functional.one_hot(target, 5)
    bad = good.roll(1, 1)
    same = five_sentences(evaluated(Categorical(), [good, good], target), "test data", None, Claim())
    assert "not significantly different from its mean single sample" in same["gain"]
    worse = five_sentences(evaluated(Categorical(), [good, bad], target, [0, 1]), "test data", None, Claim())
    assert "better than its mean single sample by" in worse["gain"], "by Jensen's inequality"
    assert "worse than the first cycle's average by" in worse["gain"]
    one = five_sentences(classified(1), "test data", None, Claim())
    assert one["gain"] == "There is one sample, so the model average is that sample."


def test_regression_and_a_likelihood_of_its_own() -> None:
    """Targets have noise 1, 0.98 in this draw; intervals of std 1 are right, those of std 3 too wide."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(DATA, 1, generator=generator)
    outputs = [0.1 * torch.randn(DATA, 1, generator=generator) for _ in range(3)]
    right = five_sentences(evaluated(Gaussian(1.0), outputs, target), "test data", None, Claim())
    assert right["quality"].startswith("RMSE 0.98")
    assert "NLL 1.4" in right["quality"]
    assert "where chance gives 87.1% to 92.9%: calibrated within chance." in right["calibration"]
    wide = five_sentences(evaluated(Gaussian(3.0), outputs, target), "test data", None, Claim())
    assert wide["calibration"].endswith("too wide.")
    own = five_sentences(evaluated(Gaussian(1.0), outputs, target, own=True), "validation data", None, Claim())
    assert own["quality"].startswith("NLL 1.4")
    assert own["calibration"].startswith("Calibration: not measured")
    assert "mean single sample" in own["gain"]


def test_what_was_sampled_and_what_next() -> None:
    evaluation = classified(2)

    def said(health: HealthReport | None, claim: Claim) -> tuple[str, str]:
        found = five_sentences(evaluation, "test data", health, claim)
        return found["sampled"], found["next"]

    fine = HealthReport(verdict="ok")
    yes, go = said(fine, Claim("posterior sample", "it is warm"))
    assert yes == "Sampled the posterior? Yes, this is a posterior sample: it is warm."
    assert go == "Next: more samples reduce the Monte-Carlo error."
    no, _ = said(fine, Claim("cold ensemble", "its temperature is 0.04"))
    assert no == "Sampled the posterior? No, this is a cold ensemble: its temperature is 0.04."
    hot = fine.with_findings(Finding(FindingKind.KINETIC, "kinetic temperature: 2", "above", None, "use a smaller lr"))
    doubt, cool = said(hot, Claim("posterior sample", "it is warm"))
    assert "Not shown; kinetic temperature: 2." in doubt
    assert cool == "Next: use a smaller lr."
    networks = Claim("deep ensemble", "its networks come from an optimization", is_optimized=True)
    assert said(None, Claim())[1].startswith("Next: add ChainHealth")
    assert "ChainHealth" not in "".join(said(None, networks)), "there is no chain to check"
    assert said(HealthReport(), Claim())[0] == "Sampled the posterior? Not known: no ChainHealth callback measured it."


def test_state_survives() -> None:
    average = LoaderAverage("uniform")
    evaluation = classified(4, cycles=[0, 1, 1, 0])
    assert evaluation.first_cycle == {}, "the first cycle's samples did not come first"
    state = evaluation.per_datum.state_dict()
    average.evaluation.per_datum.load_state_dict(state)
    assert average.evaluation.per_datum.kept.keys() == evaluation.per_datum.kept.keys()
    sizes = [len(one.density) for one in evaluation.per_datum.kept.values()]
    assert sizes == [DATA] * len(sizes)
    assert len(sizes) <= 4, "memory does not grow with the samples"
