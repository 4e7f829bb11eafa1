"""Firefly Monte Carlo: its bounds lie below the likelihoods, and its draws have the exact posterior's law."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import autocorrelation_time
from lightning_sgmcmc.simulation import BoundedLikelihood, LogisticBound, TaylorBound
from lightning_sgmcmc.simulation.firefly import FireflyRun, firefly

STD = 2.0
LOOSE = 4.0
"""A ξ far from the logits, so that a quarter of the data is bright."""


@functools.cache
def table() -> tuple[Tensor, Tensor]:
    """Return 40 data of a logistic regression with an intercept, of which the slope is large."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.stack([torch.ones(40), torch.randn(40, generator=generator)], 1).double()
    chance = (inputs @ torch.tensor([0.5, 2.0]).double()).sigmoid()
    return inputs, (torch.rand(40, generator=generator) < chance).long()


@functools.cache
def skewed() -> Tensor:
    return torch.randn(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64).exp()


def bounds() -> list[tuple[str, BoundedLikelihood, Tensor]]:
    """Return every bound with the place where it touches."""
    inputs, labels = table()
    place = torch.tensor([0.3, 1.1], dtype=torch.float64)
    own, shared = TaylorBound(skewed(), (0.3, 0.2)), TaylorBound(skewed(), (0.3, 0.2), shared=True)
    return [
        ("logistic", LogisticBound.tuned(inputs, labels, STD, place), place),
        ("own M", own, own.mode),
        ("one M", shared, shared.mode),
    ]


def places(likelihood: BoundedLikelihood, count: int = 400) -> Tensor:
    """Return places all over where a bound is claimed to hold, the corners of its region among them."""
    generator = torch.Generator().manual_seed(5)
    if not isinstance(likelihood, TaylorBound):
        return torch.randn(count, 2, generator=generator, dtype=torch.float64) * torch.logspace(-3, 1.5, count)[:, None]
    share = 2 * torch.rand(count, 2, generator=generator, dtype=torch.float64) - 1
    share[:4] = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64) * (1 - 1e-9)
    return likelihood.mode + share * torch.tensor(likelihood.radius, dtype=torch.float64)


@pytest.mark.parametrize(("name", "likelihood", "touching"), bounds())
def test_a_bound_is_below_the_likelihood_and_touches_it(
    name: str, likelihood: BoundedLikelihood, touching: Tensor
) -> None:
    for place in places(likelihood):
        assert likelihood.contains(place)
        level, bound = likelihood.log_likelihood(place), likelihood.log_bound(place)
        assert bool((bound <= level + 1e-12 * (1 + level.abs())).all()), place
    torch.testing.assert_close(likelihood.log_bound(touching), likelihood.log_likelihood(touching), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "likelihood", "touching"), bounds())
def test_the_sum_of_all_bounds_is_the_explicit_one(name: str, likelihood: BoundedLikelihood, touching: Tensor) -> None:
    index = torch.tensor([7, 0, 7])
    for place in places(likelihood, 50):
        explicit = likelihood.log_bound(place)
        torch.testing.assert_close(likelihood.log_bounds_sum(place), explicit.sum())
        torch.testing.assert_close(likelihood.log_bound(place, index), explicit[index])
        torch.testing.assert_close(likelihood.log_likelihood(place, index), likelihood.log_likelihood(place)[index])


def test_the_untuned_logistic_bound_touches_at_its_logit() -> None:
    bound = LogisticBound(torch.eye(2, dtype=torch.float64), torch.tensor([0, 1]), STD)
    for place in ([1.5, 1.5], [-1.5, 1.5]):
        where = torch.tensor(place, dtype=torch.float64)
        torch.testing.assert_close(bound.log_bound(where), bound.log_likelihood(where), rtol=0, atol=1e-12)
    assert bool((bound.log_bound(torch.zeros(2).double()) < math.log(0.5) - 0.01).all())
    flat = LogisticBound(torch.eye(2, dtype=torch.float64), torch.tensor([0, 1]), STD, tuning=0.0)
    torch.testing.assert_close(flat.log_bound(torch.zeros(2).double()), torch.full((2,), math.log(0.5)).double())


def test_the_models_are_what_torch_says() -> None:
    inputs, labels = table()
    place = torch.tensor([-0.4, 0.8], dtype=torch.float64)
    bernoulli = torch.distributions.Bernoulli(logits=inputs @ place).log_prob(labels.double())
    torch.testing.assert_close(LogisticBound(inputs, labels, STD).log_likelihood(place), bernoulli)
    normal = torch.distributions.Normal(place[0], place[1].exp()).log_prob(skewed())
    torch.testing.assert_close(TaylorBound(skewed()).log_likelihood(place), normal)
    prior = torch.distributions.Normal(0.0, STD).log_prob(place).sum()
    zero = torch.distributions.Normal(0.0, STD).log_prob(torch.zeros(2)).sum().double()
    torch.testing.assert_close(LogisticBound(inputs, labels, STD).log_prior(place), prior - zero)


def test_taylor_constants_are_third_derivatives_and_fail_beyond_the_region() -> None:
    likelihood = TaylorBound(skewed(), (0.3, 0.2))
    corner = likelihood.mode - torch.tensor([0.3, 0.2], dtype=torch.float64)
    farthest = int((skewed() - likelihood.mode[0]).abs().argmax())
    index = torch.tensor([farthest])

    def third(place: Tensor) -> Tensor:
        value = likelihood.log_likelihood(place, index).sum()
        (first,) = torch.autograd.grad(value, place, create_graph=True)
        (second,) = torch.autograd.grad(first[1], place, create_graph=True)
        (last,) = torch.autograd.grad(second[1], place)
        return last[1]

    # The farthest datum lies above: its largest third derivative is at the corner of a low mean and a low scale.
    constant = float(likelihood._terms[farthest, 3])
    assert constant == pytest.approx(float(third(corner.requires_grad_()).abs()), rel=1e-9)
    beyond = likelihood.mode - torch.tensor([0.0, 1.5])
    assert not likelihood.contains(beyond)
    assert bool((likelihood.log_bound(beyond) > likelihood.log_likelihood(beyond)).any())


# -- the law ----------------------------------------------------------------------------------------------------------


def moments(place: Tensor) -> Tensor:
    """Return what is compared: means and second moments."""
    a, b = place[..., 0], place[..., 1]
    return torch.stack([a, b, a * a, b * b, a * b], -1)


@functools.cache
def truth(tuned: bool) -> tuple[Tensor, float]:
    """Return the posterior's moments and the mean number of bright data, by quadrature."""
    inputs, labels = table()
    axes = (torch.linspace(-5, 6, 400), torch.linspace(-4, 11, 400))
    grid = torch.cartesian_prod(*axes).double()
    logits = (2 * labels - 1) * (grid @ inputs.T)
    log_density = torch.nn.functional.logsigmoid(logits).sum(1) - grid.square().sum(1) / (2 * STD**2)
    masses = log_density.softmax(0)
    bound = logistic(tuned)
    chosen = masses > 1e-9
    dark = [(bound.log_bound(place) - bound.log_likelihood(place)).exp().sum() for place in grid[chosen]]
    return masses @ moments(grid), float(len(labels) - masses[chosen] @ torch.stack(dark))


def logistic(tuned: bool) -> LogisticBound:
    inputs, labels = table()
    if tuned:
        return LogisticBound.tuned(inputs, labels, STD, torch.tensor([0.5, 2.5]).double())
    return LogisticBound(inputs, labels, STD, LOOSE)


def deviation(draws: Tensor, expected: Tensor) -> Tensor:
    """Return how many Monte-Carlo standard errors the draws' mean lies from what it should be."""
    error = draws.std(0) * (autocorrelation_time(draws) / len(draws)).sqrt()
    return ((draws.mean(0) - expected) / error).abs()


@pytest.mark.parametrize(
    ("tuned", "langevin", "resampled", "step_size", "steps"),
    [
        pytest.param(False, False, 8, 0.6, 10_000, marks=pytest.mark.slow),
        (True, False, 8, 0.8, 6_000),
        pytest.param(False, True, 8, 0.7, 4_000, marks=pytest.mark.slow),
    ],
)
def test_the_law_is_the_exact_posterior(
    tuned: bool, langevin: bool, resampled: int, step_size: float, steps: int
) -> None:
    """Means, second moments and the number of bright data are within 5 of their standard errors (by autocorrelation):
    for normal errors, a false alarm in some 100,000 seeds of these 18 figures; that the errors are estimates makes it
    more, some 10,000."""
    run = firefly(
        logistic(tuned),
        torch.tensor([0.0, 1.0]).double(),
        steps,
        resampled=resampled,
        step_size=step_size,
        langevin=langevin,
        seed=4,
    )
    expected, bright = truth(tuned)
    assert bool((deviation(moments(run.draws), expected) < 5).all()), deviation(moments(run.draws), expected)
    assert float(deviation(run.bright.double(), torch.tensor(bright))) < 5
    assert float(autocorrelation_time(run.draws).max()) < steps / 100


@pytest.mark.slow
def test_langevin_proposals_are_corrected() -> None:
    """A datum that says nothing leaves the prior N(0, I). At s² = 2 proposals hardly depend on θ and have twice its
    variance; taken by p'/p alone they would leave the variance 2/3. Within 5 standard errors, as above."""
    nothing = LogisticBound(torch.zeros(1, 2).double(), torch.tensor([1]), 1.0, tuning=0.0)
    options: dict[str, Any] = {"resampled": 1, "step_size": math.sqrt(2), "langevin": True}
    run = firefly(nothing, torch.zeros(2).double(), 2_000, seed=1, **options)
    expected = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0]).double()
    assert bool((deviation(moments(run.draws), expected) < 5).all()), deviation(moments(run.draws), expected)
    assert int(run.bright.sum()) == 0


@pytest.mark.by_default("True")
@pytest.mark.parametrize("shared", [False, True])
def test_taylor_fireflies_have_the_normal_models_posterior(shared: bool) -> None:
    """With σ² known no more than by S/σ² ~ χ²(N-1), and μ given it N(x̄, σ²/N): within 5 standard errors as above."""
    values = skewed()[:200].log() if shared else skewed()[:200]  # one M for a far datum makes a very slow chain
    count, spread = len(values), float((values - values.mean()).square().sum())
    likelihood = TaylorBound(values, (1.0, 0.4), shared)
    scale = math.sqrt(spread) / count
    run = firefly(likelihood, likelihood.mode, 5_000, resampled=60, step_size=scale, seed=2)
    half = torch.tensor((count - 1) / 2, dtype=torch.float64)
    mean = (math.log(spread / 2) - torch.digamma(half)) / 2
    variance = torch.polygamma(1, half) / 4
    expected = torch.stack([values.mean(), mean, torch.tensor(spread / count / (count - 3)).double(), variance])
    seen = torch.cat([run.draws, (run.draws - torch.stack([values.mean(), mean])).square()], 1)
    assert bool((deviation(seen, expected) < 5).all()), deviation(seen, expected)


def test_the_cost_of_a_step_is_the_resampled_and_the_bright() -> None:
    options: dict[str, Any] = {"resampled": 5, "step_size": 0.3}
    start = torch.tensor([0.0, 1.0]).double()
    plain, langevin = (firefly(logistic(False), start, 50, langevin=way, **options) for way in (False, True))
    assert torch.equal(plain.evaluations, plain.bright + 5)
    assert torch.equal(langevin.evaluations, 2 * langevin.bright + 5)
    assert 0 < float(plain.bright.double().mean()) < 40


def test_a_close_bound_leaves_data_dark() -> None:
    """By quadrature, of 40 data: what the two bounds of the test above ask for."""
    assert truth(True)[1] < 1
    assert 7 < truth(False)[1] < 12


@pytest.mark.slow
def test_the_step_is_learned_in_the_burn_in_alone() -> None:
    def chain(num_steps: int, **options: Any) -> FireflyRun:
        start = torch.tensor([0.0, 1.0]).double()
        return firefly(logistic(False), start, num_steps, resampled=8, step_size=5.0, **options)

    learned = chain(3000, burn_in=1500, target_acceptance=0.4)
    assert learned.acceptance == pytest.approx(0.4, abs=0.1)
    assert learned.step_size < 5
    assert chain(1501, burn_in=1500, target_acceptance=0.4).step_size == learned.step_size
    assert chain(100, burn_in=50).step_size == pytest.approx(5.0)


def test_a_seed_is_a_chain() -> None:
    first, again, other = (
        firefly(logistic(True), torch.zeros(2).double(), 60, resampled=8, step_size=0.5, keep_every=2, seed=seed)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.draws, again.draws)
    assert not torch.equal(first.draws, other.draws)
    assert first.draws.shape == (30, 2)
    assert first.bright.shape == (60,)


def test_no_draw_leaves_the_region() -> None:
    likelihood = TaylorBound(skewed(), (0.05, 0.03))  # of some half standard deviation of the posterior
    run = firefly(likelihood, likelihood.mode, 400, resampled=50, step_size=0.1)
    away = (run.draws - likelihood.mode).abs().max(0).values
    assert bool((away <= torch.tensor(likelihood.radius)).all())
    assert bool((away > 0.8 * torch.tensor(likelihood.radius)).all())


# -- what is refused --------------------------------------------------------------------------------------------------


class TooHigh(LogisticBound):
    """A bound that is none beyond a distance."""

    beyond = 0.0

    def log_bound(self, place: Tensor, index: Tensor | None = None) -> Tensor:
        wrong = 0.3 if float(place.norm()) >= self.beyond else 0.0
        return super().log_bound(place, index) + wrong


def test_a_bound_above_the_likelihood_is_refused() -> None:
    options: dict[str, Any] = {"resampled": 8, "step_size": 0.5}
    inputs, labels = table()
    likelihood = TooHigh(inputs, labels, STD)
    with pytest.raises(ValueError, match=r"not a lower bound: at θ=\[0.0, 0.0\] log B - log L of datum \d+ is 0\.\d"):
        firefly(likelihood, torch.zeros(2).double(), 10, **options)
    likelihood.beyond = 1.0
    with pytest.raises(ValueError, match="not a lower bound"):
        firefly(likelihood, torch.zeros(2).double(), 1000, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"resampled": 0}, "resampled"),
        ({"step_size": 0.0}, "step_size"),
        ({"step_size": math.nan}, "step_size"),
        ({"keep_every": 0}, "keep_every"),
        ({"burn_in": 10}, "no draw after"),
        ({"target_acceptance": 1.0}, "target_acceptance"),
        ({"initial": torch.zeros(3)}, "initial"),
        ({"initial": torch.full((2,), math.inf)}, "initial"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], said: str) -> None:
    given = {"initial": torch.zeros(2).double(), "num_steps": 10, "resampled": 8, "step_size": 0.5} | options
    with pytest.raises(ValueError, match=said):
        firefly(logistic(True), **given)


def test_bad_bounds_are_refused() -> None:
    inputs, labels = table()
    for wrong, said in (
        (lambda: LogisticBound(inputs, labels[:-1], STD), "shape"),
        (lambda: LogisticBound(inputs, 2 * labels - 1, STD), "0 and 1"),
        (lambda: LogisticBound(inputs, labels, 0.0), "prior_std"),
        (lambda: TaylorBound(torch.ones(5)), "differ"),
        (lambda: TaylorBound(skewed(), (0.1, 0.0)), "radius"),
        (lambda: firefly(TaylorBound(skewed()), torch.ones(2).double() * 9, 5, resampled=1, step_size=1.0), "nearer"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()
