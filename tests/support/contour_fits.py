"""Fits with a contour on a conjugate regression, and the formulas' own numbers for each step."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import (
    SGLD,
    BayesianModule,
    ContourRules,
    DecayingStepSize,
)
from lightning_sgmcmc.callbacks import (
    ContourGradient,
    SamplerCallback,
    SamplingSchedule,
)
from lightning_sgmcmc.contour import LearnedContour
from tests.support import contour_reference as reference
from tests.support.problems import ConjugateRegression
from tests.support.trainers import quiet_trainer

PROBLEM = ConjugateRegression(num_data=120, features=2, outputs=3)
PARTITION = {"first_edge": 390.0, "width": 6.0, "num_bins": 30}
STEPS, BURN_IN = 150, 90
STEP_SIZE = DecayingStepSize(5, 0.7, 20)
RULES = {field.name for field in dataclasses.fields(ContourRules)}


class Spy(SamplerCallback):
    """Writes down what every step was made with."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.samples: list[Any] = []
        self._count = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._count = pl_module.sampler.step_count

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if pl_module.sampler.step_count == self._count:
            return
        self._count = pl_module.sampler.step_count
        group, chains = pl_module.sampler.param_groups[0], pl_module.chains
        self.steps.append(
            {
                "energy": chains.observed.mean_potential.double().item() * chains.observed.num_data,
                "log_prior": chains.observed.log_prior.item(),
                "multiplier": float(group["gradient_multiplier"]),
                "temperature": float(group["temperature"]),
                "log_weight": chains.tags.log_weight.item(),
                "bin": -1 if chains.tags.bin is None else int(chains.tags.bin),
            }
        )

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: Any, sample: Any) -> None:
        self.samples.append(sample)


def check_against_formulas(spy: Spy, contour: LearnedContour, step_size: DecayingStepSize = STEP_SIZE) -> None:
    """Go through the steps by the formulas in plain Python; every multiplier, weight and the final π must agree."""
    rules = contour.rules
    options = vars(contour.partition) | vars(rules)
    m = contour.partition.num_bins
    pi, visits, updates = [1 / m] * m, [0] * m, 0
    for step in spy.steps:
        if step["temperature"] == 0:
            assert step["multiplier"] == 1
            continue
        j, multiplier, density = reference.locate(pi, visits, step["energy"], step["temperature"], options)
        assert step["multiplier"] == pytest.approx(multiplier, rel=1e-9, abs=1e-9)
        assert step["log_weight"] == pytest.approx(rules.weight_exponent * rules.zeta * density, rel=1e-9)
        assert step["bin"] == j
        updates += 1
        pi = reference.learn(pi, [j], [density], step_size.at(updates), options)
        visits[j] += 1
    assert contour.state.visits.tolist() == visits
    torch.testing.assert_close(contour.state.log_vector.exp(), torch.tensor(pi).double(), rtol=1e-6, atol=1e-9)


def fit(
    contour: ContourGradient | None,
    *more: pl.Callback,
    schedule: pl.Callback | None = None,
    batch: int = 40,
    module: Any = None,
    **trainer_options: Any,
) -> tuple[BayesianModule, Spy]:
    options = {"max_steps": STEPS} | trainer_options
    ckpt_path = options.pop("ckpt_path", None)
    spy = Spy()
    first = [] if contour is None else [contour]
    callbacks = [*first, schedule or SamplingSchedule(burn_in_steps=BURN_IN, every_n_steps=10), *more, spy]
    module = module or PROBLEM.module(sampler=SGLD, lr=0.3, seed=1)
    quiet_trainer(callbacks=callbacks, **options).fit(module, PROBLEM.loader(batch), ckpt_path=ckpt_path)
    return module, spy


def contour(zeta: float = 0.9, **options: Any) -> ContourGradient:
    """Return a contour with a given range; options are the rules' and the callback's."""
    rules = ContourRules(zeta, **{name: options.pop(name) for name in RULES & set(options)})
    return ContourGradient(rules, **({"step_size": STEP_SIZE, "sample_energy": "step"} | PARTITION | options))


class SaveAt(pl.callbacks.Checkpoint):
    def __init__(self, folder: Path, steps: set[int]) -> None:
        self.folder = folder
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")
