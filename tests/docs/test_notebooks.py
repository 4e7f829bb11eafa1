"""The hook that offers tutorials as notebooks."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from docs.hooks.notebooks import notebook, on_page_content, on_post_page
from tests.support.paths import REPOSITORY

TUTORIALS = sorted((REPOSITORY / "docs" / "tutorials").glob("*.py"))


def page(source: str, target: Path = Path("index.html")) -> SimpleNamespace:
    script = REPOSITORY / "docs" / source
    return SimpleNamespace(file=SimpleNamespace(src_uri=source, abs_src_path=str(script), abs_dest_path=str(target)))


def test_a_tutorial_has_a_link_below_its_title_and_other_pages_have_none() -> None:
    html = "<h1>First</h1><p>text</p>"
    shown = on_page_content(html, page("tutorials/first_posterior.py"))
    assert shown.startswith('<h1>First</h1><p><a href="first_posterior.ipynb"')
    assert shown.endswith("<p>text</p>")
    assert on_page_content(html, page("faq.md")) == html


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_script(script: Path, tmp_path: Path) -> None:
    """Its commands are a notebook's, and its code is complete: each line of the script's code is in a cell."""
    pytest.importorskip("jupytext", reason="of the group docs")
    target = tmp_path / script.stem / "index.html"
    assert on_post_page("html", page(f"tutorials/{script.name}", target)) == "html"
    text = target.with_name(f"{script.stem}.ipynb").read_text(encoding="utf-8")
    assert text == notebook(script), "the same in each build"
    found = json.loads(text)
    assert found["nbformat"] == 4
    code = "".join("".join(cell["source"]) + "\n" for cell in found["cells"] if cell["cell_type"] == "code")
    lines = [line for line in script.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert [line for line in code.splitlines() if line and not line.startswith(("#", "!"))] == lines
