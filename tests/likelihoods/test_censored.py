"""Positive numbers and censored ones against scipy: densities, survival, gradients, posteriors, coverage, fits."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    SGLD,
    BayesianModule,
    Censored,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    LogNormal,
    MixtureOfGaussians,
    Poisson,
    Posterior,
    RegressionPrediction,
    StudentT,
    Weibull,
)
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule
from lightning_sgmcmc.diagnostics import concordance_index
from lightning_sgmcmc.likelihoods import right_censored
from lightning_sgmcmc.predictions import distributions
from tests.support.trainers import quiet_trainer

INF, NAN = math.inf, math.nan


class Case(NamedTuple):
    likelihood: Callable[[], Likelihood]
    outputs: int
    scipy: Callable[[Any], Any]
    low: float
    """The lower end of the numbers."""


CASES = {
    "gaussian": Case(lambda: Gaussian(0.5, learned=True), 1, lambda o: stats.norm(o[0], 0.5), -INF),
    "heteroscedastic": Case(
        lambda: HeteroscedasticGaussian(0.5),
        2,
        lambda o: stats.norm(o[0], 1e-3 + 0.5 * np.log1p(np.exp(o[1])) / math.log(2)),
        -INF,
    ),
    "log-normal": Case(lambda: LogNormal(0.5, learned=True), 1, lambda o: stats.lognorm(0.5, scale=np.exp(o[0])), 0.0),
    "weibull": Case(lambda: Weibull(1.5, learned=True), 1, lambda o: stats.weibull_min(1.5, scale=np.exp(o[0])), 0.0),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def outputs_of(case: Case, data: int) -> Tensor:
    return torch.randn(data, case.outputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def bounds_of(case: Case, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return six kinds of bounds for each output, shape (6, n, 2), and their log terms by scipy, (6, n)."""
    laws = [case.scipy(row) for row in output.numpy()]
    a, b, deep = (torch.tensor([law.ppf(q) for law in laws]) for q in (0.3, 0.6, 1 - 1e-9))
    nowhere = torch.full_like(a, INF)
    bounds = [(a, a), (a, nowhere), (-nowhere, b), (a, b), (a, a + 1e-3), (deep, deep * 1.1 + 0.1)]
    terms = [
        [law.logpdf(x) for law, x in zip(laws, a.numpy(), strict=True)],
        [law.logsf(x) for law, x in zip(laws, a.numpy(), strict=True)],
        [law.logcdf(x) for law, x in zip(laws, b.numpy(), strict=True)],
        [np.log(law.cdf(y) - law.cdf(x)) for law, x, y in zip(laws, a.numpy(), b.numpy(), strict=True)],
        [np.log(law.cdf(x + 1e-3) - law.cdf(x)) for law, x in zip(laws, a.numpy(), strict=True)],
        [np.log(law.sf(x) - law.sf(x * 1.1 + 0.1)) for law, x in zip(laws, deep.numpy(), strict=True)],
    ]
    return torch.stack([torch.stack(pair, -1) for pair in bounds]), torch.tensor(np.array(terms))


# -- terms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASES["log-normal"], CASES["weibull"]], ids=["log-normal", "weibull"])
def test_densities_moments_and_draws_of_positive_numbers_are_scipys(case: Case) -> None:
    output, likelihood = outputs_of(case, 20), case.likelihood()
    laws = [case.scipy(row) for row in output.numpy()]
    y = torch.tensor([law.rvs(random_state=i) for i, law in enumerate(laws)])
    expected = torch.tensor([law.logpdf(x) for law, x in zip(laws, y.numpy(), strict=True)])
    torch.testing.assert_close(likelihood.log_prob(output, y), expected, rtol=1e-5, atol=1e-5)
    terms = likelihood.terms(output) | likelihood.target_terms(output, y)
    for name, values in (
        ("mean", [law.mean() for law in laws]),
        ("variance", [law.var() for law in laws]),
        ("cdf", [law.cdf(x) for law, x in zip(laws, y.numpy(), strict=True)]),
    ):
        torch.testing.assert_close(terms[name][:, 0], torch.tensor(values), rtol=1e-4, atol=1e-6)
    torch.manual_seed(0)
    draws = likelihood.law(output[:1]).sample((4000,)).flatten()
    assert stats.kstest(draws.detach().numpy(), laws[0].cdf).pvalue > 1e-3
    with pytest.raises(ValueError, match="support"):
        likelihood.check_target(output, -y)
    assert (likelihood.log_prob(output, -y) == -INF).all()
    missing = torch.where(torch.arange(20) == 3, NAN, y)
    assert likelihood.log_prob(output, missing)[3] == 0


@each_case
def test_terms_of_all_kinds_of_bounds_are_scipys(case: Case) -> None:
    output, likelihood = outputs_of(case, 15), Censored(case.likelihood())
    bounds, expected = bounds_of(case, output)
    for kind, terms in zip(bounds, expected, strict=True):
        likelihood.check_target(output, kind)
        torch.testing.assert_close(likelihood.log_prob(output, kind), terms, rtol=2e-5, atol=2e-5)
    assert (likelihood.log_prob(output, torch.full((15, 2), NAN)) == 0).all()
    if case.low == 0:  # 0 bounds a positive number as -inf does
        zero = bounds[2].clamp_min(0)
        torch.testing.assert_close(likelihood.log_prob(output, zero), likelihood.log_prob(output, bounds[2]))


@each_case
def test_gradients_are_finite_and_those_of_finite_differences(case: Case) -> None:
    likelihood, output = Censored(case.likelihood()).double(), outputs_of(case, 3)
    bounds = bounds_of(case, output)[0].transpose(0, 1).flatten(0, 1)
    many = output.repeat_interleave(6, 0).requires_grad_()
    assert torch.autograd.gradcheck(lambda o: likelihood.log_prob(o, bounds), (many,))
    likelihood.forward = likelihood.log_prob  # type: ignore[assignment, method-assign]
    for name, parameter in likelihood.named_parameters():

        def of(value: Tensor, name: str = name) -> Tensor:
            found: Tensor = torch.func.functional_call(likelihood, {name: value}, (many.detach(), bounds))
            return found

        assert torch.autograd.gradcheck(of, (parameter.detach().requires_grad_(),))
    extreme = torch.tensor([[-1e4, -1e4], [1e4, INF], [-INF, 1e-4], [1.0, 1.0 + 1e-6], [NAN, NAN]])
    extreme = extreme if case.low < 0 else torch.where(extreme == -INF, 0.0, extreme.abs())
    o = torch.zeros(5, case.outputs, requires_grad=True)
    likelihood.float().log_prob(o, extreme).sum().backward()
    assert o.grad is not None
    assert o.grad.isfinite().all()


def test_chains_at_once_compiled_and_fields() -> None:
    likelihood = Censored(MixtureOfGaussians(2))
    outputs = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0))
    bounds = torch.stack([outputs[0, :, 0], outputs[0, :, 0] + 1], -1)
    each = torch.stack([likelihood.log_prob(output, bounds) for output in outputs])
    torch.testing.assert_close(torch.vmap(likelihood.log_prob, in_dims=(0, None))(outputs, bounds), each)
    compiled = torch.compile(likelihood.log_prob, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(outputs[0], bounds), each[0])
    field = torch.randn(2, 3, 4, 5)
    found = Censored(Gaussian()).log_prob(field, torch.stack([field, torch.full_like(field, INF)], -1))
    torch.testing.assert_close(found, torch.full((2,), 60 * math.log(0.5)))


def test_the_share_within_intervals_is_exact_with_the_true_law() -> None:
    """Half of the durations are censored by a clock of their own; the true law covers 50 % and 90 %."""
    draws = np.random.default_rng(0)
    output = torch.tensor(draws.normal(size=(4000, 1)))
    time = np.exp(output[:, 0].numpy()) * draws.weibull(1.5, 4000)
    clock = np.exp(output[:, 0].numpy()) * draws.exponential(1.0, 4000)
    target = right_censored(np.minimum(time, clock), time <= clock).double()
    likelihood = Censored(Weibull(1.5))
    assert 0.3 < float(target.isinf().any(1).double().mean()) < 0.7
    terms = likelihood.terms(output) | likelihood.target_terms(output, target)
    metrics = likelihood.metrics(terms, likelihood.log_prob(output, target), target, 1.0)
    assert float(metrics["coverage_50"]) == pytest.approx(0.5, abs=0.03)
    assert float(metrics["coverage_90"]) == pytest.approx(0.9, abs=0.02)


# -- posteriors -------------------------------------------------------------------------------------------------------


@pytest.mark.by_default("tobit")
@pytest.mark.parametrize(
    ("likelihood", "law"),
    [
        (lambda: Censored(Gaussian(1.0)), lambda t: stats.norm(t, 1.0)),
        (lambda: Censored(Weibull(1.5)), lambda t: stats.weibull_min(1.5, scale=np.exp(t))),
        (lambda: Censored(LogNormal(1.0)), lambda t: stats.lognorm(1.0, scale=np.exp(t))),
    ],
    ids=["tobit", "weibull", "log-normal"],
)
def test_the_posterior_of_one_parameter_is_that_of_quadrature(likelihood: Any, law: Any) -> None:
    """A location with the prior N(0, 1), from 30 numbers of which half are cut off, and in mini-batches."""
    y = law(0.7).rvs(30, random_state=1)
    cut = float(np.median(y))
    target = right_censored(np.minimum(y, cut), y < cut)

    def log_joint(t: float) -> float:
        own = law(t)
        return float(own.logpdf(y[y < cut]).sum() + (y >= cut).sum() * own.logsf(cut) - t**2 / 2)

    top = max(log_joint(t) for t in np.linspace(-2, 3, 200))

    def moment(power: int) -> float:
        return float(integrate.quad(lambda t: t**power * math.exp(log_joint(t) - top), -2, 3)[0])

    moments = [moment(power) for power in range(3)]
    mean = moments[1] / moments[0]
    std = math.sqrt(moments[2] / moments[0] - mean**2)
    options: dict[str, Any] = {"sampler": SGLD, "lr": 0.12, "num_chains": 40, "chain_execution": "vmap"}
    module = BayesianModule(nn.Linear(1, 1, bias=False), likelihood(), **options)
    callbacks = [SamplingSchedule(burn_in_steps=50, every_n_steps=15), SampleCollector(in_memory=True)]
    trainer = quiet_trainer(max_steps=125, callbacks=callbacks)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(30, 1), target), 15, shuffle=True))
    draws = torch.stack([sample.parameters["net.weight"] for sample in module.posterior]).double().flatten()
    assert abs(float(draws.mean()) - mean) < 4.5 * std / math.sqrt(len(draws) / 4)
    assert float(draws.std()) == pytest.approx(std, rel=0.15)


@pytest.mark.parametrize("likelihood", [Gaussian(), Weibull()])
def test_guessing_is_the_most_likely_law_of_the_bounds(likelihood: Any) -> None:
    draws = np.random.default_rng(1).weibull(1.5, 2000).astype("float32")
    exact = torch.from_numpy(np.stack([draws, draws], 1))
    if isinstance(likelihood, Weibull):
        best = -stats.weibull_min(*stats.weibull_min.fit(draws, floc=0)).logpdf(draws).mean()
    else:
        best = -stats.norm(draws.mean(), draws.std()).logpdf(draws).mean()
    assert Censored(likelihood).chance_nll(exact) == pytest.approx(best, rel=1e-4)
    unseen = torch.cat([exact, torch.full((5, 2), NAN)])
    assert Censored(likelihood).chance_nll(unseen) == pytest.approx(best, rel=1e-4)
    # Durations that have not ended are a probability and not a density; half of them leave about half of the term.
    ended = exact.clone()
    ended[1000:, 1] = INF
    law = stats.weibull_min if isinstance(likelihood, Weibull) else stats.norm

    def nll(values: Any) -> float:
        first, second = values[0], math.exp(values[1])
        own = law(math.exp(first), scale=second) if law is stats.weibull_min else law(first, second)
        return -float(own.logpdf(draws[:1000]).sum() + own.logsf(draws[1000:]).sum()) / 2000

    found = optimize.minimize(nll, [0.5, 0.5], method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-8}).fun
    assert Censored(likelihood).chance_nll(ended) <= found + 1e-4
    for unknown in ([[1.0, INF], [2.0, INF]], [[1.0, 1.0], [1.0, 1.0]], [[NAN, NAN]]):
        assert Censored(likelihood).chance_nll(torch.tensor(unknown)) is None


def test_from_fit_to_survival_curves(tmp_path: Path) -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    draws = np.random.default_rng(0)
    time = np.exp(x[:, 0].numpy()) * draws.weibull(2.0, 40)
    clock = draws.exponential(2.0, 40)
    target = right_censored(np.minimum(time, clock), (time <= clock).astype(int))
    target[5] = NAN
    torch.manual_seed(0)
    options: dict[str, Any] = {"sampler": SGLD, "lr": 2e-3, "num_chains": 2}
    module = BayesianModule(nn.Linear(2, 1), Censored(Weibull(1.0, learned=True)), **options)
    loader = DataLoader(TensorDataset(x, target), 16)
    average = BayesianModelAverage(metrics={"mae": lambda p, y: (p - y).abs().mean()})
    callbacks = [SamplingSchedule(50, every_n_steps=25), SampleCollector(tmp_path / "s"), average]
    quiet_trainer(max_steps=150, callbacks=callbacks).fit(module, loader, loader)
    assert module.state_dict().keys() >= {"likelihood.likelihood.log_concentration"}
    metrics = module.evaluations["val"].bma
    assert set(metrics) == {"nll", "coverage_50", "coverage_90", "mae"}
    guess = module.evaluations["val"].guessing
    assert set(guess) == {"nll"}
    assert guess["nll"] == pytest.approx(Censored(Weibull(1.0, learned=True)).chance_nll(target), rel=1e-5)
    posterior = Posterior.load(tmp_path / "s")
    prediction = posterior.predict(x)
    assert isinstance(prediction, RegressionPrediction)
    times = torch.linspace(0.0, 8.0, 30)
    curve = torch.stack([prediction.survival(float(t)) for t in times])
    assert curve.shape == (30, 40, 1)
    assert torch.equal(curve[0], torch.ones(40, 1))
    assert (curve.diff(dim=0) <= 0).all()
    torch.testing.assert_close(prediction.survival(prediction.quantile(0.5)), torch.full((40, 1), 0.5))
    known = ~target.isnan().any(1) & (target[:, 0] == target[:, 1])
    # NLL by hand, of the average: densities of what is known, survival of the others.
    joint = torch.where(
        known, prediction.log_prob(target[:, :1].nan_to_num(1.0)).exp(), prediction.survival(target[:, :1])[:, 0]
    )
    assert metrics["nll"] == pytest.approx(-float(joint[~target.isnan().any(1)].log().mean()), rel=1e-4)
    for needs_numbers in (posterior.calibrate, posterior.conformal):
        with pytest.raises(TypeError, match="bounds"):
            needs_numbers(loader)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([2.0, 1.0], "lower must be at most upper"),
        ([NAN, 1.0], "both be NaN"),
        ([-INF, INF], "two NaN"),
        ([0.0, INF], "two NaN"),
        ([-2.0, -1.0], "support"),
        ([0.0, 0.0], "support"),
    ],
)
def test_bounds_without_sense_are_refused_in_the_first_step(bounds: list[float], message: str) -> None:
    target = torch.tensor([[1.0, 1.0], bounds])
    module = BayesianModule(nn.Linear(2, 1), Censored(Weibull()), sampler=SGLD, lr=1e-3)
    with pytest.raises(ValueError, match=message):
        quiet_trainer(max_steps=2).fit(module, DataLoader(TensorDataset(torch.zeros(2, 2), target), 2))


@pytest.mark.parametrize("target", [torch.zeros(4), torch.zeros(4, 3), torch.zeros(4, 2).long(), torch.zeros(4, 2, 2)])
def test_targets_that_are_no_bounds_are_refused(target: Tensor) -> None:
    with pytest.raises(ValueError, match=r"\(lower, upper\)|for \(4, 2\) bounds"):
        Censored(Gaussian()).log_prob(torch.zeros(4, 1), target)


@pytest.mark.parametrize(
    ("likelihood", "error", "message"),
    [
        (lambda: Poisson(), TypeError, "real numbers"),
        (lambda: Gaussian, TypeError, "real numbers"),
        (lambda: StudentT(), TypeError, "log_survival"),
        (lambda: Gaussian(missing=-1), ValueError, "two NaN"),
    ],
)
def test_likelihoods_without_survival_are_refused(likelihood: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Censored(likelihood())


@pytest.mark.parametrize(
    ("time", "event", "message"),
    [([1.0, 2.0], [1, 2], "0 or 1, got 2"), ([1.0], [1, 0], r"\(1,\) and \(2,\)"), ([[1.0]], [[1]], "shape")],
)
def test_times_and_events_are_checked(time: Any, event: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        right_censored(time, event)


def test_a_distribution_of_the_users_own_can_be_censored() -> None:
    class Logistic(distributions.Normal):
        """Of the logistic function."""

        def log_prob(self, value: Tensor) -> Tensor:
            z = (value - self.loc) / self.scale
            return -z - 2 * nn.functional.softplus(-z) - self.scale.log()

        def log_cdf(self, value: Tensor) -> Tensor:
            return nn.functional.logsigmoid((value - self.loc) / self.scale)

        def log_survival(self, value: Tensor) -> Tensor:
            return nn.functional.logsigmoid((self.loc - value) / self.scale)

    class Own(Likelihood):
        distribution = Logistic

        def components(self, output: Tensor) -> dict[str, Tensor]:
            return {"loc": output, "scale": torch.ones(())}

    bounds = torch.tensor([[0.5, 0.5], [0.5, INF], [-INF, 0.5], [0.5, 2.0]])
    law = stats.logistic()
    expected = [law.logpdf(0.5), law.logsf(0.5), law.logcdf(0.5), math.log(law.cdf(2) - law.cdf(0.5))]
    torch.testing.assert_close(Censored(Own()).log_prob(torch.zeros(4), bounds), torch.tensor(expected).float())


def test_a_table_of_bounds_has_standardised_inputs_and_bounds_as_they_are() -> None:
    x, time = np.random.default_rng(0).normal(5, 3, (40, 2)), np.arange(1.0, 41.0)
    y = right_censored(time, time < 30)
    data = TableDataModule(x, y, batch_size=8, task="censored")
    module = BayesianModule(nn.Linear(2, 1), Censored(Weibull()), sampler=SGLD, lr=1e-4)
    schedule, average = SamplingSchedule(2, every_n_steps=2), BayesianModelAverage()
    quiet_trainer(max_steps=8, callbacks=[schedule, SampleCollector(in_memory=True), average]).fit(module, data)
    seen = torch.cat([batch[1] for batch in data.train_dataloader()])
    assert {tuple(row) for row in seen.tolist()} <= {tuple(row) for row in y.tolist()}
    assert math.isfinite(module.evaluations["val"].bma["nll"])
    with pytest.raises(ValueError, match="task='censored'"):
        TableDataModule(x, y, task="regression")
    intervals = TableDataModule(x, np.stack([time, time + 1], 1), task="regression")
    with pytest.raises(ValueError, match="task='censored'"):
        quiet_trainer(max_steps=2).fit(BayesianModule(nn.Linear(2, 1), Censored(Weibull()), lr=1e-4), intervals)
    with pytest.raises(ValueError, match=r"\(n, 2\)"):
        TableDataModule(x, time, task="censored")


def test_concordance_against_its_definition() -> None:
    """Every pair by hand: ties in time and in score, right-, left- and interval-censored numbers, missing ones."""
    draw = torch.Generator().manual_seed(0)
    low = torch.randint(0, 6, (1500,), generator=draw).double()
    kind = torch.randint(0, 5, (1500,), generator=draw)
    high = torch.where(kind < 2, low, torch.where(kind == 2, INF, low + 2))
    low = torch.where(kind == 4, -INF, low)
    low[7], high[7] = NAN, NAN
    score = (low.nan_to_num(0, 0, 0) + torch.randint(0, 5, (1500,), generator=draw)).round()
    bounds, s = torch.stack([low, high], 1).tolist(), score.tolist()
    pairs = [
        (i, j)
        for i in range(1500)
        for j in range(1500)
        if bounds[i][1] < bounds[j][0] or (bounds[i][1] == bounds[j][0] != bounds[j][1])
    ]
    truth = np.mean([1.0 if s[i] < s[j] else 0.5 if s[i] == s[j] else 0.0 for i, j in pairs])
    found = concordance_index(score[:, None], torch.stack([low, high], 1))
    assert float(found) == pytest.approx(truth, abs=1e-6)
    assert 0.6 < truth < 0.95
    times = right_censored(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([True, False, True]))
    assert float(concordance_index(torch.tensor([0.0, 1.0, 1.0]), times)) == 1, "event before censored at one time"
    assert float(concordance_index(torch.zeros(3), times)) == 0.5
    with pytest.raises(ValueError, match="no pair of targets"):
        concordance_index(torch.zeros(2), right_censored(torch.ones(2), torch.tensor([False, False])))
    with pytest.raises(ValueError, match=r"shape \(n, 2\) for n = 3"):
        concordance_index(torch.zeros(3), torch.zeros(3))
