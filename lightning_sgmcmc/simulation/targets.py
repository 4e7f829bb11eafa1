"""Analytic target densities: energies, gradients, modes and moments, as ground truth for samplers.

A target is `p(x) ∝ exp(-U(x)/τ)` of x in d dimensions (one or two). Energies and gradients are closed formulas of the
coordinates, along any leading axes, so that thousands of chains are computed at once. `TargetModule` has a
target as its energy, for `Trainer.fit`.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.checks import check_count, check_number
from lightning_sgmcmc.contour.partition import bin_index
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.priors import FlatPrior
from lightning_sgmcmc.tensors import with_moved_tensors

GRID_1D = 1_000_000
GRID_2D = 2_000
"""Cells of the quadrature along each axis."""
FEW = 4
"""Components of a mixture up to which writing them out makes the fastest compiled loop."""
QUADRATURE_PART = 2**14
"""Cells whose energies are computed at once, which bounds the memory of a mixture of many components."""
Of = TypeVar("Of", bound="Target")


class Density(Protocol):
    """The part of a `Target` needed for sampling."""

    @property
    def dimension(self) -> int: ...

    def energy(self, x: Tensor) -> Tensor: ...

    def gradient(self, x: Tensor) -> Tensor: ...


class Target(ABC):
    """A density in one or two dimensions; subclasses define `energy`, `gradient`, `bounds` and `modes`."""

    bounds: tuple[float, float]
    """The interval, for every axis, with all but a negligible part of the mass."""
    dimension: int

    @abstractmethod
    def energy(self, x: Tensor) -> Tensor:
        """Return U(x) in nats, shape (…), for x of shape (…, d)."""

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """Return ∇U(x), shape (…, d)."""

    @property
    @abstractmethod
    def modes(self) -> Tensor:
        """All modes, shape (M, d), float64."""

    def to(self: Of, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Of:
        """Return this target with its tensors on a device and in a dtype; None keeps the current one."""
        return with_moved_tensors(self, device, dtype)

    # -- the truth, by quadrature -------------------------------------------------------------------------------------

    def cells(self, count: int | None = None) -> Tensor:
        """Return the centres of a grid of equal cells over the bounds, shape (cells, d), float64.

        Args:
            count: cells along each axis; None uses the quadrature's number.
        """
        count = count or (GRID_1D if self.dimension == 1 else GRID_2D)
        low, high = self.bounds
        axis = low + (torch.arange(count, dtype=torch.float64) + 0.5) * ((high - low) / count)
        if self.dimension == 1:
            return axis[:, None]
        return torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)

    @functools.cached_property
    def _quadrature(self) -> tuple[Tensor, Tensor]:
        """The cells' centres and energies."""
        cells = self.cells()
        return cells, torch.cat([self.energy(part) for part in cells.split(QUADRATURE_PART)])

    def expectation(self, function: Callable[[Tensor], Tensor], temperature: float = 1.0) -> Tensor:
        """Return E[f(x)], shape (F…), for a function from (n, d) to (n, F…)."""
        cells, energies = self._quadrature
        return torch.tensordot((-energies / temperature).softmax(0), function(cells).double(), dims=1)

    @property
    def mean(self) -> Tensor:
        """E[x], shape (d,)."""
        return self.expectation(lambda x: x)

    @property
    def covariance(self) -> Tensor:
        """The covariance, shape (d, d)."""
        mean = self.mean
        return self.expectation(lambda x: (x - mean)[:, :, None] * (x - mean)[:, None, :])

    def log_normaliser(self, temperature: float = 1.0) -> float:
        """Return log ∫exp(-U/τ)dx."""
        cells, energies = self._quadrature
        low, high = self.bounds
        return float((-energies / temperature).logsumexp(0)) + math.log((high - low) ** self.dimension / len(cells))

    def bin_masses(self, edges: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the mass in each energy bin, shape (m,), for edges of shape (m-1,)."""
        _, energies = self._quadrature
        masses = torch.zeros(len(edges) + 1, dtype=torch.float64)
        return masses.index_add_(0, bin_index(energies, edges.double()), (-energies / temperature).softmax(0))

    def cell_masses(self, count: int, temperature: float = 1.0) -> Tensor:
        """Return the mass in each of the cells of `cells(count)`, shape (cells,), from the quadrature's finer grid.

        Raises:
            ValueError: if the quadrature's grid is not a multiple of this one.
        """
        fine = GRID_1D if self.dimension == 1 else GRID_2D
        if fine % count:
            raise ValueError(f"count must divide the quadrature's {fine} cells, got {count}")
        part = fine // count
        masses = (-self._quadrature[1] / temperature).softmax(0)
        if self.dimension == 1:
            return masses.reshape(count, part).sum(1)
        return masses.reshape(count, part, count, part).sum((1, 3)).reshape(-1)


class GaussianMixture(Target):
    """p(x) = Σ_j w_j·N(x; μ_j, σ²I), with U = -log p normalised.

    Args:
        weights: w, shape (M,), positive; divided by their sum.
        means: μ, shape (M, d), d of 1 or 2.
        variance: σ².
    """

    def __init__(self, weights: Sequence[float], means: Sequence[Sequence[float]], variance: float = 1.0) -> None:
        if not variance > 0:
            raise ValueError(f"variance must be positive, got {variance}")
        weight = torch.tensor(weights, dtype=torch.float64)
        self.means = torch.tensor(means, dtype=torch.float64)
        if self.means.dim() != 2 or len(self.means) != len(weight) or self.means.shape[1] not in (1, 2):
            raise ValueError(f"means should have shape ({len(weight)}, 1) or (…, 2), got {tuple(self.means.shape)}")
        if not bool((weight > 0).all()):
            raise ValueError(f"weights must be positive, got {list(weights)}")
        self.weights = weight / weight.sum()
        self.variance = variance
        self.dimension = self.means.shape[1]
        reach = 10 * math.sqrt(variance)
        self.bounds = (float(self.means.min()) - reach, float(self.means.max()) + reach)
        constant = 0.5 * self.dimension * math.log(2 * math.pi * variance)
        self._logs = self.weights.log() - constant
        # Plain numbers, so that they are constants in compiled loops, whatever the device and type of x.
        self._terms = list(zip(self._logs.tolist(), self.means.tolist(), strict=True))

    @classmethod
    def two_modes(cls, heavy: float = 0.6) -> "GaussianMixture":
        """Return (1-h)·N(-6, 1) + h·N(4, 1): Deng et al. 2020, section 4.1, for h = 0.6 and, asymmetric, 5/6."""
        return cls([1 - heavy, heavy], [[-6.0], [4.0]])

    @classmethod
    def twenty_five(cls) -> "GaussianMixture":
        """Return 25 Gaussians of variance 0.03 with means {-4, -2, 0, 2, 4}²: Zhang et al. 2020, section 5.1."""
        axis = (-4.0, -2.0, 0.0, 2.0, 4.0)
        return cls([1.0] * 25, [[a, b] for a in axis for b in axis], 0.03)

    def _relative_parts(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the largest log component max_j log(w_j·N(x; μ_j, σ²I)), and all components relative to it; pointwise,
        so that compiled steps become one loop."""
        logs = []
        for log_weight, mean in self._terms:
            square = (x[..., 0] - mean[0]) ** 2
            for i in range(1, self.dimension):
                square = square + (x[..., i] - mean[i]) ** 2
            logs.append(log_weight - square / (2 * self.variance))
        largest = functools.reduce(torch.maximum, logs)
        return largest, [(part - largest).exp() for part in logs]

    def _log_parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log(w_j·N(x; μ_j, σ²I)), shape (…, M), and the means in the type of x, shape (M, d)."""
        means, logs = self.means.to(x), self._logs.to(x)
        return logs - (x[..., None, :] - means).square().sum(-1) / (2 * self.variance), means

    def energy(self, x: Tensor) -> Tensor:
        if len(self.means) > FEW:
            return -self._log_parts(x)[0].logsumexp(-1)
        largest, parts = self._relative_parts(x)
        return -largest - functools.reduce(torch.add, parts).log()

    def gradient(self, x: Tensor) -> Tensor:
        if len(self.means) > FEW:
            logs, places = self._log_parts(x)
            return (x - (logs.softmax(-1)[..., None] * places).sum(-2)) / self.variance
        _, parts = self._relative_parts(x)
        total = functools.reduce(torch.add, parts)
        means = [mean for _, mean in self._terms]
        centres = [
            functools.reduce(torch.add, (part * mean[i] for part, mean in zip(parts, means, strict=True))) / total
            for i in range(self.dimension)
        ]
        return (x - torch.stack(centres, -1)) / self.variance

    @property
    def mean(self) -> Tensor:
        return self.weights @ self.means

    @property
    def covariance(self) -> Tensor:
        centred = self.means - self.mean
        return (self.weights[:, None] * centred).T @ centred + self.variance * torch.eye(self.dimension).double()

    @property
    def modes(self) -> Tensor:
        x = self.means.clone()
        for _ in range(
            200
        ):  # a fixed-point iteration for ∇U = 0, which equals Newton's if the components hardly overlap
            x = x - self.gradient(x) * self.variance
        return x


class CosineTarget(Target):
    """U(x) = a·‖x‖² - b·Σ_i cos(c·x_i) + (‖x‖² - R)·1{‖x‖² > R} in the plane, a grid of modes.

    Args:
        quadratic: a.
        amplitude: b.
        wave_number: c.
        square_radius: R, beyond which the density falls faster.
        modes_per_axis: number of modes along each axis.
    """

    dimension = 2

    def __init__(
        self, quadratic: float, amplitude: float, wave_number: float, square_radius: float, modes_per_axis: int
    ) -> None:
        self.quadratic = quadratic
        self.amplitude = amplitude
        self.wave_number = wave_number
        self.square_radius = square_radius
        self.modes_per_axis = modes_per_axis
        reach = math.sqrt(square_radius) + 3.0
        self.bounds = (-reach, reach)

    @classmethod
    def nine_modes(cls) -> "CosineTarget":
        """Return U = Σ(x_i² - 10·cos(1.2πx_i))/3 with R = 7: Deng et al. 2020, section 4.1."""
        return cls(1 / 3, 10 / 3, 1.2 * math.pi, 7.0, 3)

    @classmethod
    def twenty_five_modes(cls) -> "CosineTarget":
        """Return U = 0.2·‖x‖² - 2·Σcos(2πx_i) with R = 20: Deng et al. 2022, section 4.1."""
        return cls(0.2, 2.0, 2 * math.pi, 20.0, 5)

    def energy(self, x: Tensor) -> Tensor:
        first, second = x[..., 0], x[..., 1]
        square = first * first + second * second
        waves = torch.cos(self.wave_number * first) + torch.cos(self.wave_number * second)
        beyond = (square - self.square_radius).clamp(min=0)
        return self.quadratic * square - self.amplitude * waves + beyond

    def gradient(self, x: Tensor) -> Tensor:
        first, second = x[..., 0], x[..., 1]
        beyond = (first * first + second * second > self.square_radius).to(x.dtype)
        slope = 2 * (self.quadratic + beyond)
        return slope[..., None] * x + self.amplitude * self.wave_number * torch.sin(self.wave_number * x)

    @property
    def modes(self) -> Tensor:
        half = self.modes_per_axis // 2
        axis = torch.arange(-half, half + 1, dtype=torch.float64) * (2 * math.pi / self.wave_number)
        force = self.amplitude * self.wave_number
        for _ in range(30):
            slope = 2 * self.quadratic * axis + force * torch.sin(self.wave_number * axis)
            curvature = 2 * self.quadratic + force * self.wave_number * torch.cos(self.wave_number * axis)
            axis = axis - slope / curvature
        return torch.cartesian_prod(axis, axis)


# -- a target for `Trainer.fit`, with any callback --------------------------------------------------------------------


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
