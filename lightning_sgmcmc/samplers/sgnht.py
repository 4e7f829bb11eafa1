"""The stochastic gradient Nosé-Hoover thermostat."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_positive, check_within
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.samplers.sampler import Sampler
from lightning_sgmcmc.tensors import square_root


class SGNHT(Sampler):
    """Stochastic gradient Nosé-Hoover thermostat: SGHMC whose friction adapts to the gradient noise.

        v ← (1-η)·v - lr·κ·g + √(2·a·lr·τ/N)·ξ
        θ ← θ + v
        η ← η + ((1-η/2)·N/lr·mean(v²) - τ)·(lr/N)/Q

    The paper's variables are p = v/h, ξ = η/h and A = a/h with h = √(lr/N); its equations have Q = 1, and no factor
    1-η/2. The friction rises while the momentum's temperature exceeds τ, which removes the heat of isotropic mini-batch
    noise of unknown size. A friction of η a step makes N/lr·mean(v²) larger than the temperature of positions by
    1/(1-η/2), so without the factor samples are too cold by a/2 (5 % at 0.1), whatever lr. At τ = 0 the thermostat
    keeps its value: momentum SGD with friction η.

    Args:
        params: parameters or parameter groups (a thermostat for each group and chain).
        lr: step size for the mean potential, `lr = ε·N` for a paper's ε.
        friction: a in (0, 1], the friction that balances the injected noise, and the thermostat's initial value.
        thermal_inertia: Q > 0; smaller adapts faster. At twice the temperature the friction grows by its initial value
            in a·N·Q/(lr·τ) steps: with Q = 1, 50,000 data and lr = 0.1 in 50,000 steps, so a shorter run warns.
            Q = k·lr·τ/(a·N) adapts in k steps, which should be more than 20/a, or it oscillates.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`.

    Source: Ding et al. 2014, Algorithm 2.

    Example::

        module = BayesianModule(net, Categorical(), sampler=partial(SGNHT, thermal_inertia=0.01), lr=0.1)
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    momentum_buffer: ClassVar[str] = "momentum_buffer"

    per_chain_state: ClassVar[tuple[str, ...]] = ("thermostat",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        friction: float = 0.1,
        thermal_inertia: float = 1.0,
        **shared: Any,
    ) -> None:
        check_within("friction", friction, "(0, 1]")
        check_positive("thermal_inertia", thermal_inertia)
        super().__init__(params, lr, **shared)
        self._add_defaults(friction=friction, thermal_inertia=thermal_inertia)

    def thermostat(self, group: dict[str, Any]) -> Tensor:
        """Return the adapting friction η of a parameter group, shape (C,)."""
        first = group["params"][0]
        state = self.state[first]
        if "thermostat" not in state:
            state["thermostat"] = torch.full(
                (self.num_chains,), group["friction"], device=first.device, dtype=first.dtype
            )
        return state["thermostat"]

    def adaptation_steps(self, group: dict[str, Any]) -> float:
        """Return a·N·Q/(lr·τ), the steps in which η grows by a at twice the temperature, the least of chains; NaN at τ
        = 0."""
        rate = torch.as_tensor(group["lr"] * group["temperature"]).max().item() / (self.num_data or math.inf)
        return float(group["friction"] * group["thermal_inertia"] / rate) if rate > 0 else math.nan

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        lr, temperature = group["lr"], group["temperature"]
        velocities = self._buffers(params, self.momentum_buffer)
        thermostat = self.thermostat(group)
        self._scale(velocities, 1 - thermostat)
        self._add(velocities, grads, -lr * group["gradient_multiplier"])
        if noise is not None:
            self._add(velocities, noise, square_root(self._noise_variance(group, group["friction"])))
        torch._foreach_add_(params, velocities)
        if noise is not None:
            kinetic = (1 - thermostat / 2) * self._mean_square(params, velocities)
            excess = kinetic - temperature * lr / self.num_data
            thermostat.add_(excess / group["thermal_inertia"])

    def law(self, group: dict[str, Any]) -> StepLaw:
        friction = group["friction"]
        return StepLaw(
            damping=self.thermostat(group).clone(),  # the step changes it in place
            force=group["lr"] * group["gradient_multiplier"],
            variance=self._noise_variance(group, friction),
            thermal=self._thermal_variance(group) / (1 - self.thermostat(group) / 2),  # what the thermostat holds
            gradient_noise_factor=self._noise_factor(group) / friction,
            gradient_noise_allowance=math.inf,
            move="after",
        )

    def planned_law(self, group: dict[str, Any]) -> StepLaw:
        friction = group["friction"]
        variance = self._noise_variance(group, friction)
        return StepLaw(friction, group["lr"], variance, self._thermal_variance(group), move="after")

    def plan_note(self) -> str:
        return f"{type(self).__name__} is planned with its initial friction, which mini-batch noise raises."

    def _mean_square(self, params: Sequence[Tensor], velocities: list[Tensor]) -> Tensor:
        """Return the mean of v² over all coordinates of each chain, shape (C,)."""
        return self._inner(params, velocities, velocities) / self._coordinates(params)
