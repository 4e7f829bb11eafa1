"""The report on a chain's health: temperatures, mini-batch noise, energies, and findings with advice.

`lightning_sgmcmc.diagnostics.assessment.assess` creates it. `BayesianModule.health` holds the latest, `health.json` in
a run's folder is its JSON form, and `sgmcmc report` reads that file.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, Literal

Side = Literal["above", "below"]
TemperatureKind = Literal["kinetic", "configurational"]
Verdict = Literal["ok", "warning", "unknown"]
Interval = tuple[float, float]

VERDICTS: tuple[Verdict, ...] = ("ok", "warning", "unknown")


class FindingKind(str, Enum):
    """Subject of a finding."""

    DIVERGENCE = "divergence"
    KINETIC = "kinetic temperature"
    CONFIGURATIONAL = "configurational temperature"
    GRADIENT_NOISE = "gradient noise"
    ENERGY = "energy"
    CLIPPING = "clipping"
    OTHER = "other"
    """A kind from a file that this version does not know."""


HEATING = (FindingKind.DIVERGENCE, FindingKind.KINETIC, FindingKind.CONFIGURATIONAL, FindingKind.GRADIENT_NOISE)


@dataclass(frozen=True)
class Finding:
    """One problem with a chain.

    Attributes:
        kind: its subject.
        sentence: the kind, the measured values and a remedy.
        side: "above" or "below" the expected value; None if the kind has one side only, or if unknown.
        tensor: name of the parameter tensor with the largest deviation; None for the chain as a whole.
    """

    kind: FindingKind
    sentence: str
    side: Side | None = None
    tensor: str | None = None

    @property
    def is_heat(self) -> bool:
        """Whether the chain is too hot, which a smaller step cures."""
        return self.kind in HEATING and self.side != "below"

    @classmethod
    def divergence(cls) -> "Finding":
        """Return the finding of energies or gradients that are not finite."""
        sentence = (
            "divergence: energies or gradients are infinite or NaN: use a smaller step (lr), and check that the "
            "burn-in ends at a finite energy"
        )
        return cls(FindingKind.DIVERGENCE, sentence)

    @classmethod
    def of_sentence(cls, sentence: str) -> "Finding":
        """Return a finding from its sentence alone, as stored by version 0.1.0."""
        kind = _kind(sentence.split(":")[0])
        side: Side | None = None
        if kind in (FindingKind.KINETIC, FindingKind.CONFIGURATIONAL):
            side = "below" if " is below " in sentence else "above"
        return cls(kind, sentence, side)


@dataclass(frozen=True)
class Temperatures:
    """Temperatures of a tensor, or of all tensors together; None without a measurement.

    Attributes:
        numel: number of elements.
        kinetic: kinetic temperature.
        kinetic_interval: its lower and upper bounds.
        configurational: configurational temperature.
        configurational_interval: its lower and upper bounds.
    """

    numel: int | None = None
    kinetic: float | None = None
    kinetic_interval: Interval | None = None
    configurational: float | None = None
    configurational_interval: Interval | None = None

    def measured(self, kind: TemperatureKind) -> tuple[float | None, Interval | None]:
        """Return a temperature and its interval."""
        if kind == "kinetic":
            return self.kinetic, self.kinetic_interval
        return self.configurational, self.configurational_interval


@dataclass(frozen=True)
class EnergySummary:
    """The mini-batch energies Ũ of the sampling stage in nats; None for too few.

    Attributes:
        mean: their mean.
        std: their standard deviation.
        expected: the range in which the mean of the earlier half should lie.
    """

    mean: float | None = None
    std: float | None = None
    expected: Interval | None = None


@dataclass(frozen=True)
class HealthReport:
    """The health of a chain.

    Attributes:
        step: the optimizer step of the report.
        verdict: "ok", "warning" or "unknown".
        findings: the problems found.
        temperature: τ, the temperature of the target; NaN if a file does not have it.
        tolerance: accepted relative deviation.
        tensors: temperatures by the name of the parameter tensor.
        total: temperatures of all tensors together, None without a measurement.
        gradient_noise_share: share of mini-batch noise in the variance of a step, by tensor.
        energy: mean, spread and expected range of the energies.
        observations: number of observed steps.
    """

    step: int | None = None
    verdict: Verdict = "unknown"
    findings: tuple[Finding, ...] = ()
    temperature: float = 1.0
    tolerance: float = 0.2
    tensors: Mapping[str, Temperatures] = field(default_factory=dict)
    total: Temperatures | None = None
    gradient_noise_share: Mapping[str, float] = field(default_factory=dict)
    energy: EnergySummary = field(default_factory=EnergySummary)
    observations: int = 0

    @property
    def warnings(self) -> list[str]:
        """The findings' sentences."""
        return [finding.sentence for finding in self.findings]

    def with_divergence(self) -> "HealthReport":
        """Return this report with divergence as its first finding."""
        divergence = Finding.divergence()
        others = tuple(finding for finding in self.findings if finding != divergence)
        return replace(self, verdict="warning", findings=(divergence, *others))

    def scalars(self) -> dict[str, float]:
        """Return the numbers for a logger: the totals, the largest deviations, the number of findings."""
        scalars = {"health/warnings": float(len(self.findings))}
        if self.total is not None and self.temperature > 0:
            for kind in ("kinetic", "configurational"):
                values = [value for entry in self.tensors.values() if (value := getattr(entry, kind)) is not None]
                if not values:
                    continue
                scalars[f"health/{kind}_temperature"] = getattr(self.total, kind)
                deviations = [abs(value / self.temperature - 1) for value in values]
                scalars[f"health/{kind}_temperature_max_deviation"] = max(deviations)
        if self.gradient_noise_share:
            scalars["health/gradient_noise_share_max"] = max(self.gradient_noise_share.values())
        return scalars

    def as_json(self) -> dict[str, Any]:
        """Return the contents of `health.json`: dictionaries, lists, strings and numbers."""
        return {
            "step": self.step,
            "verdict": self.verdict,
            "warnings": self.warnings,
            "findings": [
                {"kind": f.kind.value, "side": f.side, "tensor": f.tensor, "sentence": f.sentence}
                for f in self.findings
            ],
            "temperature": self.temperature,
            "tolerance": self.tolerance,
            "tensors": {name: _plain(entry) for name, entry in self.tensors.items()},
            "total": None if self.total is None else _plain(self.total),
            "gradient_noise_share": dict(self.gradient_noise_share),
            "energy": _plain(self.energy),
            "observations": self.observations,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "HealthReport":
        """Return the report from its JSON form, including that of version 0.1.0, which has only sentences.

        Missing entries, and values that are not finite numbers, count as not measured.

        Raises:
            ValueError: if an entry has the wrong form.
        """
        tensors, energy, total = (_dictionary(content, name) for name in ("tensors", "energy", "total"))
        shares = _dictionary(content, "gradient_noise_share")
        if not all(isinstance(values, dict) for values in tensors.values()):
            raise ValueError("its tensors should be dictionaries by name")
        verdict, temperature = content.get("verdict"), _number(content.get("temperature"))
        return cls(
            step=_integer(content.get("step")),
            verdict=next((known for known in VERDICTS if known == verdict), "unknown"),
            findings=tuple(_findings(content)),
            temperature=math.nan if temperature is None else temperature,
            tolerance=_number(content.get("tolerance")) or cls.tolerance,
            tensors={name: _temperatures(values) for name, values in tensors.items()},
            total=_temperatures(total) if total else None,
            gradient_noise_share={n: share for n, value in shares.items() if (share := _number(value)) is not None},
            energy=EnergySummary(
                _number(energy.get("mean")), _number(energy.get("std")), _interval(energy.get("expected"))
            ),
            observations=_integer(content.get("observations")) or 0,
        )


# -- reading and writing JSON -----------------------------------------------------------------------------------------


def _plain(entry: Temperatures | EnergySummary) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(entry).items()}


def _dictionary(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    if not isinstance(value, dict | None):
        raise ValueError(f"its {name} should be a dictionary")
    return value or {}


def _findings(content: Mapping[str, Any]) -> list[Finding]:
    sentences, entries = content.get("warnings", []), content.get("findings")
    if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        raise ValueError("its warnings should be a list of sentences")
    if entries is None:
        return [Finding.of_sentence(sentence) for sentence in sentences]
    if not isinstance(entries, list) or not all(isinstance(e, dict) and "sentence" in e for e in entries):
        raise ValueError("its findings should be a list of dictionaries, each with a sentence")
    return [_finding(entry) for entry in entries]


def _finding(entry: Mapping[str, Any]) -> Finding:
    given, tensor = entry.get("side"), entry.get("tensor")
    side: Side | None = "above" if given == "above" else "below" if given == "below" else None
    return Finding(_kind(entry.get("kind")), str(entry["sentence"]), side, None if tensor is None else str(tensor))


def _kind(name: Any) -> FindingKind:
    return next((kind for kind in FindingKind if kind.value == name), FindingKind.OTHER)


def _temperatures(values: Mapping[str, Any]) -> Temperatures:
    return Temperatures(
        _integer(values.get("numel")),
        _number(values.get("kinetic")),
        _interval(values.get("kinetic_interval")),
        _number(values.get("configurational")),
        _interval(values.get("configurational_interval")),
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _integer(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _interval(value: Any) -> Interval | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    low, high = map(_number, value)
    return None if low is None or high is None else (low, high)
