"""Preconditioned stochastic gradient Langevin dynamics."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_positive, check_within
from lightning_sgmcmc.samplers.preconditioned import ALWAYS, Adapt, PreconditionedSampler
from lightning_sgmcmc.tensors import square_root


class pSGLD(PreconditionedSampler):
    """SGLD with the RMSprop preconditioner.

        V ← α·V + (1-α)·g²,   G = 1/(λ + √V)
        θ ← θ - lr·κ·G⊙g + √(2·lr·τ·G/N)⊙ξ

    The divergence of G, Γ, is omitted, as in the paper's experiments, so the law is not exact while G adapts, however
    small lr is. Γ_i = -(1-α)·G_i²·g_i·H_ii/√V_i needs the diagonal of the batch's Hessian H, hence further backward
    passes, and is only the part of the present gradient: the average's memory adds more. `adapt="burn-in"` needs no Γ,
    since G is constant while samples are drawn. At τ = 0 with `adapt="always"` the rule is
    `torch.optim.RMSprop(lr, alpha, eps)`, bit for bit.

    Args:
        params: parameters or parameter groups.
        lr: step size for the mean potential; it multiplies the preconditioned gradient.
        alpha: decay α of the squared gradients' average, in [0, 1).
        eps: λ > 0, which bounds the preconditioner by 1/λ.
        adapt: when G adapts: "always", as in the paper; "burn-in", until a schedule's sampling stages, in which it is
            frozen; or a number of steps, after which it is frozen.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`.

    Source: Li et al. 2016, Algorithm 1.
    """

    elementwise: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        alpha: float = 0.99,
        eps: float = 1e-5,
        adapt: Adapt = ALWAYS,
        **shared: Any,
    ) -> None:
        check_within("alpha", alpha, "[0, 1)")
        check_positive("eps", eps)
        super().__init__(params, lr, **shared)
        self._add_defaults(alpha=alpha, eps=eps)
        self._add_adaptation(adapt)

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        lr = group["lr"]
        squares = self._average_squares(group, params, grads, group["alpha"])
        inverse = self._kept(params)
        torch._foreach_copy_(inverse, squares)
        torch._foreach_sqrt_(inverse)
        torch._foreach_add_(inverse, group["eps"])  # 1/G

        factor = -lr * group["gradient_multiplier"]
        self._add_quotients(params, grads, inverse, factor)
        if noise is not None:
            torch._foreach_sqrt_(inverse)
            scale = square_root(self._noise_variance(group))
            if isinstance(scale, Tensor):
                torch._foreach_div_(noise, inverse)
                self._add(params, noise, scale)
            else:
                torch._foreach_addcdiv_(params, noise, inverse, scale)

    def preconditioner(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        inverse = torch._foreach_sqrt(self._buffers(params, "square_avg"))
        torch._foreach_add_(inverse, self._group_of(params)["eps"])
        return list(torch._foreach_reciprocal(inverse))
