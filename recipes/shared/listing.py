"""The recipes: their names, files and first lines."""

import ast
from functools import cache
from pathlib import Path

from lightning_sgmcmc.cli.commands import examples

RECIPES = Path(__file__).parents[1]


def source(name: str) -> Path:
    """Return the file that a recipe begins with: its program's, or its configuration.

    Args:
        name: the recipe.
    """
    if name in examples():
        return RECIPES / f"{name}.yaml"
    program = RECIPES / f"{name}.py"
    return program if program.exists() else RECIPES / name / "__init__.py"


def description(name: str) -> str:
    """Return a recipe's first line: that of its module's docstring, or the configuration's first comment.

    Args:
        name: the recipe.
    """
    text = source(name).read_text(encoding="utf-8")
    if name in examples():
        return text.splitlines()[0].removeprefix("# ")
    return (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]


@cache  # it parses every recipe
def descriptions() -> dict[str, str]:
    """Return the first line of each recipe, by name."""
    programs = {path.stem for path in RECIPES.glob("*.py") if not path.stem.startswith("_")}
    folders = {path.parent.name for path in RECIPES.glob("*/__init__.py") if _is_program(path)}
    return {name: description(name) for name in sorted(programs | folders | examples().keys())}


def _is_program(path: Path) -> bool:
    """Return whether a package is a recipe, not what recipes share."""
    parts = ast.parse(path.read_text(encoding="utf-8")).body
    return any(isinstance(part, ast.FunctionDef) and part.name == "run" for part in parts)
