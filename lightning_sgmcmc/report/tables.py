"""The tables of a report: results, samples and their weights, chains, temperatures of each tensor."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_sgmcmc.chains.samples import SampleRecord, comparable_log_weights
from lightning_sgmcmc.diagnostics.draws import (
    ChainGrid,
    chain_diagnostics,
    correlation_time,
    normalised_weights,
    rhat_limit,
    weight_efficiency,
)
from lightning_sgmcmc.fit.results import METHODS
from lightning_sgmcmc.health.assessment import ALL_TENSORS
from lightning_sgmcmc.health.report import HealthReport, Interval, TemperatureKind, Temperatures
from lightning_sgmcmc.planning.plan import with_article
from lightning_sgmcmc.posterior.export import choose_parameters, parameter_draws
from lightning_sgmcmc.report.html import Cell, Table, is_finite, number
from lightning_sgmcmc.report.run_record import ResultRow, RunError, RunRecord

HIGHER_IS_BETTER = ("accuracy", "auroc", "aupr_out", "aupr_in", "log_likelihood")
LOWER_IS_BETTER = ("nll", "brier", "ece", "rmse", "mae", "error", "fpr95")
SHORT_TABLE = 12
"""Longer tables of samples are folded."""
FALSE_ALARM_RATE = 0.01
"""Probability of a warning for chains of one law, per quantity."""
MOST_ELEMENTS = 100
"""Largest number of elements, evenly spaced, that are diagnosed per parameter."""
TOLERANCE = 0.2
"""A temperature is marked if its whole interval is further from the target than this share of it."""
NOT_MEASURABLE = "not measurable in this run"
FOLD_ABOVE = 40
"""A table of tensors with more rows is folded."""

Found = dict[tuple[str, str], ResultRow]
"""Rows of results by method and metric."""


# -- results ----------------------------------------------------------------------------------------------------------


def results(run: RunRecord) -> list[Table]:
    """Return the table of `results.json`, and those of the run's other results."""
    tables = [_results(run.rows, "Results")] if run.rows else []
    return tables + [_results(rows, f"Results in {name}") for name, rows in run.other_rows.items()]


def _results(rows_of_file: list[ResultRow], title: str) -> Table:
    """Return a table of results: the metrics of each method, and the paper's if it names them."""
    found: Found = {(str(row.method), str(row.metric)): row for row in rows_of_file}
    methods, metrics = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    if any(is_finite(row.paper) for row in rows_of_file):
        return _beside_the_paper(found, methods, metrics)
    if {"single", "bma"} <= set(methods) <= set(METHODS):
        return _averages(found, methods, metrics, title)
    if len(metrics) > len(methods):
        rows = [[m, *(_with_error(found.get((method, m))) for method in methods)] for m in metrics]
        return Table(["metric", *(METHODS.get(m, m) for m in methods)], rows, title)
    rows = [[METHODS.get(m, m), *(_with_error(found.get((m, metric))) for metric in metrics)] for m in methods]
    return Table(["method", *metrics], rows, title)


def _averages(found: Found, methods: list[str], metrics: list[str], title: str) -> Table:
    """Return the table of single samples and their average."""
    rows = []
    for metric in metrics:
        values = [_with_error(found.get((method, metric))) for method in methods]
        change = _change(metric, found.get(("single", metric)), found.get(("bma", metric)))
        rows.append([metric, *values, change])
    has_errors = any(row.error is not None for row in found.values())
    note = "The number after ± is the standard deviation over the samples. " if has_errors else ""
    if "guessing" in methods:
        note += "Guessing is the best prediction that does not look at the inputs. "
    if "best_single" in methods:
        note += "The best single sample is the one with the lowest NLL on these data. "
    return Table(
        ["metric", *(METHODS[method] for method in methods), "change"],
        rows,
        f"{title}: single samples and their average",
        note=f"{note}Change is the average's value minus the mean single sample's.",
    )


def _beside_the_paper(found: Found, methods: list[str], metrics: list[str]) -> Table:
    """Return the table of the paper's numbers and ours, for the metrics in the paper."""
    header, groups, rows = ["method"], [("", 1)], [[METHODS.get(m, m)] for m in methods]
    for metric in metrics:
        of_metric = [found.get((method, metric)) for method in methods]
        known = any(row is not None and is_finite(row.paper) for row in of_metric)
        header += ["ours", "paper"] if known else ["ours"]
        groups.append((metric, 2 if known else 1))
        for cells, row in zip(rows, of_metric, strict=True):
            cells.append(_with_error(row))
            if known:
                cells.append(number(None) if row is None else _text(row.paper, row.paper_error))
    return Table(header, rows, "Results and the paper's", groups)


def _with_error(row: ResultRow | None) -> str:
    return number(None) if row is None else _text(row.value, row.error)


def _text(value: float | None, error: float | None) -> str:
    if value is None:
        return number(None)
    return number(float(value)) + (f" ± {number(float(error))}" if error is not None else "")


def _change(metric: str, single: ResultRow | None, bma: ResultRow | None) -> Cell | str | None:
    if single is None or bma is None or not (is_finite(single.value) and is_finite(bma.value)):
        return None
    change = float(bma.value) - float(single.value)
    text = f"{change:+.4f}".replace("-", "−")
    direction = 1 if metric.endswith(HIGHER_IS_BETTER) else -1 if metric.endswith(LOWER_IS_BETTER) else 0
    if direction == 0 or abs(change) < 5e-5:
        return text
    return Cell(f"{text} better", "good") if change * direction > 0 else Cell(f"{text} worse", "bad")


# -- samples ----------------------------------------------------------------------------------------------------------


def samples(records: list[SampleRecord]) -> Table | None:
    """Return the table of samples, folded if it is long."""
    if not records:
        return None
    try:
        shares: list[float | None] = list(normalised_weights(comparable_log_weights(records)).tolist())
    except ValueError:
        shares = [None] * len(records)
    rows = [
        [place, r.step, r.cycle + 1, r.chain, r.energy, r.log_weight, share]
        for place, (r, share) in enumerate(zip(records, shares, strict=True), start=1)
    ]
    header = ["sample", "step", "cycle", "chain", "energy (nats)", "log weight", "weight"]
    label = "Samples in the order of drawing; energies are mini-batch estimates"
    return Table(header, rows, label, folded=f"All {len(rows)} samples" if len(rows) > SHORT_TABLE else "")


def weights(records: list[SampleRecord]) -> dict[str, Any] | None:
    """Return the weights' efficiency as facts with a note, or one sentence."""
    if not records:
        return None
    if equal_weights(records):
        return {"says": f"All {len(records)} samples have equal weight."}
    try:
        log_weights = comparable_log_weights(records)
        values, efficiency = normalised_weights(log_weights), weight_efficiency(log_weights)
    except ValueError as error:
        return {"says": f"The weights cannot be used: {error}."}
    facts = [
        ("Weight efficiency", f"{efficiency:.3g} ({efficiency * len(records):.1f} of {len(records)} samples)"),
        ("Largest weight", float(values.max())),
        ("Smallest weight", float(values.min())),
    ]
    note = "The weight efficiency is (Σw)²/(S·Σw²) of S samples: it ignores their correlation."
    if not all(record.comparable for record in records):
        note += " Each chain learned its own π, so weights are normalised within each chain, and chains count alike."
    return {"says": "", "facts": facts, "note": note}


def equal_weights(records: list[SampleRecord]) -> bool:
    """Return whether the samples, at least one, all have equal weight."""
    return len({r.log_weight for r in records}) == 1 and math.isfinite(records[0].log_weight) and records[0].comparable


# -- chains -----------------------------------------------------------------------------------------------------------


@dataclass
class ChainTables:
    """R-hat and effective sample sizes of a run's samples across its chains, and warnings about them."""

    tables: list[Table] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)


def chains(run: RunRecord, parameters: Sequence[str] | None) -> ChainTables:
    """Return the diagnostics of the energies, and of the parameters chosen by names or shell patterns."""
    found, records = ChainTables(), run.records
    if not records:
        return found
    grid = ChainGrid.of_chains([record.chain for record in records])
    quantities = {"energy": grid.arrange([r.energy for r in records])[..., None]}
    quantities |= _parameters(run, grid, parameters, found.attention)
    rows = [_diagnosed(name, draws, grid, found.attention) for name, draws in quantities.items()]
    per_chain = Counter(r.chain for r in records)
    if len(per_chain) > 1:
        each = [
            [str(c), len(own), float(np.mean(own)), float(np.std(own, ddof=1)) if len(own) > 1 else None]
            for c in sorted(per_chain)
            if (own := [r.energy for r in records if r.chain == c])
        ]
        header = ["chain", "samples", "mean energy (nats)", "standard deviation"]
        found.tables.append(Table(header, each, "Energies of each chain's samples"))
    label = f"{len(per_chain)} chains" if len(per_chain) > 1 else "One chain"
    notes = ["Rank-normalised, for the samples in the order of drawing, ignoring their weights."]
    if len(per_chain) == 1:
        notes.append(
            "With one chain, R-hat compares its halves: it detects a drift, but not that another chain would find "
            "another mode. Run several chains to detect that."
        )
    if grid.dropped:
        notes.append(f"The oldest {grid.dropped} samples of the longer chains are dropped.")
    notes.append("Energies are mini-batch estimates, whose noise hides small differences between chains.")
    header = ["quantity", "split R-hat", "bulk ESS", "tail ESS"]
    found.tables.append(Table(header, rows, f"{label} of {grid.draws} draws", note=" ".join(notes)))
    return found


def _parameters(
    run: RunRecord, grid: ChainGrid, patterns: Sequence[str] | None, attention: list[str]
) -> dict[str, np.ndarray]:
    """Return the draws of parameters, shape (chain, draw, element), by name."""
    store = run.store
    if store is None:
        if patterns is not None:
            raise RunError(f"{run.folder} holds no samples, so it has no parameters to diagnose")
        return {}
    try:
        names = choose_parameters(store.shapes(0), patterns, max_elements=1)
    except ValueError as error:
        if patterns is not None:
            raise RunError(str(error)) from None
        names = []
        attention.append(f"Parameters are omitted: {error}.")
    try:
        drawn = parameter_draws(store, grid, names)
    except ValueError as error:
        drawn = {}
        attention.append(f"Parameters are omitted: {error}.")
    return {name: draws.reshape(*grid.positions.shape, -1) for name, draws in drawn.items()}


def _diagnosed(name: str, draws: np.ndarray, grid: ChainGrid, attention: list[str]) -> list[Any]:
    """Return the row of a quantity, the worst over its elements; a disagreement of the chains is added to attention."""
    count = draws.shape[-1]
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_ELEMENTS)).round().astype(int))
    each = [chain_diagnostics(draws[..., i]) for i in chosen]
    rhat = _worst(max, [d.rhat for d in each])
    bulk, tail = _worst(min, [d.ess_bulk for d in each]), _worst(min, [d.ess_tail for d in each])
    time = correlation_time(draws[..., chosen])
    limit = rhat_limit(len(grid.chains), grid.draws, FALSE_ALARM_RATE / len(chosen), time)
    suspect = math.isfinite(rhat) and rhat > limit
    if suspect and len(grid.chains) > 1:
        attention.append(
            f"The chains disagree on {name}: R-hat is {rhat:.2f}, but should be below {limit:.2f}. Run them longer, or "
            "treat their samples as separate modes."
        )
    several = f" (the worst of {len(chosen)} elements)" if count > 1 else ""
    shown = Cell(f"{rhat:.3f}", "bad") if suspect else _or_few(rhat, ".3f")
    return [name + several, shown, _or_few(bulk, ".0f"), _or_few(tail, ".0f")]


def _worst(pick: Callable[[list[float]], float], values: list[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return pick(finite) if finite else math.nan


def _or_few(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "not available"


# -- temperatures -----------------------------------------------------------------------------------------------------


def tensors(health: HealthReport | None) -> dict[str, Any] | None:
    """Return the measured temperatures and energies as facts and a table; None without measurements."""
    if health is None or not health.tensors:
        return None
    total = {} if health.total is None else {ALL_TENSORS: health.total}
    rows = [
        [
            name,
            entry.numel,
            _temperature(entry, "kinetic", health.temperature),
            _temperature(entry, "configurational", health.temperature),
            health.gradient_noise_share.get(name),
        ]
        for name, entry in {**total, **health.tensors}.items()
    ]
    table = Table(
        ["tensor", "elements", "kinetic temperature", "configurational temperature", "share of gradient noise"],
        rows,
        f"Measured temperatures at step {number(health.step)}",
        note=f"Intervals are in brackets; a temperature is marked if its whole interval is over {TOLERANCE:.0%} off "
        "the target.",
        folded=f"All {len(rows)} tensors" if len(rows) > FOLD_ABOVE else "",
    )
    return {"facts": _measured(health), "table": table}


def _measured(health: HealthReport) -> list[tuple[str, Any]]:
    energy, run = health.energy, health.run
    return [
        ("The samples are", None if health.kind is None else f"{with_article(health.kind)}: {health.reason}"),
        ("Target temperature", health.temperature if is_finite(health.temperature) else None),
        ("Mean energy", energy.mean),
        ("Its standard deviation", energy.std),
        ("Expected energy", None if energy.expected is None else _brackets(energy.expected)),
        ("Thermal energy τ·d/2 of the target (nats)", run.heat),
        ("Mean NLL per example, training data", run.nll),
        ("The same of a guess", run.chance_nll),
        ("Relaxation times of a sampling stage", run.relaxation_times),
        ("‖θ‖²/(d·σ²), τ at equilibrium", run.prior_norm),
        ("Split R-hat of predictions", run.rhat),
        ("Bulk ESS of predictions", run.ess),
    ]


def _temperature(entry: Temperatures, kind: TemperatureKind, target: float) -> Cell | str | None:
    value, interval = entry.measured(kind)
    if value is None:
        return None
    if interval is None:
        return NOT_MEASURABLE
    low, high = interval
    is_off = low > target * (1 + TOLERANCE) or high < target * (1 - TOLERANCE)
    return Cell(f"{number(value)} {_brackets(interval)}", "bad" if is_off else "")


def _brackets(interval: Interval) -> str:
    return f"[{number(interval[0])}, {number(interval[1])}]"
