"""Inline pictures of the pages: the Okabe-Ito palette, a transparent ground, and text in the page's own colour."""

import io
import re
import sys
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK, SKY, YELLOW = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
PAGE = "#010203"
"""Stands for the page's colour of text, which differs between the light and the dark theme."""
STYLE = {name: PAGE for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")}


def on_startup(**kwargs: Any) -> None:
    """Let the pages import this file as `docs.hooks.pictures`."""
    root = str(Path(__file__).parents[2])
    if root not in sys.path:
        sys.path.insert(0, root)


def picture(draw: Any, alt: str, width: float = 5.2, height: float = 3.0, columns: int = 1) -> str:
    """Return a picture as inline SVG.

    Args:
        draw: function that draws on the axes passed to it, one for each column.
        alt: the picture in words, for readers who do not see it.
        width: in inches; the picture shrinks with the page.
        height: in inches.
        columns: number of axes, side by side.
    """
    style = STYLE | {"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    style |= {"legend.frameon": False, "svg.hashsalt": alt}
    with rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(*figure.subplots(1, columns, squeeze=False)[0])
        return inline(figure, alt)


def inline(figure: Figure, alt: str, paper: bool = False) -> str:
    """Return a figure as inline SVG.

    Args:
        figure: the figure; what it drew in `PAGE` has the page's colour of text.
        alt: the picture in words.
        paper: whether it needs a white ground, as figures with black text do.
    """
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": alt}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    drawn = out.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(PAGE, "currentColor")
    drawn = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%"', drawn, count=1)
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.S).replace("\n", " ")
    title = alt.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    width = 34 if figure.get_figwidth() < 6 else 44
    style = f"width:100%;max-width:{width}rem;margin:1rem 0" + (";background:white" if paper else "")
    return f'<figure style="{style}" role="img" aria-label="{title}">{drawn}</figure>'
