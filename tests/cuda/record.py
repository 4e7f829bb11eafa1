"""What a fit on the stand-in device did: launches, graphs, waits and transfers, by the line of ours that asked."""

import sys
import threading
from collections import Counter
from types import FrameType

import torch

OURS = ("lightning_sgmcmc", "callbacks", "datamodules", "recipes", "tests")
THEIRS = ("pytorch_lightning", "lightning_fabric", "torchmetrics", "torch")
OWN_FOLDER = "tests/cuda/"
RECENT = 2
"""An event of so many steps ago or fewer may still be ahead of the device."""


class Record:
    """Counts of the operations since the last `clear`.

    Attributes:
        launches: kernels, fills and copies beside the compiled graphs; an estimate (see `kernels.py`).
        graphs: replays of compiled graphs.
        waits: operations after which the host has waited for the device.
        blocking: those of `waits` that are copies.
        aside: waits of threads beside the training thread.
        transfers: copies between host and device, with their size and memory.
        operations: launches by operation.
        step: number of calls of `clear`.
    """

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.graphs: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.blocking: Counter[str] = Counter()
        self.aside: Counter[str] = Counter()
        self.transfers: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.step = 0
        self.paused = 0
        """Above 0 while the stand-in computes an operation's numbers."""
        self.in_graph = 0
        """Above 0 while a compiled function runs."""

    def counters(self) -> dict[str, "Counter[str]"]:
        """Return all counters by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Counter)}

    def clear(self) -> dict[str, "Counter[str]"]:
        """Return copies of the counters and set them to zero: the next step begins."""
        before = {name: counter.copy() for name, counter in self.counters().items()}
        for counter in self.counters().values():
            counter.clear()
        self.step += 1
        return before

    def launch(self, name: str, count: int = 1) -> None:
        """Count launches outside of compiled graphs."""
        if count and not self.paused and not self.in_graph:
            self.launches[line()] += count
            self.operations[name] += count

    def graph(self, name: str) -> None:
        """Count a replay of a compiled graph."""
        if not self.in_graph:
            self.graphs[f"{line()} [{name}]"] += 1

    def wait(self, what: str, copies: bool = False) -> None:
        """Count a wait of the host for the device."""
        if self.paused:
            return
        if in_another_thread():
            self.aside[f"{line()} [{what}]"] += 1
            return
        self.waits[f"{line()} [{what}]"] += 1
        if copies:
            self.blocking[f"{line()} [{what}]"] += 1

    def transfer(self, what: str) -> None:
        """Count a copy between host and device."""
        if not self.paused:
            self.transfers[f"{line()} [{what}]"] += 1


def in_another_thread() -> bool:
    """Return whether this is a thread that Python started; autograd's own threads belong to the training thread."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)


def line() -> str:
    """Return the innermost line of ours in the stack, else Lightning's or torch's; the node in a backward pass."""
    frame: FrameType | None = sys._getframe(1)
    first: dict[str, str] = {}
    while frame is not None:
        path = frame.f_code.co_filename
        if OWN_FOLDER in path and not path.endswith(("case.py", "cases.py")):
            frame = frame.f_back
            continue
        pieces = path.split("/")
        if "site-packages" not in path and any(piece in OURS for piece in pieces):
            return _named(frame, pieces)
        for name in THEIRS:
            if name in pieces:
                first.setdefault(name, _named(frame, pieces))
        frame = frame.f_back
    node = torch._C._current_autograd_node()
    if node is not None:
        return f"backward of {node.name()}"
    return next((first[name] for name in THEIRS if name in first), "?")


def _named(frame: FrameType, pieces: list[str]) -> str:
    return f"{'/'.join(pieces[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
