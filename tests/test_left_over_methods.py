"""Methods that a user's module keeps from before it was a `BayesianModule`."""

from functools import partial
from types import MethodType
from typing import Any
from unittest.mock import Mock

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningCLI
from torch import Tensor, nn

from lightning_sgmcmc import SGLD, BayesianModule, Categorical
from lightning_sgmcmc.callbacks import SamplingSchedule
from tests.support.problems import loaders
from tests.support.trainers import quiet_trainer


class Classifier(BayesianModule):
    def __init__(self) -> None:
        super().__init__(likelihood=Categorical(), lr=0.01)
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class OldStep(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)


class OldOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class OldBackward(Classifier):
    def backward(self, loss: Tensor, *args: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


class OldCallbacks(Classifier):
    def configure_callbacks(self) -> Any:
        return []


class Inherits(OldStep):
    """The method is in a base class of the user's."""


class Extends(Classifier):
    """Calls what it overrides."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps = getattr(self, "steps", 0) + 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()


class OldBoth(OldStep):
    """Has the whole of a plain LightningModule, of which all is said at once."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OldStep, "OldStep defines training_step.*from forward and likelihood=…, or from log_likelihood.*: remove"),
        (Inherits, "OldStep defines training_step.*remove training_step from OldStep, or call super"),
        (OldOptimizer, "OldOptimizer defines configure_optimizers.*pass sampler=… and lr=….*: remove"),
        (OldBackward, "OldBackward defines backward.*gathered for each chain"),
        (OldBoth, "OldStep defines training_step.*OldBoth defines configure_optimizers.*from OldBoth, or call"),
        (OldCallbacks, "OldCallbacks defines configure_callbacks.*pass your own to the trainer"),
    ],
)
def test_a_left_over_method_is_refused_by_name(make: type[Classifier], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_a_method_that_calls_what_it_overrides_is_accepted() -> None:
    module = Extends()
    quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=1)]).fit(module, loaders()[0])
    assert module.steps == 4


def sampled(model: BayesianModule) -> int:
    """Fit an epoch, and return its steps."""
    trainer = quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=1)])
    trainer.fit(model, loaders()[0])
    return trainer.global_step


REPLACED: dict[str, Any] = {
    "training_step": lambda m: MethodType(OldStep.training_step, m),
    "backward": lambda m: lambda loss: loss.backward(),
    "optimizer_step": lambda m: lambda epoch, batch, optimizer, closure: optimizer.step(closure),
    "optimizer_zero_grad": lambda m: lambda epoch, batch, optimizer: optimizer.zero_grad(),
    "configure_gradient_clipping": lambda m: lambda *args: None,
    "configure_callbacks": lambda m: lambda: [],
    "configure_model": lambda m: lambda: None,
    "configure_optimizers": lambda m: lambda: torch.optim.SGD(m.parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize(
    "wrap", [lambda f: f, partial, lambda f: MethodType(lambda self, *a, **k: f(*a, **k), object())]
)
def test_a_method_that_is_replaced_on_the_object_is_refused(name: str, wrap: Any) -> None:
    model = Classifier()
    setattr(model, name, wrap(REPLACED[name](model)))
    with pytest.raises(TypeError, match=f"{name} was set on an object of Classifier.*do not set it, or call"):
        sampled(model)


@pytest.mark.parametrize("make", [lambda m: SGLD(m.parameters(), num_data=24), lambda m: None])
def test_an_own_sampler_on_the_object_is_refused(make: Any) -> None:
    model = Classifier()
    model.configure_optimizers = lambda: make(model)  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="configure_optimizers was set on an object"):
        sampled(model)


@pytest.mark.parametrize("name", REPLACED)
def test_a_replacement_that_calls_the_own_method_is_accepted(name: str) -> None:
    own = getattr(Classifier, name)

    def wrapped(model: Any) -> Any:
        before = getattr(model, name)
        return lambda *args, **kwargs: before(*args, **kwargs)

    makes = [
        wrapped,
        lambda m: Mock(wraps=getattr(m, name)),
        lambda m: MethodType(own, m),
        lambda m: partial(wrapped(m)),
        lambda m: partial(lambda call, *args, **kwargs: call(*args, **kwargs), getattr(m, name)),
        lambda m: lambda *args, before=getattr(m, name), **kwargs: before(*args, **kwargs),  # noqa: B008
    ]
    for make in makes:
        model = Classifier()
        setattr(model, name, make(model))
        assert sampled(model) == 4


class Forgets(Classifier):
    """Names what it overrides, and does not call it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) if batch_idx < 0 else self.layer(batch[0]).sum()


def test_a_step_that_computes_no_energy() -> None:
    with pytest.raises(RuntimeError, match=r"Forgets.training_step has computed no energy.*super\(\).training_step"):
        sampled(Forgets())


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loaders()[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--optimizer=SGD", "--optimizer.lr=0.1"],
        ["--optimizer=lightning_sgmcmc.SGLD", "--optimizer.num_data=24"],
        ["--optimizer=SGD", "--optimizer.lr=0.1", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"],
    ],
)
def test_an_optimizer_of_lightnings_command_line_is_refused(arguments: list[str]) -> None:
    quiet = {"logger": False, "accelerator": "cpu", "enable_checkpointing": False, "enable_progress_bar": False}
    defaults = {"max_epochs": 1, "enable_model_summary": False, **quiet}
    with pytest.raises(TypeError, match="LightningCLI sets it for --optimizer: pass --model"):
        LightningCLI(Classifier, Data, save_config_callback=None, trainer_defaults=defaults, args=["fit", *arguments])
