"""Stage `headline`: a step of `Trainer.fit` with every callback, against plain Lightning with SGD."""

import math
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytorch_lightning as pl
import torch
import torch._inductor.config
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.gpu.setting import PlainSGD, RandomImages, Say, Setting, Windows, every_callback, fit, module

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")
GRAPHS = ("cudaGraphLaunch",)
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LARGEST = 12
WAYS: dict[str, tuple[str, Any]] = {
    "unrolled": ("chain_execution", "unrolled"),
    "uncompiled": ("compile", False),
}
"""Options of the module; "interacting" is a contour that the chains learn together, "layout" lets the compiler choose
the convolutions' layout."""


class Profiled(pl.Callback):
    """Profiles a few steps.

    Args:
        setting: the measurement's.
        first: the step after which they begin.
        count: how many they are.
    """

    def __init__(self, setting: Setting, first: int, count: int) -> None:
        self.size, self.first, self.count = setting, first, count
        self._profile: Any = None
        self._begun = 0.0
        self.wall = math.nan

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.first:
            device = [] if self.size.tiny else [ProfilerActivity.CUDA]
            self._profile = profile(activities=[ProfilerActivity.CPU, *device])
            self._profile.__enter__()
            self._begun = time.perf_counter()
        elif trainer.global_step == self.first + self.count:
            self.size.wait()
            self.wall = (time.perf_counter() - self._begun) / self.count * 1e3
            self._profile.__exit__(None, None, None)

    def findings(self) -> dict[str, Any]:
        """Return the calls a step, the milliseconds a step in which the device computes, and the largest kernels."""
        events = self._profile.events()
        kernels = [event for event in events if "CUDA" in str(event.device_type) and not _is_range(event)]
        by_name: dict[str, float] = {}
        for kernel in kernels:
            by_name[kernel.name[:80]] = (
                by_name.get(kernel.name[:80], 0.0) + kernel.time_range.elapsed_us() / self.count / 1e3
            )
        largest = sorted(by_name.items(), key=lambda pair: -pair[1])[:LARGEST]
        counted = {
            name: sum(event.name in names for event in events) / self.count
            for name, names in {"launches": LAUNCHES, "copies": COPIES, "graphs": GRAPHS, "waits": WAITS}.items()
        }
        busy = sum(by_name.values()) if kernels else math.nan
        return (
            counted
            | {"kernels": len(kernels) / self.count, "busy_ms": busy, "profiled_ms": self.wall}
            | {"largest_kernels_ms": dict(largest)}
        )

    def write_trace(self, path: Path) -> None:
        """Write what a browser shows at chrome://tracing."""
        self._profile.export_chrome_trace(str(path))


def _is_range(event: Any) -> bool:
    """Return whether an event is a named range of kernels, such as an optimizer's step, and none of its own."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(("##", "Optimizer.", "Torch-"))


def run(setting: Setting, case: str, say: Say, traces: Path | None = None) -> None:
    """Record the milliseconds a step and what a step consists of.

    Args:
        setting: the measurement's.
        case: "plain", or a number of chains and words of `WAYS`, with commas between.
        say: records.
        traces: folder for a trace; None writes none.
    """
    # They end before an epoch does, which validates.
    windows = Windows(setting, *((1, 1, 2) if setting.tiny else (40, 40, 8)))
    profiled = Profiled(setting, windows.last + 1, 1 if setting.tiny else 10)
    data = RandomImages(setting)
    chains, *words = case.split(", ")
    plain = chains.startswith("plain")
    options, without = dict(WAYS[word] for word in words if word in WAYS), {"limit_val_batches": 0} if plain else {}
    measured = PlainSGD(setting, "compiled" in words) if plain else module(setting, int(chains), **options)
    torch._inductor.config.force_layout_optimization = "layout" in words
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        own = [] if plain else every_callback(folder, interacting="interacting" in words)
        fit(setting, measured, data, profiled.first + profiled.count + 1, [*own, windows, profiled], **without)
    half = len(windows.wall) // 2  # the later half is at temperature 1, where the contour acts
    say(
        case,
        wall_ms=statistics.median(windows.wall[half:]),
        stream_ms=statistics.median(windows.stream[half:]),
        **profiled.findings(),
        peak_gib=math.nan if setting.tiny else torch.cuda.max_memory_allocated() / 2**30,
        wall_ms_of_windows=windows.wall,
        stream_ms_of_windows=windows.stream,
        running=windows.running,
        **windows.first_step,
        compilation_s=windows.compilation,
        seconds=time.perf_counter() - began,
    )
    if traces is not None:
        profiled.write_trace(traces / f"trace-{'-'.join([chains, *words]).replace(' ', '-')}.json.gz")
