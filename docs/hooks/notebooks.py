"""Tutorials as notebooks: each page offers its cells, without outputs, as an `.ipynb` file."""

from pathlib import Path
from typing import Any

LINK = """<p><a href="{name}" download="{name}">Download this page as a notebook</a>, to run it with the library and
Jupyter (<code>pip install jupyterlab</code>, then <code>jupyter lab {name}</code>).</p>"""


def is_tutorial(page: Any) -> bool:
    """Return whether a page is made of a script of cells."""
    return bool(page.file.src_uri.startswith("tutorials/") and page.file.src_uri.endswith(".py"))


def notebook(script: Path) -> str:
    """Return the JSON of the notebook that a script of cells describes; cells are numbered, so that builds repeat.

    Args:
        script: a file in jupytext's percent format.
    """
    import jupytext  # of the group "docs"

    cells = jupytext.read(script)
    for number, cell in enumerate(cells.cells):
        cell["id"] = f"cell-{number}"
    text: str = jupytext.writes(cells, fmt="ipynb")
    return text


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Put the link below a tutorial's title."""
    if not is_tutorial(page):
        return content
    before, end, after = content.partition("</h1>")
    return f"{before}{end}{LINK.format(name=Path(page.file.src_uri).stem + '.ipynb')}{after}"


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Write a tutorial's notebook into the folder of its page."""
    if is_tutorial(page):
        script = Path(page.file.abs_src_path)
        target = Path(page.file.abs_dest_path).parent / f"{script.stem}.ipynb"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(notebook(script), encoding="utf-8")
    return output
