"""The grids of recipe `equal_cost`: settings of its tuned rows for each data set, by the NLL of validation data.

    python -m tests.benchmarks.equal_cost_grid --root DIR [--sets digits,energy] [--methods swag_tuned] [--out FILE]

Each run has the recipe's budget, on seed 900, which no page has. A grid has eight settings of one network: for
`sgd_tuned` of optimizer, step size and decay, for `mc_dropout_tuned` of the rate in the untuned and in `sgd_tuned`'s
setting, for `swag_tuned` of step size and decay; ensembles have four members. Printed are all NLLs, and the winner as a
line of `equal_cost.yaml`. `--every 2` takes half of a grid, as for CIFAR-10. `--out` adds a line of JSON
for each run, and runs that are there are not repeated.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.equal_cost import fitted
from lightning_sgmcmc.recipes.equal_cost.methods import METHODS
from lightning_sgmcmc.recipes.equal_cost.problems import Problem
from lightning_sgmcmc.recipes.equal_cost.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings
from tests.benchmarks.timing import measure_quietly

SEED = 900
RATES = (0.05, 0.1, 0.2, 0.4)
DECAYS = (5.0e-4, 5.0e-3, 0.05, 0.5)
SGD = [{"optimizer": "sgd", "lr": lr, "weight_decay": decay} for lr in (0.03, 0.1) for decay in (5.0e-4, 5.0e-3)]
ADAMW = [{"optimizer": "adamw", "lr": lr, "weight_decay": decay} for lr in (0.004, 0.01) for decay in (0.1, 1.0)]


def grid(method: str, kind: str, source: str, settings: Settings) -> list[dict[str, Any]]:
    """Return the settings of a tuned row's grid for a data set."""
    if method == "sgd_tuned":
        return SGD + ADAMW
    if method == "ensemble_tuned":
        return [{**one, "chains": 4} for one in SGD + ADAMW]
    if method == "mc_dropout_tuned":
        bases: list[Mapping[str, Any]] = [settings.methods["mc_dropout"][kind], settings.tuned["sgd_tuned"][source]]
        return [{**base, "dropout": rate, "draws": 30} for base in bases for rate in RATES]
    base = settings.methods["swag"][kind]
    steps = (base["lr"], round(base["lr"] / 3, 4) if kind == "classification" else 4 * base["lr"])
    return [{**base, "lr": lr, "weight_decay": decay} for lr in steps for decay in DECAYS]


def validation_nll(data: str, method: str, setting: Mapping[str, Any], settings: Settings, root: Path) -> float:
    """Return the NLL of the validation data after a fit."""
    problem = Problem(data, settings.sets[data], root, SEED)
    problem.setup("fit")
    pl.seed_everything(SEED, verbose=False)
    fit = METHODS[method](problem, setting)
    fitted(fit, problem)
    assert fit.module.posterior is not None
    return fit.module.posterior.evaluate([(problem.splits[1].inputs, problem.splits[1].targets)]).bma["nll"]


def main() -> None:
    """Print the grids."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--sets", default="")
    parser.add_argument("--methods", default="mc_dropout_tuned,swag_tuned")
    parser.add_argument("--every", type=int, default=1, help="take every so many settings of a grid")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    measure_quietly()
    settings = read_settings(Settings, Options(out=chosen.root, data_root=chosen.root, full=True))
    known: dict[str, float] = {}
    if chosen.out is not None and chosen.out.is_file():
        known = dict(map(json.loads, chosen.out.read_text().splitlines()))
    for data in chosen.sets.split(",") if chosen.sets else settings.chosen_sets:
        kind, source = Problem(data, settings.sets[data], chosen.root).kind, settings.sets[data]["source"]
        for method in chosen.methods.split(","):
            found = []
            for setting in grid(method, kind, source, settings)[:: chosen.every]:
                key = json.dumps([data, settings.sets[data], method, setting], sort_keys=True)
                if key not in known:
                    known[key] = validation_nll(data, method, setting, settings, chosen.root)
                    if chosen.out is not None:
                        with chosen.out.open("a") as file:
                            file.write(json.dumps([key, known[key]]) + "\n")
                found.append((known[key], setting))
                print(f"{data} {method} {known[key]:.4f} {json.dumps(setting)}", flush=True)
            best = min(found, key=lambda one: one[0])[1]
            settings.tuned.setdefault(method, {})[source] = best  # which the next method may start from
            words = ", ".join(f"{name}: {value}" for name, value in best.items())
            print(f"  {method}:\n    {source}: {{{words}}}", flush=True)


if __name__ == "__main__":
    main()
