"""A prior with unknown scales: the exact posterior of a conjugate model, every layout, resumes, stores, collapse.

The conjugate model is linear regression with known noise, w ~ N(0, v·I) and v ~ InvGamma(ν·d/2, ν·d/2). Given v the
weights are Gaussian, so the marginals of v and w are integrals over log v alone, computed here on a grid.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    SGHMC,
    BayesianModule,
    Categorical,
    ContourRules,
    Gaussian,
    GaussianPrior,
    HierarchicalPrior,
    Posterior,
    Prior,
    UnderdampedLangevin,
)
from lightning_sgmcmc.callbacks import ContourGradient, ReplicaExchange, SampleCollector, SamplingSchedule
from tests.support.comparisons import assert_same
from tests.support.problems import Array, Even, Plain
from tests.support.recorders import Samples
from tests.support.trainers import fit_in_layout, quiet_trainer

NU, DATA, FEATURES = 1.5, 8, 3


@dataclass
class Conjugate:
    """The regression, and expectations under exp(-U/τ) of (w, log v)."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        self.x = 0.6 * rng.normal(size=(DATA, FEATURES))
        self.y = self.x @ np.array([1.5, -1.0, 0.3]) + rng.normal(size=DATA)
        log_v = np.linspace(-6, 8, 4001)
        v, d, tau = np.exp(log_v), FEATURES, self.temperature
        log_density, means, covariances = [], [], []
        for one in v:
            precision = self.x.T @ self.x + np.eye(d) / one
            mean = np.linalg.solve(precision, self.x.T @ self.y)
            evidence = mean @ precision @ mean / (2 * tau) - np.linalg.slogdet(precision / tau)[1] / 2
            log_density.append(evidence - ((1 + NU) * d / 2 * np.log(one) + NU * d / (2 * one)) / tau)
            means.append(mean)
            covariances.append(tau * np.linalg.inv(precision))
        weights = np.exp(np.array(log_density) - max(log_density))
        assert max(weights[0], weights[-1]) < 1e-6
        weights /= weights.sum()
        first = weights @ np.array(means)
        outer = np.array([np.outer(m, m) + c for m, c in zip(means, covariances, strict=True)])
        mean_log = weights @ log_v
        self.expected = np.array(
            [mean_log, weights @ (log_v - mean_log) ** 2, *first, *np.diagonal(np.einsum("k,kij->ij", weights, outer))]
        )
        self.centre = mean_log

    def statistics(self, log_v: Array, w: Array) -> Array:
        """Return what `expected` are the expectations of: log v, its square about the mean, w and its squares."""
        return np.concatenate([log_v[..., None], (log_v[..., None] - self.centre) ** 2, w, w**2], -1)

    def batches(self) -> DataLoader[Any]:
        x, y = (torch.tensor(values, dtype=torch.float32) for values in (self.x, self.y[:, None]))
        return DataLoader(TensorDataset(x, y), batch_sampler=[list(range(DATA))] * 1000)

    def sample(self, steps: int, burn_in: int, chains: int, *callbacks: Any, **options: Any) -> Samples:
        """Fit with all data in every step, so that only the step size is between the draws and the exact law."""
        net = nn.Linear(FEATURES, 1, bias=False)
        nn.init.zeros_(net.weight)
        module = BayesianModule(
            net=net,
            likelihood=Gaussian(std=1.0),
            prior=HierarchicalPrior("all", nu=NU, std=1.0, every_n_steps=4),
            sampler=functools.partial(UnderdampedLangevin, friction=2.0, integrator="baoab"),
            lr=0.25,
            num_data=DATA,
            num_chains=chains,
            shared_batch=True,
            seed=1,
            **({"chain_start": "same", "chain_execution": "vmap"} | options),
        )
        found = Samples()
        schedule = SamplingSchedule(burn_in_steps=burn_in, every_n_steps=12)
        quiet_trainer(max_steps=steps, callbacks=[schedule, found, *callbacks]).fit(module, self.batches())
        return found


def of_chains(found: Samples, chains: int) -> tuple[Array, Array]:
    """Return log v and w of the samples, (S, C) and (S, C, d)."""
    scales = torch.stack([sample.scales["net.weight"] for sample in found.samples]).double().numpy()
    w = torch.stack([sample.parameters["net.weight"][0] for sample in found.samples]).double().numpy()
    return 2 * np.log(scales).reshape(-1, chains), w.reshape(-1, chains, FEATURES)


def test_exact_on_the_conjugate_model() -> None:
    """Means and variances of log v and w are the integrals', within Monte-Carlo error, at τ = 1 and τ = 0.3 at once.

    Standard errors are of 24 independent chains for each temperature. The largest |z| of 16 is compared with 6: under
    Student's t with 23 degrees of freedom a false alarm has probability 16·4e-6 = 6e-5. The seed is fixed.
    """
    temperatures = [1.0] * 24 + [0.3] * 24
    problem = Conjugate()
    log_v, w = of_chains(problem.sample(240, 48, 48, temperature=temperatures), 48)
    for temperature, own in ((1.0, slice(0, 24)), (0.3, slice(24, 48))):
        problem = Conjugate(temperature)
        of_each = problem.statistics(log_v[:, own], w[:, own]).mean(0)
        error = of_each.std(0, ddof=1) / np.sqrt(24)
        z = (of_each.mean(0) - problem.expected) / error
        assert np.abs(z).max() < 6, z
        # The test sees a conditional that is tempered otherwise.
        other = Conjugate(1.3 - temperature).expected
        assert np.abs((other - problem.expected) / error).max() > 8


@pytest.mark.slow
def test_replica_exchange_samples_the_coldest_temperature() -> None:
    """Chains draw at their slot's temperature, and swap by the energies of (w, log v); of 40 ladders, |z| < 5."""
    problem = Conjugate()
    found = problem.sample(900, 60, 80, ReplicaExchange([1.0, 2.0], noise_variance=0.0, every_n_steps=2))
    of_each = problem.statistics(*of_chains(found, 40)).mean(0)
    z = (of_each.mean(0) - problem.expected) / (of_each.std(0, ddof=1) / np.sqrt(40))
    assert np.abs(z).max() < 5, z


@pytest.mark.slow
def test_contour_weighs_the_flattened_scales() -> None:
    """Draws of v are accepted by the flattened density: weighted averages are the posterior's; 60 chains, |z| < 5."""
    problem, rules = Conjugate(), ContourRules(zeta=0.75)
    contour = ContourGradient(rules, first_edge=14.0, width=0.5, num_bins=40, interacting=True)
    found = problem.sample(3000, 1200, 60, contour)
    weights = torch.tensor([sample.log_weight for sample in found.samples]).exp().double().numpy().reshape(-1, 60, 1)
    assert weights.std() / weights.mean() > 0.3, "the weights must matter"
    values = problem.statistics(*of_chains(found, 60))
    total = weights.sum()
    mean = (weights * values).sum((0, 1)) / total
    error = ((weights * (values - mean)).sum(0) / total).std(0, ddof=1) * np.sqrt(60)
    assert np.abs((mean - problem.expected) / error).max() < 5


# -- layouts, resumes, stores -----------------------------------------------------------------------------------------


def test_the_same_scales_and_centres_in_every_layout(tmp_path: Path) -> None:
    """Two stacked chains, resumed by two processes with one chain each: bit for bit the run without a stop."""
    prior = HierarchicalPrior("layer", every_n_steps=3, center="start", centered=["net.0.*"])
    options = {"prior": prior}.items()
    whole, _ = fit_in_layout(tmp_path / "whole", 2, 1, module_options=options)
    fit_in_layout(tmp_path / "run", 2, 1, steps=10, module_options=options)
    checkpoint = tmp_path / "run" / "step=10.ckpt"
    resumed, _ = fit_in_layout(tmp_path / "run", 1, 2, ckpt_path=checkpoint, module_options=options)
    assert_same(whole, resumed)
    for one, other in zip(whole, resumed, strict=True):
        assert one.scales.keys() == other.scales.keys() == one.parameters.keys()
        assert all(torch.equal(one.scales[name], other.scales[name]) for name in one.scales)
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert saved["prior_state.variance"].shape == (2, 4)
    assert not torch.equal(*saved["prior_state.center.net.0.weight"])  # each chain's own start
    assert one.scales["net.1.weight"] == one.scales["net.1.bias"] != one.scales["net.0.weight"]
    other_prior = {"prior": HierarchicalPrior("layer", nu=2.0, every_n_steps=3)}.items()
    with pytest.raises(ValueError, match=r"other settings \(prior HierarchicalPrior\(groups='layer', nu=1, every_n_s"):
        fit_in_layout(tmp_path / "run", 2, 1, ckpt_path=checkpoint, module_options=other_prior)


def test_data_parallel_ranks_draw_the_same_scales(tmp_path: Path) -> None:
    """Two ranks of ddp with half the batch each have the draws of one process, to rounding; so has vmap."""
    runs = []
    for execution, batch, options in (
        ("loop", 16, {}),
        ("vmap", 16, {}),
        ("loop", 8, {"devices": 2, "strategy": "ddp_fork"}),
    ):
        folder = tmp_path / str(len(runs))
        torch.manual_seed(0)
        module = Plain(2, prior=HierarchicalPrior(every_n_steps=5, center="start"), chain_execution=execution)
        callbacks = [SamplingSchedule(every_n_steps=10), SampleCollector(folder)]
        quiet_trainer(max_steps=20, callbacks=callbacks, **options).fit(module, datamodule=Even(batch))
        runs.append(list(Posterior.load(folder, model=Plain())))
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            torch.testing.assert_close(two.scales, one.scales, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(two.parameters, one.parameters, rtol=1e-3, atol=1e-4)


def classifier(prior: Prior, hidden: int = 30, lr: float = 0.02, **options: Any) -> BayesianModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    return BayesianModule(net=net, likelihood=Categorical(), prior=prior, sampler=SGHMC, lr=lr, seed=1, **options)


def test_a_store_loads_without_the_prior(tmp_path: Path) -> None:
    """The network is rebuilt from the store's description, with the scales beside the samples; so is a checkpoint's."""
    module = classifier(HierarchicalPrior(every_n_steps=5, center="start"))
    trainer = quiet_trainer(
        max_steps=20, callbacks=[SamplingSchedule(every_n_steps=10), SampleCollector(tmp_path / "samples")]
    )
    trainer.fit(module, datamodule=Even())
    posterior = Posterior.load(tmp_path / "samples")
    assert posterior.predict(torch.zeros(4, 5)).probabilities.shape == (4, 3)
    last = posterior[-1]
    assert set(last.scales) == set(last.parameters)
    assert last.buffers == {}
    drawn = module.prior_state.variance.sqrt() * 0.3
    torch.testing.assert_close(torch.stack(list(last.scales.values())), drawn)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    for prior in (GaussianPrior(), HierarchicalPrior(), HierarchicalPrior(center="start")):
        again = classifier(prior)
        again.load_state_dict(state)
        assert torch.equal(again.net[0].weight, module.net[0].weight)
    assert torch.equal(again.prior_state.variance, module.prior_state.variance)


# -- temperature 0, and collapse --------------------------------------------------------------------------------------


def test_at_temperature_0_scales_are_the_conditional_mode() -> None:
    """... as in the exploration stages of a cyclical schedule."""
    module = classifier(HierarchicalPrior(nu=2.0, every_n_steps=1), temperature=0.0)
    quiet_trainer(max_steps=15).fit(module, datamodule=Even())
    expected = [(2.0 * 0.3**2 + float(p.detach().square().mean())) / 3.0 for p in module.net.parameters()]
    assert (module.prior_state.variance * 0.3**2).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("nu", [1e-4, 1.0])
def test_a_collapse_is_found(nu: float, recwarn: pytest.WarningsRecorder) -> None:
    """With a vague hyperprior the scales and the outputs of the network go to 0; the default holds them."""
    module = classifier(HierarchicalPrior("all", nu=nu, every_n_steps=5), hidden=100, lr=0.05, temperature=0.0)
    quiet_trainer(max_steps=150).fit(module, datamodule=Even())
    found = [str(w.message) for w in recwarn if "scales have collapsed" in str(w.message)]
    if nu == 1.0:
        assert found == []
        return
    (sentence,) = found
    assert "that of '*' is 0.0" in sentence
    assert "pass a larger nu (now 0.0001; 1 holds the scales near std), or a larger std" in sentence


def test_another_grouping_needs_a_new_module() -> None:
    module = classifier(HierarchicalPrior("all"))
    quiet_trainer(max_steps=2).fit(module, datamodule=Even())
    module.prior = HierarchicalPrior("tensor")
    with pytest.raises(ValueError, match="has 4 groups of parameters, and this module's chains began with 1: create"):
        quiet_trainer(max_steps=2).fit(module, datamodule=Even())
