"""Lightning's calls of a module on its `example_input_array`, for a model summary or a logger's graph."""

from collections.abc import Iterable
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_flatten


def is_example(module: pl.LightningModule, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether a call's inputs are the module's `example_input_array`, as it is or moved as a batch is."""
    example = module.example_input_array
    if example is None:
        return False
    private = cast(Any, module)
    moved = private._apply_batch_transfer_handler(private._on_before_batch_transfer(example))
    return any(_equal((arguments, named), _call_of(one)) for one in (example, moved))


def leave_out_graph(loggers: Iterable[Any]) -> None:
    """Let TensorBoard draw no graph of a module with several chains, which torch cannot trace, and say so."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and logger._log_graph:
            logger._log_graph = False
            rank_zero_warn(
                "TensorBoardLogger(log_graph=True) draws one network's graph, and this module holds several chains, so "
                "the graph is left out: draw it of a module with num_chains=1."
            )


def _call_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which Lightning calls a module for its example."""
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, list | tuple) else (example,)), {}


def _equal(one: Any, other: Any) -> bool:
    """Return whether two collections hold equal tensors."""
    ours, theirs = tree_flatten(one), tree_flatten(other)
    if ours[1] != theirs[1]:
        return False
    return all(
        a.shape == b.shape and torch.equal(a, b.to(a)) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b
        for a, b in zip(ours[0], theirs[0], strict=True)
    )
