"""What was computed from all training data is not used for others that replaced them, of the same number."""

import functools
import re
import warnings
from typing import Any, ClassVar

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import AMAGOLD, SGLD, BayesianModule, Gaussian, GaussianPrior
from lightning_sgmcmc.callbacks import (
    SWAG,
    AutoSampling,
    ControlVariates,
    CovarianceFriction,
    CyclicalSchedule,
    DeepEnsemble,
    LearningCoefficient,
    MetropolisTest,
    SamplingSchedule,
    VarianceReducedEnergy,
    WarmStart,
)
from lightning_sgmcmc.datamodules import DatasetDataModule, StreamDataModule
from lightning_sgmcmc.samplers import UnderdampedLangevin
from lightning_sgmcmc.singular import localized
from tests.support.trainers import quiet_trainer

COUNT, BATCH = 60, 30


def numbers(count: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=generator)
    return x, x @ torch.tensor([[1.0], [-0.5]]) + torch.randn(count, 1, generator=generator) + shift


def stream() -> StreamDataModule:
    data = StreamDataModule(BATCH, COUNT // BATCH, capacity=COUNT)
    data.append(*numbers(COUNT, 1))
    return data


class Replaces(pl.Callback):
    """Replaces data of a stream, or writes into those of a data set, at the beginning of an epoch or at its end."""

    def __init__(self, kind: str, at_start: bool = True) -> None:
        self.kind, self.at_start = kind, at_start

    def replace(self, trainer: Any) -> None:
        x, y = numbers(5, 10 + trainer.current_epoch, shift=5.0)
        if self.kind == "stream":
            trainer.datamodule.append(x, y)
        elif self.kind == "in place":
            trainer.datamodule.train_data.tensors[1][:5] = y

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.at_start:
            self.replace(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.at_start and batch_idx + 1 == trainer.num_training_batches:
            self.replace(trainer)


class InPlace(DatasetDataModule):
    """A data set of the user's own, whose tensors are written in place."""

    def __init__(self) -> None:
        self.train_data = torch.utils.data.TensorDataset(*numbers(COUNT, 1))
        super().__init__(self.train_data, batch_size=BATCH)


def energy(module: Any, trainer: Any) -> float:
    """Return U of the data that are held now, written out."""
    held = trainer.datamodule.training_data().tensors if hasattr(trainer.datamodule, "append") else None
    x, y = held if held is not None else trainer.datamodule.train_data.tensors
    weight = module.net.weight.detach().double().cpu()
    residual = (y.double() - x.double() @ weight.T).square().sum() / 2 + len(x) * 0.9189385332046727
    return float(residual + weight.square().sum() / 2 + 2 * 0.9189385332046727)


def module_of(sampler: Any = None, **options: Any) -> BayesianModule:
    torch.manual_seed(0)
    net = nn.Linear(2, 1, bias=False)
    sampler = functools.partial(AMAGOLD, friction=1.5) if sampler is None else sampler
    return BayesianModule(net, Gaussian(1.0), GaussianPrior(1.0), sampler=sampler, lr=0.02, seed=3, **options)


class Looks(pl.Callback):
    """Compares the energy with which a trajectory begins with U of the data held; the test comes after it."""

    def __init__(self, test: MetropolisTest) -> None:
        self.test, self.own, self.off = test, 0.0, list[float]()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.own = energy(pl_module, trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            assert self.test._trajectory is not None
            self.off.append(float(self.test._trajectory.energy) - self.own)


@pytest.mark.parametrize("kind", ["stream", "in place", "never"])
def test_a_trajectory_begins_with_the_energy_of_its_data(kind: str) -> None:
    test = MetropolisTest()
    looks = Looks(test)
    callbacks = [SamplingSchedule(every_n_epochs=1), Replaces(kind), looks, test]
    data = stream() if kind == "stream" else InPlace()
    quiet_trainer(max_epochs=6, callbacks=callbacks).fit(module_of(), data)
    assert len(looks.off) == 6
    assert max(map(abs, looks.off)) < 1e-3


def test_data_that_change_within_a_trajectory_are_refused() -> None:
    callbacks = [SamplingSchedule(every_n_epochs=1), Replaces("stream", at_start=False), MetropolisTest()]
    with pytest.raises(ValueError, match="the training data changed within a trajectory of MetropolisTest: append"):
        quiet_trainer(max_epochs=6, callbacks=callbacks).fit(module_of(), stream())
    callbacks = [SamplingSchedule(every_n_epochs=1), MetropolisTest(), Replaces("stream", at_start=False)]
    quiet_trainer(max_epochs=6, callbacks=callbacks).fit(module_of(), stream())


@pytest.mark.parametrize("kind", ["stream", "in place", "never"])
@pytest.mark.parametrize("make", [ControlVariates, VarianceReducedEnergy, CovarianceFriction])
def test_a_snapshot_is_of_the_data_that_are_held(make: Any, kind: str) -> None:
    """Its log-likelihood of all data is that of the data in each epoch, although it is renewed every tenth only."""
    callback = make(every_n_epochs=10)

    class Compares(pl.Callback):
        def __init__(self) -> None:
            self.off: list[float] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            snapshot = callback._snapshot
            x, y = (stream_or_set(trainer)[i].double() for i in (0, 1))
            weight = snapshot.tensors["net.weight"].detach().double().cpu()
            own = -((y - x @ weight.T).square().sum() / 2 + len(x) * 0.9189385332046727)
            self.off.append(float(snapshot.log_likelihood) - float(own))

    compares = Compares()
    sampler = functools.partial(UnderdampedLangevin, friction=1.0) if make is CovarianceFriction else SGLD
    callbacks = [SamplingSchedule(every_n_epochs=1), Replaces(kind), callback, compares]
    quiet_trainer(max_epochs=5, callbacks=callbacks).fit(
        module_of(sampler), stream() if kind == "stream" else InPlace()
    )
    assert len(compares.off) == 10
    assert max(map(abs, compares.off)) < 1e-3


def stream_or_set(trainer: Any) -> Any:
    data = trainer.datamodule
    return data.training_data().tensors if hasattr(data, "append") else data.train_data.tensors


def test_a_learning_coefficient_of_changing_data_is_refused() -> None:
    module = BayesianModule(nn.Linear(2, 1), Gaussian(1.0), **localized(num_data=COUNT, gamma=1.0), lr=0.1)
    callbacks = [SamplingSchedule(every_n_epochs=1), Replaces("stream"), LearningCoefficient(loss="full")]
    with pytest.raises(ValueError, match="the training data changed since: use a datamodule whose data stay"):
        quiet_trainer(max_epochs=5, callbacks=callbacks).fit(module, stream())


class Grows(pl.LightningDataModule):
    """Epochs of one batch, later of two."""

    def loader(self, count: int, seed: int) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*numbers(count, seed)), batch_size=BATCH)

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return self.loader(BATCH if self.trainer.current_epoch < 2 else 2 * BATCH, 1)

    def val_dataloader(self) -> Any:
        return self.loader(20, 2)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda: AutoSampling(num_draws=4),
        lambda: AutoSampling(lr=0.01, temperature=1.0, num_draws=4),
        lambda: CyclicalSchedule(2, 0.5, 2),
        lambda: DeepEnsemble(),
        lambda: SWAG(),
    ],
)
def test_a_run_that_becomes_longer_goes_on_with_the_last_controls(schedule: Any) -> None:
    """It ended with a `ZeroDivisionError` under `AutoSampling`."""

    class Controls(pl.Callback):
        found: ClassVar[list[tuple[float, float]]] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            group = pl_module.sampler.param_groups[0]
            self.found.append((float(group["lr"]), float(group["temperature"])))

    looks, own = Controls(), schedule()
    looks.found = []
    trainer = quiet_trainer(max_epochs=20, callbacks=[own, looks], reload_dataloaders_every_n_epochs=1)
    module = BayesianModule(nn.Linear(2, 1), Gaussian(1.0), lr=0.02, seed=3)
    with pytest.warns(UserWarning, match="goes on after the 20 steps that .* has planned for"):
        trainer.fit(module, datamodule=Grows())
    assert len(looks.found) == 38
    assert all(0 < lr < 1 and 0 <= temperature <= 1 for lr, temperature in looks.found)
    if isinstance(own, AutoSampling):
        assert set(looks.found[19:]) == {looks.found[19]}


def accumulating(**options: int) -> Any:
    counts = {int(epoch[1:]): count for epoch, count in options.items()}
    return lambda: pl.callbacks.GradientAccumulationScheduler(counts)


class Steps(pl.Callback):
    """Keeps the steps of samples."""

    def __init__(self) -> None:
        self.found = set[int]()

    def on_posterior_sample(self, trainer: Any, pl_module: Any, sample: Any) -> None:
        self.found.add(sample.step)


def every_step() -> SamplingSchedule:
    return SamplingSchedule(every_n_steps=1)


def by_epochs() -> SamplingSchedule:
    return SamplingSchedule(burn_in_epochs=4, every_n_epochs=2)


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize(
    ("callbacks", "options", "warns", "steps"),
    [
        ([by_epochs, accumulating(e0=1, e3=2)], {}, "Epoch 3 has 1 step, and SamplingSchedule .* as 2 steps", None),
        ([by_epochs], {"reload_dataloaders_every_n_epochs": 1}, "Epoch 2 has 2 steps, and SamplingSchedule", None),
        ([by_epochs, accumulating(e0=2)], {}, None, [6, 8, 10]),
        ([lambda: WarmStart(epochs=4), every_step, accumulating(e0=1, e2=2)], {}, "Epoch 2 .* WarmStart", None),
        (
            [lambda: WarmStart(epochs=2), lambda: SamplingSchedule(every_n_steps=3), accumulating(e0=2)],
            {},
            None,
            [5, 8],
        ),
        ([lambda: SamplingSchedule(every_n_steps=5), accumulating(e0=1, e3=2)], {}, None, [5, 10]),
    ],
)
def test_epochs_of_other_lengths_than_the_first_are_named(
    callbacks: list[Any], options: dict[str, Any], warns: str | None, steps: Any, chains: int
) -> None:
    """Samples that were wanted every two epochs were drawn at other ones, or the burn-in took other epochs."""
    looks = Steps()
    grows = Grows() if options else None
    loader = None if options else Grows().loader(2 * BATCH, 1)
    trainer = quiet_trainer(max_epochs=10, callbacks=[*(make() for make in callbacks), looks], **options)
    module = BayesianModule(nn.Linear(2, 1), Gaussian(1.0), lr=0.02, seed=3, num_chains=chains)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader, datamodule=grows)
    said = [str(one.message) for one in caught if "give them in steps" in str(one.message)]
    assert len(said) == (warns is not None)
    assert warns is None or re.search(warns, said[0])
    assert steps is None or sorted(looks.found) == steps
