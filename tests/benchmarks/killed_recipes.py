"""Recipes that are killed at ten random moments and continue: `python -m tests.benchmarks.killed_recipes [NAME …]`.

Every recipe runs at a tiny setting, once as a whole and once killed by SIGKILL ten times (or until it ends), with a
checkpoint of each fit every 0.1 seconds. The results must be the same but for times. It prints a line for each recipe
and ends with code 1 if one differs. All of them take about twenty minutes on a core; data sets are read from
SGMCMC_DATA_ROOT, and a recipe whose data are missing is left out.
"""

import argparse
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

KILLS = 10
FIT = {"fit.warm_steps": "30", "fit.members": "2", "fit.chains": "2", "fit.sampling_steps": "40", "fit.samples": "8"}
NETWORK = "{steps: 400, lr: 0.003, warm_start: 40}"
GENTLE = "{steps: 400, lr: 0.0003, warm_start: 40}"
TINY: dict[str, dict[str, str]] = {
    "airfoil": FIT,
    "cifar100_uncertainty": {
        "epochs": "30",
        "batch": "20",
        "num_data": "200",
        "num_test": "100",
        "limit": "200",
        "seeds": "1",
    },
    "cifar_csghmc": {
        "sets": "[{data: synthetic, epochs: 4, every: 2, batch: 50, lr: [0.02, 0.1], width: 5, zeta: 4e3, seeds: 1}]",
        "limit": "200",
    },
    "cifar_csgmcmc": {
        "sets": "[{data: synthetic, num_data: 1000, epochs: 8, batch: 50, exploration: 0.8, friction: 0.9, seeds: 1}]",
        "limit": "200",
    },
    "cifar_sprint": {"epochs": "80", "num_data": "200", "num_test": "100", "seeds": "1", "lengths": "[1]"},
    "contour_pays": {
        "networks": f"{{smallest: {NETWORK}, classification: {NETWORK}, regression: {GENTLE}, digits: {NETWORK}}}",
        "plane_steps": "1000",
        "plane_repeats": "2",
        "repeats": "1",
        "draws": "20",
    },
    "covertype_logistic": {"repeats": "2", "firefly_chains": "2", "chains": "4", "column_scales": "[0.6]"},
    "digits_auto": {"trainer.max_epochs": "12"},
    "digits_csghmc": {"trainer.max_epochs": "40"},
    "digits_csghmc_contour": {"trainer.max_epochs": "240"},
    "digits_posterior": {"trainer.max_epochs": "320"},
    "distillation": {"images": "400", "epochs": "12", "student_epochs": "1", "seeds": "1"},
    "equal_cost": {
        "chosen_sets": "[pima]",
        "sets": "{pima: {source: pima, sizes: [80, 40, 60], hidden: [8], batch: 20, epochs: 40}}",
        "seeds": "1",
    },
    "ewsg_gaussian": {"draws": "2", "chains": "20", "passes": "2", "marks": "[0.5, 1, 1.5, 2]"},
    "ewsg_vr_logistic": {"splits": "2", "chains": "4", "passes": "{pima: 2, parkinsons: 2}", "full_steps": "100"},
    "gaussian_mixture": {"steps": "2000", "repeats": "2", "shared_steps": "1000"},
    "hmc_fidelity": {
        "sizes": "[40, 10, 12]",
        "truth": "{chains: 4, warmup: 4, draws: 4, length: 1.5, max_depth: 3}",
        "seeds": "1",
        "steps": "200",
        "burn_in": "0.5",
        "warm_start": "0.1",
        "draws": "4",
        "batch": "20",
        "cycles": "2",
    },
    "last_layer": {
        "seeds": "1",
        "trunk_images": "300",
        "trunk_epochs": "1",
        "epochs": "32",
        "tested": "100",
        "samples": "8",
    },
    "logistic_ess": {"repeats": "2", "reference_steps": "200", "samples": "200", "burn_in": "50", "proposals": "1000"},
    "lora_text": {
        "vocabulary": "500",
        "width": "24",
        "layers": "2",
        "trunk": "20",
        "train": "10",
        "test": "10",
        "trunk_steps": "8",
        "steps": "12",
        "samples": "2",
        "rounds": "1",
        "timed": "2",
    },
    "misspecified": {
        "repeats": "2",
        "data": "100000",
        "iterations": "60",
        "burn_in": "20",
        "batch": "10900",
        "lag": "10",
    },
    "mnist_bnn": {"images": "2000", "epochs": "12", "repeats": "1", "cells": "[[100, 2], [100, 10]]", "hidden": "10"},
    "mnist_modes": {"images": "200", "batch": "100", "epochs": "10"},
    "mnist_ood": {"epochs": "4", "repeats": "1"},
    "mushroom_bandit": {"rounds": "6", "steps": "2", "repeats": "1"},
    "nine_modes": {"steps": "4000", "burn_in": "400", "repeats": "2"},
    "samplers_bench": {
        "gradients": "60",
        "steps": "20",
        "warm_start": "10",
        "repeats": "1",
        "networks": "[smallest]",
        "factors": "[0.08]",
        "network_factors": "[0.08]",
    },
    "segmentation": {"sizes": "[40, 10, 4]", "epochs": "36", "seeds": "1"},
    "subsampling_error": {"chains": "60", "pairs": "60", "logistic_chains": "2", "time_step": "1.0e-3"},
    "switching_diffusion": {"chains": "100", "path_points": "101"},
    "theta_variance": {"steps": "2000", "repeats": "4"},
    "twenty_five_gaussians": {"steps": "2000", "runs": "2"},
    "twenty_five_modes": {"steps": "2000", "repeats": "2", "pilot_steps": "1000", "pilot_burn_in": "100"},
    "uci_nll": FIT | {"splits": "1", "fit.hidden": "[8]"},
    "uci_regression": {"epochs": "3", "splits": "1", "epsilon_splits": "1", "models": "5"},
}
IMPORTED = ("torchvision.ops", "torchmetrics", "sklearn.datasets", "matplotlib.pyplot", "scipy.stats", "jsonargparse")


def attempt(name: str, out: Path, data: Path, seconds: float) -> bool:
    """Run a recipe in a process of its own, killed after a time; return whether it ended before.

    Raises:
        RuntimeError: if the recipe fails.
    """
    child = os.fork()
    if child == 0:
        os._exit(_run(name, out, data))
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status:
                raise RuntimeError(out.with_suffix(".log").read_text()[-2000:])
            return True
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _run(name: str, out: Path, data: Path) -> int:
    from lightning_sgmcmc.recipes.__main__ import run
    from lightning_sgmcmc.recipes.shared import trainers
    from lightning_sgmcmc.recipes.shared.options import Options

    trainers.BETWEEN_CHECKPOINTS = timedelta(seconds=0.1)
    with out.with_suffix(".log").open("a", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            run(name, Options(out, data, executor=None if name.startswith("digits") else "here", changed=TINY[name]))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            return 1
    return 0


def figures(out: Path) -> dict[Any, Any]:
    """Return a run's figures but for times."""
    from lightning_sgmcmc.recipes.shared.expected import TIMES

    results = json.loads((out / "results.json").read_text())
    rows = results.get("rows")
    if rows is None:
        return {key: value for key, value in results.items() if key in ("test", "metrics", "samples")}
    return {
        (row["method"], row["metric"]): (row["value"], row.get("values"))
        for row in rows
        if not any(word in row["metric"] for word in (*TIMES, "ms for"))
    }


def compared(name: str, data: Path, generator: random.Random) -> str:
    """Return how a killed run of a recipe differs from a whole one, in a sentence."""
    folder = Path(tempfile.mkdtemp())
    try:
        start = time.monotonic()
        attempt(name, folder / "whole", data, math.inf)
        whole = time.monotonic() - start
        kills = 0
        while kills < KILLS and not attempt(name, folder / "killed", data, whole * generator.uniform(0.02, 0.15)):
            kills += 1
        if kills == KILLS:
            attempt(name, folder / "killed", data, math.inf)
        first, second = figures(folder / "whole"), figures(folder / "killed")
        different = [key for key in first.keys() | second.keys() if not _same(first.get(key), second.get(key))]
        said = "the same results" if not different else f"other results: {different[:5]}"
        return f"{name}: {said} after {kills} kills ({len(first)} figures, {whole:.0f} s whole)"
    except RuntimeError as error:
        return f"{name}: failed: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _same(first: Any, second: Any) -> bool:
    return json.dumps(first) == json.dumps(second)


def main() -> None:
    """Compare the recipes, all or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(TINY))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    data = Path(os.environ.get("SGMCMC_DATA_ROOT", "data")).resolve()
    import torch

    torch.set_num_threads(1)
    for module in IMPORTED:
        importlib.import_module(module)
    wrong = 0
    for name in given.names:
        said = compared(name, data, random.Random(given.seed))
        wrong += "the same results" not in said
        print(said, flush=True)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
