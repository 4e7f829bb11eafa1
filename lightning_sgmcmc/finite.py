"""Checks for NaN and infinite numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

STATISTICS = ("running_mean", "running_var")
"""Ends of the names of the buffers in which BatchNorm and InstanceNorm keep statistics."""


def finite_or_none(value: Any) -> Any:
    """Return a value as JSON has it: None in place of a number that is NaN or infinite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    """Return the name of a tensor that rules a state out as a sample, or None.

    Such a tensor is a parameter with a NaN or an infinity, or a buffer with a NaN (masks often have infinities).
    Running statistics count as parameters: an infinite one spoils every prediction. The device is waited for once if
    all is well.
    """
    statistics = {name: tensor for name, tensor in buffers.items() if name.endswith(STATISTICS)}
    if statistics:
        parameters = {**parameters, **statistics}
        buffers = {name: tensor for name, tensor in buffers.items() if name not in statistics}
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
