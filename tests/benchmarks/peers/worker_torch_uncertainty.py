"""Worker: torch-uncertainty's optimizers, under its ClassificationRoutine for the times, alone for the errors."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
from numpy.typing import NDArray
from protocol import Timing, Worker
from regression import LEARNING_RATE as REGRESSION_LEARNING_RATE
from regression import Regression
from torch import nn
from torch_problem import LEARNING_RATE, NUM_DATA, WARM_UP, Batches, mlp, optimizer_chain, time_fit, time_sgd
from torch_uncertainty.optim import SGHMC, SGLD
from torch_uncertainty.routines import ClassificationRoutine


def time_routine(sampler: Any, steps: int) -> float:
    net = mlp()
    routine = ClassificationRoutine(
        model=net,
        num_classes=10,
        loss=nn.CrossEntropyLoss(),
        optim_recipe=sampler(net.parameters(), lr=LEARNING_RATE, weight_decay=1 / NUM_DATA),
    )
    return time_fit(pl, routine, Batches(WARM_UP + steps), steps)


def chain(sampler: Any, problem: Regression, steps: int) -> NDArray[np.float32]:
    options = {"lr": REGRESSION_LEARNING_RATE, "weight_decay": 1 / problem.num_data}
    return optimizer_chain(problem, steps, lambda parameters: sampler(parameters, **options))


if __name__ == "__main__":
    default = "noise_factor and friction are its defaults; weight_decay = 1/N is the prior"
    Worker(
        packages=["torch-uncertainty", "torch", "lightning"],
        timings={
            "torch-uncertainty SGLD, its routine": Timing(lambda steps: time_routine(SGLD, steps)),
            "torch-uncertainty SGHMC, its routine": Timing(lambda steps: time_routine(SGHMC, steps)),
        },
        chains={
            "torch-uncertainty SGLD": lambda problem, steps: chain(SGLD, problem, steps),
            "torch-uncertainty SGHMC": lambda problem, steps: chain(SGHMC, problem, steps),
        },
        reference=time_sgd,
        notes={
            "torch-uncertainty SGLD": default,
            "torch-uncertainty SGHMC": default,
            "torch-uncertainty SGHMC, its routine": f"timed after {WARM_UP} steps, behind its burn-in",
        },
    ).serve()
