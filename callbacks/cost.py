"""What a run has cost, in gradients of single data."""

import pytorch_lightning as pl

from lightning_sgmcmc.callbacks.logger_output import log_scalars
from lightning_sgmcmc.module import BayesianModule


def log_cost(trainer: pl.Trainer, module: BayesianModule) -> None:
    """Write `sampler/gradient_evaluations`, the gradients of single data that each chain has taken, and
    `sampler/data_passes`, the same over N, to every logger."""
    state = module.chain_state
    evaluations = state.gradient_evaluations
    scalars = {
        "sampler/gradient_evaluations": float(evaluations),
        "sampler/data_passes": evaluations / state.num_data,
    }
    log_scalars(trainer, scalars, trainer.global_step)
