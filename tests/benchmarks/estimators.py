"""The estimators of scikit-learn beside linear models, gradient boosting and peers, on tables.

`python -m tests.benchmarks.estimators --data-root DIR [--tables energy pima] [--splits 3] [--methods …]`

Of each table a tenth of the rows is for testing, the rest for the fit, with the default arguments of all methods. The
NLL of a regression is that of N(mean, std²) in the data's units, the same for all: of `BayesianRidge` by its own
standard deviation, of gradient boosting by that of its residuals in five folds. Its intervals of 90 % are those of two
further fits to the quantiles 5 % and 95 %. A peer that is not installed is left out and named; `--methods ngboost` runs
in an environment of its own too, which needs no more than that. Set OMP_NUM_THREADS=1 for seconds of one core.
"""

import argparse
import importlib.util
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.model_selection import cross_val_predict, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

REGRESSION = ("yacht", "energy", "concrete", "kin8nm", "airfoil")
CLASSES = ("heart", "pima", "german", "australian")
LEVEL, Z = 0.9, 1.6449
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def table(root: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets."""
    if name == "airfoil":
        rows = np.genfromtxt(root / "airfoil" / "airfoil.csv", delimiter=",", skip_header=1)
        return rows[:, :-1], rows[:, -1]
    folder = "uci_regression" if name in REGRESSION else "uci_classification"
    with np.load(root / folder / f"{name}.npz") as data:
        return data["x"], data["y"]


# -- methods -----------------------------------------------------------------------------------------------------------


def gaussian(mean: np.ndarray, std: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return mean, std, np.stack([mean - Z * std, mean + Z * std], 1)


def our_regressor(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int, **settings: Any) -> Any:
    from lightning_sgmcmc.estimators import BayesianRegressor

    model = BayesianRegressor(random_state=seed, **settings).fit(x, y)
    return *model.predict(new, return_std=True), model.predict_interval(new, LEVEL)


def linear_regressor(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Any:
    model = make_pipeline(StandardScaler(), BayesianRidge()).fit(x, y)
    return gaussian(*model.predict(new, return_std=True))


def boosted_regressor(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Any:
    def made(**settings: Any) -> Any:
        return HistGradientBoostingRegressor(random_state=seed, **settings)

    mean = made().fit(x, y).predict(new)
    std = (y - cross_val_predict(made(), x, y, cv=5)).std()
    bounds = [made(loss="quantile", quantile=q).fit(x, y).predict(new) for q in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)]
    return mean, np.full(len(mean), std), np.stack(bounds, 1)


def natural_regressor(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Any:
    from ngboost import NGBRegressor

    law = NGBRegressor(random_state=seed, verbose=False).fit(x, y).pred_dist(new)
    return gaussian(law.loc, law.scale)


def our_classifier(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int, **settings: Any) -> np.ndarray:
    from lightning_sgmcmc.estimators import BayesianClassifier

    found: np.ndarray = BayesianClassifier(random_state=seed, **settings).fit(x, y).predict_proba(new)
    return found


def linear_classifier(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression()).fit(x, y).predict_proba(new)


def boosted_classifier(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Any:
    return HistGradientBoostingClassifier(random_state=seed).fit(x, y).predict_proba(new)


def natural_classifier(x: np.ndarray, y: np.ndarray, new: np.ndarray, seed: int) -> Any:
    from ngboost import NGBClassifier

    return NGBClassifier(random_state=seed, verbose=False).fit(x, y.astype(int)).predict_proba(new)


METHODS: dict[str, tuple[str | None, Callable[..., Any], Callable[..., Any]]] = {
    "ours": (None, our_regressor, our_classifier),
    "linear": (None, linear_regressor, linear_classifier),
    "boosting": (None, boosted_regressor, boosted_classifier),
    "ngboost": ("ngboost", natural_regressor, natural_classifier),
}


# -- metrics -----------------------------------------------------------------------------------------------------------


def of_numbers(found: Any, y: np.ndarray) -> dict[str, float]:
    mean, std, bounds = found
    nll = 0.5 * np.log(2 * np.pi * std**2) + (y - mean) ** 2 / (2 * std**2)
    inside = (bounds[:, 0] <= y) & (y <= bounds[:, 1])
    rmse = np.sqrt(np.mean((y - mean) ** 2))
    return {"RMSE": rmse, "NLL": nll.mean(), "in 90 %": inside.mean(), "width": np.mean(bounds[:, 1] - bounds[:, 0])}


def of_classes(found: np.ndarray, y: np.ndarray) -> dict[str, float]:
    labels = np.searchsorted(np.unique(y), y)
    nll = -np.log(found[np.arange(len(y)), labels].clip(1e-15))
    return {"accuracy": np.mean(found.argmax(1) == labels), "NLL": nll.mean()}


def measure(root: Path, name: str, method: str, splits: int, **settings: Any) -> dict[str, float]:
    """Return the means over splits of a method's metrics on a table, and its seconds."""
    x, y = table(root, name)
    numeric = name in REGRESSION
    rows = []
    for seed in range(splits):
        a, b, c, d = train_test_split(x, y, test_size=0.1, random_state=seed, stratify=None if numeric else y)
        start = time.perf_counter()
        found = METHODS[method][1 if numeric else 2](a, c, b, seed, **settings)
        seconds = time.perf_counter() - start
        rows.append((of_numbers if numeric else of_classes)(found, d) | {"seconds": seconds})
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--tables", nargs="+", default=[*REGRESSION, *CLASSES], choices=[*REGRESSION, *CLASSES])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--splits", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    absent = [m for m in options.methods if METHODS[m][0] and importlib.util.find_spec(str(METHODS[m][0])) is None]
    for name in options.tables:
        columns: list[str] = []
        for method in (m for m in options.methods if m not in absent):
            found = measure(options.data_root, name, method, options.splits)
            if not columns:
                columns = list(found)
                print(f"\n| {name} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
            print(f"| {method} | {' | '.join(f'{found[c]:.3g}' for c in columns)} |", flush=True)
    if absent:
        print(f"\nNot installed: {', '.join(absent)}")


if __name__ == "__main__":
    main()
