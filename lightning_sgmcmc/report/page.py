"""The report as a whole: five sentences, the verdict and four pictures; the rest is folded."""

import math
from collections.abc import Sequence
from pathlib import Path

from lightning_sgmcmc.chains.samples import comparable_log_weights
from lightning_sgmcmc.diagnostics.draws import weight_efficiency
from lightning_sgmcmc.diagnostics.health import POSTERIOR
from lightning_sgmcmc.evaluation.sentences import NAMES as SENTENCES
from lightning_sgmcmc.files import write_atomically
from lightning_sgmcmc.report import html_page
from lightning_sgmcmc.report.chains import Chains
from lightning_sgmcmc.report.health import tensors
from lightning_sgmcmc.report.html_page import bullets, is_finite, paragraph
from lightning_sgmcmc.report.pictures import pictures
from lightning_sgmcmc.report.plan import plan
from lightning_sgmcmc.report.repeat import repeat
from lightning_sgmcmc.report.results import facts, results
from lightning_sgmcmc.report.run_record import RunRecord, find_run, read_run
from lightning_sgmcmc.report.samples import equal_weights, samples, weights
from lightning_sgmcmc.run.results import OPTIMIZED


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
    if output is not None:
        Path(output).write_bytes(content)
        return Path(output)
    path = folder / "report.html"
    write_atomically(path, content, durable=False)  # replaces a link there, not the file that it points to
    return path


def render(run: RunRecord, parameters: Sequence[str] | None = None) -> str:
    """Return the report's HTML."""
    chains = Chains(run, parameters)
    first, others = pictures(run)
    shown = [
        ("In five sentences", _sentences(run)),
        ("Health", _verdict(run, chains)),
        ("Pictures", first),
    ]
    folded_up = [
        ("Results", results(run)),
        ("Run", facts(run)),
        ("Plan", plan(run)),
        ("Samples", samples(run)),
        ("Weights", weights(run.records)),
        ("Chains", chains.html()),
        ("Health of each tensor", tensors(run.health)),
        ("More pictures", others),
        ("Repeat this run", repeat(run)),
    ]
    title = str(run.results.get("recipe") or run.name)
    stage = {"val": "validation data", "test": "test data"}.get(str(run.results.get("stage")))
    subtitle = f"{run.name}{f', evaluated on the {stage}' if stage else ''}"
    return html_page.page(title, subtitle, [*shown, *folded_up], unfolded=len(shown))


def _verdict(run: RunRecord, chains: "Chains") -> str:
    verdict = "unknown" if run.health is None else run.health.verdict
    warnings = [] if run.health is None else run.health.warnings
    notes = [] if run.health is None else run.health.notes
    if run.health is None and _is_optimized(run):
        says = "No chain to check: an optimization made these networks."
    elif run.health is None:
        says = "Not recorded: the run had no ChainHealth callback."
    elif verdict == "unknown":
        says = "Unknown: the temperatures were not measurable in this run."
    elif verdict == "ok":
        says = "Healthy, with a note." if notes else "Healthy: the measured temperatures match the target's."
    else:
        says = "Look at this first; the most urgent comes first."
    is_ensemble = run.health is not None and run.health.kind not in (POSTERIOR, None)
    attention = [*warnings, *_attention(run), *([] if is_ensemble else chains.attention)]
    kind = "bad" if attention or verdict == "warning" else "good" if verdict == "ok" else ""
    advice = paragraph(f"What next: {run.health.advice}.") if run.health is not None and run.health.advice else ""
    return f'<div class="verdict {kind}">{paragraph(says)}{bullets([*attention, *notes])}{advice}</div>'


def _is_optimized(run: RunRecord) -> bool:
    samples = str(run.results.get("samples"))
    return samples == OPTIMIZED or samples.startswith("networks (")


def _sentences(run: RunRecord) -> str:
    """Return the five sentences of `results.json`, "" for a run of an earlier version."""
    found = run.results.get("sentences")
    if not isinstance(found, dict):
        return ""
    return "".join(paragraph(text) for name in SENTENCES if isinstance(text := found.get(name), str))


def _attention(run: RunRecord) -> list[str]:
    found = []
    if not run.records:
        found.append("No posterior samples were found in the run's folder.")
    if run.results.get("samples") == OPTIMIZED:
        found.append("The samples are states of an optimization (temperature 0), not samples of a posterior.")
    odd = sum(not math.isfinite(r.energy) for r in run.records)
    if odd:
        found.append(f"{odd} of the {len(run.records)} samples have an energy that is not finite: the chain diverged.")
    bad = [f"{row['metric']} ({row['method']})" for row in run.rows if not is_finite(row["value"])]
    if bad:
        found.append(f"Results without a finite value: {', '.join(bad)}.")
    if run.records and not equal_weights(run.records):
        try:
            efficiency = weight_efficiency(comparable_log_weights(run.records))
            if efficiency < 0.5:
                worth = efficiency * len(run.records)
                found.append(
                    f"The weights are concentrated: {len(run.records)} samples are worth {worth:.1f} of equal weight."
                )
        except ValueError as error:
            found.append(f"The weights cannot be used: {error}.")
    if run.unread:
        found.append(f"Files are not read: {', '.join(run.unread)}.")
    if run.damaged:
        found.append(f"Damaged pictures are omitted: {', '.join(run.damaged)}.")
    return found
