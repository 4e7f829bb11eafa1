"""SGLD with Adam's preconditioner and averaged gradient, frozen after burn-in."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_positive, check_within
from lightning_sgmcmc.samplers.preconditioned import BURN_IN, Adapt, PreconditionedSampler


class AdamSGLD(PreconditionedSampler):
    """SGLD with the step of Adam: its averaged gradient, and its preconditioner, which is frozen after burn-in.

        M ← β₁·M + (1-β₁)·κ·g
        V ← β₂·V + (1-β₂)·g²   in the k-th step that adapts,   G = 1/(√(V/(1-β₂^k)) + λ)
        θ ← θ - lr·G⊙M/(1-β₁^t) + √(2·lr·τ·G/N)⊙ξ   in step t

    While samples are drawn G is constant, so its divergence Γ is 0 and the stationary law is exp(-U/τ) up to a bias of
    order lr/(1-β₁). The averaged gradient keeps the temperature: its gain is one. The adaptive drift g + a·M/√V of Kim
    et al. has a gain of 1 + a/√V with the noise of g alone, so it samples at a lower temperature, another in each
    coordinate; it is not offered. At τ = 0, while G adapts, the rule is `torch.optim.Adam(lr, betas, eps)`, bit for
    bit.

    Args:
        params: parameters or parameter groups.
        lr: step size for the mean potential; it multiplies the preconditioned gradient.
        betas: decays β₁ of the averaged gradient and β₂ of the averaged squares, each in [0, 1).
        eps: λ > 0, which bounds the preconditioner by 1/λ.
        adapt: when G adapts: "burn-in", until a schedule's sampling stages, and again in the exploration stage of each
            cycle; a number of steps, after which it is frozen in any case; or "always", whose law is not exact, as in
            `pSGLD`. A loop without a schedule passes a number, or calls `set_adapting(False)`.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`; at the start of a fit whose schedule has no burn-in.

    Source: Li et al. 2016, Algorithm 1, with the averages of Kingma & Ba 2015; Kim, Song & Liang 2022 (Stochastic
    gradient Langevin dynamics with adaptive drifts) for the other use of them.
    """

    elementwise: ClassVar[bool] = True
    averages: ClassVar[tuple[str, ...]] = ("square_avg", "grad_avg")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adapt: Adapt = BURN_IN,
        **shared: Any,
    ) -> None:
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, got {betas!r}")
        for index, beta in enumerate(betas):
            check_within(f"betas[{index}]", beta, "[0, 1)")
        check_positive("eps", eps)
        super().__init__(params, lr, **shared)
        self._add_defaults(betas=tuple(betas), eps=eps, updates=0)
        self._add_adaptation(adapt)

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        decay, multiplier = group["betas"][0], group["gradient_multiplier"]
        group["updates"] += 1
        squares = self._average_squares(group, params, grads, group["betas"][1])
        means = self._buffers(params, "grad_avg")
        if isinstance(multiplier, Tensor) or multiplier != 1:
            torch._foreach_mul_(means, decay)
            self._add(means, grads, (1 - decay) * multiplier)
        else:
            torch._foreach_lerp_(means, grads, 1 - decay)
        inverse = self._inverse(group, squares, self._kept(params))  # 1/G

        factor = -(group["lr"] / (1 - decay ** group["updates"]))
        self._add_quotients(params, means, inverse, factor)
        if noise is not None:
            self._add_scaled_noise(params, noise, inverse, self._noise_variance(group))

    def preconditioner(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        squares = self._buffers(params, "square_avg")
        inverse = self._inverse(self._group_of(params), squares, [torch.empty_like(square) for square in squares])
        return list(torch._foreach_reciprocal(inverse))

    @staticmethod
    def _inverse(group: dict[str, Any], squares: list[Tensor], out: list[Tensor]) -> list[Tensor]:
        """Write √V̂ + λ to `out`."""
        torch._foreach_copy_(out, squares)
        torch._foreach_sqrt_(out)
        torch._foreach_div_(out, max(1 - group["betas"][1] ** group["averaged"], 1e-12) ** 0.5)
        torch._foreach_add_(out, group["eps"])
        return out
