"""Stochastic gradient Hamiltonian Monte Carlo, in momentum form: plain, preconditioned and scale-adapted."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_flag, check_number, check_positive, check_within
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.samplers.noise import Block, along
from lightning_sgmcmc.samplers.rows import coefficients, compiled, sghmc_step
from lightning_sgmcmc.samplers.sampler import Sampler
from lightning_sgmcmc.samplers.sgld import ALWAYS, BURN_IN, Adapt, PreconditionedSampler, unbiased
from lightning_sgmcmc.tensors import Control, square_root


class SGHMC(Sampler):
    """Stochastic gradient Hamiltonian Monte Carlo, in momentum form.

        v ← (1-η)·v - lr·κ·g + √(2·(η-γ̂)·lr·τ/N)·ξ
        θ ← θ + v

    If τ = 0 throughout, it is `torch.optim.SGD(lr, momentum=1-η)`, bit for bit, with any schedule of lr. Torch stores
    `b = -v/lr` instead of v, so a change of lr rescales the velocity, and steps without noise do the same. With noise a
    restart of the step size would then throw the chain far away, so steps with noise store v itself.

    Args:
        params: parameters or parameter groups.
        lr: step size for the mean potential, `lr = ε·N` for a paper's ε.
        friction: η in (0, 1], one minus the momentum.
        noise_estimate: γ̂ in [0, η], the estimate of the gradient noise's own share of the friction.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`.

    Source: Chen et al. 2014, eq. (15); Zhang et al. 2020 (cSG-MCMC), section 2.

    Example::

        module = BayesianModule(net, Categorical(), sampler=partial(SGHMC, friction=0.05), lr=0.1)
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    momentum_buffer: ClassVar[str] = "momentum_buffer"

    cold_momentum_is_over_lr: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        friction: float = 0.1,
        noise_estimate: float = 0.0,
        **shared: Any,
    ) -> None:
        check_within("friction", friction, "(0, 1]")
        if not 0 <= noise_estimate <= friction:
            raise ValueError(f"noise_estimate must be between 0 and friction={friction}, got {noise_estimate}")
        super().__init__(params, lr, **shared)
        self._add_defaults(friction=friction, noise_estimate=noise_estimate, holds_velocity=False, last_lr=lr)

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        lr, friction = group["lr"], group["friction"]
        momenta = self._momenta(group, params, as_velocity=noise is not None)
        if noise is not None and self._is_fused(params):
            assert self.num_data is not None
            controls = coefficients(group, params[0], self.num_data)
            options = friction, group["noise_estimate"]
            for (*rows, gradients), drawn, *_ in along(noise, params, momenta, grads):
                compiled(sghmc_step)(rows[0][0], rows[1][0], gradients[0], drawn[0], *controls, *options)
        elif noise is None:  # momenta are b = -v/lr, as in torch.optim.SGD
            torch._foreach_mul_(momenta, 1 - friction)
            self._add(momenta, grads, group["gradient_multiplier"])
            self._add(params, momenta, -lr)
        else:
            factor = -lr * group["gradient_multiplier"]
            scale = square_root(self._noise_variance(group, friction - group["noise_estimate"]))
            for (targets, velocities, gradients), drawn, *_ in along(noise, params, momenta, grads):
                torch._foreach_mul_(velocities, 1 - friction)
                self._add(velocities, gradients, factor)
                self._add(velocities, drawn, scale)
                torch._foreach_add_(targets, velocities)
        group["last_lr"] = lr.clone() if isinstance(lr, Tensor) else lr

    def law(self, group: dict[str, Any]) -> StepLaw:
        friction, estimate = group["friction"], group["noise_estimate"]
        return StepLaw(
            damping=friction,
            force=group["lr"] * group["gradient_multiplier"],
            variance=self._noise_variance(group, friction - estimate),
            thermal=self._thermal_variance(group),
            gradient_noise_factor=self._noise_factor(group) / friction,
            gradient_noise_allowance=float(estimate / friction),
            move="after",
        )

    def momenta(self, group: dict[str, Any]) -> list[Tensor]:
        return self._momenta(group, group["params"], as_velocity=True)

    def sets_options(self, group: dict[str, Any]) -> bool:
        return bool(group["holds_velocity"] != self.is_noisy(group))

    def rescale_momenta(self, group: dict[str, Any], factor: Control) -> None:
        if group["holds_velocity"]:  # otherwise the last step had no noise
            super().rescale_momenta(group, factor)

    def _momenta(self, group: dict[str, Any], params: list[Tensor], as_velocity: bool) -> list[Tensor]:
        """Return the momentum buffers as velocities v or as b = -v/lr, converting them if necessary."""
        momenta = self._buffers(params, self.momentum_buffer)
        if group["holds_velocity"] != as_velocity:
            if as_velocity:
                self._scale(momenta, -group["last_lr"])
            else:
                lr = group["lr"]
                inverse = lr.reciprocal() if isinstance(lr, Tensor) else (1 / lr if lr > 0 else 0.0)
                self._scale(momenta, -inverse)
            group["holds_velocity"] = as_velocity
        return momenta


# -- psghmc ------------------------------------------------------------------------------------------------------------


class pSGHMC(PreconditionedSampler):
    """SGHMC with a preconditioner from the averaged squared gradients, whose steps have Adam's scale.

        V ← α·V + (1-α)·g²,   V̂ = V/(1-α^k),   G = 1/(√V̂ + λ·rms(√V̂) + 1e-8),   the rms over each tensor
        v ← (1-η)·v - η·lr·κ·G⊙g + η·√(2·lr·τ·G/N)⊙ξ
        θ ← θ + v

    It is SGHMC with the step size η·lr·G of each coordinate, so a steady gradient moves a coordinate by about lr in
    each step, whatever its size, and one lr (0.01) suits most networks. The floor λ bounds the ratio of the
    step sizes within a tensor by (1+λ)/λ at the rms; it is at least 1/(10·N), so that a tensor without a gradient yet,
    as below a last layer of zeros, is not thrown away by noise. The divergence of G is omitted, as in `pSGLD`; with
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

    Example::

        module = BayesianModule(net, Categorical(), sampler=pSGHMC, lr=0.01)
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

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
        averaged = self._average_squares(group, params, grads, group["alpha"])
        momenta, floors = self._buffers(params, self.momentum_buffer), None
        if self._walks:
            floors = self._floors(params, averaged, group["floor"], unbiased(group["alpha"], group["averaged"]))
        factor = -friction * group["lr"] * group["gradient_multiplier"]
        variance = self._noise_variance(group, friction**2)
        for block, scratch in self._parts(noise, params, momenta, grads, averaged):
            targets, velocities, gradients, squares = block.lists
            inverse = self._inverse(group, squares, scratch, params, block, floors)  # 1/G
            torch._foreach_mul_(velocities, 1 - friction)
            self._add_quotients(velocities, gradients, inverse, factor)
            if block.noise is not None:
                self._add_scaled_noise(velocities, block.noise, inverse, variance)
            torch._foreach_add_(targets, velocities)

    def preconditioner(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        squares = self._buffers(params, "square_avg")
        inverse = self._inverse(
            self._group_of(params), squares, [torch.empty_like(square) for square in squares], params
        )
        return list(torch._foreach_reciprocal(inverse))

    def _inverse(
        self,
        group: dict[str, Any],
        squares: list[Tensor],
        out: list[Tensor],
        params: Sequence[Tensor],
        block: Block | None = None,
        floors: Tensor | None = None,
    ) -> list[Tensor]:
        """Write √V̂ + λ·rms(√V̂) + 1e-8 of each tensor to `out`, the rms within each chain; `floors` are those of a
        block's tensors."""
        correction = unbiased(group["alpha"], group["averaged"])
        if floors is None:
            floors = self._floors(params, squares, group["floor"], correction)
        torch._foreach_copy_(out, squares)
        torch._foreach_div_(out, correction)
        self._root_with_floor(params, out, floors, block)
        return out


# -- scale adapted -----------------------------------------------------------------------------------------------------


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
        floor: λ ≥ 0, in units of the tensor's own rms, and at least 1/(10·N). 0 is the paper's rule without either,
            with which a unit that got no gradient in burn-in keeps a huge step size.
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

    Example::

        module = BayesianModule(net, Categorical(), sampler=ScaleAdaptedSGHMC, lr=0.01)
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True
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
        averages = [self._buffers(params, name) for name in self.averages]
        if self._adapts(group):
            group["averaged"] += 1
            for block, scratch in self._parts(None, params, grads, *averages):
                gradients, squares, means, windows = block.lists[1:]
                self._estimate(gradients, squares, means, windows, scratch)
        floors = self._floors(params, averages[0], group["floor"])
        momenta = self._buffers(params, self.momentum_buffer)
        factor = -group["lr"] * group["gradient_multiplier"]
        for block, inverse in self._parts(noise, params, momenta, grads, averages[0]):
            targets, velocities, gradients, squares = block.lists
            torch._foreach_copy_(inverse, squares)
            self._root_with_floor(params, inverse, floors, block)  # 1/G
            torch._foreach_mul_(velocities, 1 - group["friction"])
            self._add_quotients(velocities, gradients, inverse, factor)
            if block.noise is not None:
                self._add_noise(group, velocities, block.noise, inverse, squares)
            torch._foreach_add_(targets, velocities)

    @staticmethod
    def _estimate(
        grads: list[Tensor], squares: list[Tensor], means: list[Tensor], windows: list[Tensor], scratch: list[Tensor]
    ) -> None:
        """Update V̂, ḡ and h by a gradient."""
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
        self._root_with_floor(params, inverse, self._floors(params, inverse, self._group_of(params)["floor"]))
        return list(torch._foreach_reciprocal(inverse))
