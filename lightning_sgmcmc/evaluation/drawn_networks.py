"""Networks made during a run, such as draws from a Gaussian: their BatchNorm statistics and energy on training data."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.batches.orders import Permutation
from lightning_sgmcmc.batches.rows import training_rows
from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.densities import Densities, weighed
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.evaluation.passes import has_fresh_batches, indices_of, reseed_all, seeded_batches, undisturbed
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.seeding import derive_seed, unchanged_generators
from lightning_sgmcmc.tensors import exact


def batch_norm_layers(model: nn.Module) -> dict[str, Any]:
    """Return the BatchNorm layers with running statistics, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats
    }


def new_statistics(
    model: nn.Module,
    state: Mapping[str, Tensor],
    batches: Iterable[Any],
    call: Callable[[Mapping[str, Tensor], Any], Any],
) -> dict[str, Tensor]:
    """Return a state whose BatchNorm statistics are averages over batches at its weights; layers without statistics in
    the state keep the model's."""
    layers = {n: layer for n, layer in batch_norm_layers(model).items() if f"{n}.running_mean" in state}
    fresh = dict(state)
    for name in layers:
        for statistic, value in (("running_mean", 0), ("running_var", 1), ("num_batches_tracked", 0)):
            key = f"{name}.{statistic}"
            fresh[key] = torch.full_like(state[key], value)
    if not layers:
        return fresh
    before = [(layer, layer.momentum, layer.training) for layer in layers.values()]
    try:
        for layer in layers.values():
            layer.train()
            layer.momentum = None  # the plain average over batches
        with torch.no_grad():
            for batch in batches:
                call(fresh, batch)
    finally:
        for layer, momentum, training in before:
            layer.momentum, layer.training = momentum, training
    return fresh


# -- refreshed ---------------------------------------------------------------------------------------------------------


def check_statistics(trainer: pl.Trainer, model: EnergyModel, name: str) -> None:
    """Raise if a network's BatchNorm statistics cannot be estimated again from the training data."""
    layers = batch_norm_layers(model)
    if layers and not has_fresh_batches(trainer):
        raise ValueError(
            f"{name} estimates BatchNorm's statistics ('{next(iter(layers))}', …) again for each network that it "
            "draws, on random training batches, and the training loader allows none: pass one loader with a "
            "batch_size, of a data set with a length, or use a network without BatchNorm"
        )


def refreshed(
    trainer: pl.Trainer, chains: Chains, sample: PosteriorSample, seed: int, batches: int | None
) -> PosteriorSample:
    """Return a sample with statistics of so many random training batches (None of a pass over the data) at its own
    weights, and its Ũ on the data of a step, in evaluation mode; the sample itself if no batches can be drawn."""
    if not has_fresh_batches(trainer):
        return sample
    model = chains.model
    device, steps = model.device, trainer.accumulate_grad_batches
    with unchanged_generators([device]), undisturbed(trainer, model), torch.no_grad():
        densities = Densities(model)
        state: Mapping[str, Tensor] = {name: tensor.to(device) for name, tensor in sample.own_state.items()}
        state = new_statistics(model, state, _batches(trainer, model, seed, batches), densities.log_likelihood)
        factor = None if chains.weights is None else chains.weights.fresh_factor(training_rows(trainer).batch_size or 1)
        each = (densities.log_likelihood(state, batch) for batch in _batches(trainer, model, seed, steps))
        means = [weighed(of_batch, factor) for of_batch in each]
        log_prior = exact(densities.log_prior(state))
        energy = -(exact(torch.stack(means)).mean() * chains.observed.num_data + log_prior)
    buffers = {name: state[name] for name in sample.buffers}
    return replace(sample, buffers=buffers, energy=energy.item())


def _batches(trainer: pl.Trainer, model: EnergyModel, seed: int, limit: int | None) -> Iterator[Any]:
    """Return random training batches of full size, with augmentation; they depend only on the seed."""
    rows = training_rows(trainer)
    count, size = len(indices_of(rows, "a drawn network")), rows.batch_size or 1
    order = Permutation(count, derive_seed(seed, "order"))
    whole = count // size * size or count  # BatchNorm refuses a single datum
    part = rows.loader(range(whole), order=order, passes=int(limit is None))
    return itertools.islice(seeded_batches(trainer, model, part, seed, (), reseed_all), limit)
