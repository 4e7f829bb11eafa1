"""The energies of chains at the centre of their prior, and relative to it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.stateless import network_state
from lightning_sgmcmc.evaluation.full_data import full_log_likelihoods, undisturbed
from lightning_sgmcmc.evaluation.full_energy import full_energies
from lightning_sgmcmc.evaluation.sample_energy import Kind, fresh_energies
from lightning_sgmcmc.priors import GaussianPrior, Prior
from lightning_sgmcmc.priors.held import held_rows, with_row, without_held
from lightning_sgmcmc.priors.state import prior_state
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.tensors import exact_device


def check_centered(prior: Prior, name: str) -> None:
    """Raise unless a prior is a Gaussian around a centre, without which there is no local quantity.

    Args:
        prior: the module's.
        name: of the callback that needs it, for the message.

    Raises:
        ValueError: if it has no centre.
    """
    if not isinstance(prior, GaussianPrior) or prior.center is None:
        raise ValueError(
            f"{name} needs a prior centred at the trained weights, got prior={prior!r}: pass "
            "**localized(num_data, gamma) of lightning_sgmcmc.singular to the module, or "
            "prior=GaussianPrior(std, center='start')"
        )


def centers_of(chains: Chains) -> dict[str, Tensor]:
    """Return the prior's centre of each sampled parameter, with the parameter's own shape (of all chains).

    Args:
        chains: the chains of a fit that has begun, whose prior has passed `check_centered`.

    Raises:
        ValueError: if a sampled parameter has no centre.
    """
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
    """Return γ = 1/(τ·std²) of the prior exp(-γ/2·‖w - w*‖²) under exp(-U/τ); None if parameters have several.

    Args:
        chains: as for `centers_of`.
        temperature: τ.
    """
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
    """Return n·L(w*) of all training data in evaluation mode, without the prior, shape (C,), float64, in nats.

    If all chains of the process have the same centre, it is evaluated once.

    Args:
        trainer: the run's.
        chains: the chains of this process.
        centers: from `centers_of`.
        reason: the option that needs it, for error messages.

    Raises:
        ValueError: if there are no training data.
    """
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
    """Return n·(L(w) - L(w*)) of each chain's present state, shape (C,), float64, in nats.

    * "own": on random training data, as many as a step has, the same for w and w*. They are independent of the steps
      so far, so the difference is unbiased, and most of the noise of their choice cancels.
    * "full": on all training data, in evaluation mode.
    * "step": on the data of the last step, for the state before its update, less the loss at w* on all data.

    Args:
        kind: one of them.
        trainer: the run's.
        chains: the chains of this process.
        sampler: their sampler.
        centers: from `centers_of`.
        center_energy: from `center_energies`.
    """
    if kind == "full":
        return full_energies(trainer, chains, False, "loss='full'") - center_energy
    if kind == "step":
        return chains.observed.corrected(include_prior=False) - center_energy
    return fresh_energies(trainer, chains, sampler, False, relative_to=lambda: at_centers(chains, centers))
