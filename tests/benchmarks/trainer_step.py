"""A step of `Trainer.fit` with all callbacks against plain Lightning SGD: `python -m tests.benchmarks.trainer_step`.

Both train the same network on the same in-memory data by whole batches, in turns in one process. Ours has the
schedule, collector, model average and run summary on, and its noise generation is measured apart (one `normal_` of
the parameters' size) and taken off, since no sampler can do without it.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    CyclicalSchedule,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
)
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.datamodules.base import evaluation_loader
from tests.benchmarks.networks import mlp, resnet20
from tests.benchmarks.timing import timed

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "MLP 784-100-10, batch 100": (mlp, (784,), 100, 600),
    "ResNet-20, batch 128": (resnet20, (3, 32, 32), 128, 24),
}
WARM_UP = 5


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 50,
}
"""Options of a trainer that writes nothing."""


def all_callbacks(folder: str) -> list[pl.Callback]:
    """Return what a run has beside its sampler, with one sample at its end, kept below a folder."""
    return [
        CyclicalSchedule(num_cycles=1, exploration=0.0, samples_per_cycle=1),
        SampleCollector(folder + "/samples"),
        BayesianModelAverage(),
        PosteriorDashboard(figures=()),
        RunSummary(),
    ]


class Clock(pl.Callback):
    """Measures the seconds from the end of the warm-up to the end of the training, evaluations of samples included."""

    def __init__(self) -> None:
        self.start = 0.0
        self.seconds = 0.0
        self.steps = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == WARM_UP:
            self.start = time.perf_counter()
        self.steps = trainer.global_step - WARM_UP
        self.seconds = time.perf_counter() - self.start

    @property
    def per_step(self) -> float:
        return self.seconds / self.steps


class PlainModule(pl.LightningModule):
    """The same network trained by torch's SGD."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/nll", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def _fit(
    module: pl.LightningModule, callbacks: list[pl.Callback], data: TensorBatches, batch: int, steps: int
) -> float:
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps + WARM_UP,
        callbacks=[*callbacks, clock],
        **QUIET,
    )
    held_out = TensorBatches(*(tensor[:batch] for tensor in data.tensors))
    trainer.fit(module, ResumableLoader(data, batch), evaluation_loader(held_out, batch))
    return clock.per_step


def run(case: str, rounds: int) -> list[dict[str, float]]:
    """Return for each round the seconds a step of plain SGD, of ours and of the noise alone."""
    build, shape, batch, steps = CASES[case]
    generator = torch.Generator().manual_seed(0)
    data = TensorBatches(
        torch.randn(batch * 60, *shape, generator=generator), torch.randint(10, (batch * 60,), generator=generator)
    )
    measured = []
    for turn in range(rounds + 1):
        plain = _fit(PlainModule(build()), [], data, batch, steps)
        module = BayesianModule(net=build(), likelihood=Categorical(), sampler=SGHMC, lr=0.01)
        with tempfile.TemporaryDirectory() as folder:
            ours = _fit(module, all_callbacks(folder), data, batch, steps)
        buffer = torch.empty(sum(p.numel() for p in module.parameters()))
        noise = timed(lambda buffer=buffer: buffer.normal_(), 50)  # type: ignore[misc]
        if turn > 0:
            measured.append({"plain": plain, "ours": ours, "noise": noise})
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| network | plain ms | ours ms | noise ms | (ours - noise)/plain | least | largest | more µs |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        rows = run(case, options.rounds)
        median = {key: sorted(row[key] for row in rows)[len(rows) // 2] * 1e3 for key in rows[0]}
        ratio = sorted((row["ours"] - row["noise"]) / row["plain"] for row in rows)
        more = sorted((row["ours"] - row["noise"] - row["plain"]) * 1e6 for row in rows)[len(rows) // 2]
        print(
            f"| {case} | {median['plain']:.3f} | {median['ours']:.3f} | {median['noise']:.3f} | "
            f"{ratio[len(ratio) // 2]:.3f} | {ratio[0]:.3f} | {ratio[-1]:.3f} | {more:.0f} |"
        )


if __name__ == "__main__":
    main()
