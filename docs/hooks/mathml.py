"""Formulas as MathML when the site is built: browsers draw it without a script and without a network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_WORD = re.compile("(<mi>(?:log|exp|sin|cos|min|max)</mi>)(?=<mi|<msu)")
"""A function's name before a letter, which browsers set without a space."""


def on_page_content(content: str, **_: Any) -> str:
    """Replace a page's TeX by MathML.

    Args:
        content: HTML of the page.
    """
    return _FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    is_block = found[2] == "["
    formula: str = convert(html.unescape(found[3]).strip(), display="block" if is_block else "inline")
    formula = _WORD.sub(r"\1<mspace width='0.17em'/>", formula)
    return f'<div style="overflow-x:auto;overflow-y:hidden">{formula}</div>' if is_block else formula
