"""What a contour did in a run, and the findings that follow: it did nothing, or one sample has all the weight."""

from dataclasses import dataclass

from lightning_sgmcmc.diagnostics.findings import Finding, FindingKind

FLAT = 0.05
"""Root mean square of κ - 1 below which a contour is said to do nothing: steps differ by less than 5 %."""
LEAST_STEPS = 500
"""Steps before a contour is judged."""
DOMINANT_WEIGHT = 0.9
"""Share of one sample in all weights above which the average is called useless."""
FEW_SAMPLES = 10
"""Samples before the weights are judged."""


@dataclass(frozen=True)
class ContourUse:
    """What a contour did.

    Attributes:
        spread: root mean square of κ - 1 over the run's energies, at the last π.
        steps: steps that it learned from, for each π.
        samples: weighted samples, for each constant of the weights.
        efficiency: (Σw)²/(S·Σw²) of the samples' weights, None without samples.
        largest_share: share of the largest weight, None without samples.
    """

    spread: float
    steps: int
    samples: int = 0
    efficiency: float | None = None
    largest_share: float | None = None

    @property
    def is_dominated(self) -> bool:
        """Whether one sample has nearly all the weight."""
        share = self.largest_share
        return self.samples >= FEW_SAMPLES and share is not None and share > DOMINANT_WEIGHT


def contour_findings(use: ContourUse | None) -> tuple[Finding, ...]:
    """Return the findings on a contour; none without one."""
    if use is None:
        return ()
    found = []
    if use.is_dominated:
        assert use.largest_share is not None
        sentence = (
            f"contour: one of {use.samples} samples has {100 * use.largest_share:.0f} % of the weight, so the average "
            "is that sample"
        )
        remedy = "take a smaller zeta (`auto=True` finds one), or a weight_exponent below 1"
        found.append(Finding(FindingKind.CONTOUR, sentence, "above", remedy=remedy))
    if use.steps >= LEAST_STEPS and use.spread < FLAT:
        worth = "" if use.efficiency is None else f", and the weights are worth {100 * use.efficiency:.0f} %"
        sentence = (
            f"contour: it does nothing: κ differs from 1 by {use.spread:.2g} (root mean square over {use.steps:,} "
            f"steps){worth}: the run is one without a contour"
        )
        remedy = (
            "remove it and run more chains; or, where barriers are to be crossed, less noise in the energies (larger "
            "batches, VarianceReducedEnergy) or fewer sampled weights"
        )
        found.append(Finding(FindingKind.CONTOUR, sentence, "below", remedy=remedy, severity="note"))
    return tuple(found)
