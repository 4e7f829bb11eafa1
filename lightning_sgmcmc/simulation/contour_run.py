"""Contour sampling in the light loop."""

from dataclasses import dataclass, field

import torch

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.contour import Contour, ContourState, DecayingStepSize


@dataclass(frozen=True)
class ContourRun:
    """Configuration of a contour in a simulation.

    Attributes:
        contour: partition, ζ, scheme and other rules.
        step_size: ω of the stochastic approximation.
        shared: one π for all chains, learned from the mean of their steps; otherwise one for each chain.
        state: initial π, uniform if None; it is not changed.
        learn: False keeps π fixed (KSGLD).
        groups: number of shared π, with `shared`. Chains are split evenly, in their order, into this many groups, each
            sharing one π: independent repeats of a run of interacting chains, at the cost of one.

    Raises:
        ValueError: if `groups` is below 1, or above 1 without `shared`.
    """

    contour: Contour
    step_size: DecayingStepSize = field(default_factory=DecayingStepSize)
    shared: bool = False
    state: ContourState | None = None
    learn: bool = True
    groups: int = 1

    def __post_init__(self) -> None:
        check_count("groups", self.groups)
        if self.groups > 1 and not self.shared:
            raise ValueError(f"groups={self.groups} counts shared π, but shared is False: pass shared=True")

    def initial_state(self, num_chains: int, device: torch.device) -> ContourState:
        """Return a new π for `num_chains` chains, with one row per chain or group unless all share one.

        Raises:
            ValueError: if the chains cannot be split evenly into the groups.
        """
        if num_chains % self.groups:
            raise ValueError(f"{num_chains} chains cannot be split evenly into groups={self.groups}")
        rows = self.groups if self.shared else num_chains
        own = None if self.shared and rows == 1 else rows
        begin = self.state or self.contour.initial_state(own, device)
        bins = self.contour.partition.num_bins
        shape = (bins,) if own is None else (own, bins)
        return ContourState(*(tensor.to(device).expand(shape).clone() for tensor in begin))
