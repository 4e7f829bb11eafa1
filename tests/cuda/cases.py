"""Fits on the stand-in in one process: `python -m tests.cuda.cases NAME …` prints a JSON line for each.

A line has the case's name and either what its steps did, by kind, or the error that ended it.
"""

import contextlib
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from lightning_sgmcmc import HierarchicalPrior, compiling
from lightning_sgmcmc.singular import localized
from tests.cuda import checks, correct, inputs
from tests.cuda.case import OTHERS, Case
from tests.cuda.stand_in import StandIn
from tests.cuda.step_report import report

SMALL = {"blocks": 1}
SMALL_ALONE = SMALL | {"usual": False}

LONGER = {
    "AutoSampling": {"steps": 40},
    "WarmStart": {"batches": 8, "steps": 14},
    "LearningCoefficient": {"schedule": "sampling", "extra": localized(160, 1.0)},
    "a contour that learns its range": {"schedule": "sampling", "steps": 10},
}
"""What other callbacks need."""

FITS: dict[str, dict[str, Any]] = {
    "ResNet-20, four chains": {},
    "ResNet-20, contour and clipping": {"interacting": True, "clip": 1.0, "usual": False},
    "ResNet-20, sixteen chains": {"chains": 16, "usual": False},
    "cifar_sprint, sixteen chains": {"chains": 16, "sprint": True, "usual": False},
    "one chain": SMALL | {"chains": 1},
    "own contour": SMALL | {"contour": True},
    "interacting contour": SMALL | {"interacting": True},
    "one chain, contour": SMALL | {"chains": 1, "contour": True, "clip": 1.0},
    "health is measured": SMALL | {"health": 3},
    "loop": SMALL | {"execution": "loop", "compile": False},
    "loop, compiled": SMALL_ALONE | {"execution": "loop"},
    "vmap, not compiled": SMALL_ALONE | {"compile": False},
    "clipping": SMALL_ALONE | {"clip": 1.0},
    "accumulation": SMALL_ALONE | {"accumulate": 2, "clip": 1.0},
    "replica exchange": SMALL_ALONE | {"replica_exchange": True},
    "replica exchange, reduced variance": SMALL_ALONE | {"replica_exchange": True, "variance_reduced": True},
    "EWSG": SMALL_ALONE | {"ewsg": 1, "sampler": "UnderdampedLangevin"},
    "control variates": SMALL_ALONE | {"control_variates": True},
    "covariance friction": SMALL_ALONE
    | {"covariance_friction": True, "sampler": "UnderdampedLangevin", "schedule": "sampling"},
    **{name: SMALL | {"other": name, "dropout": 0.2} | LONGER.get(name, {}) for name in OTHERS},
    "a step size for each chain": SMALL_ALONE | {"lr_each": True},
    "scalar parameters": SMALL_ALONE | {"scalar": True, "clip": 1.0, "contour": True},
    "scalar parameter, one chain": SMALL_ALONE | {"scalar": True, "chains": 1, "interacting": False},
    "prior scales": SMALL_ALONE | {"contour": True, "extra": {"prior": HierarchicalPrior(every_n_steps=2)}},
    "channels last": SMALL_ALONE | {"chains": 1, "channels_last": True},
    "dropout": SMALL_ALONE | {"dropout": 0.2},
    "single precision": SMALL_ALONE | {"precision": "32-true"},
    "data on the host": SMALL_ALONE | {"resident": False},
    **{
        f"{sampler}": SMALL_ALONE | {"sampler": sampler, "clip": 1.0}
        for sampler in ("SGLD", "pSGLD", "SGNHT", "UnderdampedLangevin", "pSGHMC", "AdamSGLD", "ScaleAdaptedSGHMC")
    },
    **{
        f"UnderdampedLangevin, {name}": SMALL_ALONE
        | {"sampler": "UnderdampedLangevin", "options": {"integrator": name}, "clip": 1.0}
        for name in ("obabo", "ubu")
    },
    **{
        f"{sampler}, tested": SMALL_ALONE | {"sampler": sampler, "metropolis": 5, "schedule": "sampling"}
        for sampler in ("AMAGOLD", "GGMC")
    },
    "MCLMC": SMALL_ALONE | {"sampler": "MCLMC", "clip": 1.0, "schedule": "sampling"},
    "pMCLMC": SMALL_ALONE | {"sampler": "pMCLMC", "options": {"adapt": "always"}, "clip": 1.0, "schedule": "sampling"},
}
"""The settings of each fit, for `Case`."""


WITHOUT_FLOAT64 = "without float64: "
"""Before the name of a case, for a device that has no float64, and a fit without a compiler, as Apple's."""


def _of_fit(name: str, float64: bool) -> dict[str, Any]:
    return report(Case(**(FITS[name] if float64 else FITS[name] | {"compile": False})), float64=float64)


def _of_function(function: Callable[..., Any], float64: bool) -> dict[str, Any]:
    with StandIn(float64) as device:
        found = function(device)
    return found or {}


FUNCTIONS: dict[str, Callable[..., Any]] = checks.CHECKS | correct.CHECKS | inputs.CHECKS


def run(name: str) -> dict[str, Any]:
    """Return what a case did, or its error."""
    try:
        float64, name = not name.startswith(WITHOUT_FLOAT64), name.removeprefix(WITHOUT_FLOAT64)
        return _of_fit(name, float64) if name in FITS else _of_function(FUNCTIONS[name], float64)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def main() -> None:
    """Run the named cases."""
    warnings.simplefilter("ignore")
    compiling.WORTH_ON_CUDA = 0  # short fits are compiled too
    for name in ("pytorch_lightning", "lightning_sgmcmc"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in sys.argv[1:]:
        with contextlib.redirect_stdout(sys.stderr):
            found = run(name)
        print(json.dumps({"name": name} | found), flush=True)


if __name__ == "__main__":
    main()
