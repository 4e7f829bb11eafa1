"""Device values that are read some steps after they were computed."""

from typing import Any

import torch
from torch import Tensor


class DeferredCheck:
    """Reads numbers from the device some steps after they were computed, when reading no longer blocks.

    Two buffers of `interval` steps alternate: while one is filled, the other, complete for `interval` steps, is read.
    From a CUDA device numbers go to pinned memory, so that nothing waits. Buffers of another accelerator are in its own
    memory, and reading one waits for the device, once in `interval` steps.

    Args:
        num_chains: numbers per step.
        device: where they are computed.
        interval: steps in a buffer.
    """

    def __init__(self, num_chains: int, device: torch.device, interval: int = 16) -> None:
        pinned = device.type == "cuda"
        home = None if pinned else device
        self._buffers = torch.zeros(2, interval, num_chains, device=home, pin_memory=pinned)
        self._steps = [[0] * interval, [0] * interval]
        self._events: list[Any] = [torch.cuda.Event() if pinned else None for _ in range(2)]
        self._filled = [False, False]
        self._interval = interval
        self._count = 0

    def record(self, values: Tensor, step: int) -> tuple[int, int, float] | None:
        """Store a step's numbers, () or (C,); return step, chain and value of an earlier non-finite one, or None."""
        half, place = divmod(self._count % (2 * self._interval), self._interval)
        bad = self._read(half) if place == 0 else None
        self._buffers[half, place].copy_(values.reshape(-1), non_blocking=True)
        self._steps[half][place] = step
        if place == self._interval - 1:
            self._filled[half] = True
            if self._events[half] is not None:
                self._events[half].record()
        self._count += 1
        return bad

    def drain(self) -> tuple[int, int, float] | None:
        """Return the first non-finite number among those not read yet, or None; synchronizes the device."""
        if self._events[0] is not None:
            torch.cuda.synchronize()
        newest = (self._count // self._interval) % 2
        self._filled = [True, True]
        first = self._read(1 - newest)
        return first if first is not None else self._read(newest)

    def _read(self, half: int) -> tuple[int, int, float] | None:
        if not self._filled[half]:
            return None
        self._filled[half] = False
        if self._events[half] is not None:
            self._events[half].synchronize()
        found = self._buffers[half].cpu()
        bad = (~found.isfinite()).nonzero()
        if len(bad) == 0:
            return None
        place, chain = bad[0].tolist()
        return self._steps[half][place], chain, found[place, chain].item()
