"""Memory of long runs: `python -m tests.benchmarks.memory --out DIR`.

Every setting is a fit of `--steps` steps in a new process, with every callback that goes with the others, checkpoints
and validation. Every `--every` steps it reads the resident memory, the number of open files and the number of objects
that Python's collector tracks. Plain Lightning with torch's SGD is the baseline, under each logger.

The slope is that of resident memory after the first tenth of the run, by least squares through the means of nine equal
blocks of steps; its 95 % interval is Student's with seven degrees of freedom. Means of blocks that are thousands of
steps long are nearly independent, single readings are not.

`--cost` measures a sample's seconds in a full store instead, by `max_samples`. `--trace STEP` adds the lines of code
whose memory grows after that step, by tracemalloc (slow).
"""

import argparse
import datetime
import functools
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, ContourRules, UnderdampedLangevin
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import (
    EWSG,
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    ControlVariates,
    CovarianceFriction,
    CyclicalSchedule,
    PosteriorDashboard,
    ReplicaExchange,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
    VarianceReducedEnergy,
)
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.datamodules.base import evaluation_loader
from lightning_sgmcmc.posterior.disk import DiskStore
from tests.benchmarks.trainer_step import PlainModule

LOGGERS = ("none", "csv", "tensorboard", "wandb")
STUDENT_7 = 2.365
"""97.5 % quantile of Student's distribution with seven degrees of freedom."""
BLOCKS = 9


@dataclass(frozen=True)
class Setting:
    """A run: its callbacks beside collector, average, dashboard, health and summary, and options of its module."""

    callbacks: Callable[[int], list[pl.Callback]]
    module: dict[str, Any] = field(default_factory=dict)


def _cyclical(steps: int) -> pl.Callback:
    return CyclicalSchedule(num_cycles=12, exploration=0.5, samples_per_cycle=max(1, steps // 1000))


def _every(steps: int) -> pl.Callback:
    return SamplingSchedule(every_n_steps=100)


UNDERDAMPED = {"sampler": functools.partial(UnderdampedLangevin, friction=2.0), "lr": 0.002}
CONTOUR = functools.partial(ContourGradient, ContourRules(zeta=0.75), num_bins=100, first_edge=300.0, width=10.0)
SETTINGS = {
    "all": Setting(lambda steps: [_cyclical(steps), CONTOUR(), VarianceReducedEnergy(0, 10)]),
    "four chains, replica exchange": Setting(
        lambda steps: [_every(steps), ReplicaExchange([1.0, 1.2, 1.5, 2.0], [1.0, 1.2, 1.5, 2.0])], {"num_chains": 4}
    ),
    "EWSG": Setting(lambda steps: [_cyclical(steps), EWSG(1)]),
    "ControlVariates": Setting(lambda steps: [_cyclical(steps), ControlVariates(0, 10, energy=True)]),
    "CovarianceFriction": Setting(lambda steps: [_every(steps), CovarianceFriction(0, 10)], UNDERDAMPED),
}
"""What of the callbacks goes together; "plain" beside them is Lightning with torch's SGD."""


class Readings(pl.Callback):
    """Reads memory, open files and tracked objects every n steps."""

    def __init__(self, every: int, trace_from: int | None = None) -> None:
        self.every = every
        self.trace_from = trace_from
        self.rows: list[dict[str, int]] = []
        self._last = 0
        self._first: tracemalloc.Snapshot | None = None
        self.grown: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step == self._last or step % self.every:
            return
        self._last = step
        if step == self.trace_from:
            tracemalloc.start(12)
        if self.trace_from is not None and self._first is None and step >= self.trace_from + self.every:
            gc.collect()
            self._first = tracemalloc.take_snapshot()
        row = {"step": step, "resident": resident(), "files": len(os.listdir("/proc/self/fd"))}
        if step % (self.every * 10) == 0:
            gc.collect()
            row["objects"] = len(gc.get_objects())
        self.rows.append(row)

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._first is not None:
            gc.collect()
            statistics = tracemalloc.take_snapshot().compare_to(self._first, "traceback")
            for entry in sorted(statistics, key=lambda entry: -entry.size_diff)[:25]:
                self.grown.append(
                    f"{entry.size_diff} B in {entry.count_diff} blocks: {' < '.join(entry.traceback.format())}"
                )


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def network() -> nn.Module:
    """20-32-3, 771 parameters in 4 tensors."""
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))


def _logger(name: str, folder: str) -> Any:
    if name == "csv":
        return pl.loggers.CSVLogger(folder)
    if name == "tensorboard":
        return pl.loggers.TensorBoardLogger(folder)
    if name == "wandb":
        return pl.loggers.WandbLogger(save_dir=folder, offline=True, project="memory")
    return False


def fit(setting: str, logger: str, steps: int, every: int, trace_from: int | None = None) -> Readings:
    """Return the readings of one fit in this process."""
    torch.manual_seed(0)
    x = torch.randn(1200, 20)
    data = TensorBatches(x, (x[:, :3] + torch.randn(1200, 3)).argmax(1))
    train, held_out = (
        TensorBatches(*(tensor[part] for tensor in data.tensors)) for part in (slice(960), slice(960, 1200))
    )
    readings = Readings(every, trace_from)
    with tempfile.TemporaryDirectory() as folder:
        module: pl.LightningModule = PlainModule(network())
        callbacks: list[pl.Callback] = []
        if setting != "plain":
            chosen = SETTINGS[setting]
            options = {"sampler": SGHMC, "lr": 0.005, "seed": 1} | chosen.module
            module = BayesianModule(net=network(), likelihood=Categorical(), **options)
            unknown = evaluation_loader(TensorBatches(torch.randn(100, 20), torch.zeros(100).long()), 100)
            callbacks = [
                *chosen.callbacks(steps),
                SampleCollector(folder + "/samples", max_samples=100),
                BayesianModelAverage(ood={"noise": unknown}),
                PosteriorDashboard(),
                *([] if chosen.module.get("num_chains") else [ChainHealth()]),
                RunSummary(),
            ]
        checkpoints = ModelCheckpoint(folder + "/checkpoints", every_n_train_steps=1000, save_last=True)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=steps,
            check_val_every_n_epoch=10,
            callbacks=[*callbacks, checkpoints, readings],
            logger=_logger(logger, folder),
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, ResumableLoader(train, 16), evaluation_loader(held_out, 240))
    return readings


def slope(rows: list[dict[str, int]], steps: int) -> tuple[float, float]:
    """Return the slope of resident memory after the first tenth, in bytes a step, and half of its 95 % interval."""
    begin = steps / 10
    blocks: list[list[dict[str, int]]] = [[] for _ in range(BLOCKS)]
    for row in rows:
        if row["step"] > begin:
            blocks[min(BLOCKS - 1, int((row["step"] - begin - 1) / (steps - begin) * BLOCKS))].append(row)
    x = [sum(r["step"] for r in block) / len(block) for block in blocks]
    y = [sum(r["resident"] for r in block) / len(block) for block in blocks]
    x_mean, y_mean = sum(x) / BLOCKS, sum(y) / BLOCKS
    spread = sum((a - x_mean) ** 2 for a in x)
    rate = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread
    residual = sum((b - y_mean - rate * (a - x_mean)) ** 2 for a, b in zip(x, y, strict=True)) / (BLOCKS - 2)
    return rate, STUDENT_7 * math.sqrt(residual / spread)


def summary(rows: list[dict[str, int]], steps: int) -> dict[str, Any]:
    """Return what the table shows of a run."""
    rate, half = slope(rows, steps)
    late = [row for row in rows if row["step"] > steps / 10]
    objects = [row["objects"] for row in late if "objects" in row]
    files = [row["files"] for row in late]
    return {
        "resident_mb": {str(p): round(_at(rows, steps * p)["resident"] / 1e6, 1) for p in (0.1, 0.4, 0.7, 1.0)},
        "slope_bytes_per_step": round(rate, 2),
        "slope_half_interval": round(half, 2),
        "files": [min(files), max(files)],
        "objects": [objects[0], objects[-1]],
    }


def _at(rows: list[dict[str, int]], step: float) -> dict[str, int]:
    return min(rows, key=lambda row: abs(row["step"] - step))


def cost_of_samples(limits: tuple[int, ...] = (50, 500, 5000), counted: int = 200) -> list[dict[str, float]]:
    """Return for each limit the seconds of a further sample in a store that has reached it."""
    results = []
    for limit in limits:
        with tempfile.TemporaryDirectory() as folder:
            store = DiskStore.create(folder + "/samples")
            seconds = 0.0
            for step in range(limit + counted):
                start = time.perf_counter()
                store.append(PosteriorSample(step, cycle=0, chain=0, energy=0.0, parameters={"w": torch.zeros(10)}))
                store.discard(store.keep_newest(limit))
                if step >= limit:
                    seconds += time.perf_counter() - start
            results.append({"max_samples": limit, "milliseconds": seconds / counted * 1e3})
    return results


HEADER = (
    "| run | logger | MB at 10 %, 40 %, 70 %, 100 % | bytes a step (95 %) | open files | tracked objects | minutes |\n"
    "|---|---|---|---|---|---|---|"
)


def _row(setting: str, logger: str, found: dict[str, Any]) -> str:
    sizes = ", ".join(f"{size:.0f}" for size in found["resident_mb"].values())
    files = "{} to {}".format(*found["files"])
    objects = "{} to {}".format(*found["objects"])
    rate = f"{found['slope_bytes_per_step']:.1f} ± {found['slope_half_interval']:.1f}"
    return f"| {setting} | {logger} | {sizes} | {rate} | {files} | {objects} | {found['minutes']:.1f} |"


def _in_new_process(setting: str, logger: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.memory", "--one", setting, "--loggers", logger]
    command += ["--steps", str(options.steps), "--every", str(options.every)]
    if options.trace is not None:
        command += ["--trace", str(options.trace)]
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        done = subprocess.run([*command, "--out", result.name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{setting} with {logger}: {done.stderr[-2000:]}")
        return dict(json.load(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for memory.json and memory.md")
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--every", type=int, default=250)
    parser.add_argument("--loggers", nargs="+", choices=LOGGERS, default=list(LOGGERS))
    parser.add_argument("--settings", nargs="+", default=["plain", *SETTINGS])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--trace", type=int)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cost:
        for row in cost_of_samples():
            print(f"max_samples={row['max_samples']}: {row['milliseconds']:.2f} ms a sample")
        return
    if options.one:
        start = time.monotonic()
        readings = fit(options.one, options.loggers[0], options.steps, options.every, options.trace)
        found = summary(readings.rows, options.steps) | {"minutes": round((time.monotonic() - start) / 60, 2)}
        options.out.write_text(json.dumps(found | {"grown": readings.grown, "readings": readings.rows}))
        return
    cases = [
        (setting, logger)
        for setting in options.settings
        for logger in (options.loggers if setting in ("plain", "all") else options.loggers[:1])
    ]
    runs, lines = [], [HEADER]
    print(HEADER, flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda case: _in_new_process(*case, options), cases)
        for (setting, logger), found in zip(cases, results, strict=True):
            runs.append({"setting": setting, "logger": logger, **found})
            lines.append(_row(setting, logger, found))
            print(lines[-1], *found["grown"], sep="\n", flush=True)
            if options.out is not None:
                write(options.out, options.steps, runs, lines)


def write(folder: Path, steps: int, runs: list[dict[str, Any]], lines: list[str]) -> None:
    """Write the runs so far."""
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.date.today().isoformat()
    about = {"date": date, "torch": torch.__version__, "lightning": pl.__version__, "steps": steps}
    (folder / "memory.json").write_text(json.dumps(about | {"runs": runs}) + "\n")
    title = f"# Memory over {steps} steps\n\n{date}, torch {torch.__version__}, Lightning {pl.__version__}\n\n"
    (folder / "memory.md").write_text(title + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
