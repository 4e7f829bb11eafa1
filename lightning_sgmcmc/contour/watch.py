"""Warnings of a contour run that does nothing, or whose weights are useless, each with a remedy."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_sgmcmc.contour.learned import LearnedContour
from lightning_sgmcmc.contour.weight_shares import WeightShares
from lightning_sgmcmc.diagnostics.contour_use import DOMINANT_WEIGHT, FEW_SAMPLES

FIRST_CHECK = 500
"""Updates before the first check; each later one comes after twice as many, since a check waits for the device."""
END_BIN_SHARE = 0.99
"""Share of the energies in an end bin above which the partition is called wrong."""
STEEP = 30.0
"""ζ·|log π(J) - log π(J-1)| above which weights within one bin differ by more than e^30."""


class ContourWatch:
    """Checks the visited bins and the samples' weights, and warns once of each fault.

    Args:
        warn: called with each warning, a sentence.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._emit = warn
        self._next = FIRST_CHECK
        self._seen: Tensor | None = None
        self._given: set[str] = set()
        self.shares = WeightShares()

    def after_update(self, learned: LearnedContour, updates: int) -> None:
        """Check the bins if a check is due."""
        if updates == self._next:
            self._next *= 2
            self._check_bins(learned)

    def finish(self, learned: LearnedContour, updates: int) -> None:
        """Check the bins at the end of the run."""
        if updates >= FIRST_CHECK:
            self._check_bins(learned)

    def _check_bins(self, learned: LearnedContour) -> None:
        visits = learned.state.visits.cpu()
        new = visits if self._seen is None else visits - self._seen
        total = float(new.sum())
        self._seen = visits.clone()
        if total < FIRST_CHECK:
            return
        partition = learned.partition
        if float(new[..., 0].sum()) > END_BIN_SHARE * total:
            self._warn(
                "first",
                f"nearly all energies of the last {total:.0f} steps lie below first_edge={partition.first_edge:.6g}, "
                "in the first bin, where the contour does nothing: lower first_edge, or learn the range from a longer "
                "warm-up.",
            )
        if float(new[..., -1].sum()) > END_BIN_SHARE * total:
            self._warn(
                "last",
                f"nearly all energies of the last {total:.0f} steps lie above the last edge "
                f"{partition.last_edge:.6g}: raise first_edge, num_bins or width, or learn the range from a longer "
                "warm-up.",
            )
        self._check_slopes(learned)

    def _check_slopes(self, learned: LearnedContour) -> None:
        rules = learned.rules
        log_vector, visits = learned.state.log_vector, learned.state.visits
        if rules.weighting == "bin" or rules.weight_exponent == 0:
            return
        both = (visits[..., 1:] > 0) & (visits[..., :-1] > 0)
        rise = rules.weight_exponent * rules.zeta * log_vector.diff(dim=-1).abs().masked_fill(~both, 0.0)
        steepest = float(rise.max())
        if steepest > STEEP:
            self._warn(
                "steep",
                f"log-weights change by up to {steepest:.3g} within one energy bin, so interpolated weights are "
                "useless: take narrower bins or a smaller zeta; if that is impossible, weighting='bin' and a small "
                "weight_exponent.",
            )

    def after_sample(self, log_weight: float, chain: int | None = None) -> None:
        """Record a sample's log-weight, and check the share of the largest weight, averaged over chains.

        Args:
            log_weight: its log importance weight.
            chain: its chain, if weights compare only within a chain.
        """
        shares = self.shares
        shares.add(log_weight, chain)
        share = shares.largest or 0.0
        if shares.count >= FEW_SAMPLES and share > DOMINANT_WEIGHT:
            whose = "the weight" if chain is None else "its chain's weight"
            self._warn(
                "weight",
                f"one of {shares.count} samples has {100 * share:.0f} % of {whose}, so the average is "
                "that sample: temper the weights by weight_exponent < 1, take a smaller zeta or a lower temperature, "
                "or draw more samples.",
            )

    def _warn(self, key: str, sentence: str) -> None:
        if key not in self._given:
            self._given.add(key)
            self._emit(f"ContourGradient: {sentence}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, names and a tensor."""
        return {
            "next": self._next,
            "seen": self._seen,
            "given": sorted(self._given),
            **self.shares.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._next, self._seen, self._given = state["next"], state["seen"], set(state["given"])
        self.shares.load_state_dict(state)
