"""Worker: lightning-uq-box, its SGLDClassification for the times, its optimizer alone for the errors."""

import lightning.pytorch as pl
import numpy as np
from lightning_uq_box.uq_methods import SGLDClassification
from lightning_uq_box.uq_methods.sgld import SGLD
from numpy.typing import NDArray
from protocol import Timing, Worker
from regression import LEARNING_RATE as REGRESSION_LEARNING_RATE
from regression import Regression
from torch import nn
from torch_problem import LEARNING_RATE, NUM_DATA, Batches, mlp, optimizer_chain, time_fit, time_sgd

STEPS = 600
"""An epoch: the time of a step grows within it, so a mean has no meaning without the number of steps."""
NOISE_FACTOR = 0.2
"""It has no default; the configurations in its repository have this one throughout."""


def time_classification(steps: int) -> float:
    module = SGLDClassification(
        model=mlp(),
        loss_fn=nn.CrossEntropyLoss(),
        lr=LEARNING_RATE,
        weight_decay=1 / NUM_DATA,
        noise_factor=NOISE_FACTOR,
        n_sgld_samples=1,
    )
    warm_up = 5
    batches = Batches(warm_up + steps, lambda inputs, labels: {"input": inputs, "target": labels})
    return time_fit(pl, module, batches, steps, warm_up)


def chain(problem: Regression, steps: int) -> NDArray[np.float32]:
    options = {"lr": REGRESSION_LEARNING_RATE, "weight_decay": 1 / problem.num_data, "noise_factor": NOISE_FACTOR}
    return optimizer_chain(problem, steps, lambda parameters: SGLD(iter(parameters), **options))


if __name__ == "__main__":
    Worker(
        packages=["lightning-uq-box", "torch", "lightning"],
        timings={"lightning-uq-box SGLDClassification": Timing(time_classification, steps=STEPS)},
        chains={"lightning-uq-box SGLD": chain},
        reference=time_sgd,
        notes={
            "lightning-uq-box SGLDClassification": f"mean of an epoch's first {STEPS} steps; the time grows within it",
            "lightning-uq-box SGLD": f"noise_factor {NOISE_FACTOR}, as in its configurations; weight_decay = 1/N",
        },
    ).serve()
