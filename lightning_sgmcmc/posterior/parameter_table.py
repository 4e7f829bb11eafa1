"""A table of the parameters' posterior: mean, standard deviation, R-hat, effective number of draws."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.chains.sample import comparable_log_weights
from lightning_sgmcmc.checks import check_choice
from lightning_sgmcmc.diagnostics.chains import ChainGrid, chain_diagnostics
from lightning_sgmcmc.diagnostics.samples import normalised_weights
from lightning_sgmcmc.evaluation.html_table import html_table
from lightning_sgmcmc.posterior.export import choose_parameters
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.tensors import widest

WATCHED = 8
"""Elements of a tensor whose R-hat and effective numbers of draws are computed, evenly spaced."""
COLUMNS = ("parameter", "shape", "mean", "sd", "R-hat", "ESS")


class ParameterRow(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the parameter, an element of it, or a layer.
        shape: of the parameter; the number of its elements for a layer.
        mean: the posterior mean, averaged over the elements.
        sd: the posterior standard deviation, its root mean square over the elements.
        rhat: the largest split R-hat of up to `WATCHED` elements of a tensor; NaN for fewer than 4 draws of a chain.
        ess: their smallest bulk effective number of draws, likewise.
    """

    name: str
    shape: tuple[int, ...]
    mean: float
    sd: float
    rhat: float
    ess: float


class ParameterTable:
    """Rows as text and, in a notebook, as HTML.

    Args:
        caption: the line above.
        rows: the rows.
    """

    def __init__(self, caption: str, rows: Sequence[ParameterRow]) -> None:
        self.caption = caption
        self.rows = list(rows)

    def __iter__(self) -> Any:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        cells = [COLUMNS, *map(_cells, self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
        lines = ["  ".join(_aligned(i, cell, widths[i]) for i, cell in enumerate(row)).rstrip() for row in cells]
        return "\n".join([self.caption, *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self.caption, COLUMNS, [_cells(row) for row in self.rows])


def _cells(row: ParameterRow) -> tuple[str, ...]:
    shape = "×".join(map(str, row.shape)) or "-"
    ess = "-" if math.isnan(row.ess) else f"{row.ess:.0f}"
    return (row.name, shape, _text(row.mean), _text(row.sd), "-" if math.isnan(row.rhat) else f"{row.rhat:.3f}", ess)


def _text(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _aligned(column: int, cell: str, width: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)


def parameter_table(
    store: SampleStore,
    patterns: Sequence[str] | None,
    by: Literal["parameter", "element", "layer"],
    caption: str,
) -> ParameterTable:
    """Return the table; see `Posterior.summary`. Samples are read one at a time.

    Raises:
        ValueError: if there are no samples, another `by`, or a pattern that matches no parameter.
    """
    check_choice("by", by, ("parameter", "element", "layer"))
    if len(store) == 0:
        raise ValueError("the posterior has no samples to summarise")
    shapes = store.shapes(0)
    names = list(shapes) if patterns is None else choose_parameters(shapes, patterns)
    log_weights = comparable_log_weights(store.records)
    weights = normalised_weights(log_weights)
    grid = ChainGrid.of_chains([record.chain for record in store.records])
    watched = {name: _watched(math.prod(shapes[name]), by) for name in names}
    mean, square, kept = _moments(store, names, weights, watched)
    energies = torch.tensor([record.energy for record in store.records], dtype=torch.float64)
    rows = [_row("energy", (), *_weighted(energies, weights), energies[:, None].numpy(), grid)]
    for group, members in _groups(names, by).items():
        sizes = sum(math.prod(shapes[name]) for name in members)
        drawn = np.concatenate([kept[name] for name in members], 1)
        if by == "element":
            name = members[0]
            flat, spread = mean[name].reshape(-1), square[name].reshape(-1)
            rows += [
                _row(_element(name, shapes[name], i), (), float(flat[i]), float(spread[i]) ** 0.5, drawn[:, [j]], grid)
                for j, i in enumerate(watched[name])
            ]
            continue
        average = sum(float(mean[name].sum()) for name in members) / max(sizes, 1)
        spread_of = math.sqrt(sum(float(square[name].sum()) for name in members) / max(sizes, 1))
        shape = (sizes,) if by == "layer" else shapes[members[0]]
        rows.append(_row(group, shape, average, spread_of, drawn, grid))
    unequal = bool((log_weights != log_weights[0]).any())
    note = "; mean and sd are weighted, R-hat and ESS are not" if unequal else ""
    return ParameterTable(caption + note, rows)


def _watched(size: int, by: str) -> list[int]:
    """Return the elements that are watched: all of them for a table by element."""
    if by == "element" or size <= WATCHED:
        return list(range(size))
    return [i * size // WATCHED for i in range(WATCHED)]


def _moments(
    store: SampleStore, names: Sequence[str], weights: Tensor, watched: dict[str, list[int]]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, np.ndarray]]:
    """Return the weighted mean and variance of each parameter, and each sample's watched elements, in float64."""
    mean: dict[str, Tensor] = {}
    variance: dict[str, Tensor] = {}
    kept: dict[str, list[Tensor]] = {name: [] for name in names}
    total = 0.0
    for index, weight in enumerate(weights.tolist()):
        drawn = store.parameters(index, names)
        total += weight
        for name in names:
            value = widest(drawn[name])
            kept[name].append(value.reshape(-1)[watched[name]])
            if name not in mean:
                mean[name], variance[name] = torch.zeros_like(value), torch.zeros_like(value)
            if weight > 0:
                difference = value - mean[name]
                mean[name] += weight / total * difference
                variance[name] += weight * difference * (value - mean[name])
    return mean, variance, {name: torch.stack(values).numpy() for name, values in kept.items()}


def _weighted(values: Tensor, weights: Tensor) -> tuple[float, float]:
    mean = float(weights @ values)
    return mean, math.sqrt(float(weights @ (values - mean).square()))


def _row(name: str, shape: tuple[int, ...], mean: float, sd: float, drawn: np.ndarray, grid: ChainGrid) -> ParameterRow:
    found = [chain_diagnostics(grid.arrange(drawn[:, i])) for i in range(drawn.shape[1])] if grid.draws >= 4 else []
    rhats = [one.rhat for one in found if not math.isnan(one.rhat)]
    sizes = [one.ess_bulk for one in found if not math.isnan(one.ess_bulk)]
    return ParameterRow(name, shape, mean, sd, max(rhats, default=math.nan), min(sizes, default=math.nan))


def _groups(names: Sequence[str], by: str) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0] or name if by == "layer" else name, []).append(name)
    return groups


def _element(name: str, shape: tuple[int, ...], index: int) -> str:
    place = np.unravel_index(index, shape) if shape else ()
    return f"{name}[{', '.join(str(int(i)) for i in place)}]" if shape else name
