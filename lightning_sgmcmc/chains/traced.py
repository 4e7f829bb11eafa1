"""Energies and gradients as one traced function: the operations of a step without the layers of Python around them.

For a small network a step's time is that of Python: modules, hooks, autograd's records, one call for each operation of
each chain. The function of parameters and batch that gives the energies and their gradient is therefore written down
once, as a list of tensor operations (`torch.fx`), and compiled where that pays. Its numbers are those of the same
formulas, up to rounding.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

Energies = tuple[Tensor, ...]
MOST_FORMS = 8
"""Forms of batches that are traced; each takes part of a second."""


class NotTraceableError(Exception):
    """A function that is more than tensor operations of its arguments: it draws numbers, or changes them."""


class TracedEnergies:
    """The energies of `RowEnergies` and their gradient, traced once for each form of a batch.

    Args:
        function: of the leaf, other tensors by name, a batch, its axis of chains, and two tensors of shape () or None;
            it returns the loss and further tensors.
        model: the model that it computes; a model that changes itself in a step raises an error.
    """

    def __init__(self, function: Callable[..., Energies], model: nn.Module) -> None:
        self._function = function
        self._model = model
        self._known: dict[Any, Callable[..., tuple[Tensor, ...]]] = {}

    def __call__(
        self,
        leaf: Tensor,
        others: Mapping[str, Tensor],
        batch: Any,
        axis: int | None,
        inverse: Tensor,
        factor: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return the gradient of the loss, shape (C, P), and the function's value.

        Raises:
            NotTraceableError: if the function is more than tensor operations.
        """
        parts, structure = pytree.tree_flatten(batch)
        if not all(type(part) is Tensor and part.layout == torch.strided for part in parts):
            raise NotTraceableError("batches hold other things than plain tensors")
        key = structure, axis, factor is None, tuple([(part.shape, part.dtype, part.stride()) for part in parts])
        tensors = [leaf, inverse, inverse if factor is None else factor, *parts, *others.values()]
        traced = self._known.get(key)
        if traced is None:
            if len(self._known) >= MOST_FORMS:
                raise NotTraceableError(f"batches have more than {MOST_FORMS} shapes")

            def energies(values: Tensor, inverse: Tensor, weight: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
                own = pytree.tree_unflatten(list(rest[: len(parts)]), structure)
                named = dict(zip(others, rest[len(parts) :], strict=True))
                return with_gradient(
                    self._function, values, named, own, axis, inverse, None if factor is None else weight
                )

            traced = self._known[key] = trace(energies, tensors, self._model).forward
        return traced(*tensors)


def with_gradient(function: Callable[..., Energies], values: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Return the gradient of the first tensor that a function of values and others returns, and all of these."""

    def loss(values: Tensor) -> tuple[Tensor, Energies]:
        found = function(values, *given)
        return found[0], found

    gradient, found = torch.func.grad(loss, has_aux=True)(values)
    return gradient, *found


def trace(function: Callable[..., Any], tensors: list[Tensor], model: nn.Module) -> GraphModule:
    """Return a pure function of tensors as a list of operations; see `TracedEnergies`."""
    before = {part: dict(vars(part)) for part in model.modules()}
    try:
        traced = make_fx(torch.func.functionalize(function))(*(tensor.detach() for tensor in tensors))
    except NotTraceableError:
        raise
    except Exception as error:  # whatever the user's code raises in a trace, it is run as it is
        raise NotTraceableError(str(error).strip().split("\n")[0][:150]) from error
    for part, attributes in before.items():
        now = vars(part)
        changed = [name for name in now if name not in attributes or now[name] is not attributes[name]]
        for name in changed:
            if name in attributes:
                now[name] = attributes[name]
            else:
                del now[name]
        if changed:
            raise NotTraceableError(f"{type(part).__name__} sets its attribute {changed[0]!r}")
    check_pure(traced)
    for node in traced.graph.nodes:
        node.meta.clear()  # values of the trace, which a compiler would compare with its own
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def check_alike(numbers: Tensor, again: Tensor) -> None:
    """Raise unless traced energies, shape (2, C), are those of the code that was traced, at the same state."""
    if not torch.allclose(numbers, again, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise NotTraceableError("its code does not compute the same at another step")


def check_pure(traced: GraphModule) -> None:
    """Raise unless a traced function only computes: another call must give the same, and leave its arguments alone."""
    for node in traced.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            raise NotTraceableError(f"it draws random numbers ({node.target})")
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
            raise NotTraceableError("it changes its arguments, as BatchNorm does its statistics")
