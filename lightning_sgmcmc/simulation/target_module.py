"""An analytic target as a `BayesianModule`, for `Trainer.fit` with any callback."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.checks import check_count, check_number
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.priors import FlatPrior
from lightning_sgmcmc.simulation.targets import Target


class TargetModule(BayesianModule):
    """One parameter, `x` of shape (d,), whose potential energy is a target's U(x).

    N is 1, so that `lr` is the papers' ε. Its data come from a `TargetDataModule`.

    Args:
        target: the target.
        initial: initial position, shape (d,); None uses the origin.
        energy_noise: standard deviation of Gaussian noise on the energy of a training step, in nats.
        gradient_noise: standard deviation of the noise on each coordinate of its gradient.
        options: `sampler`, `lr`, `temperature`, `seed`, … of `BayesianModule`.

    Raises:
        ValueError: for a position of another dimension or negative noise.
    """

    def __init__(
        self,
        target: Target,
        initial: Tensor | None = None,
        energy_noise: float = 0.0,
        gradient_noise: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(prior=FlatPrior(), num_data=1, **options)
        check_number("energy_noise", energy_noise)
        check_number("gradient_noise", gradient_noise)
        start = torch.zeros(target.dimension) if initial is None else initial
        if start.shape != (target.dimension,):
            raise ValueError(f"initial should have shape ({target.dimension},), got {tuple(start.shape)}")
        self.target = target
        self.energy_noise = energy_noise
        self.gradient_noise = gradient_noise
        self.x = nn.Parameter(start.clone())

    def log_likelihood(self, batch: Any) -> Tensor:
        energy = self.target.energy(self.x)
        if self.training and self.gradient_noise > 0:
            # Adds the noise to the gradient, and nothing to the energy.
            energy = energy + (self.gradient_noise * torch.randn_like(self.x) * (self.x - self.x.detach())).sum()
        if self.training and self.energy_noise > 0:
            energy = energy + self.energy_noise * torch.randn_like(energy)
        return -energy[None]


class TargetDataModule(pl.LightningDataModule):
    """Batches without content, since a target has no data.

    Args:
        steps_per_epoch: batches in an epoch.
    """

    num_data = 1

    def __init__(self, steps_per_epoch: int = 1000) -> None:
        super().__init__()
        check_count("steps_per_epoch", steps_per_epoch)
        self.steps_per_epoch = steps_per_epoch

    def training_data(self) -> TensorDataset:
        """Return one datum, which represents the target."""
        return TensorDataset(torch.zeros(1))

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(self.training_data(), batch_size=1, batches_per_epoch=self.steps_per_epoch)
