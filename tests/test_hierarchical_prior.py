"""A prior with unknown scales: the exact posterior of a conjugate model, in every layout, across resumes, and in stores.

The conjugate model is linear regression with known noise, w ~ N(0, v·I) and v ~ InvGamma(ν·d/2, ν·d/2). Given v the
weights are Gaussian, so the marginals of v and w are integrals over log v alone, computed here on a grid.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    BayesianModule,
    Gaussian,
    HierarchicalPrior,
    UnderdampedLangevin,
)
from lightning_sgmcmc.callbacks import SamplingSchedule
from tests.support.problems import Array
from tests.support.recorders import Samples
from tests.support.trainers import quiet_trainer

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

    Standard errors are of 30 independent chains for each temperature. The largest |z| of 16 is compared with 5.5: under
    Student's t with 29 degrees of freedom a false alarm has probability 16·6e-6 = 1e-4. The seed is fixed.
    """
    temperatures = [1.0] * 30 + [0.3] * 30
    problem = Conjugate()
    log_v, w = of_chains(problem.sample(300, 48, 60, temperature=temperatures), 60)
    for temperature, own in ((1.0, slice(0, 30)), (0.3, slice(30, 60))):
        problem = Conjugate(temperature)
        of_each = problem.statistics(log_v[:, own], w[:, own]).mean(0)
        error = of_each.std(0, ddof=1) / np.sqrt(30)
        z = (of_each.mean(0) - problem.expected) / error
        assert np.abs(z).max() < 5.5, z
        # The test sees a conditional that is tempered otherwise.
        other = Conjugate(1.3 - temperature).expected
        assert np.abs((other - problem.expected) / error).max() > 8
