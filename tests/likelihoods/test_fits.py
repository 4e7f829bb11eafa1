"""Every likelihood from fit to prediction: two chains, evaluation, store, a posterior loaded without a model."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    SGLD,
    BayesianModule,
    Categorical,
    ClassPrediction,
    CountPrediction,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    MixtureOfGaussians,
    MultiLabelBernoulli,
    MultiLabelPrediction,
    NegativeBinomial,
    Ordinal,
    PixelCategorical,
    Poisson,
    Posterior,
    Prediction,
    RegressionPrediction,
    StudentT,
    TokenCategorical,
)
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.posterior import predictive as kept
from tests.support.small_run import loader
from tests.support.trainers import quiet_trainer

DATA, CHAINS = 24, 2


class Gamma(Likelihood):
    """Positive numbers: output (n, 2), target (n,); what the documentation calls a likelihood in ten lines."""

    distribution = torch.distributions.Gamma

    def components(self, output: Tensor) -> dict[str, Tensor]:
        return {"concentration": output[:, 0].exp(), "rate": output[:, 1].exp()}


def x(*shape: int) -> Tensor:
    return torch.randn(DATA, *(shape or (3,)), generator=torch.Generator().manual_seed(0))


def counts() -> Tensor:
    return torch.poisson(x()[:, :1].exp(), generator=torch.Generator().manual_seed(1))


def places(*shape: int) -> Tensor:
    labels = torch.randint(3, (DATA, *shape), generator=torch.Generator().manual_seed(1))
    labels[0] = -100
    return labels


class Case(NamedTuple):
    """A likelihood with a network's last layer, inputs, targets, and the kind of its predictions."""

    likelihood: Callable[[], Likelihood]
    net: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    kind: type[Prediction]


def linear(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(3, outputs)


NUMBERS = x()[:, :1] + 0.1
CASES = {
    "gaussian": Case(lambda: Gaussian(0.5, learned=True), linear(1), x(), NUMBERS, RegressionPrediction),
    "heteroscedastic": Case(HeteroscedasticGaussian, linear(2), x(), NUMBERS, RegressionPrediction),
    "student": Case(lambda: StudentT(3.0, learned=True), linear(1), x(), NUMBERS, RegressionPrediction),
    "mixture": Case(lambda: MixtureOfGaussians(2), linear(6), x(), NUMBERS, RegressionPrediction),
    "poisson": Case(Poisson, linear(1), x(), counts().long(), CountPrediction),
    "negative_binomial": Case(lambda: NegativeBinomial(2.0, True), linear(1), x(), counts(), CountPrediction),
    "gamma": Case(Gamma, linear(2), x(), NUMBERS.abs()[:, 0], RegressionPrediction),
    "labels": Case(MultiLabelBernoulli, linear(4), x(), (x(4) > 0).float(), MultiLabelPrediction),
    "ordinal": Case(lambda: Ordinal(3), linear(1), x(), (x()[:, 0] + 1).round().clamp(0, 2).long(), ClassPrediction),
    "pixels": Case(PixelCategorical, lambda: nn.Conv2d(2, 3, 1), x(2, 4, 4), places(4, 4), ClassPrediction),
    "tokens": Case(TokenCategorical, linear(3), x(5, 3), places(5), ClassPrediction),
}


def fitted(case: Case, folder: Path, **options: Any) -> BayesianModule:
    """Fit two chains for 12 steps with four samples, evaluated on the training data."""
    torch.manual_seed(0)
    module = BayesianModule(net=case.net(), likelihood=case.likelihood(), sampler=SGLD, lr=1e-3, seed=0, **options)
    batches = DataLoader(TensorDataset(case.inputs, case.targets), batch_size=8)
    callbacks = [SamplingSchedule(8, every_n_steps=2), SampleCollector(folder), BayesianModelAverage()]
    quiet_trainer(max_steps=12, callbacks=callbacks).fit(module, batches, batches)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_from_fit_to_prediction(case: Case, tmp_path: Path) -> None:
    """The loaded posterior predicts what the module's own does; its mean density is the evaluation's NLL."""
    module = fitted(case, tmp_path / "s", num_chains=CHAINS)
    evaluation = module.evaluations["val"].bma
    assert set(evaluation) == set(module.likelihood.metric_names)  # type: ignore[union-attr]
    assert all(torch.tensor(value).isfinite() for value in evaluation.values())
    posterior = Posterior.load(tmp_path / "s")
    assert len(posterior) == 2 * CHAINS
    assert type(posterior.model.likelihood) is type(case.likelihood())  # type: ignore[union-attr]
    found = posterior.predict(case.inputs)
    assert type(found) is case.kind
    own = module.posterior.predict(case.inputs)  # type: ignore[union-attr]
    assert found.parts.keys() == own.parts.keys()
    assert all(torch.equal(part, own.parts[name]) for name, part in found.parts.items())
    low, high = found.interval(0.8)
    assert (low <= high).all()
    assert (high > low).any()
    draws = found.sample(3)
    assert draws.shape[1:] == (case.targets.shape if draws.dim() == 1 + case.targets.dim() else (DATA, 1))
    assert (found.total.square() + 1e-6 >= found.epistemic.square()).all()
    if isinstance(found, RegressionPrediction):
        density = found.log_prob(case.targets.reshape(DATA, -1))
        assert -float(density.mean()) == pytest.approx(evaluation["nll"], rel=1e-4, abs=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.filterwarnings("error:All chains start with the same")
def test_chains_one_by_one_are_chains_at_once(tmp_path: Path) -> None:
    """Learned scales, cut points and counts under vmap, up to rounding; chains begin at the scale that was given."""
    for name in ("student", "negative_binomial", "ordinal"):
        found = [
            fitted(CASES[name], tmp_path / f"{name}_{how}", num_chains=CHAINS, chain_execution=how)
            for how in ("loop", "vmap")
        ]
        for parameter, other in zip(*(module.parameters() for module in found), strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5)
        learned = dict(found[0].named_parameters())
        assert any(key.startswith("likelihood.") and len(value) == CHAINS for key, value in learned.items())
        assert all(bool((v[0] != v[1]).any()) for k, v in learned.items() if k.startswith("likelihood."))


# -- keeping the samples' distributions -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_distributions_are_kept_while_they_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches give the intervals of all inputs; too many are refused with the remedy; weights are respected."""
    case = CASES["heteroscedastic"]
    posterior = fitted(case, tmp_path / "s", num_chains=CHAINS).posterior
    assert posterior is not None
    whole = posterior.predict(case.inputs)
    by_batch = posterior.predict(list(case.inputs.split(10)))
    torch.testing.assert_close(whole.quantile(0.2), by_batch.quantile(0.2))
    last = posterior[-1:]
    only = posterior._selected(range(4), [-torch.inf] * 3 + [0.0], True)
    torch.testing.assert_close(only.predict(case.inputs).quantile(0.9), last.predict(case.inputs).quantile(0.9))
    monkeypatch.setattr(kept, "SMALL", 100)
    monkeypatch.setattr("lightning_sgmcmc.posterior.predictive.SMALL", 100)
    with pytest.raises(RuntimeError, match=r"interval|quantile needs .* pass return_samples=True"):
        posterior.predict(case.inputs).interval()
    torch.testing.assert_close(posterior.predict(case.inputs, return_samples=True).quantile(0.2), whole.quantile(0.2))


@pytest.mark.filterwarnings("ignore")
def test_calibration(tmp_path: Path) -> None:
    """Intervals widen by the factor; labels that are ignored do not count; counts are refused."""
    case = CASES["student"]
    posterior = fitted(case, tmp_path / "a").posterior
    assert posterior is not None
    calibrated = posterior.calibrate([(case.inputs, case.targets)])
    factor = calibrated.calibration.value  # type: ignore[union-attr]
    plain, wider = posterior.predict(case.inputs), calibrated.predict(case.inputs)
    widths = [high - low for low, high in (plain.interval(), wider.interval())]
    torch.testing.assert_close(widths[1], factor * widths[0], rtol=1e-4, atol=1e-5)
    for name in ("pixels", "labels"):
        case = CASES[name]
        posterior = fitted(case, tmp_path / name).posterior
        assert posterior is not None
        found = posterior.calibrate([(case.inputs, case.targets)]).calibration
        assert found is not None
        assert found.nll_after <= found.nll_before
        assert found.count == int((case.targets >= 0).sum())
    with pytest.raises(TypeError, match=r"calibrate scales .* and Poisson predicts a CountPrediction"):
        fitted(CASES["poisson"], tmp_path / "p").posterior.calibrate(  # type: ignore[union-attr]
            [(CASES["poisson"].inputs, CASES["poisson"].targets)]
        )


# -- a module's own log_likelihood ------------------------------------------------------------------------------------


class Own(BayesianModule):
    """Classes with a density of its own, and what predictions average."""

    def log_likelihood(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return Categorical().log_prob(self(inputs), labels)

    def predictive_terms(self, inputs: Any) -> dict[str, Tensor]:
        return {"probabilities": self(inputs).softmax(-1)}


class OwnNumbers(Own):
    def predictive_terms(self, inputs: Any) -> dict[str, Tensor]:
        output = self(inputs)
        return {"mean": output, "variance": output.square() + 1}


class OwnTensors(Own):
    def predictive_terms(self, inputs: Any) -> dict[str, Tensor]:
        return {"margin": self(inputs)[:, 0]}


@pytest.mark.filterwarnings("ignore")
def test_own_log_likelihoods_are_predicted_with(tmp_path: Path) -> None:
    inputs = next(iter(loader()))[0]
    posteriors = []
    for kind in (Own, OwnNumbers, OwnTensors, BayesianModule):
        torch.manual_seed(0)
        likelihood = Categorical() if kind is BayesianModule else None
        module = kind(net=nn.Linear(2, 2), likelihood=likelihood, sampler=SGLD, lr=0.01, seed=0)
        callbacks = [SamplingSchedule(4, every_n_steps=2), SampleCollector(tmp_path / kind.__name__)]
        quiet_trainer(max_steps=8, callbacks=callbacks).fit(module, loader())
        posteriors.append(Posterior.load(tmp_path / kind.__name__))
    classes, numbers, tensors, expected = (posterior.predict(inputs, return_samples=True) for posterior in posteriors)
    assert isinstance(classes, ClassPrediction)
    assert classes.parts.keys() == expected.parts.keys()
    assert all(torch.equal(part, expected.parts[name]) for name, part in classes.parts.items())
    assert torch.equal(classes.quantile(0.3), expected.quantile(0.3))
    assert isinstance(numbers, RegressionPrediction)
    total = numbers.sample_means.square().mean(0) + 1 + numbers.sample_means.var(0, correction=0)
    torch.testing.assert_close(numbers.std.square(), total, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="predictive_terms has no `distribution`"):
        numbers.interval()
    torch.testing.assert_close(tensors.parts["margin"], tensors.parts["sample_margin"].mean(0))


def test_a_likelihood_without_a_distribution_says_so() -> None:
    class Nothing(Likelihood):
        pass

    with pytest.raises(NotImplementedError, match="has no distribution of numbers: define"):
        Nothing().log_prob(torch.zeros(2, 1), torch.zeros(2, 1))


class ZeroInflated(Likelihood):
    """Counts of which a share of 0.3 is zero for a reason of its own."""

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        each = math.log(0.7) + Poisson().log_prob(output, target)
        return torch.where(target[:, 0] == 0, torch.logaddexp(torch.full_like(each, math.log(0.3)), each), each)


class Predicts(BayesianModule):
    def predictive_terms(self, inputs: Any) -> dict[str, Tensor]:
        return {"mean": 0.7 * self(inputs).exp(), "variance": self(inputs).exp()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [BayesianModule, Predicts])
def test_a_log_density_alone_is_sampled_and_scored(kind: Any) -> None:
    inputs, targets = x(), counts()
    data = DataLoader(TensorDataset(inputs, targets), batch_size=DATA)
    module = kind(nn.Linear(3, 1), ZeroInflated(), sampler=SGLD, lr=0.01, seed=0, num_chains=CHAINS)
    callbacks = [SamplingSchedule(4, every_n_steps=2), SampleCollector(in_memory=True), BayesianModelAverage()]
    quiet_trainer(max_steps=8, callbacks=callbacks).fit(module, data, data)
    posterior = module.posterior
    with torch.no_grad():
        each = torch.stack([ZeroInflated().log_prob(network(inputs), targets) for network in posterior.networks()])
    average = each.logsumexp(0) - math.log(len(each))
    assert module.evaluations["val"].bma["nll"] == pytest.approx(-float(average.mean()), rel=1e-5)
    assert posterior.evaluate([(inputs, targets)]).bma["nll"] == pytest.approx(-float(average.mean()), rel=1e-5)
    if kind is Predicts:
        assert posterior.predict(inputs).mean.shape == (DATA, 1)
    else:
        with pytest.raises(NotImplementedError, match=r"ZeroInflated has no .* predictive_terms\(x\) of the module"):
            posterior.predict(inputs)
