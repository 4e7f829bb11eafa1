"""Tensors and generators of the stand-in: to all code they are on cuda:0, their numbers are computed on the CPU."""

from typing import Any

import torch

from tests.cuda.backend import NAME
from tests.cuda.record import Record

CUDA = torch.device("cuda", 0)


class Current:
    """The stand-in in use; `stand_in.py` sets it."""

    device: Any = None


def record() -> Record:
    """Return the record of the stand-in in use."""
    found: Record = Current.device.record
    return found


class CudaTensor(torch.Tensor):
    """A tensor that is on cuda:0 for all code and has its numbers in `inner`, on the CPU.

    Views alias: their `inner` is a view of the base's `inner`, so a write to either is seen in both.
    """

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "CudaTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Current.device.run(func, args, kwargs or {})

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The same numbers outside of the graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, CudaTensor) or value.shape != self.shape:
            raise TypeError("the stand-in sets .data only to a tensor on cuda:0 of the same shape")
        torch.Tensor.data.__set__(self, value)  # the strides that C++ knows
        self.inner = value.inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def get_device(self) -> int:
        return 0

    def to(self, *args: Any, **kwargs: Any) -> Any:
        options = {key: value for key, value in kwargs.items() if key != "copy"}
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **options)
        here = device is None or device.type == "cuda"
        if here and dtype in (None, self.dtype) and memory_format is None and not kwargs.get("copy"):
            return self
        return super().to(*args, **kwargs)

    def tolist(self) -> Any:
        record().wait("copy to the host", copies=True)
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.inner!r})"

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        twin: torch.Tensor = self.detach().clone()
        twin.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            twin = torch.nn.Parameter(twin, self.requires_grad)
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:  # a checkpoint is read with map_location="cpu"
        record().wait("copy to the host", copies=True)
        return self.inner.detach().clone().__reduce_ex__(protocol)


CpuGenerator = torch.Generator
ON_CUDA: dict[int, torch.Generator] = {}
"""C++ hands out other Python objects for the same generator, so they are known by address."""


class CudaGenerator(torch.Generator):
    """What `torch.Generator` makes under the stand-in: a generator for the CPU or for cuda:0."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type == "cpu":
            return CpuGenerator()
        made = super().__new__(cls)
        ON_CUDA[made._cdata] = made
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    device = property(lambda self: CUDA)  # type: ignore[assignment]
