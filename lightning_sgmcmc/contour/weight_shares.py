"""How the weights of a run's samples are distributed, kept in a few numbers."""

import math
from typing import Any


class WeightShares:
    """Sums of importance weights and of their squares, in log space, for each chain whose weights have a constant."""

    def __init__(self) -> None:
        self._samples = 0
        self._sums: dict[int | None, tuple[float, float, float]] = {}
        """By chain: the largest log-weight, the log of the sum of weights, and of their squares."""

    def add(self, log_weight: float, chain: int | None = None) -> None:
        """Add a sample.

        Args:
            log_weight: its log importance weight.
            chain: its chain, if weights compare only within a chain.
        """
        self._samples += 1
        largest, total, squares = self._sums.get(chain, (-math.inf,) * 3)
        own = max(largest, log_weight), _log_add(total, log_weight), _log_add(squares, 2 * log_weight)
        self._sums[chain] = own

    @property
    def count(self) -> int:
        """Samples of each chain, or of all together if their weights compare."""
        return self._samples // max(1, len(self._sums))

    @property
    def largest(self) -> float | None:
        """The share of the largest weight, the mean over chains; None without samples."""
        return self._mean([_ratio(big, total) for big, total, _ in self._sums.values()])

    @property
    def efficiency(self) -> float | None:
        """(Σw)²/(S·Σw²), the mean over chains; None without samples."""
        return self._mean(
            [_ratio(2 * total, squares) / max(1, self.count) for _, total, squares in self._sums.values()]
        )

    def _mean(self, values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers."""
        return {"samples": self._samples, "sums": dict(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`; checkpoints of earlier versions have no squares, or one sum for all chains."""
        self._samples = state["samples"]
        sums: dict[int | None, tuple[float, ...]]
        sums = state["sums"] if "sums" in state else {None: (state["largest"], state["total"])}
        self._sums = {chain: (one[0], one[1], one[2] if len(one) > 2 else 2 * one[0]) for chain, one in sums.items()}


def _log_add(one: float, other: float) -> float:
    high, low = max(one, other), min(one, other)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def _ratio(log_one: float, log_other: float) -> float:
    return 0.0 if log_other == -math.inf else math.exp(min(log_one - log_other, 700.0))
