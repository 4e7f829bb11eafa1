"""Posterior samples from the chains' current states."""

from collections.abc import Callable, Iterator

from torch import Tensor

from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.sample import PosteriorSample
from lightning_sgmcmc.model import EnergyModel, named_trainable
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.priors.state import is_prior_state, prior_state


def draw_samples(chains: Chains, step: int, check: Callable[[PosteriorSample], None]) -> Iterator[PosteriorSample]:
    """Return the chains' current states as samples, one per chain of the run, in their order.

    The claim "expand samples" turns each state into `tags.draws` samples. Samples are made one at a time and own their
    tensors; all processes iterate over them together.

    Args:
        chains: the chains of this process.
        step: optimizer steps made.
        check: raises for an invalid sample of this process, before other processes see it.

    Raises:
        RuntimeError: if a parameter was frozen during the run.
    """
    frozen = next((name for name, p in chains.trainable.items() if not p.requires_grad), None)
    if frozen is not None:
        raise RuntimeError(
            f"'{frozen}' was frozen during the run, so this state is not a posterior sample: freeze parameters "
            "before the fit"
        )
    prepare = chains.claims.get("prepare samples")
    if prepare is not None:
        prepare()
    layout, tags = chains.layout, chains.tags
    own = _own_samples(chains, step, check)
    everyone = layout.strategy.share_samples(own) if layout.is_spread else own
    for sample in everyone:
        if tags.labels is not None:
            sample.chain = tags.labels[sample.chain]
        if sample.chain in tags.sampled:
            yield sample


def _own_samples(chains: Chains, step: int, check: Callable[[PosteriorSample], None]) -> Iterator[PosteriorSample]:
    """Yield the samples of this process's chains."""
    model, tags, layout = chains.model, chains.tags, chains.layout
    energy = layout.mean_over_data(chains.observed.energy) if tags.energy is None else tags.energy
    energies, log_weights = energy.reshape(-1).tolist(), tags.log_weight.reshape(-1).tolist()
    bins = tags.bin.reshape(-1).tolist() if tags.bin is not None else [None] * chains.num_chains
    for index, chain in enumerate(layout.chains):
        with chains.at(index):
            parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
            buffers = {name: b.detach().clone() for name, b in model.named_buffers() if not is_prior_state(name)}
            scales = present_scales(model)
        sample = PosteriorSample(
            step=step,
            cycle=chains.progress.cycle,
            chain=chain,
            energy=energies[index],
            log_weight=log_weights[index],
            bin=bins[index],
            comparable=tags.comparable,
            parameters=parameters,
            buffers=buffers,
            scales=scales,
        )
        check(sample)
        expand = chains.claims.get("expand samples")
        if expand is None:
            yield sample
            continue
        for drawn in expand(sample):
            check(drawn)
            yield drawn


def present_scales(model: EnergyModel) -> dict[str, Tensor]:
    """Return the standard deviations of a hierarchical prior by parameter, of the chain whose tensors a model holds."""
    if not isinstance(model.prior, HierarchicalPrior):
        return {}
    return model.prior.scales(named_trainable(model) | prior_state(model))
