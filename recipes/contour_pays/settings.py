"""The settings of the recipe."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """The length and steps of all methods on a network.

    Attributes:
        steps: optimizer steps of each chain, after a warm start by Adam.
        lr: step size.
        warm_start: steps of Adam, which are part of the steps of a cyclical schedule.
        batch: batch size, 0 for all data.
    """

    steps: int
    lr: float
    warm_start: int = 200
    batch: int = 0


@dataclass(frozen=True)
class Settings:
    """The settings of `contour_pays.yaml`.

    Attributes:
        repeats, plane_repeats: of the networks, and of the plane, where they run side by side.
        plane_steps: of each of five chains on the plane.
        draws: of each chain.
        cycles: of the cyclical chains.
        ladder: temperatures of replica exchange; every method has as many chains.
        networks: what differs between the networks, by name.
    """

    repeats: int
    plane_repeats: int
    plane_steps: int
    draws: int
    cycles: int
    ladder: tuple[float, ...]
    networks: dict[str, Setting]

    @property
    def work(self) -> float:
        """The steps of all fits of networks; the plane takes little beside them."""
        return float(self.repeats * sum(one.steps + one.warm_start for one in self.networks.values()))
