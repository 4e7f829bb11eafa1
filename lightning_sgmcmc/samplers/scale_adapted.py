"""Scale-adapted stochastic gradient Hamiltonian Monte Carlo."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_flag, check_number, check_within
from lightning_sgmcmc.samplers.preconditioned import BURN_IN, Adapt, PreconditionedSampler


class ScaleAdaptedSGHMC(PreconditionedSampler):
    """SGHMC with a mass for each coordinate, which is estimated in burn-in and then frozen.

        v ← (1-η)·v - lr·κ·G⊙g + √(2·η·lr·τ·G/N - B)⊙ξ,   G = 1/(√V̂ + λ·rms(√V̂) + 1e-8)
        θ ← θ + v
        w = 1/(1+h),   ḡ ← ḡ + w·(g-ḡ),   V̂ ← V̂ + w·(g²-V̂),   h ← 1 + h·(1-ḡ²/V̂)   before them, in burn-in

    The rms is over each tensor. Each coordinate averages over its own window, about h steps: long where the gradient
    is noise, short where it has a direction, so a transient is forgotten soon. While samples are drawn G is constant:
    the chain is SGHMC with the step size lr·G in each coordinate, its divergence Γ is 0, and its law is exp(-U/τ) up to
    a bias of order lr. In the paper's words lr = ε², η = ε·V̂^(-1/2)·C, M⁻¹ = V̂^(-1/2).

    Args:
        params: parameters or parameter groups.
        lr: step size for the mean potential in the preconditioner's metric.
        friction: η in (0, 1], one minus the momentum.
        floor: λ ≥ 0, in units of the tensor's own rms; 0 is the paper's rule, with which a unit that got no gradient
            in burn-in keeps a huge step size.
        subtract_noise: whether B = (lr·κ)²·G²⊙V̂, the paper's estimate of the heat of the mini-batches; else B = 0. V̂
            also has the square of the mean gradient, so B is too large where that is not small, and the chain too cold.
        adapt: when G adapts: "burn-in", until a schedule's sampling stages, and again in the exploration stage of each
            cycle; a number of steps, after which it is frozen in any case; or "always", whose law is not exact. A loop
            without a schedule passes a number, or calls `set_adapting(False)`.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`; at the start of a fit whose schedule has no burn-in.

    Source: Springenberg et al. 2016 (Bayesian optimization with robust Bayesian neural networks), section 4; the window
    of Schaul et al. 2013.
    """

    elementwise: ClassVar[bool] = True
    momentum_buffer: ClassVar[str] = "momentum_buffer"
    averages: ClassVar[tuple[str, ...]] = ("square_avg", "grad_avg", "window")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        friction: float = 0.05,
        floor: float = 0.1,
        subtract_noise: bool = False,
        adapt: Adapt = BURN_IN,
        **shared: Any,
    ) -> None:
        check_within("friction", friction, "(0, 1]")
        check_number("floor", floor, optional=False)
        check_flag("subtract_noise", subtract_noise)
        super().__init__(params, lr, **shared)
        self._add_defaults(friction=friction, floor=floor, subtract_noise=subtract_noise)
        self._add_adaptation(adapt)

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        inverse = self._kept(params)
        if self._adapts(group):
            group["averaged"] += 1
            self._estimate(params, grads, inverse)
        squares = self._buffers(params, "square_avg")
        torch._foreach_copy_(inverse, squares)
        self._root_with_floor(params, inverse, group["floor"])  # 1/G

        momenta = self._buffers(params, self.momentum_buffer)
        torch._foreach_mul_(momenta, 1 - group["friction"])
        factor = -group["lr"] * group["gradient_multiplier"]
        self._add_quotients(momenta, grads, inverse, factor)
        if noise is not None:
            self._add_noise(group, momenta, noise, inverse, squares)
        torch._foreach_add_(params, momenta)

    def _estimate(self, params: list[Tensor], grads: list[Tensor], scratch: list[Tensor]) -> None:
        """Update V̂, ḡ and h by a gradient."""
        squares, means, windows = (self._buffers(params, name) for name in self.averages)
        torch._foreach_copy_(scratch, windows)
        torch._foreach_add_(scratch, 1)
        torch._foreach_reciprocal_(scratch)
        torch._foreach_lerp_(means, grads, scratch)
        torch._foreach_lerp_(squares, torch._foreach_mul(grads, grads), scratch)
        torch._foreach_copy_(scratch, means)
        torch._foreach_mul_(scratch, means)
        tiny = torch.finfo(scratch[0].dtype).tiny
        torch._foreach_div_(scratch, list(torch._foreach_add(squares, tiny)))
        torch._foreach_clamp_max_(scratch, 1)  # rounding
        torch._foreach_addcmul_(windows, windows, scratch, -1)
        torch._foreach_add_(windows, 1)

    def _add_noise(
        self,
        group: dict[str, Any],
        momenta: list[Tensor],
        noise: list[Tensor],
        inverse: list[Tensor],
        squares: list[Tensor],
    ) -> None:
        """Add the noise; both `noise` and `inverse` are overwritten."""
        variance = self._noise_variance(group, group["friction"])
        if not group["subtract_noise"]:
            self._add_scaled_noise(momenta, noise, inverse, variance)
            return
        torch._foreach_div_(noise, inverse)
        self._scale(inverse, variance)
        self._add(inverse, squares, -((group["lr"] * group["gradient_multiplier"]) ** 2))
        torch._foreach_clamp_min_(inverse, 0)  # (variance/G - (lr·κ)²·V̂), to be divided by G⁻²
        torch._foreach_sqrt_(inverse)
        torch._foreach_addcmul_(momenta, noise, inverse)

    def preconditioner(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        inverse = [square.clone() for square in self._buffers(params, "square_avg")]
        self._root_with_floor(params, inverse, self._group_of(params)["floor"])
        return list(torch._foreach_reciprocal(inverse))
