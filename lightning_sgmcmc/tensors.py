"""Tensors of several chains, controls with one value for all or one each, copies, and checks for NaN and infinity."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias, TypeVar
from weakref import ReferenceType

import torch
from torch import Tensor, nn

Control: TypeAlias = float | Tensor
"""A number, or a tensor of shape () or (C,) on the parameters' device: one value for all chains or one for each."""
Holder = TypeVar("Holder")


def along_first_axis(values: Tensor, dim: int) -> Tensor:
    """Return one value for each row, shape (C,), as a view (C, 1, …, 1) with `dim` axes, which multiplies rows."""
    return values.view(-1, *[1] * (dim - 1))


def as_rows(tensor: Tensor, num_chains: int) -> Tensor:
    """Return a tensor with a leading chain axis where C > 1 as one row for each chain, shape (C, d)."""
    return tensor.reshape(num_chains, tensor.numel() // num_chains)


def inner_products(a: Sequence[Tensor], b: Sequence[Tensor], chains: int = 1) -> Tensor:
    """Return the inner product of each pair of tensors, shape (T,), or of each pair and chain, (T, C)."""
    if chains > 1:
        return torch.stack([as_rows(x * y, chains).sum(1) for x, y in zip(a, b, strict=True)])
    return torch.stack([torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(a, b, strict=True)])


def square_norms(tensors: Sequence[Tensor], chains: int = 1) -> Tensor:
    """Return the squared norm of each tensor, shape (T,), or of each tensor and chain, (T, C)."""
    if chains > 1:
        return torch.stack([as_rows(tensor.square(), chains).sum(1) for tensor in tensors])
    return torch.stack(torch._foreach_norm(list(tensors))).square_()


def for_each_tensor(factor: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a factor, one value or one for each chain, in the shapes and dtype that multiply each of the tensors."""
    factor = factor.to(tensors[0].dtype)
    if factor.numel() == 1:
        return [factor.reshape(())] * len(tensors)
    return [along_first_axis(factor, tensor.dim()) for tensor in tensors]


WITHOUT_FLOAT64 = {"mps"}
"""Types of devices that have no float64 at all."""


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: Apple's do not, and some of Intel's."""
    if device.type == "xpu":
        return _intel_has_float64(device)
    return device.type not in WITHOUT_FLOAT64


@cache
def _intel_has_float64(device: torch.device) -> bool:
    return bool(getattr(torch.xpu.get_device_properties(device), "has_fp64", True))


def exact_device(device: torch.device) -> torch.device:
    """Return where the float64 numbers of a device are: there, or in the host's memory if the device has no float64."""
    return device if has_float64(device) else torch.device("cpu")


def exact(values: Tensor | float | Sequence[float]) -> Tensor:
    """Return a tensor in float64 on its `exact_device`, where one without float64 waits; numbers on the host."""
    if isinstance(values, Tensor):
        return (values if has_float64(values.device) else values.to("cpu")).to(torch.float64)
    return torch.as_tensor(values, dtype=torch.float64)


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device without float64."""
    return torch.float64 if has_float64(device) else torch.float32


def widest(tensor: Tensor) -> Tensor:
    """Return a tensor in its device's `widest_dtype`, on its device: for a number of each datum or parameter."""
    return tensor.to(widest_dtype(tensor.device))


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, float32 where that has no float64; the host does not wait for a CUDA device."""
    if tensor.dtype == torch.float64 and not has_float64(device):
        tensor = tensor.to(torch.float32)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def with_moved_tensors(holder: Holder, device: torch.device | str | None, dtype: torch.dtype | None) -> Holder:
    """Return a shallow copy of an object whose tensors are on a device and in a dtype; None keeps the current one."""
    moved = copy.copy(holder)
    for name, value in vars(holder).items():
        if isinstance(value, Tensor):
            setattr(moved, name, value.to(device=device, dtype=dtype))
    return moved


def version_of(tensor: Tensor) -> int:
    """Return how often torch has changed a tensor's numbers."""
    return 0 if tensor.is_inference() else tensor._version


def square_root(value: Control) -> Control:
    """Return √value of a number or of a tensor."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def exp(value: Control) -> Control:
    """Return e^value of a number or of a tensor."""
    return value.exp() if isinstance(value, Tensor) else math.exp(value)


def expm1(value: Control) -> Control:
    """Return e^value - 1 of a number or of a tensor, precise near 0."""
    return value.expm1() if isinstance(value, Tensor) else math.expm1(value)


def mean_of(control: Control) -> float:
    """Return a control as a number, the mean over chains."""
    return control.mean().item() if isinstance(control, Tensor) else float(control)


# -- copies ------------------------------------------------------------------------------------------------------------


def copied(value: Holder, memo: dict[int, Any] | None = None) -> Holder:
    """Return a deep copy of a network, or of several, whose functions compute with the copy.

    `copy.deepcopy` keeps functions as they are. A lambda, an inner function or a hook that names `self` would then
    compute with the layers of the original.

    Args:
        value: a module, or a list or tuple of modules and others.
        memo: as for `copy.deepcopy`.

    Raises:
        ValueError: if a module holds a weak reference to another one.
        TypeError: if something that it holds cannot be copied, such as a lock.
    """
    memo = {} if memo is None else memo
    roots = value if isinstance(value, list | tuple) else [value]
    modules = {id(part) for root in roots if isinstance(root, nn.Module) for part in root.modules()}
    modules |= {root.stands_for for root in roots if hasattr(root, "stands_for")}
    met = _reached([value])
    for one in met:
        if isinstance(one, ReferenceType) and id(one()) in modules:
            raise ValueError(
                f"a layer holds a weak reference to a {type(one()).__name__}, which a copy of the network cannot "
                "follow: pass what the layer needs in forward"
            )
    functions = [one for one in met if isinstance(one, FunctionType) and id(one) not in memo]
    functions = [one for one in functions if any(id(part) in modules for part in _reached(_held(one)))]
    for function in functions:
        cells = tuple(CellType() for _ in function.__closure__ or ())
        memo[id(function)] = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
    try:
        made = copy.deepcopy(value, memo)
    except TypeError as error:
        raise TypeError(
            f"the network cannot be copied ({error}), as each sample's and each fit's own one is: keep such an object "
            "outside of it, or define its __deepcopy__; posterior.predict makes no copy"
        ) from error
    for function in functions:
        own = memo[id(function)]
        own.__defaults__, own.__kwdefaults__, attributes = copy.deepcopy(
            (function.__defaults__, function.__kwdefaults__, vars(function)), memo
        )
        vars(own).update(attributes)
        for cell, old in zip(own.__closure__ or (), function.__closure__ or (), strict=True):
            if _is_filled(old):
                is_part = any(id(part) in modules for part in _reached([old.cell_contents]))
                cell.cell_contents = copy.deepcopy(old.cell_contents, memo) if is_part else old.cell_contents
    return made


def _reached(values: Sequence[Any]) -> list[Any]:
    """Return some values and all that they hold, by containers, modules and functions."""
    waiting, met = list(values), dict[int, Any]()
    while waiting:
        one = waiting.pop()
        if id(one) not in met:
            met[id(one)] = one
            waiting += _held(one)
    return list(met.values())


def _held(value: Any) -> list[Any]:
    """Return what a container, a module or a function holds."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), value.__kwdefaults__, vars(value)]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, nn.Module):
        return [vars(value)]
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that has no value yet
        return False


# -- finite ------------------------------------------------------------------------------------------------------------

STATISTICS = ("running_mean", "running_var")
"""Ends of the names of the buffers in which BatchNorm and InstanceNorm keep statistics."""


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all values of all tensors are finite, waiting for the device once."""
    if not tensors:
        return True
    total = torch.stack([norm.float() for norm in torch._foreach_norm(list(tensors))]).sum().item()
    # The norm of large finite numbers may overflow, so an infinite one is checked element by element.
    return math.isfinite(total) or all(bool(t.isfinite().all()) for t in tensors)


def first_not_finite(tensors: Iterable[tuple[str, Tensor]], infinities: bool = True) -> str | None:
    """Return the name of the first floating-point tensor with a NaN (or, with `infinities`, an infinity), or None."""
    for name, tensor in tensors:
        if tensor.is_floating_point():
            bad = ~tensor.isfinite() if infinities else tensor.isnan()
            if bad.any():
                return name
    return None


def bad_tensor(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> str | None:
    """Return the name of a parameter or running statistic that is not finite, or of a buffer with a NaN, or None."""
    statistics = {name: tensor for name, tensor in buffers.items() if name.endswith(STATISTICS)}
    if statistics:
        parameters = {**parameters, **statistics}
        buffers = {name: tensor for name, tensor in buffers.items() if name not in statistics}  # masks have infinities
    of_parameters, of_buffers = (
        [t for t in part.values() if t.is_floating_point() and t.numel()] for part in (parameters, buffers)
    )
    if not (of_parameters or of_buffers):
        return None
    norms = torch.stack([norm.float() for norm in torch._foreach_norm([*of_parameters, *of_buffers])]).tolist()
    count = len(of_parameters)
    if all(map(math.isfinite, norms[:count])) and not any(map(math.isnan, norms[count:])):
        return None
    # The norm of large finite numbers may overflow, so the tensors are examined element by element.
    return first_not_finite(parameters.items()) or first_not_finite(buffers.items(), infinities=False)
