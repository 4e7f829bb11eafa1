"""GGMC and AMAGOLD: kinetic Langevin steps with trajectories that a Metropolis test can decide on."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.samplers.underdamped import UnderdampedLangevin
from lightning_sgmcmc.tensors import Control, along_first_axis


class ReversibleLangevin(UnderdampedLangevin):
    """OBABO steps that add up the work of their forces along a trajectory; a `Trajectory` begins, tests and ends it.

    A trajectory is a sequence of steps that is the same forwards and backwards. Subclasses differ in where they cut it:
    `GGMC` in the middle of a momentum's update, `AMAGOLD` in the middle of a move. Without a trajectory both are
    `UnderdampedLangevin(integrator="obabo")`.
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


# -- ggmc --------------------------------------------------------------------------------------------------------------


class GGMC(ReversibleLangevin):
    """Gradient-guided Monte Carlo (GGMC): OBABO trajectories whose Metropolis test is spread over many steps.

        r ← √c·r + √(τ·(1-c))·ξ              O    first step only, c = exp(-γ·h)
        r ← r - h/2·κ·N·g                    B
        r ← c·r + √(τ·(1-c²))·ξ              O O  of two steps, merged
        r ← r - h/2·κ·N·g                    B
        θ ← θ + h·r                          A
        r ← r - h/2·κ·N·g                    B    last step: it does not move, and r ← √c·r + √(τ·(1-c))·ξ ends it

    With the callback `MetropolisTest` its law is exp(-U/τ), exactly, for any h at which it moves: also with mini-batch
    gradients, which the test takes as they are. A trajectory of K steps takes K gradients and makes K-1 moves, so it
    needs 2 steps at least; `AMAGOLD` makes K moves. Its log-acceptance is

        log a = (U(θ_0) - U(θ_K) + W)/τ,   W = Σ h/2·κ·N·g·(r + r')

    where U has all data, and r, r' are the momenta before and after both B of a gradient (a quarter instead of a half
    for the one B of the first and of the last step). W is the loss of kinetic energy in all B. A rejected chain returns
    to its trajectory's start with its momentum reversed. With full gradients log a is of order h². Mini-batch noise of
    covariance C in ∇Ũ lowers its mean by K·h²·tr C/(2τ), so with many weights the acceptance falls to zero unless h is
    so small that the unadjusted law is good as well: the test is a certificate, and no cheaper way to that law.

    Without `MetropolisTest` the steps are those of `UnderdampedLangevin(integrator="obabo")`.

    Args:
        params: parameters or parameter groups.
        lr: time step h.
        friction: γ > 0, per unit of time.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`.

    Source: Garriga-Alonso & Fortuin 2021 (Exact Langevin dynamics with stochastic gradients), whose first and last
    gradient of a trajectory have all data; here they are mini-batches like the others.

    Example::

        module = BayesianModule(net, Categorical(), sampler=GGMC, lr=1e-3)
        trainer = pl.Trainer(max_epochs=100, callbacks=[SamplingSchedule(every_n_epochs=5), MetropolisTest()])
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    least_steps: int = 2

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        momenta = self._buffers(params, self.momentum_buffer)
        if self.begins:
            self._relax(group, momenta, noise, 0.5)
        self._turn(group, params, momenta, grads, noise, half=self.begins or self.ends)
        if self.ends:
            self._relax(group, momenta, noise, 0.5)
        else:
            self._add(params, momenta, group["lr"])


# -- amagold -----------------------------------------------------------------------------------------------------------


class AMAGOLD(ReversibleLangevin):
    """Time-symmetric SGHMC (AMAGOLD), whose Metropolis test is spread over many steps.

        θ ← θ + h/2·r                        before the first step
        r ← c·r - h/2·(1+c)·κ·N·g + √(τ·(1-c²))·ξ,   c = exp(-γ·h)
        θ ← θ + h·r                          h/2 in the last step

    With the callback `MetropolisTest` its law is exp(-U/τ), exactly, for any h: also with mini-batch gradients, which
    the test takes as they are. A trajectory of K steps takes K gradients and makes K moves. Its log-acceptance is

        log a = (U(θ_0) - U(θ_K) + W)/τ,   W = Σ h/2·κ·N·g·(r + r')

    where U has all data, and r, r' are the momenta before and after their update by g. A rejected chain returns to its
    trajectory's start with its momentum reversed. With full gradients log a is of order h². Mini-batch noise of
    covariance C in ∇Ũ lowers its mean by K·h²·tr C/(2τ), so with many weights the acceptance falls to zero unless h is
    so small that the unadjusted law is good as well: the test is a certificate, and no cheaper way to that law.

    Within a trajectory θ is where the gradient is taken, half a move before a step's end. Without `MetropolisTest` the
    steps are those of `UnderdampedLangevin(integrator="obabo")`.

    Args:
        params: parameters or parameter groups.
        lr: time step h.
        friction: γ > 0, per unit of time. The paper's β has c = (1-h·β)/(1+h·β), so γ = 2·artanh(h·β)/h, nearly 2·β.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`.

    Source: Zhang, Cooper & De Sa 2020 (AMAGOLD), Algorithm 2 with σ = 1.

    Example::

        module = BayesianModule(net, Categorical(), sampler=AMAGOLD, lr=1e-3)
        trainer = pl.Trainer(max_epochs=100, callbacks=[SamplingSchedule(every_n_epochs=5), MetropolisTest()])
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    def enter_trajectory(self) -> None:
        self._move(0.5)

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        momenta = self._buffers(params, self.momentum_buffer)
        self._turn(group, params, momenta, grads, noise)
        self._add(params, momenta, (0.5 if self.ends else 1.0) * group["lr"])


# -- trajectory --------------------------------------------------------------------------------------------------------


def log_acceptance(start: Tensor, end: Tensor, work: Tensor, temperature: Control) -> Tensor:
    """Return (U(θ_0) - U(θ_K) + W)/τ, the log of the acceptance probability where it is below 0, shape (C,); W is the
    work of the trajectory's forces (`ReversibleLangevin.work`)."""
    return (start - end + work) / temperature


class Trajectory:
    """The present trajectory of a sampler's chains: where it began, and the test at its end.

    trajectory.begin(energy)
    for position in range(steps):
        trajectory.set_place(position, steps)  # before the gradient
        sampler.step()
    trajectory.end(energy, log_uniforms)
    """

    def __init__(self, sampler: ReversibleLangevin) -> None:
        self._sampler = sampler
        self._start: list[Tensor] = []
        """Copies of the parameters, and then of the momenta, at the trajectory's start."""
        self.energy = torch.empty(0)
        """U of the start, shape (C,), float64, in nats."""

    @property
    def is_on(self) -> bool:
        """Whether the chains are on a trajectory."""
        return self._sampler.work is not None

    @torch.no_grad()
    def begin(self, energy: Tensor) -> None:
        """Begin a trajectory at the chains' states, whose U with all data has shape (C,), float64."""
        present = self._present()
        if not self._start:
            self._start = [torch.empty_like(tensor) for tensor in present]
        torch._foreach_copy_(self._start, present)
        self.energy = energy
        self._sampler.work = torch.zeros_like(energy)
        self._sampler.enter_trajectory()

    def set_place(self, position: int, steps: int) -> None:
        """Set the place of the next step in its trajectory; `steps` is K, its number of steps."""
        self._sampler.begins, self._sampler.ends = position == 0, position == steps - 1

    @torch.no_grad()
    def end(self, energy: Tensor, log_uniforms: Tensor) -> Tensor:
        """Test the trajectory of each chain, from U of its state and the log of a uniform number; return its
        log-acceptance.

        A rejected chain has the position of the start again, bit for bit, and the start's momentum reversed. A NaN is a
        rejection. Afterwards `energy` is that of the chains' states. All have shape (C,).
        """
        sampler = self._sampler
        assert sampler.work is not None
        temperature = sampler.param_groups[0]["temperature"]
        if isinstance(temperature, Tensor):
            temperature = temperature.to(energy.device)
        found = log_acceptance(self.energy, energy, sampler.work, temperature)
        accepted = log_uniforms < found
        moves = accepted.to(sampler.param_groups[0]["params"][0].device)
        present = self._present()
        momenta = len(present) // 2
        for place, (now, start) in enumerate(zip(present, self._start, strict=True)):
            stays = along_first_axis(moves, now.dim()) if sampler.num_chains > 1 else moves[0]
            now.copy_(torch.where(stays, now, start if place < momenta else -start))
        self.energy = torch.where(accepted, energy, self.energy)
        self.leave()
        return found

    def leave(self) -> None:
        """Leave the trajectory without a test."""
        self._sampler.work, self._sampler.begins, self._sampler.ends = None, False, False

    def tensors(self) -> list[Tensor]:
        """Return what a checkpoint needs in the middle of a trajectory, in the parameters' stored form."""
        return self._start

    def restore(self, tensors: list[Tensor], energy: Tensor, work: Tensor) -> None:
        """Continue a trajectory with U of its start and the work so far, each of shape (C,), float64."""
        self._start, self.energy, self._sampler.work = tensors, energy, work

    def _present(self) -> list[Tensor]:
        """Return the parameters, and then their momenta."""
        groups = self._sampler.param_groups
        momenta = [momentum for group in groups for momentum in self._sampler.momenta(group) or []]
        return [*(p for group in groups for p in group["params"]), *momenta]
