"""Last-layer Laplace approximations around samples, by the optional package laplace-torch."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains.execution import MASK_SEED, network_state
from lightning_sgmcmc.checks import check_choice, check_count, check_within
from lightning_sgmcmc.expansion import collapse
from lightning_sgmcmc.likelihoods import Categorical, Gaussian
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.description import describe_model
from lightning_sgmcmc.posterior.disk import whole_store
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.posterior.store import MemoryStore, SampleStore
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tensors import copied

Hessian = Literal["kron", "full", "diag"]


class _Network(nn.Module):
    """The network of a model, as laplace-torch calls it."""

    def __init__(self, model: EnergyModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model.output_of(x)


def last_layer_laplace(
    posterior: Posterior,
    loader: Any,
    num_draws: int = 30,
    hessian: Hessian = "kron",
    prior_precision: float | None = None,
    seed: int = 0,
    path: str | Path | None = None,
) -> Posterior:
    """Return samples whose last layer is drawn from a Laplace approximation around each of a posterior's samples.

        w ~ N(w*, (Σ_i J_iᵀ Λ_i J_i + λI)⁻¹),   w* the last layer of the sample, the other layers unchanged

    The samples should be optima, such as those of `DeepEnsemble`: a Laplace approximation of each member. A draw
    depends only on (seed, chain, step, draw). The package is optional: `pip install laplace-torch`.

    Args:
        posterior: the optima, from `Posterior.load`.
        loader: the training data, batches (x, y), with a `dataset` whose length is N.
        num_draws: draws around each sample.
        hessian: structure of the curvature.
        prior_precision: λ, one over the variance of the prior; None maximizes the marginal likelihood, for each sample.
        seed: of the draws.
        path: folder of a new store for the draws; None keeps them in memory.

    Raises:
        ImportError: without laplace-torch.
        ValueError: for an argument out of range; if the likelihood is not `Categorical` or `Gaussian`, the model
            holds several chains, or the samples are dropout masks.

    Source: Daxberger et al. 2021, "Laplace Redux"; Kristiadi et al. 2020.
    """
    check_count("num_draws", num_draws, optional=False)
    check_choice("hessian", hessian, ("kron", "full", "diag"))
    if prior_precision is not None:
        check_within("prior_precision", prior_precision, "(0, inf)")
    model = posterior._ready_model()
    if getattr(model, "num_chains", 1) > 1:
        raise ValueError("last_layer_laplace needs a model of one chain: open the samples by Posterior.load(path)")
    if not isinstance(model.likelihood, Categorical | Gaussian):
        raise ValueError(
            f"last_layer_laplace knows Categorical and Gaussian likelihoods, got {type(model.likelihood).__name__}"
        )
    into: AbstractContextManager[SampleStore] = nullcontext(MemoryStore())
    if path is not None:
        known = getattr(posterior.store, "model_description", None) or describe_model(model)[0]
        into = whole_store(Path(path), known, posterior.store.columns)
    network = collapse(copied(model)).eval()
    with into as store:
        store.columns = posterior.store.columns
        for sample in posterior:
            if MASK_SEED in sample.buffers:
                raise ValueError("last_layer_laplace needs optima, and these samples are dropout masks: omit MCDropout")
            with torch.no_grad():
                for name, tensor in network_state(network).items():
                    tensor.copy_(sample.state[name])
            fitted = _fit(network, loader, hessian, prior_precision)
            own = derive_seed(seed, "Laplace", sample.chain, sample.step)
            generator = torch.Generator(network.device).manual_seed(own)
            with torch.no_grad():
                drawn = fitted.sample(num_draws, generator=generator)
            for draw, vector in enumerate(drawn):
                store.append(replace(sample, parameters=sample.parameters | _named(fitted, vector), draw=draw))
    return Posterior(store, model)


def _fit(network: EnergyModel, loader: Any, hessian: Hessian, prior_precision: float | None) -> Any:
    try:
        import laplace
    except ImportError as error:
        raise ImportError("last_layer_laplace needs the package laplace-torch: pip install laplace-torch") from error
    likelihood = network.likelihood
    options: dict[str, Any] = {"prior_precision": prior_precision or 1.0}
    kind = "classification"
    if isinstance(likelihood, Gaussian):
        if likelihood.log_std.numel() > 1:
            raise ValueError(
                f"last_layer_laplace takes one noise for all targets, got Gaussian(std={likelihood.std}): pass a number"
            )
        kind, options["sigma_noise"] = "regression", float(likelihood.log_std.exp())
    fitted = laplace.Laplace(
        _Network(network), kind, subset_of_weights="last_layer", hessian_structure=hessian, **options
    )
    fitted.fit(loader)
    if prior_precision is None:
        fitted.optimize_prior_precision(method="marglik")
    return fitted


def _named(fitted: Any, vector: Tensor) -> dict[str, Tensor]:
    """Return a drawn vector as the parameters of the last layer, by their names in the model."""
    layer, name = fitted.model.last_layer, fitted.model._last_layer_name
    prefix, named, start = name.removeprefix("model.").removeprefix("model"), {}, 0
    for own, parameter in layer.named_parameters():
        part = vector[start : start + parameter.numel()].reshape(parameter.shape)
        named[f"{prefix}.{own}".removeprefix(".")] = part.detach().clone()
        start += parameter.numel()
    return named
