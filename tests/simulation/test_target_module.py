"""Analytic targets under a trainer, and the truth that contour sampling is for: right averages over two modes."""

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import SGHMC, SGLD, ContourRules
from lightning_sgmcmc.callbacks import ContourGradient, SampleCollector, SamplerCallback, SamplingSchedule
from lightning_sgmcmc.simulation import TargetDataModule, TargetModule
from lightning_sgmcmc.simulation.targets import GaussianMixture
from tests.support.problems import TARGETS
from tests.support.trainers import quiet_trainer


class Draws(SamplerCallback):
    """Keeps places and log-weights."""

    def __init__(self) -> None:
        self.places: list[float] = []
        self.log_weights: list[float] = []

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: Any, sample: Any) -> None:
        self.places.append(sample.parameters["x"].item())
        self.log_weights.append(sample.log_weight)


def fit(target: Any, steps: int, *callbacks: pl.Callback, burn_in: int = 0, every: int = 1, **options: Any) -> Draws:
    draws = Draws()
    schedule = SamplingSchedule(burn_in_steps=burn_in, every_n_steps=every)
    module = TargetModule(target, sampler=SGLD, **options)
    quiet_trainer(max_steps=steps, callbacks=[schedule, *callbacks, draws]).fit(
        module, datamodule=TargetDataModule(1000)
    )
    return draws


@pytest.mark.slow
def test_a_gaussian_under_a_trainer_has_its_exact_law() -> None:
    """SGLD at ε=0.5 with gradient noise s has the variance (2 + ε·s²)/(2 - ε); draws k steps apart correlate by 2⁻ᵏ.

    The variance of n = 4,800 draws, 50 of each of 96 chains and four steps apart, has the standard error
    √(2/n·(1+2⁻⁸)/(1-2⁻⁸)) of it; 4.2 of them: one seed in 10⁴ fails.
    """
    target = GaussianMixture([1.0], [[1.5]])
    noise = {"gradient_noise": 1.0, "energy_noise": 3.0}
    chains = {"num_chains": 96, "chain_execution": "vmap"}
    draws = fit(target, 230, lr=0.5, seed=1, burn_in=30, every=4, **noise, **chains)
    places = torch.tensor(draws.places).double() - 1.5
    assert len(places) == 4800
    expected = (2 + 0.5) / (2 - 0.5)
    assert places.square().mean().item() == pytest.approx(expected, rel=4.2 * math.sqrt(2 / 4800))


@pytest.mark.parametrize("kind", ["own", "full"])
def test_samples_have_the_targets_energy(kind: Any) -> None:
    target = GaussianMixture.two_modes()
    noise = 2.0 if kind == "full" else 0.0
    module = TargetModule(target, initial=torch.tensor([4.0]), lr=0.1, energy_noise=noise)
    callbacks = [
        ContourGradient(ContourRules(0.5), 50, first_edge=2.0, width=1.0, sample_energy=kind),
        SamplingSchedule(every_n_steps=10),
        SampleCollector(in_memory=True),
    ]
    quiet_trainer(max_steps=50, callbacks=callbacks).fit(module, datamodule=TargetDataModule(50))
    assert module.posterior is not None
    for sample in module.posterior:
        assert sample.energy == pytest.approx(target.energy(sample.parameters["x"].double()).item(), rel=1e-6)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_every_target_runs_under_a_trainer(target: Any) -> None:
    module = TargetModule(target, sampler=SGHMC, lr=0.002, seed=3)
    learner = ContourGradient(ContourRules(0.75), 50, first_edge=0.0, width=0.5)
    callbacks = [learner, SamplingSchedule(every_n_steps=5), SampleCollector(in_memory=True)]
    quiet_trainer(max_steps=50, callbacks=callbacks).fit(module, datamodule=TargetDataModule(20))
    assert module.posterior is not None
    assert len(module.posterior) == 10
    assert module.x.shape == (target.dimension,)
    assert module.x.isfinite().all()


def test_a_run_under_a_trainer_is_the_loop_written_out() -> None:
    """Without noise but the sampler's own, `Trainer.fit` is the sampler on the target's gradient, bit for bit."""
    target = TARGETS["nine modes"]
    module = TargetModule(target, initial=torch.tensor([0.5, -0.2]), sampler=SGLD, lr=0.01, seed=4)
    schedule = SamplingSchedule(every_n_steps=1)
    quiet_trainer(max_steps=60, callbacks=[schedule]).fit(module, datamodule=TargetDataModule(25))
    x = torch.nn.Parameter(torch.tensor([0.5, -0.2]))
    sampler = SGLD([x], lr=0.01, num_data=1, seed=4)
    for _ in range(60):
        x.grad = None
        target.energy(x).backward()
        sampler.step()
    assert torch.equal(module.x, x)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def run(ckpt_path: Path | None = None) -> TargetModule:
        module = TargetModule(
            TARGETS["two modes"], sampler=SGHMC, lr=0.05, seed=5, energy_noise=0.3, gradient_noise=0.2
        )
        callbacks: list[pl.Callback] = [
            ContourGradient(ContourRules(0.75), 50, first_edge=2.0, width=1.0),
            SamplingSchedule(every_n_steps=5),
        ]
        if ckpt_path is None:
            callbacks.append(
                pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=33, save_top_k=-1)
            )
        trainer = quiet_trainer(max_steps=80, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, datamodule=TargetDataModule(25), ckpt_path=ckpt_path)
        return module

    whole, again = run(), run(tmp_path / "step=33.ckpt")
    assert torch.equal(whole.x, again.x)
    assert whole.contour is not None
    assert again.contour is not None
    assert torch.equal(whole.contour.state.log_vector, again.contour.state.log_vector)


def test_bad_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="initial should have shape"):
        TargetModule(GaussianMixture.two_modes(), initial=torch.zeros(2))
    with pytest.raises(ValueError, match="energy_noise"):
        TargetModule(GaussianMixture.two_modes(), energy_noise=-1)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        TargetDataModule(0)


SEEDS = 20
STEPS = 40_000
T_QUANTILE = 2.861
"""Of 19 degrees of freedom: an interval of 99 %."""


def weighted_mean(with_contour: bool, seed: int) -> float:
    """Return a run's weighted share of the right mode; the barrier is 8 nats, and the run starts in the wrong mode."""
    torch.set_num_threads(1)
    target = GaussianMixture([0.3, 0.7], [[-4.2], [4.2]])
    learner = ContourGradient(ContourRules(0.75), 32, first_edge=1.8, width=0.5, sample_energy="full")
    callbacks = [learner] if with_contour else []
    start = torch.tensor([-4.2])
    draws = fit(target, STEPS, *callbacks, burn_in=STEPS // 4, every=10, initial=start, lr=0.1, seed=seed)
    weights = torch.tensor(draws.log_weights).double().softmax(0)
    return float(weights @ (torch.tensor(draws.places) > 0).double())


@pytest.mark.slow
def test_weighted_averages_are_right_where_plain_ones_are_not() -> None:
    """P(x > 0) of a bimodal posterior, over 20 seeds of `Trainer.fit`.

    The truth is in the 99 % interval of the mean of contour runs (a right program fails for one choice of seeds in a
    hundred) and out of that of plain runs of the same length.
    """
    truth = 0.7
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        contour, plain = (
            torch.tensor(list(pool.map(weighted_mean, [on] * SEEDS, range(SEEDS)))).double() for on in (True, False)
        )
    halves = [T_QUANTILE * shares.std().item() / math.sqrt(SEEDS) for shares in (contour, plain)]
    for name, shares, half in (("contour", contour, halves[0]), ("plain", plain, halves[1])):
        print(f"{name}: {shares.mean():.4f} ± {half:.4f} (99 %), sd over seeds {shares.std():.4f}, truth {truth}")
    assert abs(contour.mean().item() - truth) < halves[0]
    assert abs(plain.mean().item() - truth) > halves[1]
    assert plain.std() > 3 * contour.std()
