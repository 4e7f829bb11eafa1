"""Amortized Metropolis-adjusted stochastic gradient second-order Langevin dynamics."""

from typing import Any, ClassVar

from torch import Tensor

from lightning_sgmcmc.samplers.reversible import ReversibleLangevin


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
    """

    elementwise: ClassVar[bool] = True

    def enter_trajectory(self) -> None:
        self._move(0.5)

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        momenta = self._buffers(params, self.momentum_buffer)
        self._turn(group, params, momenta, grads, noise)
        self._add(params, momenta, (0.5 if self.ends else 1.0) * group["lr"])
