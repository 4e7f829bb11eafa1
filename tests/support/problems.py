"""The problems that tests share: data, networks, datamodules, and a regression whose posterior is known exactly."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, Gaussian, GaussianPrior
from lightning_sgmcmc.batches.loader import ChainBatches
from lightning_sgmcmc.datamodules import ArrayDataModule, Split
from lightning_sgmcmc.simulation.targets import CosineTarget, GaussianMixture

ACCELERATOR = os.environ.get("SGMCMC_TEST_ACCELERATOR", "cpu")
"""Where the tests of one process fit: "gpu" tries the suite on a device, up to rounding where a CPU has equal bits."""
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class ConjugateRegression:
    """Conjugate linear regression with its exact posterior, and the exact stationary law of the linear samplers.

    D regressions share the inputs X (N, d) and have targets of their own, so one network `Linear(d, D)` without bias
    samples D posteriors at once, all with the covariance (XᵀX/σ² + I/s²)⁻¹. Batches are drawn with replacement, so
    the gradient noise is known exactly: for a sampler that is linear in its state z, z' = F_B·z + f_B + noise, the
    stationary covariance solves S = E[F_B S F_Bᵀ] + E[f_B f_Bᵀ] + noise covariance, a linear system. It tends to the
    posterior's as lr → 0.
    """

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

    def chain_loader(self, batch_size: int, chains: int, seed: int = 0) -> "Iterable[ChainBatches]":
        """Return a loader whose batches are independent draws with replacement for each chain."""
        return IndependentBatches(*self.dataset().tensors, batch_size, chains, seed)

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

    def baoab_covariance(self, step: float, batch_size: int, friction: float, temperature: float = 1.0) -> Array:
        return self._stationary(*self.baoab_system(step, friction, temperature), batch_size)

    def baoab_system(self, step: float, friction: float, temperature: float = 1.0) -> tuple[Array, Array, Array]:
        """Return drift, push and noise, see `_stationary_state`."""
        identity, zero, decay = (
            np.eye(self.features),
            np.zeros((self.features, self.features)),
            np.exp(-friction * step),
        )
        kicked = np.vstack([step / 2 * (1 + decay) * identity, decay * identity])  # of the momentum after the kick
        drift = np.hstack([np.vstack([identity, zero]), kicked])
        noise = np.array([[step**2 / 4, step / 2], [step / 2, 1]]) * temperature * (1 - decay**2)
        return drift, step * self.num_data * kicked, np.kron(noise, identity)

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


class IndependentBatches:
    """An epoch of a thousand steps, with independent draws for every chain."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, chains: int, seed: int) -> None:
        self.x, self.y = x, y
        self.shape = (len(self), chains, batch_size)
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[ChainBatches]:
        for indices in torch.randint(len(self.x), self.shape, generator=self.generator):
            yield ChainBatches.of_stack((self.x[indices], self.y[indices]), len(indices))


PROBLEM = ConjugateRegression()


class RankData(pl.LightningDataModule):
    """Independent batches on every rank."""

    def __init__(self, batch_size: int, chains: int = 1) -> None:
        super().__init__()
        self.num_data = PROBLEM.num_data
        self.batch_size = batch_size
        self.chains = chains

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        seed = 100 + self.trainer.global_rank
        if self.chains > 1:
            return PROBLEM.chain_loader(self.batch_size, self.chains, seed)
        return PROBLEM.loader(self.batch_size, seed)


NUM_DATA, BATCH, CLASSES = 60, 8, 3
CHAINS = 3


def data(count: int, seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator)
    return Split(x, (x[:, :CLASSES] + 0.3 * torch.randn(count, CLASSES, generator=generator)).argmax(1))


class Noisy:
    """Augmentation of a whole batch."""

    def __call__(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Decoded(Dataset[Any]):
    """Items that draw their augmentation from torch's and NumPy's default generators."""

    def __init__(self, split: Split, augment: bool) -> None:
        self.split = split
        self.augment = augment

    def __len__(self) -> int:
        return len(self.split.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.split.inputs[index]
        if self.augment:
            x = x + 0.1 * torch.randn(5) + 0.1 * float(np.random.normal())  # noqa: NPY002
        return x, self.split.targets[index]


class Data(ArrayDataModule):
    """60 data in the plane of five, with augmentation that draws from the default generator."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__(batch_size)

    def load(self) -> tuple[Split, Split, Split]:
        return data(60, 0), data(20, 1), data(20, 2)

    def train_transform(self) -> Any:
        return Noisy()


class Even(Data):
    """64 data without augmentation, so that two ranks with half a batch each see one rank's batch."""

    def load(self) -> Any:
        return data(64, 0), data(21, 1), data(20, 2)

    def train_transform(self) -> Any:
        return None


class Ordered(Data):
    """Data without augmentation in a given order."""

    def __init__(self, order: Any) -> None:
        super().__init__()
        self.order = order

    def train_transform(self) -> Any:
        return None

    def val_dataloader(self) -> Any:
        return []


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
        )


class Net(BayesianModule):
    """A network with BatchNorm, dropout and a parameter without axes; `first` tells which chain of the run it starts
    with."""

    def __init__(self, num_chains: int = 1, first: int = 0, **options: Any) -> None:
        chosen = {"likelihood": Categorical(), "sampler": SGHMC, "lr": 0.05, "seed": 5} | options
        super().__init__(num_chains=num_chains, **chosen)
        self.first = first
        self.net = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3, bias=False)
        )
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x)  # type: ignore[no-any-return]


class Plain(BayesianModule):
    """A network without parts that see other data of the batch."""

    def __init__(self, num_chains: int = 1, **options: Any) -> None:
        chosen = {"likelihood": Categorical(), "sampler": SGHMC, "lr": 0.05, "seed": 5} | options
        super().__init__(num_chains=num_chains, **chosen)
        self.net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def blobs(count: int = 96, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=generator)
    return TensorDataset(x, (x.sum(1) + 0.7 * torch.randn(count, generator=generator) > 0).long())


def blob_network(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))


def classifier(dropout: float = 0.0, **options: Any) -> BayesianModule:
    options = {"sampler": SGHMC, "lr": 0.05, "seed": 1} | options
    return BayesianModule(net=blob_network(dropout), likelihood=Categorical(), **options)


def loaders(batch_size: int = 24) -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(blobs(), batch_size), DataLoader(blobs(64, seed=1), 16)


class Blobs(pl.LightningDataModule):
    """Two overlapping classes in the plane."""

    num_data = 96

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(160, 2, generator=generator)
        self.y = (self.x.sum(1) + 0.7 * torch.randn(160, generator=generator) > 0).long()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(self.x[:96], self.y[:96]), 24, shuffle=True)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(self.x[96:], self.y[96:]), 16)

    test_dataloader = val_dataloader


def full_energy(module: BayesianModule) -> torch.Tensor:
    data = Even()
    data.setup("fit")
    train = data.splits[0]
    return module.potential_energy((train.inputs, train.targets)).detach().double()


TARGETS = {
    "two modes": GaussianMixture.two_modes(),
    "asymmetric": GaussianMixture.two_modes(5 / 6),
    "25 gaussians": GaussianMixture.twenty_five(),
    "nine modes": CosineTarget.nine_modes(),
    "25 modes": CosineTarget.twenty_five_modes(),
}


class Stream(IterableDataset[Any]):
    """Data without a length."""

    def __init__(self, items: Any = ()) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.items))
