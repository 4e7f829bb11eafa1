"""Responses of a localised posterior to its data, by covariances along chains: susceptibilities and influences."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.batches.inputs import as_tensors
from lightning_sgmcmc.chains.execution import borrowed
from lightning_sgmcmc.chains.together import States, TogetherCall
from lightning_sgmcmc.checks import check_positive
from lightning_sgmcmc.evaluation.scoring import hooked
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.export import grid_of_draws
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.singular.estimate import Covariance, covariance


def sample_losses(
    posterior: Posterior,
    batches: Iterable[Any],
    center: Mapping[str, Tensor] | None = None,
    part: Sequence[str] | None = None,
) -> Tensor:
    """Return the loss -log p(y|x,w) of each datum at each sample, shape (chain, draw, n), float64, in nats.

    Samples are arranged by chain, as for ArviZ: longer chains keep their newest, draws of `resample` are one chain, and
    weights are a warning. With `part`, weights outside it have their values in `center`: the observable of a component,
    L(w_part, w*_rest), is `sample_losses(…).mean(-1)`.

    Args:
        posterior: the samples of a run, such as `module.posterior`.
        batches: batches as in training, in a fixed order: a `DataLoader` without shuffling, or a list.
        center: w*, a state dict of the network or the module; needed with `part`.
        part: name patterns of the weights of a component (`["net.0.*"]`); None is all weights.

    Raises:
        ValueError: if a pattern of `part` matches no weight, `part` comes without `center`, a weight outside it is not
            in `center`, or there are no batches.
        RuntimeError: without samples, or without their network.
    """
    model = posterior._ready_model()
    samples = list(posterior)
    fixed = _fixed(samples[0].parameters, center, part)
    device = model.device
    states = States([{name: tensor.to(device) for name, tensor in (one.state | fixed).items()} for one in samples])
    call = TogetherCall(model, _losses)
    found: list[Tensor] = []
    with borrowed(model), torch.no_grad():
        for batch in hooked(batches, model):
            moved = as_tensors(batch, device, states.dtype)
            found.append(torch.stack([loss.cpu().double() for loss in call(states, moved)]))
    if not found:
        raise ValueError("batches is empty: pass the batches of the data, such as a DataLoader")
    grid = grid_of_draws(posterior.store)
    return torch.cat(found, 1)[torch.as_tensor(grid.positions)]


def susceptibility(observable: Tensor, perturbation: Tensor, nbeta: float) -> Covariance:
    """Return the response of an observable's mean to a perturbation of the loss, with standard errors.

        χ = ∂E_h[φ]/∂h at h = 0 under exp(-n·β·(L + h·ΔL) - γ/2·‖w - w*‖²) = -n·β·Cov(φ, ΔL)

    For a mixture of data sets, L_h = (1 - h)·L + h·L', it is ΔL = L' - L.

    Args:
        observable: φ at the draws, shape (chain, draw) or (chain, draw, K), such as a component's loss from
            `sample_losses(…, part=…).mean(-1)`.
        perturbation: ΔL at the same draws, in nats per example, shape (chain, draw) or (chain, draw, P).
        nbeta: n·β of the chains.

    Raises:
        ValueError: if the draws differ, or nbeta is not positive.

    Returns:
        χ and its standard errors, shape (K, P).

    Source: Baker, Wang, Hoogland, Pathak & Murfet 2025 (Structural inference: interpreting small language models with
    susceptibilities, arXiv 2504.18274).

    >>> draws = 0.1 * torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))  # of exp(-100·w²/2)
    >>> found = susceptibility(draws, draws, nbeta=100.0)  # L + h·w has its mean at -h
    >>> round(float(found.value), 1)
    -1.0
    """
    return _scaled(covariance(observable, perturbation), nbeta)


def influence(losses: Tensor, observables: Tensor, beta: float) -> Covariance:
    """Return the influence of each datum on observables, the Bayesian influence function, with standard errors.

        ∂E[φ_k]/∂v_i at v = 1 under exp(-β·Σ_i v_i·ℓ_i(w) - γ/2·‖w - w*‖²) = -β·Cov(ℓ_i, φ_k)

    With the losses themselves as observables, it is the matrix of influences among data.

    Args:
        losses: ℓ_i at the draws, shape (chain, draw, n), from `sample_losses`.
        observables: φ_k at the same draws, shape (chain, draw) or (chain, draw, K).
        beta: β = n·β/n, one over the chains' temperature.

    Raises:
        ValueError: if the draws differ, or beta is not positive.

    Returns:
        influences and their standard errors, shape (n, K).

    Source: Kreer, Wu, Adam, Furman & Hoogland 2025 (Bayesian influence functions for Hessian-free data attribution,
    arXiv 2509.26544).
    """
    return _scaled(covariance(losses, observables), beta, "beta")


def _scaled(found: Covariance, factor: float, name: str = "nbeta") -> Covariance:
    check_positive(name, factor)
    return Covariance(-factor * found.value, factor * found.error)


def _losses(model: EnergyModel, batch: Any) -> Tensor:
    return -model.log_likelihood(batch)


def _fixed(
    parameters: Mapping[str, Tensor], center: Mapping[str, Tensor] | None, part: Sequence[str] | None
) -> dict[str, Tensor]:
    """Return the centre's values of the weights outside a component, by their names in the module."""
    if part is None:
        return {}
    patterns = [part] if isinstance(part, str) else list(part)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise ValueError(f"part has {pattern!r}, which matches none of {', '.join(list(parameters)[:6])}")
    if center is None:
        raise ValueError(f"part={patterns} needs the values of the other weights: pass center=w*, a state dict")
    fixed = {}
    for name, tensor in parameters.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        value = center.get(name, center.get(name.removeprefix("net.")))
        if value is None or value.shape != tensor.shape:
            raise ValueError(
                f"center has no tensor of shape {tuple(tensor.shape)} for '{name}': pass a state dict of w*"
            )
        fixed[name] = value.detach().to(tensor)
    return fixed
