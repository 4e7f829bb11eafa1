"""Settings of a contour sampler: how the target is flattened and how fast π is learned."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from lightning_sgmcmc.checks import check_choice, check_flag, check_number, check_positive, check_within

Scheme = Literal["scalable", "original", "high-order"]
Difference = Literal["backward", "forward"]
Weighting = Literal["interpolated", "bin"]


@dataclass(frozen=True)
class DecayingStepSize:
    """ω_k = min(maximum, numerator/(k^exponent + offset)), the step size of the stochastic approximation.

    Args:
        numerator: > 0.
        exponent: in (1/2, 1] for convergence, 0 for a constant step.
        offset: ≥ 0.
        maximum: upper limit, in (0, 1]; None is 1.

    Raises:
        ValueError: if an argument is out of range.
    """

    numerator: float = 1.0
    exponent: float = 0.6
    offset: float = 100.0
    maximum: float | None = None

    def __post_init__(self) -> None:
        check_positive("numerator", self.numerator)
        check_within("exponent", self.exponent, "[0, 1]")
        check_within("offset", self.offset, "[0, inf)")
        if self.maximum is not None:
            check_within("maximum", self.maximum, "(0, 1]")

    def at(self, step: int) -> float:
        """Return ω of step k = 1, 2, …"""
        largest = 1.0 if self.maximum is None else self.maximum
        return min(largest, self.numerator / (step**self.exponent + self.offset))


@dataclass(frozen=True)
class ContourRules:
    """How a contour sampler flattens the target, learns π and weighs samples; `Contour` has the formulas.

    Args:
        zeta: ζ ≥ 0, how much is flattened. "original" with 0.75 leaves mass^{1-ζ} in each bin, and a barrier of energy
            B becomes one of about (1-ζ)·B; "scalable" flattens for every ζ.
        scheme: how π is learned: "scalable" (for networks), "original" or "high-order".
        difference: "backward" or "forward" difference in the multiplier κ.
        weighting: "interpolated" weighs by Ψ(U)^ζ; "bin" weighs by π(J)^ζ, for bins that are wide relative to the
            temperature.
        correction: ρ ≥ 0 of the scheme "high-order".
        flat_last_bin: whether κ = 1 and Ψ is constant above the last edge, as eq. (6) has it in the first bin. False
            follows eq. (6) literally, but a negative multiplier in an unbounded bin drives the chain away.
        min_multiplier: lower limit of κ; None sets no limit.
        max_multiplier: upper limit of κ; None sets no limit.
        weight_exponent: α of tempered weights Ψ(U)^{αζ}, in [0, 1]; 1 is exact.
        floor: lower limit of π(i), in [0, 1/m); 0 sets no limit.

    Raises:
        ValueError: if an argument is out of range.
    """

    zeta: float = 0.75
    scheme: Scheme = "scalable"
    difference: Difference = "backward"
    weighting: Weighting = "interpolated"
    correction: float = 1.0
    flat_last_bin: bool = True
    min_multiplier: float | None = None
    max_multiplier: float | None = None
    weight_exponent: float = 1.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("zeta", self.zeta), ("correction", self.correction), ("floor", self.floor)):
            check_number(name, value)
        check_choice("scheme", self.scheme, get_args(Scheme))
        check_choice("difference", self.difference, get_args(Difference))
        check_choice("weighting", self.weighting, get_args(Weighting))
        if self.min_multiplier is not None:
            check_within("min_multiplier", self.min_multiplier, "(-inf, 1]")
        if self.max_multiplier is not None:
            check_within("max_multiplier", self.max_multiplier, "[1, inf)")
        check_within("weight_exponent", self.weight_exponent, "[0, 1]")
        check_flag("flat_last_bin", self.flat_last_bin)

    @property
    def regularisation(self) -> dict[str, float]:
        """The settings that make the weights inexact, by name; empty without any."""
        names = ("min_multiplier", "max_multiplier", "weight_exponent", "floor")
        defaults = {field.name: field.default for field in fields(self)}
        return {name: getattr(self, name) for name in names if getattr(self, name) != defaults[name]}
