"""`sgmcmc report RUN`: one self-contained HTML page of a finished run."""

import argparse
import io
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_sgmcmc import figures, html_page
from lightning_sgmcmc.diagnostics import effective_sample_size, normalised_weights
from lightning_sgmcmc.html_page import Cell, bullets, folded, number, paragraph, picture, table
from lightning_sgmcmc.inference_data import ChainGrid, chain_diagnostics, choose_parameters, parameter_draws
from lightning_sgmcmc.run_record import RunError, RunRecord, find_run, read_run
from lightning_sgmcmc.store import SampleRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = {"single": "mean single sample", "bma": "model average"}
HIGHER_IS_BETTER = ("accuracy", "auroc", "log_likelihood")
LOWER_IS_BETTER = ("nll", "brier", "ece", "rmse", "mae", "error")
CAPTIONS = {
    "energy": "Mini-batch estimates of the potential energy along the run; the samples are marked.",
    "sample_energy": "Energies of the samples, by chain.",
    "schedule": "Step size and temperature along the run; the samples are marked.",
    "trace": "Traces along the chains.",
    "running": "The running model average against the number of samples, beside the single samples.",
    "reliability": "Reliability of the model average: accuracy against confidence, and the share of the data.",
    "weight": "Weights of the samples.",
    "ood": "Predictions on data from another distribution.",
}
"""By the beginning of a picture's name, in the order of the page; other pictures follow, by name."""
MIXED = 1.05
"""R-hat above this is called to attention."""
SHORT_TABLE = 12
"""Longer tables of samples are folded."""
MOST_ELEMENTS = 100
"""Of a larger parameter only so many elements, evenly spread, are diagnosed."""


def write_report(run: str | Path, output: str | Path | None = None, parameters: Sequence[str] | None = None) -> Path:
    """Write the report of a run.

    Args:
        run: the run's folder, or one that holds runs, of which the newest is taken.
        output: the file; None is `report.html` in the run's folder.
        parameters: names, or shell patterns of them, of parameters whose chains are diagnosed; None takes the scalar
            ones.

    Returns:
        the file.

    Raises:
        RunError: if there is no run, a file of it is damaged, or a pattern fits no parameter.
        OSError: if the file cannot be written.
    """
    folder, _ = find_run(run)
    record = read_run(folder)
    path = Path(output) if output is not None else folder / "report.html"
    path.write_text(render(record, parameters), encoding="utf-8")
    return path


def render(run: RunRecord, parameters: Sequence[str] | None = None) -> str:
    """Return the report's HTML."""
    chains = _Chains(run, parameters)
    sections = [
        ("Health", _verdict(run, chains)),
        ("Run", _facts(run)),
        ("Results", _results(run)),
        ("Samples", _samples(run)),
        ("Weights", _weights(run.records)),
        ("Chains", chains.html()),
        ("Pictures", _pictures(run)),
        ("Health of each tensor", _tensors(run.health or {})),
        ("Configuration", _configuration(run)),
    ]
    title = str(run.results.get("recipe") or run.name)
    stage = {"val": "validation data", "test": "test data"}.get(str(run.results.get("stage")))
    subtitle = f"{run.name}{f', evaluated on the {stage}' if stage else ''}"
    return html_page.page(title, subtitle, sections)


# -- what is found -----------------------------------------------------------------------------------------------------


def _verdict(run: RunRecord, chains: "_Chains") -> str:
    health = run.health or {}
    verdict = str(health.get("verdict", "unknown"))
    if run.health is None:
        says = "Not recorded: the run had no ChainHealth callback."
    elif verdict == "unknown":
        says = "Unknown: the temperatures could not be measured."
    else:
        says = {"ok": "Healthy: the measured temperatures are the target's.", "warning": "Look at this first."}.get(
            verdict, verdict
        )
    advice = health.get("advice", [])
    attention = [
        *health.get("warnings", []),
        *([advice] if isinstance(advice, str) else [str(a) for a in advice]),
        *_attention(run),
        *chains.attention,
    ]
    kind = "bad" if attention or verdict == "warning" else "good" if verdict == "ok" else ""
    return f'<div class="verdict {kind}">{paragraph(says)}{bullets(attention)}</div>'


def _attention(run: RunRecord) -> list[str]:
    found = []
    if not run.records:
        found.append("No posterior samples were found in the run's folder.")
    odd = sum(not math.isfinite(r.energy) for r in run.records)
    if odd:
        found.append(f"{odd} of the {len(run.records)} samples have an energy that is not finite: the chain diverged.")
    bad = [f"{row['metric']} ({row['method']})" for row in run.rows if not _finite(row["value"])]
    if bad:
        found.append(f"Results without a finite value: {', '.join(bad)}.")
    if run.records and not _equal_weights(run.records):
        try:
            worth = effective_sample_size(_log_weights(run.records))
            if worth < len(run.records) / 2:
                found.append(
                    f"The weights are concentrated: {len(run.records)} samples are worth {worth:.1f} of equal weight."
                )
        except ValueError as error:
            found.append(f"The weights cannot be used: {error}.")
    if run.damaged:
        found.append(f"Damaged pictures are left out: {', '.join(run.damaged)}.")
    return found


def _facts(run: RunRecord) -> str:
    results, records = run.results, run.records
    known = {name: results.get(name) for name in ("recipe", "scale", "seed")}
    steps = max([*run.steps, *(r.step for r in records)], default=None)
    pairs: list[tuple[str, Any]] = [
        ("Recipe", known["recipe"]),
        ("Scale", known["scale"]),
        ("Seed", None if known["seed"] is None else str(known["seed"])),
        ("Duration", _duration(results.get("seconds"))),
        ("Optimizer steps", steps),
        ("Samples", len(records)),
        ("Chains", len({r.chain for r in records}) or None),
        ("Cycles", len({r.cycle for r in records}) or None),
        *((name.replace("_", " ").capitalize(), value) for name, value in _hyperparameters(run).items()),
        ("Finished", time.strftime("%Y-%m-%d %H:%M", time.localtime(_finished(run)))),
    ]
    return html_page.facts(pairs)


def _hyperparameters(run: RunRecord) -> dict[str, str]:
    """Return what `hparams.yaml` says in plain values."""
    import yaml

    try:
        content = yaml.safe_load(run.texts.get("hparams.yaml", ""))
    except yaml.YAMLError:
        return {}
    plain = content if isinstance(content, dict) else {}
    return {str(k): str(v) for k, v in plain.items() if isinstance(v, int | float | str) and len(str(v)) < 80}


def _finished(run: RunRecord) -> float:
    marks = [run.folder / name for name in ("results.json", "history.json", "health.json", "samples/manifest.jsonl")]
    return max((m.stat().st_mtime for m in marks if m.is_file()), default=run.folder.stat().st_mtime)


def _duration(seconds: Any) -> str | None:
    if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds <= 0:
        return None  # 0 is a run that only evaluated
    minutes, rest = divmod(float(seconds), 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest:.0f} s" if minutes else f"{rest:.1f} s"


# -- results -----------------------------------------------------------------------------------------------------------


def _results(run: RunRecord) -> str:
    if not run.rows:
        text = run.texts.get("table.md")
        return html_page.preformatted(text) if text else ""
    by_place = {(str(row["method"]), str(row["metric"])): row for row in run.rows}
    methods, metrics = (list(dict.fromkeys(names)) for names in zip(*by_place, strict=True))
    if any(_finite(row.get("paper")) for row in run.rows):
        return _beside_the_paper(by_place, methods, metrics)
    if set(methods) == set(METHODS):
        rows = []
        for metric in metrics:
            single, bma = by_place.get(("single", metric), {}), by_place.get(("bma", metric), {})
            rows.append([metric, _with_error(single), _with_error(bma), _change(metric, single, bma)])
        note = "The number behind ± is the standard deviation over the samples. " if _has_errors(run.rows) else ""
        return table(
            ["metric", "mean single sample", "model average", "change"], rows, "Single samples and their average"
        ) + paragraph(f"{note}Change is the average's value less the single samples'.", "note")
    if len(metrics) > len(methods):
        rows = [[m, *(_with_error(by_place.get((method, m), {})) for method in methods)] for m in metrics]
        return table(["metric", *(METHODS.get(m, m) for m in methods)], rows, "Results")
    rows = [[METHODS.get(m, m), *(_with_error(by_place.get((m, metric), {})) for metric in metrics)] for m in methods]
    return table(["method", *metrics], rows, "Results")


def _beside_the_paper(by_place: dict[tuple[str, str], dict[str, Any]], methods: list[str], metrics: list[str]) -> str:
    """Return the table with the paper's figures beside ours, for the metrics that the paper has."""
    header, groups, rows = ["method"], [("", 1)], [[METHODS.get(m, m)] for m in methods]
    for metric in metrics:
        known = any(_finite(by_place.get((m, metric), {}).get("paper")) for m in methods)
        header += ["ours", "paper"] if known else ["ours"]
        groups.append((metric, 2 if known else 1))
        for row, method in zip(rows, methods, strict=True):
            found = by_place.get((method, metric), {})
            row.append(_with_error(found))
            if known:
                row.append(_with_error(found, "paper"))
    return table(header, rows, "Results, beside the paper's", groups)


def _with_error(row: dict[str, Any], name: str = "value") -> str:
    value, error = row.get(name), row.get("error" if name == "value" else f"{name}_error")
    if value is None:
        return number(None)
    return number(float(value)) + (f" ± {number(float(error))}" if error is not None else "")


def _has_errors(rows: list[dict[str, Any]]) -> bool:
    return any(row.get("error") is not None for row in rows)


def _change(metric: str, single: dict[str, Any], bma: dict[str, Any]) -> Any:
    if not (_finite(single.get("value")) and _finite(bma.get("value"))):
        return None
    change = float(bma["value"]) - float(single["value"])
    text = f"{change:+.4f}".replace("-", "−")
    direction = 1 if metric.endswith(HIGHER_IS_BETTER) else -1 if metric.endswith(LOWER_IS_BETTER) else 0
    if direction == 0 or abs(change) < 5e-5:
        return text
    return Cell(f"{text} better", "good") if change * direction > 0 else Cell(f"{text} worse", "bad")


# -- samples -----------------------------------------------------------------------------------------------------------


def _samples(run: RunRecord) -> str:
    records = run.records
    if not records:
        return ""
    try:
        shares: list[float | None] = list(normalised_weights(_log_weights(records)).tolist())
    except ValueError:
        shares = [None] * len(records)
    rows = [
        [i + 1, r.step, r.cycle + 1, r.chain, r.energy, r.log_weight, share]
        for i, (r, share) in enumerate(zip(records, shares, strict=True))
    ]
    header = ["sample", "step", "cycle", "chain", "energy (nats)", "log weight", "weight"]
    content = table(header, rows, "Samples in the order of drawing; energies are mini-batch estimates")
    return content if len(rows) <= SHORT_TABLE else folded(f"All {len(rows)} samples", content)


def _weights(records: list[SampleRecord]) -> str:
    if not records:
        return ""
    if _equal_weights(records):
        return paragraph(f"All {len(records)} samples weigh the same.")
    try:
        weights, worth = normalised_weights(_log_weights(records)), effective_sample_size(_log_weights(records))
    except ValueError as error:
        return paragraph(f"The weights cannot be used: {error}.")
    facts = [
        ("Effective sample size of the weights", f"{worth:.1f} of {len(records)}"),
        ("Largest weight", float(weights.max())),
        ("Smallest weight", float(weights.min())),
    ]
    note = "The effective sample size here is (Σw)²/Σw²: it knows nothing of autocorrelation."
    return html_page.facts(facts) + paragraph(note, "note")


def _log_weights(records: list[SampleRecord]) -> torch.Tensor:
    return torch.tensor([r.log_weight for r in records], dtype=torch.float64)


def _equal_weights(records: list[SampleRecord]) -> bool:
    return len({r.log_weight for r in records}) == 1 and math.isfinite(records[0].log_weight)


@dataclass
class _Quantity:
    name: str
    draws: np.ndarray
    """Shape (chain, draw, element)."""


class _Chains:
    """Diagnostics across chains, and what in them wants attention."""

    def __init__(self, run: RunRecord, parameters: Sequence[str] | None) -> None:
        self.records = run.records
        self.attention: list[str] = []
        self._rows: list[list[Any]] = []
        self._missing = ""
        if not self.records:
            return
        self._grid = ChainGrid.of(self.records)
        try:
            for quantity in self._quantities(run, parameters):
                self._diagnose(quantity)
        except ImportError as error:
            self._missing = f"R-hat and effective sample sizes are left out: {error}."

    def _quantities(self, run: RunRecord, parameters: Sequence[str] | None) -> list[_Quantity]:
        grid, store = self._grid, run.store
        found = [_Quantity("energy", grid.arrange([r.energy for r in self.records])[..., None])]
        if store is None:
            if parameters is not None:
                raise RunError(f"{run.folder} holds no samples, so there are no parameters to diagnose")
            return found
        try:
            names = choose_parameters(store.shapes(0), parameters, max_elements=1)
        except ValueError as error:
            if parameters is not None:
                raise RunError(str(error)) from None
            names = []
            self.attention.append(f"Parameters are left out: {error}.")
        try:
            drawn = parameter_draws(store, grid, names)
        except ValueError as error:
            drawn = {}
            self.attention.append(f"Parameters are left out: {error}.")
        return found + [_Quantity(name, draws.reshape(*grid.positions.shape, -1)) for name, draws in drawn.items()]

    def _diagnose(self, quantity: _Quantity) -> None:
        count = quantity.draws.shape[-1]
        chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_ELEMENTS)).round().astype(int))
        each = [chain_diagnostics(quantity.draws[..., i]) for i in chosen]
        rhat = _worst(max, [d.rhat for d in each])
        bulk, tail = _worst(min, [d.ess_bulk for d in each]), _worst(min, [d.ess_tail for d in each])
        several = f" (the worst of {len(chosen)} elements)" if count > 1 else ""
        suspect = math.isfinite(rhat) and rhat > MIXED
        row: list[Any] = [quantity.name + several, Cell(f"{rhat:.3f}", "bad") if suspect else _or_few(rhat, ".3f")]
        self._rows.append([*row, _or_few(bulk, ".0f"), _or_few(tail, ".0f")])
        if suspect and len(self._grid.chains) > 1:
            self.attention.append(
                f"The chains disagree on {quantity.name}: R-hat is {rhat:.2f}, and should be below {MIXED}. Run them "
                "longer, or take their samples as those of separate modes."
            )

    def html(self) -> str:
        if not self.records:
            return ""
        per_chain = Counter(r.chain for r in self.records)
        several = len(per_chain) > 1
        parts = []
        if several:
            rows = [
                [str(c), n, *_mean_and_std([r.energy for r in self.records if r.chain == c])]
                for c, n in sorted(per_chain.items())
            ]
            header = ["chain", "samples", "mean energy (nats)", "standard deviation"]
            parts.append(table(header, rows, "Energies of each chain's samples"))
        if self._missing:
            return "".join([*parts, paragraph(self._missing)])
        header = ["quantity", "split R-hat", "bulk ESS", "tail ESS"]
        label = (
            f"{len(per_chain)} chains of {self._grid.draws} draws"
            if several
            else f"One chain of {self._grid.draws} draws"
        )
        parts.append(table(header, self._rows, label))
        notes = ["Rank-normalised, of the samples in the order of drawing and without their weights."]
        if not several:
            notes.append(
                "With one chain, R-hat takes its halves for two chains: it sees a drift, but not that another chain "
                "would have gone elsewhere. Run several chains to know more."
            )
        if self._grid.dropped:
            notes.append(f"The oldest {self._grid.dropped} samples of the longer chains are left out.")
        notes.append("Energies are mini-batch estimates, whose noise hides small differences between chains.")
        return "".join([*parts, paragraph(" ".join(notes), "note")])


def _worst(pick: Callable[[list[float]], float], values: list[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return pick(finite) if finite else math.nan


def _or_few(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "not to be had"


def _mean_and_std(values: list[float]) -> tuple[float, float | None]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


# -- pictures, health, configuration -----------------------------------------------------------------------------------


def _pictures(run: RunRecord) -> str:
    pictures = {**_drawn(run), **run.pictures}
    order = list(CAPTIONS)

    def place(name: str) -> tuple[int, str]:
        return next((i for i, start in enumerate(order) if name.startswith(start)), len(order)), name

    shown = []
    for name in sorted(pictures, key=place):
        words = name.replace("_", " ")
        index = place(name)[0]
        caption = f"{words[:1].upper()}{words[1:]}. {CAPTIONS[order[index]] if index < len(order) else ''}".strip()
        shown.append(picture(pictures[name], caption, f"Picture of the run: {words}"))
    return f'<div class="pictures">{"".join(shown)}</div>' if shown else ""


def _drawn(run: RunRecord) -> dict[str, bytes]:
    """Draw what the run did not draw itself."""
    drawn: dict[str, Figure] = {}
    steps, scalars = run.steps, run.scalars
    sample_steps, sample_energy = [r.step for r in run.records], [r.energy for r in run.records]
    if steps and "sampler/energy" in scalars:
        drawn["energy"] = figures.energy_figure(steps, scalars["sampler/energy"], sample_steps, sample_energy)
    if steps and {"sampler/lr", "sampler/temperature"} <= scalars.keys():
        lr, temperature = scalars["sampler/lr"], scalars["sampler/temperature"]
        drawn["schedule"] = figures.schedule_figure(steps, lr, temperature, sorted(set(sample_steps)))
    chains = sorted({r.chain for r in run.records})
    if len(chains) > 1 or (run.records and "energy" not in {*drawn, *run.pictures}):
        by_chain = {c: [r for r in run.records if r.chain == c] for c in chains}
        drawn["sample_energy"] = figures.sample_energy_figure(
            {c: ([r.step for r in of], [r.energy for r in of]) for c, of in by_chain.items()}
        )
    return {name: _png(figure) for name, figure in drawn.items() if name not in run.pictures}


def _png(figure: "Figure") -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _tensors(health: dict[str, Any]) -> str:
    tensors: dict[str, dict[str, Any]] = health.get("tensors", {})
    if not tensors:
        return ""
    target, shares = health.get("temperature"), health.get("gradient_noise_share") or {}
    rows = [
        [
            name,
            values.get("numel"),
            _temperature(values, "kinetic", target),
            _temperature(values, "configurational", target),
            shares.get(name),
        ]
        for name, values in tensors.items()
    ]
    header = ["tensor", "elements", "kinetic temperature", "configurational temperature", "share of gradient noise"]
    content = table(header, rows, f"Measured temperatures at step {number(health.get('step'))}")
    energy = health.get("energy") or {}
    expected = energy.get("expected")
    facts = html_page.facts(
        [
            ("Target temperature", target),
            ("Mean energy", energy.get("mean")),
            ("Its standard deviation", energy.get("std")),
            ("Expected energy", _interval(expected) if _is_interval(expected) else None),
        ]
    )
    note = "In brackets the interval in which a right chain's temperature lies; marked where the measured one is not."
    return (
        facts + (content if len(rows) <= 40 else folded(f"All {len(rows)} tensors", content)) + paragraph(note, "note")
    )


def _temperature(values: dict[str, Any], name: str, target: Any) -> Any:
    value, interval = values.get(name), values.get(f"{name}_interval")
    if not _finite(value):
        return None
    if not _is_interval(interval):
        return number(value)
    text = f"{number(value)} {_interval(interval)}"
    low, high = interval
    outside = not low <= value <= high or (_finite(target) and not low <= target <= high)
    return Cell(text, "bad") if outside else text


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_finite, value))


def _interval(value: list[float]) -> str:
    return f"[{number(value[0])}, {number(value[1])}]"


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _configuration(run: RunRecord) -> str:
    texts = {name: text for name, text in run.texts.items() if name.endswith(".yaml") and text.strip()}
    return "".join(folded(name, html_page.preformatted(text)) for name, text in texts.items())


# -- the command -------------------------------------------------------------------------------------------------------


def main(args: Sequence[str]) -> None:
    """Run `sgmcmc report`; mistakes are one sentence and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="sgmcmc report", description="Write one self-contained HTML page of a finished run: tables and pictures."
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, or a folder of runs (the newest is taken)")
    parser.add_argument(
        "--output", metavar="FILE", help="where the page goes (default: report.html in the run's folder)"
    )
    parser.add_argument(
        "--parameters",
        metavar="NAME",
        nargs="+",
        help="parameters whose R-hat and ESS are reported: names or shell patterns (default: those of one element)",
    )
    options = parser.parse_args(args)
    try:
        folder, among = find_run(options.run)
        if among > 1:
            print(f"{options.run} holds {among} runs; this is the newest: {folder}")
        print(f"Report: {write_report(folder, options.output, options.parameters)}")
    except (RunError, OSError) as error:
        parser.exit(2, f"sgmcmc report: {error}\n")
