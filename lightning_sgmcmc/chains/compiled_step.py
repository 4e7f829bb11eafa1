"""A step of all chains as one compiled function of tensors: gradient, prior and update.

A step of a small network is some fifty operations, each of which takes longer to call than to compute. The operations
of `chains.traced`, and those of the sampler's rule, are therefore compiled together, and called for one step after
another. The numbers are those of the same formulas, up to rounding.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_sgmcmc.chains.traced import NotTraceableError, check_alike, trace, with_gradient
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.rows import FlatGroup, FlatParameters
from lightning_sgmcmc.samplers.sampler import CONTROLS
from lightning_sgmcmc.tensors import Control

FOLLOWING = ("last_lr",)
"""Entries of a parameter group that a rule sets to a control of the step."""


class Controls(NamedTuple):
    """The controls of the coming steps of a group, a number or one for each chain, shape (C,)."""

    lr: list[Control]
    temperature: list[Control]


class CompiledSteps:
    """Makes steps of a sampler by compiled functions, one for each form of a batch and of the controls.

    Args:
        energies: returns the loss and further tensors, as `RowEnergies` computes them.
        model: the model that it computes.
        others: its other tensors, by name.
        flat: the sampled parameters, with their state as rows.
        inverse: 1/N, shape ().
    """

    def __init__(
        self,
        energies: Any,
        model: Any,
        others: Mapping[str, Tensor],
        flat: FlatParameters,
        sampler: Sampler,
        inverse: Tensor,
    ) -> None:
        self._energies = energies
        self._model = model
        self._others = others
        self._flat = flat
        self._sampler = sampler
        self._inverse = inverse
        self._known: dict[Any, Any] = {}

    def run(
        self,
        batches: Sequence[Sequence[Tensor]],
        structure: Any,
        axis: int | None,
        factor: float | None,
        noise: Tensor | None,
        controls: Sequence[Controls],
        first: Tensor | None = None,
    ) -> Tensor | None:
        """Make steps; return Ũ/N and log p(θ) of each, shape (K, 2, C).

        If one of these is not finite, or the last state, no step is made, and it returns None.

        Args:
            batches: the tensors of each step's batch, of one form, with a leading axis of chains if `axis` is 0.
            structure: what they are the leaves of.
            factor: the weight of the log-likelihoods, see `DataWeights`.
            noise: normal numbers, shape (K, C, draws · P); None for steps without noise.
            controls: those of each group.
            first: the first step's energies, computed in another way.

        Raises:
            NotTraceableError: if the rule is more than tensor operations, or sets other entries of its groups, or the
                energies are not `first`; no step is made then.
        """
        sampler, flat = self._sampler, self._flat
        buffers = [(place, name, rows) for place, group in enumerate(flat.groups) for name, rows in group.buffers]
        columns, form = self._columns(controls)
        parts = batches[0]
        shapes = tuple([(part.shape, part.dtype, part.stride()) for part in parts])
        options = repr([_fixed(group) for group in sampler.param_groups])
        names = tuple([(place, name) for place, name, _ in buffers])
        key = structure, shapes, axis, factor is None, noise is None, form, names, options, sampler.num_data
        weight = self._inverse if factor is None else torch.full_like(self._inverse, factor)
        fixed = [self._inverse, weight, *self._others.values()]
        state = [flat.values, *(rows for *_, rows in buffers)]
        if key not in self._known:
            self._known[key] = None
            examples = state, fixed, [] if noise is None else [noise[0]], [*parts], [column[0] for column in columns]
            self._known[key] = self._compiled(names, structure, axis, factor is None, examples)
        function = self._known[key]
        if function is None:
            raise NotTraceableError("the rule sets its options in a step")
        numbers: list[Tensor] = []
        drawn: list[Sequence[Tensor]] = [] if noise is None else [noise.unbind()]
        for batch, *own in zip(batches, *drawn, *columns, strict=True):
            given = [*own[: len(drawn)], *batch, *own[len(drawn) :]]
            *state, found = function(*state, *fixed, *given)
            numbers.append(found)
        energies = torch.stack(numbers)
        if first is not None:
            check_alike(energies[0], first)
        if not bool(energies.isfinite().all() & state[0].isfinite().all()):
            return None
        for target, source in zip([flat.values, *(rows for *_, rows in buffers)], state, strict=True):
            target.copy_(source)
        for group, (lr, _) in zip(sampler.param_groups, controls, strict=True):
            for name in FOLLOWING:
                if name in group:
                    group[name] = lr[-1]
        return energies

    def _columns(self, controls: Sequence[Controls]) -> tuple[list[Sequence[Tensor]], Any]:
        """Return the controls of all groups as tensors, one for each step, and their shapes."""
        columns: list[Sequence[Tensor]] = []
        form: list[Any] = []
        for group in controls:
            for values in group:
                if isinstance(values[0], Tensor):
                    columns.append([value for value in values if isinstance(value, Tensor)])
                    form.append(values[0].shape)
                else:
                    columns.append(torch.tensor(values, dtype=self._flat.values.dtype).unbind())
                    form.append(None)
        return columns, tuple(form)

    def _compiled(
        self, names: Any, structure: Any, axis: int | None, is_mean: bool, examples: tuple[list[Tensor], ...]
    ) -> Any:
        """Return the step as a compiled function of the state, what is fixed, noise, a batch's tensors and controls."""
        counts = [len(part) for part in examples]

        def step(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = iter(tensors)
            state, fixed, drawn, parts, columns = ([next(given) for _ in range(count)] for count in counts)
            inverse, weight, *others = fixed
            own = pytree.tree_unflatten(parts, structure)
            named = dict(zip(self._others, others, strict=True))
            used = None if is_mean else weight
            gradient, _, numbers, _ = with_gradient(self._energies, state[0], named, own, axis, inverse, used)
            values, *rows = (tensor.clone() for tensor in state)
            self._update(values, gradient, dict(zip(names, rows, strict=True)), [n.clone() for n in drawn], columns)
            return values, *rows, numbers

        tensors: list[Any] = [tensor for part in examples for tensor in part]
        traced = trace(step, tensors, self._model)
        try:
            with torch.no_grad():
                return torch._inductor.compile(traced, tensors, options={"cpp_wrapper": True})
        except Exception as error:  # of a compiler that fails or is missing
            raise NotTraceableError(f"the compiler failed with {str(error).strip()[:150]}") from error

    def _update(
        self,
        values: Tensor,
        gradient: Tensor,
        buffers: Mapping[tuple[int, str], Tensor],
        noise: list[Tensor],
        columns: list[Tensor],
    ) -> None:
        """Make the rule's update of rows in place, with controls that are tensors."""
        sampler, start, width = self._sampler, 0, self._flat.values.shape[1]
        rule: Any = object.__new__(type(sampler))  # a copy whose state is these tensors
        vars(rule).update(vars(sampler))
        flat: Any = object.__new__(FlatParameters)
        vars(flat).update(vars(self._flat))
        flat.groups, flat._of_values = [], {}
        rule.flat, rule._scratch = flat, {}
        for place, (group, part) in enumerate(zip(sampler.param_groups, self._flat.groups, strict=True)):
            stop = start + part.values.shape[1]
            own = values[:, start:stop]
            rows = {name: tensor for (index, name), tensor in buffers.items() if index == place}
            flat._of_values[id(own)] = FlatGroup.with_rows(part, own, gradient[:, start:stop], rows)
            options = dict(group) | {"lr": columns[2 * place], "temperature": columns[2 * place + 1]}
            before = dict(options)
            drawn = (
                [noise[0][:, start + skip : stop + skip] for skip in range(0, noise[0].shape[1], width)]
                if noise
                else None
            )
            rule.update(options, [own], [gradient[:, start:stop]], drawn)
            for name, value in options.items():
                if name not in FOLLOWING and value is not before.get(name):
                    raise NotTraceableError(f"{type(sampler).__name__} sets {name!r} in a step")
            start = stop


def _fixed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a group that are written into the compiled function."""
    left_out = ("params", "initial_lr", *CONTROLS[:2], *FOLLOWING)
    return {name: value for name, value in group.items() if name not in left_out}


def can_be_compiled(sampler: Sampler) -> bool:
    """Return whether a sampler's next steps are a function of rows: whether its whole state is in them."""
    flat = sampler.flat
    if flat is None or not sampler._updates_rows() or sampler.stand_in is not None or sampler.held:
        return False
    if any(map(sampler.sets_options, sampler.param_groups)):
        return False
    if any(isinstance(value, Tensor) for group in sampler.param_groups for value in _fixed(group).values()):
        return False
    known = [name for group in flat.groups for name, _ in group.buffers]
    of_groups = [len(sampler.state[p]) for p in flat.parameters if p in sampler.state]
    return not of_groups or (len(of_groups) == len(flat.parameters) and set(of_groups) == {len(set(known))})
