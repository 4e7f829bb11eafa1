"""Methods that a user's module keeps from before it was a `BayesianModule`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Categorical
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OldStep, "OldStep defines training_step.*from forward and likelihood=…, or from log_likelihood.*: remove"),
        (Inherits, "OldStep defines training_step.*remove training_step from OldStep, or call super"),
        (OldOptimizer, "OldOptimizer defines configure_optimizers.*pass sampler=… and lr=….*: remove"),
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
