"""Stochastic gradient Langevin dynamics: plain, with a preconditioner (pSGLD), and with Adam's drift."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count, check_positive, check_within
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.samplers.noise import Block, NoiseBlocks, along
from lightning_sgmcmc.samplers.rows import coefficients, compiled, sgld_step
from lightning_sgmcmc.samplers.sampler import Sampler
from lightning_sgmcmc.tensors import Control, along_first_axis, as_rows, square_root


class SGLD(Sampler):
    """Stochastic gradient Langevin dynamics.

        θ ← θ - lr·κ·g + √(2·lr·τ/N)·ξ

    with g the gradient of the mean potential Ũ/N and ξ standard normal. Its stationary law is exp(-U/τ) up to a bias of
    order lr. At τ = 0 it is `torch.optim.SGD(lr)`, bit for bit.

    Args:
        params: parameters or parameter groups.
        lr: step size for the mean potential, `lr = ε·N` for a paper's ε.

    `num_data`, `temperature`, `num_chains`, `seed`, `first_chain` and `noise_ahead` are as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`.

    Source: Welling & Teh 2011, eq. (4); Deng et al. 2020 (CSGLD), eq. (1) and (9).

    Example::

        module = BayesianModule(net, Categorical(), sampler=SGLD, lr=0.1)
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        if noise is not None and self._is_fused(params):
            assert self.num_data is not None
            controls = coefficients(group, params[0], self.num_data)
            for (rows, gradients), drawn, *_ in along(noise, params, grads):
                compiled(sgld_step)(rows[0], gradients[0], drawn[0], *controls)
            return
        factor, scale = -group["lr"] * group["gradient_multiplier"], square_root(self._noise_variance(group))
        for (targets, gradients), drawn, *_ in along(noise, params, grads):
            self._add(targets, gradients, factor)
            if drawn is not None:
                self._add(targets, drawn, scale)

    def law(self, group: dict[str, Any]) -> StepLaw:
        return self.langevin_law(group)


# -- preconditioned ----------------------------------------------------------------------------------------------------


ALWAYS, BURN_IN = "always", "burn-in"
Adapt = str | int
"""When a preconditioner adapts: in all steps, until a schedule's sampling stage, or in its first steps."""


COUNTS = ("averaged", "updates")
"""Of a group: the steps that adapted the preconditioner, and all steps."""
LEAST = 1e-8
"""The smallest 1/G of a preconditioner with a floor."""
WIDEST = 10.0
"""The largest G/N where a step has noise: weights of this standard deviation under the prior alone have it."""


def unbiased(decay: float, count: Control) -> Control:
    """Return 1-β^k, the sum of the weights of an average's k terms, at least 1e-12."""
    found = 1 - decay**count
    return found.clamp(min=1e-12) if isinstance(found, Tensor) else max(found, 1e-12)


class PreconditionedSampler(Sampler):
    """Base of the samplers with a diagonal preconditioner G, which is estimated from gradients.

    `adapt` says when. With "always" G changes in every step, so the law of the chain is that of a dynamics without its
    divergence Γ. With "burn-in" G is constant while a schedule's stage is that of sampling; the chain is then a sampler
    with a constant G, for which Γ = 0. A number of steps holds without a schedule too.

    With noise G is at most 10·N. Weights that have had no gradient yet, such as those below a last layer of zeros, so
    move by at most about √(20·lr·τ) in a step, and not by the √(2e8·lr·τ/N) of G = 1e8.
    """

    averages: ClassVar[tuple[str, ...]] = ("square_avg",)
    """Names of the state tensors besides the momentum, one for each parameter and in its shape."""

    def _add_adaptation(self, adapt: Adapt) -> None:
        """Check `adapt`, and add it to the groups."""
        if isinstance(adapt, str) and adapt not in (ALWAYS, BURN_IN):
            raise ValueError(f"adapt must be {ALWAYS!r}, {BURN_IN!r} or a number of steps, got {adapt!r}")
        if not isinstance(adapt, str):
            check_count("adapt", adapt, optional=False)
        self._add_defaults(adapt=adapt, adapting=True, averaged=0)

    def set_adapting(self, adapting: bool) -> None:
        """Let the preconditioner adapt in the coming steps, or freeze it; no effect with `adapt="always"`.

        A schedule calls it before each step, with False in its sampling stages; a loop of your own calls it once.
        """
        for group in self.param_groups:
            group["adapting"] = adapting

    def forget(self) -> None:
        """Begin to estimate the preconditioner again, as if no step had been made."""
        for group in self.param_groups:
            group.update({name: 0 for name in COUNTS if name in group})
            for name in self.averages:
                torch._foreach_zero_(self._buffers(group["params"], name))

    @property
    def counts_steps(self) -> bool:
        return True

    def sets_options(self, group: dict[str, Any]) -> bool:
        # The first step that adapts is another one, and a number of steps may end.
        return self._adapts(group) and (not group["averaged"] or not isinstance(group["adapt"], str))

    def counted(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("averaged",) if self._adapts(group) else ()

    @property
    def needs_burn_in(self) -> bool:
        """Whether the preconditioner is frozen in sampling stages, and has not been estimated yet."""
        return any(g["adapt"] != ALWAYS and not g["averaged"] for g in self.param_groups)

    @property
    def always_adapts(self) -> bool:
        """Whether the preconditioner also adapts in sampling stages."""
        return any(group["adapt"] == ALWAYS for group in self.param_groups)

    @staticmethod
    def _adapts(group: dict[str, Any]) -> bool:
        """Return whether a group's preconditioner changes in the coming step; the first step always estimates it."""
        adapt = group["adapt"]
        if isinstance(group["averaged"], Tensor):  # the count of a compiled step, which adapts
            return True
        if adapt == ALWAYS or not group["averaged"]:
            return True
        return bool(group["adapting"]) and (isinstance(adapt, str) or group["averaged"] < adapt)

    def plain_law(self, group: dict[str, Any]) -> StepLaw | None:
        return None  # `law` is in the preconditioner's metric

    @property
    def copies(self) -> int:
        return super().copies + len(self.averages) + (0 if self._walks else 1)  # the last is scratch, see `_kept`

    def plan_note(self) -> str:
        name = type(self).__name__
        if self.always_adapts:
            return f"{name}'s preconditioner adapts in all steps, so the samples' distribution is not exact."
        adapt = self.param_groups[0]["adapt"]
        until = "before" if isinstance(adapt, str) else f"in its first {adapt:,} steps, at most before"
        return f"{name}'s preconditioner is estimated {until} the sampling stages, in which it is frozen."

    def _group_of(self, params: Sequence[Tensor]) -> dict[str, Any]:
        """Return the parameter group that has the first of `params`."""
        return next(group for group in self.param_groups if any(p is params[0] for p in group["params"]))

    def _average_squares(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], decay: float
    ) -> list[Tensor]:
        """Return V ← decay·V + (1-decay)·g², or V as it is where the preconditioner is frozen."""
        squares = self._buffers(params, "square_avg")
        if self._adapts(group):
            group["averaged"] += 1
            torch._foreach_mul_(squares, decay)
            torch._foreach_addcmul_(squares, grads, grads, 1 - decay)
        return squares

    def _add_quotients(
        self, targets: list[Tensor], sources: list[Tensor], divisors: list[Tensor], factor: Control
    ) -> None:
        """Add factor·sources/divisors to targets in place; the factor is one number, or one for each chain."""
        if isinstance(factor, Tensor):
            self._add(targets, list(torch._foreach_div(sources, divisors)), factor)
        else:
            torch._foreach_addcdiv_(targets, sources, divisors, factor)

    def _add_scaled_noise(
        self, targets: list[Tensor], noise: list[Tensor], inverse: list[Tensor], variance: Control
    ) -> None:
        """Add noise of variance·G to targets in place, from 1/G; `noise` and `inverse` are overwritten."""
        torch._foreach_sqrt_(inverse)
        torch._foreach_div_(noise, inverse)
        self._add(targets, noise, square_root(variance))

    def _parts(
        self, noise: "list[Tensor] | NoiseBlocks | None", params: list[Tensor], *lists: list[Tensor]
    ) -> Iterable[tuple[Block, list[Tensor]]]:
        """Return `params` and further lists of tensors with their noise and with scratch: as they are, or where a step
        goes in blocks in these."""
        if noise is None and self._walks:
            noise = NoiseBlocks(self._noise, [], silent=True)
        if isinstance(noise, NoiseBlocks):
            blocks = noise.along(params, *lists)
            return ((block, [torch.empty_like(part) for part in block.lists[0]]) for block in blocks)
        return [(Block((params, *lists), noise), self._kept(params))]

    def _kept(self, params: list[Tensor]) -> list[Tensor]:
        """Return scratch tensors in the parameters' shapes, reused at every step and not part of the state."""
        scratch: dict[Tensor, Tensor] = self.__dict__.setdefault("_scratch", {})
        for p in params:
            if p not in scratch:
                scratch[p] = torch.empty_like(p)
                if (flat := self._flat_group(params)) is not None:
                    flat.keep_columns(scratch[p])
        return [scratch[p] for p in params]

    def _floors(self, params: Sequence[Tensor], squares: list[Tensor], floor: float, divisor: Control = 1.0) -> Tensor:
        """Return floor·rms(√V̂) + 1e-8 of V̂ = V/divisor, the rms over each tensor within each chain, and with a floor
        above 0 at least 1/(10·N), shape (C, T)."""
        flat = self._flat_group(params)
        if flat is not None:
            means = flat.means(squares[0])
        else:
            means = torch.stack([as_rows(tensor, self.num_chains).mean(1) for tensor in squares], 1)
        means = means if isinstance(divisor, float) and divisor == 1 else means.div_(divisor)
        floors = means.sqrt_().mul_(floor).add_(LEAST)
        return floors.clamp_(min=1 / (WIDEST * self.num_data)) if floor and self.num_data is not None else floors

    def _bound(self, group: dict[str, Any], inverse: list[Tensor]) -> None:
        """Let 1/G be at least 1/(10·N) in place, where the step has noise."""
        if self.num_data is None or not self.is_noisy(group):
            return
        least: Any = 1 / (WIDEST * self.num_data)
        if isinstance(least, Tensor):  # as N is in compiled steps
            for own in inverse:
                own.clamp_(min=least)
        else:
            torch._foreach_clamp_min_(inverse, least)

    def _root_with_floor(
        self, params: Sequence[Tensor], out: list[Tensor], floors: Tensor, block: Block | None = None
    ) -> None:
        """Replace V̂ by √V̂ + the floor of each tensor in place, in whole tensors or in the parts of a block."""
        torch._foreach_sqrt_(out)
        flat = self._flat_group(params)
        if flat is not None:
            flat.add_to_each(out[0], floors, 0 if block is None else block.offset)
            return
        places = range(len(out)) if block is None or block.places is None else block.places
        for tensor, place in zip(out, places, strict=True):
            own = floors[:, place]
            tensor.add_(along_first_axis(own, tensor.dim()) if self.num_chains > 1 else own[0])


# -- psgld -------------------------------------------------------------------------------------------------------------


class pSGLD(PreconditionedSampler):
    """SGLD with the RMSprop preconditioner.

        V ← α·V + (1-α)·g²,   G = 1/(λ + √V), at most 10·N if τ > 0
        θ ← θ - lr·κ·G⊙g + √(2·lr·τ·G/N)⊙ξ

    The divergence of G, Γ, is omitted, as in the paper's experiments, so the law is not exact while G adapts, however
    small lr is. Γ_i = -(1-α)·G_i²·g_i·H_ii/√V_i needs the diagonal of the batch's Hessian H, hence further backward
    passes, and is only the part of the present gradient: the average's memory adds more. `adapt="burn-in"` needs no Γ,
    since G is constant while samples are drawn. At τ = 0 with `adapt="always"` the rule is
    `torch.optim.RMSprop(lr, alpha, eps)`, bit for bit.

    Args:
        params: parameters or parameter groups.
        lr: step size for the mean potential; it multiplies the preconditioned gradient.
        alpha: decay α of the squared gradients' average, in [0, 1).
        eps: λ > 0, which bounds the preconditioner by 1/λ.
        adapt: when G adapts: "always", as in the paper; "burn-in", until a schedule's sampling stages, in which it is
            frozen; or a number of steps, after which it is frozen.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`.

    Source: Li et al. 2016, Algorithm 1.

    Example::

        module = BayesianModule(net, Categorical(), sampler=partial(pSGLD, adapt="burn-in"), lr=1e-3)
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        alpha: float = 0.99,
        eps: float = 1e-5,
        adapt: Adapt = ALWAYS,
        **shared: Any,
    ) -> None:
        check_within("alpha", alpha, "[0, 1)")
        check_positive("eps", eps)
        super().__init__(params, lr, **shared)
        self._add_defaults(alpha=alpha, eps=eps)
        self._add_adaptation(adapt)

    @property
    def counts_steps(self) -> bool:
        return not self.always_adapts  # the average is not corrected for its beginning

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        averaged = self._average_squares(group, params, grads, group["alpha"])
        factor, scale = -group["lr"] * group["gradient_multiplier"], square_root(self._noise_variance(group))
        for ((targets, gradients, squares), drawn, *_), inverse in self._parts(noise, params, grads, averaged):
            torch._foreach_copy_(inverse, squares)
            torch._foreach_sqrt_(inverse)
            torch._foreach_add_(inverse, group["eps"])  # 1/G
            self._bound(group, inverse)
            self._add_quotients(targets, gradients, inverse, factor)
            if drawn is None:
                continue
            torch._foreach_sqrt_(inverse)
            if isinstance(scale, Tensor):
                torch._foreach_div_(drawn, inverse)
                self._add(targets, drawn, scale)
            else:
                torch._foreach_addcdiv_(targets, drawn, inverse, scale)

    def preconditioner(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        group, inverse = self._group_of(params), list(torch._foreach_sqrt(self._buffers(params, "square_avg")))
        torch._foreach_add_(inverse, group["eps"])
        self._bound(group, inverse)
        return list(torch._foreach_reciprocal(inverse))


# -- adam sgld ---------------------------------------------------------------------------------------------------------


class AdamSGLD(PreconditionedSampler):
    """SGLD with the step of Adam: its averaged gradient, and its preconditioner, which is frozen after burn-in.

        M ← β₁·M + (1-β₁)·κ·g
        V ← β₂·V + (1-β₂)·g²   in the k-th step that adapts,   G = 1/(√(V/(1-β₂^k)) + λ), at most 10·N if τ > 0
        θ ← θ - lr·G⊙M/(1-β₁^t) + √(2·lr·τ·G/N)⊙ξ   in step t

    While samples are drawn G is constant, so its divergence Γ is 0 and the stationary law is exp(-U/τ) up to a bias of
    order lr/(1-β₁). The averaged gradient keeps the temperature: its gain is one. The adaptive drift g + a·M/√V of Kim
    et al. has a gain of 1 + a/√V with the noise of g alone, so it samples at a lower temperature, another in each
    coordinate; it is not offered. At τ = 0, while G adapts, the rule is `torch.optim.Adam(lr, betas, eps)`, bit for
    bit.

    Args:
        params: parameters or parameter groups.
        lr: step size for the mean potential; it multiplies the preconditioned gradient.
        betas: decays β₁ of the averaged gradient and β₂ of the averaged squares, each in [0, 1).
        eps: λ > 0, which bounds the preconditioner by 1/λ.
        adapt: when G adapts: "burn-in", until a schedule's sampling stages, and again in the exploration stage of each
            cycle; a number of steps, after which it is frozen in any case; or "always", whose law is not exact, as in
            `pSGLD`. A loop without a schedule passes a number, or calls `set_adapting(False)`.
        shared: `num_data`, `temperature`, `num_chains`, `seed`, `first_chain`, `noise_ahead`, as in `Sampler`.

    Raises:
        ValueError: for a bad argument, see `Sampler`; at the start of a fit whose schedule has no burn-in.

    Source: Li et al. 2016, Algorithm 1, with the averages of Kingma & Ba 2015; Kim, Song & Liang 2022 (Stochastic
    gradient Langevin dynamics with adaptive drifts) for the other use of them.

    Example::

        module = BayesianModule(net, Categorical(), sampler=AdamSGLD, lr=1e-3)
    """

    elementwise: ClassVar[bool] = True
    takes_blocks: ClassVar[bool] = True
    averages: ClassVar[tuple[str, ...]] = ("square_avg", "grad_avg")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adapt: Adapt = BURN_IN,
        **shared: Any,
    ) -> None:
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise ValueError(f"betas must be two numbers, got {betas!r}")
        for index, beta in enumerate(betas):
            check_within(f"betas[{index}]", beta, "[0, 1)")
        check_positive("eps", eps)
        super().__init__(params, lr, **shared)
        self._add_defaults(betas=tuple(betas), eps=eps, updates=0)
        self._add_adaptation(adapt)

    def counted(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (*super().counted(group), "updates")

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        decay, multiplier = group["betas"][0], group["gradient_multiplier"]
        group["updates"] += 1
        averaged = self._average_squares(group, params, grads, group["betas"][1])
        means = self._buffers(params, "grad_avg")
        if isinstance(multiplier, Tensor) or multiplier != 1:
            torch._foreach_mul_(means, decay)
            self._add(means, grads, (1 - decay) * multiplier)
        else:
            torch._foreach_lerp_(means, grads, 1 - decay)
        factor, variance = -(group["lr"] / (1 - decay ** group["updates"])), self._noise_variance(group)
        for ((targets, drifts, squares), drawn, *_), scratch in self._parts(noise, params, means, averaged):
            inverse = self._inverse(group, squares, scratch)  # 1/G
            self._add_quotients(targets, drifts, inverse, factor)
            if drawn is not None:
                self._add_scaled_noise(targets, drawn, inverse, variance)

    def preconditioner(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        squares = self._buffers(params, "square_avg")
        inverse = self._inverse(self._group_of(params), squares, [torch.empty_like(square) for square in squares])
        return list(torch._foreach_reciprocal(inverse))

    def _inverse(self, group: dict[str, Any], squares: list[Tensor], out: list[Tensor]) -> list[Tensor]:
        """Write 1/G to `out`."""
        torch._foreach_copy_(out, squares)
        torch._foreach_sqrt_(out)
        torch._foreach_div_(out, unbiased(group["betas"][1], group["averaged"]) ** 0.5)
        torch._foreach_add_(out, group["eps"])
        self._bound(group, out)
        return out
