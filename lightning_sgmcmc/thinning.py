"""A series of rows that stays short however long the run is."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class ThinnedSeries:
    """Keeps evenly spaced rows of numbers: where there are too many, every second one goes, and the spacing doubles.

    Args:
        limit: at most so many rows are kept, at least 2.

    Attributes:
        rows: the rows kept, in order.
        seen: how many rows were offered.
        stride: every so many of the rows offered are kept, the first one included.
    """

    def __init__(self, limit: int) -> None:
        if limit < 2:
            raise ValueError(f"limit must be at least 2, got {limit}")
        self.limit = limit
        self.rows: list[tuple[float, ...]] = []
        self.seen = 0
        self.stride = 1

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def takes_next(self) -> bool:
        """Whether the next row offered will be kept."""
        return self.seen % self.stride == 0

    def append(self, row: Sequence[float]) -> None:
        """Offer a row, of the same length as the others."""
        if self.takes_next:
            if len(self.rows) == self.limit:
                self.rows = self.rows[::2]
                self.stride *= 2
            if self.takes_next:
                self.rows.append(tuple(row))
        self.seen += 1

    def column(self, index: int) -> list[float]:
        """Return one number of every row."""
        return [row[index] for row in self.rows]

    def tensor(self) -> Tensor:
        """Return the rows, shape (rows, numbers), float64."""
        return torch.tensor(self.rows, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and a tensor."""
        return {"rows": self.tensor(), "seen": self.seen, "stride": self.stride}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.rows = [tuple(row) for row in state["rows"].tolist()]
        self.seen, self.stride = state["seen"], state["stride"]
