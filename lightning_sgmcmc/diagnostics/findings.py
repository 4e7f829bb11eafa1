"""Findings on a run: what is wrong or worth knowing, ranked, each with one remedy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

Side = Literal["above", "below"]
Severity = Literal["problem", "note"]

SMALLER_LR = "use a smaller lr (`sgmcmc tune` finds one)"


class FindingKind(str, Enum):
    """Subject of a finding."""

    DIVERGENCE = "divergence"
    AT_CHANCE = "at chance"
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
    PRECONDITIONER = "preconditioner"
    OTHER = "other"
    """A kind from a file that this version does not know."""


HEATING = (FindingKind.DIVERGENCE, FindingKind.KINETIC, FindingKind.CONFIGURATIONAL, FindingKind.GRADIENT_NOISE)
COLD = (FindingKind.KINETIC, FindingKind.CONFIGURATIONAL)
"""Temperatures, which may also be below the target's: then they rank beside the energy."""
_ORDER = tuple(FindingKind)


@dataclass(frozen=True)
class Finding:
    """One problem of a run, or a note on it.

    Attributes:
        kind: its subject.
        sentence: the kind and the measured values.
        side: "above" or "below" the expected value; None if the kind has one side only, or if unknown.
        tensor: name of the parameter tensor with the largest deviation; None for the run as a whole.
        remedy: what to do about it, in the imperative; "" in files of version 0.1.0, whose sentences contain it.
        severity: a "problem", or a "note" on what the run is, which is no reason for a warning.
    """

    kind: FindingKind
    sentence: str
    side: Side | None = None
    tensor: str | None = None
    remedy: str = ""
    severity: Severity = "problem"

    @property
    def is_heat(self) -> bool:
        """Whether the chain is too hot, which a smaller step cures."""
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

    @classmethod
    def of_sentence(cls, sentence: str) -> "Finding":
        """Return a finding from its sentence alone, as stored by version 0.1.0."""
        kind = kind_of(sentence.split(":")[0])
        side: Side | None = None
        if kind in COLD:
            side = "below" if " is below " in sentence else "above"
        return cls(kind, sentence, side)

    def as_json(self) -> dict[str, Any]:
        """Return its JSON form."""
        return {
            "kind": self.kind.value,
            "severity": self.severity,
            "rank": self.rank,
            "side": self.side,
            "tensor": self.tensor,
            "sentence": self.sentence,
            "remedy": self.remedy,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Finding":
        """Return a finding from its JSON form; missing entries have their defaults."""
        given, tensor = entry.get("side"), entry.get("tensor")
        side: Side | None = "above" if given == "above" else "below" if given == "below" else None
        return cls(
            kind_of(entry.get("kind")),
            str(entry["sentence"]),
            side,
            None if tensor is None else str(tensor),
            str(entry.get("remedy", "")),
            "note" if entry.get("severity") == "note" else "problem",
        )


def ranked(findings: Iterable[Finding | None]) -> tuple[Finding, ...]:
    """Return the findings that exist, the most urgent first."""
    return tuple(sorted((finding for finding in findings if finding is not None), key=lambda finding: finding.rank))


def kind_of(name: Any) -> FindingKind:
    """Return the kind with a name, OTHER for an unknown one."""
    return next((kind for kind in FindingKind if kind.value == name), FindingKind.OTHER)
