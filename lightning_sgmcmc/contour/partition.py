"""A partition of the energy axis into bins."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count, check_positive, check_within
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
    """Return the bin of each energy, int64 from 0: the number of edges below it. An edge belongs to its lower bin.

    Args:
        energy: any shape, in nats.
        edges: u_1, …, u_{m-1}, rising, shape (m-1,).

    Raises:
        ValueError: if an energy in the host's memory is NaN.
    """
    if energy.device.type == "cpu" and not torch.compiler.is_compiling() and bool(energy.isnan().any()):
        raise ValueError("an energy is NaN, so it has no bin: check the model and its data")
    return torch.bucketize(energy, edges)
