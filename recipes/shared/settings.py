"""The settings of a recipe: a dataclass, and a YAML file of its values beside the recipe."""

import argparse
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from lightning_sgmcmc.recipes.shared.options import Options

FOLDER = Path(__file__).parents[1]
PACKAGE = "lightning_sgmcmc.recipes."
SCALES = ("quick", "full")

Settings = TypeVar("Settings")


def settings_file(module: str) -> Path:
    """Return the path of a recipe's settings: `NAME.yaml` beside `NAME.py` or beside the folder `NAME`.

    Args:
        module: the full name of the recipe's module, or of one in its folder.
    """
    return FOLDER / f"{module.removeprefix(PACKAGE).split('.')[0]}.yaml"


def read_settings(kind: type[Settings], options: Options) -> Settings:
    """Return a recipe's settings: the file's values, those of its section `quick` or `full`, and those of `--set`.

    A name with a dot, such as `fit.members`, is a part of a setting, in a section and in `--set`.

    Args:
        kind: a dataclass of the recipe's module.
        options: the recipe's options.

    Raises:
        ValueError: if a value is missing, of the wrong type, or has no such name.
    """
    import yaml
    from jsonargparse import ArgumentParser

    path = settings_file(kind.__module__)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    scales = {name: content.pop(name, {}) for name in SCALES}
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(kind)
    try:
        parser.set_defaults(content | scales[options.scale])
        chosen = [f"--{name}={value}" for name, value in options.changed.items()]
        return kind(**vars(parser.instantiate(parser.parse_args(chosen))))
    except (argparse.ArgumentError, KeyError) as error:
        raise ValueError(f"a setting of {path.name} or of --set is wrong: {error}") from error


def plain_settings(settings: Any) -> dict[str, Any]:
    """Return a recipe's settings as plain data for `results.json`.

    Args:
        settings: a dataclass.
    """
    assert is_dataclass(settings)
    assert not isinstance(settings, type)
    return asdict(settings)
