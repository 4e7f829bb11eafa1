"""Step sizes by name pattern: groups of the sampler, which schedules, settings and resumes keep apart."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc import SGHMC, SGLD, PolynomialDecay
from lightning_sgmcmc.callbacks import (
    ChainHealth,
    CyclicalSchedule,
    SampleCollector,
    SamplingSchedule,
)
from tests.support.comparisons import assert_same
from tests.support.problems import Data, Net, Plain
from tests.support.trainers import quiet_trainer, seeded


class Steps(pl.Callback):
    """The step sizes of every step by group, and the parameters before and after."""

    def __init__(self) -> None:
        self.lr: list[dict[str, Any]] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.moves: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.lr.append({group.get("name", ""): group["lr"] for group in pl_module.sampler.param_groups})
        self.gradients.append({name: p.grad.clone() for name, p in pl_module.named_parameters()})
        self.before = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.moves.append({name: p.detach() - self.before[name] for name, p in pl_module.named_parameters()})


def test_each_parameter_moves_by_the_step_size_of_its_first_pattern() -> None:
    """At τ = 0 a step of SGLD is -lr·g; the last layer's bias has a step size for each chain, others one."""
    steps = Steps()
    lr = {"net.2.bias": [0.1, 0.3], "net.2.*": 0.2, "*": 0.05}
    module = seeded(lambda: Plain(2, sampler=SGLD, lr=lr, temperature=0.0))
    quiet_trainer(max_steps=2, callbacks=[steps]).fit(module, datamodule=Data())
    for name, move in steps.moves[0].items():
        expected: Any = 0.05
        if name.startswith("net.2."):
            expected = torch.tensor([[0.1], [0.3]]) if name == "net.2.bias" else 0.2
        torch.testing.assert_close(move, -expected * steps.gradients[0][name], atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize(
    "schedule",
    [CyclicalSchedule(2, 0.5, 2), SamplingSchedule(every_n_steps=2, lr_decay=PolynomialDecay(0.1, 1.0, 0.6))],
    ids=["cyclical", "decay"],
)
def test_schedules_keep_the_ratios(schedule: pl.Callback) -> None:
    steps = Steps()
    module = seeded(lambda: Plain(1, sampler=SGHMC, lr={"*.bias": 0.02, "*": [0.08]}))
    quiet_trainer(max_steps=12, callbacks=[schedule, steps]).fit(module, datamodule=Data())
    assert len({one["*"] for one in steps.lr}) > 3
    assert all(one["*"] == pytest.approx(4 * one["*.bias"]) for one in steps.lr)


def test_all_patterns_alike_sample_as_one_step_size_does() -> None:
    """The draws of a pattern for all parameters are bit for bit those of a number."""

    def run(lr: Any) -> list[Any]:
        collector = SampleCollector(in_memory=True)
        module = seeded(lambda: Net(2, lr=lr))
        callbacks = [SamplingSchedule(every_n_steps=5), collector, ChainHealth(warn=False, every_n_steps=1)]
        quiet_trainer(max_steps=10, callbacks=callbacks).fit(module, datamodule=Data())
        assert collector.posterior is not None
        assert module.health is not None
        assert len(module.health.tensors) == 6
        return list(collector.posterior.store)

    assert_same(run(0.05), run({"*": 0.05}))


def test_a_run_resumes_with_the_same_patterns_only(tmp_path: Path) -> None:
    def run(lr: Any, steps: int, folder: str, ckpt_path: Path | None = None, *extra: pl.Callback) -> list[Any]:
        collector = SampleCollector(in_memory=True)
        trainer = quiet_trainer(
            max_steps=steps,
            enable_checkpointing=True,
            callbacks=[
                CyclicalSchedule(2, 0.5, 1),
                collector,
                pl.callbacks.ModelCheckpoint(
                    tmp_path / folder, "{step}", every_n_train_steps=5, save_top_k=-1, enable_version_counter=False
                ),
                *extra,
            ],
        )
        trainer.fit(seeded(lambda: Net(2, lr=lr)), datamodule=Data(), ckpt_path=ckpt_path)
        assert collector.posterior is not None
        return list(collector.posterior.store)

    lr = {"scale": 0.01, "*": [0.05, 0.02]}
    whole = run(lr, 12, "whole")
    assert_same(whole, run(lr, 12, "again", tmp_path / "whole" / "step=5.ckpt"))
    with pytest.raises(ValueError, match=r"lr \{'scale': 0.01, '\*': \[0.05, 0.02\]\} there, \{'\*': 0.05\} here"):
        run({"*": 0.05}, 12, "other", tmp_path / "whole" / "step=5.ckpt")


WRONG = [
    ({}, ValueError, "lr has no patterns: pass one number, or numbers by pattern"),
    ({3: 0.1}, TypeError, "lr has the pattern 3: patterns are texts"),
    ({"*": None}, TypeError, r"lr must be a number, got None for '\*'"),
    ({"*": -0.1}, ValueError, r"lr of '\*' must be a finite number and not negative, got -0.1"),
    ({"*": "fast"}, TypeError, r"lr of '\*' must be a number, got 'fast'"),
    ({"net.*": 0.1}, ValueError, r"lr has no pattern for the parameter 'scale': add one, or '\*' for the rest"),
    ({"fc.*": 0.1, "*": 0.1}, ValueError, r"lr has the pattern 'fc.\*', which no trainable parameter matches \(scale"),
    (
        {"net.*": 0.1, "net.0.*": 0.2, "*": 1.0},
        ValueError,
        r"lr never uses the pattern 'net.0.\*', because 'net.\*' comes before it and also matches 'net.0.weight': put",
    ),
    ({"*": [0.1, 0.2, 0.3]}, ValueError, r"lr of '\*' has 3 values, and the run has 2 chains"),
]


@pytest.mark.parametrize(("lr", "error", "sentence"), WRONG)
def test_what_is_no_step_size_is_refused(lr: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        quiet_trainer(max_steps=1).fit(Net(2, lr=lr), datamodule=Data())
