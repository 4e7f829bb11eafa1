"""Densities with known moments, as potentials of `sample_density`."""

from collections.abc import Callable

import torch
from torch import Tensor

Potential = Callable[[Tensor], tuple[Tensor, Tensor]]


def gaussian(scales: Tensor, mean: Tensor | float = 0.0) -> Potential:
    """Return U of independent normal coordinates."""

    def potential(x: Tensor) -> tuple[Tensor, Tensor]:
        standard = (x - mean) / scales
        return standard.square().sum(1, dtype=torch.float64) / 2, standard / scales

    return potential


def correlated(mean: Tensor, covariance: Tensor) -> Potential:
    """Return U of a normal law."""
    precision = torch.linalg.inv(covariance)

    def potential(x: Tensor) -> tuple[Tensor, Tensor]:
        slope = (x - mean) @ precision
        return ((x - mean) * slope).sum(1) / 2, slope

    return potential


def banana(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return U of a ~ N(0, 1), b | a ~ N(a² - 1, 0.5²): E[b] = 0, Var[b] = 2 + 0.25, E[a²·b] = 2."""
    a, b = x.unbind(1)
    rest = (b - a.square() + 1) / 0.25
    energy = a.square() / 2 + rest.square() * 0.125
    return energy, torch.stack([a - 2 * a * rest, rest], 1)


def funnel(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return U of v ~ N(0, 3²), and nine coordinates of N(0, e^v) each (Neal 2003)."""
    v, rest = x[:, :1], x[:, 1:]
    squares = rest.square() * (-v).exp()
    energy = (v.square() / 18).sum(1) + squares.sum(1) / 2 + v[:, 0] * rest.shape[1] / 2
    slope = v / 9 - squares.sum(1, keepdim=True) / 2 + rest.shape[1] / 2
    return energy, torch.cat([slope, rest * (-v).exp()], 1)
