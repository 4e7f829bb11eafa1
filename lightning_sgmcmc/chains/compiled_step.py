"""A step of all chains as one function of tensors, compiled or captured: gradient, prior and update.

A step of a small network is some fifty operations, each of which takes longer to call than to compute. The operations
of `chains.traced`, and those of the sampler's rule, are therefore compiled together, and called for one step after
another. On a GPU they are captured as a CUDA graph, with the noise of each chain, and replayed. The numbers are those
of the same formulas, up to rounding.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from lightning_sgmcmc.chains.row_steps import (
    FOLLOWING,
    Batches,
    Choices,
    Controls,
    ControlVariate,
    Rows,
    RowSteps,
    StepPart,
    corrected,
    rule_of,
)
from lightning_sgmcmc.chains.traced import MOST_FORMS, NotTraceableError, check_alike, trace
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.sampler import CONTROLS
from lightning_sgmcmc.tensors import sent

LEFT_OUT = {is_scaled: {"params", "initial_lr", *FOLLOWING, *CONTROLS[: 2 + is_scaled]} for is_scaled in (False, True)}
"""Entries that are no constants of a step; whether κ is one depends on whether steps have one of their own."""

TOGETHER = (64, 8, 1)
"""Steps of a captured graph, the longest first: to replay one takes as long as to call some operations."""
MOST_TOGETHER = 4_096
"""Numbers of a step up to which they are in a tensor with others."""
MOST_LOOPS = 64
_LOOPS: dict[str, Any] = {}
"""Compiled functions of this process, by their operations and shapes."""


class CompiledSteps(RowSteps):
    """Makes steps of a sampler by functions of tensors, one for each form of a batch and of the controls.

    Args:
        of_steps: see `RowSteps`.
        most: steps that are made at once.
        compiles: whether a captured function is compiled too.
        apart: see `RowSteps`.
    """

    def __init__(self, *of_steps: Any, most: int, compiles: bool = True, apart: bool = False) -> None:
        super().__init__(*of_steps, apart=apart)
        self._most, self._compiles = most, compiles
        self._captures = captures(self._flat.values.device)
        self._draws_later |= self._captures

    def run(
        self,
        batches: Batches,
        noise: Tensor | None,
        controls: Sequence[Controls],
        first: Tensor | None = None,
        last: Tensor | None = None,
        variate: ControlVariate | None = None,
        choices: Choices | None = None,
        part: StepPart | None = None,
    ) -> Tensor | None:
        """Make steps; return Ũ/N and log p(θ) of the last but one and of the last, shape (2, 2, C), or (2, 3, C) with
        the term of a variate of energies. If one of these is not finite in some step, or the last state, no step is
        made, and it returns None.

        Args:
            noise: see `noise`; None for steps without noise.
            controls: those of each group.
            first: the first step's energies, computed in another way.
            last: those of the last step's batch in the present state.
            variate: what corrects each step's gradient and energies.
            choices: of each step's gradient among several; None if the one that is given is used.
            part: what else is done in a step, without choices.

        Raises:
            NotTraceableError: if the rule is more than tensor operations, or sets other entries of its groups, or the
                energies are not `first` or `last`; no step is made then.
        """
        count, found = len(batches.weights), []
        if last is not None:
            self._check_last(batches, last, choices)
        for rows in self._all_rows():
            before = None if first is None else first[:, rows.at]
            drawn = self._drawn(rows, noise, count)
            of_rows = batches.of(rows.at), drawn, rows.of(controls), before, variate, choices, part
            if (made := self._made_by(rows, *of_rows)) is None:
                return None
            found.append(made)
        for state, after, _ in found:
            for target, source in zip(state, after, strict=True):
                target.copy_(source)
        energies = torch.cat([of_rows for *_, of_rows in found], -1)
        self._count(controls, count)
        if part is not None:
            part.end(count, corrected(energies))
        if variate is not None:
            variate.end(count)
        if choices is not None:
            choices.by.end(choices.chances, found[0][0][-1])
        return energies[[max(0, len(energies) - 2), -1]]

    def _drawn(self, rows: Rows, noise: Tensor | None, count: int) -> Tensor | None:
        """Return the noise of some chains' steps, which one that makes them alone draws now."""
        if noise is None or rows.generator is None:
            return noise
        memory = self._for_noise
        if memory is None:
            memory = noise.new_empty(count, 1, noise.shape[1])
        for own in memory[:count].unbind():
            own.normal_(generator=rows.generator)
        return memory[:count]

    def _made_by(
        self,
        rows: Rows,
        batches: Batches,
        noise: Tensor | None,
        controls: Sequence[Controls],
        first: Tensor | None,
        variate: ControlVariate | None,
        choices: Choices | None,
        part: StepPart | None,
    ) -> tuple[list[Tensor], list[Tensor], Tensor] | None:
        """Return the tensors of some chains' state, what they are after some steps, and the energies of these; see
        `run`."""
        tensors, structure, axis, weights = batches
        sampler, values, count = rows.rule, rows.values, len(weights)
        buffers = [(place, name, own) for place, group in enumerate(rows.groups) for name, own in group.buffers]
        counted = [sampler.counted(group) for group in sampler.param_groups]
        columns, form = self._columns(controls, counted, count)
        shapes = tuple([(tensor.shape[1:], tensor.dtype) for tensor in tensors])
        is_scaled = part is not None and part.scales
        options = repr([_fixed(*own, is_scaled) for own in zip(sampler.param_groups, counted, strict=True)])
        names = tuple([(place, name) for place, name, _ in buffers])
        settings = choices and choices.by.settings, variate and variate.form, part and (part.settings, part.keeps_each)
        keeps_each = part is not None and part.keeps_each
        place = id(noise) if self._captures else noise is None  # another memory is another graph
        key = repr(structure), shapes, axis, place, form, names, options, sampler.num_data is None, *settings
        num_data = torch.full_like(self._inverse, sampler.num_data or 0)
        scalars = [self._inverse.expand(count), num_data.expand(count)]
        learned, read, own = ([], [], []) if part is None else (part.state, part.fixed, [part.numbers(count)])
        if choices is not None:
            learned = [values.new_zeros(len(values), dtype=torch.int64)]
            own = [choices.chances, choices.shares]
        in_place = [noise] if self._captures and noise is not None else []
        of_noise = [] if self._captures or noise is None else [noise]
        fixed = _apart([*rows.others, *read, *([] if variate is None else variate.tensors)])
        state = [values, *(own for *_, own in buffers), *learned]
        of_steps = [sent(own, values.device) for own in [*of_noise, *tensors, weights, *scalars, *columns, *own]]
        if is_new := key not in self._known:
            if len(self._known) >= MOST_FORMS:
                raise NotTraceableError(f"batches and controls have more than {MOST_FORMS} forms")
            self._known[key] = None, _Room(of_steps, self._most, values)
        function, room = self._known[key]
        pairs = [*zip(room.views, of_steps, strict=True)]
        elsewhere = [(kept[:count], own) for kept, own in pairs if kept.data_ptr() != own.data_ptr()]
        torch._foreach_copy_([kept for kept, _ in elsewhere], [own for _, own in elsewhere])
        self._for_noise = room.views[0] if of_noise else None
        self.memory = room.views[len(of_noise) :][: len(tensors)]
        if is_new:
            sizes, kept = [*map(len, (state, fixed, in_place, of_noise, tensors))], [*state, *fixed, *in_place]
            function = self._made(sampler, names, batches, sizes, kept, room, variate, choices, part)
            self._known[key] = function, room
        if function is None:
            raise NotTraceableError("the rule sets its options in a step")
        _, *after, seen = function([*self._carried(state, variate, keeps_each), *fixed], room.tensors, count)
        if first is not None:
            check_alike(seen[0, :2], first)
        are_finite = seen[:count].isfinite().all() if keeps_each else seen[1].sum() == 0
        is_made = bool(are_finite & after[0].sum().isfinite())
        return (state, after, seen[:count] if keeps_each else seen[2:]) if is_made else None

    def _carried(self, state: list[Tensor], variate: ControlVariate | None, keeps_each: bool) -> list[Tensor]:
        """Return what the steps begin with: their number, the state, and the energies of all, or the first, how often
        each was not finite, and the last two."""
        rows, values = 2 if variate is None or variate.mean is None else 3, state[0]
        nothing = values.new_zeros(self._most if keeps_each else 4, rows, len(values))
        return [values.new_zeros((), dtype=torch.int64), *state, nothing]

    def _columns(
        self, controls: Sequence[Controls], counted: Sequence[tuple[str, ...]], count: int
    ) -> tuple[list[Tensor], Any]:
        """Return the controls of all groups and then what they count as tensors with an axis of steps, and the shapes
        of one step's."""
        columns: list[Tensor] = []
        form: list[Any] = []
        for of_group in controls:
            for values in of_group:
                if isinstance(values[0], Tensor):
                    columns.append(torch.stack([value for value in values if isinstance(value, Tensor)]))
                    form.append(values[0].shape)
                else:
                    columns.append(torch.tensor(values, dtype=self._flat.values.dtype))
                    form.append(None)
        for group, names in zip(self._sampler.param_groups, counted, strict=True):
            columns += [torch.arange(group[name], group[name] + count, dtype=torch.float64) for name in names]
        return columns, (*form, *counted)

    def _made(
        self,
        sampler: Sampler,
        names: Any,
        batches: Batches,
        counts: list[int],
        tensors: list[Tensor],
        room: "_Room",
        variate: ControlVariate | None,
        choices: Choices | None,
        part: StepPart | None,
    ) -> Any:
        """Return the steps as a function of what `_carried` returns and what is fixed, of what each step has of its
        own, and of the number of steps.

        Args:
            counts: numbers of tensors of the state, of what is fixed, of the noise in place and of each step, and of a
                batch.
            tensors: the state, what is fixed, and the noise in place.
        """
        held = [] if variate is None else variate.tensors
        _, structure, axis, _ = batches

        def step(index: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            given = iter(tensors)
            state = [next(given) for _ in range(counts[0])]
            seen = next(given)
            others, in_place = ([next(given) for _ in range(count)] for count in counts[1:3])
            at = index.reshape(1)
            of_step = iter(room.of_step([tensor.index_select(0, at).squeeze(0) for tensor in given]))
            drawn, parts = ([next(of_step) for _ in range(count)] for count in counts[3:])
            weights, inverse, num_data, *columns = of_step
            own = pytree.tree_unflatten(parts, structure)
            named = dict(zip(self._others, others))  # noqa: B905  # those of a part and a variate come after
            read = others[len(named) : len(others) - len(held)]
            corrects = None if variate is None else variate.of(others[len(others) - len(held) :])
            shares = None
            if choices is not None:
                *columns, chances, shares = columns
            gradient, numbers = self._with_gradient(state[0], named, own, axis, inverse, weights, corrects, shares)
            values, *rows = (tensor.clone() for tensor in state[: 1 + len(names)])
            multiplier, learned = None, state[1 + len(names) :]
            choose = None if choices is None else partial(choices.by.choose, chances=chances)
            if part is not None:
                *columns, number = columns
                multiplier, found = part.multiplier(learned, read, corrected(numbers), columns[1], num_data)
                learned = part.learn(learned, found, number)
            buffers = dict(zip(names, rows, strict=True))
            noise = [*(own.clone() for own in in_place), *drawn]  # a rule may scale it
            counted = self._update(sampler, values, gradient, buffers, noise, columns, num_data, multiplier, choose)
            learned = learned if counted is None else [learned[0] + counted]
            if part is not None and part.keeps_each:
                seen = seen.index_copy(0, at, numbers[None])
            else:
                wrong = seen[1] + (~numbers.isfinite()).to(numbers.dtype)
                seen = torch.stack([torch.where(index == 0, numbers, seen[0]), wrong, seen[3], numbers])
            return index + 1, values, *rows, *learned, seen

        state, others = tensors[: counts[0]], tensors[counts[0] :]
        carried = self._carried(state, variate, part is not None and part.keeps_each)
        given = [*carried, *others, *room.tensors]
        traced = trace(step, given, self._model)
        if not self._captures:
            return _compiled_loop(traced, given, len(carried))
        draws, generators = sampler.noise_in_place()[1:] if counts[2] else (None, [])
        kept = len(carried) + counts[1]
        return _CapturedSteps(traced, given, len(carried), kept, draws, generators, self._compiles)

    def _update(
        self,
        sampler: Sampler,
        values: Tensor,
        gradient: Tensor,
        buffers: Mapping[tuple[int, str], Tensor],
        noise: list[Tensor],
        columns: list[Tensor],
        num_data: Tensor,
        multiplier: Tensor | None,
        choose: Callable[..., tuple[Tensor, Tensor]] | None,
    ) -> Tensor | None:
        """Make the rule's update of rows in place, with controls and N that are tensors; return what a choice among
        several gradients counts."""
        width, counted, flat = values.shape[1], None, sampler.flat
        assert flat is not None
        of_groups = values.split([part.values.shape[1] for part in flat.groups], 1)
        of_places = range(len(of_groups))
        rows = [{name: rows for (place, name), rows in buffers.items() if place == own} for own in of_places]
        own_number = {} if sampler.num_data is None else {"num_data": num_data}
        rule = rule_of(sampler, flat.with_rows(of_groups, rows), **own_number)
        counts = iter(columns[2 * len(sampler.param_groups) :])
        groups: list[tuple[dict[str, Any], Tensor, tuple[str, ...]]] = []
        for place, (group, own) in enumerate(zip(sampler.param_groups, of_groups, strict=True)):
            options = dict(group) | {"lr": columns[2 * place], "temperature": columns[2 * place + 1]}
            if multiplier is not None:
                options[CONTROLS[2]] = multiplier.to(values.dtype).reshape(-1 if len(multiplier) > 1 else ())
            names = sampler.counted(group)
            groups.append((options | {name: next(counts) for name in names}, own, names))
        if choose is not None:
            gradient, counted = choose(rule, [options | {"params": [own]} for options, own, _ in groups], gradient)
        start = 0
        for options, own, names in groups:
            stop, before = start + own.shape[1], dict(options)
            drawn = (
                [noise[0][:, start + skip : stop + skip] for skip in range(0, noise[0].shape[1], width)]
                if noise
                else None
            )
            rule.update(options, [own], [gradient[:, start:stop]], drawn)
            for name, value in options.items():
                if name not in (*FOLLOWING, *names) and value is not before.get(name):
                    raise NotTraceableError(f"{type(sampler).__name__} sets {name!r} in a step")
            start = stop
        return counted


class _Room:
    """Memory for what each of the coming steps has of its own; small ones of the parameters' type are in one tensor.

    A loop takes time for each tensor that it passes on, and to read a step's part of one that holds its inputs.

    Attributes:
        tensors: the memory.
        views: parts of it, as tensors of all steps.
    """

    def __init__(self, examples: Sequence[Tensor], most: int, values: Tensor) -> None:
        own = [example.dtype != values.dtype or example[0].numel() > MOST_TOGETHER for example in examples]
        self._shapes = [None if alone else example.shape[1:] for alone, example in zip(own, examples, strict=True)]
        self._sizes = [shape.numel() for shape in self._shapes if shape is not None]
        rows, device = values.new_zeros(most, sum(self._sizes)), values.device
        columns = iter(rows.split(self._sizes, 1))
        self.views = [
            example.new_zeros(most, *example.shape[1:], device=device)
            if shape is None
            else next(columns).view(most, *shape)
            for example, shape in zip(examples, self._shapes, strict=True)
        ]
        apart = [view for view, shape in zip(self.views, self._shapes, strict=True) if shape is None]
        self.tensors = [rows, *apart]

    def of_step(self, taken: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of a step, given its rows of the memory."""
        row, *others = taken
        columns, apart = iter(row.split(self._sizes)), iter(others)
        return [next(apart) if shape is None else next(columns).view(shape) for shape in self._shapes]


def _compiled_loop(step: GraphModule, tensors: list[Tensor], carried: int) -> Any:
    """Return a compiled loop of steps, see `_loop` and `_made`."""
    constants = _lifted(step)
    examples = [*tensors, *constants, torch.tensor(1)]
    found = _compiled(step, examples, lambda: _loop(step, carried, len(examples) - carried), {"cpp_wrapper": True})
    return lambda kept, of_steps, count: found(*kept, *of_steps, *constants, torch.tensor(count))


def _compiled(step: GraphModule, examples: list[Any], what: Callable[[], GraphModule], options: Any) -> Any:
    """Return a compiled function that has a step in it; fits of the same steps in a process share one."""
    shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in examples]
    key = repr((step.code, shapes, options, torch.get_num_threads()))
    is_known = not [*step.children()]  # whether the key says everything
    found = _LOOPS.get(key) if is_known else None
    if found is None:
        try:
            with torch.no_grad():
                marked = make_fx(what(), tracing_mode="fake")(*examples)  # the compiler wants its marks
                found = torch._inductor.compile(marked, examples, options=options)
        except Exception as error:  # of a compiler that fails or is missing
            raise NotTraceableError(f"the compiler failed with {str(error).strip()[:150]}") from error
        if is_known:
            if len(_LOOPS) >= MOST_LOOPS:
                _LOOPS.clear()
            _LOOPS[key] = found
    return found


class _CapturedSteps:
    """Steps in memory of their own, captured as CUDA graphs of one step and of several; see `CompiledSteps._made`.

    Args:
        step: the operations of a step.
        tensors: its arguments; those that are not kept are the memory that its calls read.
        carried: how many of them it passes on to the next step.
        kept: how many of them a call is given.
        draws: draws a step's noise into its memory; None for steps without noise.
        generators: which it takes the noise from.
        compiles: whether the step is compiled.

    Raises:
        NotTraceableError: if the operations cannot be captured.
    """

    def __init__(
        self,
        step: GraphModule,
        tensors: list[Tensor],
        carried: int,
        kept: int,
        draws: Callable[[], None] | None,
        generators: Sequence[torch.Generator],
        compiles: bool,
    ) -> None:
        given = [*tensors, *_lifted(step)]
        self._carried, self._kept = carried, [tensor.clone() for tensor in tensors[:kept]]
        self._rest, self._draws = given[kept:], draws
        self._step: Callable[..., Sequence[Tensor]] = step.forward
        if compiles:
            with suppress(NotTraceableError):  # then it is captured as it is
                self._step = _compiled(step, given, lambda: step, {})
        self._graphs: dict[int, Callable[[], None]] = {}
        states, most = [generator.get_state() for generator in generators], len(tensors[-1])
        try:
            for size in [size for size in TOGETHER if size <= most]:
                self._kept[0].zero_()
                self._graphs[size] = captured(partial(self._make, size), generators)
        except Exception as error:  # of an operation that waits for the device, say
            raise NotTraceableError(f"they cannot be captured: {str(error).strip()[:150]}") from error
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    @torch.no_grad()
    def __call__(self, kept: Sequence[Tensor], of_steps: Sequence[Tensor], count: int) -> list[Tensor]:
        torch._foreach_copy_(self._kept, list(kept))
        for size, replay in self._graphs.items():
            for _ in range(count // size):
                replay()
            count %= size
        *state, seen = self._kept[: self._carried]
        return [*state, seen.clone()]  # the caller copies the state

    @torch.no_grad()
    def _make(self, steps: int) -> None:
        """Make steps in the memory, each of the next ones that it holds."""
        for _ in range(steps):
            if self._draws is not None:
                self._draws()
            index, *state = self._step(*self._kept, *self._rest)
            self._kept[0].copy_(index)
            torch._foreach_copy_(self._kept[1 : self._carried], state)


def captures(device: torch.device) -> bool:
    """Return whether steps on a device are captured."""
    return device.type == "cuda"


def captured(run: Callable[[], None], generators: Sequence[torch.Generator]) -> Callable[[], None]:
    """Return a function that replays what a function does on a GPU; it is run before, for what is made at first."""
    aside, present = torch.cuda.Stream(), torch.cuda.current_stream()
    aside.wait_stream(present)
    with torch.cuda.stream(aside):
        run()
    present.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def _lifted(step: GraphModule) -> list[Tensor]:
    """Make the tensors that a function holds its last arguments, and return them."""
    constants: list[Tensor] = []
    last = [node for node in step.graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in step.graph.nodes if node.op == "get_attr"]:
        held = operator.attrgetter(str(node.target))(step)
        if isinstance(held, Tensor):
            with step.graph.inserting_after(last):
                last = step.graph.placeholder(f"constant_{len(constants)}")
            node.replace_all_uses_with(last)
            step.graph.erase_node(node)
            constants.append(held.detach().clone())
    step.recompile()
    return constants


def _loop(step: GraphModule, carried: int, others: int) -> GraphModule:
    """Return a loop of steps, a function of what one passes on to the next, first the step's number, and of what all
    have, last the number of steps."""
    condition, body = Graph(), Graph()
    for graph, is_body in ((condition, False), (body, True)):
        inputs = [graph.placeholder(f"given_{place}") for place in range(carried + others)]
        if is_body:
            found = graph.call_module("step", tuple(inputs[:-1]))
            graph.output(tuple(graph.call_function(operator.getitem, (found, place)) for place in range(carried)))
        else:
            graph.output(graph.call_function(torch.ops.aten.lt.Tensor, (inputs[0], inputs[-1])))
    root = nn.Module()
    root.condition = GraphModule(nn.Module(), condition)
    root.body = GraphModule(nn.ModuleDict({"step": step}), body)
    graph = Graph()
    inputs = [graph.placeholder(f"given_{place}") for place in range(carried + others)]
    parts = graph.get_attr("condition"), graph.get_attr("body")
    found = graph.call_function(
        torch.ops.higher_order.while_loop, (*parts, tuple(inputs[:carried]), tuple(inputs[carried:]))
    )
    graph.output(tuple(graph.call_function(operator.getitem, (found, place)) for place in range(carried)))
    return GraphModule(root, graph)


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors no two of which have the same memory, as a loop wants them."""
    seen: set[int] = set()
    found = []
    for tensor in tensors:
        place = tensor.untyped_storage().data_ptr()
        found.append(tensor.clone() if place in seen else tensor)
        seen.add(place)
    return found


def _fixed(group: Mapping[str, Any], counted: Sequence[str], is_scaled: bool) -> dict[str, Any]:
    """Return the entries of a group that are written into the compiled function, in which κ is not if it is of a
    step, nor what steps count."""
    return {name: value for name, value in group.items() if name not in LEFT_OUT[is_scaled] and name not in counted}


def can_be_made_at_once(sampler: Sampler, is_scaled: bool = False) -> bool:
    """Return whether a sampler's next steps are a function of rows: whether its whole state is in them, and its
    options are numbers, but for κ where each step has its own; or whether a stand-in's are."""
    flat = sampler.flat
    if flat is None or sampler.held:
        return False
    if sampler.stand_in is not None:
        return sampler.stand_in.takes_rows
    if not sampler._updates_rows():
        return False
    if any(map(sampler.sets_options, sampler.param_groups)):
        return False
    if any(
        isinstance(value, Tensor) and name not in LEFT_OUT[is_scaled]
        for group in sampler.param_groups
        for name, value in group.items()
    ):
        return False
    known = [name for group in flat.groups for name, _ in group.buffers]
    of_groups = [len(sampler.state[p]) for p in flat.parameters if p in sampler.state]
    return not of_groups or (len(of_groups) == len(flat.parameters) and set(of_groups) == {len(set(known))})
