"""Examples in docstrings as blocks of code, for mkdocstrings."""

import re
import textwrap
from typing import Any

import griffe

_PROMPT = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*\n?(?=>>>)?)+", re.M)
_EXAMPLE = re.compile(r"^Example::\n\n((?:    .*\n?|\n)+)", re.M)


class Examples(griffe.Extension):
    """Fences examples, which docstrings write with `>>>` or after `Example::`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change an object's docstring before it is parsed.

        Args:
            obj: a module, class, function or attribute.
        """
        if obj.docstring is None:
            return
        text = _EXAMPLE.sub(
            lambda found: f"```python\n{textwrap.dedent(found[1]).rstrip()}\n```\n\n", obj.docstring.value
        )
        obj.docstring.value = _PROMPT.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n\n", text)
