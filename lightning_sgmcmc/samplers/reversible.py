"""The base of `GGMC` and `AMAGOLD`: kinetic Langevin steps with trajectories that a Metropolis test can decide on."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.samplers.underdamped import UnderdampedLangevin


class ReversibleLangevin(UnderdampedLangevin):
    """OBABO steps that add up the work of their forces along a trajectory; a `Trajectory` begins, tests and ends it.

    A trajectory is a sequence of steps that is the same forwards and backwards. Subclasses differ in where they cut it:
    `GGMC` in the middle of a momentum's update, `AMAGOLD` in the middle of a move. Without a trajectory both are
    `UnderdampedLangevin(integrator="obabo")`.

    Args:
        params: parameters or parameter groups.
        lr: time step h.
        friction: γ > 0, per unit of time.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`.
    """

    least_steps: int = 1
    """Steps of the shortest trajectory that moves."""

    work: "Tensor | None" = None
    """Work of the forces since the trajectory began, shape (C,), float64, in nats; None outside a trajectory.

        W = Σ h/2·κ·N·g·(r + r')

    with r and r' the momenta before and after the update of the momentum by g. It is not part of the state."""

    begins: bool = False
    """Whether the next step is a trajectory's first one."""

    ends: bool = False
    """Whether the next step is a trajectory's last one."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, friction: float = 1.0, **shared: Any) -> None:
        super().__init__(params, lr, friction=friction, integrator="obabo", **shared)

    def enter_trajectory(self) -> None:
        """Bring the states from a trajectory's start to where it takes its first gradient."""

    def _turn(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        momenta: list[Tensor],
        grads: list[Tensor],
        noise: list[Tensor] | None,
        half: bool = False,
    ) -> None:
        """Update the momenta: half-kick, relaxation, half-kick; or the first half-kick alone."""
        drag = self.extra_drag(momenta) if self.extra_drag is not None else None
        self._add_work(group, params, momenta, grads, half)
        self._kick(group, momenta, grads, drag, 0.5)
        if not half:
            self._relax(group, momenta, noise)
            self._kick(group, momenta, grads, drag, 0.5)
        self._add_work(group, params, momenta, grads, half)

    def _add_work(
        self, group: dict[str, Any], params: list[Tensor], momenta: list[Tensor], grads: list[Tensor], half: bool
    ) -> None:
        if self.work is not None:
            rate = (0.25 if half else 0.5) * group["lr"] * group["gradient_multiplier"] * self.num_data
            self.work.add_((self._inner(params, grads, momenta) * rate).to(self.work.device))

    @torch.no_grad()
    def _move(self, share: float) -> None:
        """Move all parameters for a share of the time step, outside an update."""
        for group in self.param_groups:
            self._add(group["params"], self.momenta(group) or [], share * group["lr"])
