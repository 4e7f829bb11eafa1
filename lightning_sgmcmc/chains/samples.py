"""Posterior samples from the chains' current states."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.drawing import Drawing, FlatStates, Parts
from lightning_sgmcmc.chains.replicas import check_replicas
from lightning_sgmcmc.chains.sample import PosteriorSample
from lightning_sgmcmc.chains.transfers import HostCopies
from lightning_sgmcmc.expansion import collapsed
from lightning_sgmcmc.model import EnergyModel, of_prior
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.priors.state import is_prior_state


def draw_samples(chains: Chains, step: int, check: Callable[[PosteriorSample], None]) -> Iterator[Drawing]:
    """Return the chains' current states as samples, one per chain of the run, in their order.

    The states are copied together, and their numbers are read together, so the host waits for the device once. The
    claim "expand samples" turns each state into `tags.draws` samples. A drawing has at most as many samples as this
    process has chains; all processes iterate over the drawings together.

    Args:
        chains: the chains of this process.
        step: optimizer steps made.
        check: raises for an invalid sample of this process, before other processes see it.

    Raises:
        RuntimeError: if a parameter was frozen during the run, or ranks that share a chain hold other states.
    """
    frozen = next((name for name, p in chains.trainable.items() if not p.requires_grad), None)
    if frozen is not None:
        raise RuntimeError(
            f"'{frozen}' was frozen during the run, so this state is not a posterior sample: freeze parameters "
            "before the fit"
        )
    check_replicas(chains, step)
    prepare = chains.claims.get("prepare samples")
    if prepare is not None:
        prepare()
    layout, expand = chains.layout, chains.claims.get("expand samples")
    states = _flat_states(chains)
    samples = _own_samples(chains, states, step, check)
    if expand is None and not layout.is_spread:
        rows = [row for row, sample in enumerate(samples) if _is_chosen(chains, sample)]
        yield Drawing([samples[row] for row in rows], states, rows)
        return
    own = samples if expand is None else _expanded(samples, expand, check)
    everyone = layout.strategy.share_samples(own) if layout.is_spread else own
    for together in _batched((s for s in everyone if _is_chosen(chains, s)), chains.num_chains):
        yield Drawing(together)


def _flat_states(chains: Chains) -> FlatStates:
    """Return a copy of the states of this process's chains."""
    model, scales = chains.model, []
    for index in range(chains.num_chains):
        with chains.at(index):
            scales.append(present_scales(model))
    together = scales[0]
    if chains.num_chains > 1:
        together = {name: torch.stack([own[name] for own in scales]) for name in scales[0]}
    sampled = {name: p.detach() for name, p in model.named_parameters() if name not in chains.sharing.names}
    parts: Parts = {
        "parameters": collapsed(sampled, model, chains.num_chains),
        "buffers": {
            name: buffer
            for name, buffer in model.named_buffers()
            if name not in chains.sharing.names and not is_prior_state(name)
        },
        "scales": together,
    }
    return FlatStates(parts, chains.num_chains)


def _own_samples(
    chains: Chains, states: FlatStates, step: int, check: Callable[[PosteriorSample], None]
) -> list[PosteriorSample]:
    """Return the states of this process's chains as samples, all of which are valid."""
    tags, layout = chains.tags, chains.layout
    energy = layout.mean_over_data(chains.observed.energy) if tags.energy is None else tags.energy
    numbers = [energy, tags.log_weight, states.suspects(), *([] if tags.bin is None else [tags.bin])]
    energies, log_weights, suspects, *bins = (n.reshape(-1).tolist() for n in HostCopies(numbers).wait())
    samples, shared = [], chains.sharing.tensors()
    for index, chain in enumerate(layout.chains):
        parts = states.of_chain(index)
        sample = PosteriorSample(
            step=step,
            cycle=chains.progress.cycle,
            chain=chain,
            energy=energies[index],
            log_weight=log_weights[index],
            parameters=parts["parameters"],
            buffers=parts["buffers"],
            bin=bins[0][index] if bins else None,
            comparable=tags.comparable,
            scales=parts["scales"],
            shared=shared,
        )
        samples.append(sample)
    for sample, suspect in zip(samples, suspects, strict=True):
        if suspect:
            check(sample)
    return samples


def _expanded(
    samples: Iterable[PosteriorSample],
    expand: Callable[[PosteriorSample], Iterable[PosteriorSample]],
    check: Callable[[PosteriorSample], None],
) -> Iterator[PosteriorSample]:
    for sample in samples:
        for drawn in expand(sample):
            check(drawn)
            yield drawn


def _is_chosen(chains: Chains, sample: PosteriorSample) -> bool:
    """Label a sample as its chain is labelled, and return whether samples of that label are drawn."""
    tags = chains.tags
    if tags.labels is not None:
        sample.chain = tags.labels[sample.chain]
    return sample.chain in tags.sampled


def _batched(samples: Iterable[PosteriorSample], size: int) -> Iterator[list[PosteriorSample]]:
    """Yield lists of up to `size` samples."""
    together: list[PosteriorSample] = []
    for sample in samples:
        together.append(sample)
        if len(together) == size:
            yield together
            together = []
    if together:
        yield together


def present_scales(model: EnergyModel) -> dict[str, Tensor]:
    """Return the standard deviations of a hierarchical prior by parameter, of the chain whose tensors a model holds."""
    if not isinstance(model.prior, HierarchicalPrior):
        return {}
    return model.prior.scales(of_prior(model))
