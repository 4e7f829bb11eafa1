"""A fit of a small residual network on the stand-in, and what each of its steps did."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Categorical, ContourRules, ResumableLoader, callbacks, samplers
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.datamodules.augmentation import Augmentation
from lightning_sgmcmc.datamodules.base import evaluation_loader
from lightning_sgmcmc.recipes.cifar_sprint.clock import Clock
from lightning_sgmcmc.recipes.cifar_sprint.network import SprintNetwork, whitening_filters
from lightning_sgmcmc.recipes.shared.resnet import resnet
from tests.cuda.record import Record
from tests.cuda.stand_in import StandIn
from tests.cuda.trainer import stand_in_trainer

STEPS, ORDINARY, LOG_EVERY = 7, 6, 5
"""A fit's steps, an ordinary one, and the steps between logs; `FirstBatches` looks at batches 1, 2, 4, 8, …"""
CLASSES = 10


@dataclass(frozen=True)
class Case:
    """The settings of a fit; the defaults are ResNet-20's four chains with all usual callbacks."""

    chains: int = 4
    sampler: str = "SGHMC"
    options: dict[str, Any] = field(default_factory=dict)
    """Of the sampler."""
    execution: str = "auto"
    compile: Any = "auto"
    precision: str = "bf16-mixed"
    blocks: int = 3
    width: int = 2
    batch: int = 4
    batches: int = 40
    """Of an epoch."""
    usual: bool = True
    """Whether samples are collected, averaged, drawn and summarised, and the chains' health is measured."""
    health: int = 20
    """Steps between two measurements of the chains' health."""
    augment: bool = True
    resident: bool = True
    """Whether the data are on the device."""
    on_cpu: bool = False
    """Whether the fit is on the CPU, for comparison; its precision is float32."""
    dropout: float = 0.0
    scalar: bool = False
    """Whether the network has a parameter of shape ()."""
    channels_last: bool = False
    """Whether the network's weights lie channels last."""
    contour: bool = False
    interacting: bool = False
    clip: float | None = None
    accumulate: int = 1
    replica_exchange: bool = False
    ewsg: int = 0
    """Proposals of EWSG; 0 for none."""
    metropolis: int = 0
    """Steps of a trajectory of `MetropolisTest`; 0 for none."""
    control_variates: bool = False
    variance_reduced: bool = False
    covariance_friction: bool = False
    lr_each: bool = False
    nonfinite: str = "stop"
    schedule: str = "cyclical"
    """Or "sampling": a sample every five steps, at the module's temperature."""
    sprint: bool = False
    """Whether the network and the clock are those of the recipe `cifar_sprint`."""
    steps: int = STEPS
    seed: int = 1
    other: str = ""
    """One of `OTHERS`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Other arguments of the module."""


OTHERS: dict[str, Callable[[], pl.Callback]] = {
    "AutoSampling": lambda: callbacks.AutoSampling(num_draws=4),
    "DeepEnsemble": callbacks.DeepEnsemble,
    "DeepEnsemble by AdamW": lambda: callbacks.DeepEnsemble(optimizer=torch.optim.AdamW, warm_up=0.2),
    "SWAG": lambda: callbacks.SWAG(rank=2, num_draws=2, collection=0.6, every_n_steps=2),
    "MCDropout": lambda: callbacks.MCDropout(num_draws=2),
    "WarmStart": lambda: callbacks.WarmStart(lr=0.01, epochs=1),
    "LearningCoefficient": lambda: callbacks.LearningCoefficient(warn=False),
    "a contour that learns its range": lambda: callbacks.ContourGradient(
        ContourRules(zeta=0.75), num_bins=30, warm_up_steps=4
    ),
}
"""Callbacks that take a fit for themselves."""
OWN_SCHEDULES = ("AutoSampling", "DeepEnsemble", "DeepEnsemble by AdamW", "SWAG")


@dataclass
class Fit:
    """A finished fit and its record by step."""

    module: BayesianModule
    trainer: pl.Trainer
    steps: "list[dict[str, Counter[str]]]"
    drawn: int
    """The last step that drew samples, from 1; 0 without any."""


class Scaled(nn.Module):
    """A network with a parameter of shape () on its output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


class Steps(pl.Callback):
    """Splits the record by step: from the end of one, after all other callbacks, to the end of the next."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.steps: list[dict[str, Counter[str]]] = []
        self.drawn = 0
        self._made = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._made = trainer.global_step
        self.record.clear()

    def on_posterior_sample(self, *args: Any) -> None:
        self.drawn = len(self.steps) + 1

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step > self._made:
            self._made = trainer.global_step
            self.steps.append(self.record.clear())


def _bytes_to_floats(images: Tensor) -> Tensor:
    return images.float() / 255


def loaders(case: Case) -> tuple[Any, Any]:
    """Return training and validation batches."""
    generator = torch.Generator().manual_seed(0)
    count = case.batch * case.batches
    images = torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    if case.resident and not case.on_cpu:
        images, labels = images.cuda(), labels.cuda()
    augmentation = Augmentation(_bytes_to_floats, padding=1, flip=True, erasing=0.5)
    data = TensorBatches(images, labels, transform=augmentation if case.augment else _bytes_to_floats)
    held = 2 * case.batch
    held_out = TensorBatches(images[:held], labels[:held], transform=_bytes_to_floats)
    return ResumableLoader(data, case.batch, drop_last=True), evaluation_loader(held_out, case.batch)


def network(case: Case) -> nn.Module:
    """Return the network on the CPU; ResNet-20 has three blocks a stage."""
    torch.manual_seed(0)
    if case.sprint:
        filters = whitening_filters(torch.rand(20, 3, 8, 8), 12, 3)
        return SprintNetwork(CLASSES, filters, (8, 16, 16), groups=2, scale=0.5)
    net = resnet(case.blocks, case.width, CLASSES)
    if case.dropout:
        net.insert(len(net) - 1, nn.Dropout(case.dropout))  # type: ignore[operator]
    net = Scaled(net) if case.scalar else net
    return net.to(memory_format=torch.channels_last) if case.channels_last else net


def build(case: Case) -> BayesianModule:
    """Return the module."""
    lr: Any = 0.001
    if case.lr_each:
        lr = [lr * (1 + chain) for chain in range(case.chains)]
    options: dict[str, Any] = {
        "lr": lr,
        "num_chains": case.chains,
        "compile": case.compile,
        "chain_execution": case.execution,
        "seed": case.seed,
        "nonfinite_energy": case.nonfinite,
    }
    sampler = partial(getattr(samplers, case.sampler), **case.options)
    return BayesianModule(net=network(case), likelihood=Categorical(), sampler=sampler, **(options | case.extra))


def callbacks_for(case: Case, folder: Path) -> list[pl.Callback]:
    """Return the callbacks of a fit."""
    made: list[pl.Callback] = [OTHERS[case.other]()] if case.other else []
    if case.other in OWN_SCHEDULES:
        pass
    elif case.schedule == "cyclical" and not case.replica_exchange:
        made.append(callbacks.CyclicalSchedule(num_cycles=1, exploration=0.2, samples_per_cycle=1))
    else:
        made.append(callbacks.SamplingSchedule(every_n_steps=LOG_EVERY))
    if case.contour or case.interacting:
        rules = ContourRules(zeta=0.75)
        made.append(
            callbacks.ContourGradient(rules, num_bins=50, first_edge=1.0, width=50.0, interacting=case.interacting)
        )
    if case.replica_exchange:
        made.append(callbacks.ReplicaExchange([1.0 + slot for slot in range(case.chains)]))
    if case.ewsg:
        made.append(callbacks.EWSG(case.ewsg))
    if case.metropolis:
        made.append(callbacks.MetropolisTest(case.metropolis))
    if case.control_variates:
        made.append(callbacks.ControlVariates(energy=True))
    if case.variance_reduced:
        made.append(callbacks.VarianceReducedEnergy(0, 1))
    if case.covariance_friction:
        made.append(callbacks.CovarianceFriction(0, 1))
    if case.usual:
        made += [
            callbacks.SampleCollector(folder / "samples"),
            callbacks.BayesianModelAverage(),
            callbacks.PosteriorDashboard(figures=()),
            callbacks.RunSummary(),
        ]
        if not case.replica_exchange:  # its chains have temperatures of their own
            made.append(callbacks.ChainHealth(every_n_steps=case.health, warn=False))
    if case.sprint:
        made.append(Clock())
    return made


def fit(
    device: StandIn,
    case: Case,
    folder: Path,
    resumed: Path | None = None,
    module: BayesianModule | None = None,
    **options: Any,
) -> Fit:
    """Run `Trainer.fit` on the stand-in.

    Args:
        device: the stand-in, in use.
        case: the settings.
        folder: where samples and checkpoints go.
        resumed: a checkpoint to continue from.
        module: the module, if it is not the case's own.
        options: the trainer's other arguments.
    """
    module = build(case) if module is None else module
    steps = Steps(device.record)
    own = module.configure_callbacks
    module.configure_callbacks = lambda: [*own(), steps]  # type: ignore[method-assign]
    quiet: dict[str, Any] = {
        "max_steps": case.steps,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": LOG_EVERY,
        "gradient_clip_val": case.clip,
        "accumulate_grad_batches": case.accumulate,
        "num_sanity_val_steps": 0,
    }
    options = quiet | {"callbacks": callbacks_for(case, folder)} | options
    trainer = pl.Trainer(accelerator="cpu", **options) if case.on_cpu else stand_in_trainer(case.precision, **options)
    training, held_out = loaders(case)
    trainer.fit(module, training, held_out, ckpt_path=resumed)
    return Fit(module, trainer, steps.steps, steps.drawn)


def summary(step: "dict[str, Counter[str]]", lines: int = 20) -> dict[str, Any]:
    """Return a step's numbers.

    Args:
        step: the step's counters.
        lines: how many lines of source are named for each counter.
    """
    return {
        "launches": step["launches"].total(),
        "graphs": step["graphs"].total(),
        "waits": step["waits"].total(),
        "blocking_copies": step["blocking"].total(),
        "waits_of_other_threads": step["aside"].total(),
        "by_source_line": {
            name: dict(step[name].most_common(lines)) for name in ("launches", "waits", "transfers") if step[name]
        },
    }
