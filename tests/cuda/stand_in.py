"""A stand-in for one CUDA device on a machine without any.

`with StandIn() as device:` every tensor that is made on, or moved to, "cuda" is a `CudaTensor`: to all code it is on
`cuda:0` (`.device`, `.is_cuda`, autocast("cuda"), autograd, vmap, foreach, torch.optim), and its numbers are computed
on the CPU. So a whole `Trainer.fit` runs, with true numbers. It raises `DeviceMismatch` for mixed devices and for a CPU
generator on a tensor of the device, as CUDA does, and `device.record` counts launches, graphs, waits and transfers.

It cannot tell times, streams, memory, the numbers of CUDA's generators, or what torch.compile makes of a function. It
registers a torch backend for the whole process: use it in a process of its own.
"""

import contextlib
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from lightning_sgmcmc import tensors
from tests.cuda import kernels
from tests.cuda.backend import NAME, register
from tests.cuda.compiled import Graphs
from tests.cuda.cuda_api import patched
from tests.cuda.record import Record, line
from tests.cuda.tensor import ON_CUDA, CpuGenerator, CudaTensor, Current

aten = torch.ops.aten
LARGE = 65_536
"""Bytes above which a copy from pageable memory waits until the memory is read."""


class DeviceMismatch(RuntimeError):
    """What CUDA would refuse."""


class NoFloat64(RuntimeError):
    """What Apple's GPUs would refuse."""


class StandIn(TorchDispatchMode):
    """The device; use it as a context.

    Args:
        float64: whether the device has that type, which Apple's GPUs have not.
    """

    def __init__(self, float64: bool = True) -> None:
        super().__init__()
        self._float64 = float64
        self.record = Record()
        self.graphs = Graphs(self.record)
        self._pinned: dict[int, torch.Tensor] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "StandIn":
        register()
        Current.device = self
        self._stack.enter_context(patched(self.record, self.graphs))
        self._stack.enter_context(_torch_settings())
        if not self._float64:
            self._stack.enter_context(mock.patch.object(tensors, "WITHOUT_FLOAT64", {"cuda"}))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    # -- an operation -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operation on the CPU, and record what it is on the device."""
        flat = pytree.tree_leaves((args, kwargs))
        if not self._float64:
            _check_types(func, args, kwargs)
        ours = any(isinstance(a, CudaTensor) for a in flat)
        wanted = kwargs.get("device")
        to_cuda = wanted is not None and torch.device(wanted).type in ("cuda", NAME)
        if not ours and (memory := self._pinned_memory(func, args, kwargs)) is not None:
            return memory
        if not ours and not to_cuda:
            return func(*args, **kwargs)
        if func is aten._to_copy.default:
            return self._to_copy(func, args, kwargs, to_cuda)
        if func is aten.copy_.default and isinstance(args[0], CudaTensor) != isinstance(args[1], CudaTensor):
            self._copied(args[0], args[1], bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking")))
        elif ours:
            self._check(func, flat)
            if kernels.waits(func, args):
                self.record.wait(kernels.base_name(func))
        self.record.launch(kernels.base_name(func), kernels.launches(func, args, kwargs))
        if to_cuda:
            kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
        out = self._plain(func, args, kwargs)
        self.graphs.saw(func, args, out)
        if func is aten.copy_.default and not isinstance(args[0], CudaTensor):
            return args[0]
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            return out
        if not self._float64 and any(_is_wide(t) for t in pytree.tree_leaves(out)):
            raise NoFloat64(f"{kernels.base_name(func)}: the device has no float64, at {line()}")
        wrapped = pytree.tree_map_only(torch.Tensor, CudaTensor, out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if ours else wrapped

    def _plain(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        args, kwargs = pytree.tree_map_only(CudaTensor, lambda t: t.inner, (args, kwargs))
        self.record.paused += 1
        try:
            with _default_generator(func, args, kwargs):
                if "batch_norm" in func._schema.name:
                    return _batch_norm(func, args, kwargs)
                return func(*args, **kwargs)
        finally:
            self.record.paused -= 1

    def _check(self, func: Any, flat: list[Any]) -> None:
        name = kernels.base_name(func)
        hosts = [a for a in flat if isinstance(a, torch.Tensor) and not isinstance(a, CudaTensor) and a.dim() > 0]
        if hosts and name.rstrip("_") in ("index", "index_put"):
            for tensor in hosts:  # torch moves indices by itself
                self._arrives(tensor, False)
        elif hosts:
            shapes = [tuple(t.shape) for t in hosts]
            raise DeviceMismatch(
                f"{name}: Expected all tensors to be on the same device, found cuda:0 and cpu (shapes {shapes}) at "
                f"{line()}"
            )
        for generator in (a for a in flat if isinstance(a, CpuGenerator)):
            if generator._cdata not in ON_CUDA:
                raise DeviceMismatch(f"{name}: Expected a 'cuda' device type for generator but found 'cpu' at {line()}")

    # -- copies between host and device -------------------------------------------------------------------------------

    def _pinned_memory(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("pin_memory"):
            made = func(*args, **{**kwargs, "pin_memory": False})
        elif func is aten._pin_memory.default:
            made = args[0].clone()
        elif func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        else:
            return None
        self._pinned[made.untyped_storage().data_ptr()] = made
        return made

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _to_copy(self, func: Any, args: Any, kwargs: dict[str, Any], to_cuda: bool) -> Any:
        source, wanted = args[0], kwargs.get("device")
        to_host = wanted is not None and torch.device(wanted).type == "cpu"
        self.record.launch("_to_copy")
        if isinstance(source, CudaTensor) and to_host:
            self._leaves(source, None, bool(kwargs.get("non_blocking")))
        elif not isinstance(source, CudaTensor) and to_cuda:
            self._arrives(source, bool(kwargs.get("non_blocking")))
        if wanted is not None:
            kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
        out = self._plain(func, args, kwargs)
        if out is getattr(source, "inner", source):
            out = out.clone()
        return out if to_host else CudaTensor(out)

    def _copied(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        if isinstance(source, CudaTensor):
            self._leaves(source, target, non_blocking)
        else:
            self._arrives(source, non_blocking)

    def _leaves(self, source: torch.Tensor, target: torch.Tensor | None, non_blocking: bool) -> None:
        size = source.numel() * source.element_size()
        if non_blocking and target is not None and self._is_pinned(target):
            self.record.transfer(f"to pinned memory, {size} B")
        else:
            self.record.wait("copy to the host", copies=True)

    def _arrives(self, source: torch.Tensor, non_blocking: bool) -> None:
        size, pinned = source.numel() * source.element_size(), self._is_pinned(source)
        if not non_blocking or (size > LARGE and not pinned):
            self.record.wait("blocking copy to the device", copies=True)
        self.record.transfer(f"to the device from {'pinned' if pinned else 'pageable'} memory, {size} B")


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128)


def _check_types(func: Any, args: Any, kwargs: Any) -> None:
    """Raise if a copy from the device, or to it, makes float64 there."""
    if func is aten._to_copy.default:
        wanted, into = kwargs.get("device"), kwargs.get("dtype") or args[0].dtype
        to_cuda = wanted is not None and torch.device(wanted).type in ("cuda", NAME)
        wide = into == torch.float64 and (isinstance(args[0], CudaTensor) or to_cuda)
    elif func is aten.copy_.default:
        wide = isinstance(args[0], CudaTensor) != isinstance(args[1], CudaTensor) and _is_wide(args[0])
    else:
        return
    if wide:
        raise NoFloat64(f"{kernels.base_name(func)}: the device has no float64, at {line()}")


@contextlib.contextmanager
def _default_generator(func: Any, args: Any, kwargs: Any) -> Any:
    """Let an operation without a generator draw from the device's default one instead of the CPU's."""
    if torch.Tag.nondeterministic_seeded not in func.tags or any(
        isinstance(a, CpuGenerator) for a in pytree.tree_leaves((args, kwargs))
    ):
        yield
        return
    ours, cpu = torch.cuda.default_generators[0], torch.default_generator
    before = cpu.get_state()
    cpu.set_state(ours.get_state())
    try:
        yield
    finally:
        ours.set_state(cpu.get_state())
        cpu.set_state(before)


@contextlib.contextmanager
def _torch_settings() -> Any:
    """Let modules move to the device, and torch.tensor(…, device="cuda") come by way of `to`."""
    swap = torch.__future__.get_swap_module_params_on_conversion()
    cudnn, lifts = torch.backends.cudnn.enabled, torch._C._only_lift_cpu_tensors()
    torch.__future__.set_swap_module_params_on_conversion(True)  # `param.data = …` cannot make another class of it
    torch._C._set_only_lift_cpu_tensors(True)
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
        torch._C._set_only_lift_cpu_tensors(lifts)
        torch.backends.cudnn.enabled = cudnn


def _batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute in float32: CUDA's kernels take half-precision inputs with float32 statistics, the CPU's do not."""
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    half = next((t.dtype for t in leaves if t.dtype in (torch.bfloat16, torch.float16)), None)
    if half is None:
        return func(*args, **kwargs)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype == half else t, (args, kwargs))
    first, *rest = func(*args, **kwargs)
    return (first.to(half), *rest)
