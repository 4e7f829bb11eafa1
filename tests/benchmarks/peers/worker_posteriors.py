"""Worker: posteriors, in a bare loop and in a LightningModule.

Mean log posterior and temperature 1/N, as its documentation says.
"""

from typing import Any

import numpy as np
import posteriors
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from protocol import Timing, Worker
from regression import LEARNING_RATE as REGRESSION_LEARNING_RATE
from regression import Regression
from torch import Tensor, nn
from torch_problem import (
    LEARNING_RATE,
    NUM_DATA,
    WARM_UP,
    Batches,
    mlp,
    regression_batches,
    seconds_per_step,
    time_fit,
    time_sgd,
)

FRICTION = 0.1
Parameters = dict[str, Tensor]


def build(sampler: str, log_posterior: Any, lr: float, num_data: int) -> Any:
    """Return a transform of step size `lr` in the mean loss; SGHMC's is ε²/(ε·α), at the friction ε·α = 0.1."""
    if sampler == "sgld":
        return posteriors.sgmcmc.sgld.build(log_posterior, lr=lr, temperature=1 / num_data)
    epsilon = (lr * FRICTION) ** 0.5
    return posteriors.sgmcmc.sghmc.build(log_posterior, lr=epsilon, alpha=FRICTION / epsilon, temperature=1 / num_data)


def classifier(sampler: str, net: nn.Module) -> tuple[Any, Any]:
    """Return the transform that samples the network, and its first state."""

    def log_posterior(parameters: Parameters, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        logits = torch.func.functional_call(net, parameters, (inputs,))
        log_prior = posteriors.diag_normal_log_prob(parameters, normalize=False)
        return log_prior / NUM_DATA - nn.functional.cross_entropy(logits, labels), torch.tensor([])

    transform = build(sampler, log_posterior, LEARNING_RATE, NUM_DATA)
    return transform, transform.init({name: p.detach().clone() for name, p in net.named_parameters()})


class PosteriorsModule(pl.LightningModule):
    """The network sampled inside a Trainer, with manual optimization."""

    def __init__(self, sampler: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = mlp()
        self.transform, self.state = classifier(sampler, self.net)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.state, _ = self.transform.update(self.state, batch)

    def configure_optimizers(self) -> None:
        return None


def time_bare(sampler: str, steps: int) -> float:
    transform, state = classifier(sampler, mlp())

    def step(inputs: Tensor, labels: Tensor) -> None:
        nonlocal state
        state, _ = transform.update(state, (inputs, labels))

    return seconds_per_step(step, steps)


def time_trainer(sampler: str, steps: int) -> float:
    return time_fit(pl, PosteriorsModule(sampler), Batches(WARM_UP + steps), steps)


def chain(sampler: str, problem: Regression, steps: int) -> NDArray[np.float32]:
    def log_posterior(parameters: Parameters, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        log_prior = posteriors.diag_normal_log_prob(parameters, normalize=False)
        log_likelihood = -(inputs @ parameters["weights"] - targets).square().mean() / 2
        return log_prior / problem.num_data + log_likelihood, torch.tensor([])

    torch.manual_seed(problem.seed)
    transform = build(sampler, log_posterior, REGRESSION_LEARNING_RATE, problem.num_data)
    state = transform.init({"weights": torch.zeros(problem.dimension)})
    path = torch.empty(steps, problem.dimension)
    for step, batch in enumerate(regression_batches(problem, steps)):
        state, _ = transform.update(state, batch)
        path[step] = state.params["weights"]
    return path.numpy()


if __name__ == "__main__":
    Worker(
        packages=["posteriors", "torch", "pytorch-lightning"],
        timings={
            "posteriors SGLD, bare loop": Timing(lambda steps: time_bare("sgld", steps)),
            "posteriors SGHMC, bare loop": Timing(lambda steps: time_bare("sghmc", steps)),
            "posteriors SGLD, LightningModule": Timing(lambda steps: time_trainer("sgld", steps)),
            "posteriors SGHMC, LightningModule": Timing(lambda steps: time_trainer("sghmc", steps)),
        },
        chains={
            "posteriors SGLD": lambda problem, steps: chain("sgld", problem, steps),
            "posteriors SGHMC": lambda problem, steps: chain("sghmc", problem, steps),
        },
        reference=time_sgd,
        notes={"posteriors SGHMC": "friction εα = 0.1, lr ε² = 0.001: lr/friction = 0.01, as for SGLD"},
    ).serve()
