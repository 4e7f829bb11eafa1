"""The history of a run as plain numbers, for figures and `history.json`, in bounded memory."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.geometry import weight_sketch
from lightning_sgmcmc.diagnostics.samples import normalised_weights, within_groups

PRIOR_NORM = "‖θ‖²/(d·σ²)"
"""The name of a trace: the square of the parameters in units of their prior's variance, a mean over them."""
NLL = "NLL (nats per datum)"
"""The name of a trace: the mini-batch's mean negative log likelihood, without the prior."""
CYCLE = "cycle"
"""The name of a trace: the number of the cycle, from 0."""
SCALARS = ("sampler/lr", "sampler/temperature", "sampler/energy")


class RunHistory:
    """The scalars of the logged steps, the samples, and sketches of their weights.

    Args:
        max_points: largest number of logged steps, and of samples, to keep; a longer run is thinned by halving.
        max_sketches: largest number of samples whose weights are kept, as sketches (see `weight_sketch`).
        sketch_dimension: numbers in a sketch.
    """

    def __init__(self, max_points: int = 20_000, max_sketches: int = 200, sketch_dimension: int = 1024) -> None:
        self.trace_names: list[str] = []
        """Names of quantities traced in addition to the scalars, such as single weights."""
        self.warm_steps = 0
        """Steps of the run's warm start."""
        self.scalars = ThinnedSeries(max_points)
        self.samples = ThinnedSeries(max_points)
        self.sketches = ThinnedSeries(max(2, max_sketches))
        self._sketching = max_sketches > 0
        self._sketch_dimension = sketch_dimension
        self._first_weight: float | None = None
        self._weights_differ = False
        self._log_sums: dict[int | None, tuple[float, float]] = {}
        """log Σw and log Σw², by chain if weights compare only within chains."""

    def trace(self, names: Sequence[str]) -> None:
        """Set the names of the traced quantities; those that earlier rows have not are NaN there."""
        self.trace_names = list(names)
        length = 1 + len(SCALARS) + len(names)
        self.scalars.rows = [(*row, *[math.nan] * (length - len(row))) for row in self.scalars.rows]

    def add_scalars(self, step: int, values: Sequence[float], traces: Sequence[float] = ()) -> None:
        """Add the scalars of a step, in the order of `SCALARS`, and the traced quantities."""
        self.scalars.append((step, *values, *traces))

    def add_sample(self, sample: Any, parameters: Mapping[str, Tensor] | None = None) -> None:
        """Add a sample.

        Args:
            sample: an object with step, cycle, chain, energy, log_weight and comparable.
            parameters: its weights, to be sketched; None keeps no sketch.
        """
        self._first_weight = sample.log_weight if self._first_weight is None else self._first_weight
        self._weights_differ |= sample.log_weight != self._first_weight or not sample.comparable
        group = None if sample.comparable else sample.chain
        total, square = self._log_sums.get(group, (-math.inf, -math.inf))
        self._log_sums[group] = (
            float(np.logaddexp(total, sample.log_weight)),
            float(np.logaddexp(square, 2 * sample.log_weight)),
        )
        weight = (sample.log_weight, self.effective_weights, float(sample.comparable))
        self.samples.append((sample.step, sample.cycle, sample.chain, sample.energy, *weight))
        if parameters is None or not self._sketching:
            return
        is_kept = self.sketches.takes_next
        row = weight_sketch(parameters, self._sketch_dimension).tolist() if is_kept else ()
        self.sketches.append((sample.cycle, sample.chain, *row))

    @property
    def takes_sketch(self) -> bool:
        """Whether the weights of the next sample are sketched."""
        return self._sketching and self.sketches.takes_next

    @property
    def has_weights(self) -> bool:
        """Whether the samples' weights differ, or compare within chains only."""
        return self._weights_differ

    @property
    def weight_efficiency(self) -> float:
        """(Σw)²/(S·Σw²) of all samples so far, 0 while all weights are 0."""
        return self.effective_weights / self.samples.seen if self.samples.seen else 0.0

    @property
    def effective_weights(self) -> float:
        """Kish's number (Σw)²/Σw² of all samples so far, 0 while all weights are 0."""
        sizes = [math.exp(2 * total - square) for total, square in self._log_sums.values() if total > -math.inf]
        return len(sizes) ** 2 / sum(1 / size for size in sizes) if sizes else 0.0

    @property
    def weights(self) -> list[float]:
        """The normalised weights of the samples kept; empty while all weights are 0."""
        log_weights = torch.tensor(self.samples.column(4), dtype=torch.float64)
        if not bool((log_weights > -torch.inf).any()):
            return []
        if not all(self.samples.column(6)):
            log_weights = within_groups(log_weights, torch.tensor(self.samples.column(2)))
        return normalised_weights(log_weights).tolist()

    def scalar(self, name: str) -> list[float]:
        """Return the kept values of one of `SCALARS` or of the traced quantities."""
        return self.scalars.column(1 + [*SCALARS, *self.trace_names].index(name))

    @property
    def cycles(self) -> list[tuple[float, float]]:
        """First and last logged step of each cycle; empty if they are not known."""
        if CYCLE not in self.trace_names:
            return []
        return cycle_spans(self.scalars.column(0), self.scalar(CYCLE))

    def last_temperature(self, otherwise: float) -> float:
        """Return the last temperature above 0, another number if there was none."""
        return next((value for value in reversed(self.scalar("sampler/temperature")) if value > 0), otherwise)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for `history.json`; a number that is not finite is None."""
        return {
            "steps": [int(step) for step in self.scalars.column(0)],
            "warm_steps": self.warm_steps,
            "scalars": {name: _finite(self.scalar(name)) for name in SCALARS},
            "traces": {name: _finite(self.scalar(name)) for name in self.trace_names},
            "samples": [
                dict(zip(("step", "cycle", "chain"), map(int, row[:3]), strict=True))
                | dict(zip(("energy", "log_weight"), _finite(row[3:5]), strict=True))
                | ({} if row[6] else {"comparable": False})
                for row in self.samples.rows
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, names and tensors."""
        return {
            "trace_names": list(self.trace_names),
            "scalars": self.scalars.state_dict(),
            "samples": self.samples.state_dict(),
            "sketches": self.sketches.state_dict(),
            "log_sums": dict(self._log_sums),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.trace_names = list(state["trace_names"])
        self.scalars.load_state_dict(state["scalars"])
        self.samples.load_state_dict(state["samples"])
        self.sketches.load_state_dict(state["sketches"])
        if "log_sums" in state:
            self._log_sums = dict(state["log_sums"])
        else:
            self._log_sums = {None: (state["log_weight_sum"], state["log_square_sum"])}  # an early checkpoint's
            self.samples.rows = [(*row, 1.0) for row in self.samples.rows]
        self._first_weight = self.samples.rows[0][4] if self.samples.rows else None
        self._weights_differ = any(row[4] != self._first_weight or not row[6] for row in self.samples.rows)


def cycle_spans(steps: Sequence[float], cycles: Sequence[float]) -> list[tuple[float, float]]:
    """Return first and last step of each run of equal cycle numbers; those that are NaN are left out.

    Args:
        steps: the steps, in order.
        cycles: number of the cycle at each step.

    >>> cycle_spans([1, 5, 9, 13], [0, 0, 1, 1])
    [(1, 5), (9, 13)]
    """
    spans: list[tuple[float, float]] = []
    last = math.nan
    for step, cycle in zip(steps, cycles, strict=True):
        if cycle == last:
            spans[-1] = (spans[-1][0], step)
        elif math.isfinite(cycle):
            spans.append((step, step))
        last = cycle
    return spans


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


class ThinnedSeries:
    """Keeps evenly spaced rows of numbers: above the limit, every second row is dropped, and the spacing doubles.

    Args:
        limit: largest number of rows, at least 2.

    Attributes:
        rows: the rows kept, in order.
        seen: how many rows were offered.
        stride: every stride-th row offered is kept, beginning with the first.
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
        """Restore from `state_dict()`."""
        self.rows = [tuple(row) for row in state["rows"].tolist()]
        self.seen, self.stride = state["seen"], state["stride"]
