"""Energies and gradients as one traced function: the operations of a step without the layers of Python around them.

For a small network a step's time is that of Python: modules, hooks, autograd's records, one call for each operation of
each chain. The function of parameters and batch that gives the energies and their gradient is therefore written down
once, as a list of tensor operations (`torch.fx`), and compiled where that pays. Its numbers are those of the same
formulas, up to rounding.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

Energies = tuple[Tensor, Tensor, Tensor]
Form = Literal["traced", "compiled"]


LARGEST = 200_000
"""Sampled numbers of all chains above which a step's time is that of its arithmetic."""
SECONDS: dict[Form, float] = {"traced": 1.0, "compiled": 25.0}
"""What a form costs at its first step."""
CHANGING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RNNBase)
"""Layers that draw numbers or change their buffers in training, or that `torch.vmap` cannot run."""


def form_of(model: nn.Module, numbers: int, chains: int, steps: float) -> Form | None:
    """Return the form that saves most time in a fit of so many steps, None if none saves more than it costs.

    It depends on sizes alone, not on times that are measured, so that a run repeats.
    """
    if numbers > LARGEST or not math.isfinite(steps) or any(isinstance(part, CHANGING) for part in model.modules()):
        return None
    saved = saved_seconds(chains, steps)
    best = max(saved, key=lambda form: saved[form] - SECONDS[form])
    return best if saved[best] > 2 * SECONDS[best] else None


def saved_seconds(chains: int, steps: float) -> dict[Form, float]:
    """Return about how many seconds each form saves, as measured on one slow core."""
    return {"traced": steps * (1.2e-3 * chains - 1.4e-3), "compiled": steps * (1.2e-3 * chains + 0.3e-3)}


class NotTraceableError(Exception):
    """A function that is more than tensor operations of its arguments: it draws numbers, or changes them."""


class Given(torch.autograd.Function):
    """A loss with the gradient that it is known to have."""

    @staticmethod
    def forward(ctx: FunctionCtx, leaf: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * factor, None, None


class TracedEnergies:
    """The energies of `RowEnergies` with their gradient, traced once for each form of a batch.

    Args:
        function: `RowEnergies._energies`, of the leaf, other tensors by name, a batch, its axis of chains, and two
            tensors of shape () or None.
        compiles: whether the first form is compiled; others, such as an odd last batch, are not.
    """

    def __init__(self, function: Callable[..., Energies], compiles: bool) -> None:
        self._function = function
        self._compiles = compiles
        self._known: dict[Any, Callable[..., tuple[Tensor, ...]]] = {}

    @classmethod
    def maker(cls, form: Form) -> Callable[..., "TracedEnergies"]:
        """Return what makes the traced form of a function, in place of a compiler."""
        return lambda function, **options: cls(function, form == "compiled")

    def __call__(
        self,
        leaf: Tensor,
        others: Mapping[str, Tensor],
        batch: Any,
        axis: int | None,
        inverse: Tensor,
        factor: Tensor | None,
    ) -> Energies:
        """Return the function's value, whose loss has the leaf's gradient."""
        parts, structure = pytree.tree_flatten(batch)
        if not all(isinstance(part, Tensor) for part in parts):
            raise NotTraceableError("a batch holds other things than tensors")
        key = structure, axis, factor is None, tuple([(part.shape, part.dtype, part.stride()) for part in parts])
        with torch.no_grad():
            tensors = [leaf.detach(), inverse, inverse if factor is None else factor, *parts, *others.values()]
            traced = self._known.get(key)
            if traced is None:

                def energies(values: Tensor, inverse: Tensor, weight: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
                    own = pytree.tree_unflatten(list(rest[: len(parts)]), structure)
                    named = dict(zip(others, rest[len(parts) :], strict=True))
                    given = named, own, axis, inverse, None if factor is None else weight

                    def loss(values: Tensor) -> tuple[Tensor, Energies]:
                        found = self._function(values, *given)
                        return found[0], found

                    gradient, found = torch.func.grad(loss, has_aux=True)(values)
                    return gradient, *found

                traced = self._known[key] = self._traced(energies, tensors)
            gradient, loss, numbers, each = traced(*tensors)
        return Given.apply(leaf, loss, gradient), numbers, each

    def _traced(self, function: Callable[..., Any], tensors: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        traced = make_fx(torch.func.functionalize(function))(*tensors)
        check_pure(traced)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        if not self._compiles or self._known:
            return traced
        compiled: Callable[..., tuple[Tensor, ...]] = torch._inductor.compile(traced, tensors)
        return compiled


def check_pure(traced: GraphModule) -> None:
    """Raise unless a traced function only computes: another call must give the same, and leave its arguments alone."""
    for node in traced.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            raise NotTraceableError(f"it draws random numbers ({node.target})")
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
            raise NotTraceableError("it changes its arguments, as BatchNorm does its statistics")
