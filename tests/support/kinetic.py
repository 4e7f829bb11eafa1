"""Exact moments of kinetic Langevin dynamics: an update as an affine map, and closed forms on a Gaussian."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support.problems import Array


def ubu_variance(angle: float, half: float) -> float:
    """Return Var θ·ω²/τ in the middle of UBU's step on a harmonic oscillator, at h·ω and y = γ·h/2."""
    t, b = math.tanh(half) / half, angle**2
    return t + (1 - t) * (4 + 2 * b / (half * math.sinh(2 * half))) / (4 - b * t)


@dataclass(frozen=True)
class Affine:
    """z ← A·z + b + noise of covariance Q, with z = (θ, r)."""

    matrix: Array
    shift: Array
    noise: Array

    def then(self, after: "Affine") -> "Affine":
        """Return the map of this one and another after it."""
        turned = after.matrix @ self.noise @ after.matrix.T
        return Affine(after.matrix @ self.matrix, after.matrix @ self.shift + after.shift, turned + after.noise)

    def moments(self, mean: Array, second: Array) -> tuple[Array, Array]:
        """Return E[z] and E[zzᵀ] after the map, from those before it."""
        moved = self.matrix @ mean
        cross = np.outer(moved, self.shift)
        grown = self.matrix @ second @ self.matrix.T + cross + cross.T + np.outer(self.shift, self.shift)
        return moved + self.shift, grown + self.noise

    def stationary(self) -> tuple[Array, Array]:
        """Return the mean and the covariance that the map keeps, from the discrete Lyapunov equation."""
        size = len(self.shift)
        mean = np.linalg.solve(np.eye(size) - self.matrix, self.shift)
        equations = np.eye(size**2) - np.kron(self.matrix, self.matrix)
        return mean, np.linalg.solve(equations, self.noise.reshape(-1)).reshape(size, size)


def in_order(maps: Sequence[Affine]) -> Affine:
    """Return the map of several, one after the other."""
    whole = maps[0]
    for one in maps[1:]:
        whole = whole.then(one)
    return whole


def step_of(sampler: Any, curvature: Array, force: Array, num_data: int = 1, **options: Any) -> Affine:
    """Return a sampler's own step on ∇U = H·θ - f, found by unit vectors of θ, r and the noise.

    Args:
        sampler: factory of a sampler.
        curvature: H, shape (d, d).
        force: f, shape (d,).
        num_data: N.
        options: of the factory.
    """
    dimension = len(force)
    probe = sampler([torch.nn.Parameter(torch.zeros(1))], num_data=num_data, **options)
    inputs = dimension * ((1 if probe.momentum_buffer is None else 2) + probe.draws)
    parts = torch.cat([torch.eye(inputs), torch.zeros(1, inputs)]).double().split(dimension, 1)
    theta, momenta, noise = parts[0], parts[1 : -probe.draws], parts[-probe.draws :]
    place = torch.nn.Parameter(theta.clone())
    rule = sampler([place], num_data=num_data, **options)
    group = rule.param_groups[0]
    for held, start in zip(rule.momenta(group) or [], momenta, strict=True):
        held.copy_(start)
    gradient = (theta @ torch.tensor(curvature) - torch.tensor(force)) / num_data
    with torch.no_grad():
        rule.update(group, [place], [gradient], [part.clone() for part in noise])
    ends = torch.cat([place.detach(), *(rule.momenta(group) or [])], 1).numpy()
    columns = (ends[:-1] - ends[-1]).T
    push = columns[:, -dimension * probe.draws :]
    return Affine(columns[:, : -dimension * probe.draws], ends[-1], push @ push.T)


def random_sweeps(sweeps: Sequence[Sequence[Affine]], dimension: int) -> tuple[Array, Array]:
    """Return the mean and the covariance of θ over all steps of a stationary run of sweeps that are drawn at random.

    Each sweep is one of the given ones with equal chance, independently of those before it. Of a single one the run is
    periodic.

    Args:
        sweeps: the steps of each.
        dimension: d of θ, the state's first entries.
    """
    wholes = [in_order(sweep) for sweep in sweeps]
    matrices, shifts, noises = (np.array([getattr(w, name) for w in wholes]) for name in ("matrix", "shift", "noise"))
    size = shifts.shape[1]
    mean = np.linalg.solve(np.eye(size) - matrices.mean(0), shifts.mean(0))
    cross = np.einsum("ki,kj->kij", matrices @ mean, shifts)
    inflow = cross + cross.transpose(0, 2, 1) + np.einsum("ki,kj->kij", shifts, shifts) + noises
    squares = np.mean([np.kron(matrix, matrix) for matrix in matrices], 0)
    second = np.linalg.solve(np.eye(size**2) - squares, inflow.mean(0).reshape(-1)).reshape(size, size)
    total, total_second, count = np.zeros(size), np.zeros((size, size)), 0
    for sweep in sweeps:
        now, now_second = mean, second
        for step in sweep:
            now, now_second = step.moments(now, now_second)
            total, total_second, count = total + now, total_second + now_second, count + 1
    average = total / count
    covariance = total_second / count - np.outer(average, average)
    return average[:dimension], covariance[:dimension, :dimension]
