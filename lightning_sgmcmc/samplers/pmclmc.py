"""Preconditioned microcanonical Langevin dynamics."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_positive, check_within
from lightning_sgmcmc.samplers.mclmc import MCLMC
from lightning_sgmcmc.samplers.preconditioned import BURN_IN, Adapt, PreconditionedSampler
from lightning_sgmcmc.tensors import Control, for_each_tensor

TINY = 1e-30
"""Added to both parts of the scale, which is 1 where all gradients were 0."""


class pMCLMC(MCLMC, PreconditionedSampler):
    """MCLMC in scaled coordinates, in which the gradients are alike; the scale is frozen after burn-in.

        V ← α·V + (1-α)·g²   in the k-th step that adapts,   V̂ = V/(1-α^k),   ρ² = the mean of V̂ over all coordinates
        S = (√V̂ + λ·ρ)/((1+λ)·ρ)
        (S⊙θ, r) ← the step of `MCLMC` with the gradient g/S

    While samples are drawn S is constant: the chain is MCLMC in the coordinates S⊙θ, its law is that of MCLMC there,
    and the momenta have the same sphere. Where S is 1 the steps are MCLMC's, bit for bit.

    Mini-batch noise of one size in all directions leaves MCLMC's law as it is, and other noise biases it; with noise
    that is independent between coordinates, √V̂ is its size, and the scaled noise is isotropic. With the full gradient
    of a Gaussian with independent coordinates, V̂ is proportional to the curvature, and the scaled target is isotropic.
    The floor λ bounds the ratio of scales by (1+λ)/λ, since a weight without data has small gradients, but the width of
    its prior. `lr` is MCLMC's where all scales are 1; the mean of S² is about 1, so one sharp direction among many does
    not bound lr.

    Choose it for layers of very different scales, or for mini-batches. As MCLMC it makes no step at temperature 0, so
    the burn-in, in which the scale is estimated, is at the target's temperature: `WarmStart`, then
    `SamplingSchedule(burn_in_steps=…)`.

    Args:
        params: parameters or parameter groups, each with at least two coordinates; each group has its own ρ.
        lr: time step h.
        friction: γ > 0, per unit of time.
        alpha: decay α of the squared gradients' average, in [0, 1).
        floor: λ > 0, in units of ρ.
        adapt: when S adapts: "burn-in", until a schedule's sampling stages; a number of steps, after which it is frozen
            in any case; or "always", whose law is not exact. A loop without a schedule passes a number, or calls
            `set_adapting(False)`.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `MCLMC`; at the start of a fit whose schedule has no burn-in.

    Source: Sommer et al. 2026 (SMILE), pSMILE, whose scale is the standard deviation of the gradient noise; here it is
    the root mean square of the gradient, which also has the full gradient's fluctuation.
    """

    elementwise: ClassVar[bool] = True
    averages: ClassVar[tuple[str, ...]] = ("square_avg", "scale")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        friction: float = 1.0,
        alpha: float = 0.999,
        floor: float = 0.1,
        adapt: Adapt = BURN_IN,
        **shared: Any,
    ) -> None:
        check_within("alpha", alpha, "[0, 1)")
        check_positive("floor", floor)
        super().__init__(params, lr, friction=friction, **shared)
        self._add_defaults(alpha=alpha, floor=floor)
        self._add_adaptation(adapt)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["scale"] = torch.ones_like(p)

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        if self._adapts(group):
            self._estimate(group, params, grads)
        super().update(group, params, grads, noise)

    def _estimate(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Update V, and S from it."""
        squares = self._average_squares(group, params, grads, group["alpha"])
        scales, floor = self._buffers(params, "scale"), group["floor"]
        torch._foreach_copy_(scales, squares)
        torch._foreach_div_(scales, 1 - group["alpha"] ** group["averaged"])
        torch._foreach_sqrt_(scales)
        size = (self._inner(params, scales, scales) / self._coordinates(params)).sqrt()
        torch._foreach_add_(scales, for_each_tensor(floor * size + TINY, scales))
        torch._foreach_div_(scales, for_each_tensor((1 + floor) * size + TINY, scales))

    def _forces(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        return self._scaled(params, grads)

    def _move(self, params: list[Tensor], momenta: list[Tensor], time: Control) -> None:
        self._add(params, self._scaled(params, momenta), time)

    def _scaled(self, params: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """Return tensors over S, in memory that the next call overwrites."""
        scaled = self._kept(params)
        torch._foreach_copy_(scaled, tensors)
        torch._foreach_div_(scaled, self._buffers(params, "scale"))
        return scaled

    def preconditioner(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        return [scale.square().reciprocal() for scale in self._buffers(params, "scale")]
