"""Gradient-guided Monte Carlo."""

from typing import Any, ClassVar

from torch import Tensor

from lightning_sgmcmc.samplers.reversible import ReversibleLangevin


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
    """

    elementwise: ClassVar[bool] = True

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
