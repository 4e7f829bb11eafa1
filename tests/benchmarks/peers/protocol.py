"""How the driver talks to a worker: a line of JSON for a request on stdin, a line of JSON for its answer on stdout.

Workers stay alive, so that starting Python and importing a library is never timed.
"""

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from regression import Regression, make_regression, score

Chain = Callable[[Regression, int], NDArray[Any]]
"""Runs so many steps on a regression and returns the parameters after each (or each few), shape (T, d)."""


@dataclass
class Timing:
    """A row of the table of times.

    Attributes:
        run: takes so many steps and returns the seconds of one.
        steps: how many steps, where the driver's choice does not do.
    """

    run: Callable[[int], float]
    steps: int | None = None


@dataclass
class Worker:
    """What one process measures.

    Attributes:
        packages: distributions whose versions the results name.
        timings: rows of the table of times.
        chains: rows of the table of errors.
        reference: the bare SGD loop in this process; None takes the reference worker's.
        notes: what a reader of a row should know, by its name.
    """

    packages: Sequence[str]
    timings: dict[str, Timing]
    chains: dict[str, Chain]
    reference: Callable[[int], float] | None = None
    notes: dict[str, str] | None = None

    def serve(self) -> None:
        """Answer requests until stdin ends. Whatever a library prints goes to stderr."""
        answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for line in sys.stdin:
            try:
                answer = self._answer(json.loads(line))
            except Exception as error:  # the driver shows it in the row's place
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "describe":
            return {
                "versions": {name: importlib.metadata.version(name) for name in self.packages},
                "timings": list(self.timings),
                "chains": list(self.chains),
                "notes": self.notes or {},
            }
        if request["do"] == "time":
            return self._time(self.timings[request["row"]], request["steps"])
        if request["do"] == "chain":
            return _measure(self.chains[request["row"]], request["num_data"], request["burn_in"], request["steps"])
        raise ValueError(f"no such request: {request}")

    def _time(self, row: Timing, steps: int) -> dict[str, Any]:
        """Time a row between two runs of the reference, so that a drift of the machine's speed hits both."""
        before = self.reference(steps) if self.reference else None
        wall, cpu = time.perf_counter(), time.process_time()
        seconds = row.run(row.steps or steps)
        threads = (time.process_time() - cpu) / (time.perf_counter() - wall)
        after = self.reference(steps) if self.reference else None
        reference = (before + after) / 2 if before is not None and after is not None else None
        return {"seconds": seconds, "reference": reference, "threads": threads}


def _measure(chain: Chain, num_data: int, burn_in: int, steps: int) -> dict[str, Any]:
    problem = make_regression(num_data)
    start = time.perf_counter()
    draws = chain(problem, burn_in + steps)
    seconds = time.perf_counter() - start
    if not np.isfinite(draws).all():
        return {"error": "the chain diverged"}
    kept = draws[round(len(draws) * burn_in / (burn_in + steps)) :]
    return {**score(problem, kept), "seconds": seconds}
