"""Controls: numbers with one value for all chains, or one for each chain."""

import math
from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

Control: TypeAlias = float | Tensor
"""A number, or a tensor of shape () or (C,) on the parameters' device: one value for all chains or one for each."""


def along_first_axis(values: Tensor, dim: int) -> Tensor:
    """Return a view of shape (C, 1, …, 1) with `dim` axes, which multiplies the rows of such a tensor.

    Args:
        values: one value for each row, shape (C,).
        dim: number of axes of the tensor to be multiplied, ≥ 1.
    """
    return values.view(-1, *[1] * (dim - 1))


def for_each_tensor(factor: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a factor in the shapes that multiply each of the tensors, in their dtype.

    Args:
        factor: one value, or one for each chain, shape (C,).
        tensors: tensors of one dtype, with a leading chain axis if the factor has one.
    """
    factor = factor.to(tensors[0].dtype)
    if factor.numel() == 1:
        return [factor.reshape(())] * len(tensors)
    return [along_first_axis(factor, tensor.dim()) for tensor in tensors]


def square_root(value: Control) -> Control:
    """Return √value of a number or of a tensor."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)
