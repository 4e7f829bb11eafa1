"""Posteriors with known moments: densities with noisy gradients, and regressions with mini-batches."""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from lightning_sgmcmc.recipes.shared.logistic import LogisticPosterior, importance_draws
from lightning_sgmcmc.seeding import derive_seed


class Problem(ABC):
    """A posterior with a gradient that is noisy, and the moments of functions of its points.

    Attributes:
        dimension: d.
        num_data: N, 1 for a density.
        stiffness: largest curvature of U where most of the mass is.
        full_cost: gradients of a step that take as much data as U or its gradient of all data.
        mean, std: exact mean and standard deviation of each of the functions that `observe` returns, shape (F,).
    """

    dimension: int
    num_data: int = 1
    stiffness: float
    full_cost: float = 1.0
    mean: Tensor
    std: Tensor

    @abstractmethod
    def energy(self, x: Tensor) -> Tensor:
        """Return U of points (C, d) with all data, up to a constant, shape (C,), in nats."""

    @abstractmethod
    def exact_gradient(self, x: Tensor) -> Tensor:
        """Return ∇U of points (C, d) with all data, shape (C, d)."""

    @abstractmethod
    def gradient(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Return the noisy gradient of the mean potential U/N of points (C, d), shape (C, d)."""

    def start(self, chains: int, generator: torch.Generator) -> Tensor:
        """Return the first points, shape (C, d), around the middle, where all gradients may be zero."""
        return 0.1 * torch.randn(chains, self.dimension, generator=generator)

    def observe(self, x: Tensor) -> Tensor:
        """Return x and x² of points (…, d), shape (…, 2d)."""
        return torch.cat([x, x.square()], -1)


class Density(Problem):
    """A density of closed form with a noise of one kind.

    Args:
        noise: "isotropic", "anisotropic", "correlated" or "spatially varying"; all have the same mean square.
        level: root mean square of the noise in a coordinate, over that of the gradient.
    """

    def __init__(self, noise: str, level: float) -> None:
        self.noise, self.level = noise, level
        self._scale = level * self._mean_square() ** 0.5

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return independent draws, shape (count, d)."""

    def gradient(self, x: Tensor, generator: torch.Generator) -> Tensor:
        z = torch.randn(x.shape, generator=generator)
        if self.noise == "anisotropic":
            z = z * self._shape
        elif self.noise == "correlated":  # of correlation 0.9
            z = math.sqrt(0.1) * z + math.sqrt(0.9) * torch.randn(len(x), 1, generator=generator)
        elif self.noise == "spatially varying":
            z = z * self._distance(x)
        return self.exact_gradient(x) + self._scale * z

    @functools.cached_property
    def _shape(self) -> Tensor:
        """Standard deviations from 0.1 to 1 of equal ratios, scaled to a mean square of 1."""
        shape = torch.logspace(-1, 0, self.dimension).flip(0)
        return shape / shape.square().mean().sqrt()

    def _distance(self, x: Tensor) -> Tensor:
        """Return each point's distance to the mean in standard deviations, over its root mean square."""
        d = self.dimension
        place = (self.observe(x)[..., :d] - self.mean[:d]) / self.std[:d]
        return place.square().mean(-1, keepdim=True).sqrt().clamp(max=3.0)

    def _mean_square(self) -> float:
        draws = self.draw(20_000, torch.Generator().manual_seed(0))
        return float(self.exact_gradient(draws).square().mean())


class Gaussian(Density):
    """Twenty coordinates of variances from 1/1000 to 1, along the axes or turned by a random rotation."""

    dimension, stiffness = 20, 1000.0

    def __init__(self, noise: str, level: float, turned: bool = False) -> None:
        self.variances = torch.logspace(-3, 0, self.dimension)
        generator = torch.Generator().manual_seed(7)
        axes = torch.linalg.qr(torch.randn(self.dimension, self.dimension, generator=generator)).Q
        self.axes = axes if turned else torch.eye(self.dimension)
        self.precision = (self.axes / self.variances) @ self.axes.T
        self.mean, self.std = _centred_moments(self.variances)
        super().__init__(noise, level)

    def energy(self, x: Tensor) -> Tensor:
        return (x * (x @ self.precision)).sum(-1) / 2

    def exact_gradient(self, x: Tensor) -> Tensor:
        return x @ self.precision

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        z = torch.randn(count, self.dimension, generator=generator)
        return (z * self.variances.sqrt()) @ self.axes.T

    def observe(self, x: Tensor) -> Tensor:
        return super().observe(x @ self.axes)


class Banana(Density):
    """x₁ ~ N(0, 1), x₂ = x₁² - 1 + z/4 with z ~ N(0, 1)."""

    dimension, stiffness, WIDTH = 2, 80.0, 0.25

    def __init__(self, noise: str, level: float) -> None:
        square = 2 + self.WIDTH**2
        fourth = 60 + 12 * self.WIDTH**2 + 3 * self.WIDTH**4
        self.mean = torch.tensor([0.0, 0.0, 1.0, square])
        self.std = torch.tensor([1.0, square**0.5, 2**0.5, (fourth - square**2) ** 0.5])
        super().__init__(noise, level)

    def energy(self, x: Tensor) -> Tensor:
        first, second = x.unbind(-1)
        return (first.square() + ((second - first.square() + 1) / self.WIDTH).square()) / 2

    def exact_gradient(self, x: Tensor) -> Tensor:
        first, second = x.unbind(-1)
        rest = (second - first.square() + 1) / self.WIDTH**2
        return torch.stack([first - 2 * first * rest, rest], -1)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        first, z = torch.randn(2, count, generator=generator)
        return torch.stack([first, first.square() - 1 + self.WIDTH * z], -1)


class Funnel(Density):
    """v ~ N(0, 1) and, given v, nine coordinates of N(0, exp(v)): Neal's funnel with a neck that is not too narrow."""

    dimension, stiffness = 10, 8.0

    def __init__(self, noise: str, level: float) -> None:
        others = self.dimension - 1
        square, fourth = math.exp(0.5), 3 * math.exp(2.0)
        self.mean = torch.tensor([0.0] * self.dimension + [1.0] + [square] * others)
        self.std = torch.tensor([1.0] + [square**0.5] * others + [2**0.5] + [(fourth - square**2) ** 0.5] * others)
        super().__init__(noise, level)

    def energy(self, x: Tensor) -> Tensor:
        v, others = x[..., 0], x[..., 1:]
        return (v.square() + (self.dimension - 1) * v + others.square().sum(-1) * (-v).exp()) / 2

    def exact_gradient(self, x: Tensor) -> Tensor:
        v, others = x[..., :1], x[..., 1:]
        precision = (-v).exp()
        at_v = v + (self.dimension - 1) / 2 - others.square().sum(-1, keepdim=True) * precision / 2
        return torch.cat([at_v, others * precision], -1)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        z = torch.randn(count, self.dimension, generator=generator)
        return torch.cat([z[:, :1], z[:, 1:] * (z[:, :1] / 2).exp()], -1)


@dataclass
class Data:
    """Inputs (N, d) and targets (N,), both of float32."""

    x: Tensor
    y: Tensor

    def batch(self, chains: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return independent batches, drawn with replacement, of all chains: (C, n, d) and (C, n)."""
        places = torch.randint(len(self.x), (chains, size), generator=generator)
        return self.x[places], self.y[places]


class Regression(Problem):
    """A generalised linear model with a Gaussian prior and mini-batches.

    Attributes:
        data: all of it.
        size: data in a batch.
        center: the mode, from around which chains start and which is subtracted from what is observed, shape (d,).
        prior_variance: of each weight.
    """

    data: Data
    size: int
    center: Tensor
    prior_variance: float

    @abstractmethod
    def predict(self, linear: Tensor) -> Tensor:
        """Return the mean of the targets for xᵀθ."""

    @abstractmethod
    def integral(self, linear: Tensor) -> Tensor:
        """Return the integral of `predict`: -log p(y|xᵀθ) is that less y·xᵀθ."""

    def start(self, chains: int, generator: torch.Generator) -> Tensor:
        return self.center + super().start(chains, generator)

    def observe(self, x: Tensor) -> Tensor:
        return super().observe(x - self.center)

    def energy(self, x: Tensor) -> Tensor:
        linear = x @ self.data.x.T
        fit = (self.integral(linear) - linear * self.data.y).double().sum(1)
        return fit + x.double().square().sum(1) / (2 * self.prior_variance)

    def exact_gradient(self, x: Tensor) -> Tensor:
        return (self.predict(x @ self.data.x.T) - self.data.y) @ self.data.x + x / self.prior_variance

    def gradient(self, x: Tensor, generator: torch.Generator) -> Tensor:
        inputs, targets = self.data.batch(len(x), self.size, generator)
        residuals = self.predict(torch.einsum("cnd,cd->cn", inputs, x)) - targets
        return torch.einsum("cnd,cn->cd", inputs, residuals) / self.size + x / (self.prior_variance * self.num_data)


class LinearRegression(Regression):
    """Conjugate regression of 10 weights on 500 data, with correlated inputs of scales from 0.3 to 1."""

    dimension, num_data, prior_variance = 10, 500, 1.0

    def __init__(self, batch: int) -> None:
        rng = np.random.default_rng(0)
        mixing = rng.normal(size=(self.dimension, self.dimension)) / 5 + np.eye(self.dimension)
        x = rng.normal(size=(self.num_data, self.dimension)) @ mixing * np.linspace(0.3, 1, self.dimension)
        y = x @ rng.normal(size=self.dimension) + rng.normal(size=self.num_data)
        precision = x.T @ x + np.eye(self.dimension)
        covariance = np.linalg.inv(precision)
        center, variance = covariance @ x.T @ y, np.diag(covariance)
        self.size, self.full_cost = batch, self.num_data / batch
        self.stiffness = float(np.linalg.eigvalsh(precision).max())
        self.data = Data(*(torch.tensor(part, dtype=torch.float32) for part in (x, y)))
        self.center = torch.tensor(center, dtype=torch.float32)
        self.mean, self.std = _centred_moments(torch.tensor(variance))

    def predict(self, linear: Tensor) -> Tensor:
        return linear

    def integral(self, linear: Tensor) -> Tensor:
        return linear.square() / 2


class LogisticRegression(Regression):
    """Logistic regression of 8 weights and a constant on 400 synthetic data; its moments by importance sampling."""

    dimension, num_data, prior_variance, PROPOSALS = 9, 400, 9.0, 60_000

    def __init__(self, batch: int) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(self.num_data, self.dimension, generator=generator, dtype=torch.float64)
        x[:, :4] += x[:, 4:8]  # correlated weights
        x[:, -1] = 1
        weights = torch.randn(self.dimension, generator=generator, dtype=torch.float64)
        y = (torch.rand(self.num_data, generator=generator, dtype=torch.float64) < (x @ weights).sigmoid()).double()
        self.posterior = LogisticPosterior(x, y, math.sqrt(self.prior_variance))
        mode, factor = self.posterior.laplace
        self.center, self.size, self.full_cost = mode.float(), batch, self.num_data / batch
        self.stiffness = float(1 / torch.linalg.eigvalsh(factor @ factor.T).min())
        self.data = Data(x.float(), y.float())
        points, log_weights = importance_draws(self.posterior, self.PROPOSALS, seed=3)
        values, weights = self.observe(points), log_weights.softmax(0)
        self.mean = weights @ values
        self.std = (weights @ (values - self.mean).square()).sqrt()

    def predict(self, linear: Tensor) -> Tensor:
        return linear.sigmoid()

    def integral(self, linear: Tensor) -> Tensor:
        return softplus(linear)


def _centred_moments(variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of x and x² for a centred Gaussian."""
    mean = torch.cat([torch.zeros_like(variance), variance])
    std = torch.cat([variance.sqrt(), math.sqrt(2) * variance])
    return mean.float(), std.float()


DENSITIES: dict[str, Callable[[str, float], Density]] = {
    "Gaussian": Gaussian,
    "turned Gaussian": functools.partial(Gaussian, turned=True),
    "banana": Banana,
    "funnel": Funnel,
}
REGRESSIONS: dict[str, Callable[[int], Problem]] = {
    "linear regression": LinearRegression,
    "logistic regression": LogisticRegression,
}


def problem_of(name: str, noise: str, level: float, batch: int) -> Problem:
    """Return a problem: a density with a kind of noise and its level, or a regression with batches of a size."""
    return REGRESSIONS[name](batch) if name in REGRESSIONS else DENSITIES[name](noise, level)


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the generator of the gradients' noise of a run."""
    return torch.Generator().manual_seed(derive_seed(seed, f"samplers_bench {name}"))
