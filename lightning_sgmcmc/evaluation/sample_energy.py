"""Energies of the chains' present states, which are about to become samples."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.per_chain import ChainBatches
from lightning_sgmcmc.batches.rows import TrainingRows, training_rows
from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.energies import ChainEnergies
from lightning_sgmcmc.evaluation.full_data import indices_of
from lightning_sgmcmc.evaluation.full_energy import differs_in_training, full_energies
from lightning_sgmcmc.evaluation.share import EvaluationShare
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed, reseed, reseed_everything, unchanged_generators
from lightning_sgmcmc.tensors import exact, exact_device

Kind = Literal["own", "step", "full"]
PURPOSE = "sample energy"


def available_kind(kind: Kind, trainer: pl.Trainer, model: EnergyModel) -> Kind:
    """Return the kind of energy that samples can have in a run, with a warning if it is not as good as it should be.

    Args:
        kind: the kind that is asked for.
        trainer: the run's.
        model: the run's.
    """
    if kind == "full" and differs_in_training(model):
        rank_zero_warn(
            "sample_energy='full' computes energies in evaluation mode, but π is learned from training mode, where "
            "this network's energies differ (dropout or BatchNorm): use sample_energy='own'."
        )
    if kind != "own" or has_fresh_batches(trainer):
        return kind
    rank_zero_warn(
        "No batches can be drawn for the samples' own energies from this training loader, so a sample's weight is that "
        "of the state before its step: pass a loader with a batch_size and a data set with a length, or accept it by "
        "sample_energy='step'."
    )
    return "step"


def sample_energies(
    kind: Kind, trainer: pl.Trainer, chains: Chains, sampler: Sampler, include_prior: bool
) -> Tensor | None:
    """Return the energies of the chains' present states, shape (C,), float64; None for those of the last step.

    Args:
        kind: "own" for random training data (`fresh_energies`), "full" for all of them, "step" for the last step's.
        trainer: the run's.
        chains: the chains of this process.
        sampler: their sampler.
        include_prior: whether energies include -log p(θ).
    """
    if kind == "step":
        return None
    if kind == "full":
        return full_energies(trainer, chains, include_prior, "sample_energy='full'")
    return fresh_energies(trainer, chains, sampler, include_prior)


def has_fresh_batches(trainer: pl.Trainer) -> bool:
    """Return whether random batches can be drawn from the training data: one loader whose rows are known."""
    rows = training_rows(trainer)
    return rows.indices is not None and not rows.whole and rows.batch_size is not None


def fresh_energies(
    trainer: pl.Trainer,
    chains: Chains,
    sampler: Sampler,
    include_prior: bool,
    relative_to: Callable[[], AbstractContextManager[None]] | None = None,
) -> Tensor:
    """Return Ũ of each chain's present state on random training data, as many as a step has, shape (C,), float64.

    The batches are independent of the steps so far, so E[Ũ] = U at the state. A step's own batch would not do: the
    step lowers the energy of its batch, by ε·tr Var(∇Ũ) more than U. Networks are in training mode, as in a step;
    generators and running statistics are unchanged. The random numbers depend only on (seed, chain, step).

    Args:
        trainer: the run's; its training data satisfy `has_fresh_batches`.
        chains: the chains of this process.
        sampler: their sampler.
        include_prior: whether the energy includes -log p(θ).
        relative_to: puts the chains at other states within its context, whose energies on the same data, with the same
            random numbers of the network, are subtracted; None subtracts nothing.
    """
    num_data, layout = chains.observed.num_data, chains.layout
    energies = ChainEnergies(chains.model, chains.stacked, chains.execution, False, num_data, chains.trainable)
    names = (PURPOSE, sampler.step_count)

    def seed_chain(chain: int) -> None:
        stream = layout.stream(layout.chains[chain])
        reseed(derive_seed(sampler.seed, *names, stream, "network"), chains.model.device)

    size = _fresh_size(training_rows(trainer), chains)
    weights = chains.weights

    def weigh() -> float | None:
        return None if weights is None else weights.fresh_factor(size)

    def present(batch: Any) -> Tensor:
        seed_chain(0)
        with trainer.precision_plugin.train_step_context():
            step = energies(batch, through_stack=False, seed_chain=seed_chain, weigh=weigh)
        energy = exact(step.mean_potential).reshape(-1) * num_data
        return energy if include_prior else energy + step.log_prior.to(energy.device)

    correction = chains.claims.get("energy correction")
    total = torch.zeros(chains.num_chains, dtype=torch.float64, device=exact_device(chains.model.device))
    count = trainer.accumulate_grad_batches
    with _undisturbed(chains.model), torch.no_grad():
        for batch in _fresh_batches(trainer, chains, sampler, count):
            energy = present(batch)
            if relative_to is not None:
                with relative_to():
                    energy = energy - present(batch)
            elif correction is not None:
                energy = energy + correction(batch, weigh())
            total += energy / count
    return layout.mean_over_data(total)


def _fresh_size(rows: TrainingRows, chains: Chains) -> int:
    """Return the rows of a random batch in this process."""
    assert rows.batch_size is not None
    return min(rows.batch_size, -(-len(indices_of(rows, PURPOSE)) // chains.layout.ranks_per_chain))


def _fresh_batches(trainer: pl.Trainer, chains: Chains, sampler: Sampler, count: int) -> Iterator[Any]:
    """Yield `count` random batches of the training data, with augmentation, for each chain or shared as in a step."""
    layout, model, step = chains.layout, chains.model, sampler.step_count
    rows = training_rows(trainer)
    own = isinstance(trainer.train_dataloader, ResumableLoader)
    shared = chains.num_chains > 1 and (chains.shared_batch or not own)
    streams = ["shared"] if shared else [layout.stream(chain) for chain in layout.chains]
    owners = ["shared"] if shared else list(layout.chains)
    ranks, number_of_data = layout.ranks_per_chain, len(indices_of(rows, PURPOSE))
    size = _fresh_size(rows, chains)
    iterators = []
    for owner in owners:
        generator = torch.Generator().manual_seed(derive_seed(sampler.seed, PURPOSE, step, owner, "order"))
        order = torch.randperm(number_of_data, generator=generator)
        order = order.repeat(-(-count * size * ranks // number_of_data))
        chosen = order[layout.rank_in_chain :: ranks][: count * size].tolist()
        part = rows.loader(chosen, batch_size=size)
        iterators.append(EvaluationShare(part, count).batches(trainer, model))
    for number in range(count):
        batches = []
        for stream, iterator in zip(streams, iterators, strict=True):
            seed = derive_seed(sampler.seed, PURPOSE, step, stream, number)
            reseed_everything(seed)
            reseed(seed, model.device)
            batches.append(next(iterator))
        yield batches[0] if shared or chains.num_chains == 1 else ChainBatches(batches)


@contextmanager
def _undisturbed(model: EnergyModel) -> Iterator[None]:
    """Restore all default generators and the running statistics at the end."""
    statistics = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with unchanged_generators([model.device]):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in statistics:
                buffer.copy_(before)
