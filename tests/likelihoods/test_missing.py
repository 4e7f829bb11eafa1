"""A target that is NaN or `missing` is not observed: everything is as if it were not among the data."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules.base import standardise
from lightning_sgmcmc.diagnostics import pit_histogram
from lightning_sgmcmc.evaluation.reference import StoredScores
from lightning_sgmcmc.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    MixtureOfGaussians,
    MultiLabelBernoulli,
    NegativeBinomial,
    Ordinal,
    PixelCategorical,
    Poisson,
    StudentT,
    TokenCategorical,
)
from lightning_sgmcmc.samplers import SGLD
from tests.support.trainers import quiet_trainer

N, NAN = 24, math.nan
generator = torch.Generator().manual_seed(1)
X = torch.randn(N, 3, generator=generator)
NUMBERS = torch.randn(N, 1, generator=generator)
LABELS = torch.randint(0, 3, (N,), generator=generator)
KNOWN = torch.rand(N, generator=generator) > 0.3


class Case(NamedTuple):
    likelihood: Any
    width: Any
    target: Tensor
    missing: float = NAN


class Exponential(Likelihood):
    """Positive numbers of a user's own distribution."""

    distribution = torch.distributions.Exponential

    def components(self, output: Tensor) -> dict[str, Tensor]:
        return {"rate": output.exp()}


class MaskedGaussian(Gaussian):
    """What users write for themselves."""

    def log_prob(self, output: Tensor, target: Tensor) -> Tensor:
        known = ~target.isnan()
        errors = torch.where(known, target, output) - output
        return torch.where(known, -errors.square() / 2 - 0.9189385, 0.0).sum(-1)


TWO, MANY = torch.cat([NUMBERS, -NUMBERS], 1), torch.randint(0, 2, (N, 4), generator=generator)
CASES: dict[str, Case] = {
    "Gaussian": Case(lambda: Gaussian(0.5), 1, NUMBERS),
    "Gaussian (n,)": Case(lambda: Gaussian(0.5, learned=True), 1, NUMBERS[:, 0]),
    "Gaussian, -1": Case(lambda: Gaussian(0.5, missing=-1), 1, NUMBERS, -1),
    "Gaussian of two": Case(lambda: Gaussian(0.5), 2, TWO),
    "heteroscedastic": Case(HeteroscedasticGaussian, 2, NUMBERS),
    "Student": Case(lambda: StudentT(4.0, learned=True), 1, NUMBERS),
    "mixture": Case(lambda: MixtureOfGaussians(2), 6, NUMBERS),
    "Poisson": Case(Poisson, 1, LABELS[:, None].float()),
    "Poisson, -1": Case(lambda: Poisson(missing=-1), 1, LABELS[:, None], -1),
    "negative binomial": Case(lambda: NegativeBinomial(2.0, learned=True), 1, LABELS[:, None].float()),
    "own distribution": Case(Exponential, 1, NUMBERS.abs() + 0.1),
    "categorical": Case(lambda: Categorical(missing=-1), 3, LABELS, -1),
    "categorical, -100": Case(lambda: Categorical(missing=-100), 3, LABELS, -100),
    "Bernoulli": Case(Bernoulli, 1, (LABELS > 0).float()),
    "Bernoulli, -1": Case(lambda: Bernoulli(missing=-1), 1, (LABELS > 0).long(), -1),
    "ordinal": Case(lambda: Ordinal(3, missing=-1), 1, LABELS, -1),
    "several labels": Case(MultiLabelBernoulli, 4, MANY.float()),
    "several labels, -1": Case(lambda: MultiLabelBernoulli(missing=-1), 4, MANY, -1),
    "tokens": Case(TokenCategorical, (4, 2), MANY, -100),
    "pixels": Case(lambda: PixelCategorical(255), (2, 4), MANY, 255),
    "the user's own": Case(MaskedGaussian, 1, NUMBERS),
}
CALIBRATED = ["Gaussian", "Gaussian, -1", "Gaussian of two", "Student", "categorical", "Bernoulli", "ordinal"]
LIBRARY = [name for name in CASES if name != "the user's own"]


def network(case: Case) -> nn.Module:
    torch.manual_seed(0)
    shape = case.width if isinstance(case.width, tuple) else (case.width,)
    return nn.Sequential(nn.Linear(3, math.prod(shape)), nn.Unflatten(1, shape))


def with_gaps(case: Case) -> Tensor:
    target = case.target.clone()
    target[~KNOWN] = case.missing if case.missing == case.missing else NAN
    return target


@pytest.mark.parametrize("name", LIBRARY)
def test_a_missing_target_has_no_term_and_no_gradient(name: str) -> None:
    case = CASES[name]
    likelihood, target = case.likelihood(), with_gaps(case)
    output = network(case)(X).detach().requires_grad_()
    each = likelihood.log_prob(output, target)
    torch.testing.assert_close(each[KNOWN], likelihood.log_prob(output[KNOWN], case.target[KNOWN]), rtol=0, atol=0)
    assert (each[~KNOWN] == 0).all()
    assert torch.equal(likelihood.observed(target), KNOWN)
    each[~KNOWN].sum().backward()
    assert (output.grad == 0).all()
    likelihood.check_target(output.detach(), target)


@pytest.mark.parametrize("name", ["Gaussian of two", "Poisson", "Bernoulli", "several labels"])
def test_missing_targets_run_for_all_chains_at_once(name: str) -> None:
    case = CASES[name]
    likelihood, target = case.likelihood(), with_gaps(case)
    outputs = torch.stack([network(case)(X + shift) for shift in (0.0, 1.0)])
    together = torch.vmap(likelihood.log_prob, in_dims=(0, None))(outputs, target)
    alone = torch.stack([likelihood.log_prob(output, target) for output in outputs])
    torch.testing.assert_close(together, alone)


@pytest.mark.by_default(
    *("Gaussian-1]", "(n,)-2]", "of two-2]", "scedastic-2]", "mixture-2]", "Poisson-2]", "own distribution-2]"),
    *("categorical-2]", "-100-2]", "Bernoulli, -1-2]", "ordinal-2]", "labels-2]", "tokens-1]", "pixels-2]", "own-2]"),
)
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_evaluations_are_those_of_the_observed_data(name: str, chains: int) -> None:
    case = CASES[name]
    average = BayesianModelAverage()
    module = BayesianModule(network(case), case.likelihood(), sampler=SGLD, lr=0.05, num_chains=chains)
    schedule = SamplingSchedule(burn_in_steps=2, every_n_steps=2)
    trainer = quiet_trainer(max_steps=10, callbacks=[schedule, SampleCollector(in_memory=True), average])
    data = TensorDataset(X, with_gaps(case))
    loaders = [DataLoader(data, 7), DataLoader(TensorDataset(X[KNOWN], case.target[KNOWN]), 7)]
    trainer.fit(module, DataLoader(data, 8, shuffle=True), loaders)
    found, expected = (one.evaluation for one in average._averages)
    assert found.bma == pytest.approx(expected.bma, rel=1e-6, abs=1e-6)
    assert found.single == pytest.approx(expected.single, rel=1e-6, abs=1e-6)
    assert len(found.bma) > 0
    assert all(map(math.isfinite, found.bma.values()))
    if found.pit is not None:
        torch.testing.assert_close(pit_histogram(found.pit), pit_histogram(expected.pit))


@pytest.mark.parametrize("what", ["calibrate", "conformal"])
@pytest.mark.parametrize(
    "name", ["Gaussian", "Gaussian, -1", "Gaussian of two", "Student", "categorical", "Bernoulli", "ordinal"]
)
def test_calibration_is_that_of_the_observed_data(name: str, what: str) -> None:
    case = CASES[name]
    module = BayesianModule(network(case), case.likelihood(), sampler=SGLD, lr=0.05)
    schedule = SamplingSchedule(burn_in_steps=2, every_n_steps=2)
    trainer = quiet_trainer(max_steps=10, callbacks=[schedule, SampleCollector(in_memory=True)])
    trainer.fit(module, DataLoader(TensorDataset(X, with_gaps(case)), 8))
    results = []
    for batch in ((X, with_gaps(case)), (X[KNOWN], case.target[KNOWN])):
        if what == "calibrate":
            fitted = module.posterior.calibrate([batch])
            results.append((fitted.calibration.value, fitted.calibration.count, fitted.calibration.nll_after))
        else:
            sets = module.posterior.conformal([batch], level=0.8)
            results.append((*sets.threshold.reshape(-1).tolist(), sets.count))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_a_table_with_gaps_in_different_rows() -> None:
    """Each number that is observed counts, by hand."""
    target = TWO.clone()
    target[::3, 0], target[1::4, 1] = NAN, NAN
    known, likelihood = ~target.isnan(), Gaussian(0.5)
    output = network(CASES["Gaussian of two"])(X).detach()
    each = -((target - output) / 0.5).square() / 2 - math.log(0.5 * math.sqrt(2 * math.pi))
    density = likelihood.log_prob(output, target)
    torch.testing.assert_close(density, torch.where(known, each, 0.0).sum(1))
    terms = likelihood.terms(output) | likelihood.target_terms(output, target)
    metrics = likelihood.metrics(terms, density, target, scale=3.0)
    errors = (output - target)[known]
    assert float(metrics["rmse"]) == pytest.approx(3 * float(errors.square().mean().sqrt()))
    assert float(metrics["nll"]) == pytest.approx(
        float(-density.mean()) + float(known.sum()) / N * math.log(3.0), rel=1e-5
    )
    inside = (errors.abs() / 0.5 <= 1.6448536).double().mean()
    assert float(metrics["coverage_90"]) == pytest.approx(float(inside))


def test_stored_scores_leave_gaps_out() -> None:
    likelihood, results = Gaussian(0.5), []
    output = network(CASES["Gaussian"])(X).detach()
    for x, y in ((output, with_gaps(CASES["Gaussian"])), (output[KNOWN], NUMBERS[KNOWN])):
        scores = StoredScores(likelihood, 2.0, None, True)
        results.append(scores._scores(torch.ones(1).double(), x[None], torch.full_like(x, 0.5)[None], y))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_standardising_leaves_gaps_out() -> None:
    (found,), mean, std = standardise(with_gaps(CASES["Gaussian"]).double())
    (expected,), own_mean, own_std = standardise(NUMBERS[KNOWN].double())
    torch.testing.assert_close((found[KNOWN], mean, std), (expected, own_mean, own_std))
    assert found[~KNOWN].isnan().all()


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_target_is_refused_under_the_own_name(value: float) -> None:
    target = NUMBERS.clone()
    target[3] = value
    with pytest.raises(ValueError, match="MaskedGaussian: targets must be finite"):
        MaskedGaussian().check_target(NUMBERS, target)


@pytest.mark.parametrize("missing", ["none", math.nan, True])
def test_missing_must_be_a_number(missing: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="missing"):
        Gaussian(missing=missing)


def test_the_posterior_is_that_of_the_observed_data() -> None:
    """A conjugate regression of two targets that lack different rows, in mini-batches."""
    target = TWO.clone()
    target[::3, 0], target[1::4, 1] = NAN, NAN
    options: dict[str, Any] = {"sampler": SGLD, "lr": 0.016, "num_chains": 40, "chain_execution": "vmap"}
    module = BayesianModule(nn.Linear(3, 2, bias=False), Gaussian(1.0), **options)
    schedule = SamplingSchedule(burn_in_steps=600, every_n_steps=40)
    trainer = quiet_trainer(max_steps=920, callbacks=[schedule, SampleCollector(in_memory=True)])
    trainer.fit(module, DataLoader(TensorDataset(X, target), 12, shuffle=True))
    draws = torch.stack([sample.parameters["net.weight"] for sample in module.posterior]).double()
    for column in range(2):
        known = ~target[:, column].isnan()
        x, y = X[known].double(), target[known, column].double()
        covariance = (x.T @ x + torch.eye(3, dtype=torch.float64)).inverse()
        mean, std = covariance @ x.T @ y, covariance.diagonal().sqrt()
        error = std / math.sqrt(len(draws) / 4)  # draws of a chain are correlated
        assert ((draws[:, column].mean(0) - mean).abs() / error).max() < 4.5
        torch.testing.assert_close(draws[:, column].std(0), std, rtol=0.25, atol=0)


def test_data_without_any_observed_target_are_refused() -> None:
    module = BayesianModule(nn.Linear(3, 3), Categorical(missing=-1), sampler=SGLD)
    with pytest.raises(ValueError, match="all 24 of the training data are NaN or missing"):
        quiet_trainer(max_steps=2).fit(module, DataLoader(TensorDataset(X, torch.full((N,), -1)), 8))
