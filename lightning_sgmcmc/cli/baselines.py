"""`sgmcmc fit --baselines`: networks trained at the cost of a run, beside its average."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from lightning_sgmcmc.chains.trainer import run_folder
from lightning_sgmcmc.fit.results import BASELINES, METHODS, RESULTS, SUMMARY, plain_console, shown_path, write_results
from lightning_sgmcmc.likelihoods import ClassLikelihood
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.process import silenced
from lightning_sgmcmc.report.run_record import CONFIG

PACKAGE = "lightning_sgmcmc.callbacks."
MEMBERS = {"sgd": 1, "ensemble": 4}
DECAY = 5e-4
"""Weight decay of the baselines, the usual default."""


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
    config = yaml.safe_load((folder / CONFIG).read_text())
    arguments = config["model"].get("init_args", {})
    if not {"sampler", "lr", "prior", "num_chains"} <= arguments.keys():
        rank_zero_warn("--baselines changes sampler, lr, prior and num_chains, which the model's class does not take.")
        return
    has_classes = isinstance(module.likelihood, ClassLikelihood)
    steps = trainer.global_step * module.num_chains
    for name, members in MEMBERS.items():
        own = folder / "baselines" / name
        many = "1 network" if members == 1 else f"{members} networks"
        rank_zero_info(f"Baseline {name}: {many} of {steps // members:,} steps.")
        with silenced(pl.__name__):
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
    averaged = [{"class_path": PACKAGE + one} for one in ("SampleCollector", "BayesianModelAverage")]
    summary = {"class_path": PACKAGE + "RunSummary", "init_args": {"name": name, "show": "none"}}
    place = {"save_dir": str(folder.parent), "name": name, "version": ""}
    logger = {"class_path": f"{pl.__name__}.loggers.CSVLogger", "init_args": place}
    config["trainer"] |= {
        "max_steps": steps,
        "max_epochs": -1,
        "max_time": None,
        "logger": logger,
        "enable_checkpointing": False,
        "callbacks": [schedule, *averaged, summary],
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
    methods = [method for method in ("guessing", "single", "bma", *MEMBERS) if any(key[0] == method for key in values)]
    metrics = [metric for method, metric in values if method == "sgd"]
    table = Table(title="At equal cost, on the test data")
    table.add_column("")
    for method in methods:
        table.add_column((METHODS | BASELINES).get(method, method).replace(" ", "\n", 1), justify="right")
    for metric in metrics:
        cells = (values.get((method, metric)) for method in methods)
        table.add_row(metric, *("" if value is None else f"{value:.4f}" for value in cells))
    plain_console().print(table)
    plain_console().print(f"The rest is in {shown_path(folder / SUMMARY)}", highlight=False)
