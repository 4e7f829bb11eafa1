"""The densities of the peers' benchmark for the light loop, in blocks of steps between which peers take their turns."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sgmcmc.recipes.samplers_bench.problems import LinearRegression
from lightning_sgmcmc.simulation import FiniteSum, UniformGradient
from lightning_sgmcmc.simulation.loop import CHUNK
from lightning_sgmcmc.simulation.subsampled_chains import SumRun

STEPS = 4 * CHUNK
"""Steps of a block."""
Pause = Callable[[], None]


class RegressionSum(FiniteSum):
    """The recipe's conjugate regression for the light loop."""

    def __init__(self, problem: LinearRegression) -> None:
        self.inputs, self.targets = problem.data.x, problem.data.y
        self.num_data, self.dimension = problem.num_data, problem.dimension

    def batch_gradients(self, x: Tensor, indices: Tensor) -> Tensor:
        chains, _, size = indices.shape
        chosen = indices.reshape(-1)
        inputs = self.inputs.index_select(0, chosen).view(chains, size, self.dimension)
        residuals = torch.linalg.vecdot(inputs, x[:, None]) - self.targets.index_select(0, chosen).view(chains, size)
        data = residuals[:, None] @ inputs
        return data * (self.num_data / size) + x[:, None]

    def gradient(self, x: Tensor) -> Tensor:
        return (x @ self.inputs.T - self.targets) @ self.inputs + x

    def energy(self, x: Tensor) -> Tensor:
        return ((x @ self.inputs.T - self.targets).square().sum(1) + x.square().sum(1)) / 2


@dataclass(frozen=True)
class PausedGradient(UniformGradient):
    """The gradient of a uniform batch; it calls `pause` behind each block of steps."""

    pause: Pause = lambda: None
    counts: list[int] = field(default_factory=lambda: [0, 0])
    """Steps drawn for, and pauses made."""

    def draw(self, run: SumRun, steps: int) -> Tensor:
        if self.counts[0] // STEPS > self.counts[1]:
            self.counts[1] += 1
            self.pause()
        self.counts[0] += steps
        return super().draw(run, steps)


class Diagonal:
    """The recipe's Gaussian along the axes, for the light loop."""

    def __init__(self, variances: Tensor) -> None:
        self.variances, self.dimension = variances, len(variances)

    def gradient(self, x: Tensor) -> Tensor:
        return x / self.variances

    def energy(self, x: Tensor) -> Tensor:
        return (x.square() / self.variances).sum(-1) / 2
