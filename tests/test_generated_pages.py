"""Pages of results are what their data files say."""

import json

import pytest

from docs import generate
from lightning_sgmcmc.recipes.shared import pages
from lightning_sgmcmc.recipes.shared.expected import VERDICTS, all_expected
from lightning_sgmcmc.recipes.shared.listing import descriptions

ENTRIES = all_expected()


def test_the_pages_are_those_of_the_data() -> None:
    for path, text in generate.pages().items():
        assert path.read_text() == text, f"{path.name} is out of date: run `python -m docs.generate`"


def test_every_recipe_has_a_page_and_a_line_in_the_matrix() -> None:
    assert set(ENTRIES) == set(descriptions())
    matrix = (generate.PAGES / "index.md").read_text()
    for name, entry in ENTRIES.items():
        assert f"[{name}]({name}.md)" in matrix
        assert f"sgmcmc recipe {name}" in entry["command"]
        assert all(run["origin"]["date"] for run in entry["runs"].values())


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_a_verdict_that_contradicts_a_paper_names_the_run_that_shows_why(name: str) -> None:
    entry = ENTRIES[name]
    assert entry["verdict"] in VERDICTS
    assert len(entry["why"]) > 40
    if entry["verdict"] in ("ranking reproduced", "not reproduced"):
        assert "→" in entry["verdict_by"]


def test_intervals_are_those_of_student() -> None:
    """Mean 2 and standard error 1/2 of four repeats: half width 3.182/2 = 1.591. Fewer repeats have no interval."""
    assert pages._number_with_interval(2.0, 0.5, 4) == "2.0 [0.4, 3.6]"
    assert pages._number_with_interval(2.0, 0.5, 3) == "2"
    assert pages._number_with_interval(2.0, 0.5, 2) == "1.5, 2.5", "(1.5, 2.5) have mean 2 and standard error 1/2"
    assert pages._number_with_interval(2.0, 0.5, None) == "2 ± 0.5"
    assert pages._cell([2.0, 1.0], 4, True) == "2.0 [0.4, 3.6]", "the standard deviation over √4"
    assert pages._number_with_interval(0.22, 2e-17, 8) == "0.22"


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_data_name_no_path_of_a_machine(name: str) -> None:
    text = json.dumps(ENTRIES[name])
    assert "/tmp" not in text
    assert "/home" not in text
