"""Chains as rows of one tensor: a chain's parameters, gradients and momenta in one stretch of memory each.

A step over a network then costs one operation where it would cost one for each of the network's tensors.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.samplers import noise as noises
from lightning_sgmcmc.tensors import Control

FEW, COLUMNS = 4, 2**22
"""The most parameters to which a number is added one by one on a device, and the columns of others at a time."""
State = MutableMapping[Tensor, dict[str, Any]]
"""An optimizer's state: the tensors of each parameter, by name."""


class FlatGroup:
    """A parameter group's columns of `FlatParameters` and of their gradients, shape (C, d); the parameters are
    views."""

    def __init__(self, parameters: Sequence[Tensor], values: Tensor, gradients: Tensor) -> None:
        self.parameters = list(parameters)
        self.values = values
        self.gradients = gradients
        self._sizes = [p.numel() // len(values) for p in parameters]
        self._ends = [*accumulate(self._sizes)]
        self._on_device: tuple[Tensor, Tensor] | None = None
        """The parameters' sizes and their last columns, shape (T,)."""
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}
        """By name: a flat tensor of the state, and its view for the first parameter."""
        self._columns: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """The columns of tensors that stay."""

    @property
    def buffers(self) -> list[tuple[str, Tensor]]:
        """The flat tensors of the state, by name."""
        return [(name, rows) for name, (rows, _) in self._buffers.items()]

    @classmethod
    def with_rows(
        cls, group: "FlatGroup", values: Tensor, gradients: Tensor, buffers: Mapping[str, Tensor]
    ) -> "FlatGroup":
        """Return a group with other tensors in the place of its own."""
        made = cls(group.parameters, values, gradients)
        made._sizes, made._ends = group._sizes, group._ends  # of one chain, however many rows there are
        made._buffers = {name: (rows, group._buffers[name][1]) for name, rows in buffers.items()}
        return made

    def pieces(self, rows: Tensor) -> list[Tensor]:
        """Return the views of a tensor of shape (C, d) in the parameters' shapes; it may have rows of some chains."""
        columns, whole = rows.split(self._sizes, 1), len(rows) == len(self.values)
        shapes = [p.shape if whole else (len(rows), *p.shape[1:]) for p in self.parameters]
        return [column.view(shape) for column, shape in zip(columns, shapes, strict=True)]

    def columns(self, rows: Tensor) -> list[Tensor]:
        """Return each parameter's columns of a tensor of shape (C, d)."""
        kept = self._columns.get(id(rows))
        return kept[1] if kept is not None and kept[0] is rows else list(rows.split_with_sizes(self._sizes, 1))

    def keep_columns(self, rows: Tensor) -> None:
        """Keep the columns of a tensor that stays as long as the group."""
        self._columns[id(rows)] = rows, list(rows.split_with_sizes(self._sizes, 1))

    def means(self, rows: Tensor) -> Tensor:
        """Return the mean over each parameter's columns of numbers ≥ 0, shape (C, T), in a few operations."""
        if rows.device.type == "cpu":  # bit for bit as the mean of each, in less time
            return torch.stack([columns.sum(1) for columns in self.columns(rows)], 1) / self._places()[0]
        segments = [segment for row in rows for segment in row.split(self._sizes)]
        totals = torch.stack(torch._foreach_norm(segments, 1))
        return totals.view(len(rows), -1) / self._places()[0]

    def add_to_each(self, rows: Tensor, values: Tensor, start: int = 0) -> None:
        """Add a number of each parameter, shape (C, T), to its columns in place; `rows` are those from `start` on."""
        stop, index = start + rows.shape[1], self._ends
        if rows.device.type == "cpu" and rows.shape == self.values.shape:
            torch._foreach_add_(self.columns(rows), list(values[..., None].unbind(1)))
            return
        first, last = bisect_right(index, start), bisect_left(index, stop) + 1
        if rows.device.type == "cpu" or last - first <= FEW:
            for place in range(first, last):
                low = max(index[place] - self._sizes[place], start)
                rows[:, low - start : min(index[place], stop) - start].add_(values[:, place, None])
            return
        for low in range(start, stop, COLUMNS):
            columns = torch.arange(low, min(low + COLUMNS, stop), device=rows.device)
            places = torch.bucketize(columns, self._places()[1], right=True)
            rows[:, low - start : low - start + COLUMNS].add_(values[:, places])

    def _places(self) -> tuple[Tensor, Tensor]:
        if self._on_device is None:
            sizes = torch.tensor(self._sizes).to(self.values.device)
            self._on_device = sizes, torch.tensor(self._ends).to(self.values.device)
        return self._on_device

    def buffer(self, state: State, name: str) -> Tensor:
        """Return a flat tensor of the state, zero at first, whose views are the parameters' own state; tensors of a
        loaded state are copied into a new one."""
        kept = self._buffers.get(name)
        if kept is not None and state[self.parameters[0]].get(name) is kept[1]:
            return kept[0]
        rows = torch.zeros_like(self.values, memory_format=torch.contiguous_format)  # as a compiled step returns it
        views = self.pieces(rows)
        for parameter, view in zip(self.parameters, views, strict=True):
            held = state[parameter].get(name)
            if held is not None:
                view.copy_(held)
            state[parameter][name] = view
        if name in self._buffers:
            self._columns.pop(id(self._buffers[name][0]), None)
        self._buffers[name] = rows, views[0]
        self.keep_columns(rows)
        return rows

    def take(self, state: State) -> None:
        """Take the tensors of a loaded state as rows, as the first step after it would."""
        held = state[self.parameters[0]] if self.parameters and self.parameters[0] in state else {}
        shape = self.parameters[0].shape if self.parameters else None
        for name in [name for name, tensor in held.items() if isinstance(tensor, Tensor) and tensor.shape == shape]:
            self.buffer(state, name)


class FlatParameters:
    """The parameters of C chains as one tensor (C, P), one row for each chain; the parameters become views of it.

    The columns are those of the groups, in their order. Where it is `fused`, a step's functions of the rows are
    compiled, each to a kernel or two.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], num_chains: int, fused: bool = False) -> None:
        self.fused = fused
        self.parameters = [p for group in groups for p in group]
        first = self.parameters[0]
        columns = sum(p.numel() // num_chains for p in self.parameters)
        self.values = torch.empty(num_chains, columns, dtype=first.dtype, device=first.device)
        """The parameters of all chains, shape (C, P)."""
        self.gradients = torch.zeros_like(self.values)
        """Their gradients, shape (C, P)."""
        self.leaf = self.values.detach().requires_grad_()
        """The same numbers as a leaf of autograd; `collect_gradient` moves its gradient to `gradients`."""
        self._is_clear = True
        """Whether `gradients` stand for zero, whatever their numbers."""
        whole = FlatGroup(self.parameters, self.values, self.values)
        self.split = whole.pieces
        self._places = whole.pieces(self.values)
        strides = [p.stride() for p in self.parameters]
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._places, strict=True):
                view.copy_(parameter)
                parameter.data = view
        self.views = whole.pieces(self.gradients)
        """Each parameter's gradient, a view of `gradients`."""
        self.groups: list[FlatGroup] = []
        self._strides = strides
        start = 0
        for group in groups:
            stop = start + sum(p.numel() // num_chains for p in group)
            self.groups.append(FlatGroup(group, self.values[:, start:stop], self.gradients[:, start:stop]))
            start = stop
        self._of_values = {id(group.values): group for group in self.groups}

    @staticmethod
    def suits(parameters: Sequence[Tensor], num_chains: int) -> bool:
        """Return whether parameters can be views of one tensor: whether each has memory of its own without gaps, in any
        order of its axes, and pairs of numbers in their last axes can be viewed as complex ones.

        Weights that lie channels last do not during the fit; a convolution still computes in the format of its input.
        """
        pointers = {p.data_ptr() for p in parameters if p.numel()}
        apart = all(is_dense(p) and p.numel() for p in parameters) and len(pointers) == len(parameters)
        return apart and not _splits_pairs(parameters, num_chains)

    def with_rows(self, values: Sequence[Tensor], buffers: Sequence[Mapping[str, Tensor]]) -> "FlatParameters":
        """Return what a rule takes for these, with other tensors of each group and of its state."""
        made: FlatParameters = object.__new__(FlatParameters)
        vars(made).update(vars(self))
        made.groups = [
            FlatGroup.with_rows(group, own, own, rows)
            for group, own, rows in zip(self.groups, values, buffers, strict=True)
        ]
        made._of_values = {id(group.values): group for group in made.groups}
        return made

    def group_of(self, tensors: Sequence[Tensor]) -> FlatGroup | None:
        """Return the group whose `values` are the only tensor of a list, or None."""
        return self._of_values.get(id(tensors[0])) if len(tensors) == 1 else None

    def take_back(self) -> None:
        """Take the numbers of parameters to which a user has given other memory (`parameter.data = …`), and make them
        views again."""
        for parameter, view in zip(self.parameters, self._places, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def is_large(self) -> bool:
        """Whether a further copy of the rows is worth avoiding."""
        return self.values.numel() > noises.WHOLE

    @property
    def holds_gradients(self) -> bool:
        """Whether all parameters have the views of `gradients` as gradients."""
        return all(p.grad is view for p, view in zip(self.parameters, self.views, strict=True))

    def attach_gradients(self) -> None:
        """Make the views of `gradients` the parameters' gradients."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def adopt_gradients(self) -> None:
        """Copy the parameters' present gradients into `gradients`, zero where there is none."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
        self.attach_gradients()
        self._is_clear = False

    def set_gradients(self, rows: Tensor, adds: bool = False) -> None:
        """Make numbers of shape (C, P) the parameters' gradients, or add them to these."""
        if adds and not self._is_clear:
            self.gradients.add_(rows)
        else:
            self.gradients.copy_(rows)
        self.attach_gradients()
        self._is_clear = False

    def clear_gradients(self) -> None:
        """Let the next gradient replace the present ones."""
        for parameter in self.parameters:
            parameter.grad = None
        self.leaf.grad = None
        self._is_clear = True

    def collect_gradient(self) -> None:
        """Add the leaf's gradient to `gradients` after a backward pass."""
        fresh, self.leaf.grad = self.leaf.grad, None
        if fresh is None:
            return
        if self._is_clear:
            self.gradients.copy_(fresh)
        else:
            self.gradients.add_(fresh)
        self._is_clear = False
        self.attach_gradients()

    # -- the end ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give each parameter memory of its own, in the format that it had."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = None
            del view
        self.leaf.grad = None
        self.gradients = self.gradients.new_empty(0)  # before the copies
        self.views, self._places, self.groups, self._of_values = [], [], [], {}
        for parameter, strides in zip(self.parameters, self._strides, strict=True):
            values = parameter.detach()
            parameter.data = values.new_empty_strided(values.shape, strides).copy_(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied module has parameters with memory of their own


def is_dense(tensor: Tensor) -> bool:
    """Return whether each place of a tensor's memory is one number, in any order of its axes."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != size:
                return False
            size *= length
    return True


def _splits_pairs(parameters: Sequence[Tensor], num_chains: int) -> bool:
    """Return whether rows would begin a parameter at an odd place that a network may view as complex numbers: one of
    three axes or more with two numbers in the last, as of a convolution in Fourier space."""
    sizes = [p.numel() // num_chains for p in parameters]
    columns = sum(sizes) if num_chains > 1 else 0
    for parameter, start in zip(parameters, accumulate(sizes, initial=0), strict=False):
        axes = parameter.dim() - (num_chains > 1)
        if axes > 2 and parameter.shape[-1] == 2 and (start % 2 or columns % 2):
            return True
    return False


# -- fused -------------------------------------------------------------------------------------------------------------

# Update rules as one function of rows, which `torch.compile` turns into one kernel on a GPU.
#
# The controls arrive as tensors: a compiled function would be compiled again for each new number. A number becomes a
# tensor of shape () in the host's memory, which a kernel takes as an argument, so that nothing is copied.


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled, once in a process."""
    made: Callable[..., Any] = torch.compile(function)  # a second width is compiled for all further ones
    return made


def coefficient(value: Control, rows: Tensor) -> Tensor:
    """Return a control in a shape that multiplies rows, () or (C, 1)."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=rows.dtype)
    return value.reshape(()) if value.numel() == 1 else value.view(-1, 1)


def coefficients(group: Mapping[str, Any], rows: Tensor, num_data: int) -> list[Tensor]:
    """Return a parameter group's lr, κ and τ, and N, each as `coefficient` does."""
    controls = (group["lr"], group["gradient_multiplier"], group["temperature"], num_data)
    return [coefficient(value, rows) for value in controls]


def sgld_step(
    params: Tensor,
    grads: Tensor,
    noise: Tensor,
    lr: Tensor,
    multiplier: Tensor,
    temperature: Tensor,
    num_data: Tensor | int,
) -> None:
    """Make a step of SGLD in place, see `SGLD`; the tensors are rows, shape (C, d), or coefficients of them."""
    scale = (2 * lr * temperature / num_data).sqrt().to(params.dtype)
    params.add_((-lr * multiplier).to(params.dtype) * grads + scale * noise)


def sghmc_step(
    params: Tensor,
    momenta: Tensor,
    grads: Tensor,
    noise: Tensor,
    lr: Tensor,
    multiplier: Tensor,
    temperature: Tensor,
    num_data: Tensor | int,
    friction: float,
    noise_estimate: float,
) -> None:
    """Make a step of SGHMC in place, see `SGHMC`; the tensors are rows, shape (C, d), or coefficients of them."""
    scale = (2 * (friction - noise_estimate) * lr * temperature / num_data).sqrt().to(params.dtype)
    momenta.copy_((1 - friction) * momenta + (-lr * multiplier).to(params.dtype) * grads + scale * noise)
    params.add_(momenta)


def clip_rows(rows: Tensor, limit: float) -> None:
    """Scale each row down to a norm of at most `limit`, in place."""
    rows.mul_(_share_within(rows, limit))


def clipped_rows(rows: Tensor, limit: float, by_value: bool) -> Tensor:
    """Return rows with a norm, or with numbers, of at most `limit`."""
    return rows.clamp(-limit, limit) if by_value else rows * _share_within(rows, limit)


def _share_within(rows: Tensor, limit: float) -> Tensor:
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return (limit / (norm + 1e-6)).clamp(max=1.0)
