"""What a run is called: a posterior sample or one of three ensembles."""

from enum import Enum
from typing import TYPE_CHECKING

COLD_BELOW = 0.5
"""A configurational temperature below this share of the target's makes a run a cold ensemble."""
LEAST_RELAXATION_TIMES = 1.0
"""With fewer relaxation times a run is a cold ensemble: its states have kept most of their start."""
WANTED = 3.0
"""Relaxation times that burn-in and sampling should cover together for a posterior sample.

After t of them a coordinate keeps e^-t of its start and has 1 - e^-2t of its variance: at 3 these are 5 % and 99.8 %,
and the average over the last three quarters of a run without burn-in is above 0.85 of the target's temperature, which
`ChainHealth` accepts."""
HOT_SHARE = 0.5
"""A target whose heat exceeds this share of the energy of chance is called hot for its data."""


class RunKind(str, Enum):
    """What the states that a run collects are, together."""

    POSTERIOR_SAMPLE = "posterior sample"
    COLD_ENSEMBLE = "cold ensemble"
    SNAPSHOT_ENSEMBLE = "snapshot ensemble"
    DEEP_ENSEMBLE = "deep ensemble"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def of(cls, plan: "PlanFacts", measured_configurational_temperature: float | None = None) -> "RunKind | None":
        """Return what a run is called, by its plan and by what was measured.

        At temperature 0 it is a deep ensemble of several chains, or a snapshot ensemble of one. Below temperature 1 it
        is a cold ensemble, since the posterior has 1. From 1 on it is a cold ensemble if it covers less than one
        relaxation time, or if its configurational temperature is below half of the target's; else it is a posterior
        sample. A measured temperature decides alone.

        Args:
            plan: the run's plan.
            measured_configurational_temperature: that of all tensors together in `ChainHealth`'s report; None without.

        Returns:
            the kind; None if neither is known.
        """
        if plan.temperature == 0:
            return cls.DEEP_ENSEMBLE if plan.chains > 1 else cls.SNAPSHOT_ENSEMBLE
        if plan.temperature < 1:
            return cls.COLD_ENSEMBLE
        reached, covered = measured_configurational_temperature, plan.relaxation_times
        if reached is None and covered is not None and covered < LEAST_RELAXATION_TIMES:
            return cls.COLD_ENSEMBLE
        if reached is None:
            reached = plan.configurational_temperature
        if reached is None:
            return None
        return cls.COLD_ENSEMBLE if reached < COLD_BELOW * plan.temperature else cls.POSTERIOR_SAMPLE


def with_article(name: str) -> str:
    """Return the name of a run as a sentence has it after "is".

    >>> [with_article(name) for name in ("cold ensemble", "MC dropout ensemble", "SWAG")]
    ['a cold ensemble', 'an MC dropout ensemble', 'SWAG']
    """
    if not name.endswith(("sample", "ensemble", "network")):
        return name  # a method's
    return f"{'an' if name.startswith('MC') else 'a'} {name}"


if TYPE_CHECKING:
    from typing import Protocol

    class PlanFacts(Protocol):
        """The part of a `RunPlan` that decides its kind."""

        @property
        def temperature(self) -> float: ...
        @property
        def chains(self) -> int: ...
        @property
        def relaxation_times(self) -> float | None: ...
        @property
        def configurational_temperature(self) -> float | None: ...
