"""Paired comparisons of the methods over seeds and test data."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_sgmcmc.diagnostics.draws import RESAMPLES, Array, percentile_interval, resampled_means
from lightning_sgmcmc.report.compare import Interval

Cell = Mapping[str, Any]
COLUMNS = ("nll", "loss", "joint")
"""What cells have for single test data, or for groups of them."""
HIGHER_IS_BETTER = ("accuracy", "ood_auroc")


class Difference(Interval):
    """A mean difference, a method's minus the reference's, with its 95 % interval over seeds and test data."""

    def __str__(self) -> str:
        star = "*" if self.is_off_zero else ""
        return f"{self.value:+.4g} [{self.low:+.4g}, {self.high:+.4g}]{star}".replace("-", "−")


class Results:
    """The rows of all cells, by data set, row and seed.

    Args:
        cells: what the recipe has written.
        resamples: of the bootstrap.
    """

    def __init__(self, cells: Sequence[Cell], resamples: int = 2000) -> None:
        self._rows: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
        self.costs: dict[tuple[str, str], list[tuple[float, float]]] = {}
        """By data set and row: gradient evaluations and seconds of each seed's fit."""
        self.failures: dict[tuple[str, str], str] = {}
        """By data set and method: why a seed has no row."""
        self._resamples = resamples
        for cell in cells:
            data, seed = cell["data"], cell["seed"]
            if "failed" in cell:
                self.failures[data, cell["method"]] = cell["failed"]
            for row, found in cell["rows"].items():
                self._rows.setdefault(data, {}).setdefault(row, {})[seed] = found
                cost = (cell["gradient_evaluations"], cell["seconds"])
                self.costs.setdefault((data, row), []).append(cost)

    def has(self, data: str, row: str) -> bool:
        """Return whether a row has a seed on a data set."""
        return row in self._rows.get(data, {})

    def rows(self, data: str) -> list[str]:
        """Return the rows of a data set."""
        return list(self._rows.get(data, {}))

    def metrics(self, data: str, row: str) -> dict[str, list[float]]:
        """Return each metric's values, one for each seed."""
        found = list(self._rows[data][row].values())
        return {name: [one["metrics"][name] for one in found] for name in found[0]["metrics"]}

    def mean(self, data: str, row: str, metric: str) -> float:
        """Return a metric's mean over seeds."""
        return float(np.mean(self.metrics(data, row)[metric]))

    def seeds(self, data: str, row: str) -> int:
        """Return how many seeds a row has."""
        return len(self._rows[data][row])

    def paired_means(self, data: str, first: str, second: str, metric: str) -> tuple[float, float]:
        """Return a metric's means of two rows over the seeds that both have; NaN if there is none."""
        rows = [self._rows[data][row] for row in (first, second)]
        values = [[row[seed]["metrics"][metric] for row in rows] for seed in rows[0].keys() & rows[1].keys()]
        means = np.mean(values, 0) if values else (math.nan, math.nan)
        return float(means[0]), float(means[1])

    def gradients(self, data: str, row: str) -> float:
        """Return the mean over seeds of the gradient evaluations, counted in examples."""
        return float(np.mean([gradients for gradients, _ in self.costs[data, row]]))

    def differences(
        self, data: str, reference: str, column: str = "nll", shared_data: bool = False
    ) -> dict[str, Difference]:
        """Return every other row's difference from a reference, over the seeds that both have.

        Args:
            data: the data set.
            reference: the other row.
            column: "nll", "loss" (wrong classes, squared errors), or "joint" (the joint NLL of groups), which
                calibrated rows lack.
            shared_data: whether all seeds have the same test data.
        """
        rows = self._rows.get(data, {})
        rows = {row: of for row, of in rows.items() if all(len(one.get(column, ())) for one in of.values())}
        if reference not in rows:
            return {}
        by_seeds: dict[tuple[int, ...], list[str]] = {}
        for row in rows:
            common = tuple(sorted(rows[row].keys() & rows[reference].keys()))
            if row != reference and common:
                by_seeds.setdefault(common, []).append(row)
        found = {}
        for seeds, names in by_seeds.items():
            groups: list[Array] = [
                np.array([rows[name][seed][column] for name in names]) - np.array(rows[reference][seed][column])
                for seed in seeds
            ]
            draws = two_level_means(groups, shared_data, self._resamples)
            values = np.mean([group.mean(1) for group in groups], 0)
            for name, value, own in zip(names, values, draws, strict=True):
                found[name] = Difference(float(value), *percentile_interval(own))
        return {row: found[row] for row in rows if row in found}


# -- sentences --------------------------------------------------------------------------------------------------------

NOT_RIVALS = ("ensemble_4x", "auto", "auto_ood")
"""Rows that cost more, or that are `--auto` itself."""


def sentences(results: Results, sets: Sequence[str], fixed_test: Sequence[str], subject: str = "auto") -> list[str]:
    """Return where a method wins and loses, one sentence each.

    Args:
        results: all rows.
        sets: the data sets to count.
        fixed_test: those whose seeds share their test data.
        subject: the method.
    """
    known = [data for data in sets if results.has(data, subject)]
    if not known:
        why = next((why for (_, method), why in results.failures.items() if method == subject), "it was not run")
        return [f"There is no row `{subject}`: {why}."]
    said = []
    for reference in ("ensemble", "ensemble_tuned"):
        nll = {data: results.differences(data, reference, "nll", data in fixed_test).get(subject) for data in known}
        pairs = {data: one for data, one in nll.items() if one is not None}
        lower = [data for data, one in pairs.items() if one.value < 0]
        surely = [data for data in lower if pairs[data].is_off_zero]
        said.append(
            f"`{subject}` has a lower NLL than `{reference}` on {len(lower)} of {len(pairs)} data sets{_list(lower)}; "
            f"the 95 % interval is off zero on {len(surely)}{_list(surely)}."
        )
        worse = [f"{data} ({one})" for data, one in pairs.items() if one.value >= 0]
        if worse:
            said.append(f"It has a higher NLL than `{reference}` on {', '.join(worse)}.")
    loss = {data: results.differences(data, "ensemble", "loss", data in fixed_test).get(subject) for data in known}
    worse = [f"{data} ({one})" for data, one in loss.items() if one is not None and one.low > 0]
    said.append(
        f"Its errors (wrong classes, squared errors) exceed those of `ensemble` beyond the interval on "
        f"{', '.join(worse) if worse else 'no data set'}."
    )
    better = [f"{row} on {data}" for data in known for row in _better_in_both(results, data, subject)]
    said.append(f"Better in NLL and OOD AUROC at once, at equal cost: {', '.join(better) if better else 'none'}.")
    return said


def best_auroc(results: Results, sets: Sequence[str], subject: str = "auto_ood") -> list[str]:
    """Return on how many data sets a method has the best AUROC of all rows."""
    known = [data for data in sets if results.has(data, subject)]
    if not known:
        return []
    others = {}
    for data in known:
        pairs = {row: results.paired_means(data, row, subject, "ood_auroc") for row in results.rows(data)}
        best = max(pairs, key=lambda row: pairs[row][0] - pairs[row][1] if pairs[row][0] >= 0 else -math.inf)
        if best != subject:
            others[data] = "{} {:.3f}, it {:.3f}".format(best, *pairs[best])
    said = f"`{subject}` has the best OOD AUROC on {len(known) - len(others)} of {len(known)} data sets"
    return [said + (f"; elsewhere: {', '.join(f'{d} ({why})' for d, why in others.items())}." if others else ".")]


def _better_in_both(results: Results, data: str, subject: str) -> list[str]:
    found = []
    for row in results.rows(data):
        nll, own_nll = results.paired_means(data, row, subject, "nll")
        auroc, own_auroc = results.paired_means(data, row, subject, "ood_auroc")
        if row not in NOT_RIVALS and nll < own_nll and auroc > own_auroc:
            found.append(row)
    return found


def _list(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def two_level_means(
    groups: Sequence[Array], shared_data: bool = False, resamples: int = RESAMPLES, seed: int = 0
) -> Array:
    """Return the means of resampled groups of resampled data, shape (m, B): runs with several seeds on test data.

    Every resample draws G groups with replacement, and for each of them its data with replacement. Groups count alike.

    Args:
        groups: m quantities of each group's n_g data, each of shape (m, n_g); the m rows are paired.
        shared_data: whether all groups have the same data; a resample then draws the same data for all of them.
        resamples: B.
        seed: of the draw.

    Source: Davison & Hinkley 1997, section 3.8 (both stages with replacement, whose variance is on the large side).
    """
    within = np.stack(
        [resampled_means(values, resamples, seed if shared_data else seed + g) for g, values in enumerate(groups)]
    )
    generator = np.random.default_rng((seed, 1))
    count = len(groups)
    chosen = generator.integers(count, size=(count, resamples))
    # A group that is drawn twice has data of its own each time.
    draws = np.arange(resamples) if shared_data else generator.integers(resamples, size=(count, resamples))
    means: Array = within[chosen, :, draws].mean(0).T
    return means
