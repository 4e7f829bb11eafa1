"""Copies of a device's tensors in host memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """Copies of tensors in host memory, which a CUDA device makes while the host continues.

    They go to pinned memory, and one event says that all of them are complete. Tensors on other devices are copied at
    once. The originals may be changed afterwards.

    Args:
        tensors: tensors on the host, and on one other device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: Any = None
        self._copies = [_copy(tensor.detach()) for tensor in tensors]
        device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        if device is not None:
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> list[Tensor]:
        """Return the copies, once they are complete."""
        event = self._event
        if event is not None:
            event.synchronize()
            self._event = None
        return self._copies


def _copy(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True)
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
