"""Processor seconds of fits of the recipe `equal_cost`: of `AutoSampling`, one network and an ensemble.

`python -m tests.benchmarks.fit_seconds --data-root DIR [--rounds 5] [--out FILE]`

All make the same number of gradient evaluations, on one thread, in turns and after a first round that does not count.
"in Lightning's loop" is the same fit without blocks of steps, as fits of one chain were made below 20,000 steps.
"""

import argparse
import json
import math
import statistics
import time
from functools import partial
from pathlib import Path

from lightning_sgmcmc.fit import block_runs
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.equal_cost import fitted
from lightning_sgmcmc.recipes.equal_cost.methods import METHODS, setting_of
from lightning_sgmcmc.recipes.equal_cost.problems import Problem
from lightning_sgmcmc.recipes.equal_cost.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import silence_lightning
from tests.benchmarks.timing import interleaved, measure_quietly, ratios

SETS = ("digits", "german", "energy", "kin8nm", "mnist", "digits_cnn")
LOOP = "in Lightning's loop"
FITS = ("auto", f"auto, {LOOP}", "sgd", f"sgd, {LOOP}", "ensemble")


def seconds(data: str, fit: str, settings: Settings, root: Path) -> float:
    """Return the processor seconds of a fit."""
    method, _, way = fit.partition(", ")
    problem = Problem(data, settings.sets[data], root, seed=0)
    problem.setup("fit")
    pl.seed_everything(0, verbose=False)
    made = METHODS[method](problem, setting_of(settings, data, method))
    fewest, block_runs.FEWEST = block_runs.FEWEST, math.inf if way else block_runs.FEWEST
    begun = time.process_time()
    try:
        fitted(made, problem)
    finally:
        block_runs.FEWEST = fewest
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    measure_quietly()
    silence_lightning()
    settings = read_settings(Settings, Options(Path("."), arguments.data_root, full=True))
    print("| data | " + " | ".join(FITS) + " | auto / ensemble |\n" + "|---" * (len(FITS) + 2) + "|")
    found: dict[str, dict[str, dict[str, float]]] = {"processor seconds": {}, "times the ensemble's": {}}
    for data in arguments.sets:
        own = {fit: partial(seconds, data, fit, settings, arguments.data_root) for fit in FITS}
        each = interleaved(own, arguments.rounds)
        found["processor seconds"][data] = {fit: round(statistics.median(times), 2) for fit, times in each.items()}
        compared = {fit: ratios(each, fit, "ensemble") for fit in FITS[:-1]}
        found["times the ensemble's"][data] = {fit: round(median, 2) for fit, (median, _, _) in compared.items()}
        cells = [f"{value:.2f}" for value in found["processor seconds"][data].values()]
        median, least, largest = compared["auto"]
        print(f"| {data} | {' | '.join(cells)} | {median:.2f} ({least:.2f} to {largest:.2f}) |", flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
