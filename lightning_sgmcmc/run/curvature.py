"""The curvature of a fit's likelihood at its start, from a few batches."""

import itertools
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.batches.per_chain import ChainBatches
from lightning_sgmcmc.chains.chains import chains_of
from lightning_sgmcmc.model import named_trainable
from lightning_sgmcmc.planning.curvature import lanczos_spectrum
from lightning_sgmcmc.planning.reach import Spectrum


def likelihood_spectrum(trainer: pl.Trainer, module: Any, batches: int) -> Spectrum:
    """Return the curvatures of -log p(data|θ) at the first chain's present state, from the loader's first batches.

    The network is in evaluation mode, and its parameters are restored.

    Args:
        trainer: the run's.
        module: its `BayesianModule`.
        batches: number of batches, scaled to all N data.
    """
    loader: Any = trainer.train_dataloader
    found = [_first_chain(batch) for batch in itertools.islice(iter(loader), batches)]
    found = [module.transfer_batch_to_device(batch, module.device, 0) for batch in found]
    training = module.training
    module.eval()
    try:
        with chains_of(module).at(0), torch.enable_grad():
            return _spectrum(module, found)
    finally:
        module.train(training)


def _first_chain(batch: Any) -> Any:
    return batch[0] if isinstance(batch, ChainBatches) else batch


def _spectrum(module: Any, batches: list[Any]) -> Spectrum:
    parameters = list(named_trainable(module).values())
    start = torch.cat([p.detach().reshape(-1) for p in parameters])
    sizes = [p.numel() for p in parameters]

    def write(point: Tensor) -> None:
        with torch.no_grad():
            for parameter, piece in zip(parameters, point.split(sizes), strict=True):
                parameter.copy_(piece.view_as(parameter))

    def gradient(point: Tensor) -> Tensor:
        write(point)
        total, count = torch.zeros_like(point), 0
        for batch in batches:
            each = module.log_likelihood(batch)
            pieces = torch.autograd.grad(-each.sum(), parameters, allow_unused=True, materialize_grads=True)
            total += torch.cat([piece.reshape(-1) for piece in pieces])
            count += len(each)
        return total * (module.num_data / count)

    try:
        return lanczos_spectrum(gradient, start)
    finally:
        write(start)
