"""Configurations made from a fit's: `--auto` chooses the sampling, `--baselines` adds networks of the same cost."""

import copy
import json
import math
import pydoc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
from rich.table import Table

from lightning_sgmcmc.callbacks import AutoSampling, recommended
from lightning_sgmcmc.callbacks.auto_sampling import CHOICES
from lightning_sgmcmc.chains.callback import RunCallback
from lightning_sgmcmc.chains.state import SUBJECTS
from lightning_sgmcmc.chains.trainer import callbacks_of, run_folder
from lightning_sgmcmc.cli.exits import Mistake
from lightning_sgmcmc.cli.folders import NAME
from lightning_sgmcmc.files import write_atomically
from lightning_sgmcmc.fit.results import RESULTS, TABLE, plain_console, write_results
from lightning_sgmcmc.likelihoods import ClassLikelihood
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.plain import markdown_table

PACKAGE = "lightning_sgmcmc.callbacks."
AUTO = PACKAGE + "AutoSampling"
WITH_IT = tuple(type(callback).__name__ for callback in recommended()[1:])
"""What `AutoSampling` runs with."""
MEMBERS = {"sgd": 1, "ensemble": 4}
DECAY = 5e-4
"""Weight decay of the baselines, the usual default."""


def choose_sampling(config: Any, objective: str, budget: str | None) -> None:
    """Replace what decides about sampling in a fit's configuration by `AutoSampling`, in place.

    The callbacks that change the chain are left out; those of `recommended` are added where they are missing.
    """
    given = config.trainer.get("callbacks") or []
    entries = given if isinstance(given, list) else [given]
    kept = [entry for entry in entries if not _declared(entry).changes_chain]
    dropped = [name for entry in entries if (name := _name(entry)) != "AutoSampling" and entry not in kept]
    for entry in kept:
        shared = _declared(entry).claims.keys() & AutoSampling.claims
        if shared:
            raise Mistake(
                f"--auto and {_name(entry)} cannot be combined: {SUBJECTS[min(shared)]}; remove one of the two"
            )
    if dropped:
        rank_zero_info(f"--auto replaces {', '.join(dropped)} and the module's prior, sampler and lr.")
    known = {_name(entry) for entry in kept}
    added = [Namespace(class_path=PACKAGE + name) for name in WITH_IT if name not in known]
    options = Namespace(objective=objective, budget=budget)
    config.trainer.callbacks = [Namespace(class_path=AUTO, init_args=options), *kept, *added]


def _name(entry: Any) -> str:
    path = entry.get("class_path", "") if isinstance(entry, Namespace | dict) else type(entry).__name__
    return str(path).rpartition(".")[2]


def _declared(entry: Any) -> type[RunCallback]:
    """Return the class of a callback in a configuration; `RunCallback` for one that declares nothing."""
    path = entry.get("class_path", "") if isinstance(entry, Namespace | dict) else ""
    kind = pydoc.locate(str(path)) if path else type(entry)
    return kind if isinstance(kind, type) and issubclass(kind, RunCallback) else RunCallback


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


# -- baselines --------------------------------------------------------------------------------------------------------


def run_baselines(trainer: pl.Trainer, module: BayesianModule, run: Callable[[dict[str, Any]], None]) -> None:
    """Train the baselines with as many gradient evaluations as a run has made, and add them to its `results.json`.

    They are trained as most users would: in classification by SGD with momentum 0.9 and lr 0.1, otherwise by AdamW with
    lr 0.01, both with a cosine after a warm-up of 3 % and a weight decay of 5e-4. Each is a run of its own, in the
    folder `baselines` of the run's.
    """
    folder = run_folder(trainer)
    if trainer.world_size > 1:
        rank_zero_warn("--baselines trains on one device, and this run had several processes: none is trained.")
        return
    config = yaml.safe_load((folder / NAME).read_text())
    arguments = config["model"].get("init_args", {})
    if not {"sampler", "lr", "prior", "num_chains"} <= arguments.keys():
        rank_zero_warn("--baselines changes sampler, lr, prior and num_chains, which the model's class does not take.")
        return
    has_classes = isinstance(module.likelihood, ClassLikelihood)
    steps = trainer.global_step * module.num_chains
    for name, members in MEMBERS.items():
        own = folder / "baselines" / name
        rank_zero_info(f"Baseline {name}: {members} network(s), {steps // members:,} steps each.")
        run({"subcommand": "fit", "fit": _configuration(config, own, name, members, steps // members, has_classes)})
        _add_rows(folder, own, name)
    _print(folder)


def _configuration(
    config: dict[str, Any], folder: Path, name: str, members: int, steps: int, has_classes: bool
) -> dict[str, Any]:
    """Return the configuration of a baseline, made from that of the run."""
    config = copy.deepcopy(config)
    options: dict[str, Any] = {"momentum": 0.9} if has_classes else {}
    kind = "torch.optim.SGD" if has_classes else "torch.optim.AdamW"
    optimizer = {"class_path": kind, "init_args": options | {"weight_decay": DECAY}}
    config["model"]["init_args"] |= {
        "sampler": "lightning_sgmcmc.samplers.SGHMC",
        "lr": 0.1 if has_classes else 0.01,
        "prior": "lightning_sgmcmc.FlatPrior",
        "num_chains": members,
        "temperature": 1.0,
        "chain_start": "own",
    }
    schedule = {"class_path": PACKAGE + "DeepEnsemble", "init_args": {"optimizer": optimizer, "warm_up": 0.03}}
    summary = {"class_path": PACKAGE + "RunSummary", "init_args": {"name": name}}
    place = {"save_dir": str(folder.parent), "name": name, "version": ""}
    logger = {"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": place}
    config["trainer"] |= {
        "max_steps": steps,
        "max_epochs": -1,
        "max_time": None,
        "logger": logger,
        "enable_checkpointing": False,
        "callbacks": [schedule, *({"class_path": PACKAGE + one} for one in WITH_IT[:2]), summary],
    }
    return config | {"auto": False, "budget": None, "baselines": False, "resume": False, "ckpt_path": None}


def _add_rows(folder: Path, baseline: Path, name: str) -> None:
    """Add a baseline's average to the run's rows, under the baseline's name."""
    results, other = (json.loads((place / RESULTS).read_text()) for place in (folder, baseline))
    results["rows"] += [row | {"method": name, "error": None} for row in other["rows"] if row["method"] == "bma"]
    rows = [[row["method"], row["metric"], f"{row['value']:.4f}"] for row in results["rows"]]
    write_results(folder, results, markdown_table(["method", "metric", "value"], rows))


def _print(folder: Path) -> None:
    results = json.loads((folder / RESULTS).read_text())
    values = {(row["method"], row["metric"]): row["value"] for row in results["rows"]}
    methods = [method for method in ("single", "bma", *MEMBERS) if any(key[0] == method for key in values)]
    metrics = [metric for method, metric in values if method == "sgd"]
    table = Table(title="At equal cost, on the test data", caption=str(folder / TABLE))
    for column in ("", *methods):
        table.add_column(column, justify="left" if not column else "right")
    for metric in metrics:
        table.add_row(metric, *(f"{values.get((method, metric), math.nan):.4f}" for method in methods))
    plain_console().print(table)
