"""ContourGradient under a trainer: its numbers are those of the formulas, whatever else the trainer does."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    SGNHT,
    Annealing,
    ContourRules,
    DecayingStepSize,
    UnderdampedLangevin,
    pSGLD,
)
from lightning_sgmcmc.callbacks import (
    ContourGradient,
    CyclicalSchedule,
    SamplingSchedule,
)
from tests.support.contour_fits import (
    BURN_IN,
    PROBLEM,
    STEP_SIZE,
    STEPS,
    Spy,
    check_against_formulas,
    contour,
    fit,
)
from tests.support.problems import ConjugateRegression, RankData
from tests.support.trainers import quiet_trainer

# -- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.by_default("interpolated-scalable", "bin-high-order")
@pytest.mark.parametrize("scheme", ["scalable", "original", "high-order"])
@pytest.mark.parametrize("weighting", ["interpolated", "bin"])
def test_every_step_follows_the_formulas(scheme: str, weighting: str) -> None:
    module, spy = fit(contour(scheme=scheme, weighting=weighting))
    assert len(spy.steps) == STEPS
    assert len({step["bin"] for step in spy.steps}) > 4
    assert max(abs(step["multiplier"] - 1) for step in spy.steps) > 0.1
    assert module.contour is not None
    check_against_formulas(spy, module.contour)
    assert [s.bin for s in spy.samples] == [step["bin"] for step in spy.steps[BURN_IN + 9 :: 10]]
    for sample, step in zip(spy.samples, spy.steps[BURN_IN + 9 :: 10], strict=True):
        assert (sample.log_weight, sample.energy) == pytest.approx((step["log_weight"], step["energy"]))


@pytest.mark.by_default("accumulation", "bf16")
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 4},
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 0.01},
        {"plugins": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40))},
    ],
    ids=["accumulation", "bf16", "clipping", "loss scaler that skips"],
)
def test_every_step_follows_the_formulas_with_what_a_trainer_offers(options: dict[str, Any]) -> None:
    options = {name: value() if callable(value) else value for name, value in options.items()}
    learner = contour(difference="forward", min_multiplier=-1.0, max_multiplier=2.0)
    module, spy = fit(learner, batch=10, **options)
    assert module.contour is not None
    check_against_formulas(spy, module.contour)
    assert int(module.contour.state.visits.sum()) == module.sampler.step_count == len(spy.steps)
    if "plugins" in options:
        assert len(spy.steps) < STEPS, "no step was skipped, so the test shows nothing"


def test_accumulated_energies_are_those_of_the_joint_batch() -> None:
    short: dict[str, Any] = {"max_steps": 3, "schedule": SamplingSchedule(burn_in_steps=2, every_n_steps=1)}
    _, spy = fit(contour(), batch=40, **short)
    _, parts_spy = fit(contour(), batch=10, accumulate_grad_batches=4, **short)
    assert spy.steps[0]["energy"] == pytest.approx(parts_spy.steps[0]["energy"], rel=1e-5)


def test_the_prior_can_be_left_out_of_the_energy() -> None:
    module, spy = fit(contour(include_prior=False))
    for step in spy.steps:
        step["energy"] += step["log_prior"]
    assert module.contour is not None
    check_against_formulas(spy, module.contour)
    assert spy.samples[0].energy == pytest.approx(spy.steps[BURN_IN + 9]["energy"])


def test_without_zeta_the_chain_is_the_plain_one_bit_for_bit() -> None:
    plain, _ = fit(None)
    flat, _ = fit(contour(zeta=0.0))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, flat.state_dict()[name])


@pytest.mark.by_default("pSGLD", "SGNHT")
@pytest.mark.parametrize(
    "sampler", [SGLD, pSGLD, functools.partial(SGHMC, friction=0.3), SGNHT, functools.partial(UnderdampedLangevin)]
)
def test_every_sampler_is_multiplied(sampler: Any) -> None:
    """The multiplier reaches the gradient: the paths with and without a contour part, and the formulas hold."""
    lr = 0.02 if sampler is not SGLD else 0.3
    ends = []
    for learner in (None, contour()):
        torch.manual_seed(0)
        module, spy = fit(learner, module=PROBLEM.module(sampler=sampler, lr=lr, seed=1), max_steps=BURN_IN + 10)
        ends.append(module.net.weight.detach().clone())
        if learner is not None:
            assert module.contour is not None
            check_against_formulas(spy, module.contour)
    assert not torch.equal(*ends)
    assert ends[1].isfinite().all()


def test_the_contour_rests_while_a_cyclical_schedule_explores() -> None:
    module, spy = fit(contour(), schedule=CyclicalSchedule(3, 0.5, 4))
    assert module.contour is not None
    assert sum(step["temperature"] == 0 for step in spy.steps) == STEPS // 2
    check_against_formulas(spy, module.contour)
    assert int(module.contour.state.visits.sum()) == STEPS // 2


def test_annealed_step_size_and_temperature() -> None:
    annealing = Annealing(start_epoch=2, divisor=1.1)
    schedule = SamplingSchedule(
        burn_in_steps=BURN_IN, every_n_steps=10, lr_annealing=annealing, temperature_annealing=annealing
    )
    module, spy = fit(contour(), schedule=schedule)
    assert spy.steps[-1]["temperature"] < 0.1
    assert module.contour is not None
    check_against_formulas(spy, module.contour)


def test_a_learned_range_holds_the_warm_ups_energies() -> None:
    module, spy = fit(ContourGradient(ContourRules(0.9), num_bins=40, warm_up_steps=75, lowest=0.1))
    assert module.contour is not None
    warm = sorted(step["energy"] for step in spy.steps[37:75])
    partition = module.contour.partition
    assert partition.first_edge == pytest.approx(warm[round(0.1 * (len(warm) - 1))])
    assert partition.last_edge == pytest.approx(2 * warm[-1] - partition.first_edge)
    assert all(step["multiplier"] == 1 for step in spy.steps[:75])
    assert int(module.contour.state.visits.sum()) == STEPS - 75
    spy.steps = spy.steps[75:]
    check_against_formulas(spy, module.contour, DecayingStepSize())


def test_full_energies_are_those_of_the_sample_itself() -> None:
    module, spy = fit(contour(sample_energy="full"))
    assert module.contour is not None
    x, y = (torch.tensor(a, dtype=torch.float64) for a in (PROBLEM.x, PROBLEM.y))
    for sample in spy.samples:
        weights = sample.parameters["net.weight"].double()
        residuals = y - x @ weights.T
        constants = y.numel() + weights.numel()
        energy = 0.5 * (residuals.square().sum() + weights.square().sum() + constants * math.log(2 * math.pi))
        assert sample.energy == pytest.approx(energy.item(), rel=1e-5)
    latest = module.contour.log_weights(torch.tensor([spy.samples[-1].energy]).double())
    assert spy.samples[-1].log_weight == pytest.approx(latest.item(), rel=1e-6)


def test_two_ranks_share_one_energy(tmp_path: Path) -> None:
    """Both ranks have the same π, learned from the mean of their energies, and the same parameters."""

    class Dump(Spy):
        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            state = {"vector": pl_module.contour.state.log_vector, "visits": pl_module.contour.state.visits}
            own = {
                "steps": self.steps,
                "weight": pl_module.net.weight.detach(),
                "own": pl_module.chains.observed.energy,
            }
            torch.save(state | own, tmp_path / f"{trainer.global_rank}.pt")

    problem = ConjugateRegression()
    module = problem.module(sampler=SGHMC, lr=0.05, seed=1)
    learner = ContourGradient(ContourRules(0.9), num_bins=30, warm_up_steps=40, step_size=STEP_SIZE)
    callbacks = [learner, SamplingSchedule(burn_in_steps=60, every_n_steps=10), Dump()]
    trainer = quiet_trainer(
        max_steps=100, strategy="ddp_fork", devices=2, use_distributed_sampler=False, callbacks=callbacks
    )
    trainer.fit(module, datamodule=RankData(25))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert torch.equal(first["vector"], second["vector"])
    assert torch.equal(first["visits"], second["visits"])
    assert torch.equal(first["weight"], second["weight"])
    assert not torch.equal(first["own"], second["own"]), "the ranks had the same batch, so the test shows nothing"
    for a, b in zip(first["steps"][40:], second["steps"][40:], strict=True):
        assert (a["multiplier"], a["bin"], a["log_weight"]) == (b["multiplier"], b["bin"], b["log_weight"])
    assert len({step["bin"] for step in first["steps"][40:]}) > 3
