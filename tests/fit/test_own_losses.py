"""What users do beside `super()`: a scheduler of torch's, another loss than the energy, other gradients and weights."""

import functools
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import GGMC, SGHMC, BayesianModule, UnderdampedLangevin
from lightning_sgmcmc.callbacks import (
    EWSG,
    AutoSampling,
    ControlVariates,
    CyclicalSchedule,
    MetropolisTest,
    SamplingSchedule,
    WarmStart,
)
from lightning_sgmcmc.schedules import PolynomialDecay
from tests.support.problems import Data, Net, Plain
from tests.support.trainers import quiet_trainer


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        sampler = super().configure_optimizers()
        return [sampler], [torch.optim.lr_scheduler.StepLR(sampler, 1, 0.1)]


def warnings_of(module: BayesianModule, *callbacks: Any, **options: Any) -> str:
    trainer = quiet_trainer(**({"max_epochs": 2} | options), callbacks=list(callbacks))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=Data())
    return "\n".join(str(one.message) for one in caught)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda: AutoSampling(num_draws=4),
        lambda: CyclicalSchedule(1, 0.5, 2),
        lambda: SamplingSchedule(every_n_steps=2, lr_decay=PolynomialDecay(a=0.1, b=5, gamma=0.6)),
    ],
)
def test_a_schedule_that_sets_the_step_size_refuses_another_and_names_the_ways(schedule: Any) -> None:
    with pytest.raises(ValueError, match=r"the StepLR set the step size.*SamplingSchedule\(lr_decay=…\)"):
        warnings_of(Scheduled(), schedule())


def test_a_chain_that_samples_warns_of_torchs_schedulers() -> None:
    every = SamplingSchedule(every_n_steps=2)
    assert "StepLR changes the step size while the chain samples" in warnings_of(Scheduled(), every)
    assert "lr_decay=…" in warnings_of(Scheduled(), every)
    assert "StepLR" not in warnings_of(Scheduled(temperature=0.0), every), "an optimization is planned as torch's"
    assert "StepLR" not in warnings_of(Net(), every)


class Extra(Net):
    """Adds a term to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.1 * self.scale.abs().sum()


class InADict(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": 2 * super().training_step(batch, batch_idx), "more": 1}


class Later(Net):
    """Adds it from the second step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + (batch_idx > 0))


class Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss)
        return {"loss": loss}


OPTIONS: list[dict[str, Any]] = [{}, {"accumulate_grad_batches": 4}, {"precision": "bf16-mixed"}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("kind", [Extra, InADict, Later, Logs])
def test_another_loss_than_the_energy_is_named_once(kind: Any, chains: int, options: dict[str, Any]) -> None:
    said = warnings_of(kind(chains, sampler=SGHMC), SamplingSchedule(every_n_steps=2), **options)
    expected = 0 if kind is Logs or (kind is Later and options.get("accumulate_grad_batches")) else 1
    assert said.count(f"{kind.__name__}.training_step returns") == expected
    assert ("log_likelihood(batch) or log_prior()" in said) == bool(expected)


class NoLoss(Net):
    """Leaves out some batches of an epoch, or all, as Lightning allows."""

    kept = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx < self.kept else None


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("kept", [0, 1])
def test_a_step_without_a_loss_is_refused(kept: int, chains: int, options: dict[str, Any]) -> None:
    """It moved no chain, and was counted: all samples of a fit were its start."""
    module = NoLoss(chains)
    module.kept = kept
    expected = rf"NoLoss.training_step returns None, so batch {kept} .*return super\(\).training_step"
    with pytest.raises(TypeError, match=expected):
        warnings_of(module, SamplingSchedule(every_n_steps=1), **options)


def test_a_short_last_window_is_no_other_loss() -> None:
    """Three of its batches belong to a step of four."""
    said = warnings_of(Logs(), SamplingSchedule(every_n_steps=1), accumulate_grad_batches=4, limit_train_batches=7)
    assert "training_step returns" not in said


class Clips(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1e-3)


class Halves(Net):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Watches(Net):
    """Reads the gradients, as loggers of their norm do."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))


class Reverses(pl.Callback):
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.neg_()


@pytest.mark.by_default("-1-options", "-2-options0", "-2-options3")
@pytest.mark.parametrize("options", [*OPTIONS, {"gradient_clip_val": 1.0}])
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize(
    ("kind", "callbacks", "who"),
    [
        (Clips, [], "Clips.on_before_optimizer_step"),
        (Halves, [], "Halves.on_after_backward"),
        (Net, [Reverses()], "Reverses.on_after_backward"),
        (Watches, [], None),
        (Net, [], None),
    ],
)
def test_other_gradients_than_the_energys_are_named_once(
    kind: Any, callbacks: list[Any], who: str | None, chains: int, options: dict[str, Any]
) -> None:
    said = warnings_of(kind(chains, sampler=SGHMC), SamplingSchedule(every_n_steps=2), *callbacks, **options)
    assert said.count("changes the gradients, in norm from") == (who is not None)
    assert who is None or f"{who} changes the gradients" in said


def test_what_this_library_does_to_gradients_is_not_suspected() -> None:
    class Seen(pl.Callback):
        def on_before_optimizer_step(self, *args: Any) -> None:
            pass

    for callback in (EWSG(num_proposals=1), ControlVariates()):
        module = Net(sampler=functools.partial(UnderdampedLangevin, friction=1.0))
        assert "changes the gradients" not in warnings_of(module, SamplingSchedule(every_n_steps=1), callback, Seen())


def scale(module: Any, factor: float = 0.99) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(factor)  # which torch does not count as a change


class Decays(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        scale(pl_module)


class Prunes(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scale(pl_module)


class OfAverages(pl.Callback):
    """Validates another network, and puts the weights back."""

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scale(pl_module, 0.5)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scale(pl_module, 2.0)

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class Limits(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for parameter in self.parameters():
            parameter.data.clamp_(-0.01, 0.01)


class BeforeTheUpdate(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        scale(self)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 4}])
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize(
    ("kind", "callback", "who"),
    [
        (Net, Decays(), "Decays.on_train_batch_end"),
        (Net, Prunes(), "Prunes.on_train_epoch_end"),
        (Limits, None, "Limits.optimizer_step"),
        (BeforeTheUpdate, None, "BeforeTheUpdate.on_before_optimizer_step"),
        (Net, OfAverages(), None),
    ],
)
def test_weights_that_change_between_steps_are_named_once(
    kind: Any, callback: Any, who: str | None, chains: int, options: dict[str, Any]
) -> None:
    callbacks = [SamplingSchedule(every_n_steps=2), *([callback] if callback else [])]
    said = warnings_of(kind(chains, sampler=SGHMC), *callbacks, **options)
    assert said.count("changes the weights between two steps") == (who is not None)
    assert who is None or f"{who} changes the weights" in said


@pytest.mark.by_default("callback0")
@pytest.mark.parametrize("callback", [Prunes(), None])
def test_weights_that_change_between_epochs_are_named_among_steps_in_blocks(callback: Any) -> None:
    module = Plain(2)
    callbacks = [SamplingSchedule(every_n_steps=50), *([callback] if callback else [])]
    said = warnings_of(module, *callbacks, max_epochs=100)
    assert module.chains.counters.hidden_steps > 0
    assert said.count("Prunes.on_train_epoch_end changes the weights") == (callback is not None)


def test_what_this_library_does_to_weights_is_not_suspected() -> None:
    class Seen(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    warm = WarmStart(lr=0.01, steps=2)
    for sampler, callbacks in ((GGMC, [MetropolisTest()]), (SGHMC, [warm]), (SGHMC, [])):
        said = warnings_of(Plain(sampler=sampler, lr=0.5), SamplingSchedule(every_n_steps=8), *callbacks, Seen())
        assert "changes the weights" not in said
