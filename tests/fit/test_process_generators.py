"""A fit leaves a process's default generators where plain Lightning leaves them."""

import gc
import io
import random
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Gaussian
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.tune import propose_lr
from tests.support.problems import Data, Net
from tests.support.random_runs import (
    DATA,
    Fails,
    X,
    as_in_a_new_process,
    fit,
    linear,
    plain_loader,
)
from tests.support.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_a_new_process(monkeypatch)


class _Stops(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = True


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


WEIGHTED = WeightedRandomSampler(torch.arange(1.0, 25), 24)
FITS: dict[str, dict[str, Any]] = {
    "in order": {"train": lambda: plain_loader(shuffle=False)},
    "shuffled": {"train": plain_loader},
    "with validation": {"train": plain_loader, "val": lambda: plain_loader(shuffle=False)},
    "validation in mid-epoch": {"train": plain_loader, "val": plain_loader, "val_check_interval": 2},
    "validation every other epoch": {"train": plain_loader, "val": plain_loader, "check_val_every_n_epoch": 2},
    "a subset": {"train": lambda: plain_loader(shuffle=False, sampler=SubsetRandomSampler(range(12)))},
    "weighted validation": {"train": plain_loader, "val": lambda: plain_loader(shuffle=False, sampler=WEIGHTED)},
    "own generator": {"train": lambda: plain_loader(generator=torch.Generator().manual_seed(1))},
    "ends in mid-epoch": {"train": plain_loader, "max_epochs": -1, "max_steps": 8},
    "one of the library": {"train": lambda: ResumableLoader(DATA, 4)},
    "several chains": {"train": plain_loader, "chains": 2},
    "stopped early": {"train": plain_loader, "callbacks": lambda: [_Stops()]},
    "an exception": {"train": plain_loader, "callbacks": lambda: [Fails("on_train_batch_end", OSError())]},
    "Ctrl-C": {"train": plain_loader, "callbacks": lambda: [Fails("on_train_batch_end", KeyboardInterrupt())]},
    "no steps": {"train": plain_loader, "max_epochs": 0},
    "a trial": {"train": plain_loader, "val": plain_loader, "fast_dev_run": True},
    "loaders made anew": {"train": plain_loader, "reload_dataloaders_every_n_epochs": 1},
    "again with more epochs": {"train": plain_loader, "again": True},
}


def generators() -> list[Any]:
    name, key, *rest = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), name, key.tolist(), rest, random.getstate()]


def after(module: pl.LightningModule, train: Any, val: Any = None, again: bool = False, **options: Any) -> list[Any]:
    made = options.pop("callbacks", list)()
    options.pop("chains", None)
    pl.seed_everything(2, verbose=False)
    trainer = quiet_trainer(**({"max_epochs": 3} | options), callbacks=made)
    source = pl.LightningDataModule()
    source.train_dataloader = train  # type: ignore[method-assign]
    if val is not None:
        source.val_dataloader = val  # type: ignore[method-assign]
    try:
        trainer.fit(module, datamodule=source)
        if again:
            trainer.fit_loop.max_epochs = 5
            trainer.fit(module, datamodule=source)
    except (OSError, SystemExit):
        pass
    return generators()


@pytest.mark.parametrize("name", FITS)
def test_a_fit_leaves_the_generators_where_plain_lightning_does(name: str) -> None:
    options = FITS[name]
    module = linear(num_chains=options.get("chains", 1), sampler=SGHMC)
    assert after(module, **options) == after(Regression(), **options)


@pytest.mark.slow
def test_workers_too() -> None:
    options = {"train": lambda: plain_loader(num_workers=1), "val": lambda: plain_loader(num_workers=1, shuffle=False)}
    assert after(linear(), **options) == after(Regression(), **options)


def test_a_tuner_leaves_the_generators_alone() -> None:
    module = linear(seed=0)
    before = generators()
    propose_lr(module, train_dataloaders=plain_loader(), steps=100, max_probes=1)
    assert generators() == before
    assert module.chains.seeds.fits == 0


def test_iterating_over_a_loader_leaves_the_generators_but_for_a_draw() -> None:
    class Random(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002

    torch.empty((), dtype=torch.int64).random_()
    wanted = generators()
    pl.seed_everything(0, verbose=False)
    first = list(ResumableLoader(Random(X), 8, seed=1))
    assert generators() == wanted
    assert all(map(torch.equal, first, ResumableLoader(Random(X), 8, seed=1)))


def test_a_start_of_numpy_is_a_function_of_the_seed() -> None:
    class Drawn(BayesianModule):
        def __init__(self) -> None:
            net = nn.Linear(3, 1)
            nn.init.constant_(net.weight, np.random.rand())  # noqa: NPY002
            super().__init__(net, Gaussian(), lr=1e-9, temperature=0.0, num_chains=3, seed=5)

    found = []
    for _ in range(2):
        module = Drawn()
        fit(module)
        found.append(torch.as_tensor(module.net.weight[:, 0, 0]).detach())
    assert torch.equal(found[0][1:], found[1][1:])
    assert len(set(found[0].tolist())) == 3


def test_a_sampler_that_drops_the_seed_is_refused() -> None:
    def factory(params: Any, **options: Any) -> SGLD:
        return SGLD(params, num_data=options["num_data"], lr=options["lr"])

    with pytest.raises(ValueError, match="made a sampler with seed 0, and this fit's is 7: pass the keyword"):
        fit(linear(sampler=factory, seed=7))


class _Spawning(ForkingPickler):
    """Pickles as a spawn launcher does, and keeps where each tensor is."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.tensors: list[weakref.ref[Tensor]] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(weakref.ref(value))
        return NotImplemented


def test_a_trainer_that_has_fitted_passes_on_no_tensor_that_ends_with_its_pickle() -> None:
    """A datamodule has its trainer, which a later spawn pickles, and such memory is closed before it is read."""
    module, callbacks = Net(), [SamplingSchedule(every_n_steps=1), SampleCollector(in_memory=True)]
    trainer = quiet_trainer(max_steps=2, callbacks=callbacks, accelerator="cpu")
    trainer.fit(module, datamodule=Data())
    pickler = _Spawning()
    pickler.dump(trainer)
    tensors = pickler.tensors
    del pickler
    gc.collect()
    assert len(tensors) > 4
    assert all(one() is not None for one in tensors)
