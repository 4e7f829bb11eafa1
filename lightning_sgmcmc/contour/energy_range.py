"""Where the energy bins of a run lie: as given, or as learned from its warm-up."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_sgmcmc.checks import check_number, check_within
from lightning_sgmcmc.contour.partition import EnergyPartition


@dataclass(frozen=True)
class EnergyRange:
    """The arguments of an energy partition that may be learned.

    Args:
        num_bins: m.
        first_edge: u_1 in nats; None learns it.
        width: Δu in nats; None learns it, together with first_edge.
        lowest: share of the energies below a learned first edge, in (0, 1).
        headroom: extent of the bins above the largest energy, in units of the energies' range.

    Raises:
        ValueError: if an argument is out of range, or for a first edge without a width.
    """

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
