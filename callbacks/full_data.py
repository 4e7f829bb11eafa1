"""Evaluation in the middle of a run, also on all training data."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_sgmcmc.callbacks.evaluation_share import EvaluationShare
from lightning_sgmcmc.callbacks.loader_average import loaders_of
from lightning_sgmcmc.evaluation import evaluate, evaluation_mode
from lightning_sgmcmc.module import BayesianModule


@contextmanager
def unnoticed(trainer: pl.Trainer, module: BayesianModule) -> Iterator[None]:
    """Evaluate as Lightning does, and so that the chain does not notice.

    Going through a loader draws from the global generator.
    """
    devices = [module.device] if module.device.type == "cuda" else []
    precision = trainer.strategy.precision_plugin
    with torch.random.fork_rng(devices), evaluation_mode(module), precision.val_step_context():
        yield


def full_log_likelihood(
    trainer: pl.Trainer,
    module: BayesianModule,
    state: Mapping[str, Tensor],
    reason: str,
    of_own_chain: bool = False,
    augmented: bool = False,
) -> float:
    """Return log p(D|θ) of all training data; the processes share the data among them.

    Args:
        trainer: the run's.
        module: the module, in evaluation mode.
        state: θ, parameters and buffers by name.
        reason: the option that needs it, for the message.
        of_own_chain: θ is a chain of this process's, so only the ranks of its group share the data; else all processes
            have the same θ.
        augmented: with the training data's augmentation.

    Raises:
        ValueError: if there are no training data.
    """
    if trainer.train_dataloader is None:
        try:
            trainer.fit_loop.setup_data()
        except MisconfigurationException as error:
            raise ValueError(
                f"{reason} needs the training data, and there are none here: hand the trainer the fit's datamodule"
            ) from error
    total = torch.zeros((), dtype=torch.float64)
    layout = module.layout
    rank, ranks = trainer.global_rank, trainer.world_size
    if of_own_chain:
        rank, ranks = layout.rank_in_chain, layout.ranks_per_chain
    plain = None if augmented else getattr(getattr(trainer, "datamodule", None), "training_data", None)
    for loader in loaders_of(trainer.train_dataloader):
        dataset = plain() if plain is not None else loader.dataset
        mine = Subset(dataset, range(rank, len(dataset), ranks))
        again = DataLoader(mine, batch_size=loader.batch_size or 1, collate_fn=loader.collate_fn)
        _, log_density, _ = evaluate(module, state, EvaluationShare(again, math.inf).batches(trainer, module))
        total += log_density.double().sum().cpu()
    if ranks == 1:
        return float(total)
    if of_own_chain:
        return float(layout.mean_over_data(total)) * ranks
    return float(trainer.strategy.reduce(total, reduce_op="sum"))
