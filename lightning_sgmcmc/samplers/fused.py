"""Update rules as one function of rows, which `torch.compile` turns into one kernel on a GPU.

The controls arrive as tensors: a compiled function would be compiled again for each new number. A number becomes a
tensor of shape () in the host's memory, which a kernel takes as an argument, so that nothing is copied.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import Control


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled, once in a process."""
    made: Callable[..., Any] = torch.compile(function)  # a second width is compiled for all further ones
    return made


def coefficient(value: Control, rows: Tensor) -> Tensor:
    """Return a control in a shape that multiplies rows: () or (C, 1).

    Args:
        value: a number, or a tensor of shape (), (1,) or (C,).
        rows: shape (C, d).
    """
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=rows.dtype)
    return value.reshape(()) if value.numel() == 1 else value.view(-1, 1)


def coefficients(group: Mapping[str, Any], rows: Tensor, num_data: int) -> list[Tensor]:
    """Return a parameter group's lr, κ and τ, and N, each as `coefficient` does.

    Args:
        group: the parameter group.
        rows: shape (C, d).
        num_data: N.
    """
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
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    rows.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
