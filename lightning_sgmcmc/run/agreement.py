"""Ranks agree to stop after the same batch, at little cost a batch."""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_sgmcmc.chains.groups import new_group

LONGEST = 50
"""Most batches from one agreement to the next."""

SECONDS = 0.5
"""Batches of more than this time are agreed upon one by one."""

TIMED = 10
"""The first batches are agreed upon one by one, too; their times say how long a batch takes."""


class StopAgreement:
    """Lets the ranks of a run find out that one of them is to stop.

    Before every n-th batch the ranks begin to compute the largest of their requests, over host tensors by gloo, and
    read it n batches later, so that no rank waits for its device, and for others only where they are n batches late.
    All ranks read it before the same batch. The same exchange finds the slowest rank's time of a batch, from which n
    follows: n batches take half a second, and n is at most 50. For n = 1 the result is read at once.

    Creating it is a collective operation, and so is each call: all ranks make both.

    Args:
        timeout: the strategy's, after which a rank that does not come hangs; None is torch's.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._group: Any = new_group(None, timeout, backend="gloo")
        self._pending: Any = None
        self._value = torch.zeros(2, dtype=torch.float64)
        """The request, and the seconds of a batch."""
        self._every = 1
        self._batch = 0
        self._next = 0
        self._read = (0, time.monotonic())
        """The batch before which the last exchange began, and when."""

    def on_stop(self, requested: int) -> int:
        """Return the largest request of all ranks, to be met before the coming batch; 0 for none.

        Args:
            requested: what this rank has been asked for, 0 for nothing.

        Raises:
            RuntimeError: if a rank has not come within the timeout.
        """
        batch, self._batch = self._batch, self._batch + 1
        if self._group is None or batch < self._next:
            return 0
        try:
            return self._exchange(batch, requested)
        except RuntimeError as error:
            self._group = self._pending = None
            if "timed out" in str(error).lower():
                raise RuntimeError(
                    f"a rank has not come to batch {batch} of this fit within the strategy's timeout ({error}): it "
                    "hangs, or needs a longer one, as in DDPStrategy(timeout=timedelta(hours=1))"
                ) from error
            return 0  # a rank has ended; what the others do without it shows soon

    def _exchange(self, batch: int, requested: int) -> int:
        if self._pending is not None and (found := self._wait()):
            return found
        began, since = self._read
        now = time.monotonic()
        self._read = (batch, now)
        self._value = torch.tensor([float(requested), (now - since) / max(batch - began, 1)], dtype=torch.float64)
        self._pending = dist.all_reduce(self._value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._next = batch + self._every
        return self._wait() if self._every == 1 else 0

    def _wait(self) -> int:
        """Read what the ranks have exchanged; return the largest request."""
        self._pending.wait()
        self._pending = None
        requested, seconds = self._value.tolist()
        if self._batch > TIMED:
            self._every = max(1, min(LONGEST, int(SECONDS / max(seconds, 1e-9))))
        return int(requested)

    def end(self, well: bool) -> None:
        """Stop exchanging.

        Args:
            well: whether all ranks have reached this point.
        """
        if well and self._group is not None:
            if self._pending is not None:
                self._pending.wait()
            dist.destroy_process_group(self._group)
        self._group = self._pending = None
