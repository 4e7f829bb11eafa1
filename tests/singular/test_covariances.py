"""Susceptibilities and influences against closed forms of Gaussian posteriors, and losses of samples against theirs."""

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc import Gaussian, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.singular import influence, localized, sample_losses, susceptibility
from lightning_sgmcmc.singular.estimate import chain_mean, covariance, disagreement, drift, epoch_means, spikes
from tests.support.trainers import quiet_trainer

N, D, NBETA, GAMMA, STD = 12, 3, 60.0, 5.0, 0.5


class Regression:
    """Linear regression whose localised law exp(-n·β·L - γ/2·‖w - w*‖²) is a Gaussian N(w*, C)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(N, D, generator=generator, dtype=torch.float64)
        self.y = self.x.sum(1) + STD * torch.randn(N, generator=generator, dtype=torch.float64)
        self.center = torch.linalg.lstsq(self.x, self.y[:, None]).solution[:, 0]
        self.hessians = self.x[:, :, None] * self.x[:, None] / STD**2  # of each datum's loss
        self.gradients = self.x * ((self.x @ self.center - self.y) / STD**2)[:, None]  # at w*
        precision = NBETA * self.hessians.mean(0) + GAMMA * torch.eye(D)
        self.covariance = torch.linalg.inv(precision)

    def draws(self, chains: int, draws: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        normal = torch.randn(chains, draws, D, generator=generator, dtype=torch.float64)
        return self.center + normal @ torch.linalg.cholesky(self.covariance).T

    def losses(self, w: Tensor) -> Tensor:
        """Return ½(y - x·w)²/std², shape (chain, draw, N)."""
        return (w @ self.x.T - self.y).square() / (2 * STD**2)

    def exact(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
        """Return Cov of quadratics g·z + ½·z·A·z, z ~ N(0, C): g₁·C·g₂ + ½·tr(A₁·C·A₂·C)."""
        (g1, a1), (g2, a2) = first, second
        linear = g1 @ self.covariance @ g2.T
        return linear + torch.einsum("kij,pji->kp", a1 @ self.covariance, a2 @ self.covariance) / 2


PROBLEM = Regression()


def within(found: tuple[Tensor, Tensor], exact: Tensor, errors: float) -> None:
    value, error = found
    assert value.shape == error.shape == exact.shape
    assert bool(((value - exact).abs() < errors * error).all())
    assert bool((error < 0.2 * exact.abs().max()).all())  # else the test could not fail


def test_influences_of_linear_regression() -> None:
    """144 pairs within 4.5 standard errors: 1 in 1,000."""
    losses = PROBLEM.losses(PROBLEM.draws(4, 5000))
    each = PROBLEM.gradients, PROBLEM.hessians
    within(influence(losses, losses, NBETA / N), -NBETA / N * PROBLEM.exact(each, each), 4.5)


def test_susceptibilities_of_linear_regression() -> None:
    """One weight's component, and a shift of the data's law to three data, within 4 errors: 1 in 16,000."""
    w = PROBLEM.draws(4, 20000)
    restricted = PROBLEM.center.expand_as(w).clone()
    restricted[..., 0] = w[..., 0]
    component = PROBLEM.losses(restricted).mean(-1)
    losses = PROBLEM.losses(w)
    shift = losses[..., :3].mean(-1) - losses.mean(-1)
    only = torch.zeros(D, D, dtype=torch.float64)
    only[0, 0] = 1
    gradient, hessian = PROBLEM.gradients, PROBLEM.hessians
    observable = (gradient.mean(0) @ only)[None], (only @ hessian.mean(0) @ only)[None]
    moved = (gradient[:3].mean(0) - gradient.mean(0))[None], (hessian[:3].mean(0) - hessian.mean(0))[None]
    within(susceptibility(component, shift, NBETA), -NBETA * PROBLEM.exact(observable, moved), 4)


def test_a_susceptibility_is_the_derivative_of_a_mean() -> None:
    """Against E_h[φ] at ±h in closed form, which needs no covariance of quadratics."""
    gradient, hessian, step = PROBLEM.gradients, PROBLEM.hessians, 1e-4

    def mean(h: float) -> Tensor:
        weights = torch.ones(N, dtype=torch.float64)
        weights[: N // 2] += h  # L_h = L + h·ΔL with ΔL = ½·(mean loss of the first half)
        precision = NBETA / N * torch.einsum("n,nij->ij", weights, hessian) + GAMMA * torch.eye(D)
        shift = -torch.linalg.solve(precision, NBETA / N * (weights @ gradient))
        quadratic = shift @ hessian.mean(0) @ shift + (hessian.mean(0) * torch.linalg.inv(precision)).sum()
        return gradient.mean(0) @ shift + quadratic / 2

    slope = (mean(step) - mean(-step)) / (2 * step)
    all_data = gradient.mean(0)[None], hessian.mean(0)[None]
    half = gradient[: N // 2].sum(0)[None] / N, hessian[: N // 2].sum(0)[None] / N
    assert float(-NBETA * PROBLEM.exact(all_data, half)) == pytest.approx(float(slope), rel=1e-5)


def test_errors_of_correlated_draws() -> None:
    """AR(1) draws of 0.9: the errors are those of many repeats within 30 % (4 chains of 4,000, 200 pairs at once)."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4000, 4, 201, generator=generator, dtype=torch.float64)
    states = [noise[0]]
    for step in noise[1:]:
        states.append(0.9 * states[-1] + (1 - 0.81) ** 0.5 * step)
    draws = torch.stack(states, 1)
    found = covariance(draws[..., :1], draws[..., 1:])
    assert float(found.value.std()) == pytest.approx(float(found.error.mean()), rel=0.3)


def fitted() -> tuple[BayesianModule, Posterior]:
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Tanh(), nn.Linear(3, 1))
    module = BayesianModule(net, Gaussian(0.5), **localized(10, gamma=1.0), lr=0.1, num_chains=2, seed=0)
    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
    collector = SampleCollector(in_memory=True)
    trainer = quiet_trainer(max_steps=6, callbacks=[SamplingSchedule(every_n_steps=2), collector])
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), 5))
    assert collector.posterior is not None
    return module, collector.posterior


def test_losses_of_samples() -> None:
    """By chain and draw, in the order of the data; those of a component have the centre's other weights."""
    _, posterior = fitted()
    x = torch.randn(7, 2)
    batches = [(x[:4], x[:4, :1]), (x[4:], x[4:, :1])]
    found = sample_losses(posterior, batches)
    assert found.shape == (2, 3, 7)
    assert found.dtype == torch.float64
    networks = dict(zip([(s.chain, s.step) for s in posterior], posterior.networks(), strict=True))
    with torch.no_grad():
        output = networks[1, 4](x)
    expected = -torch.distributions.Normal(output, 0.5).log_prob(x[:, :1])[:, 0]
    torch.testing.assert_close(found[1, 1].float(), expected)
    center = {name: torch.zeros_like(p) for name, p in networks[1, 4].named_parameters()}
    part = sample_losses(posterior, batches, center, ["net.2.bias"])
    bias = dict(networks[1, 4].named_parameters())["2.bias"].detach()
    expected = -torch.distributions.Normal(bias.expand(7, 1), 0.5).log_prob(x[:, :1])[:, 0]
    torch.testing.assert_close(part[1, 1].float(), expected)


def test_refusals() -> None:
    _, posterior = fitted()
    batch = [(torch.zeros(1, 2), torch.zeros(1, 1))]
    with pytest.raises(ValueError, match=r"part has 'fc\.\*', which matches none of net"):
        sample_losses(posterior, batch, {}, ["fc.*"])
    with pytest.raises(ValueError, match=r"needs the values of the other weights: pass center"):
        sample_losses(posterior, batch, part=["net.0.*"])
    with pytest.raises(ValueError, match=r"center has no tensor of shape \(1, 3\) for 'net.2.weight'"):
        sample_losses(posterior, batch, {}, ["net.0.*"])
    with pytest.raises(ValueError, match="batches is empty"):
        sample_losses(posterior, [])
    with pytest.raises(ValueError, match=r"the same draws, got \(2, 3\) and \(2, 4\)"):
        susceptibility(torch.zeros(2, 3), torch.zeros(2, 4), 1.0)
    with pytest.raises(ValueError, match="at least 2 draws, got 1"):
        influence(torch.zeros(1, 1), torch.zeros(1, 1), 1.0)
    with pytest.raises(ValueError, match="beta must be positive"):
        influence(torch.zeros(2, 3), torch.zeros(2, 3), 0.0)


# -- means along chains -----------------------------------------------------------------------------------------------


def test_means_over_epochs_cancel_the_noise_of_batches() -> None:
    """Every datum's own constant is in each epoch once, so only whole epochs have the exact mean."""
    constants = torch.randn(25, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps, epochs, sizes = [], [], []
    for epoch in range(10):
        order = torch.randperm(25, generator=torch.Generator().manual_seed(epoch)).split(10)  # sizes 10, 10, 5
        steps += [constants[batch].mean() for batch in order]
        epochs += [epoch] * 3
        sizes += [len(batch) for batch in order]
    trace, places, counts = torch.stack(steps)[None], torch.tensor(epochs), torch.tensor(sizes)
    means = epoch_means(trace[:, 1:-2], places[1:-2], counts[1:-2])  # the first and last epochs are not whole
    assert means.shape == (1, 8)
    torch.testing.assert_close(means, constants.mean().expand(1, 8))
    assert epoch_means(trace[:, :20], places[:20], counts[:20]).shape == (1, 20)  # too few epochs


@pytest.mark.parametrize("shape", [0.5, 2.5, 10.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 20.0], ids=["exact", "noisy"])
def test_one_draw_far_above_the_others_is_found(shape: float, noise: float) -> None:
    """The law at large n·β is Gamma(λ), here with noise of batches; 50 nats above its median have about e⁻⁴⁰."""
    torch.manual_seed(0)
    values = torch.distributions.Gamma(shape, 1.0).sample((8, 2000)) + noise * torch.randn(8, 2000)
    assert spikes(values) is None
    values[3, 700] = shape + 60 + 20 * (noise + shape**0.5)
    found = spikes(values)
    assert found is not None
    assert "smaller lr" in found.remedy


def test_findings_on_chains() -> None:
    """Chains apart and a drift are found; of 20 sets of good chains at most 2 have a finding (1 in 140 at 2 %)."""
    generator = torch.Generator().manual_seed(0)
    good = torch.randn(20, 4, 100, generator=generator)
    apart = good[0] + torch.arange(4)[:, None]
    rising = good[0] + torch.linspace(0, 2, 100)
    assert disagreement(chain_mean(apart), apart) is not None
    assert drift(rising) is not None
    alarms = [values for values in good if drift(values) or disagreement(chain_mean(values), values)]
    assert len(alarms) <= 2
