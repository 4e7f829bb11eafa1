"""A partition of the energy axis into bins, the range that it covers, and the law of the energies in it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count, check_number, check_positive, check_within
from lightning_sgmcmc.tensors import exact

PLACES = 2**16
"""Positions in an energy bin that an encoded energy distinguishes."""
FAR = 2**40
"""Largest encoded distance from the first edge, beyond any partition."""


@dataclass(frozen=True)
class EnergyPartition:
    """m energy bins of equal width between two open ones: (-∞, u_1], (u_1, u_2], …, (u_{m-1}, ∞).

    Args:
        first_edge: u_1 in nats; it should lie above the lowest energies that the chain reaches.
        width: Δu in nats, > 0.
        num_bins: m ≥ 2.

    Raises:
        ValueError: if an argument is out of range.

    Source: Deng et al. 2020, eq. (8).

    >>> partition = EnergyPartition(first_edge=100.0, width=10.0, num_bins=4)
    >>> partition.edges()
    tensor([100., 110., 120.], dtype=torch.float64)
    """

    first_edge: float
    width: float
    num_bins: int

    def __post_init__(self) -> None:
        check_count("num_bins", self.num_bins, least=2)
        check_within("first_edge", self.first_edge, "(-inf, inf)")
        check_positive("width", self.width)

    @property
    def last_edge(self) -> float:
        """u_{m-1}, in nats."""
        return self.first_edge + (self.num_bins - 2) * self.width

    def edges(self, device: torch.device | str | None = None) -> Tensor:
        """Return u_1, …, u_{m-1}, shape (m-1,), float64."""
        steps = torch.arange(self.num_bins - 1, dtype=torch.float64, device=device)
        return self.first_edge + steps * self.width

    def encode(self, energy: Tensor, index: Tensor) -> Tensor:
        """Return each energy as an integer that keeps its bin and its position there in steps of width/65536, int64.

        Args:
            energy: finite, in nats.
            index: bins of the energies.
        """
        place = (exact(energy) - self.first_edge) / self.width * PLACES
        above = (index == self.num_bins - 1).long() * FAR
        code = place.clamp(-FAR, FAR).ceil().long()
        # Rounding must not move an energy across an edge.
        lowest = torch.where(index == 0, -FAR, (index - 1) * PLACES + 1)
        return code.clamp(min=lowest).clamp(max=index * PLACES + above)

    def decode(self, code: Tensor) -> Tensor:
        """Return the energies of encoded integers, float64; each lies in the bin of the energy before `encode`."""
        return self.first_edge + exact(code) / PLACES * self.width

    @classmethod
    def from_energies(
        cls, energies: Tensor, num_bins: int, width: float | None = None, lowest: float = 0.05, headroom: float = 1.0
    ) -> "EnergyPartition":
        """Return a partition that covers the energies of a warm-up run.

        Args:
            energies: of the warm-up, any shape, in nats.
            num_bins: m.
            width: Δu; None spreads the bins up to the largest energy and beyond it by `headroom`.
            lowest: share of the energies below the first edge, in (0, 1).
            headroom: extent of the bins above the largest energy, in units of the energies' range.

        Raises:
            ValueError: if there are no energies, or if they are not finite or all equal.
        """
        energies = exact(energies.detach()).reshape(-1)
        if energies.numel() == 0 or not bool(energies.isfinite().all()):
            raise ValueError("the energies of the warm-up must be finite, and there must be at least one")
        low = float(energies.sort().values[round(lowest * (energies.numel() - 1))])
        high = float(energies.max())
        if width is None:
            if not high > low:
                raise ValueError(
                    f"the energies of the warm-up are all {high:.6g}, so their range is unknown: lengthen the warm-up, "
                    "or pass first_edge and width"
                )
            width = (high - low) * (1 + headroom) / max(num_bins - 2, 1)
        return cls(low, width, num_bins)


def bin_index(energy: Tensor, edges: Tensor) -> Tensor:
    """Return the bin of each energy, int64 from 0: the number of rising edges (m-1,) below it; an edge belongs to its
    lower bin, and a NaN in the host's memory raises."""
    if energy.device.type == "cpu" and not torch.compiler.is_compiling() and bool(energy.isnan().any()):
        raise ValueError("an energy is NaN, so it has no bin: check the model and its data")
    return torch.bucketize(energy, edges)


@dataclass(frozen=True)
class EnergyRange:
    """The arguments of an energy partition that may be learned, as `ContourGradient` has them."""

    num_bins: int
    first_edge: float | None = None
    width: float | None = None
    lowest: float = 0.05
    headroom: float = 1.0

    def __post_init__(self) -> None:
        check_number("headroom", self.headroom)
        check_within("lowest", self.lowest, "(0, 1)")
        if self.first_edge is not None and self.width is None:
            raise ValueError(
                f"first_edge={self.first_edge} needs a width: pass both, or neither to learn both in a warm-up"
            )
        EnergyPartition(self.first_edge or 0.0, self.width if self.width is not None else 1.0, self.num_bins)

    @property
    def given(self) -> EnergyPartition | None:
        """The partition of the arguments, None if it is to be learned."""
        if self.first_edge is None or self.width is None:
            return None
        return EnergyPartition(self.first_edge, self.width, self.num_bins)

    def learned(self, energies: Tensor) -> EnergyPartition:
        """Return the partition that covers the energies of a warm-up."""
        return EnergyPartition.from_energies(energies, self.num_bins, self.width, self.lowest, self.headroom)

    def resumed(self, partition: dict[str, Any]) -> EnergyPartition:
        """Return the partition to continue with, given the one of a checkpoint by its arguments."""
        return self.given or EnergyPartition(**partition | {"num_bins": self.num_bins})


# A posterior that is Gaussian in d directions has U - min U ~ τ·Gamma(d/2), and the noise of mini-batches adds a
# normal variable. Both are near a shifted gamma law (Pearson type III), which three moments determine.

POINTS = 4001
"""Points of the quadrature over energies."""
NORMAL_FROM = 1e4
"""Shape of the gamma law from which it is taken to be normal; its skewness is then 0.02."""
LOWEST, HIGHEST = 0.05, 0.999
"""Shares of the flattened energies below the first and below the last edge; beyond them κ = 1. Below the first, p
falls so steeply that κ would be large."""


@dataclass(frozen=True)
class EnergyLaw:
    """A shifted gamma law of energies u, with density p(u) ∝ x^{k-1}·e^{-x/s}, x = u - mean + k·s, s = std/√k.

    Args:
        mean: in nats.
        std: standard deviation in nats, > 0.
        shape: k ≥ 1; infinite for a normal law.
    """

    mean: float
    std: float
    shape: float = math.inf

    @classmethod
    def of(cls, energies: Tensor) -> "EnergyLaw":
        """Return the law with the mean, variance and skewness of energies; k = 4/skewness² is at least 1."""
        mean, std = energies.mean(), energies.std()
        skewness = float(((energies - mean) / std).pow(3).mean())
        shape = math.inf if skewness <= 2 / NORMAL_FROM**0.5 else max(1.0, 4 / skewness**2)
        return cls(float(mean), float(std), shape)

    @property
    def scale(self) -> float:
        """s of the gamma law, in nats."""
        return self.std / self.shape**0.5

    def edges(self, zeta: float) -> tuple[float, float]:
        """Return the outer edges of bins in nats: energies with shares of 0.05 and 0.999 of p^{1-ζ} below them."""
        u, log_density = self.points(zeta)
        shares = ((1 - zeta) * log_density).softmax(0).cumsum(0)
        first, last = (_crossing(u, shares, share) for share in (LOWEST, HIGHEST))
        return first, last

    def points(self, zeta: float) -> tuple[Tensor, Tensor]:
        """Return evenly spaced energies that cover p^{1-ζ}, and log p there up to a constant, float64."""
        a = 1 - zeta
        grid = torch.linspace(0, 1, POINTS, dtype=torch.float64)
        if self.shape >= NORMAL_FROM:
            u = self.mean + self.std * (2 * grid - 1) * 8 / a**0.5
        else:
            order = a * (self.shape - 1) + 1  # p^a is a gamma density of this shape and of scale s/a
            middle, reach = order * self.scale / a, self.scale / a * (8 * order**0.5 + 20)
            low = max(0.0, middle - reach)
            u = self.mean - self.shape * self.scale + low + (middle + reach - low) * (grid + 0.5 / POINTS)
        return u, self.log_density(u)

    def log_density(self, u: Tensor) -> Tensor:
        """Return log p at energies, up to a constant."""
        if self.shape >= NORMAL_FROM:
            return -((u - self.mean) / self.std).square() / 2
        x = (u - self.mean + self.shape * self.scale).clamp_min(1e-9 * self.scale)
        return (self.shape - 1) * x.log() - x / self.scale

    def log_masses(self, partition: EnergyPartition) -> Tensor:
        """Return the log of the law's mass in each bin of a partition, shape (m,), float64; finite in every bin."""
        edges = partition.edges()
        span = partition.last_edge - partition.first_edge + 2 * partition.width
        fine = torch.linspace(0, 1, POINTS * 2, dtype=torch.float64)
        u = partition.first_edge - partition.width + span * fine
        log_density = self.log_density(u)
        bins = bin_index(u, edges)
        sums = [log_density[bins == one].logsumexp(0) for one in range(partition.num_bins)]
        return torch.stack(sums).log_softmax(0)


def _crossing(u: Tensor, shares: Tensor, share: float) -> float:
    """Return where rising shares, those below the end of each cell around a point, reach a value."""
    at = min(max(int(torch.searchsorted(shares, share)), 1), len(u) - 1)
    before, after = float(shares[at - 1]), float(shares[at])
    step = float(u[at] - u[at - 1])
    return float(u[at]) + step * ((share - before) / (after - before) - 0.5)
