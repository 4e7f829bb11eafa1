"""Samples for people and other libraries: words, ArviZ, a table of parameters, pictures."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.chains.samples import SampleRecord, comparable_log_weights
from lightning_sgmcmc.checks import check_choice
from lightning_sgmcmc.diagnostics.draws import (
    ChainGrid,
    chain_diagnostics,
    import_arviz,
    normalised_weights,
    weight_efficiency,
)
from lightning_sgmcmc.diagnostics.scores import classification_metrics, reliability
from lightning_sgmcmc.evaluation.comparison import html_table
from lightning_sgmcmc.figures.evaluation import maps_figure, predictions_figure, reliability_figure
from lightning_sgmcmc.figures.run import sample_energy_figure, sample_trace_figure
from lightning_sgmcmc.posterior.manifest import MANIFEST
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.predictions import ClassPrediction, Prediction, RegressionPrediction
from lightning_sgmcmc.tables import as_tensor, is_frame
from lightning_sgmcmc.tables.arrays import check_same_rows
from lightning_sgmcmc.tensors import widest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SHOWN = 10
"""Samples in a notebook's table."""


def summary(records: Sequence[SampleRecord]) -> str:
    """Return the number of samples, of their chains, and their steps."""
    if not records:
        return "no samples"
    chains, steps = len({r.chain for r in records}), [r.step for r in records]
    of = f"of {chains} chains, " if chains > 1 else ""
    return f"{len(records)} sample{'s' if len(records) > 1 else ''} {of}from step {min(steps)} to {max(steps)}"


def samples_in(path: Path) -> Path:
    """Return a store's folder: the path itself, or `samples` in a run's folder."""
    inner = path / "samples"
    return inner if not (path / MANIFEST).exists() and (inner / MANIFEST).exists() else path


# -- export ------------------------------------------------------------------------------------------------------------


SEEN = 20
"""Draws of a chain by which parameters that do not move are found."""
SMALL = 10
"""Default size limit of exported parameters, if no names are given."""


def to_inference_data(
    store: SampleStore,
    parameters: Sequence[str] | None = None,
    predictions: Mapping[str, Tensor] | None = None,
    max_elements: int = SMALL,
    log_likelihood: Tensor | None = None,
) -> Any:
    """Return the samples as ArviZ's container; see `Posterior.to_arviz`."""
    arviz = import_arviz()
    if len(store) == 0:
        raise ValueError("the store has no posterior samples to export")
    records = store.records
    warn_of_temperature(records, log_likelihood is not None)
    grid = grid_of_draws(store)
    stats: dict[str, Any] = {
        "energy": [r.energy for r in records],
        "lp": [-r.energy for r in records],
        "step": [r.step for r in records],
        "cycle": [r.cycle for r in records],
        "log_weight": comparable_log_weights(records).tolist(),
    }
    chosen = choose_parameters(store.shapes(0), parameters, max_elements)
    densities = {} if log_likelihood is None else {"y": log_likelihood}
    groups = {
        "posterior": parameter_draws(store, grid, chosen),
        "sample_stats": {name: grid.arrange(values) for name, values in stats.items()},
        "posterior_predictive": _of_samples("predictions", predictions or {}, grid, len(store)),
        "log_likelihood": _of_samples("log_likelihood", densities, grid, len(store)),
    }
    groups = {name: group for name, group in groups.items() if group}
    made_by = {"inference_library": "lightning-sgmcmc", "inference_library_version": version("lightning-sgmcmc")}
    coords = {"chain": grid.chains}
    if arviz.__version__.startswith("0."):
        return arviz.from_dict(**groups, coords=coords, attrs=made_by)
    return arviz.from_dict(groups, coords=coords, attrs={"/": made_by})


def warn_of_temperature(records: Sequence[SampleRecord], for_scores: bool) -> None:
    """Warn of samples that are not of the posterior, which ArviZ takes all draws for."""
    others = [record.temperature for record in records if record.temperature != 1]
    if not others:
        return
    values = ", ".join(f"{temperature:g}" for temperature in sorted(set(others))[:4])
    wrong = "intervals are too narrow at a temperature below 1 and too wide above"
    remedy = "sample with temperature=1"
    if for_scores:
        wrong = "loo and waic of log_likelihood are wrong, too good at a temperature below 1"
        remedy = f"use posterior.evaluate(val) of validation data, or {remedy}"
    warnings.warn(
        f"{len(others)} of the {len(records)} samples are not of the posterior, which has temperature 1, but of "
        f"temperature {values}, so ArviZ's {wrong}: {remedy}",
        stacklevel=4,
    )


def grid_of_draws(store: SampleStore) -> ChainGrid:
    """Return the places of samples in an array (chain, draw) in which all count alike; those of `resample` are one
    chain. Weights, and samples without a place, are a warning."""
    records = store.records
    if store.is_resampled:
        # `resample`'s: how often a chain occurs is its weight, which equal numbers of draws would undo
        grid = ChainGrid([0], np.arange(len(records))[None], 0)
    else:
        grid = ChainGrid.of_chains([record.chain for record in records])
    if (efficiency := weight_efficiency(comparable_log_weights(records))) < 1 - 1e-6:
        warnings.warn(
            f"these {len(records)} samples have weights (effective sample size {len(records) * efficiency:.3g}), but "
            f"all draws count alike here: use posterior.resample({max(1000, len(records))})",
            stacklevel=3,
        )
    if grid.dropped:
        warnings.warn(
            f"the chains have unequal numbers of draws, so {grid.dropped} of the {len(records)} samples, the oldest of "
            f"the longer chains, are dropped: {grid.draws} of each chain remain",
            stacklevel=3,
        )
    return grid


def choose_parameters(
    shapes: Mapping[str, tuple[int, ...]], patterns: Sequence[str] | None, max_elements: int = SMALL
) -> list[str]:
    """Return the names that match a pattern, or without patterns those of small parameters, in the network's order."""
    if patterns is None:
        return [name for name, shape in shapes.items() if math.prod(shape) <= max_elements]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in shapes):
            raise ValueError(f"no parameter matches {pattern!r}: choose from {', '.join(shapes)}")
    return [name for name in shapes if any(fnmatchcase(name, pattern) for pattern in patterns)]


def parameter_draws(store: SampleStore, grid: ChainGrid, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the named parameters of all samples, each of shape (chain, draw, …)."""
    if not names:
        return {}
    drawn = [store.parameters(position, names) for position in grid.positions.ravel()]
    leading = grid.positions.shape
    return {name: np.stack([d[name].numpy() for d in drawn]).reshape(*leading, *drawn[0][name].shape) for name in names}


def unmoved(store: SampleStore) -> list[str]:
    """Return the parameters that are the same in some twenty draws of each chain."""
    grid = ChainGrid.of_chains([record.chain for record in store.records])
    kept = np.unique(np.linspace(0, grid.draws - 1, min(grid.draws, SEEN)).round().astype(int))
    drawn = parameter_draws(store, ChainGrid(grid.chains, grid.positions[:, kept], 0), list(store.shapes(0)))
    return [name for name, own in drawn.items() if own.size and (own == own[:, :1]).all() and len(kept) > 1]


def _of_samples(argument: str, given: Mapping[str, Tensor], grid: ChainGrid, count: int) -> dict[str, np.ndarray]:
    for name, values in given.items():
        if values.dim() == 0 or len(values) != count:
            raise ValueError(
                f"{argument}[{name!r}] has shape {tuple(values.shape)}, but its first axis should be the {count} "
                "samples: pass those of posterior.predict(x, return_samples=True), or posterior.log_likelihood(data)"
            )
    plain = {name: values.detach().cpu() for name, values in given.items()}
    return {name: grid.arrange(v.float() if v.dtype == torch.bfloat16 else v) for name, v in plain.items()}


# -- parameter table ---------------------------------------------------------------------------------------------------


WATCHED = 8
"""Elements of a tensor whose R-hat and effective numbers of draws are computed, evenly spaced."""
COLUMNS = ("parameter", "shape", "mean", "sd", "R-hat", "ESS")


class ParameterRow(NamedTuple):
    """A row of the table: a parameter's shape, or a layer's number of elements; the mean and the root mean square sd of
    the elements; the largest split R-hat and smallest bulk ESS of up to `WATCHED` of them, NaN below 4 draws."""

    name: str
    shape: tuple[int, ...]
    mean: float
    sd: float
    rhat: float
    ess: float


@dataclass(repr=False, eq=False)
class ParameterTable:
    """Rows below a caption, as text and, in a notebook, as HTML."""

    caption: str
    rows: list[ParameterRow]

    def __iter__(self) -> Any:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        cells = [COLUMNS, *map(_cells, self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
        lines = [
            "  ".join((cell.ljust if i < 2 else cell.rjust)(widths[i]) for i, cell in enumerate(row)) for row in cells
        ]
        return "\n".join([self.caption, *(line.rstrip() for line in lines)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self.caption, COLUMNS, [_cells(row) for row in self.rows])


def _cells(row: ParameterRow) -> tuple[str, ...]:
    digits = 4  # of a mean, or more: a hundredth of its standard deviation shows
    if row.sd > 0 and abs(row.mean) > row.sd:
        digits = max(digits, min(math.ceil(math.log10(abs(row.mean) / row.sd)) + 2, 15))
    numbers = ((row.mean, f".{digits}g"), (row.sd, ".4g"), (row.rhat, ".3f"), (row.ess, ".0f"))
    shape = "×".join(map(str, row.shape)) or "-"
    return (row.name, shape, *("-" if math.isnan(value) else format(value, style) for value, style in numbers))


def parameter_table(
    store: SampleStore, patterns: Sequence[str] | None, by: Literal["parameter", "element", "layer"], caption: str
) -> ParameterTable:
    """Return the table; see `Posterior.summary`. Samples are read one at a time."""
    check_choice("by", by, ("parameter", "element", "layer"))
    if len(store) == 0:
        raise ValueError("the posterior has no samples to summarise")
    shapes = store.shapes(0)
    names = list(shapes) if patterns is None else choose_parameters(shapes, patterns)
    log_weights = comparable_log_weights(store.records)
    weights = normalised_weights(log_weights)
    grid = ChainGrid.of_chains([record.chain for record in store.records])
    watched = {name: _watched(math.prod(shapes[name]), by) for name in names}
    mean, variance, kept = _moments(store, names, weights, watched)
    energies = torch.tensor([record.energy for record in store.records], dtype=torch.float64)
    centre = float(weights @ energies)
    deviation = math.sqrt(float(weights @ (energies - centre).square()))
    rows = [_row("energy", (), centre, deviation, energies[:, None].numpy(), grid)]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0] or name if by == "layer" else name, []).append(name)
    for group, members in groups.items():
        drawn = np.concatenate([kept[name] for name in members], 1)
        if by == "element":
            flat, spread = mean[group].reshape(-1), variance[group].reshape(-1)
            for place, i in enumerate(watched[group]):
                name = element(group, shapes[group], i)
                rows.append(_row(name, (), float(flat[i]), float(spread[i]) ** 0.5, drawn[:, [place]], grid))
            continue
        size = sum(math.prod(shapes[name]) for name in members)
        average = sum(float(mean[name].sum()) for name in members) / max(size, 1)
        deviation = math.sqrt(sum(float(variance[name].sum()) for name in members) / max(size, 1))
        shape = (size,) if by == "layer" else shapes[members[0]]
        rows.append(_row(group, shape, average, deviation, drawn, grid))
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


def _row(name: str, shape: tuple[int, ...], mean: float, sd: float, drawn: np.ndarray, grid: ChainGrid) -> ParameterRow:
    found = [chain_diagnostics(grid.arrange(drawn[:, i])) for i in range(drawn.shape[1])] if grid.draws >= 4 else []
    rhats = [one.rhat for one in found if not math.isnan(one.rhat)]
    sizes = [one.ess_bulk for one in found if not math.isnan(one.ess_bulk)]
    return ParameterRow(name, shape, mean, sd, max(rhats, default=math.nan), min(sizes, default=math.nan))


def element(name: str, shape: tuple[int, ...], index: int) -> str:
    """Return the name of a number of a parameter."""
    return f"{name}[{', '.join(str(int(i)) for i in np.unravel_index(index, shape))}]" if shape else name


# -- plots -------------------------------------------------------------------------------------------------------------


MOST_PANELS = 12

Chains = dict[int, tuple[list[int], list[float]]]


def plot_trace(store: SampleStore, patterns: Sequence[str] | None) -> "Figure":
    """Draw energies or parameters of the samples; see `Posterior.plot_trace`."""
    if len(store) == 0:
        raise ValueError("the posterior has no samples to draw")
    if patterns is None:
        return sample_energy_figure(_by_chain(store, [record.energy for record in store.records]))
    shapes = store.shapes(0)
    names = choose_parameters(shapes, patterns)
    count = sum(math.prod(shapes[name]) for name in names)
    if count > MOST_PANELS:
        raise ValueError(
            f"parameters={list(patterns)} are {count} numbers, and a figure has at most {MOST_PANELS} panels: choose "
            "fewer"
        )
    drawn = [store.parameters(i, names) for i in range(len(store))]
    traces = {}
    for name in names:
        values = torch.stack([widest(own[name]).reshape(-1) for own in drawn])
        for i in range(values.shape[1]):
            traces[name if values.shape[1] == 1 else f"{name}[{i}]"] = _by_chain(store, values[:, i].tolist())
    return sample_trace_figure(traces)


def plot_predictions(prediction: Prediction, x: Any, y: Any) -> "Figure":
    """Draw a predictive of one number; see `Posterior.plot_predictions`."""
    if not isinstance(prediction, RegressionPrediction):
        raise TypeError(
            f"plot_predictions draws predictions of numbers, and these are a {type(prediction).__name__}: use "
            "plot_reliability(x, y) for classes"
        )
    if prediction.mean.shape[1:].numel() != 1:
        count = prediction.mean.shape[1:].numel()
        raise ValueError(
            f"plot_predictions draws predictions of one number, and each datum has {count}: use plot_map for fields"
        )
    check_same_rows(x, y)
    observed = None if y is None else as_tensor("y", y).detach().cpu().reshape(-1).tolist()
    parts = _numbers(prediction.mean), _numbers(prediction.std), _numbers(prediction.epistemic_std)
    columns = x.shape[1] if is_frame(x) else as_tensor("x", x).reshape(len(prediction), -1).shape[1]
    if columns == 1:
        return predictions_figure(as_tensor("x", x).detach().cpu().reshape(-1).tolist(), *parts, observed, "x")
    if observed is None:
        raise ValueError(f"x has {columns} columns, so predictions are drawn against y: pass y=…")
    return predictions_figure(observed, *parts, None, "observed")


def plot_map(prediction: Prediction, y: Any, names: Sequence[str]) -> "Figure":
    """Draw the predictive of one field; see `Posterior.plot_map`."""
    if not isinstance(prediction, RegressionPrediction):
        raise TypeError(
            f"plot_map draws predictions of numbers, and these are a {type(prediction).__name__}: draw "
            "prediction.entropy and prediction.mutual_information, which are maps of pixels, (n, H, W)"
        )
    shape = tuple(prediction.mean.shape)
    if len(shape) not in (3, 4) or shape[0] != 1:
        raise ValueError(
            f"plot_map draws one field, (1, C, H, W) or (1, H, W), and the predictions have shape {shape}: pass "
            "x[i : i + 1]"
        )
    field = (-1, *shape[-2:])
    observed = None if y is None else as_tensor("y", y).detach().cpu()
    if observed is not None and observed.numel() != prediction.mean.numel():
        raise ValueError(f"y should have the shape of the predictions, {shape}, got {tuple(observed.shape)}")
    parts = (prediction.mean, prediction.std, prediction.epistemic_std)
    mean, std, epistemic = (part.detach().cpu().reshape(field).numpy() for part in parts)
    seen = None if observed is None else observed.reshape(field).numpy()
    return maps_figure(mean, std, epistemic, seen, names if len(names) == len(mean) else None)


def plot_reliability(prediction: Prediction, y: Any) -> "Figure":
    """Draw the reliability of class probabilities; see `Posterior.plot_reliability`."""
    if not isinstance(prediction, ClassPrediction):
        raise TypeError(
            f"plot_reliability draws predictions of classes, and these are a {type(prediction).__name__}: use "
            "plot_predictions(x, y) for numbers"
        )
    probabilities = prediction.probabilities.cpu()
    labels = as_tensor("y", y).long().reshape(-1).cpu()
    confidence, accuracy, count = reliability(probabilities, labels)
    ece = float(classification_metrics(probabilities, labels)["ece"])
    return reliability_figure(confidence.tolist(), accuracy.tolist(), count.tolist(), ece)


def _numbers(part: Tensor) -> list[float]:
    return [float(value) for value in part.detach().cpu().reshape(-1)]


def _by_chain(store: SampleStore, values: Sequence[float]) -> Chains:
    chains: Chains = {}
    for record, value in zip(store.records, values, strict=True):
        steps, own = chains.setdefault(record.chain, ([], []))
        steps.append(record.step)
        own.append(value)
    return chains
