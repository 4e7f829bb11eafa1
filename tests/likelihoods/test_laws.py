"""Likelihoods of numbers against scipy: densities, gradients, moments; the mixture's quantiles, intervals and draws."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import special, stats
from scipy.optimize import brentq
from torch import Tensor

from lightning_sgmcmc import (
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    MixtureOfGaussians,
    NegativeBinomial,
    Poisson,
    Posterior,
    StudentT,
)
from lightning_sgmcmc.evaluation.averages import WeightedAverage
from lightning_sgmcmc.posterior.predictive import KeptPredictions, kept_of, with_distributions
from lightning_sgmcmc.predictions import CountPrediction, RegressionPrediction
from lightning_sgmcmc.predictions.distributions import betainc, continued

WEIGHTS = (0.2, 0.5, 0.3)
SAMPLES = len(WEIGHTS)


class ScipyMixture(NamedTuple):
    """A mixture of scipy's distributions, for a likelihood whose own components are mixtures."""

    weights: Any
    parts: Any

    def logpdf(self, y: Any) -> Any:
        return np.log(sum(w * part.pdf(y) for w, part in zip(self.weights, self.parts, strict=True)))

    def cdf(self, y: Any) -> Any:
        return sum(w * part.cdf(y) for w, part in zip(self.weights, self.parts, strict=True))

    def mean(self) -> Any:
        return sum(w * part.mean() for w, part in zip(self.weights, self.parts, strict=True))

    def var(self) -> Any:
        spread = zip(self.weights, self.parts, strict=True)
        return sum(w * (part.var() + part.mean() ** 2) for w, part in spread) - self.mean() ** 2


def softplus(raw: Any) -> Any:
    return np.log1p(np.exp(raw)) / math.log(2)


def mixture_of(o: Any) -> ScipyMixture:
    weights = special.softmax(o[:2])
    return ScipyMixture(weights, [stats.norm(o[2 + j], 1e-3 + 0.7 * softplus(o[4 + j])) for j in range(2)])


class Law(NamedTuple):
    """A likelihood of one number, and scipy's distribution for one datum's outputs."""

    likelihood: Likelihood
    outputs: int
    scipy: Callable[[Any], Any]

    @property
    def is_discrete(self) -> bool:
        return isinstance(self.likelihood, Poisson | NegativeBinomial)


NUMBERS = {
    "gaussian": Law(Gaussian(0.6, learned=True), 1, lambda o: stats.norm(o[0], 0.6)),
    "heteroscedastic": Law(HeteroscedasticGaussian(0.5), 2, lambda o: stats.norm(o[0], 1e-3 + 0.5 * softplus(o[1]))),
    "student": Law(StudentT(3.0, 0.4, learned=True), 1, lambda o: stats.t(3.0, o[0], 0.4)),
    "mixture": Law(MixtureOfGaussians(2, 0.7), 6, mixture_of),
    "poisson": Law(Poisson(), 1, lambda o: stats.poisson(np.exp(o[0]))),
    "negative_binomial": Law(
        NegativeBinomial(2.5, learned=True), 1, lambda o: stats.nbinom(2.5, 2.5 / (2.5 + np.exp(o[0])))
    ),
}
each_law = pytest.mark.parametrize("law", NUMBERS.values(), ids=NUMBERS.keys())


def outputs_of(law: Law, data: int, seed: int = 0) -> Tensor:
    return torch.randn(SAMPLES, data, law.outputs, generator=torch.Generator().manual_seed(seed)).double() + 0.5


def targets_of(law: Law, output: Tensor, seed: int = 0) -> Tensor:
    """Return targets drawn from scipy's distributions, or near them."""
    draws = np.random.default_rng(seed)
    rows = output.numpy()
    if law.is_discrete:
        return torch.tensor([law.scipy(row).rvs(random_state=draws) for row in rows]).double()
    return torch.tensor([law.scipy(row).mean() + draws.normal() for row in rows]).double()


def predicted(law: Law, outputs: Tensor) -> RegressionPrediction:
    """Return what `Posterior.predict` makes of samples with these outputs."""
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    average, kept = WeightedAverage(), KeptPredictions(math.inf)
    with torch.no_grad():
        for output, weight in zip(outputs, weights, strict=True):
            terms = law.likelihood.terms(output)
            average.add(terms, torch.empty(0), float(weight.log()))
            kept.add(0, kept_of(law.likelihood, output, terms))
        found = with_distributions(law.likelihood.prediction(average.terms, None), law.likelihood, kept, weights)
    assert isinstance(found, RegressionPrediction)
    return found


def scipy_cdf(law: Law, outputs: Tensor, datum: int) -> Callable[[float], float]:
    parts = [law.scipy(output[datum].numpy()) for output in outputs]
    return lambda y: float(sum(w * part.cdf(y) for w, part in zip(WEIGHTS, parts, strict=True)))


# -- one sample -------------------------------------------------------------------------------------------------------


@each_law
def test_densities_and_moments_are_scipys(law: Law) -> None:
    output = outputs_of(law, 25)[0]
    target = targets_of(law, output)
    name = "logpmf" if law.is_discrete else "logpdf"
    dists = [law.scipy(row) for row in output.numpy()]
    expected = torch.tensor([float(getattr(d, name)(y)) for d, y in zip(dists, target.tolist(), strict=True)])
    likelihood = law.likelihood
    for shaped in (target, target[:, None]):
        found = likelihood.log_prob(output, shaped)
        assert found.shape == (25,)
        torch.testing.assert_close(found, expected.double(), rtol=2e-6, atol=2e-6)  # scales are kept in float32
    terms = likelihood.terms(output) | likelihood.target_terms(output, target)
    for term, values in (("mean", [d.mean() for d in dists]), ("variance", [d.var() for d in dists])):
        torch.testing.assert_close(terms[term][:, 0].double(), torch.tensor(values).double(), rtol=2e-6, atol=2e-6)
    cdfs = torch.tensor([float(d.cdf(y)) for d, y in zip(dists, target.tolist(), strict=True)])
    torch.testing.assert_close(terms["cdf"][:, 0].double(), cdfs.double(), rtol=2e-6, atol=2e-6)


@each_law
def test_gradients_are_those_of_finite_differences(law: Law) -> None:
    """By the outputs and by what the likelihood learns."""
    likelihood, output = law.likelihood, outputs_of(law, 4)[0].requires_grad_()
    target = targets_of(law, output.detach())
    assert torch.autograd.gradcheck(lambda o: likelihood.log_prob(o, target), (output,))
    for name, parameter in likelihood.named_parameters():
        own = parameter.detach().double().requires_grad_()

        def of(value: Tensor, name: str = name) -> Tensor:
            found = torch.func.functional_call(likelihood, {name: value}, (output.detach(), target))
            assert isinstance(found, Tensor)
            return found

        likelihood.forward = likelihood.log_prob  # type: ignore[assignment, method-assign]
        assert torch.autograd.gradcheck(of, (own,))


@each_law
def test_all_chains_at_once_compiled_and_in_half_precision(law: Law) -> None:
    outputs = outputs_of(law, 6).float()
    target = targets_of(law, outputs[0].double()).float()
    each = torch.stack([law.likelihood.log_prob(output, target) for output in outputs])
    torch.testing.assert_close(torch.vmap(lambda o: law.likelihood.log_prob(o, target))(outputs), each)
    terms = torch.vmap(lambda o: law.likelihood.kept_components(o))(outputs)
    assert all(p.shape[:2] == (SAMPLES, 6) for p in terms.values())
    compiled = torch.compile(law.likelihood.log_prob, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(outputs[0], target), each[0])
    half = outputs[0].bfloat16()
    assert torch.equal(law.likelihood.log_prob(half, target), law.likelihood.log_prob(half.float(), target))


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (2.5, 11.0), (1000.0, 700.0), (1e4, 1e4), (0.5, 1e4)])
def test_the_incomplete_beta_function_is_scipys(a: float, b: float) -> None:
    center, spread = a / (a + b), 3 / math.sqrt(a + b)
    x = torch.linspace(max(center - spread, 0), min(center + spread, 1), 41).double()
    expected = torch.tensor(special.betainc(a, b, x.numpy()))
    by_terms = continued(*torch.broadcast_tensors(torch.tensor(a).double(), torch.tensor(b).double(), x))
    torch.testing.assert_close(by_terms, expected, rtol=1e-6, atol=1e-9)
    at_once = torch.vmap(lambda one: betainc(torch.tensor(a), torch.tensor(b), one))(x[:, None])
    torch.testing.assert_close(at_once[:, 0], expected, rtol=1e-6, atol=1e-9)
    assert torch.equal(betainc(torch.tensor(a), torch.tensor(b), x), expected)


# -- the mixture of samples -------------------------------------------------------------------------------------------


@each_law
def test_quantiles_are_those_of_the_weighted_mixture(law: Law) -> None:
    outputs = outputs_of(law, 3)
    prediction = predicted(law, outputs)
    shift, factor = (0.0, 1.0) if law.is_discrete else (120.0, 6.9)
    if not law.is_discrete:
        prediction = prediction.rescaled([shift], [factor])
    cdfs = [scipy_cdf(law, outputs, datum) for datum in range(3)]
    for q in (0.001, 0.5, 0.9999):
        found = prediction.quantile(q)
        for datum, cdf in enumerate(cdfs):
            if law.is_discrete:
                expected = next(k for k in range(100_000) if cdf(k) >= q)
            else:
                expected = shift + factor * brentq(lambda y, cdf=cdf, q=q: cdf(y) - q, -500, 500, xtol=1e-9)
            assert found[datum, 0] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    low, high = prediction.interval(0.9)
    assert torch.equal(low, prediction.quantile((1 - 0.9) / 2))
    middle = (low + high) / 2
    expected_cdf = [cdf((float(middle[d, 0]) - shift) / factor) for d, cdf in enumerate(cdfs)]
    torch.testing.assert_close(
        prediction.cdf(middle)[:, 0].float(), torch.tensor(expected_cdf).float(), rtol=1e-4, atol=1e-5
    )


TORCHS: dict[str, tuple[type[Any], tuple[str, ...], Callable[..., Any]]] = {
    "Gamma": (torch.distributions.Gamma, ("concentration", "rate"), lambda a, b: stats.gamma(a, scale=1 / b)),
    "LogNormal": (torch.distributions.LogNormal, ("loc", "scale"), lambda m, s: stats.lognorm(s, scale=np.exp(m))),
    "Weibull": (torch.distributions.Weibull, ("scale", "concentration"), lambda a, k: stats.weibull_min(k, scale=a)),
    "Pareto": (torch.distributions.Pareto, ("scale", "alpha"), lambda m, a: stats.pareto(a, scale=m)),
    "InverseGamma": (torch.distributions.InverseGamma, ("concentration", "rate"), lambda a, b: stats.invgamma(a, 0, b)),
    "Chi2": (torch.distributions.Chi2, ("df",), stats.chi2),
    "Exponential": (torch.distributions.Exponential, ("rate",), lambda r: stats.expon(scale=1 / r)),
    "Gumbel": (torch.distributions.Gumbel, ("loc", "scale"), stats.gumbel_r),
}


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_laws_have_quantiles_and_a_cdf_at_all_numbers(name: str) -> None:
    """Their own functions are NaN, or anything, outside of the support, where a search for a quantile begins."""
    kind, arguments, of_scipy = TORCHS[name]

    class Own(Likelihood):
        distribution = kind

        def components(self, output: Tensor) -> dict[str, Tensor]:
            return {each: output[:, i].exp() for i, each in enumerate(arguments)}

    logs = torch.tensor([[0.9, 0.2], [0.4, 0.5]])[:, : len(arguments)]
    members = [{"weight": torch.zeros(len(arguments), 1), "bias": row} for row in logs]
    net, weights = torch.nn.Linear(1, len(arguments)), [0.3, 0.7]
    prediction = Posterior.from_states(net, members, Own(), weights=weights).predict(torch.zeros(1, 1))
    laws = [of_scipy(*row.exp().tolist()) for row in logs]

    def cdf(y: float) -> float:
        return sum(weight * float(law.cdf(y)) for weight, law in zip(weights, laws, strict=True))

    for q in (0.001, 0.1, 0.5, 0.99):
        low, high = (bound(float(law.ppf(q)) for law in laws) for bound in (min, max))
        assert float(prediction.quantile(q)) == pytest.approx(brentq(lambda y, q=q: cdf(y) - q, low, high), rel=1e-4)
    for y in (-3.0, 0.0, 0.5, 4.0):
        assert float(prediction.cdf(y)) == pytest.approx(cdf(y), abs=1e-6)


@each_law
def test_parts_of_the_uncertainty_are_the_law_of_total_variance(law: Law) -> None:
    outputs = outputs_of(law, 5)
    prediction = predicted(law, outputs)
    weights = np.array(WEIGHTS)
    means = np.array([[law.scipy(row).mean() for row in output.numpy()] for output in outputs])
    noise = np.array([[law.scipy(row).var() for row in output.numpy()] for output in outputs])
    between = weights @ (means - weights @ means) ** 2
    for found, expected in (
        (prediction.total, np.sqrt(between + weights @ noise)),
        (prediction.epistemic, np.sqrt(between)),
        (prediction.aleatoric, np.sqrt(weights @ noise)),
    ):
        assert found[:, 0].numpy() == pytest.approx(expected, rel=1e-4)


@each_law
def test_draws_follow_the_mixture_and_intervals_cover_it(law: Law) -> None:
    """4,000 draws of each of 5 data: means, and shares below quantiles, within 5 standard errors (false alarm 3e-5).

    The shares of draws in the 50 % and 90 % intervals, as an evaluation counts them, are nominal within 5 errors.
    """
    outputs, count = outputs_of(law, 5, seed=3), 4000
    prediction = predicted(law, outputs)
    draws = prediction.sample(count, seed=1)
    assert draws.shape == (count, 5, 1)
    assert torch.equal(draws, prediction.sample(count, seed=1))
    assert not torch.equal(draws, prediction.sample(count, torch.Generator().manual_seed(2)))
    error = prediction.std / math.sqrt(count)
    assert ((draws.mean(0) - prediction.mean).abs() < 5 * error).all()
    for q in (0.1, 0.5, 0.9):
        at = prediction.quantile(q)
        share, expected = (draws <= at + 1e-6).double().mean(0), prediction.cdf(at + 1e-6).double()
        assert ((share - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()
    target = draws.reshape(-1, 1)
    average = WeightedAverage()
    with torch.no_grad():
        for output, weight in zip(outputs, WEIGHTS, strict=True):
            many = output.float().repeat(count, 1)
            terms = law.likelihood.terms(many) | law.likelihood.target_terms(many, target)
            average.add(terms, law.likelihood.log_prob(many, target), math.log(weight))
    found = law.likelihood.metrics(average.terms, average.log_density, target, 1.0)
    assert set(found) == set(law.likelihood.metric_names)
    for level in (0.5, 0.9):
        error_of_share = math.sqrt(level * (1 - level) / (5 * count))
        assert abs(float(found[f"coverage_{level * 100:.0f}"]) - level) < 5 * error_of_share
    density = prediction.log_prob(draws[0])
    torch.testing.assert_close(density.float(), average.log_density[:5].float(), rtol=1e-4, atol=1e-4)


def test_units_and_calibration_stretch_the_whole_distribution() -> None:
    """A stretched mixture has its mean, factor times its std, and quantiles m + factor·(q - m); then units apply."""
    outputs = outputs_of(NUMBERS["student"], 4)
    plain = predicted(NUMBERS["student"], outputs)
    changed = plain.stretched(1.7).rescaled([100.0], [3.0])
    for q in (0.1, 0.8):
        expected = 100 + 3 * (plain.mean + 1.7 * (plain.quantile(q) - plain.mean))
        torch.testing.assert_close(changed.quantile(q), expected)
    torch.testing.assert_close(changed.std, 3 * 1.7 * plain.std)
    torch.testing.assert_close(changed.mean, 100 + 3 * plain.mean)
    y = changed.quantile(0.3)
    torch.testing.assert_close(changed.cdf(y), torch.full((4, 1), 0.3).double())
    shifted = (y - 100) / 3
    expected_density = plain.log_prob(plain.mean + (shifted - plain.mean) / 1.7) - math.log(3 * 1.7)
    torch.testing.assert_close(changed.log_prob(y), expected_density, rtol=1e-5, atol=1e-5)
    assert torch.equal(changed.to("cpu").quantile(0.1), changed.quantile(0.1))


def test_two_targets_share_a_sample() -> None:
    """Draws of both numbers of a datum come from one component: two far modes give draws near (0, 0) and (9, 9)."""
    law = Law(HeteroscedasticGaussian(0.1), 4, lambda o: None)
    outputs = torch.tensor([[[0.0, 0.0, 0.0, 0.0]], [[9.0, 9.0, 0.0, 0.0]], [[9.0, 9.0, 0.0, 0.0]]])
    prediction = predicted(law, outputs)
    assert prediction.mean.shape == (1, 2)
    draws = prediction.sample(200)[:, 0] > 4.5
    assert torch.equal(draws[:, 0], draws[:, 1])
    assert 0.1 < 1 - draws[:, 0].float().mean() < 0.3  # weight 0.2, within 3.5 standard errors
    both = law.likelihood.log_prob(outputs[1], torch.tensor([[9.0, 9.1]]))
    expected = stats.norm(9, 0.101).logpdf([9.0, 9.1]).sum()
    assert float(both) == pytest.approx(expected, rel=1e-4)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    prediction = predicted(NUMBERS["poisson"], outputs_of(NUMBERS["poisson"], 3))
    assert isinstance(prediction, CountPrediction)
    with pytest.raises(ValueError, match=r"level must be in \(0, 1\), got 90"):
        prediction.interval(90)
    with pytest.raises(ValueError, match=r"q must be in \(0, 1\), got 0"):
        prediction.quantile(0)
    several: Any
    for several in ([0.1, 0.9], torch.tensor([0.1, 0.9])):
        with pytest.raises(TypeError, match="q must be one number"):
            prediction.quantile(several)
    with pytest.raises(ValueError, match="num must be at least 1, got 0"):
        prediction.sample(0)
    with pytest.raises(ValueError, match="y should have shape"):
        prediction.cdf(torch.zeros(2))
    with pytest.raises(ValueError, match="standardised its targets"):
        prediction.rescaled([0.0], [2.0])
    with pytest.raises(RuntimeError, match=r"needs the distribution of each sample; .*return_samples=True"):
        prediction.replaced().with_kept(None).interval()


@pytest.mark.parametrize(
    ("likelihood", "output", "target", "message"),
    [
        (Poisson(), torch.zeros(2, 1), torch.tensor([0.5, 1.0]), "targets must be counts .* not standardised, got 0.5"),
        (NegativeBinomial(), torch.zeros(2, 1), torch.tensor([-1.0, 1.0]), "targets must be counts .* got -1"),
        (StudentT(), torch.zeros(2, 1), torch.tensor([math.inf, 1.0]), "targets must be finite numbers"),
    ],
)
def test_targets_without_a_density_are_refused(
    likelihood: Likelihood, output: Tensor, target: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        likelihood.check_target(output, target)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StudentT(df=2.0), r"df must be in \(2, inf\), got 2.0"),
        (lambda: MixtureOfGaussians(1), "num_components must be at least 2, got 1: use HeteroscedasticGaussian"),
        (lambda: NegativeBinomial(0.0), r"concentration must be in \(0, inf\), got 0"),
        (lambda: HeteroscedasticGaussian(min_std=0.0), r"min_std must be in \(0, inf\)"),
        (lambda: HeteroscedasticGaussian().log_prob(torch.zeros(3, 1), torch.zeros(3)), "needs 2 outputs for each"),
        (lambda: MixtureOfGaussians(2).log_prob(torch.zeros(3, 5), torch.zeros(3)), "needs 6 outputs for each target"),
        (lambda: HeteroscedasticGaussian().log_prob(torch.zeros(3, 4), torch.zeros(3)), "for targets of shape"),
        (lambda: Poisson().log_prob(torch.zeros(3, 1), torch.zeros(4)), "outputs of shape .* for targets of shape"),
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_chance_is_the_best_constant_output() -> None:
    """No constant on a grid beats it, and one comes within 1e-3 nats."""
    counts = torch.poisson(torch.full((200,), 3.0), generator=torch.Generator().manual_seed(0))
    for likelihood, target, outputs in (
        (Poisson(), counts, torch.linspace(0, 2, 201)[:, None]),
        (HeteroscedasticGaussian(min_std=1e-6), counts, None),
    ):
        chance = likelihood.chance_nll(target)
        assert chance is not None
        if outputs is None:
            raw = torch.linspace(0.5, 4, 201)
            outputs = torch.stack([torch.full_like(raw, float(target.mean())), raw], 1)
        grid = [-float(likelihood.log_prob(o.expand(200, -1), target).mean()) for o in outputs]
        assert min(grid) == pytest.approx(chance, abs=1e-3)
