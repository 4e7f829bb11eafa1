"""The library on one GPU: `python -m tests.benchmarks.gpu [--out DIR] [STAGE …]`, in at most nine minutes.

Nothing needs to be installed beside torch and Lightning. Every stage runs in a process of its own with a time limit,
and what it has found is kept if it dies:

* `environment`: device and versions;
* `correctness`: chains on the device against the loop on a CPU, twice the same, and over a resume; these cases and
  `waits`, the lines where the host waits for the device, run side by side, the others alone;
* `headline`: a step of `Trainer.fit` with every callback (1, 4, 16 chains; 4 with a contour that they learn together)
  against plain Lightning with SGD: time, launches, waits, memory, largest kernels;
* `samples`: what a drawing of samples costs, and predictions;
* `forms`: vmap, an unrolled loop, channels_last and cudnn's benchmark, for the network alone.

`gpu.md` and `gpu.json` are written to the folder `--out`: by default `$OUT`, or else `docs/measured`. `--traces` adds a
trace of ten steps for each headline. `--tiny` runs every stage with small networks on a CPU: a look at this program.
"""

import argparse
import importlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.gpu.checkout import ROOT, use_checkout
from tests.benchmarks.gpu.table import decisions, page
from tests.benchmarks.gpu.worker import Finding, Stage, chosen, run_apart

LEAST_SECONDS = 15.0
"""A stage with less time left is not begun."""


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
    end = time.perf_counter() + 60 * given.minutes
    if given.tiny:
        use_checkout()
        for stage in stages:  # once, for all processes
            importlib.import_module(f"tests.benchmarks.gpu.{stage.name}")
    findings: list[Finding] = []
    given.out.mkdir(parents=True, exist_ok=True)
    traces = given.out if given.traces else None
    side_by_side = 1 if given.tiny else max(1, (os.cpu_count() or 1) - 1)
    with TemporaryDirectory() as parts, ThreadPoolExecutor(side_by_side) as together, ThreadPoolExecutor(1) as alone:

        def measured(stage: Stage) -> list[Finding]:
            left = end - time.perf_counter()
            if left < LEAST_SECONDS:
                return [{"stage": stage.name, "case": stage.case, "error": "no time was left"}]
            return run_apart(stage, given.tiny, traces, Path(parts), min(stage.seconds, left))

        for pool, some in ((together, [s for s in stages if not s.alone]), (alone, [s for s in stages if s.alone])):
            for new in pool.map(measured, some):
                findings += new
                write(given.out, findings)  # now, so that the end of this process loses nothing
                for finding in new:
                    print(json.dumps(finding)[:2000], flush=True)
    write(given.out, findings)
    print(page(findings))
    return int(any("error" in finding for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
