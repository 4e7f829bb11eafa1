"""The torch backend under the stand-in: what C++ takes its tensors for, registered once a process."""

import types
from typing import Any

import torch
import torch.utils.backend_registration
from torch.utils import _pytree as pytree

NAME = "standin"

LOWER = (
    "conv1d", "conv2d", "conv3d", "convolution", "linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "addmv", "mv",
)  # fmt: skip
"""What autocast computes in the lower precision."""
FULL = (
    "log_softmax.int", "softmax.int", "cross_entropy_loss", "nll_loss", "mse_loss", "sum", "sum.dim_IntList",
    "norm.Scalar", "pow.Tensor_Scalar", "exp", "log", "log1p", "softplus", "cumsum", "prod", "rsqrt", "reciprocal",
)  # fmt: skip
"""What autocast computes in float32."""

_libraries: list[Any] = []


class _Backend(types.ModuleType):
    """What torch asks a backend's module for."""

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_rng_state = staticmethod(lambda *_: torch.cuda.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.cuda.set_rng_state(state))
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])


def register() -> None:
    """Register the backend, once a process.

    C++ takes the tensors for this backend's, since its autograd needs an accelerator that exists; Python sees "cuda".
    """
    if _libraries:
        return
    torch._C._ensureCUDADeviceGuardSet()  # for the C++ that meets "cuda" in an argument
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend(NAME))
    everything = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    _libraries.extend((everything, library))  # they end when they are collected
    for name in LOWER:
        library.impl(name, _autocast(name, lower=True))
    for name in FULL:
        library.impl(name, _autocast(name, lower=False))


def _autocast(name: str, lower: bool) -> Any:
    base, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, base), overload or "default")

    def cast(*args: Any, **kwargs: Any) -> Any:
        half = torch.get_autocast_dtype(NAME)
        target = half if lower else torch.float32

        def to(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(target) if tensor.dtype in (half, torch.float32) else tensor

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return operation(*pytree.tree_map_only(torch.Tensor, to, args), **kwargs)

    return cast
