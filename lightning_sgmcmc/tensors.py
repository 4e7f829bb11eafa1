"""Numbers with one value for all chains, or one for each."""

import math
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


def square_root(value: Control) -> Control:
    """Return √value of a number or of a tensor."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)
