"""How many commands CUDA puts on its stream for an operation of ATen: an estimate from the sources of its kernels."""

from math import ceil
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lightning_sgmcmc.samplers.rows import is_dense

aten = torch.ops.aten

FREE = frozenset(
    (
        "detach", "alias", "view", "_unsafe_view", "as_strided", "t", "transpose", "permute", "movedim", "swapaxes",
        "select", "slice", "narrow", "expand", "unsqueeze", "squeeze", "unbind", "split", "split_with_sizes", "chunk",
        "tensor_split", "lift", "lift_fresh", "_reshape_alias", "view_as", "view_as_real", "view_as_complex", "real",
        "imag", "unflatten", "unfold", "diagonal", "empty", "empty_like", "new_empty", "empty_strided",
        "new_empty_strided", "resize", "set", "is_pinned", "is_same_size", "prim_layout", "dim", "sym_size",
        "record_stream", "is_nonzero", "_local_scalar_dense",
    )
)  # fmt: skip
"""Operations without a kernel: views and allocations."""

WAITS = frozenset(
    (
        aten._local_scalar_dense.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten.equal.default,
        aten.bincount.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
        aten.repeat_interleave.Tensor,
        aten.multinomial.default,
    )
)
"""Operations whose result's size or value the host must know."""

SEVERAL = {
    "constant_pad_nd": 2,  # a fill, then a copy into the middle
    "slice_backward": 2,
    "select_backward": 2,
    "convolution_backward": 2,  # the input's gradient and the weight's
    "cudnn_convolution_backward": 2,
    "nll_loss_backward": 2,
    "nll_loss2d_backward": 2,
    "scatter": 2,  # a copy of the tensor, then its change in place
    "scatter_add": 2,
    "index_add": 2,
    "index_copy": 2,
    "index_fill": 2,
    "index_put": 2,
    "masked_fill": 2,
    "masked_scatter": 2,
    "slice_scatter": 2,
    "select_scatter": 2,
    "sort": 4,
    "argsort": 4,
    "topk": 3,
    "median": 4,
    "kthvalue": 3,
    "randperm": 5,
    "multinomial": 4,
    "nonzero": 3,
    "masked_select": 4,
    "bincount": 4,
    "_unique2": 6,
    "embedding_dense_backward": 5,
    "equal": 2,
    "searchsorted": 1,
    "histc": 3,
}
"""Operations of several kernels."""

CAT_BATCH = 128
FOREACH_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""The most tensors of a list in one launch of CUDA's foreach kernels, by the number of lists."""
SCANS, SCANNED = ("cumsum", "cumprod", "logcumsumexp"), 1024
"""Scans of rows, in which a block of threads takes so many numbers at a time, for about what a launch costs."""
FOREACH_BLOCKS, FOREACH_CHUNK = 320, 65_536

REDUCTIONS = (
    "sum",
    "mean",
    "prod",
    "norm",
    "linalg_vector_norm",
    "max",
    "min",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "any",
    "all",
    "var",
    "std",
)
UNROLLED = 8
"""Reductions of fewer elements are written out inside the kernel that needs them."""
HEAVY = (
    "conv",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "matmul",
    "softmax",
    "batch_norm",
    "sort",
    "cumsum",
    "nll_loss",
    "scatter",
    "bucketize",
    "index_put",
)


def base_name(func: Any) -> str:
    """Return an operation's name without namespace and overload."""
    return str(func._schema.name).split("::")[-1]


def waits(func: Any, args: Any) -> bool:
    """Return whether the host waits for the device in an operation."""
    return func in WAITS or (base_name(func).startswith("index") and len(args) > 1 and _has_mask(args[1]))


def launches(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return how many commands an operation on the device puts on its stream."""
    name = base_name(func)
    if "foreach" in name:
        return foreach_launches(name, args, kwargs)
    bare = name.rstrip("_")
    if bare in FREE or name in FREE or "view" in name:
        return 0
    if bare in ("cat", "stack"):
        return max(1, ceil(len(args[0]) / CAT_BATCH))
    if bare in SCANS:
        return 2 + args[0].shape[args[1]] // SCANNED
    if bare == "index_put" and (kwargs.get("accumulate") or (len(args) > 3 and args[3])):
        return 6
    if name == "convolution_backward":
        return sum(bool(wanted) for wanted in args[-1])
    return SEVERAL.get(name, SEVERAL.get(bare, 1) if not name.endswith("_") else 1)


def foreach_launches(name: str, args: Any, kwargs: dict[str, Any]) -> int:
    """Return the launches of a foreach call: a few if CUDA's fast path takes the lists, else one a tensor."""
    values = (*args, *kwargs.values())
    lists = [a for a in values if isinstance(a, list | tuple) and a and isinstance(a[0], torch.Tensor)]
    first = lists[0]
    for tensors in lists:
        for own, tensor in zip(first, tensors, strict=True):
            alike = tensor.shape == own.shape and tensor.stride() == own.stride() and tensor.dtype == own.dtype
            if not alike or not is_dense(tensor):
                return len(first)
    depth = len(lists) + (0 if name.endswith("_") else 1)
    blocks = sum(ceil(tensor.numel() / FOREACH_CHUNK) for tensor in first)
    count = max(1, ceil(blocks / FOREACH_BLOCKS), ceil(len(first) / FOREACH_TENSORS[min(depth, 5)]))
    return 2 * count if "norm" in name else count


class FusedKernels:
    """Estimates the kernels of a compiled function that CUDA graphs do not replay.

    Inductor computes pointwise operations inside the kernel that needs them; so there is a kernel for each reduction,
    product of matrices, scatter and search, and one for each size of the tensors that the function returns or changes.
    """

    def __init__(self) -> None:
        self.sizes: set[int] = set()
        self.own = 0

    def add(self, func: Any, args: Any, out: Any) -> None:
        """Count an operation and its results."""
        name = base_name(func)
        bare = name.rstrip("_")
        if bare in FREE or "view" in name:
            return
        if bare in REDUCTIONS:
            inputs = [t.numel() for t in args if isinstance(t, torch.Tensor)]
            results = [t.numel() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
            self.own += int(max(inputs) >= UNROLLED * max(results, default=1))
        elif any(heavy in name for heavy in HEAVY):
            self.own += 1
        elif name.endswith("_"):
            self.write(out)

    def write(self, out: Any) -> None:
        """Count tensors that the function changes or returns."""
        self.sizes |= {t.numel() for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)}

    @property
    def count(self) -> int:
        """Kernels so far."""
        return max(1, len(self.sizes) + self.own)


def _has_mask(indices: Any) -> bool:
    return any(
        isinstance(a, torch.Tensor) and a.dtype in (torch.bool, torch.uint8) for a in pytree.tree_leaves(indices)
    )
