"""Microcanonical Langevin dynamics."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_positive
from lightning_sgmcmc.samplers.base import Sampler
from lightning_sgmcmc.samplers.law import StepLaw, heat_of_gradient_noise
from lightning_sgmcmc.samplers.splitting import momentum_variance
from lightning_sgmcmc.tensors import Control, exact, exp, expm1, square_root

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
    length, so a schedule with a cold stage is refused: optimize by `WarmStart`, and sample at τ > 0.

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
    """

    elementwise: ClassVar[bool] = True

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
        """Return |g|², g·r and |r|², each of shape (C,), and the angle δ of a step's flow over |g|, with the sign of κ.

        δ = h·κ·N·|g|·√(d/τ)/(d-1).
        """
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
        """Return the factors of r and of g in the direction after the first line, each of shape (C,).

        Args:
            square: |g|², shape (C,).
            product: g·r, shape (C,).
            length: |r|², shape (C,).
            rate: δ/|g|, with the sign of κ.
        """
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
        )
