"""A reference that shares no code with the library: Hamiltonian Monte Carlo with the full gradient, in NumPy.

Double precision, several chains at once, gradients by hand, a Metropolis test after each trajectory.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Target:
    """The posterior of a tanh network `Sequential(Linear, Tanh, …, Linear)`.

    A state is a row of all parameters in torch's order, followed by the log-variance factors of the layers if the
    prior is hierarchical.

    Attributes:
        sizes: widths of the layers, inputs and outputs included.
        likelihood: "gaussian" or "categorical".
        x: inputs, shape (N, sizes[0]).
        y: targets, shape (N, sizes[-1]), or labels, shape (N,).
        prior_std: scale of all weights and biases.
        noise_std: of the Gaussian likelihood.
        nu: weight of the hyperprior of each layer's scale, see `HierarchicalPrior`; None for a fixed scale.
    """

    sizes: tuple[int, ...]
    likelihood: Literal["gaussian", "categorical"]
    x: Array
    y: Any
    prior_std: float = 1.0
    noise_std: float = 1.0
    nu: float | None = None

    @property
    def layers(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.sizes))

    @property
    def dimension(self) -> int:
        """Length of a state."""
        return sum((i + 1) * o for i, o in self.layers) + (0 if self.nu is None else len(self.layers))

    def split(self, states: Array) -> list[tuple[Array, Array]]:
        """Return weights (C, out, in) and biases (C, 1, out) of each layer, views of states (C, dimension)."""
        found, place = [], 0
        for inputs, outputs in self.layers:
            weight = states[:, place : place + inputs * outputs].reshape(-1, outputs, inputs)
            place += inputs * outputs
            found.append((weight, states[:, None, place : place + outputs]))
            place += outputs
        return found

    def outputs(self, states: Array, x: Array) -> Array:
        """Return the network's outputs, shape (C, n, K)."""
        return self._forward(self.split(states), x)[-1]

    def _forward(self, parameters: list[tuple[Array, Array]], x: Array) -> list[Array]:
        values: list[Array] = [x]
        for layer, (weight, bias) in enumerate(parameters):
            values.append(values[-1] @ weight.transpose(0, 2, 1) + bias)
            if layer < len(parameters) - 1:
                np.tanh(values[-1], out=values[-1])
        return values

    def potential(self, states: Array) -> tuple[Array, Array]:
        """Return U up to a constant, shape (C,), and its gradient, shape (C, dimension)."""
        parameters = self.split(states)
        values = self._forward(parameters, self.x)
        out = values[-1]
        if self.likelihood == "gaussian":
            slope = (out - self.y) / self.noise_std**2
            energy = ((out - self.y) * slope).sum((1, 2)) / 2
        else:
            out = out - out.max(-1, keepdims=True)
            rows, total = np.arange(len(self.y)), np.exp(out).sum(-1)
            energy = (np.log(total) - out[:, rows, self.y]).sum(1)
            slope = np.exp(out) / total[..., None]
            slope[:, rows, self.y] -= 1
        gradient = np.empty_like(states)
        for layer, (weight, bias) in reversed(list(enumerate(self.split(gradient)))):
            bias[:] = slope.sum(1, keepdims=True)
            weight[:] = slope.transpose(0, 2, 1) @ values[layer]
            if layer:
                slope = (slope @ parameters[layer][0]) * (1 - values[layer] ** 2)
        return energy + self._prior(states, gradient), gradient

    def _prior(self, states: Array, gradient: Array) -> Array:
        """Return -log p(θ, log v), and add its gradient."""
        energy, place = np.zeros(len(states)), 0
        for layer, (inputs, outputs) in enumerate(self.layers):
            own = slice(place, place := place + (inputs + 1) * outputs)
            count, squares = (inputs + 1) * outputs, (states[:, own] ** 2).sum(1) / self.prior_std**2
            precision = np.ones(len(states))
            if self.nu is None:
                energy += squares / 2
            else:
                at = layer - len(self.layers)
                precision = np.exp(-states[:, at])
                half = (self.nu * count + squares) / 2 * precision
                energy += (self.nu + 1) * count / 2 * states[:, at] + half
                gradient[:, at] = (self.nu + 1) * count / 2 - half
            gradient[:, own] += states[:, own] * precision[:, None] / self.prior_std**2
        return energy


def hmc(target: Target, chains: int, warm_up: int, draws: int, time: float = 1.6, seed: int = 0) -> tuple[Array, float]:
    """Return draws, shape (chains, draws, dimension), and the mean acceptance rate.

    Args:
        target: the posterior.
        chains: chains, from starts drawn at half the prior's scale.
        warm_up: trajectories that adapt the step size to an acceptance of 0.8.
        draws: draws of each chain.
        time: mean length of a trajectory; the length is uniform between 0.2 and 1.8 times that.
        seed: of starts and draws.
    """
    generator = np.random.default_rng(seed)
    states = generator.normal(size=(chains, target.dimension)) * target.prior_std / 2
    energy, gradient = target.potential(states)
    log_step, accepted, kept = np.log(1e-3), [], []
    for number in range(warm_up + draws):
        step = np.exp(log_step)
        length = time * generator.uniform(0.2, 1.8) * min(1.0, (number + 1) / max(1, warm_up // 2))
        momenta = generator.normal(size=states.shape)
        at, slope, new = states.copy(), gradient, energy
        before = energy + (momenta**2).sum(1) / 2
        momenta -= step / 2 * slope
        for _ in range(max(1, round(length / step))):
            at += step * momenta
            new, slope = target.potential(at)
            momenta -= step * slope
        momenta += step / 2 * slope
        with np.errstate(over="ignore", invalid="ignore"):
            change = np.nan_to_num(before - new - (momenta**2).sum(1) / 2, nan=-np.inf)
        rate = np.exp(np.minimum(0, change))
        take = generator.uniform(size=chains) < rate
        states, gradient = np.where(take[:, None], at, states), np.where(take[:, None], slope, gradient)
        energy = np.where(take, new, energy)
        if number < warm_up:
            log_step += (float(rate.mean()) - 0.8) / (1 + number) ** 0.5
        else:
            kept.append(states)
            accepted.append(float(rate.mean()))
    return np.stack(kept, 1), float(np.mean(accepted))


def wasserstein(one: Array, other: Array, levels: int = 400) -> Array:
    """Return W₁ between the laws of two sets of draws in each column, from their quantiles.

    Args:
        one: draws, shape (S, n).
        other: draws, shape (T, n).
        levels: quantiles that are compared.

    >>> float(wasserstein(np.zeros((5, 1)), np.ones((7, 1)))[0])
    1.0
    """
    at = (np.arange(levels) + 0.5) / levels
    distance: Array = np.abs(np.quantile(one, at, axis=0) - np.quantile(other, at, axis=0)).mean(0)
    return distance


def distance(one: Array, other: Array, std: Array) -> float:
    """Return the mean over columns of W₁ over the truth's standard deviation."""
    return float((wasserstein(one, other) / std).mean())


def between_chains(draws: Sequence[Array], std: Array) -> float:
    """Return the mean distance between two chains' draws, each of shape (S, n)."""
    return float(np.mean([distance(one, other, std) for one, other in itertools.combinations(draws, 2)]))
