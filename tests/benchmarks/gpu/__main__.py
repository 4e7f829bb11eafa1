"""The library on one GPU: `python -m tests.benchmarks.gpu [--out DIR] [STAGE …]`, in at most nine minutes.

Nothing needs to be installed beside torch and Lightning. Every stage runs in a process of its own, and what it has
found is kept if it dies. Those that measure times start and compile side by side and then measure one after another:

* `environment`: device and versions;
* `waits`: the lines where the host waits for the device;
* `headline`: a step of `Trainer.fit` with every callback (1, 4, 16 chains; 4 with a contour that they learn together;
  4 in other forms) against plain Lightning with SGD, as it is and compiled: time, launches, waits, memory, largest
  kernels, compilation;
* `samples`: what a drawing of samples costs, and predictions;
* `blocks`: steps of small networks in blocks, captured and compiled, against those of Lightning's loop;
* `correctness`, last and side by side: chains on the device against the loop on a CPU, twice the same, over a resume.

`gpu.md` and `gpu.json` are written to the folder `--out`: by default `$OUT`, or else `docs/measured`. `--traces` adds a
trace of ten steps for each headline. `--tiny` runs every stage with small networks on a CPU: a look at this program.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from tests.benchmarks.gpu.checkout import ROOT, use_checkout
from tests.benchmarks.gpu.table import decisions, page
from tests.benchmarks.gpu.worker import Apart, Finding, chosen

LEAST_SECONDS = 15.0
"""Stages are not begun with less time left."""
PREPARING = 0.7
"""The share of the time after which a stage is ended that has not compiled yet."""
MEASURING = 30.0
"""Seconds that a stage may measure."""


def write(folder: Path, findings: list[Finding]) -> None:
    """Write table and JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    decided = [{"what": d.what, "value": d.value, "limit": d.limit, "verdict": d.verdict} for d in decisions(findings)]
    (folder / "gpu.json").write_text(json.dumps({"decisions": decided, "findings": findings}, indent=1) + "\n")
    (folder / "gpu.md").write_text(page(findings))


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; return 1 if one of them has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help="'headline' or 'headline 4'; all by default")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "docs" / "measured"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--traces", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    try:
        stages = chosen(given.stages)
    except ValueError as error:
        parser.error(str(error))
    began = perf_counter()
    end = began + 60 * given.minutes
    if given.tiny:
        use_checkout()
        for stage in stages:  # once, for all processes
            importlib.import_module(f"tests.benchmarks.gpu.{stage.name}")
    findings: list[Finding] = []
    given.out.mkdir(parents=True, exist_ok=True)
    traces = given.out if given.traces else None

    def keep(new: list[Finding]) -> None:
        findings.extend(new)
        write(given.out, findings)  # now, so that the end of this process loses nothing
        for finding in new:
            print(json.dumps(finding)[:2000], flush=True)

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each stage, since many compile at once
    with TemporaryDirectory() as parts:
        for some, share in (([s for s in stages if not s.last], PREPARING), ([s for s in stages if s.last], 1.0)):
            if end - perf_counter() < LEAST_SECONDS:
                keep([{"stage": s.name, "case": s.case, "error": "no time was left"} for s in some])
                continue
            started = [Apart(stage, given.tiny, traces, Path(parts)) for stage in some]
            for apart in started:
                apart.prepare(began + share * (end - began) - perf_counter())
            ready = [apart for apart in started if apart.prepare(0.0)]
            for apart in [one for one in started if one not in ready]:
                keep(apart.finish(0.0))  # before another measures, since it compiles
            for apart in ready:
                keep(apart.finish(min(end - perf_counter(), MEASURING)))
    write(given.out, findings)
    print(page(findings))
    return int(any("error" in finding for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
