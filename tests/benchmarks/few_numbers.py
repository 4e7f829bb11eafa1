"""BayesianRegressor with few rows: AutoSampling, a fixed prior and temperature, an ensemble, and guessing.

    python -m tests.benchmarks.few_numbers [--seeds 3] [--root DIR] [--sets diabetes …] [--json FILE]

Perceptrons of two hidden layers of 50, four chains or members, 2,000 steps; `AutoSampling` holds out a tenth of the
rows, the ensemble none. Its members make the same steps at lr 0.01 under N(0, 1). Test data are 1,500 other rows or
the rest. Sets named "A, noise r" are laws with noise of r standard deviations of the rest.
"""

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import load_diabetes, make_friedman1, make_friedman3

from lightning_sgmcmc.callbacks import AutoSampling, DeepEnsemble
from lightning_sgmcmc.datamodules.files import find_file, read_arrays
from lightning_sgmcmc.estimators import BayesianRegressor
from tests.benchmarks.timing import measure_quietly

CHOSEN_ON = ("diabetes", "wine-quality-red", "concrete", "energy", "kin8nm", "power-plant")
"""Tables on which rules were chosen, and laws; the last ones had no part."""
LAWS = {"friedman 1": 10, "linear": 20, "sines": 8, "friedman 3": 4, "steps": 12}
"""The columns of each law."""
SETS = (*CHOSEN_ON, "friedman 1, noise 0.6", "linear, noise 1", "linear, noise 0.3", "sines, noise 0.3")
UNSEEN = ("airfoil", "friedman 3, noise 1", "steps, noise 0.7")
COUNTS = (50, 100, 200, 400, 800)
METHODS = ("AutoSampling", "no validation data", "fixed", "ensemble", "guessing")


def of_law(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return 3,000 rows of a law with its noise."""
    law, _, noise = name.partition(", noise ")
    drawn = np.random.RandomState(1000 + seed)
    if law == "friedman 1":
        x, y = make_friedman1(3000, random_state=seed)
    elif law == "friedman 3":
        x, y = make_friedman3(3000, random_state=seed)
    elif law == "linear":
        x = drawn.randn(3000, LAWS[law])
        y = x @ drawn.randn(LAWS[law])
    elif law == "sines":
        x = drawn.uniform(-1, 1, (3000, LAWS[law]))
        y = np.sin(4 * x[:, :4]).sum(1) + 2 * x[:, 4] * x[:, 5]
    else:
        x = drawn.uniform(-1, 1, (3000, LAWS[law]))
        y = (x[:, 0] > 0) + 2.0 * (x[:, 1] > 0.5) * (x[:, 2] < 0) + np.abs(x[:, 3])
    return x, y + float(noise) * y.std() * drawn.laplace(scale=0.5**0.5, size=3000)


def data_of(name: str, root: Path | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows (n, columns) and targets (n,) of a set."""
    if "noise" in name:
        return of_law(name, seed)
    if name == "diabetes":
        x, y = load_diabetes(return_X_y=True)
        return x, y
    assert root is not None
    if name == "airfoil":
        table = np.loadtxt(
            find_file(root, "airfoil/airfoil.csv", "airfoil.csv", what="airfoil"), delimiter=",", skiprows=1
        )
        return table[:, :-1], table[:, -1]
    path = find_file(root, f"uci_regression/{name}.npz", f"{name}.npz", what=f"the table '{name}'")
    x, y = read_arrays(path, ("x", "y"))
    return x, y.ravel()


def options_of(method: str, count: int) -> dict[str, Any]:
    """Return the estimator's arguments."""
    if method == "ensemble":
        return {"callbacks": [DeepEnsemble()], "module": {"lr": 0.01}, "prior": 1.0, "validation_fraction": 0}
    if method == "no validation data":
        return {"validation_fraction": 0}
    if method == "fixed":
        std = max(0.35, min(1.0, (0.025 * 0.9 * count) ** -0.5))
        return {"callbacks": [AutoSampling(num_draws=20, temperature=0.1, prior_std=std)]}
    return {}


def run(method: str, x: np.ndarray, y: np.ndarray, count: int, seed: int) -> tuple[float, float, float]:
    """Return RMSE over the targets' standard deviation, NLL of standardised targets, and coverage of 90 % intervals."""
    order = np.random.RandomState(seed).permutation(len(y))
    train, test = order[:count], order[count : count + 1500]
    scale = float(y.std())
    if method == "guessing":
        mean, std = y[train].mean(), y[train].std()
        residual = (y[test] - mean) / std
        nll = float(np.mean(residual**2 / 2) + np.log(std / scale) + np.log(2 * np.pi) / 2)
        return float(np.sqrt(np.mean((y[test] - mean) ** 2))) / scale, nll, float(np.mean(np.abs(residual) < 1.645))
    model = BayesianRegressor(random_state=seed, **options_of(method, count)).fit(x[train], y[train])
    found = model.posterior_.evaluate([(pd.DataFrame(x[test]), pd.Series(y[test]))]).bma
    return found["rmse"] / scale, found["nll"] - float(np.log(scale)), found["coverage_90"]


def main() -> None:
    """Print the table, and write it with the command and the date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--sets", nargs="+", choices=(*SETS, *UNSEEN))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measure_quietly()
    rows = []
    for name in options.sets or ((*SETS, *UNSEEN) if options.root else (SETS[0], *SETS[6:], *UNSEEN[1:])):
        sets = [data_of(name, options.root, seed) for seed in range(options.seeds)]
        for count in COUNTS:
            if count > len(sets[0][1]) - 40:
                continue
            cells = []
            for method in METHODS:
                each = [run(method, *sets[seed], count, seed) for seed in range(options.seeds)]
                rmse, nll, coverage = np.mean(each, 0)
                cells.append(f"{rmse:.2f}, {nll:.2f}, {coverage:.0%}")
            rows.append([f"{name}, {count}", *cells])
            print(rows[-1], flush=True)
    if options.json is not None:
        command = f"python -m tests.benchmarks.few_numbers --seeds {options.seeds}"
        command += "" if options.root is None else " --root DIR"
        content = {
            "command": command,
            "date": date.today().isoformat(),
            "header": ["data, rows", *METHODS],
            "rows": rows,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
