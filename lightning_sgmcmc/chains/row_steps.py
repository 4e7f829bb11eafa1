"""What the steps that are made at once are functions of: rows, batches, controls, and what callbacks do in each step.

`chains.compiled_step` and `chains.listed_steps` make them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_sgmcmc.chains.traced import NotTraceableError, check_alike, first_line, with_gradient
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.rows import FlatGroup, FlatParameters
from lightning_sgmcmc.tensors import Control, exact

FOLLOWING = ("last_lr",)
"""Entries of a parameter group that a rule sets to a control of the step."""

Clip: TypeAlias = "Callable[[Tensor], Tensor] | None"
"""Returns the gradients that a rule takes, shape (C, P), from the energies'; None if they are those."""


class Controls(NamedTuple):
    """The controls of the coming steps of a group, a number or one for each chain, shape (C,)."""

    lr: list[Control]
    temperature: list[Control]


class Batches(NamedTuple):
    """The batches of the coming steps; with choices, tensors and weights have an axis of candidates after the first.

    Attributes:
        tensors: those of all steps' batches, shape (K, ...), with an axis of chains after the first if `axis` is 0.
        structure: what the tensors of a batch are the leaves of.
        axis: that of chains, if each has its own batches.
        weights: those of the data's log-likelihoods in Ũ/N, shape (K, B), 0 for what fills up short batches.
    """

    tensors: Sequence[Tensor]
    structure: Any
    axis: int | None
    weights: Tensor

    def of(self, chains: slice) -> "Batches":
        """Return those of some chains."""
        own = self.tensors if self.axis is None else [tensor[:, chains] for tensor in self.tensors]
        return self._replace(tensors=own)


class StepPart(Protocol):
    """What a callback does in compiled steps: it scales their gradients, and learns from their energies.

    Attributes:
        settings: what it computes by, as text.
        scales: whether `multiplier` returns κ of a step.
        keeps_each: whether `end` needs the energies of each step.
        state: tensors that a step changes.
        fixed: tensors that it reads.
    """

    settings: str
    scales: bool
    keeps_each: bool
    state: Sequence[Tensor]
    fixed: Sequence[Tensor]

    def numbers(self, steps: int) -> Tensor:
        """Return a number of each of the coming steps, shape (K,)."""

    def multiplier(
        self, state: Sequence[Tensor], fixed: Sequence[Tensor], energies: Tensor, temperature: Tensor, num_data: Tensor
    ) -> tuple[Tensor | None, Any]:
        """Return κ of a step, shape (C,), None unless it `scales`, and what `learn` needs, from Ũ/N and log p(θ), shape
        (2, C)."""

    def learn(self, state: Sequence[Tensor], found: Any, number: Tensor) -> list[Tensor]:
        """Return the state after a step."""

    def end(self, steps: int, energies: Tensor) -> None:
        """Take note of steps after which `state` holds theirs; with `keeps_each`, the energies have the shape
        (K, 2, C)."""


@dataclass(frozen=True)
class ControlVariate:
    """What reduces the mini-batch noise of steps that are made at once: the batch and all data at a snapshot θ_q.

        g ← g + (1/n)·Σ_{i in batch} ∇ℓ_i(θ_q) + ḡ,   Ũ/N ← Ũ/N + (1/n)·Σ_{i in batch} ℓ_i(θ_q) - ℓ̄

    with ℓ_i = log p(y_i|x_i,θ) of datum i.

    Attributes:
        values: θ_q, shape (C, P).
        others: the model's other tensors at that time, by name.
        gradient: ḡ, the mean over all data of -∇ℓ_i(θ_q), shape (C, P); None if gradients stay as they are.
        mean: ℓ̄, the mean over all data of ℓ_i(θ_q), shape (C,), float64; None if energies stay as they are.
        end: is called with the number of steps that were made.
    """

    values: Tensor
    others: Mapping[str, Tensor]
    gradient: Tensor | None
    mean: Tensor | None
    end: Callable[[int], None]

    @property
    def form(self) -> Any:
        """What it consists of."""
        return *self.others, self.gradient is None, self.mean is None

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, from which `of` makes it again."""
        last = [tensor for tensor in (self.gradient, self.mean) if tensor is not None]
        return [self.values, *self.others.values(), *last]

    def of(self, tensors: Sequence[Tensor]) -> "ControlVariate":
        """Return it with other tensors in the place of its own."""
        values, *rest = tensors
        left = iter(rest)
        others = {name: next(left) for name in self.others}
        gradient = None if self.gradient is None else next(left)
        mean = None if self.mean is None else next(left)
        return replace(self, values=values, others=others, gradient=gradient, mean=mean)


class GradientChoice(Protocol):
    """What chooses the gradient of a step among those of J candidates, each a batch or several.

    Attributes:
        settings: what it computes by, as text.
        candidates: J.
    """

    settings: str
    candidates: int

    def chances(self, first: int, data: Tensor) -> Tensor:
        """Return the numbers by which steps choose, the sampler's from `first` on, counted from 0, shape (K, C, J-1).

        Args:
            data: how many data each candidate has, shape (K, J); 0 for none.
        """

    def choose(
        self, rule: Sampler, groups: Sequence[dict[str, Any]], gradients: Tensor, chances: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return one of the gradients, shape (C, J, P), for each chain, shape (C, P), and a count, shape (C,), int64.

        Args:
            groups: the sampler's groups with the controls of the step, whose parameters are rows.
            chances: those of the step, shape (C, J-1).
        """

    def end(self, chances: Tensor, counted: Tensor) -> None:
        """Take note of steps that were made, and of the sum of their counts, shape (C,)."""


class Choices(NamedTuple):
    """The choices of the coming steps.

    Attributes:
        by: what chooses.
        chances: its numbers, shape (K, C, J-1).
        shares: the weight of each candidate's energy in that of the step, shape (K, J).
    """

    by: GradientChoice
    chances: Tensor
    shares: Tensor


class Rows(NamedTuple):
    """The rows of some chains, and the rule that updates them.

    Attributes:
        at: the chains.
        values: their parameters, shape (C', P).
        rule: a sampler with their state.
        groups: their columns by the rule's groups.
        others: the model's other tensors.
        generator: draws the noise of a chain that makes its steps alone.
    """

    at: slice
    values: Tensor
    rule: Sampler
    groups: Sequence[FlatGroup]
    others: Sequence[Tensor]
    generator: torch.Generator | None = None

    def of(self, controls: Sequence[Controls]) -> list[Controls]:
        """Return the controls of these chains."""
        if self.generator is None:  # they are all
            return [*controls]
        return [Controls(*([_of(own, self.at) for own in values] for values in group)) for group in controls]


def _of(control: Control, chains: slice) -> Control:
    return control[chains] if isinstance(control, Tensor) and control.dim() else control


def rule_of(sampler: Sampler, flat: FlatParameters, **attributes: Any) -> Any:
    """Return a copy of a sampler whose rows and state are others, and some attributes."""
    rule: Any = object.__new__(type(sampler))
    vars(rule).update(vars(sampler) | {"flat": flat, "_scratch": {}} | attributes)
    return rule


def corrected(energies: Tensor) -> Tensor:
    """Return Ũ/N with its control variate, if it has one, and log p(θ), shape (…, 2, C), from energies of steps."""
    if energies.shape[-2] == 2:
        return energies
    potential, log_prior, term = exact(energies).unbind(-2)
    return torch.stack([potential + term, log_prior], -2)


class RowSteps:
    """What steps of a sampler that are made at once are functions of, and the check of their energies.

    Args:
        energies: returns the loss and further tensors, as `RowEnergies` computes them.
        likelihood: returns the data's part of the loss and of -Ũ/N, as `RowEnergies` does.
        model: the model that it computes.
        others: its other tensors, by name.
        flat: the sampled parameters, with their state as rows.
        inverse: 1/N, shape ().
        clip: see `Clip`.
        apart: whether chains make the coming steps one after another, which they do not with a stand-in; these have
            no variate, no choices, and no part of a callback.
    """

    def __init__(
        self,
        energies: Any,
        likelihood: Any,
        model: Any,
        others: Mapping[str, Tensor],
        flat: FlatParameters,
        sampler: Sampler,
        inverse: Tensor,
        clip: Clip = None,
        *,
        apart: bool = False,
    ) -> None:
        self._energies = energies
        self._clip = clip
        self._likelihood = likelihood
        self._model = model
        self._others = others
        self._flat = flat
        self._sampler = sampler
        self._inverse = inverse
        self._apart = self._draws_later = apart
        self._for_noise: Tensor | None = None
        """Memory for the noise of many steps."""
        self._known: dict[Any, Any] = {}
        """Functions by what they are made for."""
        self.memory: Sequence[Tensor] = ()
        """Memory for the tensors of the batches of many steps, from which these need not be copied."""

    def noise(self, steps: int) -> Tensor:
        """Return the normal numbers of the coming steps, shape (K, C, draws · P), or where they are drawn later, for
        captured steps or chains that make theirs apart, memory for those of one step, shape (C, draws · P)."""
        later = self._draws_later
        return self._sampler.noise_in_place()[0] if later else self._sampler.next_noise(steps, self._for_noise)

    @property
    def _is_apart(self) -> bool:
        return self._apart and self._sampler.stand_in is None

    def _all_rows(self) -> Iterator[Rows]:
        """Return, one by one, the chains that make their steps together."""
        flat, sampler, others = self._flat, self._sampler, [*self._others.values()]
        if not self._is_apart:
            yield Rows(slice(None), flat.values, sampler, flat.groups, others)
            return
        generators = sampler.noise_in_place()[2]
        for chain in range(len(flat.values)):
            at = slice(chain, chain + 1)
            rows = [{name: buffer[at] for name, buffer in part.buffers} for part in flat.groups]
            own = flat.with_rows([part.values[at] for part in flat.groups], rows)
            options = [dict(group) for group in sampler.param_groups]
            rule = rule_of(sampler, own, num_chains=1, param_groups=options)
            yield Rows(at, flat.values[at], rule, own.groups, [tensor[at] for tensor in others], generators[chain])

    def _with_gradient(
        self,
        values: Tensor,
        others: Mapping[str, Tensor],
        batch: Any,
        axis: int | None,
        inverse: Tensor,
        weights: Tensor,
        variate: ControlVariate | None,
        shares: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of a step, shape (C, P), and Ũ/N, log p(θ) and, if a variate corrects energies, its term
        in Ũ/N, shape (2 or 3, C).

        With the shares of candidates, shape (J,), batch and weights have an axis of these before others. Then it
        returns all gradients, shape (C, J, P), and the mean of the energies.
        """
        if shares is not None:

            def of_candidate(batch: Any, weights: Tensor) -> tuple[Tensor, Tensor]:
                found = with_gradient(self._energies, values, others, batch, axis, inverse, weights)
                return found[0], found[2]

            gradients, numbers = torch.vmap(of_candidate)(batch, weights)
            return gradients.transpose(0, 1), (shares[:, None, None] * numbers).sum(0)
        gradient, _, energies, _ = with_gradient(self._energies, values, others, batch, axis, inverse, weights)
        if variate is not None:
            gradient, energies = self._corrected(gradient, energies, others, batch, axis, weights, variate)
        return (gradient if self._clip is None else self._clip(gradient)), energies

    def _corrected(
        self,
        gradient: Tensor,
        energies: Tensor,
        others: Mapping[str, Tensor],
        batch: Any,
        axis: int | None,
        weights: Tensor,
        variate: ControlVariate,
    ) -> tuple[Tensor, Tensor]:
        """Return a step's gradient and energies with what a variate corrects."""
        there = {name: variate.others.get(name, tensor) for name, tensor in others.items()}
        if variate.gradient is None:
            _, found = self._likelihood(variate.values, there, batch, axis, weights)
        else:
            at_snapshot, _, found = with_gradient(self._likelihood, variate.values, there, batch, axis, weights)
            gradient = gradient - at_snapshot + variate.gradient  # first, to cancel exactly
        if variate.mean is not None:
            energies = torch.cat([energies, (found - variate.mean)[None].to(energies.dtype)])
        return gradient, energies

    def _count(self, controls: Sequence[Controls], count: int) -> None:
        """Set the entries of the sampler's groups that follow a step's controls, and those that count steps."""
        for group, (lr, _) in zip(self._sampler.param_groups, controls, strict=True):
            after = {name: lr[-1] for name in FOLLOWING if name in group}
            group.update(after | {name: group[name] + count for name in self._sampler.counted(group)})

    @torch.no_grad()
    def _check_last(self, batches: Batches, last: Tensor, choices: Choices | None) -> None:
        """Raise unless the last step's batch has these energies in the present state."""
        own = pytree.tree_unflatten([part[-1] for part in batches.tensors], batches.structure)
        shares = None if choices is None else choices.shares[-1]
        of_last = self._flat.values, self._others, own, batches.axis, self._inverse, batches.weights[-1], None, shares
        try:
            again = self._with_gradient(*of_last)[1]
        except Exception as error:  # of a network that draws numbers, say, under vmap
            raise NotTraceableError(first_line(error)) from error
        check_alike(again, last)
