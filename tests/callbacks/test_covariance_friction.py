"""Friction by the covariance of batches' gradients: exact covariances, and chains as warm as they should be."""

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, BayesianModule, ChainStrategy, UnderdampedLangevin
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import (
    ControlVariates,
    CovarianceFriction,
    CyclicalSchedule,
    SampleCollector,
    SamplerCallback,
    SamplingSchedule,
)
from lightning_sgmcmc.chains.layout import ChainLayout
from lightning_sgmcmc.posterior.posterior import Posterior
from tests.support.comparisons import assert_same, covariance_with_error, differences
from tests.support.problems import CHAINS, Array, ConjugateRegression, Data, Even, Net, Plain
from tests.support.recorders import Draws, SaveEverywhere
from tests.support.trainers import OneOfMany, fit_chains, quiet_trainer, seeded

Langevin = functools.partial(UnderdampedLangevin, friction=2.0)
SMALL = ConjugateRegression(num_data=24, features=3, outputs=2, seed=1)


def exact_covariance(problem: ConjugateRegression, weights: Array, batch_size: int = 1) -> Array:
    """Return the covariance of ñ = N·g over single data drawn at random, of weights (D, d): (D·d, D·d)."""
    residuals = problem.x @ weights.T - problem.y
    each = (residuals[:, :, None] * problem.x[:, None, :] / problem.noise_std**2).reshape(problem.num_data, -1)
    return np.cov(each.T, bias=True) * problem.num_data**2


class Look(SamplerCallback):
    """The friction's covariance at each step, by epoch, shape (d,) or (d, d)."""

    def __init__(self, friction: CovarianceFriction) -> None:
        self.friction = friction
        self.seen: list[list[Array]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append([])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen[-1].append(self.friction.covariance.current[0].double().cpu().numpy().copy())


class Nudge(SamplerCallback):
    """Moves the chain off the calibration's place, before the first step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == 0:
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.mul_(0.8)


def weights_of(module: BayesianModule) -> Array:
    found: Array = module.net.weight.detach().double().numpy()
    return found


@pytest.mark.parametrize("form", ["diagonal", "matrix"])
def test_the_covariance_is_exact(form: Any) -> None:
    """A chain that does not move, with batches of one datum: at the calibration the covariance is that of the data,
    far from the mode too, where gradients are mostly mean; and when each batch has been seen elsewhere, it is the one
    of there, and stays near it. The estimate at a step's beginning counts."""
    friction = CovarianceFriction(0, 9, form)
    look = Look(friction)
    module = SMALL.module(sampler=Langevin, lr=0.0, seed=2)
    with torch.no_grad():
        module.net.weight.add_(20.0)
    before = exact_covariance(SMALL, weights_of(module))
    trainer = quiet_trainer(max_epochs=9, callbacks=[friction, look, Nudge()])
    trainer.fit(module, ResumableLoader(SMALL.dataset(), 1))
    after = exact_covariance(SMALL, weights_of(module))
    if form == "diagonal":
        before, after = np.diag(before), np.diag(after)
    scale = np.abs(before).max()
    np.testing.assert_allclose(look.seen[0][0], before, rtol=1e-3, atol=1e-4 * scale)
    np.testing.assert_allclose(look.seen[1][0], after, rtol=1e-3, atol=1e-4 * scale)
    change = np.abs(after - before).max()
    assert change > 0.1 * scale
    assert np.abs(np.mean(look.seen[2:], (0, 1)) - after).max() < 0.2 * change
    assert module.gradient_evaluations == (1 + 9 + 9) * 24


@pytest.mark.slow
def test_batches_of_a_calibration_are_random_and_as_large_as_those_of_steps() -> None:
    """Sorted data in windows of 2 micro-batches of 3: the mean over 100 calibrations is the covariance of 6 data drawn
    without replacement, within 5 standard errors (false alarms below 1e-5 each)."""
    order = np.argsort(SMALL.y[:, 0])
    x, y = (torch.tensor(part[order], dtype=torch.float32) for part in (SMALL.x, SMALL.y))
    data = torch.utils.data.TensorDataset(x, y)
    friction = CovarianceFriction(0, 1)
    look = Look(friction)
    module = SMALL.module(sampler=Langevin, lr=0.0, seed=2)
    trainer = quiet_trainer(max_epochs=100, callbacks=[friction, look], accumulate_grad_batches=2)
    trainer.fit(module, ResumableLoader(data, 3))
    found = np.array([epoch[0] for epoch in look.seen])
    exact = np.diag(exact_covariance(SMALL, weights_of(module))) / 6 * (24 - 6) / (24 - 1)
    error = found.std(0, ddof=1) / np.sqrt(len(found))
    assert np.abs((found.mean(0) - exact) / error).max() < 5
    assert (error / exact).max() < 0.15


@pytest.mark.parametrize("form", ["diagonal", "matrix"])
def test_a_step_takes_this_friction(form: Any) -> None:
    """r ← r - h·(N·g + γ·r + h·κ²·C·r/(2τ)) + noise, against the same step without it; up to h·Γ = 1."""
    step, temperature, multiplier = 0.05, 0.5, 2.0
    momentum = torch.linspace(-1.0, 1.0, 6).view(2, 3)

    def fit(*callbacks: pl.Callback) -> Tensor:
        class Set(SamplerCallback):
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                (parameter,) = pl_module.parameters()
                pl_module.sampler.state[parameter]["momentum_buffer"] = momentum.clone()
                pl_module.sampler.set_control("gradient_multiplier", multiplier)

        module = SMALL.module(sampler=Langevin, lr=step, seed=2, temperature=temperature)
        trainer = quiet_trainer(max_steps=1, callbacks=[*callbacks, Set()])
        trainer.fit(module, ResumableLoader(SMALL.dataset(), 4, seed=1))
        (parameter,) = module.parameters()
        assert module.sampler.extra_drag is None
        buffer: Tensor = module.sampler.state[parameter]["momentum_buffer"]
        return buffer

    friction = CovarianceFriction(form=form)
    look = Look(friction)
    change = (fit() - fit(friction, look)).flatten().double().numpy()
    covariance = look.seen[0][0]
    extra = step * multiplier**2 * covariance / (2 * temperature)
    if form == "diagonal":
        extra = np.diag(extra)
    values, vectors = np.linalg.eigh(extra)
    assert values.max() > 1 / step - 2 > values.min()
    extra = vectors @ np.diag(np.clip(values, 0, 1 / step - 2)) @ vectors.T
    np.testing.assert_allclose(change, step * extra @ momentum.flatten().numpy(), rtol=1e-3, atol=1e-4)


PROBLEM = ConjugateRegression(outputs=4)


def stationary_trace(step: float, batch: int, gamma: float, form: str) -> float:
    """Return the trace of the exact stationary covariance under the friction of the mean covariance at stationarity."""
    d = PROBLEM.features
    covariance = PROBLEM.gradient_covariance(PROBLEM.covariance, batch) * PROBLEM.num_data**2
    if form == "diagonal":
        covariance = np.diag(np.diag(covariance))
    drift, push, noise = PROBLEM.underdamped_system(step, gamma)
    drift[d:, d:] -= step * step / 2 * covariance
    return float(np.trace(PROBLEM._stationary(drift, push, noise, batch)))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["diagonal", "matrix"])
def test_the_chain_is_as_warm_as_it_should_be(form: Any) -> None:
    """Where batches' noise doubles the variance under plain underdamped Langevin dynamics (exactly known), the friction
    leaves a few percent of it, and that is what is found; standard errors are of 40 batch means, false alarms at 4 of
    them below 3e-4."""
    step, batch, gamma = 0.003, 5, 10.0
    exact = np.trace(PROBLEM.covariance)
    plain = np.trace(PROBLEM.underdamped_covariance(step, batch, gamma)) / exact
    corrected = stationary_trace(step, batch, gamma, form) / exact
    assert plain > 2
    assert abs(corrected - 1) < 0.05
    draws = Draws()
    schedule = SamplingSchedule(burn_in_steps=300, every_n_steps=1)
    trainer = quiet_trainer(max_steps=2800, callbacks=[schedule, draws, CovarianceFriction(0, 10, form)])
    sampler = functools.partial(UnderdampedLangevin, friction=gamma)
    trainer.fit(PROBLEM.module(sampler=sampler, lr=step, seed=3), PROBLEM.loader(batch))
    found, error = (np.trace(part) / exact for part in covariance_with_error(draws.array(), PROBLEM.mean))
    assert abs(found - corrected) < 4 * error
    assert plain - found > 5 * error


# -- when it rests, chains, checkpoints --------------------------------------------------------------------------------


def test_it_rests_at_temperature_zero() -> None:
    """Bit for bit the run without it, at the same cost; and it begins when the noise does."""

    def fit(*callbacks: pl.Callback, **options: Any) -> BayesianModule:
        module = seeded(lambda: Plain(sampler=Langevin, lr=0.002, **options))
        quiet_trainer(max_epochs=4, callbacks=list(callbacks)).fit(module, datamodule=Even(16))
        return module

    cold = fit(temperature=0.0)
    resting = fit(CovarianceFriction(), temperature=0.0)
    assert not differences(cold.state_dict(), resting.state_dict())
    assert resting.gradient_evaluations == cold.gradient_evaluations == 4 * 64
    cycle = [CyclicalSchedule(1, 0.5, 1), CovarianceFriction()]
    assert fit(*cycle).gradient_evaluations == 4 * 64 + 2 * 2 * 64


@pytest.mark.by_default("matrix-trainer0", "diagonal")
@pytest.mark.parametrize(
    ("form", "trainer"),
    [
        ("matrix", {}),
        ("matrix", {"accumulate_grad_batches": 3, "precision": "bf16-mixed"}),
        ("diagonal", {"accumulate_grad_batches": 3, "precision": "bf16-mixed"}),
    ],
)
def test_each_chain_is_bit_for_bit_the_chain_alone(form: Any, trainer: dict[str, Any]) -> None:
    def fit(chains: int, **more: Any) -> Any:
        make = lambda: Net(chains, sampler=Langevin, lr=0.002, temperature=temperatures(chains))  # noqa: E731
        return fit_chains(seeded(make), callbacks=[CovarianceFriction(form=form)], **trainer, **more)

    def temperatures(chains: int) -> Any:
        return [1.0] * chains if chains > 1 else 1.0

    together = fit(CHAINS)
    for chain in range(CHAINS):
        alone = fit(1, strategy=OneOfMany(chain, CHAINS))
        own = [sample for sample in together if sample.chain == chain]
        for one, other in zip(alone, own, strict=True):
            # Matrices in batches may be rounded otherwise than single ones.
            torch.testing.assert_close(one.parameters, other.parameters, rtol=1e-4, atol=1e-5)
        if form == "diagonal":
            assert_same(alone, own)


def test_chains_at_different_temperatures_at_once() -> None:
    """One of them at 0, where it has no friction but γ: the same by vmap and one after the other."""
    samples = []
    for how in ("loop", "vmap"):
        options = {"sampler": Langevin, "lr": [0.001, 0.002, 0.003], "temperature": [0.0, 0.5, 1.0]}
        make = functools.partial(Plain, CHAINS, chain_execution=how, **options)
        samples.append(fit_chains(seeded(make), callbacks=[CovarianceFriction()]))
    for one, other in zip(*samples, strict=True):
        torch.testing.assert_close(one.parameters, other.parameters, rtol=1e-4, atol=1e-5)


@pytest.mark.by_default("options1-matrix")
@pytest.mark.parametrize("form", ["diagonal", "matrix"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}])
def test_every_save_point(tmp_path: Path, form: Any, options: dict[str, Any]) -> None:
    def fit(folder: Path, *extra: pl.Callback, with_it: bool = True, **more: Any) -> Any:
        module = seeded(lambda: Net(2, sampler=Langevin, lr=0.003))
        callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(folder / "samples"), *extra]
        callbacks += [CovarianceFriction(1, 2, form)] if with_it else []
        trainer = quiet_trainer(max_epochs=4, enable_checkpointing=True, callbacks=callbacks, **options)
        trainer.fit(module, datamodule=Data(), **more)
        posterior = Posterior.load(folder / "samples", model=Net())
        samples = [sample.state for sample in posterior.store]
        return {"state": module.state_dict(), "samples": samples, "cost": module.gradient_evaluations}

    whole = fit(tmp_path / "whole", SaveEverywhere(tmp_path))
    assert differences(whole["state"], fit(tmp_path / "plain", with_it=False)["state"])
    for checkpoint in sorted(tmp_path.glob("*.ckpt"))[3::14]:
        torch.load(checkpoint, weights_only=True)
        again = tmp_path / checkpoint.stem
        shutil.copytree(tmp_path / "whole" / "samples", again / "samples")
        assert not differences(whole, fit(again, ckpt_path=checkpoint)), checkpoint.stem


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "callbacks", "options", "message"),
    [
        (
            {"sampler": SGHMC},
            [CovarianceFriction()],
            {},
            "needs a sampler with a friction matrix, but SGHMC has none: use sampler=UnderdampedLangevin",
        ),
        (
            {},
            [CovarianceFriction(), ControlVariates()],
            {},
            "cannot be combined: .*one would count the noise that the other removes",
        ),
        (
            {},
            [CovarianceFriction(), pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})],
            {},
            "CovarianceFriction needs batches of one size",
        ),
    ],
)
def test_mistakes(model: Any, callbacks: list[pl.Callback], options: Any, message: str) -> None:
    module = Plain(**({"sampler": Langevin, "lr": 0.001} | model))
    with pytest.raises(ValueError, match=message):
        quiet_trainer(max_epochs=1, callbacks=callbacks, **options).fit(module, datamodule=Even(16))


def test_data_parallel_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = ChainLayout(ranks_per_chain=2, strategy=ChainStrategy())
    monkeypatch.setattr("lightning_sgmcmc.subsampling.covariance_friction.layout_of", lambda *_: shared)
    trainer = quiet_trainer(max_epochs=1, callbacks=[CovarianceFriction()])
    with pytest.raises(ValueError, match="data-parallel ranks share each batch here: use one rank per chain"):
        trainer.fit(Plain(sampler=Langevin, lr=0.001), datamodule=Even(16))


def test_large_matrices_and_other_arguments() -> None:
    with pytest.raises(ValueError, match="form must be 'diagonal' or 'matrix', got 'full'"):
        CovarianceFriction(form="full")  # type: ignore[arg-type]

    class Wide(Plain):
        def __init__(self) -> None:
            super().__init__(sampler=Langevin, lr=0.001)
            self.net = nn.Sequential(nn.Linear(5, 100), nn.Linear(100, 3))

    trainer = quiet_trainer(max_epochs=1, callbacks=[CovarianceFriction(form="matrix")])
    with pytest.raises(ValueError, match=r"matrices of 903 by 903 numbers, .* use form='diagonal'"):
        trainer.fit(Wide(), datamodule=Even(16))
