"""The tables of a report: results, samples and their weights, chains, temperatures of each tensor."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from lightning_sgmcmc.figures.canvas import METRIC_LABELS
from lightning_sgmcmc.fit.results import BASELINES, METHODS, STAGE_NAMES, StoredEvaluation
from lightning_sgmcmc.health.assessment import ALL_TENSORS
from lightning_sgmcmc.health.report import POSTERIOR, HealthReport, Interval, TemperatureKind, Temperatures
from lightning_sgmcmc.planning.plan import with_article
from lightning_sgmcmc.posterior.export import choose_parameters, parameter_draws
from lightning_sgmcmc.report.compare import NAMES, difference_text, interval_of, paired_difference
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
SEVERAL_SCALES = "the prior's scale changed during the run, so they have several constants"
FOLD_ABOVE = 40
"""A table of tensors with more rows is folded."""

ELSEWHERE = ("weight_efficiency", "best_single")
"""Results that the table leaves out: weights have a part of their own, and the best sample is chosen by the data."""
COLUMNS = {"accuracy": ("error", -1, 1), "rmse": ("square_error", 1, 0)}
"""The results for each datum that a metric is a mean of, with a factor and a constant, if not of its own name."""

ORDER = ("bma", "single", "first_cycle", *BASELINES, "guessing")
"""Columns of the table of a run: on a narrow screen the first ones are seen."""

Found = dict[tuple[str, str], ResultRow]
"""Rows of results by method and metric."""
Evaluations = Mapping[str, StoredEvaluation]
"""Results for each datum, of the run by "" and of its baselines by their names."""


# -- results ----------------------------------------------------------------------------------------------------------


def results(run: RunRecord) -> list[Table]:
    """Return the table of `results.json`, with intervals where the folder has the results for each datum."""
    if not run.rows:
        return []
    stage = STAGE_NAMES.get(str(run.results.get("stage")))
    title = f"Results on the {stage}" if stage else "Results"
    tables = [_results(run.rows, title, run.evaluations)]
    if len(run.evaluations) > 1:
        tables.append(_differences(run.evaluations))
    return tables


def other_results(run: RunRecord) -> list[Table]:
    """Return the tables of the run's other results, each folded."""
    tables = [_results(rows, f"Results {name}", {}) for name, rows in run.other_rows.items()]
    return [replace(table, folded=table.label) for table in tables]


def _results(rows_of_file: list[ResultRow], title: str, evaluations: Evaluations) -> Table:
    """Return a table of results: the metrics of each method, and the paper's if it names them."""
    shown = [row for row in rows_of_file if row.metric not in ELSEWHERE and row.method not in ELSEWHERE]
    found: Found = {(str(row.method), str(row.metric)): row for row in shown or rows_of_file}
    methods, metrics = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    if any(is_finite(row.paper) for row in rows_of_file):
        return _with_the_paper(found, methods, metrics)
    if {"single", "bma"} <= set(methods) <= {*METHODS, *BASELINES}:
        return _averages(found, methods, metrics, title, evaluations)
    if len(metrics) > len(methods):
        rows = [[_metric(m), *(_with_error(found.get((method, m))) for method in methods)] for m in metrics]
        return Table(["metric", *(METHODS.get(m, m) for m in methods)], rows, title)
    rows = [[METHODS.get(m, m), *(_with_error(found.get((m, metric))) for metric in metrics)] for m in methods]
    return Table(["method", *map(_metric, metrics)], rows, title)


def _averages(found: Found, methods: list[str], metrics: list[str], title: str, evaluations: Evaluations) -> Table:
    """Return the table of guessing, single samples, their average and the baselines."""
    methods = sorted(methods, key=[*ORDER, *methods].index)
    rows, has_change = [], not set(methods) & set(BASELINES)  # whose differences have a table of their own
    for metric in metrics:
        cells = [_with_interval(found.get((method, metric)), metric, evaluations) for method in methods]
        change = _change(metric, found.get(("single", metric)), found.get(("bma", metric)))
        rows.append([_metric(metric), *cells, *([change] if has_change else [])])
    note = ""
    if any("[" in str(cell) for row in rows for cell in row):
        note += "In brackets: 95 % bootstrap intervals over the data. "
    if any(row.error is not None for row in found.values()):
        note += "The number after ± is the standard deviation over the samples. "
    if "guessing" in methods:
        note += "Guessing is the best prediction that does not look at the inputs. "
    note += "Change is the model average minus the mean single sample." if has_change else ""
    header = ["metric", *((METHODS | BASELINES)[method] for method in methods), *(["change"] if has_change else [])]
    return Table(header, rows, title, note=note.strip())


def _metric(name: str) -> str:
    return METRIC_LABELS.get(name, name)


def _with_interval(row: ResultRow | None, metric: str, evaluations: Evaluations) -> str:
    """Return a result with its interval over the data, if the folder has what it is the mean of."""
    text = _with_error(row)
    own = None if row is None else evaluations.get("" if row.method == "bma" else str(row.method))
    name, sign, shift = COLUMNS.get(metric, (metric, 1, 0))
    if row is None or own is None or not is_finite(row.value) or name not in own.columns:
        return text
    found = interval_of(own, name)
    value, *ends = (shift + sign * part for part in (found.value, found.low, found.high))
    if abs(value - float(row.value)) > 1e-3 * max(abs(value), 0.01):  # in other units, or of other data
        return text
    return f"{text} {_brackets((min(ends), max(ends)))}"


def _differences(evaluations: Evaluations) -> Table:
    """Return the paired differences of the baselines from the model average."""
    average = evaluations[""]
    others = {name: one for name, one in evaluations.items() if name}
    columns = [name for name in NAMES if all(name in one.columns for one in evaluations.values())]
    rows = []
    for name, other in others.items():
        changes = [paired_difference(other, average, column) for column in columns]
        rows.append([BASELINES[name], *map(difference_text, changes)])
    return Table(
        ["minus the model average", *(NAMES[column] for column in columns)],
        rows,
        "Baselines at equal cost, compared with the model average",
        note="Above 0 the model average is better. In brackets: 95 % paired bootstrap intervals over the data, of "
        "these networks and not of other seeds; a star marks those without 0.",
    )


def _with_the_paper(found: Found, methods: list[str], metrics: list[str]) -> Table:
    """Return the table of the paper's numbers and ours, for the metrics in the paper."""
    header, groups, rows = ["method"], [("", 1)], [[METHODS.get(m, m)] for m in methods]
    for metric in metrics:
        of_metric = [found.get((method, metric)) for method in methods]
        known = any(row is not None and is_finite(row.paper) for row in of_metric)
        header += ["ours", "paper"] if known else ["ours"]
        groups.append((_metric(metric), 2 if known else 1))
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


def samples(records: list[SampleRecord], is_comparable: bool = True) -> Table | None:
    """Return the table of samples, folded if it is long; energies only where they have one constant."""
    if not records:
        return None
    try:
        shares: list[float | None] = list(normalised_weights(comparable_log_weights(records)).tolist())
    except ValueError:
        shares = [None] * len(records)
    rows = [
        [place, r.step, r.cycle + 1, r.chain, *([r.energy] if is_comparable else []), r.log_weight, share]
        for place, (r, share) in enumerate(zip(records, shares, strict=True), start=1)
    ]
    header = ["sample", "step", "cycle", "chain", "energy (nats)", "log weight", "weight"]
    label = "Samples in the order of drawing; energies are mini-batch estimates"
    if not is_comparable:
        header.remove("energy (nats)")
        label = f"Samples in the order of drawing, without their energies: {SEVERAL_SCALES}"
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
    has_energies = not run.has_several_scales
    quantities = {"energy": grid.arrange([r.energy for r in records])[..., None]} if has_energies else {}
    quantities |= _parameters(run, grid, parameters, found.attention)
    rows = [_diagnosed(name, draws, grid, found.attention) for name, draws in quantities.items()]
    rows += _of_predictions(run.health)
    if not rows:
        return found
    per_chain = Counter(r.chain for r in records)
    if len(per_chain) > 1 and has_energies:
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
    if has_energies:
        notes.append("Energies are mini-batch estimates, whose noise hides small differences between chains.")
    else:
        notes.append(f"Energies are left out: {SEVERAL_SCALES}.")
    header = ["quantity", "split R-hat", "bulk ESS", "tail ESS"]
    found.tables.append(Table(header, rows, f"{label} of {grid.draws} samples", note=" ".join(notes)))
    return found


def _of_predictions(health: HealthReport | None) -> list[list[Any]]:
    """Return the row of the predictions' diagnostics, if the run's callback measured them."""
    if health is None or health.run.rhat is None or health.run.ess is None:
        return []
    return [["predictions (the worst of the data)", f"{health.run.rhat:.3f}", f"{health.run.ess:.0f}", None]]


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


def tensors(health: HealthReport | None, is_comparable: bool = True) -> dict[str, Any] | None:
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
        f"the target. “{NOT_MEASURABLE.capitalize()}”: too few independent measurements for an interval.",
        folded=f"All {len(rows)} tensors" if len(rows) > FOLD_ABOVE else "",
    )
    return {"facts": _measured(health, is_comparable), "table": table}


def _measured(health: HealthReport, is_comparable: bool) -> list[tuple[str, Any]]:
    energy, run = health.energy, health.run
    energies = [
        ("Mean energy", energy.mean),
        ("Its standard deviation", energy.std),
        ("Expected energy", None if energy.expected is None else _brackets(energy.expected)),
    ]
    return [
        ("The samples are", _called(health)),
        ("Target temperature", health.temperature if is_finite(health.temperature) else None),
        *(energies if is_comparable else []),
        ("Thermal energy τ·d/2 of the target (nats)", run.heat),
        ("Mean NLL per example, training data", run.nll),
        ("The same of a guess", run.chance_nll),
        ("Relaxation times of a sampling stage", run.relaxation_times),
        ("‖θ‖²/(d·σ²), τ at equilibrium", run.prior_norm),
    ]


def _called(health: HealthReport) -> str | None:
    if health.kind is None:
        return None
    if health.kind == POSTERIOR and health.warnings:
        return f"not shown to be {with_article(health.kind)}; {health.warnings[0]}"
    return f"{with_article(health.kind)}: {health.reason}"


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
