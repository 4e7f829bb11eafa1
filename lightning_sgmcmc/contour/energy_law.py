"""The law of a chain's energies, and what flattening it gives: the spread of κ and the efficiency of the weights.

A posterior that is Gaussian in d directions has U - min U ~ τ·Gamma(d/2), and the noise of mini-batches adds a normal
variable. Both are near a shifted gamma law (Pearson type III), which three moments determine.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sgmcmc.contour.partition import EnergyPartition, bin_index

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

    >>> EnergyLaw(0.0, 10.0).efficiency(0.6)  # √(1-ζ²) of a normal law
    0.8
    """

    mean: float
    std: float
    shape: float = math.inf

    @classmethod
    def of(cls, energies: Tensor) -> "EnergyLaw":
        """Return the law with the mean, variance and skewness of energies, any shape, float64.

        The skewness gives k = 4/skewness². It is cut off at 0 (a normal law) and at 2 (k = 1, an exponential one).
        """
        mean, std = energies.mean(), energies.std()
        skewness = float(((energies - mean) / std).pow(3).mean())
        shape = math.inf if skewness <= 2 / NORMAL_FROM**0.5 else max(1.0, 4 / skewness**2)
        return cls(float(mean), float(std), shape)

    @property
    def scale(self) -> float:
        """s of the gamma law, in nats."""
        return self.std / self.shape**0.5

    def efficiency(self, zeta: float, exponent: float = 1.0) -> float:
        """Return (E w)²/E w² of weights w = p^{αζ} of draws from p^{1-ζ}, with ζ < 1.

            G(a+b)²/(G(a)·G(a+2b)),   a = 1-ζ, b = αζ,  G(c) = ∫ p^c;  √(a·(a+2b))/(a+b) for a normal law

        Args:
            zeta: ζ, the power of p that is flattened away.
            exponent: α of tempered weights.
        """
        a, b = 1 - zeta, exponent * zeta
        if math.isinf(self.shape):
            return math.sqrt(a * (a + 2 * b)) / (a + b)
        return math.exp(2 * self._log_power(a + b) - self._log_power(a) - self._log_power(a + 2 * b))

    def _log_power(self, c: float) -> float:
        """Return log ∫ p^c up to a multiple of c."""
        order = c * (self.shape - 1) + 1
        return math.lgamma(order) - order * math.log(c)

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
