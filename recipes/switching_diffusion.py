"""The switching diffusion's paths and stationary laws for five switching times (SGLDiff, Figures 1.1 and 1.2).

There are two potentials a_i/2·(θ - b_i)² with a = (5, 15) and b = (5, -5/3), so the target is N(0, 0.1); η falls from
10 to 0.001 by factors of ten. Jump times and the pieces between them are exact. The paper's histograms are of one path
of unstated length. Ours are of independent chains at t = 3 (20,000 of them, `full` 200,000), because a path of length
20 switches about twice for η = 10, too rarely to show the law. The paths share a seed, and so most of their noise. The
paper gives pictures and no numbers; the table compares the draws' moments with the exact ones of `stationary_moments`.

Measured (`python -m recipes switching_diffusion`, half a minute of one core): W₁ to N(0, 0.1), with its standard error
by a jackknife over 20 groups of chains, is 3.03 ± 0.013, 2.57 ± 0.012, 1.15 ± 0.008, 0.264 ± 0.003 and 0.039 ± 0.002
from η = 10 to 0.001: it falls at every step. All moments are within two standard errors of the exact ones. The laws
look as in the figure: for 10 and 1 the laws of the two potentials alone, for 0.1 one broad skew law between them, for
0.001 nearly the target, with a variance still 1.31 times too large (exact).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightning_sgmcmc.figures.canvas import COLOURS, panels, save_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.switching import (
    CENTRES,
    MEAN_SLOPE,
    POTENTIALS,
    SLOPES,
    SWITCHING_TIMES,
    distances,
    jackknife_error,
    stationary_draws,
)
from lightning_sgmcmc.simulation.switching_diffusion import (
    Potentials,
    SwitchingPaths,
    ornstein_uhlenbeck,
    stationary_moments,
    switching_paths,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Settings:
    """The settings of `switching_diffusion.yaml`.

    Attributes:
        chains: independent draws of each stationary law.
        path_length, path_points: time of the pictured paths, and points of their curves.
    """

    chains: int
    path_length: float
    path_points: int

    @property
    def work(self) -> float:
        """The draws of all switching times."""
        return float(self.chains * len(SWITCHING_TIMES))


INDICES = ((COLOURS[6], "-"), (COLOURS[1], "--"))


def one(eta: float, settings: Settings, options: Options) -> torch.Tensor:
    """Return the draws of one switching time's stationary law."""
    return stationary_draws(eta, settings.chains, options.seed)


def run(options: Options) -> list[Row]:
    """Run the five diffusions and that of the mean potential, draw the paper's figures, return the table."""
    torch.set_num_threads(1)
    settings = read_settings(Settings, options)
    chains = settings.chains
    found = run_jobs(one, [(eta,) for eta in SWITCHING_TIMES], options, settings)
    rows, laws = [], {eta: draws for (eta,), draws in found.items()}
    for eta, draws in laws.items():
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
    times = torch.linspace(0, settings.path_length, settings.path_points)
    paths = {
        eta: switching_paths(ornstein_uhlenbeck(POTENTIALS), eta, times, 1, options.seed) for eta in SWITCHING_TIMES
    }
    mean_path = switching_paths(ornstein_uhlenbeck(Potentials([MEAN_SLOPE], [0.0])), 1.0, times, 1, options.seed)
    save_figure(mean_figure(times, mean_path), options.out / "figure_1_1.png")
    save_figure(switching_figure(times, paths, laws), options.out / "figure_1_2.png")
    return rows


# -- pictures ---------------------------------------------------------------------------------------------------------


def _density(places: torch.Tensor, mean: float, variance: float) -> torch.Tensor:
    return torch.exp(-(places - mean).square() / (2 * variance)) / (2 * torch.pi * variance) ** 0.5


def mean_figure(times: torch.Tensor, path: SwitchingPaths) -> "Figure":
    """Draw the paper's Figure 1.1: a path of dζ = -10ζdt + √2dW, its histogram and N(0, 0.1)."""
    figure, ((left, right),) = panels(1, 2, 7.5, 2.4, widths=(2, 1))
    left.plot(times, path.places[:, 0], color="black", linewidth=0.5)
    left.set_xlabel("t")
    left.set_ylabel("ζ")
    places = torch.linspace(-1.5, 1.5, 301)
    right.hist(path.places[:, 0].numpy(), bins=60, density=True, color="lightgray", label="path")
    right.plot(places, _density(places, 0, 1 / MEAN_SLOPE), color="black", label="N(0, 0.1)")
    right.set_xlabel("ζ")
    right.legend(frameon=False, fontsize=8)
    return figure


def switching_figure(
    times: torch.Tensor, paths: dict[float, SwitchingPaths], laws: dict[float, torch.Tensor]
) -> "Figure":
    """Draw the paper's Figure 1.2: for each η a path in the colours of its index, and the stationary law."""
    figure, grid = panels(len(paths), 2, 7.5, 8.5, widths=(2, 1))
    for (left, right), (eta, path) in zip(grid, paths.items(), strict=True):
        for state, (colour, _) in enumerate(INDICES):
            held = torch.where(path.states[:, 0] == state, path.places[:, 0], torch.nan)
            left.plot(times, held, ".", color=colour, markersize=1, label=f"index {state + 1}")
        left.set_ylabel("θ")
        left.set_title(f"η = {eta:g}", fontsize=9, loc="left")
        _draw_law(right, laws[eta])
    grid[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8, markerscale=8)
    grid[0, 1].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8)
    grid[-1, 0].set_xlabel("t")
    grid[-1, 1].set_xlabel("θ")
    return figure


def _draw_law(axes: "Axes", draws: torch.Tensor) -> None:
    places = torch.linspace(-3.5, 7, 701)
    axes.hist(draws.numpy(), bins=90, range=(-3.5, 7), density=True, color="lightgray", label="stationary law")
    axes.plot(places, _density(places, 0, 1 / MEAN_SLOPE), ":", color=COLOURS[0], linewidth=1, label="N(0, 0.1)")
    for index, (colour, line) in enumerate(INDICES):
        piece = _density(places, CENTRES[index], 1 / SLOPES[index])
        axes.plot(places, piece, line, color=colour, linewidth=1, label=f"index {index + 1} alone")
