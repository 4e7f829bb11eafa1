"""Energies and gradients as one traced function: the operations of a step without the layers of Python around them.

For a small network a step's time is that of Python: modules, hooks, autograd's records, one call for each operation of
each chain. The function of parameters and batch that gives the energies and their gradient is therefore written down
once, as a list of tensor operations (`torch.fx`), and compiled where that pays. Its numbers are those of the same
formulas, up to rounding.

Of many steps in a row, the operations that give the same in each are made once before them (`parted`).
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sgmcmc.seeding import unchanged_generators

Energies = tuple[Tensor, ...]
MOST_FORMS = 8
"""Forms of batches that are traced; each takes some hundredths of a second."""


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
        key = repr(structure), axis, factor is None, tuple([(part.shape, part.dtype, part.stride()) for part in parts])
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


# -- what is the same in many steps ------------------------------------------------------------------------------------

ATEN = torch.ops.aten
LITERALS = (ATEN.lift_fresh.default, ATEN.lift_fresh_copy.default)
"""Operations that make a tensor of a number in the code."""
SAME = (ATEN.detach.default, ATEN.alias.default)
"""Operations whose result has the argument's memory and numbers."""
OF_A_SHAPE = (ATEN.ones_like.default, ATEN.zeros_like.default)
"""Operations whose result depends on their argument's shape alone."""
VIEWS = (ATEN.view.default, ATEN._unsafe_view.default)
PLAIN: dict[Any, Callable[..., Any]] = {
    ATEN.addmm.default: torch.addmm,
    ATEN.mm.default: torch.mm,
    ATEN.mul.Tensor: torch.mul,
    ATEN.add.Tensor: torch.add,
    ATEN.neg.default: torch.neg,
    ATEN.relu.default: torch.relu,
    ATEN.tanh.default: torch.tanh,
    ATEN.exp.default: torch.exp,
    ATEN.sum.dim_IntList: torch.sum,
    ATEN.pow.Tensor_Scalar: torch.pow,
    ATEN.mul.Scalar: torch.mul,
    ATEN.addcmul.default: torch.addcmul,
    ATEN.cat.default: torch.cat,
    ATEN.stack.default: torch.stack,
    ATEN.t.default: torch.t,
    ATEN.view.default: Tensor.view,
    ATEN.expand.default: Tensor.expand,
    ATEN.unsqueeze.default: torch.unsqueeze,
    ATEN.squeeze.dim: torch.squeeze,
}
"""Functions that make the same calls in less time."""


class Parts(NamedTuple):
    """A traced function in parts.

    Attributes:
        before: of the tensors that stay the same; it returns what the others need of them.
        after: of that and of the other tensors; it returns what the whole function does.
        first: as `after`, of its first result alone.
    """

    before: Callable[..., Any]
    after: Callable[..., Any]
    first: Callable[..., Any]


def parted(traced: GraphModule, tensors: Sequence[Tensor], kept: int, live: Tensor) -> Parts:
    """Return the parts of a traced function of some tensors, of which the first so many stay the same.

    A kept tensor may be `live`: its memory stays the same, and its numbers change.

    Raises:
        NotTraceableError: if the parts do not give what the function gives.
    """
    values = Interpreter(traced, garbage_collect_values=False)
    with torch.no_grad():
        values.run(*tensors)
    before, after, constants = Graph(), Graph(), nn.Module()
    first: dict[Node, Node] = {}
    second: dict[Node, Node] = {}
    same: dict[Node, Node] = {}
    stays: set[Node] = set()
    later: list[Node] = []
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(inputs[:kept], tensors, strict=False):
        first[node] = before.placeholder(node.name)
        if tensor is not live:
            stays.add(node)
    *nodes, end = [node for node in traced.graph.nodes if node.op != "placeholder"]
    for node in nodes:
        needed = [same.get(found, found) for found in node.all_input_nodes]
        source = _unchanged(node, needed, values.env)
        if source is not None:
            same[node] = source
        elif node.op == "get_attr" or node.target in OF_A_SHAPE:
            constants.register_buffer(node.name, values.env[node])
            first[node] = before.get_attr(node.name)
            stays.add(node)
        elif all(found in stays for found in needed) or (_is_view(node) and all(found in first for found in needed)):
            first[node] = before.node_copy(node, lambda found: first[same.get(found, found)])
            if all(found in stays for found in needed):
                stays.add(node)
        else:
            later.append(node)
    results = [same.get(found, found) for found in end.args[0]]
    used = [same.get(found, found) for node in later for found in node.all_input_nodes]
    handed = [node for node in dict.fromkeys([*used, *results]) if node in first]
    before.output(tuple(first[node] for node in handed))
    for node in [*handed, *inputs[kept:]]:
        second[node] = after.placeholder(node.name)
    for node in later:
        second[node] = after.node_copy(node, lambda found: second[same.get(found, found)])
    after.output(tuple(second[node] for node in results))
    _shorten(after, {second[node]: _form_of(values.env[node]) for node in second})
    alone = Graph()
    whole: Any = alone.graph_copy(after, {})
    alone.output(whole[0])
    for graph in (after, alone):
        graph.eliminate_dead_code()
    graphs = (constants, before), (nn.Module(), after), (nn.Module(), alone)
    parts = Parts(*(GraphModule(held, graph).forward for held, graph in graphs))
    _check_parts(parts, tensors, kept, [values.env[node] for node in end.args[0]])
    return parts


@torch.no_grad()
def _check_parts(parts: Parts, tensors: Sequence[Tensor], kept: int, expected: Sequence[Tensor]) -> None:
    """Raise unless the parts give what the function gave of some tensors."""
    try:
        steady = parts.before(*tensors[:kept])
        found = [*parts.after(*steady, *tensors[kept:]), parts.first(*steady, *tensors[kept:])]
    except RuntimeError as error:
        raise NotTraceableError(first_line(error)) from error
    for value, wanted in zip(found, [*expected, expected[0]], strict=True):
        size = wanted.abs().max() if wanted.numel() and wanted.isfinite().all() else 1.0
        if not torch.allclose(value, wanted, rtol=1e-3, atol=1e-5 * float(size), equal_nan=True):
            raise NotTraceableError("its operations give something else in another order")


def _form_of(value: Any) -> Any:
    """Return the shape and the type of a tensor."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _shorten(graph: Graph, forms: Mapping[Node, Any]) -> None:
    """Make a list of operations shorter, up to rounding: views in a row are one or none, and a sum with a product is
    one operation."""
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        needed = node.all_input_nodes
        if node.target in VIEWS:
            source = needed[0]
            if source.target in VIEWS:
                source = source.all_input_nodes[0]
                node.args = source, node.args[1]
            if forms[source] == forms[node]:
                node.replace_all_uses_with(source)
                graph.erase_node(node)
        elif node.target is ATEN.add.Tensor and not node.kwargs and len(needed) == 2:
            for product, other in (needed, needed[::-1]):
                if len(product.users) == 1 and _joins(node, product, other, forms):
                    break
    for node in graph.nodes:
        if node.op == "call_function" and (not node.kwargs or node.target is ATEN.addcmul.default):
            node.target = PLAIN.get(node.target, node.target)


def _joins(total: Node, product: Node, other: Node, forms: Mapping[Node, Any]) -> bool:
    """Make a sum of a product and another number one operation, if there is one; return whether there is."""
    factors, options = product.all_input_nodes, dict[str, Any]()
    if product.target is ATEN.bmm.default and forms[total] == forms[product]:
        total.target, total.args = torch.baddbmm, (other, *factors)
        return True
    alike = len({forms[part] for part in (total, other, *factors)}) == 1
    if not alike or product.target is not ATEN.mul.Tensor or len(factors) != 2:
        return False
    for place, factor in enumerate(factors):
        if factor.target is ATEN.mul.Scalar and not options:
            factors[place], options["value"] = factor.all_input_nodes[0], factor.args[1]
    total.target, total.args, total.kwargs = ATEN.addcmul.default, (other, *factors), options
    return True


def _is_view(node: Node) -> bool:
    """Return whether a node's value has the memory of its arguments."""
    target: Any = node.target
    return node.op == "call_function" and (target is operator.getitem or getattr(target, "is_view", False))


def _unchanged(node: Node, needed: Sequence[Node], values: Mapping[Node, Any]) -> Node | None:
    """Return the node that a node equals bit for bit: of a product with 1, a first power, or two
    transpositions."""
    target, args = node.target, node.args
    if len(needed) != 1 or node.kwargs:
        return None
    if target is ATEN.t.default and needed[0].target is ATEN.t.default:
        return needed[0].all_input_nodes[0]
    is_one = len(args) > 1 and not isinstance(args[1], Node) and args[1] == 1
    of_one = is_one and target in (ATEN.mul.Tensor, ATEN.mul.Scalar, ATEN.pow.Tensor_Scalar)
    return needed[0] if of_one and values[node].dtype == values[needed[0]].dtype else None


# -- traces ------------------------------------------------------------------------------------------------------------


def with_gradient(function: Callable[..., Energies], values: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Return the gradient of the first tensor that a function of values and others returns, and all of these."""

    def loss(values: Tensor) -> tuple[Tensor, Energies]:
        found = function(values, *given)
        return found[0], found

    gradient, found = torch.func.grad(loss, has_aux=True)(values)
    return gradient, *found


def check_gradient(function: Callable[..., Energies], values: Tensor, *given: Any) -> None:
    """Raise unless `with_gradient` finds autograd's gradient: where activations are computed again, it does not."""
    leaf = values.detach().requires_grad_()
    try:
        with unchanged_generators([values.device]):
            gradient, *_ = with_gradient(function, values, *given)
        with unchanged_generators([values.device]), torch.enable_grad():
            (expected,) = torch.autograd.grad(function(leaf, *given)[0], leaf)
    except Exception as error:  # whatever the user's code raises, it is run as it is
        raise NotTraceableError(first_line(error)) from error
    size = float(expected.abs().max()) if expected.numel() else 0.0
    if not torch.allclose(gradient, expected, rtol=1e-3, atol=1e-4 * size, equal_nan=True):
        raise NotTraceableError("torch.func.grad does not find the gradient that autograd finds")


def first_line(error: Exception) -> str:
    """Return what an error says, in short."""
    return str(error).strip().split("\n")[0][:150]


class Recorder(TorchDispatchMode):
    """Writes down the tensor operations that are made while it is entered, in a tenth of `make_fx`'s time.

    Attributes:
        graph: the operations, whose first inputs are the given tensors; other tensors are constants.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = Graph()
        self._constants = nn.Module()
        self._kept: list[Tensor] = []
        """All tensors of the trace, so that no two have the same identity."""
        self._nodes: dict[int, Node] = {}
        for place, tensor in enumerate(tensors):
            self._note(tensor, self.graph.placeholder(f"given_{place}"))

    @classmethod
    def operations_of(cls, function: Callable[..., Any], tensors: Sequence[Tensor]) -> GraphModule:
        """Return the operations that a function makes of tensors."""
        recorder = cls(tensors)
        with recorder:
            found = function(*tensors)
        recorder.graph.output(pytree.tree_map_only(Tensor, recorder._node_of, found))
        return GraphModule(recorder._constants, recorder.graph)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.dynamic_output_shape in func.tags and (func is not ATEN.index.Tensor or _has_mask(args[1])):
            raise NotTraceableError(f"its tensors' shapes depend on their numbers ({func})")
        found = func(*args, **kwargs)
        if func in LITERALS:
            return found  # a number in the code becomes a constant where it is used
        if func in SAME:
            self._note(found, self._node_of(args[0]))
            return found
        used, named = pytree.tree_map_only(Tensor, self._node_of, (args, kwargs))
        node = self.graph.call_function(func, used, named)
        if isinstance(found, Tensor):
            self._note(found, node)
        elif isinstance(found, tuple | list):
            for place, part in enumerate(found):
                if isinstance(part, Tensor):
                    self._note(part, self.graph.call_function(operator.getitem, (node, place)))
        elif found is not None:
            if any(known.op != "get_attr" for known in node.all_input_nodes):
                raise NotTraceableError(f"its code reads a number from a tensor ({func})")
            self.graph.erase_node(node)  # of a constant
        return found

    def _note(self, tensor: Tensor, node: Node) -> None:
        self._kept.append(tensor)
        self._nodes[id(tensor)] = node

    def _node_of(self, tensor: Tensor) -> Node:
        """Return what gives a tensor; one that no operation gave is a constant."""
        if id(tensor) not in self._nodes:
            name = f"constant_{len(self._kept)}"
            self._constants.register_buffer(name, tensor)
            self._note(tensor, self.graph.get_attr(name))
        return self._nodes[id(tensor)]


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def trace(function: Callable[..., Any], tensors: list[Tensor], model: nn.Module) -> GraphModule:
    """Return a pure function of tensors as a list of operations; see `TracedEnergies`."""
    before = {part: dict(vars(part)) for part in model.modules()}
    try:
        traced = Recorder.operations_of(torch.func.functionalize(function), [tensor.detach() for tensor in tensors])
    except NotTraceableError:
        raise
    except Exception as error:  # whatever the user's code raises in a trace, it is run as it is
        raise NotTraceableError(first_line(error)) from error
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
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def check_alike(numbers: Tensor, again: Tensor) -> None:
    """Raise unless traced energies, shape (2, C), are those of the code that was traced, at the same state."""
    if not torch.allclose(numbers, again, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise NotTraceableError("its code does not compute the same at another step")


def _draws(node: Node) -> bool:
    """Return whether an operation draws numbers, which dropout in attention does not with probability 0."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0


def check_pure(traced: GraphModule) -> None:
    """Raise unless a traced function only computes: another call must give the same, and leave its arguments alone."""
    for node in traced.graph.nodes:
        if _draws(node):
            raise NotTraceableError(f"it draws random numbers ({node.target})")
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise NotTraceableError(f"it changes a tensor that it has not made, as BatchNorm does ({node.target})")
