"""log p(y|x,θ) and log p(θ) of a model as functions of its tensors, for one chain or all at once."""

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains.execution import StatelessCall
from lightning_sgmcmc.chains.together import has_norms, norms_for
from lightning_sgmcmc.model import EnergyModel, named_trainable, overrides
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.priors.state import held_rows, without_held

State = Mapping[str, Tensor]


class Densities:
    """log p(y|x,θ) and log p(θ) of a model as functions of tensors by name.

    A `log_prior` of the user's own is a function of all tensors, and a `Prior` of its entries: the sampled parameters
    without held rows, and the tensors of the prior. With `marginal` a `HierarchicalPrior`'s scales are integrated out.
    """

    def __init__(self, model: EnergyModel, marginal: bool = False) -> None:
        self._model = model
        self._prior = model.prior
        self._likelihood = StatelessCall(model, type(model).log_likelihood)
        self._own_prior = StatelessCall(model, type(model).log_prior)
        self._has_norms = has_norms(model)
        self._marginal = model.prior if marginal and isinstance(model.prior, HierarchicalPrior) else None
        self.has_own_prior = overrides(model, "log_prior")
        """Whether log p(θ) is a method of the user's and not the prior's."""
        self._sampled = frozenset(named_trainable(model))
        self.held = held_rows(model)
        """The row of each parameter that is not sampled."""

    def log_likelihood(self, state: State, batch: Any) -> Tensor:
        """Return log p(y|x,θ) of each datum at a state, shape (n,)."""
        each: Tensor = self._likelihood.call(state, batch)
        return each

    def log_likelihoods(
        self, stacked: State, batch: Any, batch_axis: int | None = None, randomness: str = "different"
    ) -> Tensor:
        """Return log p(y|x,θ) of each datum at C states, shape (C, n); `batch_axis` is that of the states, if any."""
        over_chains = torch.vmap(self._likelihood.call, in_dims=(0, batch_axis), randomness=randomness)
        with norms_for(self._has_norms):
            each: Tensor = over_chains(stacked, batch)
        return each

    def log_prior(self, state: State) -> Tensor:
        """Return log p(θ) at a state, shape ()."""
        if not torch.is_grad_enabled():  # the prior is that of the tensors that require gradients
            state = {name: t.detach().requires_grad_() if name in self._sampled else t for name, t in state.items()}
        found: Tensor = self._own_prior.call(state)
        return found

    def log_priors(self, stacked: State, entries: State) -> Tensor:
        """Return log p(θ) at C states, shape (C,); `entries` are what a prior is a function of."""
        if self.has_own_prior:  # in torch.vmap no tensor requires gradients, and user's code can differentiate none
            chains = zip(*(tensor.unbind(0) for tensor in stacked.values()), strict=True)
            return torch.stack([self.log_prior(dict(zip(stacked, own, strict=True))) for own in chains])
        return self._of_entries(entries, True)

    def present_log_prior(self, sampled: State) -> Tensor:
        """Return log p(θ) at the state that the model holds, shape (); `sampled` are its entries with held rows."""
        if self.has_own_prior:
            return self._model.log_prior()
        return self._of_entries(without_held(sampled, self.held), False)

    def _of_entries(self, entries: State, chains: bool) -> Tensor:
        if self._marginal is not None:
            return self._marginal.log_marginal(entries, chains=chains)
        return self._prior.log_prob_of_chains(entries) if chains else self._prior.log_prob(entries)


def weighed(each: Tensor, factor: Tensor | float | None) -> Tensor:
    """Return the log-likelihood's part of -Ũ/N: the mean of log p(y|x,θ), or the sum times a factor, or the sum with a
    weight of each datum, shape (n,)."""
    if isinstance(factor, Tensor) and factor.dim() == 1:
        return (each * factor).sum(-1)
    return each.mean(-1) if factor is None else each.sum(-1) * factor


def vmap_refusal(error: RuntimeError, model: nn.Module) -> Exception:
    """Return an error that names the layer that `torch.vmap` cannot run; the error itself for another cause."""
    if "out of memory" in str(error) or type(error).__name__ in ("BackendCompilerFailed", "InductorError"):
        return error
    names = {id(part): f"'{name}' ({type(part).__name__})" for name, part in model.named_modules() if name}
    layer = "a layer"
    for frame, _ in traceback.walk_tb(error.__traceback__):  # the innermost one
        layer = names.get(id(frame.f_locals.get("self")), layer)
    return RuntimeError(
        f"torch.vmap cannot run {layer} for all chains at once ({str(error).splitlines()[0]}): pass "
        "chain_execution='loop' to the module, which runs one chain after another"
    )
