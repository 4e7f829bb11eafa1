"""R-hat and effective sample sizes of a run's samples across its chains."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_sgmcmc.diagnostics.draws import ChainGrid, chain_diagnostics, correlation_time, rhat_limit
from lightning_sgmcmc.posterior.export import choose_parameters, parameter_draws
from lightning_sgmcmc.report.html_page import Cell, paragraph, table
from lightning_sgmcmc.report.run_record import RunError, RunRecord

FALSE_ALARM_RATE = 0.01
"""Probability of a warning for chains of one law, per quantity."""
MOST_ELEMENTS = 100
"""Largest number of elements, evenly spaced, that are diagnosed per parameter."""


@dataclass
class _Quantity:
    name: str
    draws: np.ndarray
    """Shape (chain, draw, element)."""


class Chains:
    """Diagnostics across chains, and warnings about them."""

    def __init__(self, run: RunRecord, parameters: Sequence[str] | None) -> None:
        self.records = run.records
        self.attention: list[str] = []
        self._rows: list[list[Any]] = []
        if not self.records:
            return
        self._grid = ChainGrid.of_chains([record.chain for record in self.records])
        for quantity in self._quantities(run, parameters):
            self._diagnose(quantity)

    def _quantities(self, run: RunRecord, parameters: Sequence[str] | None) -> list[_Quantity]:
        grid, store = self._grid, run.store
        found = [_Quantity("energy", grid.arrange([r.energy for r in self.records])[..., None])]
        if store is None:
            if parameters is not None:
                raise RunError(f"{run.folder} holds no samples, so it has no parameters to diagnose")
            return found
        try:
            names = choose_parameters(store.shapes(0), parameters, max_elements=1)
        except ValueError as error:
            if parameters is not None:
                raise RunError(str(error)) from None
            names = []
            self.attention.append(f"Parameters are omitted: {error}.")
        try:
            drawn = parameter_draws(store, grid, names)
        except ValueError as error:
            drawn = {}
            self.attention.append(f"Parameters are omitted: {error}.")
        return found + [_Quantity(name, draws.reshape(*grid.positions.shape, -1)) for name, draws in drawn.items()]

    def _diagnose(self, quantity: _Quantity) -> None:
        count = quantity.draws.shape[-1]
        chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_ELEMENTS)).round().astype(int))
        each = [chain_diagnostics(quantity.draws[..., i]) for i in chosen]
        rhat = _worst(max, [d.rhat for d in each])
        bulk, tail = _worst(min, [d.ess_bulk for d in each]), _worst(min, [d.ess_tail for d in each])
        several = f" (the worst of {len(chosen)} elements)" if count > 1 else ""
        time = correlation_time(quantity.draws[..., chosen])
        limit = rhat_limit(len(self._grid.chains), self._grid.draws, FALSE_ALARM_RATE / len(chosen), time)
        suspect = math.isfinite(rhat) and rhat > limit
        row: list[Any] = [quantity.name + several, Cell(f"{rhat:.3f}", "bad") if suspect else _or_few(rhat, ".3f")]
        self._rows.append([*row, _or_few(bulk, ".0f"), _or_few(tail, ".0f")])
        if suspect and len(self._grid.chains) > 1:
            self.attention.append(
                f"The chains disagree on {quantity.name}: R-hat is {rhat:.2f}, but should be below {limit:.2f}. Run "
                "them longer, or treat their samples as separate modes."
            )

    def html(self) -> str:
        """Return the tables."""
        if not self.records:
            return ""
        per_chain = Counter(r.chain for r in self.records)
        several = len(per_chain) > 1
        parts = []
        if several:
            rows = [
                [str(c), n, *_mean_and_std([r.energy for r in self.records if r.chain == c])]
                for c, n in sorted(per_chain.items())
            ]
            header = ["chain", "samples", "mean energy (nats)", "standard deviation"]
            parts.append(table(header, rows, "Energies of each chain's samples"))
        header = ["quantity", "split R-hat", "bulk ESS", "tail ESS"]
        label = (
            f"{len(per_chain)} chains of {self._grid.draws} draws"
            if several
            else f"One chain of {self._grid.draws} draws"
        )
        parts.append(table(header, self._rows, label))
        notes = ["Rank-normalised, for the samples in the order of drawing, ignoring their weights."]
        if not several:
            notes.append(
                "With one chain, R-hat compares its halves: it detects a drift, but not that another chain would "
                "find another mode. Run several chains to detect that."
            )
        if self._grid.dropped:
            notes.append(f"The oldest {self._grid.dropped} samples of the longer chains are dropped.")
        notes.append("Energies are mini-batch estimates, whose noise hides small differences between chains.")
        return "".join([*parts, paragraph(" ".join(notes), "note")])


def _worst(pick: Callable[[list[float]], float], values: list[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return pick(finite) if finite else math.nan


def _or_few(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "not available"


def _mean_and_std(values: list[float]) -> tuple[float, float | None]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
