"""The report as a whole: five sentences, results, the verdict and four pictures; the rest is folded."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_sgmcmc.chains.samples import comparable_log_weights
from lightning_sgmcmc.diagnostics.draws import weight_efficiency
from lightning_sgmcmc.evaluation.sentences import NAMES as SENTENCES
from lightning_sgmcmc.files import is_regular, text_without_secrets, write_atomically
from lightning_sgmcmc.fit.results import OPTIMIZED, STAGE_NAMES, is_of_optimization
from lightning_sgmcmc.health.report import LEVELS, POSTERIOR, Advice, advise
from lightning_sgmcmc.planning.plan import with_article
from lightning_sgmcmc.report import html
from lightning_sgmcmc.report.html import Table, is_finite
from lightning_sgmcmc.report.pictures import pictures
from lightning_sgmcmc.report.run_record import CONFIG, RunRecord, find_run, read_run
from lightning_sgmcmc.report.tables import chains, equal_weights, other_results, results, samples, tensors, weights

VERSION = "version."
"""Prefix of the versions among a run's settings."""
OF_RUN = "run."
"""What the names of the run's settings begin with in `hparams.yaml`."""
ELSEWHERE = (VERSION, "plan.", "callbacks")
"""Prefixes of the settings that other parts of the page show."""
PLAIN_NAMES = {
    "lr": "Step size lr",
    "num_data": "Training data N",
    "num_parameters": "Parameters",
    "max_steps": None,
    "temperature": None,
    "num_chains": None,
    "seed": None,
    "schedule.temperature": None,
    "schedule.lr": None,
}
"""Labels of hyperparameters; None omits one, which the page says elsewhere."""
AS_USUAL = {"chain_start": "own", "sampled": "all", "order": "BatchOrder", "accumulate_grad_batches": "1"}
"""Settings that are left out where they have their default."""
CONCENTRATED = 10
"""Weights of a smaller effective sample size are a reason for attention."""
LONGEST_SETTINGS, LONGEST_TEXT = 2**16, 2_000
"""Characters of `hparams.yaml` that are read, and of a recorded text that are shown."""
MOST_SENTENCES = 20
"""Sentences of a plan's list that are shown."""

Facts = list[tuple[str, Any]]
"""Names and values; those that are None are left out."""


def write_report(run: str | Path, output: str | Path | None = None, parameters: Sequence[str] | None = None) -> Path:
    """Write the report of a run.

    Args:
        run: the run's folder, or one that contains runs, in which case the newest is used.
        output: the file; None uses `report.html` in the run's folder.
        parameters: names or shell patterns of parameters whose chains are diagnosed; None uses the scalar ones.

    Returns:
        the file.

    Raises:
        RunError: if there is no run, one of its files is damaged, or a pattern matches no parameter.
        OSError: if the file cannot be written.
    """
    folder, _ = find_run(run)
    record = read_run(folder)
    content = render(record, parameters).encode(errors="replace")
    path = folder / "report.html" if output is None else Path(output)
    if output is not None and path.exists() and not is_regular(path):
        path.write_bytes(content)  # a link or a pipe that the user names
    else:
        write_atomically(path, content, durable=False)  # replaces a link in the folder, not the file that it points to
    return path


def render(run: RunRecord, parameters: Sequence[str] | None = None) -> str:
    """Return the report's HTML."""
    of_chains = chains(run, parameters)
    stage = STAGE_NAMES.get(str(run.results.get("stage")))
    is_comparable = not run.has_several_scales
    return html.render(
        "report.html",
        title=str(run.results.get("recipe") or run.name),
        subtitle=f"{run.name}{f', evaluated on the {stage}' if stage else ''}",
        sentences=_sentences(run),
        verdict=_verdict(run, of_chains.attention),
        pictures=pictures(run),
        results={"text": None if run.rows else run.texts.get("table.md"), "tables": results(run)},
        other_results=other_results(run),
        facts=_facts(run),
        plan=_plan(run),
        samples=samples(run.records, is_comparable),
        weights=weights(run.records),
        chains=of_chains.tables,
        tensors=tensors(run.health, is_comparable),
        repeat=_repeat(run),
    )


def _sentences(run: RunRecord) -> list[str]:
    """Return the five sentences of `results.json`; none of a run without them."""
    found = run.results.get("sentences")
    return [text for name in SENTENCES if isinstance(text := found.get(name), str)] if isinstance(found, dict) else []


# -- health -----------------------------------------------------------------------------------------------------------


def _verdict(run: RunRecord, of_chains: list[str]) -> dict[str, Any]:
    """Return the verdict: that of the run's summary, whose data it knows, else that of its health report alone."""
    health, told, kind = run.health, run.results.get("verdict"), run.results.get("kind")
    is_optimized = is_of_optimization(run.results)
    kind = kind if isinstance(kind, str) else None if health is None else health.kind
    found = advise(health, kind, is_optimized)
    if isinstance(told, dict) and told.get("level") in LEVELS and isinstance(run.results.get("sentences"), dict):
        texts = [str(told.get(name) or "")[:LONGEST_TEXT] for name in ("verdict", "next")]
        found = Advice(told["level"], *texts)
    warnings, notes = ([], []) if health is None else (health.warnings, health.notes)
    attention = [*warnings, *_attention(run), *(of_chains if kind in (POSTERIOR, None) else [])]
    return {
        "kind": "bad" if attention else {"good": "good", "bad": "bad"}.get(found.level, ""),
        "says": found.verdict,
        "findings": [*attention, *notes],
        "advice": found.next,
    }


def _attention(run: RunRecord) -> list[str]:
    found = []
    if not run.records:
        found.append("No posterior samples were found in the run's folder.")
    if run.results.get("samples") == OPTIMIZED:
        found.append("The samples are states of an optimization (temperature 0), not samples of a posterior.")
    odd = sum(not math.isfinite(r.energy) for r in run.records)
    if odd:
        found.append(f"{odd} of the {len(run.records)} samples have an energy that is not finite: the chain diverged.")
    bad = [f"{row.metric} ({row.method})" for row in run.rows if not is_finite(row.value)]
    if bad:
        found.append(f"Results without a finite value: {', '.join(bad)}.")
    if run.records and not equal_weights(run.records):
        try:
            worth = weight_efficiency(comparable_log_weights(run.records)) * len(run.records)
            if worth < min(CONCENTRATED, len(run.records) / 2):
                found.append(
                    f"The weights are concentrated: the effective sample size of {len(run.records)} samples is "
                    f"{worth:.1f}."
                )
        except ValueError as error:
            found.append(f"The weights cannot be used: {error}.")
    if run.unread:
        found.append(f"Files are not read: {', '.join(run.unread)}.")
    if run.damaged:
        found.append(f"Damaged pictures are omitted: {', '.join(run.damaged)}.")
    return found


# -- the run and its plan ---------------------------------------------------------------------------------------------


def _facts(run: RunRecord) -> Facts:
    results, records = run.results, run.records
    seed, cycles = results.get("seed"), len({r.cycle for r in records})
    settings = {k: v for k, v in _settings(run).items() if AS_USUAL.get(k) != v}
    scale = _prior_scale(run)
    if scale is not None:
        settings = {k: v for k, v in settings.items() if k != "prior" and not k.startswith("schedule.prior_")}
    named = [(PLAIN_NAMES.get(k, _label(k)), v) for k, v in settings.items() if not k.startswith(ELSEWHERE)]
    planned, origin = (part if isinstance(part := results.get(name), dict) else {} for name in ("plan", "origin"))
    temperature = planned.get("temperature")
    return [
        ("Recipe", results.get("recipe")),
        ("Date", _text(origin.get("date"))),
        ("Seed", None if seed is None else str(seed)),
        ("Duration", _duration(results.get("seconds"))),
        ("Optimizer steps", max([*run.steps, *(r.step for r in records)], default=None)),
        ("Samples", len(records)),
        ("Samples are", results.get("samples")),
        ("Chains", len({r.chain for r in records}) or None),
        ("Cycles", cycles if cycles > 1 else None),
        ("Temperature τ", f"{temperature:g}" if is_finite(temperature) else settings.get("temperature")),
        ("Prior", scale),
        *((k, v) for k, v in named if k is not None and v != "None"),
    ]


def _label(name: str) -> str:
    """Return a setting's name in words: "Sampler: floor" of "sampler.floor"."""
    words = name.replace("_", " ").replace(".", ": ")
    return f"{words[:1].upper()}{words[1:]}"


def _prior_scale(run: RunRecord) -> str | None:
    """Return the scale of a prior that the run chose, at its start and at its end; None if it was the user's."""
    if not run.prior_scales:
        return None
    first = " and ".join(dict.fromkeys(f"{chain[0]:.3g}" for chain in run.prior_scales))
    last = " and ".join(dict.fromkeys(f"{chain[-1]:.3g}" for chain in run.prior_scales))
    return f"Gaussian, std {last}" if first == last else f"Gaussian, std {last} at the end, {first} at the start"


def _settings(run: RunRecord) -> dict[str, str]:
    """Return the plain values of `hparams.yaml` as short texts; the run's own, `run.…`, replace the user's."""
    import yaml

    try:
        content = yaml.safe_load(run.texts.get("hparams.yaml", "")[:LONGEST_SETTINGS])
    except Exception:  # tags of dates and numbers raise anything: AttributeError, OverflowError, …
        return {}
    plain = content if isinstance(content, dict) else {}
    named = {
        str(k): str(v)
        for k, v in plain.items()
        if _is_flat(k) and (_is_flat(v) or (isinstance(v, list) and all(map(_is_flat, v))))
    }
    short = {name: value for name, value in named.items() if len(value) < 80}
    of_run = {name.removeprefix(OF_RUN): value for name, value in short.items() if name.startswith(OF_RUN)}
    return {name: value for name, value in short.items() if not name.startswith(OF_RUN)} | of_run


def _is_flat(value: Any) -> bool:
    """Return whether a value is no container: YAML's references can make those of any size."""
    return value is None or isinstance(value, bool | int | float | str)


def _duration(seconds: Any) -> str | None:
    if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds <= 0:
        return None  # 0 for a run that only evaluated
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _plan(run: RunRecord) -> dict[str, Any] | None:
    """Return what the run was called, what its plan expected, and its warning; None for a run without a plan."""
    found = run.results.get("plan")
    if not isinstance(found, dict):
        return None
    kind = run.results.get("kind")
    lists = {name: part if isinstance(part := found.get(name), list) else [] for name in ("rows", "warnings", "notes")}
    texts = {name: [text for text in part[:MOST_SENTENCES] if isinstance(text, str)] for name, part in lists.items()}
    known = f"By its plan and what was measured, this run is {with_article(kind)}." if isinstance(kind, str) else ""
    return {
        "called": known,
        "facts": [
            (str(row[0]).strip(), str(row[1]))
            for row in lists["rows"]
            if isinstance(row, list) and len(row) == 2 and row[1] != "unknown"
        ],
        "sentences": [*(f"{text}." for text in texts["warnings"]), *texts["notes"]],
        "tensors": _planned_tensors(found.get("tensors"), run.has_several_scales),
    }


def _planned_tensors(found: Any, has_several_scales: bool) -> Table | None:
    given = found.items() if isinstance(found, dict) else ()
    names = {
        "numel": "elements",
        "prior_std": "prior std at the start" if has_several_scales else "prior std",
        "relaxation_times": "relaxation times",
        "configurational_temperature": "expected configurational temperature",
    }
    parts = {str(name): part for name, part in given if isinstance(part, dict)}
    known = [key for key in names if any(part.get(key) is not None for part in parts.values())]
    rows = [[name, *(part.get(key) for key in known)] for name, part in parts.items()]
    header = ["tensor", *(names[key] for key in known)]
    label = "Plan of each tensor"
    return Table(header, rows, label, folded=label) if rows else None


# -- how to repeat it -------------------------------------------------------------------------------------------------


def _repeat(run: RunRecord) -> dict[str, Any]:
    """Return what is needed to repeat the run; what it did not record is said to be missing."""
    found = run.results.get("origin")
    origin: dict[str, Any] = found if isinstance(found, dict) else {}
    settings = _settings(run)
    versions = {name.removeprefix(VERSION): value for name, value in settings.items() if name.startswith(VERSION)}
    recorded = origin.get("versions")
    if isinstance(recorded, dict):
        versions |= {str(name): str(value) for name, value in recorded.items()}
    seed = run.results.get("seed", settings.get("seed"))
    facts: Facts = [
        ("Command of this run", _text(origin.get("command")) or "not recorded"),
        ("Seed", "not recorded" if seed is None else str(seed)),
        ("Commit of the working folder", _text(origin.get("commit")) or "not recorded"),
        ("Machine", _text(origin.get("platform"))),
        *((f"Version of {name}", _text(value)) for name, value in versions.items()),
    ]
    return {
        "facts": facts,
        "command": f"sgmcmc fit --config {CONFIG}" if CONFIG in run.texts else "",
        "files": {name: text for name, text in run.texts.items() if name.endswith(".yaml") and text.strip()},
    }


def _text(value: Any) -> str | None:
    return text_without_secrets(str(value)[:LONGEST_TEXT]) if isinstance(value, str | int | float) else None
