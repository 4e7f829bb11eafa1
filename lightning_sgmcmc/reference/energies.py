"""The potential energy of a module over all data, and its gradient, at rows of sampled parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.stateless import StatelessCall
from lightning_sgmcmc.model import EnergyModel, check_shape, named_trainable, of_prior, overrides
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.priors.held import Entries, held_rows, sampled_columns, with_row, without_row
from lightning_sgmcmc.priors.state import prior_state
from lightning_sgmcmc.samplers.flat import FlatParameters
from lightning_sgmcmc.tensors import widest, widest_dtype

PROBES = 32
"""Data whose log-likelihoods are traced, for R-hat and effective sample sizes of what the network predicts."""


class FullEnergy:
    """U/τ over all data and its gradient, computed in pieces, whose memory does not grow with the data.

        U(θ) = -Σ_i log p(y_i|x_i,θ) - log p(θ)

    Energies are added up in double precision. The scales of a `HierarchicalPrior` are integrated out. Chains are
    computed one after another, each bit for bit as alone, or all at once by `torch.vmap`.

    Args:
        model: the model of one chain, in evaluation mode; its sampled parameters become views of one tensor.
        batches: all data, on the model's device.
        temperature: τ.
        vmapped: whether chains are computed at once.

    Attributes:
        names: the sampled parameters, in the order of the columns, which are those of their sampled entries.
        gradients: gradients of one chain over all data so far.

    Raises:
        ValueError: if the model defines its own `log_prior` beside a `HierarchicalPrior`.
    """

    def __init__(
        self, model: EnergyModel, batches: Sequence[Any], temperature: float = 1.0, vmapped: bool = False
    ) -> None:
        named = named_trainable(model)
        self.names = list(named)
        self.gradients = 0
        self.temperature = temperature
        self._model = model
        self._batches = batches
        self._vmapped = vmapped
        self._held = held_rows(model)
        self._columns = sampled_columns(named, self._held)
        """The stretches of columns of all parameters that are sampled; the rest is a held row."""
        self._shapes = [without_row(t, self._held[n]).shape if n in self._held else t.shape for n, t in named.items()]
        self._flat = FlatParameters([list(named.values())], 1)
        self._likelihood = StatelessCall(model, type(model).log_likelihood)
        self._has_own_prior = overrides(model, "log_prior")
        if self._has_own_prior and isinstance(model.prior, HierarchicalPrior):
            raise ValueError(
                f"{type(model).__name__} defines log_prior, so the scales of its HierarchicalPrior cannot be "
                "integrated out: pass another prior"
            )

    @property
    def present(self) -> Tensor:
        """The model's own sampled parameters as a row, shape (P,)."""
        return self._of_columns(self._flat.values[0])

    def _of_columns(self, everything: Tensor) -> Tensor:
        """Return a copy of the sampled columns, shape (P,), of those of all parameters."""
        return torch.cat([everything[part] for part in self._columns])

    def put(self, row: Tensor) -> None:
        """Set the model's sampled parameters, shape (P,)."""
        with torch.no_grad():
            values = self._flat.values[0]
            pieces = row.split([part.stop - part.start for part in self._columns])
            for part, piece in zip(self._columns, pieces, strict=True):
                values[part].copy_(piece)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return U/τ, shape (n,), float64, and its gradient, shape (n, P), at parameters of shape (n, P)."""
        self.gradients += len(rows)
        with torch.enable_grad():
            if self._vmapped:
                return self._together(rows)
            found = [self._alone(row) for row in rows]
        energies, gradients = zip(*found, strict=True)
        return torch.stack(energies), torch.stack(gradients)

    def log_likelihoods(self, rows: Tensor) -> Tensor:
        """Return log p(y|x,θ) of up to `PROBES` data, evenly spread over the first piece, shape (n, M)."""
        found = []
        with torch.no_grad():
            for row in rows:
                self.put(row)
                each = self._model.log_likelihood(self._batches[0])
                found.append(each[torch.linspace(0, len(each) - 1, min(PROBES, len(each))).round().long()])
        return widest(torch.stack(found))

    def sampled(self, values: Tensor) -> dict[str, Tensor]:
        """Return rows, shape (n, P), by the parameters' names, each of shape (n, …) without its held row."""
        columns = values.split([shape.numel() for shape in self._shapes], 1)
        pieces = [column.reshape(-1, *shape) for column, shape in zip(columns, self._shapes, strict=True)]
        return dict(zip(self.names, pieces, strict=True))

    # -- one chain after another --------------------------------------------------------------------------------------

    def _alone(self, row: Tensor) -> tuple[Tensor, Tensor]:
        self.put(row)
        self._flat.gradients.zero_()
        self._flat.attach_gradients()
        total = row.new_zeros((), dtype=widest_dtype(row.device))
        for batch in self._batches:
            each = self._model.log_likelihood(batch)
            check_shape(each)
            total += self._backward(each.sum(dtype=widest_dtype(each.device)))
        total += self._backward(widest(self._log_prior()))
        return total, self._of_columns(self._flat.gradients[0])

    def _backward(self, log_density: Tensor) -> Tensor:
        part = log_density / -self.temperature
        if part.requires_grad:  # a flat prior is a constant
            part.sum().backward()
        return part.detach()

    def _log_prior(self) -> Tensor:
        model = self._model
        if self._has_own_prior:
            return model.log_prior()
        named = of_prior(model)
        if isinstance(model.prior, HierarchicalPrior):
            return model.prior.log_marginal(named)
        return model.prior.log_prob(named)

    # -- all at once --------------------------------------------------------------------------------------------------

    def _together(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        leaf = rows.detach().requires_grad_()
        total = rows.new_zeros(len(rows), dtype=widest_dtype(rows.device))
        over_chains = torch.vmap(self._likelihood.call, in_dims=(0, None))
        for batch in self._batches:
            try:
                each = over_chains(self._complete(self.sampled(leaf)), batch)
            except RuntimeError as error:
                raise RuntimeError(
                    f"torch.vmap cannot run the network for all chains at once ({str(error).splitlines()[0]}): pass "
                    "chain_execution='loop' to the module, which runs one chain after another"
                ) from error
            check_shape(each, chains=True)
            total += self._backward(each.sum(1, dtype=widest_dtype(each.device)))
        total += self._backward(widest(self._log_priors(self.sampled(leaf))))
        assert leaf.grad is not None
        return total, leaf.grad

    def _complete(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return sampled entries by name, each of shape (n, …), with the held rows, which are the model's."""
        own, found = named_trainable(self._model) if self._held else {}, dict(named)
        for name, row in self._held.items():
            value = own[name].detach()[row]
            found[name] = with_row(named[name], row, value.expand(len(named[name]), *value.shape), 1)
        return found

    def _log_priors(self, named: dict[str, Tensor]) -> Tensor:
        model = self._model
        if self._has_own_prior:
            found: Tensor = torch.vmap(StatelessCall(model, type(model).log_prior).call)(self._complete(named))
            return found
        count = len(next(iter(named.values())))
        state = {name: tensor.expand(count, *tensor.shape) for name, tensor in prior_state(model).items()}
        entries = Entries({**named, **state}, self._held)
        if isinstance(model.prior, HierarchicalPrior):
            return model.prior.log_marginal(entries, chains=True)
        return model.prior.log_prob_of_chains(entries)
