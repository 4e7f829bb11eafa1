"""The page, the picture and the rows of the comparison."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_sgmcmc.figures.canvas import COLOURS, SINGLE_COLOUR, panels, save_figure
from lightning_sgmcmc.files import write_atomically
from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.recipes.equal_cost import limits
from lightning_sgmcmc.recipes.equal_cost.comparison import COLUMNS, Cell, Difference, Results, best_auroc, sentences
from lightning_sgmcmc.recipes.equal_cost.methods import ROWS
from lightning_sgmcmc.recipes.equal_cost.problems import Problem
from lightning_sgmcmc.recipes.equal_cost.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "joint_nll": "joint NLL",
    "ece": "ECE",
    "brier": "Brier",
    "risk_80": "error of the surest 80 %",
    "coverage_90": "coverage of sets 90 %",
    "set_size_90": "classes in a set",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage_95": "coverage 95 %",
    "width_95": "width 95 %",
    "ood_auroc": "OOD AUROC",
    "passes": "passes",
    "megabytes": "MB",
}
DIGITS = {"passes": 0, "megabytes": 2}
"""Digits after the point of metrics that do not have four."""
REFERENCES = ("ensemble", "ensemble_tuned")
Compared = dict[str, dict[tuple[str, str], dict[str, Difference]]]
"""By data set and by (reference, column): each row's difference."""


def write_page(cells: Sequence[Cell], settings: Settings, seeds: int, options: Options) -> list[Row]:
    """Write `page.md`, `nll.png` and `cells.jsonl` (the cells without single data), and return the rows."""
    results, sets = Results(cells), settings.chosen_sets
    problems = {data: Problem(data, settings.sets[data], options.data_root) for data in sets}
    fixed = [data for data, problem in problems.items() if problem.has_fixed_test]
    compared: Compared = {
        data: {
            (reference, column): results.differences(data, reference, column, data in fixed)
            for reference in REFERENCES
            for column in COLUMNS
        }
        for data in sets
    }
    networks = [data for data in sets if "channels" not in settings.sets[data]]  # a CNN's data are counted already
    parts = [
        _introduction(results, sets, seeds),
        limits.section(results, sets, fixed),
        overview(results, sets),
        *(_section(results, problems[data], compared[data]) for data in sets),
    ]
    said = [*sentences(results, networks, fixed), *best_auroc(results, networks)]
    parts.append("## In sentences\n\n" + "\n".join(f"* {one}" for one in said))
    write_atomically(options.out / "page.md", ("\n\n".join(filter(None, parts)) + "\n").encode())
    lines = [json.dumps({**cell, "rows": {row: one["metrics"] for row, one in cell["rows"].items()}}) for cell in cells]
    write_atomically(options.out / "cells.jsonl", ("\n".join(lines) + "\n").encode())
    save_figure(picture({data: compared[data]["ensemble", "nll"] for data in sets}), options.out / "nll.png")
    return [row for data in sets for row in _rows(results, data, compared[data])]


def _introduction(results: Results, sets: Sequence[str], seeds: int) -> str:
    most = {data: max((results.seeds(data, row) for row in results.rows(data)), default=0) for data in sets}
    fewer = "".join(f", {count} on {data}" for data, count in most.items() if count < seeds)
    return (
        f"# Methods at equal cost\n\n{seeds} seeds{fewer}, or as many as brackets say; means over them. Each "
        "method makes the same number of gradient evaluations on a data set (`ensemble_4x` four times as many; rows "
        "with _tuned may stop earlier, and their settings come from a grid that is not counted; `sgd_grid` pays for "
        "its own, four networks with a quarter of the steps each). Rows with _temperature are the row above, "
        "calibrated on the validation data by one number; `auto_10` has ten samples of `auto`, which the validation "
        "data choose. A prediction costs as many passes as the table has, and MB is the size of their weights. Sets "
        "of classes have the most probable ones up to 90 %, without a conformal threshold. Regression: in the target's "
        "units, OOD by the predictive standard deviation. The joint NLL is of groups of 10 test data, in nats per "
        "example: dyadic ones of classes, near ones of numbers; a calibration is not of it. Differences are paired, "
        "below 0 is better, with 95 % intervals of a bootstrap over seeds and test data; * off zero."
    )


def overview(results: Results, sets: Sequence[str]) -> str:
    """Return two tables of all data sets: the NLL in nats, and the AUROC of out-of-distribution inputs."""
    rows = [row for row in ROWS if any(results.has(data, row) for data in sets)]
    tables = []
    for metric in ("nll", "ood_auroc"):
        lines = [[row, *(_mean(results, data, row, metric) for data in sets)] for row in rows]
        tables.append(markdown_table([METRICS[metric], *sets], lines).replace("| -", "| −"))
    return "## All data sets\n\n" + "\n".join(tables)


def _mean(results: Results, data: str, row: str, metric: str) -> str:
    """Return a row's mean as text, with its number of seeds if others of the data set have more; "" without a row."""
    return f"{results.mean(data, row, metric):.3f}{_mark(results, data, row)}" if results.has(data, row) else ""


def _mark(results: Results, data: str, row: str) -> str:
    """Return " (3)" for a row of three seeds if others of the data set have more, else ""."""
    count = results.seeds(data, row)
    return "" if count == max(results.seeds(data, other) for other in results.rows(data)) else f" ({count})"


def _section(results: Results, problem: Problem, compared: Mapping[tuple[str, str], Mapping[str, Difference]]) -> str:
    """Return a data set's tables: metrics with cost, and differences."""
    data, rows = problem.data_name, [row for row in ROWS if results.has(problem.data_name, row)]
    if not rows:
        return f"## {data}\n\nNo cell is finished."
    names = [name for name in METRICS if name in results.metrics(data, rows[0])]
    table = []
    for row in rows:
        gradients, seconds = (sum(part) / len(part) for part in zip(*results.costs[data, row], strict=True))
        known = results.metrics(data, row)
        metrics = [
            f"{results.mean(data, row, name):.{DIGITS.get(name, 4)}f}" if name in known else "" for name in names
        ]
        table.append([f"{row}{_mark(results, data, row)}", *metrics, f"{gradients:,.0f}", f"{seconds:.1f}"])
    quality = markdown_table(["method", *(METRICS[name] for name in names), "gradients", "seconds"], table)
    error = "error" if problem.kind == "classification" else "squared error"
    said = {"nll": "NLL", "loss": error, "joint": "joint NLL"}
    changes = [
        [row, *(str(one.get(row, "")) for one in compared.values())]
        for row in rows
        if any(row in one for one in compared.values())
    ]
    header = [f"Δ{said[column]} from {reference}" for reference, column in compared]
    budget = problem.setting["epochs"] * problem.setting["sizes"][0]
    over = [f"`{row}`" for row in rows if row != "ensemble_4x" and results.gradients(data, row) > 1.01 * budget]
    failed = [f"`{method}`: {why}" for (of, method), why in results.failures.items() if of == data]
    text = f"## {data}\n\n{quality}\n{markdown_table(['method', *header], changes)}"
    if over:
        text += f"\nNot of equal cost, above the budget of {budget:,}: {', '.join(over)}.\n"
    return text + (f"\nWithout a row: {'; '.join(failed)}\n" if failed else "")


def _rows(results: Results, data: str, compared: Mapping[tuple[str, str], Mapping[str, Difference]]) -> list[Row]:
    """Return a data set's figures to keep, to six digits, with a value for each seed where seeds differ.

    Of the differences these are only those of `auto`'s NLL from `ensemble`: others follow from the seeds' values.
    """
    found = []
    for row in ROWS:
        if not results.has(data, row):
            continue
        label = f"{data}: {row}"
        gradients, seconds = zip(*results.costs[data, row], strict=True)
        figures = {METRICS[name]: values for name, values in results.metrics(data, row).items()}
        figures |= {"gradient evaluations": list(gradients), "seconds": list(seconds)}
        for name, values in figures.items():
            short = [float(f"{value:.6g}") for value in values]
            is_same = len(short) > 1 and len(set(short)) == 1
            found.append(Row(label, name, short[0]) if is_same else mean_row(label, name, short))
        change = compared["ensemble", "nll"].get(row)
        if change is not None and row in (limits.SUBJECT, limits.FEW):
            ends = {"": change.value, ", 95 % from": change.low, ", 95 % to": change.high}
            found += [Row(label, f"NLL - ensemble{end}", value) for end, value in ends.items()]
    return found


def picture(compared: Mapping[str, Mapping[str, Difference]]) -> "Figure":
    """Draw each row's difference of NLL from the ensemble of equal cost, a panel for each data set."""
    columns = min(4, len(compared))
    lines = -(-len(compared) // columns)
    figure, grid = panels(lines, columns, 2.6 * columns, 3.0 * lines)
    for axes, (data, rows) in zip(grid.flat, compared.items(), strict=False):
        rows = {row: rows[row] for row in ROWS if row in rows}
        for place, one in enumerate(rows.values()):
            index, marker = (2, "o") if not one.is_off_zero else (0, "<") if one.value < 0 else (1, ">")
            colour = SINGLE_COLOUR if index == 2 else COLOURS[index]
            axes.plot([one.low, one.high], [place, place], color=colour)
            axes.plot([one.value], [place], marker, color=colour, markerfacecolor="white" if index == 2 else colour)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(rows)), list(rows), fontsize=7)
        axes.invert_yaxis()
        axes.set_title(data, fontsize=9)
    for axes in list(grid.flat)[len(compared) :]:
        axes.set_visible(False)
    figure.supxlabel("NLL - ensemble's NLL (nats), 95 % interval", fontsize=9)
    return figure
