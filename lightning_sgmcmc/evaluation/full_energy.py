"""The potential energy of chains over all training data."""

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.evaluation.full_data import full_log_likelihood, undisturbed
from lightning_sgmcmc.module import BayesianModule


def full_energies(trainer: pl.Trainer, module: BayesianModule, include_prior: bool, reason: str) -> Tensor:
    """Return U of each chain's present state over all training data, in evaluation mode, shape (C,), float64.

    Args:
        trainer: the run's.
        module: the module.
        include_prior: whether U includes -log p(θ).
        reason: the option that needs it, for error messages.

    Raises:
        ValueError: if there are no training data.
    """
    energies = []
    for chain in range(module.num_chains):
        with module.at_chain(chain), torch.no_grad():
            state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            log_prior = float(module.log_prior()) if include_prior else 0.0
        with undisturbed(trainer, module):
            found = full_log_likelihood(trainer, module, state, reason, of_own_chain=True)
        energies.append(-found - log_prior)
    return torch.tensor(energies, dtype=torch.float64, device=module.device)


def differs_in_training(module: BayesianModule) -> bool:
    """Return whether a network's outputs differ between training and evaluation mode."""
    kinds = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)
    return any(isinstance(layer, kinds) for layer in module.modules())
