"""Observation of a chain's steps: products of weights, gradients and momenta, averaged over batches of steps.

`lightning_sgmcmc.health.estimates` defines the quantities that they estimate.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import BatchMeans, merge_batches, without_warm_up
from lightning_sgmcmc.health.estimates import ANCHORED, KINETIC, NOISE, NUM_ROWS, PLAIN, Observations
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.tensors import Control, inner_products, square_norms


class GroupStep(NamedTuple):
    """A step of one parameter group: its law, τ, κ, N and the momentum of each parameter, None without one."""

    law: StepLaw
    temperature: Control
    gradient_multiplier: Control
    num_data: int
    momenta: Sequence[Tensor | None]


class Clipping(NamedTuple):
    """How gradients are clipped after the observation; a limit of None or 0 disables it."""

    limit: float | None = None
    by: Literal["norm", "value"] = "norm"


NO_CLIPPING = Clipping()


Batches = tuple[Tensor, Tensor]
"""Means (B, length) and lengths (B,) of batches of steps."""
OverProcesses = Callable[[Tensor], Tensor]
"""Reduces or gathers a tensor over processes, or returns this process's part of a gathered one."""

NUM_EXTRAS = 5
ENERGY, SQUARE_ENERGY, TEMPERATURE, CLIPPED, LOG_PRIOR = range(NUM_EXTRAS)


def unreduced(tensor: Tensor) -> Tensor:
    """Return this process's tensor unchanged."""
    return tensor


class StepObserver:
    """Observes the steps of one or several chains in their sampling stages, and stores batch means.

    The order in a step: `begin_stage` before the first step of a stage, `before_update` when the gradients are
    complete, `after_update` with the laws of the step. `add` then completes a pending observation. `end_stage` closes
    a stage. It stores three copies of the parameters.

    Args:
        params: the parameters, with a leading axis for several chains.
        group_sizes: number of parameters in each parameter group, in the order of `params`.
        numels: sampled coordinates of each parameter in one chain; None is all of them.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Tensor],
        group_sizes: Sequence[int],
        num_chains: int = 1,
        every_n_steps: int = 20,
        warm_up: float = 0.25,
        clipping: Clipping = NO_CLIPPING,
        numels: Sequence[int] | None = None,
    ) -> None:
        self._names, self._params = list(names), [p.detach() for p in params]
        self._slices = [slice(sum(group_sizes[:i]), sum(group_sizes[: i + 1])) for i in range(len(group_sizes))]
        self._chains, self._every, self._warm_up = num_chains, every_n_steps, warm_up
        self._clipping = clipping
        self._numels = [p.numel() // num_chains for p in params] if numels is None else list(numels)
        counts = torch.tensor(self._numels, dtype=torch.float32).to(params[0])
        self._inverse_numels = 1 / (counts[:, None] if num_chains > 1 else counts)
        self._anchors: list[Tensor] = []
        self._previous: list[Tensor] = []  # the gradients of the step before an observed one
        self._previous_step = -1
        self._variances: list[Control | None] = [None] * len(self._slices)
        self._past: Batches | None = None  # of the stages that have ended
        self._stage: BatchMeans | None = None
        self._pending: Tensor | None = None
        self.missing: set[str] = set()
        self.count = 0
        """Number of observations so far."""

    @property
    def in_stage(self) -> bool:
        """Whether a stage has begun."""
        return self._stage is not None

    @property
    def is_pending(self) -> bool:
        """Whether `add` has an observation to complete."""
        return self._pending is not None

    @property
    def length(self) -> int:
        """Number of entries of a batch mean."""
        return NUM_ROWS * len(self._params) + NUM_EXTRAS

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_stage(self) -> None:
        """Begin a stage at the current parameters."""
        self._allocate()
        torch._foreach_copy_(self._anchors, self._params)
        self._variances = [None] * len(self._slices)
        self._previous_step = -1

    def _allocate(self) -> None:
        if not self._anchors:
            self._anchors = [torch.empty_like(p) for p in self._params]
            self._previous = [torch.empty_like(p) for p in self._params]
        self._stage = BatchMeans(self.length, self._params[0])

    def needs(self, step: int) -> bool:
        """Return whether `before_update` needs the gradients of step k."""
        return step % self._every == 0 or (step + 1) % self._every == 0

    @torch.no_grad()
    def before_update(
        self, step: int, gradients: Sequence[Tensor | None], metric: Callable[[], list[Tensor]] | None = None
    ) -> None:
        """Observe the complete gradients of step 1, 2, … before clipping; a parameter without one is omitted.

        Args:
            metric: returns the preconditioner's tensors, which are overwritten; None or an empty list is the identity.
        """
        if any(gradient is None for gradient in gradients):
            self.missing |= {name for name, g in zip(self._names, gradients, strict=True) if g is None}
        complete = [torch.zeros_like(p) if g is None else g for p, g in zip(self._params, gradients, strict=True)]
        if step % self._every == 0 and self._previous_step == step - 1:
            self._pending = self._forces(complete, metric() if metric is not None else [])
            self._previous_step = -1  # their memory was reused
        if (step + 1) % self._every == 0:
            torch._foreach_copy_(self._previous, complete)
            self._previous_step = step

    def _forces(self, gradients: list[Tensor], scales: list[Tensor]) -> Tensor:
        """Return θ·g, c·g, g·g and (g - previous g)² for each tensor, and whether g will be clipped."""
        changes, clipped = self._previous, self._clipped_share(gradients)
        torch._foreach_sub_(changes, gradients)
        if scales:  # norms in the metric of the preconditioner
            torch._foreach_sqrt_(scales)
            torch._foreach_mul_(changes, scales)
        weighted = torch._foreach_mul(gradients, scales) if scales else gradients
        parts = [
            inner_products(self._params, gradients, self._chains),
            inner_products(self._anchors, gradients, self._chains),
            square_norms(weighted, self._chains),
            square_norms(changes, self._chains),
        ]
        return torch.cat([*(part.flatten() for part in parts), clipped.reshape(1)])

    def _clipped_share(self, gradients: list[Tensor]) -> Tensor:
        limit, by = self._clipping
        clipped = torch.zeros((), dtype=gradients[0].dtype, device=gradients[0].device)
        if not limit:
            return clipped
        if by == "value":
            return (torch.stack(torch._foreach_norm(gradients, math.inf)).amax() > limit).to(clipped)
        return (square_norms(gradients, self._chains).sum(0).sqrt() > limit).to(clipped).mean()

    def discard(self) -> None:
        """Drop the pending observation of a step that was skipped."""
        self._pending = None

    def after_update(self, laws: Sequence[StepLaw]) -> None:
        """Update the momenta's variance by each group's law, after every step of a stage."""
        pairs = zip(laws, self._variances, strict=True)
        self._variances = [law.momentum_variance(before) for law, before in pairs]

    @torch.no_grad()
    def add(self, groups: Sequence[GroupStep], energy: Tensor, log_prior: Tensor) -> None:
        """Complete the pending observation, with Ũ and log p(θ) as means over chains."""
        assert self._stage is not None
        assert self._pending is not None
        self._stage.add(self._row(groups, self._pending, energy, log_prior))
        self.count, self._pending = self.count + 1, None

    def _row(self, groups: Sequence[GroupStep], forces: Tensor, energy: Tensor, log_prior: Tensor) -> Tensor:
        """Return the four numbers of each tensor, and the extras."""
        rows: list[list[Tensor]] = [[] for _ in range(NUM_ROWS)]
        several = self._chains > 1
        shape = (4, -1, self._chains) if several else (4, -1)
        plain, anchored, squares, changes = forces[:-1].reshape(shape)
        for group, part, variance in zip(groups, self._slices, self._variances, strict=True):
            inverse, kappa = self._inverse_numels[part], group.gradient_multiplier
            scale = group.num_data * kappa / group.temperature
            factor = group.law.gradient_noise_factor * kappa**2
            rows[PLAIN].append(plain[part] * inverse * scale)
            rows[ANCHORED].append(anchored[part] * inverse * scale)
            rows[NOISE].append(changes[part] * inverse * (factor / 2))
            if variance is None:
                rows[KINETIC].append(1 + squares[part] * inverse * factor)
            else:
                pairs = zip(group.momenta, self._params[part], strict=True)
                momenta = [torch.zeros_like(p) if m is None else m for m, p in pairs]
                rows[KINETIC].append(square_norms(momenta, self._chains) * inverse / variance)
        temperature = groups[0].temperature
        if not isinstance(temperature, Tensor):
            temperature = energy.new_tensor(temperature) if energy.device.type == "cpu" else energy * 0 + temperature
        extras = torch.stack([energy, energy.square(), temperature.mean(), forces[-1].to(energy), log_prior.to(energy)])
        # Each chain's numbers are in units of its own step size and temperature; the mean over the chains is kept.
        shown = (part.mean(1) if several else part for row in rows for part in row)
        return torch.cat([*shown, extras.to(forces)])

    # -- batches ------------------------------------------------------------------------------------------------------

    def end_stage(self) -> None:
        """Store the stage's batches and close it."""
        self._past, self._stage, self._pending = self.batches(), None, None

    def batches(self) -> Batches | None:
        """Return all batches so far, of this stage and earlier ones; None without any."""
        parts = [self._past] if self._past is not None else []
        if self._stage is not None:
            parts.append(without_warm_up(*self._stage.full(), self._warm_up))
        parts = [part for part in parts if len(part[1])]
        if not parts:
            return None
        return merge_batches(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def observations(
        self,
        allowance: Sequence[float],
        mean_of_chains: OverProcesses = unreduced,
        mean_of_energies: OverProcesses = unreduced,
    ) -> Observations:
        """Return all batches so far, with the mini-batch noise that the rule corrects for in each parameter."""
        count = len(self._params)
        means, counts = self.batches() or (torch.zeros(0, self.length, dtype=torch.float64), torch.zeros(0))
        extras = mean_of_energies(means[:, NUM_ROWS * count :])
        means = mean_of_chains(means)
        kept = [i for i, name in enumerate(self._names) if name not in self.missing]
        weights = counts / counts.sum()
        temperature = float((extras[:, TEMPERATURE] * weights).sum()) if len(counts) else math.nan
        return Observations(
            names=[self._names[i] for i in kept],
            numels=[self._numels[i] * self._chains for i in kept],
            values=means[:, : NUM_ROWS * count].reshape(-1, NUM_ROWS, count)[:, :, kept],
            energies=extras[:, ENERGY],
            square_energies=extras[:, SQUARE_ENERGY],
            counts=counts,
            temperature=round(temperature, 6) if math.isfinite(temperature) else 1.0,
            allowance=[allowance[i] for i in kept],
            clipped=float((extras[:, CLIPPED] * weights).sum()) if self._clipping.limit else None,
            log_priors=extras[:, LOG_PRIOR],
            num_chains=self._chains,
        )

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(
        self, mean_of_chains: OverProcesses = unreduced, gather: OverProcesses = unreduced
    ) -> dict[str, Any]:
        """Return the batches of earlier stages, and the present stage; `gather` takes parameter-like tensors."""
        means, counts = self._past or (None, None)
        stage = None
        if self._stage is not None:
            stage = self._stage.state_dict()
            stage["sums"] = mean_of_chains(stage["sums"]).to("cpu", copy=True)
            stage["anchors"] = [gather(anchor).to("cpu", copy=True) for anchor in self._anchors]
            awaited = self._previous if self._previous_step >= 0 else []
            stage["previous"] = [gather(gradient).to("cpu", copy=True) for gradient in awaited]
            variances = [gather(v) if _is_of_chains(v) else v for v in self._variances]
            stage |= {"previous_step": self._previous_step, "variances": variances}
        return {
            "means": None if means is None else mean_of_chains(means),
            "counts": counts,
            "stage": stage,
            "missing": sorted(self.missing),
            "observations": self.count,
        }

    def load_state_dict(self, state: Mapping[str, Any], own: OverProcesses = unreduced) -> bool:
        """Restore from `state_dict()` if its batches belong to this network; return whether they do."""
        missing: Collection[str] = state["missing"]
        self.missing, self.count = set(missing), state["observations"]
        means, counts, stage = state["means"], state["counts"], state["stage"]
        lengths = {part.shape[1] for part in (means, None if stage is None else stage["sums"]) if part is not None}
        is_own = lengths <= {self.length}
        self._past = (means, counts) if is_own and means is not None else None
        if is_own and stage is not None:
            self._allocate()
            assert self._stage is not None
            self._stage.load_state_dict(stage)
            for target, saved in zip(
                self._anchors + self._previous, stage["anchors"] + stage["previous"], strict=False
            ):
                target.copy_(own(saved))
            self._previous_step = stage["previous_step"]
            device = self._params[0].device
            self._variances = [own(v).to(device) if _is_of_chains(v) else v for v in stage["variances"]]
        return is_own


def _is_of_chains(variance: Any) -> TypeGuard[Tensor]:
    return isinstance(variance, Tensor) and variance.numel() > 1
