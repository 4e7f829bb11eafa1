"""What every stage uses: the size of the run, its data, network, module, callbacks and trainer."""

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch._dynamo.utils
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, ContourRules
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    CyclicalSchedule,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
)
from lightning_sgmcmc.datamodules import ImageDataModule, Split
from lightning_sgmcmc.datamodules.augmentation import Augmentation
from lightning_sgmcmc.recipes.shared.resnet import resnet
from tests.benchmarks.trainer_step import QUIET

Say = Callable[..., None]
"""Records findings: `say(case, name=value, …)`."""


@dataclass(frozen=True)
class Setting:
    """The size of a measurement.

    Args:
        tiny: a small network on a CPU, for a look at the script itself.
        turn: returns when nothing else is measured any more and no compiler runs beside.
    """

    tiny: bool = False
    turn: Callable[[], None] = lambda: None

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    @property
    def batch(self) -> int:
        return 8 if self.tiny else 128

    @property
    def side(self) -> int:
        return 8 if self.tiny else 32

    def network(self, blocks: int = 3) -> nn.Module:
        """Return ResNet-20, or a residual network of two channels, always with the same values.

        Args:
            blocks: residual blocks in each of the three stages.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return resnet(1, 2, 10) if self.tiny else resnet(blocks, 16, 10)

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if not self.tiny:
            torch.cuda.synchronize()


class RandomImages(ImageDataModule):
    """Random bytes as images of ten classes, cropped, mirrored and erased in part, as a user's CIFAR-10 would be."""

    num_classes = 10

    def __init__(self, setting: Setting, train: int = 0, held_out: int = 2000, augment: bool = True) -> None:
        super().__init__(setting.batch, drop_last=True)
        self.counts = (train or (400 if setting.tiny else 50_000), 40 if setting.tiny else held_out)
        self.image_shape = (3, setting.side, setting.side)
        self.padding = (1 if setting.tiny else 4) if augment else 0

    def load(self) -> tuple[Split, Split, Split]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (sum(self.counts), *self.image_shape), dtype=torch.uint8, generator=generator)
        labels = torch.randint(10, (len(images),), generator=generator)
        self._normalise_by(images[:1000])
        train, held_out = (
            self._split(i, t) for i, t in zip(images.split(self.counts), labels.split(self.counts), strict=True)
        )
        return train, held_out, self._split(images[:0], labels[:0])

    def train_transform(self) -> Callable[[Tensor], Tensor]:
        if not self.padding:
            return self.transform()
        return Augmentation(self.transform(), self.padding, flip=True, erasing=0.5)


def module(setting: Setting, chains: int, blocks: int = 3, **options: Any) -> BayesianModule:
    """Return the chains that are measured; options are the module's, except the network's blocks."""
    chosen: dict[str, Any] = {"sampler": SGHMC, "lr": 0.01, "num_chains": chains, "seed": 1} | options
    return BayesianModule(net=setting.network(blocks), likelihood=Categorical(), **chosen)


class PlainSGD(pl.LightningModule):
    """The baseline: one network, eager or compiled as torch does by default, trained by torch's SGD."""

    def __init__(self, setting: Setting, is_compiled: bool = False) -> None:
        super().__init__()
        self.net = setting.network()
        if is_compiled and not setting.tiny:
            self.net.compile()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def every_callback(folder: str, interacting: bool, samples: int = 1) -> list[pl.Callback]:
    """Return what a run has beside its sampler: temperature 0 first, then 1 until the last sample at its end.

    Args:
        folder: for the samples.
        interacting: whether the chains learn a contour together.
        samples: of each chain.
    """
    contour = ContourGradient(ContourRules(zeta=0.75), 100, first_edge=1e4, width=2e3, interacting=True)
    return [
        CyclicalSchedule(num_cycles=1, exploration=0.3, samples_per_cycle=samples),
        *([contour] if interacting else []),
        SampleCollector(f"{folder}/samples"),
        BayesianModelAverage(),
        PosteriorDashboard(figures=()),
        ChainHealth(warn=False),
        RunSummary(),
    ]


def fit(
    setting: Setting,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    steps: int,
    callbacks: Sequence[pl.Callback] = (),
    ckpt_path: str | None = None,
    **options: Any,
) -> pl.Trainer:
    """Fit on the measured device in mixed bfloat16, unless options of the trainer say otherwise."""
    chosen: dict[str, Any] = {
        "accelerator": "cpu" if setting.tiny else "gpu",
        "devices": 1,
        "precision": "32-true" if setting.tiny else "bf16-mixed",
        "max_steps": steps,
        "max_epochs": -1,
        "num_sanity_val_steps": 0,
        **QUIET,
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **(chosen | options))
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


class Windows(pl.Callback):
    """Milliseconds a step of equal windows of a fit, by the wall and by events on the device's stream.

    Args:
        setting: the measurement's.
        first: step at which the first window begins.
        length: steps of a window.
        count: number of windows.
    """

    def __init__(self, setting: Setting, first: int, length: int, count: int) -> None:
        self._setting = setting
        self.first, self.length, self.last = first, length, first + length * count
        self.wall: list[float] = []
        self.stream: list[float] = []
        self._begun: tuple[float, Any] | None = None
        self._made = time.perf_counter()
        self.running: list[int] = []
        """Processes that ran at the ends of the windows, this one included, on Linux."""
        self.compilation: dict[str, float] = {}
        self.first_step: dict[str, float] = {}
        """Seconds from here to the end of the first step, in which the network is compiled: by the wall beside the
        other stages, and the processor's of this process and of the compiler's processes."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step == 1:
            self._setting.wait()
            self.first_step = {"to_first_step_s": time.perf_counter() - self._made} | processor_seconds()
            self.compilation = compilation()
        if not self.first <= step <= self.last or (step - self.first) % self.length:
            return
        if step == self.first:
            self._setting.turn()
        mark = None
        if not self._setting.tiny:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._setting.wait()
        now = time.perf_counter()
        if self._begun is not None:
            began, earlier = self._begun
            self.wall.append((now - began) / self.length * 1e3)
            with suppress(OSError):
                self.running.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
            self.stream.append(math.nan if mark is None else earlier.elapsed_time(mark) / self.length)
        self._begun = (time.perf_counter(), mark)


def processor_seconds() -> dict[str, float]:
    """Return the processor seconds of this process, and of its group's processes that are alive, on Linux."""
    own = time.process_time()
    group, ticks = str(os.getpgid(0)), 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if fields[2] == group else 0
    return {"own_cpu_s": own, "compilers_cpu_s": max(ticks / os.sysconf("SC_CLK_TCK") - own, 0.0)}


def compilation() -> dict[str, float]:
    """Return the seconds of the longest parts of compilation, as torch has counted them; some lie in others."""
    seconds = {name: sum(times) for name, times in torch._dynamo.utils.compilation_time_metrics.items()}
    return dict(sorted(seconds.items(), key=lambda pair: -pair[1])[:20])


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return max |a - b|/max |b| over all tensors of two states."""
    first, second = (torch.cat([t.detach().double().cpu().flatten() for t in s.values()]) for s in (one, other))
    return float((first - second).abs().max() / second.abs().max())


def be_quiet() -> None:
    """Let only errors through, since a stage's findings are its records."""
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
