"""Separation of inputs from elsewhere: scikit-learn's figures, closed forms of the scores, and what has none."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Bernoulli, Posterior
from lightning_sgmcmc.diagnostics import detection_metrics
from tests.support.posteriors import FEATURES, MODULES, in_memory, inputs


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
@pytest.mark.parametrize("ties", [False, True])
def test_metrics_are_scikit_learns(ties: bool, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    known, unknown = torch.randn(70, generator=generator), torch.randn(40, generator=generator) + 1
    if ties:
        known, unknown = known.round(), unknown.round()
    found = detection_metrics(scale * known, scale * unknown)
    scores, is_unknown = torch.cat([known, unknown]).numpy(), np.repeat([0, 1], [70, 40])
    assert float(found["auroc"]) == pytest.approx(roc_auc_score(is_unknown, scores))
    assert float(found["aupr_out"]) == pytest.approx(average_precision_score(is_unknown, scores))
    assert float(found["aupr_in"]) == pytest.approx(average_precision_score(1 - is_unknown, -scores))
    false, true, _ = roc_curve(1 - is_unknown, -scores, drop_intermediate=False)
    assert float(found["fpr95"]) == pytest.approx(false[true >= 0.95].min())


def test_scores_are_of_the_average_and_the_energy_is_the_samples_mean() -> None:
    posterior, known, unknown = in_memory(MODULES["mlp"]()), inputs(23), 5 * inputs(31, seed=1)
    found = posterior.detect(known, iter([unknown[:20], unknown[20:]]))
    with torch.no_grad():
        energies = torch.stack([-network(unknown).logsumexp(1) for network in posterior.networks()]).double()
    torch.testing.assert_close(found.unknown["energy"], posterior.weights @ energies, atol=1e-5, rtol=1e-5)
    prediction = posterior.predict(known)
    torch.testing.assert_close(found.known["mutual_information"], prediction.mutual_information.double())
    torch.testing.assert_close(found.known["max_probability"], -prediction.probabilities.max(1).values.double())
    assert list(found.metrics) == ["entropy", "max_probability", "mutual_information", "energy"]
    for name, metrics in found.metrics.items():
        assert metrics["auroc"] == pytest.approx(
            float(detection_metrics(found.known[name], found.unknown[name])["auroc"])
        )
    lines = str(found).splitlines()
    assert lines[1].split() == ["entropy", *(f"{value:.3f}" for value in found.metrics["entropy"].values())]


def test_numbers_are_detected_by_their_widths_in_any_unit() -> None:
    states = [{"weight": torch.tensor([[s], [10.0 * s]])} for s in (-1.0, 1.0)]
    from lightning_sgmcmc import Gaussian

    posterior = Posterior.from_states(nn.Linear(1, 2, bias=False), states, Gaussian(0.5))
    found = posterior.detect(torch.linspace(0, 1, 9)[:, None], torch.linspace(2, 3, 5)[:, None])
    assert found.metrics["std"] == {"auroc": 1.0, "aupr_out": 1.0, "aupr_in": 1.0, "fpr95": 0.0}
    assert list(found.metrics) == ["std", "epistemic_std"]


def test_without_logits_there_is_no_energy_and_what_cannot_be_scored_is_refused() -> None:
    posterior = in_memory(BayesianModule(net=nn.Linear(FEATURES, 1), likelihood=Bernoulli()))
    assert "energy" not in posterior.detect(inputs(), 3 * inputs()).metrics
    assert math.isnan(float(detection_metrics(torch.tensor([1.0]), torch.tensor([math.nan]))["fpr95"]))
    with pytest.raises(ValueError, match="0 unknown"):
        detection_metrics(torch.ones(1), torch.empty(0))
    strange: Tensor = inputs().index_fill(0, torch.tensor([3]), math.nan)
    with pytest.raises(ValueError, match="1 of 23 are NaN"), pytest.warns(UserWarning, match="NaN"):
        posterior.detect(inputs(), strange)
