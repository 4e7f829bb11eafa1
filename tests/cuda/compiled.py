"""`torch.compile` under the stand-in: the function runs as it is, and counts as replays of graphs or as fused kernels.

With mode="reduce-overhead" (CUDA graphs) a call is one replay, its backward pass another; tensors whose address is not
fixed are copied into the graph's memory, and a function that changes such a tensor is not replayed. The graph's outputs
lie in memory of its own: when a later step's first graph runs, this memory is written over, here by NaN; and a backward
pass whose forward pass is of an earlier step raises.
"""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.cuda.kernels import FusedKernels
from tests.cuda.record import Record
from tests.cuda.tensor import CudaTensor, Current

GRAPH_MODES = ("reduce-overhead", "max-autotune")
OVERWRITTEN = (
    "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run. To prevent "
    "overwriting, clone the tensor outside of torch.compile() or call torch.compiler.cudagraph_mark_step_begin() "
    "before each model invocation."
)


class Graphs:
    """Compiled functions and the generations of their graphs' memory."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._fused: FusedKernels | None = None
        self._moving: set[int] = set()
        self._mutates = False
        self._outputs: list[torch.Tensor] = []
        self._pending = 0
        self._marked = False
        self.generation = 0
        self.used = False
        """Whether a graph has run since the last reset: its memory is held."""
        self.resets = 0

    def mark_step(self) -> None:
        """Begin a step: the memory of earlier graphs may be written over."""
        self._marked = True

    def reset(self) -> None:
        """Stand for `torch.compiler.reset`."""
        self.used = False
        self.resets += 1

    def saw(self, func: Any, args: Any, out: Any) -> None:
        """Note an operation, which may be of a compiled function."""
        if self._fused is None or not self._record.in_graph or self._record.paused:
            return
        self._fused.add(func, args, out)
        if func._schema.is_mutable:
            written = args[0] if isinstance(args[0], list | tuple) else args[:1]
            self._mutates |= any(_memory(t) in self._moving for t in written if isinstance(t, CudaTensor))

    def call(self, function: Any, replays: bool, args: Any, kwargs: Any) -> Any:
        """Call a compiled function."""
        flat, shape = pytree.tree_flatten((args, kwargs))
        tensors = [part for part in flat if isinstance(part, torch.Tensor)]
        if self._record.in_graph or not any(isinstance(t, CudaTensor) for t in tensors):
            return function(*args, **kwargs)
        if replays:
            self._begin(tensors)
        places = [i for i, part in enumerate(flat) if isinstance(part, torch.Tensor) and part.requires_grad]
        if not torch.is_grad_enabled() or not places:
            out = self._inside("forward", replays, lambda: function(*args, **kwargs))
            self.keep(replays, pytree.tree_leaves(out), tensors)
            return out

        def with_leaves(leaves: list[torch.Tensor]) -> Any:
            own = list(flat)
            for place, leaf in zip(places, leaves, strict=True):
                own[place] = leaf
            again, keywords = pytree.tree_unflatten(own, shape)
            return function(*again, **keywords)

        form: list[Any] = []
        outputs = _Differentiable.apply(self, replays, with_leaves, form, *(flat[place] for place in places))
        return pytree.tree_unflatten(list(outputs), form[0])

    def _begin(self, tensors: list[torch.Tensor]) -> None:
        """Begin a generation if the step is new, and copy inputs whose address is not fixed."""
        self.used = True
        if self._marked or not self._pending:
            for output in self._outputs:
                if output.is_floating_point():
                    output.fill_(torch.nan)
            self._outputs.clear()
            self._marked, self._pending = False, 0
            self.generation += 1
        moving = [t for t in tensors if isinstance(t, CudaTensor) and not hasattr(t, "_dynamo_static_input_type")]
        self._moving = {_memory(t) for t in moving}
        self._record.launch("input of a graph", len(moving))

    def _inside(self, name: str, replays: bool, compute: Any) -> Any:
        self._fused = fused = FusedKernels()
        self._mutates = False
        self._record.in_graph += 1
        try:
            out = compute()
            fused.write(out)
        finally:
            self._record.in_graph -= 1
            self._fused = None
        if not replays or self._mutates:
            self._record.launch("compiled kernels", fused.count)
            return out
        self._record.graph(name)
        return out

    def keep(self, replays: bool, outputs: Any, inputs: Any) -> None:
        """Remember outputs in a graph's memory, that is those which are no inputs."""
        if replays:
            own = {_memory(t) for t in inputs if isinstance(t, CudaTensor)}
            self._outputs += [t.inner for t in outputs if isinstance(t, CudaTensor) and _memory(t) not in own]


def compile(function: Any = None, **options: Any) -> Any:
    """Stand for `torch.compile`; the function may be compiled under one stand-in and called under the next."""
    if function is None:
        return lambda found: compile(found, **options)
    if isinstance(function, torch.nn.Module):
        function.forward = compile(function.forward, **options)
        return function
    choice = options.get("options") or {}
    replays = options.get("mode") in GRAPH_MODES or bool(choice.get("triton.cudagraphs"))

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return Current.device.graphs.call(function, replays, args, kwargs)

    return compiled


class _Differentiable(torch.autograd.Function):
    """A compiled function whose gradient is compiled too."""

    @staticmethod
    def forward(ctx: Any, graphs: Graphs, replays: bool, call: Any, form: list[Any], *leaves: torch.Tensor) -> Any:
        ctx.graphs, ctx.replays, ctx.generation = graphs, replays, graphs.generation
        ctx.leaves = [leaf.detach().requires_grad_() for leaf in leaves]

        def compute() -> Any:
            with torch.enable_grad():
                return call(ctx.leaves)

        found, shape = pytree.tree_flatten(graphs._inside("forward", replays, compute))
        form.append(shape)
        ctx.out = found
        graphs._pending += int(replays)
        ctx.set_materialize_grads(False)
        outputs = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in found)
        ctx.mark_non_differentiable(*(t for t, o in zip(outputs, found, strict=True) if not o.requires_grad))
        graphs.keep(replays, outputs, leaves)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        graphs = ctx.graphs
        if ctx.replays and ctx.generation != graphs.generation:
            raise RuntimeError(OVERWRITTEN)
        pairs = [(t, g) for t, g in zip(ctx.out, grads, strict=True) if g is not None and t.requires_grad]

        def compute() -> Any:
            return torch.autograd.grad([t for t, _ in pairs], ctx.leaves, [g for _, g in pairs], allow_unused=True)

        if ctx.replays:
            graphs._record.launch("input of a graph", len(pairs))
        found = graphs._inside("backward", ctx.replays, compute)
        graphs._pending = max(0, graphs._pending - int(ctx.replays))
        graphs.keep(ctx.replays, found, ())
        ctx.out = ctx.leaves = None
        return (None, None, None, None, *found)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
