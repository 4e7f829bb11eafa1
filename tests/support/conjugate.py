"""Conjugate linear regression with its exact posterior, and the exact stationary law of the linear samplers.

D regressions share the inputs X (N, d) and have targets of their own, so one network `Linear(d, D)` without bias
samples D posteriors at once, all with the covariance (XᵀX/σ² + I/s²)⁻¹. Batches are drawn with replacement, so the
gradient noise is known exactly: for a sampler that is linear in its state z, z' = F_B·z + f_B + noise, the stationary
covariance solves S = E[F_B S F_Bᵀ] + E[f_B f_Bᵀ] + noise covariance, a linear system. It tends to the posterior's as
lr → 0.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_sgmcmc import BayesianModule, Gaussian, GaussianPrior
from lightning_sgmcmc.callbacks import SamplerCallback, SamplingSchedule
from lightning_sgmcmc.chains.sample import PosteriorSample

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class ConjugateRegression:
    """The data, and what follows from them in closed form."""

    num_data: int = 200
    features: int = 3
    outputs: int = 20
    noise_std: float = 1.0
    prior_std: float = 1.0
    seed: int = 0
    x: Array = field(init=False)
    y: Array = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        scales = np.linspace(0.7, 1.3, self.features)
        self.x = rng.normal(size=(self.num_data, self.features)) * scales
        weights = rng.normal(size=(self.outputs, self.features))
        self.y = self.x @ weights.T + self.noise_std * rng.normal(size=(self.num_data, self.outputs))

    @property
    def covariance(self) -> Array:
        """The posterior covariance of each output's weights, (d, d)."""
        precision = self.x.T @ self.x / self.noise_std**2 + np.eye(self.features) / self.prior_std**2
        return np.linalg.inv(precision)

    @property
    def mean(self) -> Array:
        """The posterior means, (D, d)."""
        return (self.covariance @ self.x.T @ self.y / self.noise_std**2).T

    def dataset(self) -> TensorDataset:
        return TensorDataset(torch.tensor(self.x, dtype=torch.float32), torch.tensor(self.y, dtype=torch.float32))

    def loader(self, batch_size: int, seed: int = 0) -> DataLoader[Any]:
        """Return a loader whose batches are independent draws with replacement."""
        data = self.dataset()
        generator = torch.Generator().manual_seed(seed)
        sampler = RandomSampler(data, replacement=True, generator=generator)
        return DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=True)

    def module(self, **options: Any) -> BayesianModule:
        net = nn.Linear(self.features, self.outputs, bias=False)
        with torch.no_grad():
            net.weight.copy_(torch.tensor(self.mean, dtype=torch.float32))  # a start in the middle needs little burn-in
        likelihood, prior = Gaussian(std=self.noise_std), GaussianPrior(std=self.prior_std)
        return BayesianModule(net=net, likelihood=likelihood, prior=prior, **options)

    # -- the exact stationary law ---------------------------------------------------------------------------------

    def _stationary(self, drift: Array, push: Array, noise: Array, batch_size: int) -> Array:
        """Return the stationary covariance of θ, averaged over outputs."""
        return self._stationary_state(drift, push, noise, batch_size)[: self.features, : self.features]

    def _stationary_state(self, drift: Array, push: Array, noise: Array, batch_size: int) -> Array:
        """Return the stationary covariance of the whole state, averaged over outputs.

        Args:
            drift: F at zero gradient, (z, z); the state's first d entries are θ.
            push: P with z' = drift·z - P·∇(Ũ/N)(θ), (z, d).
            noise: covariance of the injected noise, (z, z).
            batch_size: n.
        """
        d, n_data = self.features, self.num_data
        read = np.eye(d, len(drift))
        per_datum = np.einsum("ni,nj->nij", self.x, self.x) / self.noise_std**2
        prior = np.eye(d) / (n_data * self.prior_std**2)
        mean_map = drift - push @ (per_datum.mean(0) + prior) @ read
        deviations = (push @ (per_datum - per_datum.mean(0)) @ read) / np.sqrt(n_data * batch_size)
        transfer = np.kron(mean_map, mean_map) + sum(np.kron(m, m) for m in deviations)
        covariances = []
        for output in range(self.outputs):
            residual = self.x @ self.mean[output] - self.y[:, output]
            gradients = self.x * residual[:, None] / self.noise_std**2
            gradients = gradients - gradients.mean(0)
            forcing = push @ (gradients.T @ gradients / (n_data * batch_size)) @ push.T + noise
            # The gradient's noise at the mean, and its change with θ, are correlated, but times a θ - mean of mean 0.
            solution = np.linalg.solve(np.eye(len(transfer)) - transfer, forcing.reshape(-1))
            covariances.append(solution.reshape(forcing.shape))
        return np.mean(covariances, axis=0)

    def sgld_covariance(self, lr: float, batch_size: int, temperature: float = 1.0) -> Array:
        return self._stationary(*self.sgld_system(lr, temperature), batch_size)

    def sgld_system(self, lr: float, temperature: float = 1.0) -> tuple[Array, Array, Array]:
        """Return drift, push and noise, see `_stationary_state`."""
        identity = np.eye(self.features)
        return identity, lr * identity, 2 * lr * temperature / self.num_data * identity

    def sghmc_covariance(self, lr: float, batch_size: int, friction: float, temperature: float = 1.0) -> Array:
        return self._stationary(*self.sghmc_system(lr, friction, temperature), batch_size)

    def sghmc_system(self, lr: float, friction: float, temperature: float = 1.0) -> tuple[Array, Array, Array]:
        """Return drift, push and noise, see `_stationary_state`."""
        identity, zero, momentum = np.eye(self.features), np.zeros((self.features, self.features)), 1 - friction
        drift = np.block([[identity, momentum * identity], [zero, momentum * identity]])
        push = lr * np.vstack([identity, identity])
        variance = 2 * friction * lr * temperature / self.num_data
        return drift, push, variance * np.kron(np.ones((2, 2)), identity)

    def underdamped_covariance(self, step: float, batch_size: int, friction: float, temperature: float = 1.0) -> Array:
        return self._stationary(*self.underdamped_system(step, friction, temperature), batch_size)

    def underdamped_system(self, step: float, friction: float, temperature: float = 1.0) -> tuple[Array, Array, Array]:
        """Return drift, push and noise, see `_stationary_state`."""
        identity, zero = np.eye(self.features), np.zeros((self.features, self.features))
        drift = np.block([[identity, step * identity], [zero, (1 - step * friction) * identity]])
        push = step * self.num_data * np.vstack([zero, identity])
        noise = np.block([[zero, zero], [zero, 2 * friction * temperature * step * identity]])
        return drift, push, noise

    def gradient_covariance(self, covariance: Array, batch_size: int) -> Array:
        """Return the mini-batch covariance of the gradient of Ũ/N, averaged over outputs and over θ, (d, d)."""
        per_datum = np.einsum("ni,nj->nij", self.x, self.x) / self.noise_std**2
        deviations = per_datum - per_datum.mean(0)
        spread = np.einsum("nij,jk,nlk->il", deviations, covariance, deviations) / self.num_data
        residuals = self.x @ self.mean.T - self.y  # (N, D)
        gradients = self.x[:, None] * residuals[..., None] / self.noise_std**2
        gradients = gradients - gradients.mean(0)
        at_mean = np.einsum("noi,noj->ij", gradients, gradients) / (self.num_data * self.outputs)
        return (at_mean + spread) / batch_size


class Draws(SamplerCallback):
    """Keeps the first parameter of every sample."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        self.values.append(next(iter(sample.parameters.values())))

    def array(self) -> Array:
        """Return the draws, (S, D, d)."""
        return torch.stack(self.values).double().numpy()


def sample(
    problem: ConjugateRegression, steps: int, burn_in: int, every: int, batch_size: int, **options: Any
) -> Array:
    """Sample the posterior by `Trainer.fit`; options for the trainer are given as `trainer_…`."""
    trainer_options = {k.removeprefix("trainer_"): v for k, v in options.items() if k.startswith("trainer_")}
    module = problem.module(**{k: v for k, v in options.items() if not k.startswith("trainer_")})
    draws = Draws()
    trainer = quiet_trainer(
        max_steps=steps,
        callbacks=[SamplingSchedule(burn_in_steps=burn_in, every_n_steps=every), draws],
        **trainer_options,
    )
    trainer.fit(module, problem.loader(batch_size))
    return draws.array()


def quiet_trainer(**options: Any) -> pl.Trainer:
    """Return a CPU trainer that writes and prints nothing unless told to."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": -1 if "max_steps" in options else None,
    }
    return pl.Trainer(**(quiet | options))


def covariance_with_error(draws: Array, mean: Array, batches: int = 40) -> tuple[Array, Array]:
    """Return the draws' covariance about `mean`, averaged over outputs, and its standard error, (d, d) each."""
    centred = draws - mean
    products = np.einsum("soi,soj->sij", centred, centred) / draws.shape[1]
    return _mean_with_error(products, batches)


def mean_with_error(draws: Array, batches: int = 40) -> tuple[Array, Array]:
    """Return the draws' mean and its standard error by batch means, (D, d) each."""
    return _mean_with_error(draws, batches)


def _mean_with_error(values: Array, batches: int) -> tuple[Array, Array]:
    length = len(values) // batches
    means = values[: length * batches].reshape(batches, length, *values.shape[1:]).mean(1)
    return values.mean(0), means.std(0, ddof=1) / np.sqrt(batches)
