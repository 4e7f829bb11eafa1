"""D1: the switching diffusion's paths and stationary laws for five switching times (SGLDiff, Figures 1.1 and 1.2).

Two potentials a_i/2·(θ - b_i)² with a = (5, 15) and b = (5, -5/3), so that the target is N(0, 0.1); η goes from 10 to
0.001 by tens. Jump times and the pieces between them are exact. The paper's histograms are of one path of a length that
it does not give; ours are of independent chains at t = 3 (20,000 of them, `full` 200,000), since a path of length 20
switches some twice for η = 10, which shows no law. The paths share a seed, and so most of their noise. The paper gives
pictures and no numbers: beside the draws' moments stand the exact ones, from the equations of `stationary_moments`.

Measured (`python -m recipes switching_diffusion`, half a minute of one core): W₁ to N(0, 0.1), with its standard error
by a jackknife over 20 groups of chains, is 3.03 ± 0.013, 2.57 ± 0.012, 1.15 ± 0.008, 0.264 ± 0.003 and 0.039 ± 0.002
from η = 10 to 0.001: it falls at every step. All moments are within two standard errors of the exact ones. The laws
look as in the figure: for 10 and 1 those of the two pieces alone, for 0.1 one broad skew law between them, for 0.001
nearly the target, with a variance that is still 1.31 times too large (exact).
"""

from typing import TYPE_CHECKING

import torch

from lightning_sgmcmc.diagnostics.samples import wasserstein_distance
from lightning_sgmcmc.simulation.switching_diffusion import (
    Potentials,
    SwitchingPaths,
    stationary_moments,
    switching_ornstein_uhlenbeck,
)
from recipes.shared.results import Options, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SLOPES, CENTRES = (5.0, 15.0), (5.0, -5 / 3)
POTENTIALS = Potentials(SLOPES, CENTRES)
MEAN_SLOPE = 10.0
SWITCHING_TIMES = (10.0, 1.0, 0.1, 0.01, 0.001)
CHAINS = {"quick": 20_000, "full": 200_000}
SETTLED = 3.0
GROUPS = 20
PATH_LENGTH, PATH_POINTS = 20.0, 8001
COLOURS = ("black", "teal")


def stationary_draws(switching_time: float, chains: int, seed: int) -> torch.Tensor:
    """Return independent draws of μ^η: the index begins in its own law, and θ_0 = 0 is forgotten up to e^-15."""
    return switching_ornstein_uhlenbeck(POTENTIALS, switching_time, [SETTLED], chains, seed).places[0]


def target_quantiles(count: int) -> torch.Tensor:
    """Return the quantiles of N(0, 0.1) at (i - 1/2)/count."""
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.special.ndtri(levels) / MEAN_SLOPE**0.5


def distances(draws: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return W₁ to N(0, 0.1), and those without each of 20 groups of the draws, shape (GROUPS,).

    A distance of few draws is too large, so its error is not from distances of groups but of all others (jackknife).
    """
    parts = draws.view(GROUPS, -1)
    rest = [torch.cat([parts[:g], parts[g + 1 :]]).flatten() for g in range(GROUPS)]
    truth = target_quantiles(len(rest[0]))
    return wasserstein_distance(draws, target_quantiles(len(draws))), torch.tensor(
        [wasserstein_distance(one, truth) for one in rest], dtype=torch.float64
    )


def jackknife_error(without: torch.Tensor) -> float:
    """Return the standard error of an estimate from those without each group, shape (GROUPS,)."""
    return float(((len(without) - 1) * without.var(correction=0)).sqrt())


def run(options: Options) -> list[Row]:
    """Run the five diffusions and the one with the mean potential, draw the paper's figures, return the table."""
    torch.set_num_threads(1)
    chains = CHAINS[options.scale]
    rows, laws = [], {}
    for eta in SWITCHING_TIMES:
        draws = laws[eta] = stationary_draws(eta, chains, options.seed)
        mean, variance = stationary_moments(POTENTIALS, eta)
        distance, without = distances(draws)
        squares = (draws - draws.mean()).square()
        method = f"η={eta:g}"
        rows += [
            Row(method, "mean", float(draws.mean()), float(draws.std()) / chains**0.5),
            Row(method, "mean, exact", mean),
            Row(method, "variance", float(draws.var()), float(squares.std()) / chains**0.5),
            Row(method, "variance, exact", variance),
            Row(method, "W₁ to N(0, 0.1)", distance, jackknife_error(without)),
        ]
    times = torch.linspace(0, PATH_LENGTH, PATH_POINTS)
    paths = {eta: switching_ornstein_uhlenbeck(POTENTIALS, eta, times, 1, options.seed) for eta in SWITCHING_TIMES}
    mean_path = switching_ornstein_uhlenbeck(Potentials([MEAN_SLOPE], [0.0]), 1.0, times, 1, options.seed)
    mean_figure(times, mean_path).savefig(options.out / "figure_1_1.png", dpi=120)
    switching_figure(times, paths, laws).savefig(options.out / "figure_1_2.png", dpi=120)
    return rows


# -- pictures ---------------------------------------------------------------------------------------------------------


def _density(places: torch.Tensor, mean: float, variance: float) -> torch.Tensor:
    return torch.exp(-(places - mean).square() / (2 * variance)) / (2 * torch.pi * variance) ** 0.5


def mean_figure(times: torch.Tensor, path: SwitchingPaths) -> "Figure":
    """Draw the paper's Figure 1.1: a path of dζ = -10ζdt + √2dW, its histogram and N(0, 0.1)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    left.plot(times, path.places[:, 0], color="tab:blue", linewidth=0.5)
    left.set_xlabel("t")
    left.set_ylabel("ζ")
    places = torch.linspace(-1.5, 1.5, 301)
    right.hist(path.places[:, 0].numpy(), bins=60, density=True, color="lightgray", label="path")
    right.plot(places, _density(places, 0, 1 / MEAN_SLOPE), color="tab:blue", label="N(0, 0.1)")
    right.set_xlabel("ζ")
    right.legend(frameon=False, fontsize="small")
    return figure


def switching_figure(
    times: torch.Tensor, paths: dict[float, SwitchingPaths], laws: dict[float, torch.Tensor]
) -> "Figure":
    """Draw the paper's Figure 1.2: for each η a path in the colours of its index, and the stationary law."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 11), layout="constrained")
    grid = figure.subplots(len(paths), 2, width_ratios=(2, 1))
    for (left, right), (eta, path) in zip(grid, paths.items(), strict=True):
        for state, colour in enumerate(COLOURS):
            held = torch.where(path.states[:, 0] == state, path.places[:, 0], torch.nan)
            left.plot(times, held, ".", color=colour, markersize=1, label=f"index {state + 1}")
        left.set_ylabel("θ")
        left.set_title(f"η = {eta:g}", fontsize="medium", loc="left")
        _draw_law(right, laws[eta])
    grid[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize="small", markerscale=8)
    grid[0, 1].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize="small")
    grid[-1, 0].set_xlabel("t")
    grid[-1, 1].set_xlabel("θ")
    return figure


def _draw_law(axes: "Axes", draws: torch.Tensor) -> None:
    places = torch.linspace(-3.5, 7, 701)
    axes.hist(draws.numpy(), bins=90, range=(-3.5, 7), density=True, color="lightgray", label="stationary law")
    axes.plot(places, _density(places, 0, 1 / MEAN_SLOPE), color="tab:blue", linewidth=1, label="N(0, 0.1)")
    for index, colour in enumerate(COLOURS):
        piece = _density(places, CENTRES[index], 1 / SLOPES[index])
        axes.plot(places, piece, color=colour, linewidth=1, label=f"index {index + 1} alone")
