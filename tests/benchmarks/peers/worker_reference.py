"""Worker: torch's SGD, bare and under a Trainer, and SGLD written out.

The latter shows what step size and mini-batches alone do to a right chain.
"""

from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from protocol import Timing, Worker
from regression import LEARNING_RATE, Regression
from torch import Tensor, nn
from torch_problem import LEARNING_RATE as SGD_LEARNING_RATE
from torch_problem import WARM_UP, Batches, mlp, regression_batches, time_fit, time_noisy_sgd, time_sgd


class PlainModule(pl.LightningModule):
    """The network trained by torch's SGD, with automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=SGD_LEARNING_RATE)


def time_lightning(steps: int) -> float:
    return time_fit(pl, PlainModule(), Batches(WARM_UP + steps), steps)


def langevin_chain(problem: Regression, steps: int) -> NDArray[np.float32]:
    """θ ← θ - lr·g + √(2·lr/N)·ξ, with g the gradient of the mean potential."""
    generator = torch.Generator().manual_seed(problem.seed)
    noise = torch.randn(steps, problem.dimension, generator=generator) * (2 * LEARNING_RATE / problem.num_data) ** 0.5
    weights = torch.zeros(problem.dimension)
    path = torch.empty(steps, problem.dimension)
    for step, (inputs, targets) in enumerate(regression_batches(problem, steps)):
        gradient = inputs.T @ (inputs @ weights - targets) / len(targets) + weights / problem.num_data
        weights = weights - LEARNING_RATE * gradient + noise[step]
        path[step] = weights
    return path.numpy()


if __name__ == "__main__":
    Worker(
        packages=["torch", "pytorch-lightning"],
        timings={
            "torch SGD, bare loop": Timing(time_sgd),
            "torch SGD, bare loop, + normal_ of the same size": Timing(time_noisy_sgd),
            "torch SGD, Lightning Trainer": Timing(time_lightning),
        },
        chains={"SGLD written out": langevin_chain},
        reference=time_sgd,
    ).serve()
