"""Importing the library from a checkout where it is not installed."""

import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[3]
PACKAGE = "lightning_sgmcmc"
BESIDE = tuple(f"{PACKAGE}.{name}" for name in ("callbacks", "datamodules", "recipes"))


class _Checkout(MetaPathFinder):
    """Finds the packages that lie beside the one they are installed in, and the library's version.

    It is asked after all others, so that an installed library is used as it is.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(ROOT)]) if name in BESIDE else None

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterable[Any]:  # noqa: B008
        return [_Metadata()] if context.name in ("lightning-sgmcmc", None) else []


class _Metadata(Distribution):
    """What the library reads about itself: its version."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        return f"Metadata-Version: 2.1\nName: lightning-sgmcmc\nVersion: {version[1] if version else '0'}\n"

    def locate_file(self, path: Any) -> Any:
        return ROOT / path


def use_checkout() -> None:
    """Let `import lightning_sgmcmc` and its parts work in this process without an installation."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    if not any(isinstance(finder, _Checkout) for finder in sys.meta_path):
        sys.meta_path.append(_Checkout())
