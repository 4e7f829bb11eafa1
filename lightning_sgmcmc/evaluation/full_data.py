"""Evaluation during a run, including on all training data."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sgmcmc.batches.per_chain import ChainBatches
from lightning_sgmcmc.batches.rows import TrainingRows, rows_of
from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.stateless import evaluation_mode, undisturbed_generators
from lightning_sgmcmc.chains.together import States, TogetherCall
from lightning_sgmcmc.evaluation.loader_average import loaders_of
from lightning_sgmcmc.evaluation.share import EvaluationShare
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed, reseed
from lightning_sgmcmc.tensors import exact


@contextmanager
def undisturbed(trainer: pl.Trainer, module: EnergyModel) -> Iterator[None]:
    """Evaluate as Lightning does, without advancing any random generator.

    Iterating over a loader draws from the global generator.
    """
    precision = trainer.strategy.precision_plugin
    with undisturbed_generators(module), evaluation_mode(module), precision.val_step_context():
        yield


def full_log_likelihoods(
    trainer: pl.Trainer,
    chains: Chains,
    states: Sequence[Mapping[str, Tensor]],
    reason: str,
    of_own_chains: bool = False,
) -> list[float]:
    """Return log p(D|θ) of all training data for each θ, in one pass without augmentation; processes share the data.

    Args:
        trainer: the run's.
        chains: the chains of the model, which is in evaluation mode.
        states: each θ, parameters and buffers by name.
        reason: the option that needs it, for the message.
        of_own_chains: whether they belong to chains of this process, so that only the ranks of its group share the
            data; otherwise all processes have the same ones.

    Raises:
        ValueError: if the trainer has no training data.
    """
    total = torch.zeros(len(states), dtype=torch.float64)
    call, together = TogetherCall(chains.model, lambda model, batch: model.log_likelihood(batch)), States(states)
    layout = chains.layout
    rank, ranks = trainer.global_rank, trainer.world_size
    if of_own_chains:
        rank, ranks = layout.rank_in_chain, layout.ranks_per_chain
    plain = plain_data(getattr(trainer, "datamodule", None))
    for rows in _all_rows(trainer, reason):
        part = rows.loader(range(rank, len(indices_of(rows, reason)), ranks), plain)
        with torch.no_grad():
            batches = EvaluationShare(part, math.inf).batches(trainer, chains.model)
            found = [list(call(together, batch)) for batch in batches]
        total += torch.stack([exact(torch.cat(each)).sum() for each in zip(*found, strict=True)]).cpu()
    if ranks > 1:
        reduce = trainer.strategy.reduce
        total = layout.mean_over_data(total) * ranks if of_own_chains else reduce(total, reduce_op="sum")
    return [float(value) for value in total]


def pass_over_data(
    trainer: pl.Trainer, chains: Chains, sampler: Sampler, reason: str, purpose: str, shuffled: bool = False
) -> Iterator[Any]:
    """Yield the batches of a pass of the chains over all training data, with their augmentation, on the model's device.

    Batches are plain for one chain, and `ChainBatches` for several. The ranks that share a chain share the data. The
    default generators are reseeded before each batch: the augmentation, and the order if the data are shuffled, depend
    only on (seed, purpose, chain, steps made), wherever the chain runs.

    Args:
        trainer: the run's.
        chains: the run's chains.
        sampler: the chains' sampler.
        reason: the callback that needs it, for the message.
        purpose: names the random numbers.
        shuffled: whether the data are in random order, as in training; otherwise in the data set's order.

    Raises:
        ValueError: if the trainer has no training data, or a data set has no length.
    """
    layout, model, step = chains.layout, chains.model, sampler.step_count
    for place, rows in enumerate(_all_rows(trainer, reason)):
        iterators, count = [], len(indices_of(rows, reason))
        for chain in layout.chains:
            places = torch.arange(count)
            if shuffled:
                seed = derive_seed(sampler.seed, f"{purpose} order", chain, step, place)
                places = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
            part = rows.loader(places[layout.rank_in_chain :: layout.ranks_per_chain].tolist())
            iterators.append(EvaluationShare(part, math.inf).batches(trainer, model))
        for number in itertools.count():
            batches: list[Any] = []
            for chain, iterator in zip(layout.chains, iterators, strict=True):
                stream = layout.stream(chain)
                reseed(derive_seed(sampler.seed, purpose, stream, step, place, number), model.device)
                batches.extend(itertools.islice(iterator, 1))
            if not batches:
                break
            yield ChainBatches(batches) if chains.num_chains > 1 else batches[0]


def _all_rows(trainer: pl.Trainer, reason: str) -> list[TrainingRows]:
    """Return the rows of each training loader."""
    if trainer.train_dataloader is None:
        try:
            trainer.fit_loop.setup_data()
        except MisconfigurationException as error:
            raise ValueError(
                f"{reason} needs the training data, but the trainer has none: pass it the fit's datamodule"
            ) from error
    return [rows_of(loader) for loader in loaders_of(trainer.train_dataloader)]


def indices_of(rows: TrainingRows, reason: str) -> Sequence[int]:
    """Return the indices of all training rows.

    Args:
        rows: the rows.
        reason: what passes over them, for the message.

    Raises:
        ValueError: if it is not known which rows the loader draws.
    """
    if rows.indices is None:
        raise ValueError(
            f"{reason} passes over all training data, and which they are is not known ({rows.source}): pass a data set "
            "with a length, or Subset(dataset, indices) instead of a sampler for a part of it"
        )
    return rows.indices


def plain_data(datamodule: Any) -> Any:
    """Return a datamodule's training data without augmentation, None without such a method."""
    plain = getattr(datamodule, "training_data", None)
    return plain() if callable(plain) and not isinstance(plain, Dataset) else None
