"""`sgmcmc fit --auto`: a configuration whose sampling is chosen by `AutoSampling`."""

import inspect
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from lightning_sgmcmc import callbacks
from lightning_sgmcmc.callbacks import AutoSampling, recommended
from lightning_sgmcmc.callbacks.auto_sampling import CHOICES
from lightning_sgmcmc.cli.config_file import NAME
from lightning_sgmcmc.files import write_atomically
from lightning_sgmcmc.run.folder import run_folder
from lightning_sgmcmc.run.trainer import callbacks_of

PACKAGE = "lightning_sgmcmc.callbacks."
AUTO = PACKAGE + "AutoSampling"
WITH_IT = tuple(type(callback).__name__ for callback in recommended()[1:])
"""What `AutoSampling` runs with."""


def choose_sampling(config: Any, objective: str, budget: str | None) -> None:
    """Replace what decides about sampling in a fit's configuration by `AutoSampling`, in place.

    The callbacks that change the chain are left out; those of `recommended` are added where they are missing.

    Args:
        config: the parsed configuration of `fit`.
        objective: of `AutoSampling`.
        budget: likewise.
    """
    given = config.trainer.get("callbacks") or []
    entries = given if isinstance(given, list) else [given]
    kept = [entry for entry in entries if not _changes_the_chain(entry)]
    dropped = [_name(entry) for entry in entries if _changes_the_chain(entry) and _name(entry) != "AutoSampling"]
    if dropped:
        rank_zero_info(f"--auto replaces {', '.join(dropped)} and the module's prior, sampler and lr.")
    known = {_name(entry) for entry in kept}
    added = [Namespace(class_path=PACKAGE + name) for name in WITH_IT if name not in known]
    options = Namespace(objective=objective, budget=budget)
    config.trainer.callbacks = [Namespace(class_path=AUTO, init_args=options), *kept, *added]


def _name(entry: Any) -> str:
    path = entry.get("class_path", "") if isinstance(entry, Namespace | dict) else type(entry).__name__
    return str(path).rpartition(".")[2]


def _changes_the_chain(entry: Any) -> bool:
    """Return whether a callback of the library has a setting, so that a resumed run must share it."""
    kind = getattr(callbacks, _name(entry), None)
    return inspect.isclass(kind) and getattr(kind, "setting", None) is not None


def write_repeating_configuration(trainer: pl.Trainer) -> None:
    """Complete `auto.yaml` in the folder of a run of `AutoSampling`: its configuration with the choices it made."""
    folder = run_folder(trainer)
    auto = next((c for c in callbacks_of(trainer) if isinstance(c, AutoSampling)), None)
    if auto is not None and trainer.is_global_zero and (folder / NAME).exists() and auto.chosen:
        _complete(folder, auto.as_configuration())


def _complete(folder: Path, entry: dict[str, Any]) -> None:
    config = yaml.safe_load((folder / NAME).read_text())
    found = [entry if one.get("class_path") == AUTO else one for one in config["trainer"]["callbacks"]]
    config["trainer"]["callbacks"] = found
    config |= {"auto": False, "budget": None}
    content = yaml.safe_dump(config, sort_keys=False)
    write_atomically(folder / CHOICES, content.encode())
