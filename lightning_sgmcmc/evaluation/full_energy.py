"""The potential energy of chains over all training data."""

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.stateless import state_of
from lightning_sgmcmc.evaluation.full_data import full_log_likelihoods, undisturbed
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.tensors import exact, exact_device


def full_energies(trainer: pl.Trainer, chains: Chains, include_prior: bool, reason: str) -> Tensor:
    """Return U of each chain's current state over all training data, in evaluation mode, shape (C,), float64.

    Args:
        trainer: the run's.
        chains: the chains of this process.
        include_prior: whether U includes -log p(θ).
        reason: the option that needs it, for error messages.

    Raises:
        ValueError: if there are no training data.
    """
    states, log_priors, model = [], [], chains.model
    for chain in range(chains.num_chains):
        with chains.at(chain), torch.no_grad():
            states.append(state_of(model))
            log_priors.append(exact(model.log_prior()) if include_prior else torch.zeros((), dtype=torch.float64))
    with undisturbed(trainer, model):
        found = full_log_likelihoods(trainer, chains, states, reason, of_own_chains=True)
    energies = -torch.tensor(found, dtype=torch.float64) - torch.stack(log_priors).cpu()
    return energies.to(exact_device(model.device))


def differs_in_training(model: EnergyModel) -> bool:
    """Return whether a network's outputs differ between training and evaluation mode."""
    kinds = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)
    return any(isinstance(layer, kinds) for layer in model.modules())
