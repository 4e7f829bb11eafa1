"""Worker: lightning-sgmcmc, a fit with schedule, collector and model average on, as a user writes it."""

import functools
import logging
import tempfile
import warnings
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from protocol import Timing, Worker
from regression import BATCH as REGRESSION_BATCH
from regression import LEARNING_RATE as REGRESSION_LEARNING_RATE
from regression import Regression
from torch import nn
from torch_problem import INPUTS, LABELS, LEARNING_RATE, NUM_DATA, WARM_UP, Batches, mlp, time_fit, time_sgd

from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Categorical, Gaussian, GaussianPrior
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import BayesianModelAverage, CyclicalSchedule, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.datamodules.base import evaluation_loader

FRICTION = 0.1
NUM_VALIDATION = 1_000
THINNING = 10


def time_ours(sampler: Any, steps: int, net: nn.Module | None = None) -> float:
    """Return the seconds a step of `Trainer.fit`.

    One cycle without exploration, so that every step has its noise, with one sample at its end, which is written to
    disk and averaged over 1,000 validation data.
    """
    module = BayesianModule(
        net=net if net is not None else mlp(),
        likelihood=Categorical(),
        prior=GaussianPrior(std=1.0),
        sampler=sampler,
        lr=LEARNING_RATE,
        num_data=NUM_DATA,
    )
    train = Batches(WARM_UP + steps)
    held_out = evaluation_loader(TensorBatches(INPUTS[:NUM_VALIDATION], LABELS[:NUM_VALIDATION]), NUM_VALIDATION)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [
            CyclicalSchedule(num_cycles=1, exploration=0.0, samples_per_cycle=1),
            SampleCollector(folder + "/samples"),
            BayesianModelAverage(),
        ]
        seconds = time_fit(pl, module, train, steps, callbacks=callbacks, folder=folder, val_dataloaders=held_out)
    if len(module.evaluations["val"].members) != 1:
        raise RuntimeError("the fit did not evaluate its sample")
    return seconds


@functools.cache
def compiled_mlp() -> nn.Module:
    """Return the compiled network; all blocks share it, so that it is compiled once."""
    return torch.compile(mlp())  # type: ignore[return-value]


def chain(sampler: Any, lr: float, problem: Regression, steps: int) -> NDArray[np.float32]:
    """Return every tenth state of a fit on a regression."""
    module = BayesianModule(
        net=nn.Linear(problem.dimension, 1, bias=False),
        likelihood=Gaussian(std=1.0),
        prior=GaussianPrior(std=1.0),
        sampler=sampler,
        lr=lr,
        num_data=problem.num_data,
        seed=problem.seed,
    )
    torch.manual_seed(problem.seed)
    data = TensorBatches(torch.from_numpy(problem.inputs), torch.from_numpy(problem.targets))
    collector = SampleCollector(in_memory=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SamplingSchedule(burn_in_steps=0, every_n_steps=THINNING), collector],
    )
    trainer.fit(module, ResumableLoader(data, REGRESSION_BATCH))
    return torch.stack([sample.parameters["net.weight"][0] for sample in collector.posterior]).numpy()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    sghmc = functools.partial(SGHMC, friction=FRICTION)
    Worker(
        packages=["lightning-sgmcmc", "torch", "pytorch-lightning"],
        timings={
            "ours SGLD, Trainer": Timing(lambda steps: time_ours(SGLD, steps)),
            "ours SGHMC, Trainer": Timing(lambda steps: time_ours(sghmc, steps)),
            "ours SGLD, Trainer, compiled network": Timing(lambda steps: time_ours(SGLD, steps, compiled_mlp())),
            "ours SGHMC, Trainer, compiled network": Timing(lambda steps: time_ours(sghmc, steps, compiled_mlp())),
        },
        chains={
            "ours SGLD": functools.partial(chain, SGLD, REGRESSION_LEARNING_RATE),
            "ours SGHMC": functools.partial(chain, sghmc, REGRESSION_LEARNING_RATE * FRICTION),
        },
        reference=time_sgd,
        notes={"ours SGHMC": "friction 0.1, lr 0.001: lr/friction = 0.01, as for SGLD"},
    ).serve()
