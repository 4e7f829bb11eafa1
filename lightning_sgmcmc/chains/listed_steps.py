"""Steps of all chains one after another, each a list of tensor operations and the sampler's own update.

A step of one chain of a small network takes longer in the layers around it than in its operations: a loader, hooks,
counts, the schedule, autograd's records. Here the batches, noise and controls of many steps are at hand, the gradient
is the list of `chains.traced` without what is the same in all of these steps, and the rule updates the rows. This pays
from some hundred steps on, where `chains.compiled_step` needs thousands.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_sgmcmc.chains.compiled_step import Controls, ControlVariate, RowSteps
from lightning_sgmcmc.chains.traced import MOST_FORMS, NotTraceableError, check_alike, parted, trace


class ListedSteps(RowSteps):
    """Makes steps of a sampler, with one list of operations for each form of a batch."""

    @torch.no_grad()
    def run(
        self,
        batches: Sequence[Tensor],
        structure: Any,
        axis: int | None,
        weights: Tensor,
        noise: Tensor | None,
        controls: Sequence[Controls],
        first: Tensor | None = None,
        last: Tensor | None = None,
        variate: ControlVariate | None = None,
    ) -> Tensor | None:
        """Make steps; return Ũ/N and log p(θ) of the last but one and of the last, or None, as `CompiledSteps.run`."""
        flat, sampler, groups = self._flat, self._sampler, self._sampler.param_groups
        of_steps = [*zip(weights.unbind(), *(part.unbind() for part in batches), strict=True)]
        kept = [flat.values, self._inverse, *self._others.values(), *([] if variate is None else variate.tensors)]
        before, after = self._operations(kept, of_steps[0], structure, axis, variate)
        if last is not None:
            self._check_last(batches, structure, axis, weights, last)
        steady = before(*kept)
        if first is not None:
            check_alike(after(*steady, *of_steps[0])[1][:2], first)
        buffers = [rows for group in flat.groups for _, rows in group.buffers]
        state_before = [rows.clone() for rows in (flat.values, *buffers)]
        options_before = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        found = []
        for step, given in enumerate(of_steps):
            gradient, energies = after(*steady, *given)
            found.append(energies)
            start = 0
            for group, part, own_controls in zip(groups, flat.groups, controls, strict=True):
                group["lr"], group["temperature"] = own_controls.lr[step], own_controls.temperature[step]
                stop = start + part.values.shape[1]
                drawn = None if noise is None else _noise_of(noise[step], start, stop, flat.values.shape[1])
                sampler.update(group, [part.values], [gradient[:, start:stop]], drawn)
                start = stop
        numbers = torch.stack(found)
        if not bool(numbers.isfinite().all() & flat.values.isfinite().all()):
            for rows, saved in zip((flat.values, *buffers), state_before, strict=True):
                rows.copy_(saved)
            for group, saved_options in zip(groups, options_before, strict=True):
                group.update(saved_options)
            return None
        if variate is not None:
            variate.end(len(found))
        return numbers[[max(0, len(found) - 2), len(found) - 1]]

    def _operations(
        self,
        kept: list[Tensor],
        of_step: Sequence[Tensor],
        structure: Any,
        axis: int | None,
        variate: ControlVariate | None,
    ) -> Any:
        """Return the operations before many steps and those of each, of the gradient and of the energies."""
        corrects = None if variate is None else variate.form
        key = structure, axis, tuple([(tensor.shape, tensor.dtype) for tensor in of_step]), corrects
        if key not in self._known:
            if len(self._known) >= MOST_FORMS:
                raise NotTraceableError(f"batches have more than {MOST_FORMS} shapes")
            count, end = len(self._others), len(kept) - 2

            def energies(values: Tensor, inverse: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
                named = dict(zip(self._others, rest[:count], strict=True))
                there = None if variate is None else variate.of(rest[count:end])
                own = pytree.tree_unflatten(list(rest[end + 1 :]), structure)
                return self._with_gradient(values, named, own, axis, inverse, rest[end], there)

            tensors = [*kept, *of_step]
            self._known[key] = parted(trace(energies, tensors, self._model), tensors, len(kept), kept[0])
        return self._known[key]


def _noise_of(noise: Tensor, start: int, stop: int, width: int) -> list[Tensor]:
    """Return a step's noise of some columns, `draws` tensors, of numbers of shape (C, draws · P)."""
    return [noise[:, start + skip : stop + skip] for skip in range(0, noise.shape[1], width)]
