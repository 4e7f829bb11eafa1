"""Training data that grow during a run, and streams that have another order in each epoch."""

from typing import Any

import pytorch_lightning as pl

from lightning_sgmcmc.batches.rows import resolve_num_data, training_rows
from lightning_sgmcmc.chains.chains import chains_of, sampler_of


def follow_data(trainer: pl.Trainer, module: Any) -> None:
    """Read N again: energies, the prior's share and the noise follow it from the next step on.

    Args:
        trainer: the run's.
        module: its `BayesianModule`.

    Raises:
        ValueError: if the module was given another N.
    """
    chains = chains_of(module)
    num_data, _ = resolve_num_data(module.given_num_data, trainer, type(module).__name__)
    module.num_data = chains.observed.num_data = sampler_of(module).num_data = num_data
    if chains.energies is not None:
        chains.energies.follow(num_data)
    if chains.weights is not None:
        chains.weights.follow(num_data)


def begin_stream(trainer: pl.Trainer) -> None:
    """Tell a stream the number of the epoch, as Lightning tells samplers; otherwise it may repeat the first order."""
    stream = stream_of(trainer)
    if hasattr(stream, "set_epoch"):
        stream.set_epoch(trainer.current_epoch)


def stream_of(trainer: pl.Trainer) -> Any:
    """Return the data set of the training loader if it has no rows that can be indexed, else None."""
    rows, dataset = training_rows(trainer), getattr(trainer.train_dataloader, "dataset", None)
    return dataset if rows.dataset is None else None
