"""One JSON line of what steps of a fit would do on a CUDA device: launches, graphs, waits and blocking copies.

    python -m tests.cuda.step_report --chains 4 --contour --clip 1.0

The fit is ResNet-20's on tiny images, on the stand-in device (`tests/cuda/stand_in.py`), by default with four chains,
compiled, in bf16-mixed, with the data on the device, augmentation and all usual callbacks. The steps are an ordinary
one, one that is logged, and one that draws samples.
"""

import argparse
import contextlib
import json
import logging
import sys
import tempfile
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_sgmcmc import compiling
from tests.cuda.case import LOG_EVERY, ORDINARY, Case, fit, summary
from tests.cuda.stand_in import StandIn


def report(case: Case, lines: int = 20, float64: bool = True) -> dict[str, Any]:
    """Return what the three kinds of steps did, by kind.

    Args:
        case: the fit's settings.
        lines: how many lines of source are named for each counter.
        float64: whether the device has that type.
    """
    with StandIn(float64) as device, tempfile.TemporaryDirectory() as folder:
        done = fit(device, case, Path(folder))
    kinds = {"ordinary": ORDINARY, "logged": LOG_EVERY, "drawn": done.drawn or done.trainer.global_step}
    return {kind: summary(done.steps[index - 1], lines) for kind, index in kinds.items()}


def parser() -> argparse.ArgumentParser:
    """Return the options of the command line: one for each field of `Case`."""
    made = argparse.ArgumentParser(prog="python -m tests.cuda.step_report", description=__doc__.splitlines()[0])
    for field in fields(Case):
        name = "--" + field.name.replace("_", "-")
        if field.name in ("extra", "options"):  # mappings, which a command line does not have
            continue
        if isinstance(field.default, bool) or field.name == "compile":
            made.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        elif field.name == "ewsg":
            made.add_argument(name, type=int, nargs="?", const=1, default=0, metavar="PROPOSALS")
        elif field.name == "clip":
            made.add_argument(name, type=float, nargs="?", const=1.0, default=None, metavar="NORM")
        else:
            made.add_argument(name, type=type(field.default), default=field.default)
    made.add_argument("--lines", type=int, default=20, help="lines of source named for each counter")
    return made


def main() -> None:
    """Print the line."""
    warnings.simplefilter("ignore")
    compiling.WORTH_ON_CUDA = 0  # short fits are compiled too
    for name in ("pytorch_lightning", "lightning_sgmcmc"):
        logging.getLogger(name).setLevel(logging.ERROR)
    options = vars(parser().parse_args())
    lines = options.pop("lines")
    with contextlib.redirect_stdout(sys.stderr):  # the run's tables
        found = report(Case(**options), lines)
    print(json.dumps({"case": options} | found))


if __name__ == "__main__":
    main()
