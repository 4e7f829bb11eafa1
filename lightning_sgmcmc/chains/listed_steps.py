"""Steps of all chains one after another, each a list of tensor operations and the sampler's own update.

A step of one chain of a small network takes longer in the layers around it than in its operations: a loader, hooks,
counts, the schedule, autograd's records. Here the batches, noise and controls of many steps are at hand, the gradient
is the list of `chains.traced` without what is the same in all of these steps, and the rule updates the rows. This pays
from some hundred steps on, where `chains.compiled_step` needs thousands.

Where all chains together have no room in a processor's cache, one makes all of these steps before the next one begins,
and its noise is drawn just before it is used.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_sgmcmc.chains.row_steps import Batches, Choices, Controls, ControlVariate, Rows, RowSteps
from lightning_sgmcmc.chains.traced import MOST_FORMS, NotTraceableError, Parts, check_alike, parted, trace
from lightning_sgmcmc.samplers.sampler import CONTROLS


class ListedSteps(RowSteps):
    """Makes steps of a sampler, with one list of operations for each form of a batch."""

    @torch.no_grad()
    def run(
        self,
        batches: Batches,
        noise: Tensor | None,
        controls: Sequence[Controls],
        first: Tensor | None = None,
        last: Tensor | None = None,
        variate: ControlVariate | None = None,
        choices: Choices | None = None,
    ) -> Tensor | None:
        """Make steps; return Ũ/N and log p(θ) of the last but one and of the last, shape (2, 2, C), the only ones that
        are computed. If one of these is not finite, or a number of the last state, no step is made, and it returns
        None; a gradient that is not finite leaves such a state."""
        sampler, count = self._sampler, len(batches.weights)
        shares = [] if choices is None else [choices.shares]
        if last is not None:
            self._check_last(batches, last, choices)
        restore, count_before = self._restoring(), sampler.step_count
        found, counted = [], list[Tensor]()
        try:
            for rows in self._all_rows():
                own = batches.of(rows.at)
                of_steps = [*zip(*(part.unbind() for part in (own.weights, *shares, *own.tensors)), strict=True)]
                kept = [rows.values, self._inverse, *rows.others, *([] if variate is None else variate.tensors)]
                parts = self._operations(kept, of_steps[0], own, variate, len(shares))
                steady = parts.before(*kept)
                if first is not None:
                    check_alike(parts.after(*steady, *of_steps[0])[1][:2], first[:, rows.at])
                found.append(self._made(rows, parts, steady, of_steps, noise, rows.of(controls), choices, counted))
        except BaseException:
            restore(None)
            raise
        finally:
            sampler.step_count = count_before
        numbers = torch.cat(found, -1)
        is_finite = bool(numbers.isfinite().all() & self._flat.values.isfinite().all())
        restore(CONTROLS[:2] if is_finite else None)  # a callback may have changed the controls of these steps
        if not is_finite:
            return None
        if self._is_apart:
            self._count(controls, count)  # which the chains' rules have not
        if variate is not None:
            variate.end(count)
        if choices is not None:
            choices.by.end(choices.chances, torch.stack(counted).sum(0))
        return numbers[[0, -1]]

    def _made(
        self,
        rows: Rows,
        parts: Parts,
        steady: Sequence[Tensor],
        of_steps: Sequence[tuple[Tensor, ...]],
        noise: Tensor | None,
        controls: Sequence[Controls],
        choices: Choices | None,
        counted: list[Tensor],
    ) -> Tensor:
        """Make steps of some chains, append what choices count in each, and return the energies of the last two, shape
        (2, 2, C')."""
        flat, sampler, groups = self._flat, rows.rule, rows.rule.param_groups
        stand_in, seen = sampler.stand_in, len(of_steps) - 2
        found = []
        for step, given in enumerate(of_steps):
            if step < seen:
                gradient = parts.first(*steady, *given)
            else:
                gradient, energies = parts.after(*steady, *given)
                found.append(energies)
            for group, own_controls in zip(groups, controls, strict=True):
                group["lr"], group["temperature"] = own_controls.lr[step], own_controls.temperature[step]
            if stand_in is not None:
                flat.set_gradients(gradient)
                stand_in()
                sampler.step_count += 1
                continue
            if choices is not None:
                as_rows = [{**group, "params": [part.values]} for group, part in zip(groups, rows.groups, strict=True)]
                gradient, count = choices.by.choose(sampler, as_rows, gradient, choices.chances[step])
                counted.append(count)
            start, numbers = 0, None
            if noise is not None:
                own = rows.generator
                numbers = noise[step] if own is None else noise[rows.at].normal_(generator=own)
            for group, part in zip(groups, rows.groups, strict=True):
                stop = start + part.values.shape[1]
                drawn = None if numbers is None else _noise_of(numbers, start, stop, flat.values.shape[1])
                sampler.update(group, [part.values], [gradient[:, start:stop]], drawn)
                start = stop
        return torch.stack(found)

    def _restoring(self) -> Callable[[Sequence[str] | None], None]:
        """Return a function that restores the present state, or some options of the groups alone."""
        flat, sampler, groups = self._flat, self._sampler, self._sampler.param_groups
        rows = [flat.values, *(buffer for group in flat.groups for _, buffer in group.buffers)]
        copies = [own.clone() for own in rows]
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        stand_in, saved = sampler.stand_in, None
        if stand_in is not None:
            flat.attach_gradients()
            saved = stand_in.saved()

        def restore(names: Sequence[str] | None) -> None:
            for group, before in zip(groups, options, strict=True):
                group.update(before if names is None else {name: before[name] for name in names})
            if names is not None:
                return
            for own, copy in zip(rows, copies, strict=True):
                own.copy_(copy)
            if stand_in is not None:
                stand_in.restore(saved)

        return restore

    def _operations(
        self,
        kept: list[Tensor],
        of_step: Sequence[Tensor],
        batches: Batches,
        variate: ControlVariate | None,
        shares: int,
    ) -> Parts:
        """Return the operations before many steps and those of each, of the gradient and of the energies; each step has
        so many tensors of shares after its weights."""
        corrects = None if variate is None else variate.form
        _, structure, axis, _ = batches
        shapes = tuple([(tensor.shape, tensor.dtype) for tensor in (kept[0], *of_step)])
        key = repr(structure), axis, shapes, corrects
        if key not in self._known:
            if len(self._known) >= MOST_FORMS:
                raise NotTraceableError(f"batches have more than {MOST_FORMS} shapes")
            count, end = len(self._others), len(kept) - 2

            def energies(values: Tensor, inverse: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
                named = dict(zip(self._others, rest[:count], strict=True))
                there = None if variate is None else variate.of(rest[count:end])
                own = pytree.tree_unflatten(list(rest[end + 1 + shares :]), structure)
                return self._with_gradient(
                    values, named, own, axis, inverse, rest[end], there, *rest[end + 1 :][:shares]
                )

            tensors = [*kept, *of_step]
            self._known[key] = parted(trace(energies, tensors, self._model), tensors, len(kept), kept[0])
        made: Parts = self._known[key]
        return made


def _noise_of(noise: Tensor, start: int, stop: int, width: int) -> list[Tensor]:
    """Return a step's noise of some columns, `draws` tensors, of numbers of shape (C, draws · P)."""
    return [noise[:, start + skip : stop + skip] for skip in range(0, noise.shape[1], width)]
