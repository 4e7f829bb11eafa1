"""Findings on a run: what is wrong or worth knowing, ranked, each with one remedy."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

Side = Literal["above", "below"]
Severity = Literal["problem", "note"]

SMALLER_LR = "use a smaller lr (`sgmcmc tune` finds one)"
SMALLER_AND_LONGER = "use a smaller lr (`sgmcmc tune` finds one) in a run that is longer by the same factor"
"""Against excess variance: smaller steps alone would train and mix less."""
STILL_FALLING = "use a longer burn-in, since the energy is still falling"
"""Against what is left of the start: a smaller step would leave more of it."""


class FindingKind(str, Enum):
    """Subject of a finding."""

    DIVERGENCE = "divergence"
    AT_CHANCE = "at chance"
    GUESSING = "guessing"
    CLIPPING = "clipping"
    ACCEPTANCE = "acceptance"
    KINETIC = "kinetic temperature"
    CONFIGURATIONAL = "configurational temperature"
    GRADIENT_NOISE = "gradient noise"
    TARGET = "target"
    ENERGY = "energy"
    RELAXATION = "relaxation"
    CONTOUR = "contour"
    CHAINS = "chains"
    AVERAGE = "average"
    TREND = "trend"
    CALIBRATION = "calibration"
    PRECONDITIONER = "preconditioner"
    OTHER = "other"
    """A kind from a file that this version does not know."""

    @classmethod
    def _missing_(cls, value: object) -> "FindingKind":
        return cls.OTHER


HEATING = (FindingKind.DIVERGENCE, FindingKind.KINETIC, FindingKind.CONFIGURATIONAL, FindingKind.GRADIENT_NOISE)
COLD = (FindingKind.KINETIC, FindingKind.CONFIGURATIONAL)
"""Temperatures, which may also be below the target's: then they rank beside the energy."""
OF_HELD_OUT = (FindingKind.GUESSING, FindingKind.TREND, FindingKind.CALIBRATION)
"""Findings on held-out data."""
OF_THE_LAW = (
    FindingKind.KINETIC,
    FindingKind.CONFIGURATIONAL,
    FindingKind.GRADIENT_NOISE,
    FindingKind.ENERGY,
    FindingKind.RELAXATION,
    FindingKind.PRECONDITIONER,
)
"""What distribution a chain samples: as notes these ask nothing of an ensemble for prediction."""
_ORDER = tuple(FindingKind)


@dataclass(frozen=True)
class Finding:
    """One problem of a run, or a note on it.

    Attributes:
        kind: its subject.
        sentence: the kind and the measured values.
        side: "above" or "below" the expected value; None if the kind has one side only, or if unknown.
        tensor: name of the parameter tensor with the largest deviation; None for the run as a whole.
        remedy: what to do about it, in the imperative.
        severity: a "problem", or a "note" on what the run is, which is no reason for a warning.
    """

    WRITTEN: ClassVar = ("kind", "severity", "rank", "side", "tensor", "sentence", "remedy")

    kind: FindingKind
    sentence: str
    side: Side | None = None
    tensor: str | None = None
    remedy: str = ""
    severity: Severity = "problem"

    @property
    def is_heat(self) -> bool:
        """Whether the chain has excess variance, which a smaller step reduces."""
        return self.kind in HEATING and self.side != "below"

    @property
    def rank(self) -> int:
        """Its place in a report: causes before consequences, the most urgent is 0, notes are last."""
        is_cold = self.kind in COLD and self.side == "below"
        place = _ORDER.index(FindingKind.ENERGY if is_cold else self.kind)
        return place + (len(_ORDER) if self.severity == "note" else 0)

    @property
    def text(self) -> str:
        """The sentence with its remedy."""
        return f"{self.sentence}: {self.remedy}" if self.remedy else self.sentence

    @classmethod
    def divergence(cls) -> "Finding":
        """Return the finding of energies or gradients that are not finite."""
        return cls(FindingKind.DIVERGENCE, "divergence: energies or gradients are infinite or NaN", remedy=SMALLER_LR)


def ranked(findings: Iterable[Finding | None]) -> tuple[Finding, ...]:
    """Return the findings that exist, the most urgent first."""
    return tuple(sorted((finding for finding in findings if finding is not None), key=lambda finding: finding.rank))


def most_urgent(findings: Iterable[Finding], is_ensemble: bool) -> Finding | None:
    """Return the first of ranked findings that asks for something: a problem, else a note with a remedy, which in an
    ensemble for prediction is not about the distribution of the chain. None without one."""
    known = list(findings)
    problems = [finding for finding in known if finding.severity == "problem"]
    notes = [one for one in known if one.remedy and not (is_ensemble and one.kind in OF_THE_LAW)]
    return next(iter([*problems, *notes]), None)
