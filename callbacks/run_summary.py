"""The end of a run: a table, `results.json` and pictures; on the way, scalars to the loggers."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_sgmcmc import figures
from lightning_sgmcmc.callbacks.base import SamplerCallback, bayesian
from lightning_sgmcmc.callbacks.loader_average import Evaluation
from lightning_sgmcmc.callbacks.run_folder import run_folder
from lightning_sgmcmc.diagnostics import effective_sample_size
from lightning_sgmcmc.metrics import reliability
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.store import PosteriorSample

STAGE_NAMES = {"val": "validation data", "test": "test data"}


class RunSummary(SamplerCallback):
    """Writes scalars to the loggers, and at the end of a fit or test a table, `results.json` and pictures into the
    run's folder.

    The scalars: `sampler/lr`, `sampler/temperature` and `sampler/energy` every `trainer.log_every_n_steps`;
    `samples/count` and `samples/ess`, the effective number of the weighted samples, with every sample.

    The pictures: the schedule with the samples marked, the energy, the running model average, the reliability
    diagram. The table compares the mean single sample with the model average; it needs a `BayesianModelAverage`.

    Args:
        name: what the run is called in `results.json`.
        pictures: whether to draw.
    """

    def __init__(self, name: str = "run", pictures: bool = True) -> None:
        self.name = name
        self.pictures = pictures
        self._seconds = 0.0
        self._start = time.monotonic()
        self.reset()

    def reset(self) -> None:
        self._steps: list[int] = []
        self._lr: list[float] = []
        self._temperature: list[float] = []
        self._energy: list[float] = []
        self._samples: list[tuple[int, float]] = []
        self._log_weights: list[float] = []
        self._last_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = time.monotonic()
        self._sampler = bayesian(pl_module, self).sampler
        self._interval = int(trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = self._sampler.step_count
        if step == self._last_step or (step != 1 and step % self._interval):
            return
        self._last_step = step
        module = bayesian(pl_module, self)
        group = self._sampler.param_groups[0]
        scalars = {
            "sampler/lr": _mean(group["lr"]),
            "sampler/temperature": _mean(group["temperature"]),
            "sampler/energy": module.chain_state.energy.mean().item(),
        }
        for values, name in ((self._lr, "lr"), (self._temperature, "temperature"), (self._energy, "energy")):
            values.append(scalars[f"sampler/{name}"])
        self._steps.append(step)
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        self._samples.append((sample.step, sample.energy))
        self._log_weights.append(sample.log_weight)
        worth = effective_sample_size(torch.tensor(self._log_weights, dtype=torch.float64))
        for logger in trainer.loggers:
            logger.log_metrics({"samples/count": len(self._samples), "samples/ess": worth}, step=trainer.global_step)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds = time.monotonic() - self._start
        self._write(trainer, bayesian(pl_module, self), "val")

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, bayesian(pl_module, self), "test")

    def _write(self, trainer: pl.Trainer, module: BayesianModule, stage: str) -> None:
        folder = run_folder(trainer)
        evaluation: Evaluation | None = module.evaluations.get(stage)
        if trainer.is_global_zero:
            self._write_files(folder, module, evaluation, stage)

    def _write_files(self, folder: Path, module: BayesianModule, evaluation: Evaluation | None, stage: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if evaluation is not None and evaluation.members:
            rows = _rows(evaluation)
            results = {
                "recipe": self.name,
                "scale": "run",
                "seed": module.sampling_seed,
                "stage": stage,
                "rows": rows,
                "seconds": round(self._seconds, 3),
            }
            (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
            (folder / "table.md").write_text(_markdown(rows))
            _print_table(evaluation, f"{len(evaluation.members)} posterior samples on the {STAGE_NAMES[stage]}", folder)
        if self.pictures:
            self._draw(folder, evaluation)

    def _draw(self, folder: Path, evaluation: Evaluation | None) -> None:
        drawn = {}
        sample_steps, sample_energy = [s for s, _ in self._samples], [e for _, e in self._samples]
        if self._steps:
            drawn["schedule"] = figures.schedule_figure(self._steps, self._lr, self._temperature, sample_steps)
            drawn["energy"] = figures.energy_figure(self._steps, self._energy, sample_steps, sample_energy)
        if evaluation is not None and evaluation.members:
            for metric in list(evaluation.bma)[:2]:
                running, single = ([m[metric] for m in curve] for curve in (evaluation.running, evaluation.members))
                drawn[f"running_{metric}"] = figures.running_average_figure(metric, running, single)
            average, target = evaluation.average, evaluation.target
            if average is not None and target is not None and "probabilities" in average.terms:
                confidence, accuracy, count = reliability(average.terms["probabilities"], target.long().reshape(-1))
                drawn["reliability"] = figures.reliability_figure(
                    confidence.tolist(), accuracy.tolist(), count.tolist(), evaluation.bma["ece"]
                )
        for name, figure in drawn.items():
            figure.savefig(folder / f"{name}.png", dpi=120)

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": list(self._steps),
            "lr": list(self._lr),
            "temperature": list(self._temperature),
            "energy": list(self._energy),
            "samples": list(self._samples),
            "log_weights": list(self._log_weights),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = list(state_dict["steps"])
        self._lr = list(state_dict["lr"])
        self._temperature = list(state_dict["temperature"])
        self._energy = list(state_dict["energy"])
        self._samples = [(step, energy) for step, energy in state_dict["samples"]]
        self._log_weights = list(state_dict["log_weights"])


def _mean(value: Any) -> float:
    return value.mean().item() if isinstance(value, torch.Tensor) else float(value)


def _rows(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the rows of `results.json`; the error beside a mean of single samples is their standard deviation."""
    rows = []
    deviations = evaluation.single_std
    for method, values in (("single", evaluation.single), ("bma", evaluation.bma)):
        for metric, value in values.items():
            error = deviations[metric] if method == "single" and math.isfinite(deviations[metric]) else None
            rows.append(
                {"method": method, "metric": metric, "value": value, "error": error, "paper": None, "paper_error": None}
            )
    return rows


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| method | metric | value | error |", "|---|---|---|---|"]
    for row in rows:
        error = "" if row["error"] is None else f"{row['error']:.4f}"
        lines.append(f"| {row['method']} | {row['metric']} | {row['value']:.4f} | {error} |")
    return "\n".join(lines) + "\n"


def _print_table(evaluation: Evaluation, title: str, folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=str(folder))
    table.add_column("")
    metrics = list(evaluation.bma)
    for metric in metrics:
        table.add_column(metric, justify="right")
    table.add_row("mean single sample", *(f"{evaluation.single[m]:.4f}" for m in metrics))
    table.add_row("model average", *(f"{evaluation.bma[m]:.4f}" for m in metrics))
    Console().print(table)
