"""Passes of the chains' current states over all data: predictions, potential energies, and the energy at a center."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sgmcmc.batches.loader import ChainBatches, ResumableLoader, flat_loaders
from lightning_sgmcmc.batches.orders import Permutation
from lightning_sgmcmc.batches.rows import TrainingRows, rows_of, training_rows
from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.energies import ChainEnergies
from lightning_sgmcmc.chains.execution import evaluation_mode, network_state, state_of, undisturbed_generators
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.together import States, TogetherCall
from lightning_sgmcmc.evaluation.scoring import (
    EvaluationShare,
    SampleScores,
    Scorer,
    in_host_memory,
    of_observed,
    scores_on,
    states_on,
)
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.priors import GaussianPrior, Prior
from lightning_sgmcmc.priors.state import held_rows, prior_state, with_row, without_held
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed, reseed, reseed_everything, unchanged_generators
from lightning_sgmcmc.tensors import exact, exact_device

MisconfigurationException = pl.utilities.exceptions.MisconfigurationException


@contextmanager
def undisturbed(trainer: pl.Trainer, module: EnergyModel) -> Iterator[None]:
    """Evaluate as Lightning does, without advancing any random generator, from which iterating over a loader draws."""
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
    """Return log p(D|θ) of all training data for each θ, in one pass without augmentation; all processes share the data
    of the same θ, or, with θ of this process's own chains, the ranks of its group alone."""
    total = torch.zeros(len(states), dtype=torch.float64)
    call, together = TogetherCall(chains.model, lambda model, batch: model.log_likelihood(batch)), States(states)
    layout = chains.layout
    rank, ranks = trainer.global_rank, trainer.world_size
    if of_own_chains:
        rank, ranks = layout.rank_in_chain, layout.ranks_per_chain
    plain = plain_data(getattr(trainer, "datamodule", None))
    for rows in _all_rows(trainer, reason):
        part = rows.loader(range(rank, len(indices_of(rows, reason)), ranks), plain, passes=1)
        with torch.no_grad():
            batches = EvaluationShare(part, math.inf).batches(trainer, chains.model)
            total += _sums(list(call(together, batch)) for batch in batches)
    if ranks > 1:
        reduce = trainer.strategy.reduce
        total = layout.mean_over_data(total) * ranks if of_own_chains else reduce(total, reduce_op="sum")
    return [float(value) for value in total]


LARGEST_KEPT = 2**26
"""Bytes of the log densities that a pass keeps before it adds them up."""


def _sums(parts: Iterable[list[Tensor]]) -> Tensor:
    """Return the sums of several sequences of tensors, which come part by part, in float64 on the host, shape (S,)."""
    total, kept, size = torch.zeros((), dtype=torch.float64), list[list[Tensor]](), 0

    def of_kept() -> Tensor:
        return torch.stack([exact(torch.cat(each)).sum() for each in zip(*kept, strict=True)]).cpu()

    for part in parts:
        kept.append(part)
        size += sum(tensor.nbytes for tensor in part)
        if size > LARGEST_KEPT:
            total, kept, size = total + of_kept(), [], 0
    return total + of_kept() if kept else total


ROWS_OF_PASS = 512
"""Rows of a batch of a small network, by which the time of a batch is that of its arithmetic."""


def pass_over_data(
    trainer: pl.Trainer, chains: Chains, sampler: Sampler, reason: str, purpose: str, shuffled: bool = False
) -> Iterator[Any]:
    """Yield the batches of a pass of the chains over all training data, with their augmentation, on the model's device.

    The ranks that share a chain share the data. Augmentation, and the order if the data are shuffled as in training,
    depend only on (seed, purpose, chain, steps made), wherever the chain runs. Where steps are made in blocks, batches
    that are not shuffled are larger than in training.
    """
    layout, model, step = chains.layout, chains.model, sampler.step_count
    for place, rows in enumerate(_all_rows(trainer, reason)):
        iterators, count = [], len(indices_of(rows, reason))
        places = range(layout.rank_in_chain, count, layout.ranks_per_chain)
        for chain in layout.chains:
            order = None
            if shuffled:
                order = Permutation(count, derive_seed(sampler.seed, f"{purpose} order", chain, step, place))
            larger = chains.traces and not shuffled and rows.are_tensors
            size = max(ROWS_OF_PASS, rows.batch_size or 0) if larger else None
            part = rows.loader(places, batch_size=size, order=order, passes=len(layout.chains))
            names = (purpose, layout.stream(chain), step, place)
            iterators.append(seeded_batches(trainer, model, part, sampler.seed, names, reseed))
        for batches in zip(*iterators, strict=True):
            yield ChainBatches(batches) if chains.num_chains > 1 else batches[0]


def seeded_batches(
    trainer: pl.Trainer,
    model: EnergyModel,
    loader: Any,
    seed: int,
    names: tuple[int | str, ...],
    reseed_by: Callable[[int, torch.device], None],
    limit: float = math.inf,
) -> Iterator[Any]:
    """Yield the batches of a loader of rows; before each, the generators, those of its workers too, are seeded by the
    seed, the names and its number."""
    loader.dataset.seed = (seed, *names)
    batches, end = EvaluationShare(loader, limit).batches(trainer, model), object()
    for number in itertools.count():
        reseed_by(derive_seed(seed, *names, number), model.device)
        batch = next(batches, end)
        if batch is end:
            return
        yield batch


def reseed_all(seed: int, device: torch.device) -> None:
    """Seed the generators from which data sets and networks may draw."""
    reseed_everything(seed)
    reseed(seed, device)


def _all_rows(trainer: pl.Trainer, reason: str) -> list[TrainingRows]:
    """Return the rows of each training loader."""
    if trainer.train_dataloader is None:
        try:
            trainer.fit_loop.setup_data()
        except MisconfigurationException as error:
            raise ValueError(
                f"{reason} needs the training data, but the trainer has none: pass it the fit's datamodule"
            ) from error
    return [rows_of(loader) for loader in flat_loaders(trainer.train_dataloader)]


def indices_of(rows: TrainingRows, reason: str) -> Sequence[int]:
    """Return the indices of all training rows."""
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


def some_training_data(trainer: pl.Trainer, most: int) -> Any | None:
    """Return a loader of this process's share of about `most` training data, spread evenly over all and without
    augmentation; None where their rows are not known."""
    rows = training_rows(trainer)
    if rows.indices is None:
        return None
    stride = max(1, len(rows.indices) // most)
    places = range(trainer.global_rank * stride, len(rows.indices), trainer.world_size * stride)
    return rows.loader(places, plain_data(getattr(trainer, "datamodule", None)), passes=1)


def score_samples(
    trainer: pl.Trainer,
    module: EnergyModel,
    loader: Any,
    limit: float,
    checks: bool,
    samples: Sequence[PosteriorSample],
) -> list[SampleScores]:
    """Return the scores of samples on a loader's data in one pass; of the first ones, if not all fit into memory."""
    with undisturbed(trainer, module):
        states = states_on(module.device, samples)
        found = in_host_memory(scores_on(trainer, module, Scorer(module, checks=checks), states, loader, limit))
    return [SampleScores([of_observed(module, own)], 0.0, {}) for own in found]


# -- full energy -------------------------------------------------------------------------------------------------------


def full_energies(trainer: pl.Trainer, chains: Chains, include_prior: bool, reason: str) -> Tensor:
    """Return U of each chain's current state over all training data, in evaluation mode, shape (C,), float64; without
    -log p(θ) if so wanted."""
    states, log_priors, model = [], [], chains.model
    for chain in range(chains.num_chains):
        with chains.at(chain), torch.no_grad():
            states.append(state_of(model))
            if include_prior:
                log_priors.append(exact(model.log_prior()))
    with undisturbed(trainer, model):
        found = full_log_likelihoods(trainer, chains, states, reason, of_own_chains=True)
    energies = -torch.tensor(found, dtype=torch.float64)
    if include_prior:
        energies = energies - torch.stack(log_priors).cpu()
    return energies.to(exact_device(model.device))


def differs_in_training(model: EnergyModel) -> bool:
    """Return whether a network's outputs differ between training and evaluation mode."""
    kinds = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)
    return any(isinstance(layer, kinds) for layer in model.modules())


# -- sample energy -----------------------------------------------------------------------------------------------------


Kind = Literal["own", "step", "full"]
PURPOSE = "sample energy"


def available_kind(kind: Kind, trainer: pl.Trainer, model: EnergyModel) -> Kind:
    """Return the kind of energy that samples can have in a run, with a warning if it is not as good as it should be."""
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
    """Return the energies of the chains' present states, shape (C,), float64: "own" on random training data
    (`fresh_energies`), "full" on all of them, or None for "step", those of the last step."""
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

    The batches depend only on (seed, chain, step), so E[Ũ] = U at the state; a step's own batch would not do, whose
    energy the step lowers by ε·tr Var(∇Ũ) more than U. Networks are in training mode; generators and running statistics
    are unchanged. `relative_to` puts the chains at other states within its context, whose energies on the same data,
    with the same random numbers of the network, are subtracted.
    """
    num_data, layout, weights = chains.observed.num_data, chains.layout, chains.weights
    energies = ChainEnergies(chains.model, chains.stacked, chains.execution, False, num_data, chains.trainable)
    size, count = _fresh_size(training_rows(trainer), chains), trainer.accumulate_grad_batches

    def seed_chain(chain: int) -> None:
        names = (PURPOSE, sampler.step_count, layout.stream(layout.chains[chain]), "network")
        reseed(derive_seed(sampler.seed, *names), chains.model.device)

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
    owners: list[int | str] = ["shared"] if shared else list(layout.chains)
    ranks, number_of_data = layout.ranks_per_chain, len(indices_of(rows, PURPOSE))
    size = _fresh_size(rows, chains)
    places = range(layout.rank_in_chain, count * size * ranks, ranks)
    iterators = []
    for owner, stream in zip(owners, streams, strict=True):
        order = Permutation(number_of_data, derive_seed(sampler.seed, PURPOSE, step, owner, "order"))
        part, names = rows.loader(places, batch_size=size, order=order), (PURPOSE, step, stream)
        iterators.append(seeded_batches(trainer, model, part, sampler.seed, names, reseed_all, count))
    for batches in itertools.islice(zip(*iterators, strict=True), count):
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


# -- at center ---------------------------------------------------------------------------------------------------------


def check_centered(prior: Prior, name: str) -> None:
    """Raise unless a prior is a Gaussian around a centre, without which there is no local quantity."""
    if not isinstance(prior, GaussianPrior) or prior.center is None:
        raise ValueError(
            f"{name} needs a prior centred at the trained weights, got prior={prior!r}: pass "
            "**localized(num_data, gamma) of lightning_sgmcmc.singular to the module, or "
            "prior=GaussianPrior(std, center='start')"
        )


def centers_of(chains: Chains) -> dict[str, Tensor]:
    """Return the prior's centre of each sampled parameter, with the parameter's own shape (of all chains)."""
    prior, own = chains.model.prior, chains.trainable
    assert isinstance(prior, GaussianPrior)
    axis, held = int(chains.num_chains > 1), held_rows(chains.model)
    entries = without_held({**own, **prior_state(chains.model)}, held, axis)
    distances = prior.distances(entries, chains=chains.num_chains > 1)
    centered = dict(zip(distances.where, distances.centers or [], strict=True))
    lacking = next((name for index, name in enumerate(own) if index not in centered), None)
    if lacking is not None:
        raise ValueError(
            f"the prior has centre 0 for '{lacking}', and a local quantity needs a centre for every sampled parameter: "
            "omit centered=…, or do not sample it"
        )
    found = {name: centered[index].detach() for index, name in enumerate(own)}
    for name, row in held.items():  # a held row is its own centre
        center, value = found[name], own[name].detach().select(axis, row)
        shape = (*value.shape[:axis], own[name].shape[axis] - 1, *value.shape[axis:])
        found[name] = with_row(center.expand(shape), row, value, axis)
    return {name: center.expand_as(own[name]) for name, center in found.items()}


def gamma_of(chains: Chains, temperature: float) -> float | None:
    """Return γ = 1/(τ·std²) of the prior exp(-γ/2·‖w - w*‖²) under exp(-U/τ); None if parameters have several."""
    prior, axis = chains.model.prior, int(chains.num_chains > 1)
    assert isinstance(prior, GaussianPrior)
    stds = {prior.scale_of(name, tensor.shape[axis:]) for name, tensor in chains.trainable.items()}
    return 1 / (temperature * stds.pop() ** 2) if len(stds) == 1 else None


@contextmanager
def at_centers(chains: Chains, centers: Mapping[str, Tensor]) -> Iterator[None]:
    """Put the chains at their centres within this context, between two steps."""
    before = {name: tensor.detach().clone() for name, tensor in chains.trainable.items()}
    with torch.no_grad():
        try:
            for name, center in centers.items():
                chains.trainable[name].copy_(center)
            yield
        finally:
            for name, tensor in before.items():
                chains.trainable[name].copy_(tensor)


def center_energies(trainer: pl.Trainer, chains: Chains, centers: Mapping[str, Tensor], reason: str) -> Tensor:
    """Return n·L(w*) of all training data in evaluation mode, without the prior, shape (C,), float64, in nats; a centre
    that all chains share is evaluated once."""
    model, states = chains.model, []
    with at_centers(chains, centers):
        for chain in range(chains.num_chains):
            with chains.at(chain):
                states.append({name: tensor.detach() for name, tensor in network_state(model).items()})
        alike = all(torch.equal(one[name], states[0][name]) for one in states[1:] for name in one)
        with undisturbed(trainer, model):
            found = full_log_likelihoods(trainer, chains, states[:1] if alike else states, reason, of_own_chains=True)
    energies = -torch.tensor(found, dtype=torch.float64)
    return energies.expand(chains.num_chains).clone().to(exact_device(model.device))


def excess_energies(
    kind: Kind,
    trainer: pl.Trainer,
    chains: Chains,
    sampler: Sampler,
    centers: Mapping[str, Tensor],
    center_energy: Tensor,
) -> Tensor:
    """Return n·(L(w) - L(w*)) of each chain's present state, shape (C,), float64, in nats: "full" on all training data,
    "own" on random ones, the same for w and w*, and "step" on those of the last step, before its update, less n·L(w*)
    of all data."""
    if kind == "full":
        return full_energies(trainer, chains, False, "loss='full'") - center_energy
    if kind == "step":
        return chains.observed.corrected(include_prior=False) - center_energy
    return fresh_energies(trainer, chains, sampler, False, relative_to=lambda: at_centers(chains, centers))
