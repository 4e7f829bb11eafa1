"""Microcanonical Langevin dynamics: plain and preconditioned."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_positive, check_within
from lightning_sgmcmc.samplers.law import StepLaw, heat_of_gradient_noise, momentum_variance
from lightning_sgmcmc.samplers.sampler import Sampler
from lightning_sgmcmc.samplers.sgld import BURN_IN, Adapt, PreconditionedSampler
from lightning_sgmcmc.tensors import Control, exact, exp, expm1, for_each_tensor, square_root

SMALLEST = 1e-30
"""Least squared norm that is divided by, so that a vector of zeros has a direction of zeros."""


class MCLMC(Sampler):
    """Microcanonical Langevin Monte Carlo (MCLMC): momenta of a constant length, which no gradient noise can heat.

        r ← √(d·τ)·w/|w|,   w = 2·ζ·û + (1-ζ)·(1+ζ + (1-ζ)·(e·û))·e
        θ ← θ + h/2·r
        r ← √(d·τ)·w/|w|,   w = c·r + √(τ·(1-c²))·ξ
        θ ← θ + h/2·r

    with û = r/|r|, e = -κ·g/|κ·g|, ζ = exp(-h·κ·N·|g|·√(d/τ)/(d-1)) (|κ| where κ < 0), c = exp(-γ·h), and d the number
    of coordinates. The first line is the exact flow of dr = P(r)·(-κ·N·g·d/(d-1))·dt on the sphere |r|² = d·τ, with P
    the projection on its tangent space. `lr` = h is a time step, the same as that of `UnderdampedLangevin`, whose
    equation this is but for the constant length. A momentum of zeros, as at the start, first takes the direction -κ·g.

    The law of θ is exp(-U/τ) for short steps, with an error of order h² for a full gradient. Isotropic mini-batch noise
    only turns the momentum more, as γ does, so it leaves this law as it is to first order; noise of another shape
    biases it. The kinetic temperature is τ by construction and shows nothing: look at the configurational one. Each
    parameter group has a sphere of its own, with the same law.

    Choose it for long runs after a warm start, with γ·h of 0.01 to 0.3. There is no limit at τ = 0, where r has no
    length, so a schedule with a cold stage raises an error: optimize by `WarmStart`, and sample at τ > 0.

    Args:
        params: parameters or parameter groups, each with at least two coordinates.
        lr: time step h.
        friction: γ > 0, per unit of time: the momentum's direction is forgotten in the time 1/γ.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`; for a temperature of 0; for a group with one coordinate.

    Source: Robnik, De Luca, Silverstein & Seljak 2023 (Microcanonical Hamiltonian Monte Carlo); Robnik & Seljak 2024
    (Fluctuation without dissipation: microcanonical Langevin Monte Carlo), eq. (2); with mini-batches Sommer et al.
    2026 (SMILE).

    Example::

        module = BayesianModule(net, Categorical(), sampler=MCLMC, lr=2e-3)
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    has_cold_limit: ClassVar[bool] = False

    momentum_buffer: ClassVar[str] = "momentum_buffer"

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, friction: float = 1.0, **shared: Any) -> None:
        check_positive("friction", friction)
        super().__init__(params, lr, **shared)
        self._add_defaults(friction=friction)
        for group in self.param_groups:
            if self._coordinates(group["params"]) < 2:
                raise ValueError(
                    f"a parameter group of {type(self).__name__} needs two coordinates at least, since a direction in "
                    "one dimension cannot turn: put the parameter into a group with others"
                )

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        assert noise is not None  # see `has_cold_limit`
        step, friction, temperature = group["lr"], group["friction"], group["temperature"]
        momenta = self._buffers(params, self.momentum_buffer)
        length = square_root(self._coordinates(params) * temperature)
        forces = self._forces(params, grads)
        kept, added = self._turn(*self._geometry(group, params, momenta, forces))
        self._scale(momenta, kept * length)
        self._add(momenta, forces, added * length)
        self._move(params, momenta, step / 2)
        self._scale(momenta, exp(-friction * step))
        self._add(momenta, noise, square_root(momentum_variance(step, friction, temperature)))
        self._scale(momenta, length * self._inner(params, momenta, momenta).clamp_min(SMALLEST).rsqrt())
        self._move(params, momenta, step / 2)

    def _forces(self, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Return the gradients in the coordinates of the momenta."""
        return grads

    def _move(self, params: list[Tensor], momenta: list[Tensor], time: Control) -> None:
        """Move the parameters by the momenta for a time."""
        self._add(params, momenta, time)

    def _geometry(
        self, group: dict[str, Any], params: Sequence[Tensor], momenta: list[Tensor], forces: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Control]:
        """Return |g|², g·r and |r|², each of shape (C,), and δ/|g| with the sign of κ, for the angle of a step's flow δ
        = h·κ·N·|g|·√(d/τ)/(d-1)."""
        assert self.num_data is not None
        dimension = self._coordinates(params)
        rate = group["lr"] * group["gradient_multiplier"] * self.num_data * dimension / (dimension - 1)
        return (
            self._inner(params, forces, forces),
            self._inner(params, forces, momenta),
            self._inner(params, momenta, momenta),
            rate / square_root(dimension * group["temperature"]),
        )

    @torch.no_grad()
    def kinetic_gain(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], share: float = 1.0
    ) -> Tensor:
        """Return what the flow of a share of a step adds to the kinetic energy over τ, shape (C,), in float64.

            (d-1)·log(cosh δ + (e·û)·sinh δ),   δ = share·h·|κ|·N·|g|·√(d/τ)/(d-1)

        An exact integrator keeps its sum with U/τ. Momenta are those of the state, and do not change.

        Args:
            group: a parameter group.
            params: its parameters that have a gradient.
            grads: gradient of the mean potential for each of them.
            share: of the first line of the step.

        Source: Robnik et al. 2023, section 4.
        """
        forces = self._forces(params, grads)
        *found, rate = self._geometry(group, params, self._buffers(params, self.momentum_buffer), forces)
        square, product, length = map(exact, found)
        signed = exact(share * rate).to(square.device)
        angle, towards = square.sqrt() * signed.abs(), -signed.sign()
        cosine = towards * product * (square * length).clamp_min(SMALLEST).rsqrt()
        return (self._coordinates(params) - 1) * (angle + ((1 - cosine) / 2 * (-2 * angle).expm1()).log1p())

    @staticmethod
    def _turn(square: Tensor, product: Tensor, length: Tensor, rate: Control) -> tuple[Tensor, Tensor]:
        """Return the factors of r and of g in the direction after the first line, from what `_geometry` returned."""
        per_gradient = square.clamp_min(SMALLEST).rsqrt()
        per_momentum = length.clamp_min(SMALLEST).rsqrt()
        angle = square.sqrt() * (rate.abs() if isinstance(rate, Tensor) else abs(rate))
        decay, rest = (-angle).exp(), -(-angle).expm1()
        towards = per_gradient * (-rate.sign() if isinstance(rate, Tensor) else math.copysign(1.0, -rate))
        cosine = towards * per_momentum * product
        along, before = rest * (1 + decay + rest * cosine), 2 * decay
        norm = along.square() + 2 * along * before * cosine + before.square() * length * per_momentum.square()
        per_norm = norm.clamp_min(SMALLEST).rsqrt()
        return before * per_momentum * per_norm, along * towards * per_norm

    def law(self, group: dict[str, Any]) -> StepLaw:
        step, friction, temperature = group["lr"], group["friction"], group["temperature"]
        assert self.num_data is not None
        variance = momentum_variance(step, friction, temperature)
        force = exp(-friction * step) * step * self.num_data  # d/(d-1) of what is tangential, (d-1)/d in the mean
        return StepLaw(
            damping=-expm1(-friction * step),
            force=force * group["gradient_multiplier"],
            variance=variance,
            thermal=temperature,
            gradient_noise_factor=heat_of_gradient_noise(force, variance) if self.is_noisy(group) else math.inf,
            gradient_noise_allowance=math.inf,
            move="baoab",
            time_step=step,
        )


# -- pmclmc ------------------------------------------------------------------------------------------------------------


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

    Example::

        module = BayesianModule(net, Categorical(), sampler=partial(pMCLMC, friction=10.0), lr=2e-3)
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True
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

    @property
    def copies(self) -> int:
        return super().copies + int(self._walks)  # its scratch is whole

    def preconditioner(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        return [scale.square().reciprocal() for scale in self._buffers(params, "scale")]
