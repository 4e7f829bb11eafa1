"""A look at a fit's first batches, for mistakes that the energy does not show."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sgmcmc import likelihoods
from lightning_sgmcmc.batches.language import fault_of_tokens
from lightning_sgmcmc.batches.per_chain import ChainBatches
from lightning_sgmcmc.chains.stacked import StackedChains
from lightning_sgmcmc.chains.stateless import evaluation_mode, undisturbed_generators
from lightning_sgmcmc.model import EnergyModel, check_shape, overrides

LAST = 64
"""The last batch that is looked at; the others are the first, the second, the fourth, and so on."""
MOST_TARGETS = 100_000
"""Numbers of a batch's targets above which they are not kept."""
SIGN_LOOKS = 3
"""Looks at log_likelihood's sign."""


class FirstBatches:
    """Looks at the batches 1, 2, 4, …, 64 of a fit: seven synchronizations with the device, and none later.

    It checks the targets and outputs by the likelihood and the sign of a log-likelihood of the user's own, and counts
    the data of the first batch.

    Args:
        model: the model.
        chains: its stacked tensors; None for a single unstacked chain.
    """

    def __init__(self, model: EnergyModel, chains: StackedChains | None) -> None:
        self._model = model
        self._chains = chains
        self._seen = 0
        self.counted: int | None = None
        """Data that the likelihood counts in the first batch."""
        self.has_missing = False
        """Whether a target of the batches looked at is not observed."""
        self._outputs = (math.inf, -math.inf)
        self._own_density: tuple[float, float, int] | None = (math.inf, -math.inf, 0) if _is_own(model) else None
        self.targets: list[Tensor] = []
        """The targets of the batches looked at, on the CPU; none if the likelihood does not see them."""

    def takes(self, batch: Any) -> bool:
        """Return whether this batch is looked at; if so, check it before its energy is computed.

        Raises:
            ValueError: if its targets or outputs do not suit the likelihood.
        """
        if self._seen >= LAST:
            return False
        self._seen += 1
        if self._seen & (self._seen - 1):
            return False
        low, high, target = _look(self._model, self._chains, batch)
        if self._seen == 1:
            _check_observed(self._model, target)
            self.counted = _count(self._model, self._chains, batch)
        observed = None if self._model.likelihood is None or target is None else self._model.likelihood.observed(target)
        self.has_missing |= observed is not None and not bool(observed.all())
        if isinstance(target, Tensor) and target.numel() <= MOST_TARGETS:
            self.targets.append(target.detach().cpu())
        self._outputs = (min(low, self._outputs[0]), max(high, self._outputs[1]))
        if self._seen == LAST and self._model.likelihood is not None:
            doubt = self._model.likelihood.doubt(*self._outputs)
            if doubt is not None:
                rank_zero_warn(f"In the first {LAST} batches {doubt}.")
        return True

    def after(self, log_likelihood: Tensor) -> None:
        """Check the sign of a batch's log-likelihood.

        Args:
            log_likelihood: log p(y|x,θ) of each datum, of one or more chains, shape (…, n).
        """
        if self._own_density is not None and log_likelihood.numel() > 0:
            self._check_sign(self._own_density, log_likelihood.detach())

    def _check_sign(self, before: tuple[float, float, int], log_likelihood: Tensor) -> None:
        low, high = min(before[0], log_likelihood.min().item()), max(before[1], log_likelihood.max().item())
        looks = before[2] + 1
        if low <= 0 or looks == SIGN_LOOKS:
            self._own_density = None
        else:
            self._own_density = (low, high, looks)
        if low > 0 and looks == SIGN_LOOKS:
            rank_zero_warn(
                f"log_likelihood returned {low:.3g} to {high:.3g} for the first batches, all above 0, whereas the log "
                "of a probability is at most 0: if it is a loss, return its negative (only the log of a density may "
                "be above 0)."
            )


def check_batch(model: EnergyModel, chains: StackedChains | None, batch: Any) -> tuple[float, float]:
    """Check a batch's targets and outputs by the model's likelihood, in evaluation mode and for the first chain.

    Args:
        model: the model.
        chains: its stacked tensors; None for a single unstacked chain.
        batch: one batch, or a `ChainBatches`.

    Returns:
        the smallest and the largest output, (inf, -inf) if the likelihood does not see the outputs.

    Raises:
        ValueError: by `Likelihood.check_target`.
    """
    low, high, _ = _look(model, chains, batch)
    return low, high


def _look(model: EnergyModel, chains: StackedChains | None, batch: Any) -> tuple[float, float, Tensor | None]:
    """Check a batch; return its smallest and largest output and its targets."""
    if model.likelihood is None or overrides(model, "log_likelihood"):
        return math.inf, -math.inf, None
    first = batch[0] if isinstance(batch, ChainBatches) else batch
    at_first = chains.at(0) if chains is not None else nullcontext()
    with torch.no_grad(), undisturbed_generators(model), evaluation_mode(model), at_first:
        _check_tokens(model, first)
        output, target = model.output_and_target(first)
        model.likelihood.check_target(output, target)  # which may use parameters of the likelihood
    if not isinstance(output, Tensor) or output.numel() == 0:
        return math.inf, -math.inf, target
    low, high = torch.stack(output.aminmax()).tolist()
    return low, high, target


def _count(model: EnergyModel, chains: StackedChains | None, batch: Any) -> int:
    """Return the number of data that the likelihood counts in a batch, for the first chain in evaluation mode."""
    first = batch[0] if isinstance(batch, ChainBatches) else batch
    at_first = chains.at(0) if chains is not None else nullcontext()
    with torch.no_grad(), undisturbed_generators(model), evaluation_mode(model), at_first:
        each = model.log_likelihood(first)
    check_shape(each)
    return len(each)


def _check_observed(model: EnergyModel, target: Any) -> None:
    """Raise ValueError if no target of the training data is observed, as far as they lie in memory.

    Args:
        model: the model.
        target: of the first batch; only if it has none the others are looked at.
    """
    dataset = getattr(getattr(getattr(model, "_trainer", None), "train_dataloader", None), "dataset", None)
    if model.likelihood is None or dataset is None:
        return
    for some in (target, (getattr(dataset, "tensors", None) or [None])[-1]):
        known = model.likelihood.observed(some) if isinstance(some, Tensor) and len(some) else None
        if known is None or bool(known.any()):
            return
    raise ValueError(
        f"{type(model.likelihood).__name__}: targets must be finite numbers or labels, and all {len(dataset)} of the "
        "training data are NaN or missing, so nothing would be learned: correct the targets"
    )


def _check_tokens(model: EnergyModel, batch: Any) -> None:
    """Raise if the targets of a causal language model are not the next tokens; warn of another network's."""
    likelihood = model.likelihood
    if not isinstance(likelihood, likelihoods.TokenCategorical) or overrides(model, "output_and_target"):
        return
    inputs, labels = model.inputs_and_target(batch)
    fault = fault_of_tokens(inputs, labels, likelihood.ignore_index, model.takes_next_tokens(batch))
    if fault is not None and model.accepted_arguments.shifts_labels:
        raise ValueError(f"TokenCategorical: {fault}")
    if fault is not None:
        rank_zero_warn(f"TokenCategorical: {fault}.")


def _is_own(model: EnergyModel) -> bool:
    """Return whether the log-likelihood is the user's and not the library's."""
    if model.likelihood is None or overrides(model, "log_likelihood"):
        return True
    return not type(model.likelihood).log_prob.__module__.startswith(f"{likelihoods.__name__}.")
