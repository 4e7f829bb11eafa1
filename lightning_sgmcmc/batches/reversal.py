"""Whether the batches of a trajectory come as likely in the opposite order, which its Metropolis test assumes."""

import math
from typing import Any

import pytorch_lightning as pl

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.order import BatchOrder
from lightning_sgmcmc.batches.repeated import SymmetricOrder
from lightning_sgmcmc.batches.rows import training_rows
from lightning_sgmcmc.batches.switching import SwitchingOrder


def fault_of_order(trainer: pl.Trainer, steps: int) -> str | None:
    """Return why the batches of trajectories are likelier in one direction, and the remedy; None if they are not.

    Independent batches are as likely in both directions, as are those of whole epochs in random order, parts of one
    such epoch, and whole pairs of `SymmetricOrder`. Of a loader whose order is unknown nothing is said.

    Args:
        trainer: the run's, with its training loader.
        steps: K, optimizer steps of a trajectory, which begin with the first batch of an epoch.
    """
    if not _order_matters(trainer):
        return None
    loader: Any = trainer.train_dataloader
    epoch, batches = trainer.num_training_batches, steps * trainer.accumulate_grad_batches
    order = _order_of(loader)
    if isinstance(order, SymmetricOrder):
        pair = 2 * order.batches_per_epoch
        if epoch == order.batches_per_epoch and batches % pair == 0:
            return None
        return (
            f"SymmetricOrder goes forwards and backwards in two epochs, and a trajectory of {steps} steps cuts that: "
            f"pass every_n_steps={pair // trainer.accumulate_grad_batches}"
        )
    if getattr(order, "repeats", False) or training_rows(trainer).in_order:
        return "the batches come in the same order in every epoch: shuffle the training data, or use SymmetricOrder"
    if isinstance(order, SwitchingOrder):
        return "SwitchingOrder holds a batch beyond a trajectory's end: use the default order of the data"
    of_order = epoch if order is None else order.batches_per_epoch
    for length in (int(epoch), int(of_order)):
        if length % batches and batches % length:
            return (
                f"a trajectory of {steps} steps takes {batches} batches, which cut an epoch of {length}: pass an "
                "every_n_steps whose batches divide an epoch, or are several epochs"
            )
    return None


def fault_of_start(trainer: pl.Trainer, steps: int, batch_idx: int) -> str | None:
    """Return why a trajectory that fits the epochs may not begin with a batch, None if it may.

    Args:
        trainer: the run's, with its training loader.
        steps: K, optimizer steps of a trajectory.
        batch_idx: index of the coming batch in its epoch.
    """
    if not _order_matters(trainer):
        return None
    accumulated = trainer.accumulate_grad_batches
    first, epoch = batch_idx // accumulated, math.ceil(trainer.num_training_batches / accumulated)
    if first % min(steps, epoch):
        return f"a trajectory would begin with step {first + 1} of an epoch and cut the next"
    if isinstance(_order_of(trainer.train_dataloader), SymmetricOrder) and trainer.current_epoch % 2:
        return "a trajectory would begin with a way back of SymmetricOrder"
    return None


def has_short_steps(trainer: pl.Trainer) -> bool:
    """Return whether the last step of an epoch is known to have fewer data than the others."""
    if not _order_matters(trainer):
        return False
    epoch, accumulated = trainer.num_training_batches, trainer.accumulate_grad_batches
    if epoch % accumulated:
        return True
    sizes = training_rows(trainer).sizes_of(int(epoch))
    return sizes is not None and len({*sizes}) > 1


def _order_matters(trainer: pl.Trainer) -> bool:
    """Return whether an epoch is known to have several steps with different data."""
    epoch = trainer.num_training_batches
    several = math.isfinite(epoch) and epoch > trainer.accumulate_grad_batches
    return several and not training_rows(trainer).replacement


def _order_of(loader: Any) -> BatchOrder | None:
    return loader.order_of(loader.chains[0]) if isinstance(loader, ResumableLoader) else None
