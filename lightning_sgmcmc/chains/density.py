"""The densities of a model, log p(y|x,θ) and log p(θ), at other tensors than its own: of one state, or of several."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains.execution import StatelessCall
from lightning_sgmcmc.model import EnergyModel, overrides
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.priors.held import held_rows, without_held

State = Mapping[str, Tensor]


class Densities:
    """log p(y|x,θ) and log p(θ) of a model as functions of tensors by name.

    They are those of one state θ, of C states along a leading axis, computed at once by `torch.vmap` and equal up to
    rounding, or of the state that the model holds. A `log_prior` of the user's own is a function of all tensors, and a
    `Prior` of its entries: the sampled parameters without held rows, and the tensors of the prior.

    Args:
        marginal: whether the scales of a `HierarchicalPrior` are integrated out.
    """

    def __init__(self, model: EnergyModel, marginal: bool = False) -> None:
        self._model = model
        self._prior = model.prior
        self._likelihood = StatelessCall(model, type(model).log_likelihood)
        self._own_prior = StatelessCall(model, type(model).log_prior)
        self._marginal = model.prior if marginal and isinstance(model.prior, HierarchicalPrior) else None
        self.has_own_prior = overrides(model, "log_prior")
        """Whether log p(θ) is a method of the user's and not the prior's."""
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
        each: Tensor = over_chains(stacked, batch)
        return each

    def log_prior(self, state: State) -> Tensor:
        """Return log p(θ) at a state, shape (); those of its tensors are sampled that require gradients."""
        found: Tensor = self._own_prior.call(state)
        return found

    def log_priors(self, stacked: State, entries: State) -> Tensor:
        """Return log p(θ) at C states, shape (C,); `entries` are what a prior is a function of."""
        if self.has_own_prior:
            found: Tensor = torch.vmap(self._own_prior.call)(stacked)
            return found
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


def vmap_refusal(error: RuntimeError, model: nn.Module) -> Exception:
    """Return an error that names the layer that `torch.vmap` cannot run; the error itself for another cause."""
    if "out of memory" in str(error) or type(error).__name__ in ("BackendCompilerFailed", "InductorError"):
        return error
    layer, reason = _layer_at_fault(error, model), str(error).splitlines()[0]
    return RuntimeError(
        f"torch.vmap cannot run {layer} for all chains at once ({reason}): pass "
        "chain_execution='loop' to the module, which runs one chain after another"
    )


def _layer_at_fault(error: BaseException, module: nn.Module) -> str:
    """Return the innermost layer of a module that raised an error."""
    names = {id(part): f"'{name}' ({type(part).__name__})" for name, part in module.named_modules() if name}
    found, trace = "a layer", error.__traceback__
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found
