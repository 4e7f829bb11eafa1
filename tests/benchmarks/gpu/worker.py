"""One stage in a process of its own."""

import faulthandler
import importlib
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from time import perf_counter
from typing import Any

from tests.benchmarks.gpu.checkout import use_checkout

Finding = dict[str, Any]
"""`stage`, `case` and what was found: numbers by name, or `error`."""


@dataclass(frozen=True)
class Stage:
    """A part of the measurement.

    Attributes:
        name: its module in this package, which has `run(setting, case, say)`.
        case: what it measures.
        last: whether it runs after the others, beside its like, since it measures no times.
    """

    name: str
    case: str = ""
    last: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.case}".strip()


CORRECTNESS = (
    "loop",
    "vmap",
    "vmap, mixed precision",
    "defaults",
    "starts of their own",
    "twice",
    "twice, deterministic",
    "resume",
    "resume, deterministic",
    "resume, an lr for each chain",
    "one chain, channels last",
    "fused steps of four widths",
    "texts of ten lengths",
    "a backward pass that does not compile",
    "loop, compiled",
)
"""The cases of `correctness`."""
HEADLINES = (
    "plain",
    "4",
    "4, interacting",
    "16",
    "1",
    "4, uncompiled",
    "plain again",
    "4, layout",
    "16, layout",
    "plain, compiled",
)
"""The cases of `headline`, in the order in which they are measured."""
BLOCKS = (
    "8-50-1, 1",
    "8-50-1, 16",
    "784-100-10, 4",
    "CNN 8x8, 4",
    "EWSG, 2",
    "ControlVariates, 2",
    "ContourGradient, 2",
)
"""The cases of `blocks`: a network or a callback, and a number of chains."""
STAGES = (
    Stage("environment"),
    Stage("waits", "4"),
    *(Stage("headline", case) for case in HEADLINES),
    Stage("samples", "4"),
    *(Stage("blocks", case) for case in BLOCKS),
    *(Stage("correctness", case, last=True) for case in CORRECTNESS),
)


class Apart:
    """A stage in a new process, which prepares itself and measures when it is told to.

    Args:
        stage: the stage.
        tiny: whether to run it with small networks on a CPU.
        traces: folder for traces; None writes none.
        parts: folder for what the process records and prints.
    """

    def __init__(self, stage: Stage, tiny: bool, traces: Path | None, parts: Path) -> None:
        self.stage = stage
        self._found, self._said = parts / f"{stage}.jsonl", parts / f"{stage}.log"
        # A CPU's processes inherit what is imported; a process that has used CUDA cannot be forked.
        context = get_context("fork" if tiny else "spawn")
        self._is_ready, self._turn = context.Event(), context.Event()
        rest = (stage, tiny, traces, self._found, self._said, self._is_ready, self._turn)
        self._process = context.Process(target=_run, args=rest)
        self._began = perf_counter()
        self._process.start()

    def prepare(self, seconds: float) -> bool:
        """Wait until it can measure, so many seconds at most; return whether it can or has ended."""
        end = perf_counter() + seconds
        while not self._is_ready.is_set() and self._process.is_alive() and perf_counter() < end:
            self._is_ready.wait(0.2)
        return self._is_ready.is_set() or not self._process.is_alive()

    def finish(self, seconds: float) -> list[Finding]:
        """Let it measure, end it after so many seconds, and return its findings, those of one that dies included."""
        self._turn.set()
        self._process.join(max(seconds, 0.0))
        error = None
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid or 0, signal.SIGABRT)  # it says where it is
                self._process.join(1.0)
                os.killpg(self._process.pid or 0, signal.SIGKILL)  # with the compiler's processes
            self._process.kill()
            self._process.join()
            error = f"not done after {perf_counter() - self._began:.0f} s"
        elif self._process.exitcode:
            error = f"ended with exit code {self._process.exitcode}"
        lines = self._found.read_text().splitlines() if self._found.exists() else []
        findings: list[Finding] = [json.loads(line) for line in lines if line.endswith("}")]
        if error is not None:
            last = self._said.read_text(errors="replace")[-6000:] if self._said.exists() else ""
            findings.append({"stage": self.stage.name, "case": self.stage.case, "error": error, "said": last})
        findings.append({"stage": "seconds", "case": str(self.stage), "seconds": perf_counter() - self._began})
        return findings


def _run(stage: Stage, tiny: bool, traces: Path | None, found: Path, said: Path, is_ready: Event, turn: Event) -> None:
    os.setpgid(0, 0)

    def wait_for_turn() -> None:
        is_ready.set()
        turn.wait()

    with said.open("w", buffering=1) as output:
        faulthandler.enable(output)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        try:
            use_checkout()
            load(tiny, stage, traces, found, wait_for_turn)
        except BaseException:
            traceback.print_exc(file=output)
            output.flush()
            os._exit(1)
    os._exit(0)  # threads of a compiler may be alive


def load(tiny: bool, stage: Stage, traces: Path | None, found: Path, turn: Callable[[], None]) -> None:
    """Run a stage in this process, and append what it records to a file line by line."""
    import torch

    from lightning_sgmcmc import compiling
    from tests.benchmarks.gpu.setting import Setting, be_quiet

    be_quiet()
    compiling.WORTH_ON_CUDA = 0  # short fits are compiled too
    if tiny or stage.last:
        torch.set_num_threads(1)  # small networks beside others, and processes that inherit threads hang
    run = importlib.import_module(f"tests.benchmarks.gpu.{stage.name}").run
    setting = Setting(tiny, turn)
    options = {"traces": traces} if stage.name == "headline" else {}
    run(setting, stage.case, partial(record, found, stage.name), **options)


def record(found: Path, name: str, case: str, **values: Any) -> None:
    """Append a finding to a file."""
    with found.open("a") as file:
        file.write(json.dumps({"stage": name, "case": case} | _plain(values)) + "\n")


def _plain(value: Any) -> Any:
    """Return a value with None in place of NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def chosen(names: Sequence[str]) -> list[Stage]:
    """Return the stages that are named, as `headline` or `headline 4`; all of them if none is.

    Raises:
        ValueError: for a name that no stage has.
    """
    if not names:
        return list(STAGES)
    picked = [stage for stage in STAGES if stage.name in names or str(stage) in names]
    unknown = [n for n in names if not any(n in (stage.name, str(stage)) for stage in STAGES)]
    if unknown:
        raise ValueError(f"no stage is named {unknown[0]!r}: choose among {', '.join(map(str, STAGES))}")
    return picked
