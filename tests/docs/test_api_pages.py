"""The pages of the API: every public name is on one of them, and every entry exists."""

import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.paths import REPOSITORY

PAGES = sorted((REPOSITORY / "docs" / "reference" / "api").glob("*.md"))
PACKAGES = (
    "",
    "callbacks",
    "cli",
    "datamodules",
    "estimators",
    "evaluation",
    "likelihoods",
    "planning",
    "posterior",
    "predictions",
    "pretrained",
    "priors",
    "reference",
    "report",
    "samplers",
    "simulation",
    "singular",
    "tune",
)
"""Packages that users import from; the others are internal, and some of their names are on a page too."""
NO_ENTRIES = {"__version__", "ON_REQUEST", "Scale"}
"""A string and aliases of types."""


def entries(page: Path) -> list[str]:
    return re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)


def resolved(entry: str) -> Any:
    module, _, name = entry.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_public_name_is_on_one_page() -> None:
    counts = Counter(id(resolved(entry)) for page in PAGES for entry in entries(page))
    lacking = []
    for package in PACKAGES:
        module = importlib.import_module(".".join(["lightning_sgmcmc", *package.split()]))
        for name in set(module.__all__) - NO_ENTRIES:
            if counts[id(getattr(module, name))] != 1:
                lacking.append(f"{module.__name__}.{name} has {counts[id(getattr(module, name))]} entries")
    assert sorted(lacking) == []
    assert len(counts) > 100
