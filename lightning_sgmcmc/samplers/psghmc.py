"""Preconditioned stochastic gradient Hamiltonian Monte Carlo."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_positive, check_within
from lightning_sgmcmc.samplers.preconditioned import ALWAYS, Adapt, PreconditionedSampler


class pSGHMC(PreconditionedSampler):
    """SGHMC with a preconditioner from the averaged squared gradients, whose steps have Adam's scale.

        V ← α·V + (1-α)·g²,   V̂ = V/(1-α^k),   G = 1/(√V̂ + λ·rms(√V̂) + 1e-8),   the rms over each tensor
        v ← (1-η)·v - η·lr·κ·G⊙g + η·√(2·lr·τ·G/N)⊙ξ
        θ ← θ + v

    It is SGHMC with the step size η·lr·G of each coordinate, so a steady gradient moves a coordinate by about lr in
    each step, whatever its size, and one lr (0.01) suits most networks. The floor λ bounds the ratio of the
    step sizes within a tensor by (1+λ)/λ at the rms. The divergence of G is omitted, as in `pSGLD`; with
    `adapt="burn-in"` there is none while samples are drawn.

    Args:
        params: parameters or parameter groups.
        lr: step size for the mean potential in the preconditioner's metric.
        friction: η in (0, 1], one minus the momentum.
        alpha: decay α of the squared gradients' average, in [0, 1).
        floor: λ > 0, in units of the tensor's own rms.
        adapt: when G adapts: "always", "burn-in" or a number of steps, as in `pSGLD`.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`.

    Source: Chen et al. 2014, eq. (15), with a diagonal mass; Li et al. 2016; Wenzel et al. 2020 (How good is the Bayes
    posterior in deep neural networks really?, Algorithm 1), whose scale is one for each layer, here for each
    coordinate.
    """

    elementwise: ClassVar[bool] = True

    momentum_buffer: ClassVar[str] = "momentum_buffer"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        friction: float = 0.1,
        alpha: float = 0.999,
        floor: float = 0.1,
        adapt: Adapt = ALWAYS,
        **shared: Any,
    ) -> None:
        check_within("friction", friction, "(0, 1]")
        check_within("alpha", alpha, "[0, 1)")
        check_positive("floor", floor)
        super().__init__(params, lr, **shared)
        self._add_defaults(friction=friction, alpha=alpha, floor=floor)
        self._add_adaptation(adapt)

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        friction = group["friction"]
        squares = self._average_squares(group, params, grads, group["alpha"])
        inverse = self._inverse(group, squares, self._kept(params), params)  # 1/G

        momenta = self._buffers(params, self.momentum_buffer)
        torch._foreach_mul_(momenta, 1 - friction)
        factor = -friction * group["lr"] * group["gradient_multiplier"]
        self._add_quotients(momenta, grads, inverse, factor)
        if noise is not None:
            self._add_scaled_noise(momenta, noise, inverse, self._noise_variance(group, friction**2))
        torch._foreach_add_(params, momenta)

    def preconditioner(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        squares = self._buffers(params, "square_avg")
        inverse = self._inverse(
            self._group_of(params), squares, [torch.empty_like(square) for square in squares], params
        )
        return list(torch._foreach_reciprocal(inverse))

    def _inverse(
        self, group: dict[str, Any], squares: list[Tensor], out: list[Tensor], params: Sequence[Tensor]
    ) -> list[Tensor]:
        """Write √V̂ + λ·rms(√V̂) + 1e-8 of each tensor to `out`, the rms within each chain."""
        torch._foreach_copy_(out, squares)
        torch._foreach_div_(out, max(1 - group["alpha"] ** group["averaged"], 1e-12))
        self._root_with_floor(params, out, group["floor"])
        return out
