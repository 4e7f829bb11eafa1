"""Small tanh networks whose posteriors a reference can sample: their data, and where functions are compared."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, GaussianPrior

Array = np.ndarray[Any, np.dtype[np.float64]]
CENTERS = 1.2 * np.array([[0.0, 1.0], [-0.9, -0.5], [0.9, -0.5]])


@dataclass(frozen=True)
class SmallNetwork:
    """A network with its data; the prior of all weights and biases is N(0, 1).

    Attributes:
        sizes: widths of the layers, inputs and outputs included.
        x: inputs, shape (N, sizes[0]).
        y: targets, shape (N, sizes[-1]), or labels, shape (N,).
        grid: inputs at which functions are compared.
        noise_std: of the Gaussian likelihood; None for classes.
    """

    sizes: tuple[int, ...]
    x: Array
    y: Any
    grid: Array
    noise_std: float | None = None

    def module(self, **options: Any) -> BayesianModule:
        """Return the library's module of this posterior."""
        from torch import nn

        layers: list[nn.Module] = []
        for inputs, outputs in zip(self.sizes[:-1], self.sizes[1:], strict=True):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        return BayesianModule(
            net=nn.Sequential(*layers[:-1]),
            likelihood=Categorical() if self.noise_std is None else Gaussian(self.noise_std),
            prior=GaussianPrior(1.0),
            num_data=len(self.x),
            **options,
        )


def curve(count: int, noise_std: float, seed: int = 1) -> tuple[Array, Array]:
    """Return noisy data of a smooth function on two intervals with a gap between them, each of shape (count, 1)."""
    generator = np.random.default_rng(seed)
    left, right = generator.uniform(-2, -0.5, count // 2), generator.uniform(0.5, 2, count - count // 2)
    x = np.concatenate([left, right])[:, None]
    return x, np.sin(2 * x) + 0.3 * x + noise_std * generator.normal(size=x.shape)


def three_classes(count: int, seed: int = 2) -> tuple[Array, Any]:
    """Return three classes around the origin of a plane: inputs (count, 2) and labels (count,)."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 3, count)
    return CENTERS[y] + 0.7 * generator.normal(size=(count, 2)), y


def _regression(sizes: tuple[int, ...], count: int, noise_std: float) -> SmallNetwork:
    return SmallNetwork(sizes, *curve(count, noise_std), np.linspace(-2.5, 2.5, 41)[:, None], noise_std)


def _classification() -> SmallNetwork:
    side = np.linspace(-2.5, 2.5, 6)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    return SmallNetwork((2, 10, 3), *three_classes(150), grid)


NETWORKS = {
    "smallest": _regression((1, 4, 1), 40, 0.3),
    "classification": _classification(),
    "regression": _regression((1, 12, 12, 1), 200, 0.1),
}
