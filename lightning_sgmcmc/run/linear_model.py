"""The exact directions of a posterior whose network is linear in its weights: a conjugate regression."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc.batches.rows import training_rows
from lightning_sgmcmc.chains.chains import chains_of
from lightning_sgmcmc.evaluation.full_data import indices_of
from lightning_sgmcmc.evaluation.sample_energy import has_fresh_batches
from lightning_sgmcmc.likelihoods import Gaussian
from lightning_sgmcmc.model import overrides
from lightning_sgmcmc.planning import TensorFacts
from lightning_sgmcmc.priors import GaussianPrior
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import unchanged_generators

MOST_DATA = 2000
"""Data that are looked at; of more, this many, evenly spread."""
MOST_INPUTS = 1000
"""Inputs of a layer above which its directions are not computed."""
MOST_CLASSES = 16
"""Directions of similar curvature are planned together."""


def exact_directions(trainer: pl.Trainer, module: Any, sampler: Sampler) -> dict[str, TensorFacts] | None:
    """Return the directions of the posterior of a linear regression, as tensors with a prior of its curvature.

    With outputs W·x, noise σ and a prior of standard deviation s, each output's weights have the precision
    P = XᵀX/σ² + I/s². In an eigenvector of P with eigenvalue p the chain moves as in a prior of variance 1/p around
    the posterior's mean, so the plan's law of the prior's directions holds there exactly.

    Args:
        trainer: the run's, with its training data.
        module: its `BayesianModule`.
        sampler: the run's.

    Returns:
        facts by direction, the slowest first; None for another network, likelihood or prior, or unknown data.
    """
    layer = _linear(module)
    if layer is None or len(sampler.param_groups) != 1 or not has_fresh_batches(trainer):
        return None
    x, y = _data(trainer, module)
    if x is None or y is None or x.shape[1] != layer.in_features or y.shape[1] != layer.out_features:
        return None
    names = {name.rsplit(".", 1)[-1]: name for name in chains_of(module).trainable}
    ones = layer.bias is not None
    inputs = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1) if ones else x
    prior = [1 / module.prior.scale_of(names["weight"], tuple(layer.weight.shape[-2:])) ** 2] * layer.in_features
    if ones:
        prior.append(1 / module.prior.scale_of(names["bias"], tuple(layer.bias.shape[-1:])) ** 2)
    scale = module.num_data / len(x) / module.likelihood.std**2
    precision = scale * inputs.T @ inputs + torch.tensor(prior, dtype=torch.float64).diag()
    mean = torch.linalg.solve(precision, scale * inputs.T @ y)  # (inputs, outputs)
    curvature, vectors = torch.linalg.eigh(precision)
    start = (_starts(module, names) - mean.T) @ vectors  # (chains, outputs, inputs)
    return _classes(curvature, start.square().mean((0, 1)), layer.out_features)


def _linear(module: Any) -> nn.Linear | None:
    """Return the layer of a network that is one linear layer, all of whose weights are sampled."""
    own = ("log_likelihood", "output_and_target", "inputs_and_target", "forward")
    if any(overrides(module, name) for name in own):
        return None
    if type(module.likelihood) is not Gaussian or module.likelihood.learned:
        return None
    if type(module.prior) is not GaussianPrior or module.prior.center is not None:
        return None
    net = getattr(module, "net", None)
    layers = list(net) if type(net) is nn.Sequential else [net]
    if not layers or type(layers[-1]) is not nn.Linear or any(type(layer) is not nn.Flatten for layer in layers[:-1]):
        return None
    layer, chains = layers[-1], chains_of(module)
    sampled = {name.rsplit(".", 1)[-1] for name in chains.trainable}  # of one layer, so without duplicates
    wanted = {"weight"} | ({"bias"} if layer.bias is not None else set())
    is_small = layer.in_features <= MOST_INPUTS
    return layer if is_small and sampled == wanted and not chains.sharing.names else None


def _data(trainer: pl.Trainer, module: Any) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return inputs and targets of the training data, double precision, without an effect on any generator."""
    rows = training_rows(trainer)
    count = len(indices_of(rows, "the plan"))
    places = torch.linspace(0, count - 1, min(count, MOST_DATA)).round().long().tolist()
    with unchanged_generators([module.device]):
        batch = next(iter(rows.loader(places, batch_size=len(places))))
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        return None, None
    x, y = (part.detach().cpu().double().reshape(len(part), -1) for part in batch)  # targets may be (n,)
    return (x, y) if len(x) == len(y) and not bool(y.isnan().any()) else (None, None)


def _starts(module: Any, names: dict[str, str]) -> Tensor:
    """Return the chains' weights, with the bias as a last column, shape (C, outputs, inputs)."""
    chains = chains_of(module)
    tensors = [chains.trainable[names[name]].detach().cpu().double() for name in ("weight", "bias") if name in names]
    if chains.stacked is None:
        tensors = [tensor[None] for tensor in tensors]
    return torch.cat([tensor if tensor.dim() == 3 else tensor[..., None] for tensor in tensors], -1)


def _classes(curvature: Tensor, start: Tensor, outputs: int) -> dict[str, TensorFacts]:
    """Return the directions by classes of similar curvature; the slowest direction is alone."""
    logs = curvature.log()
    span = float(logs[-1] - logs[0]) + 1e-9
    place = 1 + ((logs - logs[0]) / span * MOST_CLASSES).long().clamp_max(MOST_CLASSES - 1)
    place[0] = 0
    found = {}
    for number in place.unique().tolist():
        own = place == number
        mean = float(curvature[own].mean())
        weighted = float((curvature[own] * start[own]).mean()) / mean  # the energy of the start is kept
        found[f"direction {number}"] = TensorFacts(int(own.sum()) * outputs, mean**-0.5, 0, weighted)
    return found
