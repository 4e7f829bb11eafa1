"""The report's section on the plan of a run, from `results.json`."""

from typing import Any

from lightning_sgmcmc.planning.kind import with_article
from lightning_sgmcmc.report import html_page
from lightning_sgmcmc.report.html_page import bullets, folded, number, paragraph, table
from lightning_sgmcmc.report.run_record import RunRecord

MOST_SENTENCES = 20
"""Sentences of a list that are shown."""


def plan(run: RunRecord) -> str:
    """Return what the run was called, what its plan expected, and its warning; "" for a run without a plan."""
    found = run.results.get("plan")
    if not isinstance(found, dict):
        return ""
    kind = run.results.get("kind")
    known = f"By its plan and what was measured, this run is {with_article(kind)}." if isinstance(kind, str) else ""
    called = paragraph(known) if known else ""
    pairs = [row for row in _list(found, "rows") if isinstance(row, list) and len(row) == 2]
    facts = html_page.facts((str(name).strip(), str(value)) for name, value in pairs)
    sentences = [f"{text}." for text in _texts(found, "warnings")] + _texts(found, "notes")
    return called + facts + bullets(sentences) + _tensors(found.get("tensors"))


def _tensors(found: Any) -> str:
    if not isinstance(found, dict):
        return ""
    names = ("numel", "prior_std", "relaxation_times", "configurational_temperature")
    rows = [
        [str(name), *(number(entry.get(key)) for key in names)]
        for name, entry in found.items()
        if isinstance(entry, dict)
    ]
    header = ["tensor", "elements", "prior std", "relaxation times", "expected configurational temperature"]
    return folded("Plan of each tensor", table(header, rows, "Plan of each tensor")) if rows else ""


def _list(found: dict[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    return value if isinstance(value, list) else []


def _texts(found: dict[str, Any], name: str) -> list[str]:
    return [text for text in _list(found, name)[:MOST_SENTENCES] if isinstance(text, str)]
