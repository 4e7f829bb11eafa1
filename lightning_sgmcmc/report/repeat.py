"""The report's section on how to repeat a run: command, seed, versions, commit, configuration."""

from typing import Any

from lightning_sgmcmc.files import text_without_secrets
from lightning_sgmcmc.report import html_page
from lightning_sgmcmc.report.html_page import folded, paragraph, preformatted
from lightning_sgmcmc.report.results import plain_settings
from lightning_sgmcmc.report.run_record import RunRecord

CONFIG = "config.yaml"
VERSION = "version."
"""Prefix of the versions among a run's settings."""
LONGEST = 2_000
"""Characters of a recorded text that are shown."""


def repeat(run: RunRecord) -> str:
    """Return what is needed to repeat the run; what it did not record is said to be missing."""
    found = run.results.get("origin")
    origin: dict[str, Any] = found if isinstance(found, dict) else {}
    settings = plain_settings(run)
    versions = {name.removeprefix(VERSION): value for name, value in settings.items() if name.startswith(VERSION)}
    recorded = origin.get("versions")
    if isinstance(recorded, dict):
        versions |= {str(name): str(value) for name, value in recorded.items()}
    seed = run.results.get("seed", settings.get("seed"))
    command = _text(origin.get("command"))
    facts = [
        ("Command of this run", command or "not recorded"),
        ("Date", _text(origin.get("date"))),
        ("Seed", "not recorded" if seed is None else str(seed)),
        ("Commit of the working folder", _text(origin.get("commit")) or "not recorded"),
        ("Machine", _text(origin.get("platform"))),
        *((f"Version of {name}", _text(value)) for name, value in versions.items()),
    ]
    advice = (
        f"With {CONFIG}, below, saved in an empty folder, this command repeats the run:"
        if CONFIG in run.texts
        else "The run was started by a program, so its settings are in that program; those that it recorded are below."
    )
    line = preformatted(f"sgmcmc fit --config {CONFIG}") if CONFIG in run.texts else ""
    texts = {name: text for name, text in run.texts.items() if name.endswith(".yaml") and text.strip()}
    files = "".join(folded(name, preformatted(text)) for name, text in texts.items())
    return html_page.facts(facts) + paragraph(advice) + line + files


def _text(value: Any) -> str | None:
    return text_without_secrets(str(value)[:LONGEST]) if isinstance(value, str | int | float) else None
