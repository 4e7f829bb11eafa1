"""The trainer's settings under which a `BayesianModule` at temperature 0 is compared with torch's SGD."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import LightningEnvironment
from pytorch_lightning import callbacks as of_lightning
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import CombinedLoader
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from tests.conduct import modules as user
from tests.conduct.modules import Batches, N, User, loader

Run = Callable[[Any, Any, Path], "tuple[pl.Trainer, Any]"]
"""Takes a module, a function that makes another one, and a folder; returns the trainer and module at the end."""


@dataclass
class Setting:
    """A setting.

    Attributes:
        options: the trainer's.
        train: makes the training loader.
        validation: makes the validation loader, None for none.
        mixins: what the user overrides.
        attributes: of the user's class.
        callbacks: makes the user's callbacks, for a folder.
        num_data: N that the user gives, None where the library counts it.
        run: replaces `fit` with these.
        is_quick: whether it belongs to the default tests.
        logs: whether the run has a logger.
    """

    options: dict[str, Any] = field(default_factory=dict)
    train: Callable[[], Any] = loader
    validation: Callable[[], Any] | None = None
    mixins: tuple[type[User], ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Path], list[pl.Callback]] = lambda folder: []
    num_data: int | None = None
    run: Run | None = None
    is_quick: bool = False
    logs: bool = False

    def fitted(self, module: Any, make: Any, folder: Path) -> tuple[pl.Trainer, Any]:
        """Return the trainer and the module at the run's end."""
        if self.run is not None:
            return self.run(module, make, folder)
        logger = {"logger": CSVLogger(folder)} if self.logs else {}
        trainer = trainer_of(folder, *self.callbacks(folder), **self.options, **logger)
        trainer.fit(module, self.train(), None if self.validation is None else self.validation())
        return trainer, module


def trainer_of(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    saves = any(isinstance(callback, of_lightning.ModelCheckpoint) for callback in callbacks)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": saves,
        "callbacks": list(callbacks),
        "log_every_n_steps": 1,
    }
    chosen = {} if options.get("barebones") else quiet
    return pl.Trainer(**{"accelerator": "cpu", "devices": 1, "default_root_dir": folder, **chosen, **options})


def held_out() -> Any:
    return loader(8)


def unsized() -> Any:
    return DataLoader(user.Unsized(), batch_size=4)


def validated(quick: bool = False, **options: Any) -> Setting:
    return Setting(options, validation=held_out, is_quick=quick)


def epochs(count: int, quick: bool = False, **options: Any) -> Setting:
    return Setting({"max_epochs": count, **options}, is_quick=quick)


def with_callback(*make: Callable[[Path], pl.Callback], **options: Any) -> Setting:
    made = {"max_epochs": 2, **options}
    return Setting(made, validation=held_out, callbacks=lambda folder: [one(folder) for one in make])


def overriding(*mixins: type[User], quick: bool = False, **options: Any) -> Setting:
    attributes = {"schedulers": staticmethod(SCHEDULERS["StepLR"])}
    made = {"max_epochs": 2, **options}
    return Setting(made, validation=held_out, mixins=mixins, attributes=attributes, is_quick=quick)


def of_iterables(train: Callable[[], Any], quick: bool = False, **options: Any) -> Setting:
    return Setting({"max_epochs": 2, **options}, train, num_data=N, is_quick=quick)


def all_of(_: Any, batch: Any) -> Any:
    """Return the data of several loaders as one batch."""
    parts = [part for part in (batch.values() if isinstance(batch, dict) else batch) if part is not None]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def combined(train: Callable[[], Any]) -> Setting:
    return Setting({"max_epochs": 2}, train, num_data=N, attributes={"pair": all_of})


# -- schedulers of torch ----------------------------------------------------------------------------------------------


def by_step(make: Callable[[Any], Any], **options: Any) -> Callable[[Any], Any]:
    return lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": make(o), "interval": "step", **options}}


def plateau(optimizer: Any, **options: Any) -> Any:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/nll", **options}}


def two(optimizer: Any) -> Any:
    first = {"scheduler": lr_scheduler.LambdaLR(optimizer, lambda s: 0.9**s), "interval": "step", "name": "one"}
    return [optimizer], [first, lr_scheduler.MultiStepLR(optimizer, [1], 0.5)]


def sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1, 1), lr_scheduler.CosineAnnealingLR(optimizer, 3)]
    return [optimizer], [lr_scheduler.SequentialLR(optimizer, parts, [1])]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: ([o], [lr_scheduler.StepLR(o, 1, 0.5)]),
    "every second step": by_step(lambda o: lr_scheduler.ExponentialLR(o, 0.9), frequency=2),
    "one cycle": by_step(lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=18, cycle_momentum=False)),
    "plateau": plateau,
    "plateau, not strict": lambda o: plateau(o, monitor="nothing", strict=False),
    "sequential": sequential,
    "warm restarts": by_step(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4)),
    "two": two,
    "cyclic": by_step(lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False)),
    "constant": lambda o: {"optimizer": o, "lr_scheduler": lr_scheduler.ConstantLR(o, 0.5, 2)},
}


def scheduled(name: str, **options: Any) -> Setting:
    return Setting(
        {"max_epochs": 3, **options},
        validation=held_out,
        attributes={"schedulers": staticmethod(SCHEDULERS[name])},
        callbacks=lambda folder: [of_lightning.LearningRateMonitor()],
        logs=True,
        is_quick=name == "plateau",
    )


# -- callbacks that change the run ------------------------------------------------------------------------------------


class Extends(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.fit_loop.max_epochs = 4


class Stops(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 8:
            trainer.should_stop = True


class Accumulates(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.accumulate_grad_batches = 1 if trainer.current_epoch else 2


# -- runs of several calls --------------------------------------------------------------------------------------------


def fit_twice(module: Any, make: Any, folder: Path) -> tuple[pl.Trainer, Any]:
    trainer = trainer_of(folder, max_epochs=2)
    trainer.fit(module, loader())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, loader())
    return trainer, module


def two_trainers(module: Any, make: Any, folder: Path) -> tuple[pl.Trainer, Any]:
    trainer_of(folder, max_epochs=2).fit(module, loader())
    trainer = trainer_of(folder, max_epochs=3)
    trainer.fit(module, loader())
    return trainer, module


def fit_after_test(module: Any, make: Any, folder: Path) -> tuple[pl.Trainer, Any]:
    trainer = trainer_of(folder, max_epochs=2)
    trainer.test(module, loader(8), verbose=False)
    trainer.validate(module, loader(8), verbose=False)
    trainer.fit(module, loader(), loader(8))
    trainer.test(module, loader(8), verbose=False)
    return trainer, module


def loaded(module: Any, make: Any, folder: Path) -> tuple[pl.Trainer, Any]:
    trainer = trainer_of(folder, max_epochs=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(folder / "x.ckpt")
    content = torch.load(folder / "x.ckpt", weights_only=True)
    module = make()
    module.load_state_dict(content["state_dict"])
    trainer = trainer_of(folder, max_epochs=1)
    trainer.fit(module, loader())
    return trainer, module


def resumed(which: str, **options: Any) -> Run:
    """Return a run of two epochs (eight steps for "step") that goes on to four, in a new trainer."""

    def run(module: Any, make: Any, folder: Path) -> tuple[pl.Trainer, Any]:
        monitor = "val/nll" if which == "best" else None
        saver = of_lightning.ModelCheckpoint(
            folder,
            filename="{step}",
            save_last=True,
            monitor=monitor,
            every_n_train_steps=4 if which == "step" else None,
            save_top_k=-1 if which == "step" else 1,
        )
        trainer = trainer_of(folder, saver, **({"max_steps": 8} if which == "step" else {"max_epochs": 2}), **options)
        trainer.fit(module, loader(), loader(8))
        path = {"step": str(folder / "step=4.ckpt"), "saved": str(folder / "mine.ckpt")}.get(which, which)
        if which == "saved":
            trainer.save_checkpoint(path)
        if which == "hpc":
            trainer.save_checkpoint(folder / "hpc_ckpt_1.ckpt")
        if which == "best":
            path = saver.best_model_path
        module = make()
        saver = of_lightning.ModelCheckpoint(folder, save_last=True, monitor=monitor)
        trainer = trainer_of(folder, saver, max_epochs=4, **options)
        trainer.fit(module, loader(), loader(8), ckpt_path=path)
        return trainer, module

    return run


def reloading(every: int) -> Run:
    def run(module: Any, make: Any, folder: Path) -> tuple[pl.Trainer, Any]:
        trainer = trainer_of(folder, max_epochs=4, reload_dataloaders_every_n_epochs=every)
        trainer.fit(module)
        return trainer, module

    return run


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, variables):
        yield


def in_environment(**variables: str) -> Run:
    def run(module: Any, make: Any, folder: Path) -> tuple[pl.Trainer, Any]:
        with environment(**variables):
            trainer = trainer_of(folder, max_epochs=2)
            trainer.fit(module, loader())
        return trainer, module

    return run


SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "x",
    "SLURM_NODELIST": "localhost",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS_PER_NODE": "1",
}
ELASTIC = {
    "TORCHELASTIC_RUN_ID": "1",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}


def early(**options: Any) -> Callable[[Path], pl.Callback]:
    return lambda folder: of_lightning.EarlyStopping(**options)


WORSE = {"monitor": "val/nll", "patience": 1, "mode": "max"}

EQUAL: dict[str, Setting] = {
    "epochs": validated(max_epochs=3, quick=True),
    "accumulation": validated(max_epochs=3, accumulate_grad_batches=2, quick=True),
    "accumulation and steps": epochs(-1, max_steps=5, accumulate_grad_batches=3),
    "clipping by norm": epochs(3, gradient_clip_val=0.1),
    "clipping by value": epochs(3, gradient_clip_val=0.02, gradient_clip_algorithm="value"),
    "clipping and accumulation": epochs(2, gradient_clip_val=0.1, accumulate_grad_batches=2, quick=True),
    **{f"precision {p}": validated(max_epochs=2, precision=p) for p in ("32-true", "bf16-mixed", "64-true")},
    "precision 16-mixed": validated(max_epochs=2, precision="16-mixed"),
    "steps": epochs(-1, max_steps=7, quick=True),
    "no step": epochs(-1, max_steps=0),
    "no epoch": epochs(0),
    "both limits": epochs(2, max_steps=100),
    "least epochs": with_callback(early(**WORSE), min_epochs=3, max_epochs=5),
    "least steps": with_callback(early(**WORSE), min_steps=17, max_epochs=5),
    "validation within an epoch": validated(max_epochs=2, val_check_interval=0.5),
    "validation every second batch": validated(max_epochs=2, val_check_interval=2),
    "validation across epochs": validated(max_epochs=4, val_check_interval=8, check_val_every_n_epoch=None),
    "validation and accumulation": validated(max_epochs=2, val_check_interval=0.5, accumulate_grad_batches=2),
    "validation by time": validated(max_epochs=2, val_check_interval="00:00:01:00"),
    "validation every second epoch": validated(max_epochs=4, check_val_every_n_epoch=2),
    "half of the batches": validated(max_epochs=2, limit_train_batches=0.5),
    "four batches": validated(max_epochs=2, limit_train_batches=4, limit_val_batches=0.5),
    "no validation batches": validated(max_epochs=2, limit_val_batches=0),
    "trial": validated(fast_dev_run=True, quick=True),
    "trial of three": validated(fast_dev_run=3),
    "whole sanity check": validated(max_epochs=2, num_sanity_val_steps=-1),
    "barebones": validated(max_epochs=2, barebones=True),
    "without inference mode": validated(max_epochs=2, inference_mode=False),
    "deterministic": validated(max_epochs=2, deterministic=True),
    "benchmark": validated(max_epochs=2, benchmark=True),
    "anomaly detection": epochs(2, detect_anomaly=True),
    **{f"profiler {p}": epochs(2, profiler=p) for p in ("simple", "advanced", "pytorch")},
    "no hyperparameters logged": epochs(2, enable_autolog_hparams=False),
    "time limit": epochs(2, max_time="00:00:10:00"),
    "no distributed sampler": epochs(2, use_distributed_sampler=False),
    "ddp of one": epochs(2, strategy="ddp"),
    "an environment's plugin": epochs(2, plugins=[LightningEnvironment()]),
    "epochs that a hook cuts": Setting({"max_epochs": 3}, mixins=(user.CutsEpochs,)),
    "drop_last": Setting({"max_epochs": 2}, lambda: loader(22, drop_last=True), num_data=22),
    "shuffled": Setting(
        {"max_epochs": 2}, lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(3)), is_quick=True
    ),
    "workers": Setting({"max_epochs": 2}, lambda: loader(num_workers=1)),
    "persistent workers": Setting({"max_epochs": 2}, lambda: loader(num_workers=1, persistent_workers=True)),
    "data without length": of_iterables(unsized, quick=True),
    "data without length, accumulated": of_iterables(unsized, accumulate_grad_batches=2),
    "data without length, limited": of_iterables(unsized, limit_train_batches=3),
    "data without length, steps": of_iterables(unsized, max_epochs=-1, max_steps=9),
    "data without length, validated": Setting(
        {"max_epochs": 2, "val_check_interval": 2}, unsized, held_out, num_data=N
    ),
    "an iterable": of_iterables(Batches, max_epochs=1),
    **{
        f"combined loaders, {mode}": combined(lambda mode=mode: CombinedLoader({"a": loader(), "b": loader(12)}, mode))
        for mode in ("min_size", "max_size_cycle", "max_size")
    },
    "loaders in a dict": combined(lambda: {"a": loader(), "b": loader(12)}),
    "loaders in a list": combined(lambda: [loader(), loader(12)]),
    "two validation loaders": Setting({"max_epochs": 2}, validation=lambda: [loader(8), loader(12)]),
    **{f"scheduler {name}": scheduled(name) for name in SCHEDULERS},
    "scheduler and accumulation": scheduled("every second step", accumulate_grad_batches=2),
    **{
        f"own {cls.__name__}": overriding(cls, quick=cls is user.Toggles)
        for cls in (
            user.SetsStepSize,
            user.StepsEverySecond,
            user.Toggles,
            user.SkipsOne,
            user.Clips,
            user.Halves,
            user.ClearsGradients,
            user.StepsSchedulers,
            user.MovesBatches,
            user.SetsUp,
            user.ChangesGradients,
            user.LogsEverywhere,
        )
    },
    "own SkipsOne, accumulated": overriding(user.SkipsOne, accumulate_grad_batches=2),
    "accumulation by epoch": with_callback(
        lambda folder: of_lightning.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3}), max_epochs=4
    ),
    "early stopping by a threshold": with_callback(early(monitor="val/nll", stopping_threshold=100.0), max_epochs=9),
    "early stopping at an epoch's end": with_callback(
        early(monitor="epoch_metric", mode="max", patience=1, check_on_train_epoch_end=True), max_epochs=9
    ),
    "timer": with_callback(lambda folder: of_lightning.Timer("00:01:00:00", interval="step")),
    "lambda callback": with_callback(
        lambda folder: of_lightning.LambdaCallback(on_train_batch_end=lambda t, m, *a: m.record("lambda"))
    ),
    "checkpoint of an exception": with_callback(of_lightning.OnExceptionCheckpoint, enable_checkpointing=True),
    "rich progress bar": with_callback(lambda folder: of_lightning.RichProgressBar(), enable_progress_bar=True),
    "tqdm progress bar": with_callback(lambda folder: of_lightning.TQDMProgressBar(), enable_progress_bar=True),
    "a callback raises max_epochs": with_callback(lambda folder: Extends()),
    "a callback stops": with_callback(lambda folder: Stops(), max_epochs=4),
    "a callback stops after least epochs": with_callback(lambda folder: Stops(), max_epochs=4, min_epochs=3),
    "a callback accumulates": with_callback(lambda folder: Accumulates(), max_epochs=4),
    "fit twice": Setting(run=fit_twice, is_quick=True),
    "two trainers": Setting(run=two_trainers),
    "fit after test": Setting(run=fit_after_test),
    "loaded weights": Setting(run=loaded),
    **{f"resumed from {w}": Setting(run=resumed(w)) for w in ("best", "saved", "hpc", "step")},
    "resumed from last": Setting(run=resumed("last"), is_quick=True),
    "resumed, accumulated": Setting(run=resumed("last", accumulate_grad_batches=2)),
    "resumed, clipped": Setting(run=resumed("step", gradient_clip_val=0.1)),
    "reloaded every epoch": Setting(run=reloading(1), mixins=(user.Reloads,)),
    "reloaded every second epoch": Setting(run=reloading(2), mixins=(user.Reloads,)),
    "reloaded with more batches": Setting(run=reloading(1), mixins=(user.ReloadsMore,), is_quick=True),
    "reloaded with fewer batches": Setting(run=reloading(1), mixins=(user.ReloadsFewer,)),
    "SLURM": Setting(run=in_environment(**SLURM)),
    "torchelastic": Setting(run=in_environment(**ELASTIC)),
}
"""Settings with the same run as torch's SGD, bit for bit."""

REWEIGHED: dict[str, Setting] = {
    "short last batch": Setting({"max_epochs": 2}, lambda: loader(22), num_data=22),
    "short last step": epochs(3, accumulate_grad_batches=4),
    "short last step without length": of_iterables(unsized, accumulate_grad_batches=4),
}
"""In a fixed order a short step counts by its data, so that an epoch's gradients are those of all data."""

REFUSED: dict[str, Setting] = {
    "half precision bf16-true": epochs(2, precision="bf16-true"),
    "half precision 16-true": epochs(2, precision="16-true"),
    "two repeated batches": epochs(2, overfit_batches=2),
    "half of the batches repeated": epochs(2, overfit_batches=0.5),
    "averaged weights": with_callback(lambda folder: of_lightning.EMAWeightAveraging()),
    "stochastic weight averaging": with_callback(lambda folder: of_lightning.StochasticWeightAveraging(0.01)),
    "pruning": with_callback(lambda folder: of_lightning.ModelPruning("l1_unstructured", amount=0.1)),
}
"""Settings with which the chain would not sample its posterior."""
