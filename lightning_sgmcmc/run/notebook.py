"""Figures inline in a notebook, without a dependency on IPython."""

import sys
from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl

_shown: "WeakKeyDictionary[pl.Trainer, set[str]]" = WeakKeyDictionary()
"""Names of the figures that each trainer's run has in the notebook."""


def in_notebook() -> bool:
    """Return whether the process is a notebook's kernel; IPython in a terminal is none."""
    get_ipython: Any = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and hasattr(get_ipython(), "kernel")


def show_inline(trainer: pl.Trainer, name: str, png: bytes) -> None:
    """Show a picture below the notebook's cell, in place of the run's earlier one of the same name.

    Args:
        trainer: the run's.
        name: the figure's name.
        png: the picture.
    """
    if not in_notebook():
        return
    from IPython.display import Image, display, update_display  # type: ignore[import-not-found,unused-ignore]

    shown = _shown.setdefault(trainer, set())
    show = update_display if name in shown else display
    show(Image(data=png), display_id=f"{id(trainer)}/{name}")
    shown.add(name)
