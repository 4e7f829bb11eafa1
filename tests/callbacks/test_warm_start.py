"""A warm start is torch's optimizer on every chain, and the sampler that follows begins in its stationary law."""

import functools
import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.callbacks import (
    WarmStart,
)
from lightning_sgmcmc.chains.state import Stage
from tests.support.problems import Data, Plain
from tests.support.trainers import OneOfMany, quiet_trainer, seeded

ADAMW = functools.partial(torch.optim.AdamW, weight_decay=0.0)


class Record(pl.Callback):
    """Stage, temperature and step size of every step."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.controls: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        group = pl_module.sampler.param_groups[0]
        self.stages.append(pl_module.chains.progress.stage)
        self.controls.append((float(group["lr"]), float(group["temperature"])))


def by_hand(optimizer: Any, steps: int, chain: int, cosine: bool = False, accumulate: int = 1) -> list[Tensor]:
    """Return chain `chain`'s parameters after torch's own loop over the batches and the loss that the chain sees."""

    class Loop(pl.Callback):
        """Makes the loop's update where the sampler, at lr = 0 and τ = 0, makes none."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.own = optimizer(pl_module.parameters(), lr=0.01)
            self.step = 0

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, sampler: Any) -> None:
            for group in self.own.param_groups:
                factor = (1 + math.cos(math.pi * self.step / steps)) / 2 if cosine else 1.0
                group["lr"] = 0.01 * factor
            self.own.step()
            self.step += 1

    module = seeded(lambda: Plain(1, lr=0.0, temperature=0.0))
    trainer = quiet_trainer(
        max_steps=steps, callbacks=[Loop()], accumulate_grad_batches=accumulate, strategy=OneOfMany(chain, 3)
    )
    trainer.fit(module, datamodule=Data())
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "reference", "options"),
    [
        (torch.optim.AdamW, ADAMW, {}),
        (torch.optim.Adafactor, functools.partial(torch.optim.Adafactor, weight_decay=0.0), {"execution": "loop"}),
        (functools.partial(torch.optim.SGD, momentum=0.9), None, {"cosine": True, "accumulate": 2}),
    ],
    ids=["AdamW", "Adafactor", "SGD, cosine, accumulating"],
)
def test_a_warm_start_alone_is_torchs_optimizer_on_each_chain(optimizer: Any, reference: Any, options: Any) -> None:
    """Bit for bit, though AdamW's default decay is 0.01 and Adafactor mixes the elements of a tensor."""
    cosine, accumulate = options.get("cosine", False), options.get("accumulate", 1)
    schedule = "cosine" if cosine else "constant"
    module = seeded(lambda: Plain(3))
    start = WarmStart(optimizer, lr=0.01, steps=12, lr_schedule=schedule)
    quiet_trainer(max_steps=12, callbacks=[start], accumulate_grad_batches=accumulate).fit(module, datamodule=Data())
    for chain in range(3):
        with module.at_chain(chain):
            own = [p.detach().clone() for p in module.parameters()]
        expected = by_hand(reference or optimizer, 12, chain, cosine, accumulate)
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))
