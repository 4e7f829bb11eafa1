"""One stage in a process of its own."""

import faulthandler
import importlib
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
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
        seconds: after which it is ended.
        alone: whether it measures times, so that nothing may run beside it.
    """

    name: str
    case: str
    seconds: float
    alone: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.case}".strip()


BEFORE_THE_END = 3.0
"""Seconds before a stage is ended at which it says where it is."""
CORRECTNESS = (
    "loop",
    "vmap",
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
STAGES = (
    Stage("environment", "", 40, alone=False),
    Stage("waits", "4", 150, alone=False),
    *(Stage("correctness", case, 150, alone=False) for case in CORRECTNESS),
    Stage("headline", "plain", 50),
    Stage("headline", "4 interacting", 110),
    Stage("headline", "4", 100),
    Stage("headline", "16", 130),
    Stage("samples", "4", 70),
    Stage("headline", "1", 80),
    Stage("headline", "plain again", 50),
    Stage("forms", "", 180),
)
"""Those that run side by side, then the others in the order of their weight: the last ones are left out where time
runs short."""


def run_apart(stage: Stage, tiny: bool, traces: Path | None, parts: Path, seconds: float) -> list[Finding]:
    """Run a stage in a new process; return its findings, those of a stage that dies included.

    Args:
        stage: the stage.
        tiny: whether to run it with small networks on a CPU.
        traces: folder for traces; None writes none.
        parts: folder for what the process records and prints.
        seconds: after which it is ended.
    """
    found, said = parts / f"{stage}.jsonl", parts / f"{stage}.log"
    # A CPU's processes inherit what is imported; a process that has used CUDA cannot be forked.
    rest = (stage, tiny, traces, found, said, seconds)
    process = get_context("fork" if tiny else "spawn").Process(target=_run, args=rest)
    began = perf_counter()
    process.start()
    process.join(seconds)
    error = None
    if process.exitcode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # with the compiler's processes
        process.kill()
        process.join()
        error = f"not done after {seconds:.0f} s"
    elif process.exitcode:
        error = f"ended with exit code {process.exitcode}"
    lines = found.read_text().splitlines() if found.exists() else []
    findings: list[Finding] = [json.loads(line) for line in lines if line.endswith("}")]
    if error is not None:
        last = said.read_text(errors="replace")[-6000:] if said.exists() else ""
        findings.append({"stage": stage.name, "case": stage.case, "error": error, "said": last})
    findings.append({"stage": "seconds", "case": str(stage), "seconds": perf_counter() - began})
    return findings


def _run(stage: Stage, tiny: bool, traces: Path | None, found: Path, said: Path, seconds: float) -> None:
    os.setpgid(0, 0)
    with said.open("w", buffering=1) as output:
        faulthandler.dump_traceback_later(max(seconds - BEFORE_THE_END, 1.0), file=output)  # where a stage hangs
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        try:
            use_checkout()
            load(tiny, stage, traces, found)
        except BaseException:
            traceback.print_exc(file=output)
            output.flush()
            os._exit(1)
    os._exit(0)  # threads of a compiler may be alive


def load(tiny: bool, stage: Stage, traces: Path | None, found: Path) -> None:
    """Run a stage in this process, and append what it records to a file line by line."""
    import torch

    from lightning_sgmcmc import compiling
    from tests.benchmarks.gpu.setting import Setting, be_quiet

    be_quiet()
    compiling.WORTH_ON_CUDA = 0  # short fits are compiled too
    if tiny or not stage.alone:
        torch.set_num_threads(1)  # small networks beside others, and processes that inherit threads hang
    run = importlib.import_module(f"tests.benchmarks.gpu.{stage.name}").run
    setting = Setting(tiny)
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
