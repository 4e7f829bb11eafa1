"""What samplers with a preconditioner share: the average of squared gradients, and when it adapts."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.samplers.base import Sampler
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.tensors import Control, along_first_axis, as_rows, square_root

ALWAYS, BURN_IN = "always", "burn-in"
Adapt = str | int
"""When a preconditioner adapts: in all steps, until a schedule's sampling stage, or in its first steps."""


class PreconditionedSampler(Sampler):
    """Base of the samplers with a diagonal preconditioner G, which is estimated from gradients.

    `adapt` says when. With "always" G changes in every step, so the law of the chain is that of a dynamics without its
    divergence Γ. With "burn-in" G is constant while a schedule's stage is that of sampling; the chain is then a sampler
    with a constant G, for which Γ = 0. A number of steps holds without a schedule too.
    """

    averages: ClassVar[tuple[str, ...]] = ("square_avg",)
    """Names of the state tensors besides the momentum, one for each parameter and in its shape."""

    def _add_adaptation(self, adapt: Adapt) -> None:
        """Check `adapt`, and add it to the groups.

        Raises:
            ValueError: unless it is "always", "burn-in" or a whole number ≥ 1.
        """
        if isinstance(adapt, str) and adapt not in (ALWAYS, BURN_IN):
            raise ValueError(f"adapt must be {ALWAYS!r}, {BURN_IN!r} or a number of steps, got {adapt!r}")
        if not isinstance(adapt, str):
            check_count("adapt", adapt, optional=False)
        self._add_defaults(adapt=adapt, adapting=True, averaged=0)

    def set_adapting(self, adapting: bool) -> None:
        """Let the preconditioner adapt, or freeze it; no effect with `adapt="always"`.

        A schedule calls it before each step, with False in its sampling stages; a loop of your own calls it once.

        Args:
            adapting: whether the coming steps may change the preconditioner.
        """
        for group in self.param_groups:
            group["adapting"] = adapting

    @property
    def needs_burn_in(self) -> bool:
        """Whether the preconditioner is frozen in sampling stages, and has not been estimated yet."""
        return any(g.get("adapt", ALWAYS) != ALWAYS and not g["averaged"] for g in self.param_groups)

    @property
    def always_adapts(self) -> bool:
        """Whether the preconditioner also adapts in sampling stages."""
        return any(group.get("adapt", ALWAYS) == ALWAYS for group in self.param_groups)

    @property
    def is_frozen(self) -> bool:
        """Whether no parameter group's preconditioner changes in the coming step."""
        return not any(map(self._adapts, self.param_groups))

    @staticmethod
    def _adapts(group: dict[str, Any]) -> bool:
        """Return whether a group's preconditioner changes in the coming step; the first step always estimates it."""
        adapt = group.get("adapt", ALWAYS)  # a checkpoint of version 0.1.0 has none
        if adapt == ALWAYS or not group["averaged"]:
            return True
        return bool(group["adapting"]) and (isinstance(adapt, str) or group["averaged"] < adapt)

    def plain_law(self, group: dict[str, Any]) -> StepLaw | None:
        return None  # `law` is in the preconditioner's metric

    def _group_of(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """Return the parameter group that has the first of `params`."""
        return next(group for group in self.param_groups if any(p is params[0] for p in group["params"]))

    def _average_squares(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], decay: float
    ) -> list[Tensor]:
        """Return V ← decay·V + (1-decay)·g², or V as it is where the preconditioner is frozen."""
        squares = self._buffers(params, "square_avg")
        if self._adapts(group):
            group["averaged"] = group.get("averaged", 0) + 1
            torch._foreach_mul_(squares, decay)
            torch._foreach_addcmul_(squares, grads, grads, 1 - decay)
        return squares

    def _add_quotients(
        self, targets: list[Tensor], sources: list[Tensor], divisors: list[Tensor], factor: Control
    ) -> None:
        """Add factor·sources/divisors to targets in place; the factor is one number, or one for each chain."""
        if isinstance(factor, Tensor):
            self._add(targets, list(torch._foreach_div(sources, divisors)), factor)
        else:
            torch._foreach_addcdiv_(targets, sources, divisors, factor)

    def _add_scaled_noise(
        self, targets: list[Tensor], noise: list[Tensor], inverse: list[Tensor], variance: Control
    ) -> None:
        """Add noise of variance·G to targets in place, from 1/G; `noise` and `inverse` are overwritten."""
        torch._foreach_sqrt_(inverse)
        torch._foreach_div_(noise, inverse)
        self._add(targets, noise, square_root(variance))

    def _kept(self, params: list[Tensor]) -> list[Tensor]:
        """Return scratch tensors in the parameters' shapes, reused at every step and not part of the state."""
        scratch: dict[Tensor, Tensor] = self.__dict__.setdefault("_scratch", {})
        for p in params:
            if p not in scratch:
                scratch[p] = torch.empty_like(p)
        return [scratch[p] for p in params]

    def _root_with_floor(self, params: Sequence[Tensor], out: list[Tensor], floor: float, least: float = 1e-8) -> None:
        """Replace V̂ by √V̂ + floor·rms(√V̂) + least, the rms over each tensor within each chain.

        Args:
            params: the parameters.
            out: V̂ of each, changed in place.
            floor: λ.
            least: smallest value.
        """
        flat = self._flat_group(params)
        if flat is not None and out[0].device.type != "cpu":
            floors = flat.means(out[0]).sqrt_().mul_(floor).add_(least)
            out[0].sqrt_().add_(flat.spread(floors))
            return
        each = self._each(params, out)
        means = torch.stack([as_rows(tensor, self.num_chains).mean(1) for tensor in each])
        floors = means.sqrt_().mul_(floor).add_(least)
        torch._foreach_sqrt_(out)
        for tensor, own in zip(each, floors, strict=True):
            tensor.add_(along_first_axis(own, tensor.dim()) if self.num_chains > 1 else own[0])
