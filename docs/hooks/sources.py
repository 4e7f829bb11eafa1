"""The package as it is installed, for mkdocstrings, since `callbacks/` and others are in the root of a clone."""

import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

_BESIDE = ("callbacks", "datamodules", "recipes")
_folder = tempfile.TemporaryDirectory(prefix="sources-")


@event_priority(100)  # before mkdocstrings makes its handlers
def on_config(config: Any) -> Any:
    """Point mkdocstrings to a folder of links.

    Args:
        config: mkdocs' configuration.
    """
    root = Path(config.config_file_path).resolve().parent
    package = Path(_folder.name) / "lightning_sgmcmc"
    if not package.exists():
        package.mkdir()
        for part in (root / "lightning_sgmcmc").iterdir():
            (package / part.name).symlink_to(part)
        for name in _BESIDE:
            (package / name).symlink_to(root / name)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_folder.name]
    return config
