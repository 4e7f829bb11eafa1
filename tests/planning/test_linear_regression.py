"""The plan of a conjugate regression, whose verdict is that of the draws' error from the exact posterior."""

import warnings

import pytest
import torch

from lightning_sgmcmc import SGHMC, BayesianModule
from lightning_sgmcmc.batches import ResumableLoader
from lightning_sgmcmc.callbacks import ChainHealth, SamplingSchedule
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.planning import RunKind
from tests.support.problems import ConjugateRegression
from tests.support.trainers import quiet_trainer

PROBLEM = ConjugateRegression(num_data=200, outputs=500)


def fitted(lr: float, start: float = 0.0, chains: int = 1, steps: int = 120) -> tuple[BayesianModule, list[str]]:
    """Fit by all data at once, from so far beside the posterior's mean; return the run and its warnings."""
    run = PROBLEM.module(sampler=SGHMC, lr=lr, seed=0, num_chains=chains, chain_start="same")
    with torch.no_grad():
        run.net.weight += start
    data = ResumableLoader(TensorBatches(*PROBLEM.dataset().tensors), batch_size=PROBLEM.num_data)
    callbacks = [SamplingSchedule(burn_in_steps=0, every_n_steps=steps), ChainHealth(every_n_steps=2, warn=False)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quiet_trainer(max_steps=steps, callbacks=callbacks).fit(run, data)
    return run, [str(each.message) for each in said if str(each.message).startswith("RunPlan")]


def heat(run: BayesianModule) -> float:
    """Return the mean of (θ-μ)ᵀP(θ-μ)/d over outputs and chains at the last step: 1 for draws of the posterior."""
    weights = next(iter(run.chains.trainable.values())).detach().double()
    gap = weights.reshape(-1, PROBLEM.outputs, PROBLEM.features) - torch.tensor(PROBLEM.mean)
    precision = torch.tensor(PROBLEM.covariance).inverse()
    return float(torch.einsum("coi,ij,coj->", gap, precision, gap)) / gap.numel()


@pytest.mark.by_default("2")
@pytest.mark.parametrize("chains", [1, 2])
def test_the_verdict_is_that_of_the_draws(chains: int) -> None:
    """N = 200 data determine three weights: the prior's law would have 0.06 relaxation times for the right run.

    The last state of 500 outputs has 1,500 coordinates, so its heat has a standard error of 3.7 %: five of them are
    0.19, a false-alarm rate below 1e-6. The short run's law is 1 - e^(-2t) in each direction.
    """
    right, said = fitted(lr=0.01, chains=chains)
    assert right.plan is not None
    assert right.plan.kind is RunKind.POSTERIOR_SAMPLE
    assert said == []
    assert heat(right) == pytest.approx(1.0, abs=0.19)

    short, said = fitted(lr=0.0003, chains=chains)
    assert short.plan is not None
    assert short.plan.kind is RunKind.COLD_ENSEMBLE
    assert "posterior's slowest direction" in said[0]
    assert heat(short) < 0.6
    planned, health = short.plan.configurational_temperature, short.health
    assert health is not None
    assert health.total is not None
    assert health.total.configurational_interval is not None
    low, high = health.total.configurational_interval
    assert planned is not None
    assert low < planned < high
    assert high < 0.6


def test_a_way_in_is_no_temperature() -> None:
    """From ten posterior standard deviations outside, the law of the spread would plan a negative temperature."""
    run, said = fitted(lr=0.0003, start=1.0)
    assert run.plan is not None
    assert run.plan.configurational_temperature is None
    assert "farther out than its target" in run.plan.notes[-1]
    assert heat(run) > 3.0, "the draws are those of the way in"
    assert len(said) == 1
    assert "temperature" not in said[0]


def test_weights_that_only_the_prior_holds_have_its_law() -> None:
    """Without information in the data, the exact directions have the prior's relaxation times."""
    weak = ConjugateRegression(num_data=200, outputs=5, noise_std=1e4)
    run = weak.module(sampler=SGHMC, lr=0.01, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(max_steps=50, callbacks=[SamplingSchedule(every_n_steps=50)]).fit(run, weak.loader(100))
    assert run.plan is not None
    assert run.plan.relaxation_times == pytest.approx(50 * 0.01 / (0.1 * 200), rel=0.02)
