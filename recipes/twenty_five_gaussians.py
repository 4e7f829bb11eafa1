"""Mode coverage of 25 Gaussians by SGLD and cyclical SGLD, one chain and four (cSG-MCMC, Figure 2 and Table 1).

Means {-4, -2, 0, 2, 4}², variance 0.03, 50,000 steps a chain from uniform points in [-10, 10]² as in the authors'
program. SGLD: 0.05·k^-0.55. cSGLD: from 0.09 with 30 cycles and β = 1/4: no noise in the first quarter of a cycle, and
draws after it. A mode is covered by 100 draws within 0.25. The means are over ten groups of four chains.

In the paper's table four chains of SGLD cover 18 modes; its Figure 2 shows 4. Measured: 3.9 ± 0.1 for SGLD and 24.8 ±
0.1 for cSGLD with four chains, 1.0 and 17.4 ± 0.2 with one: SGLD is as in the figure, and one chain of cSGLD covers far
more than the table's 6.7.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from lightning_sgmcmc.diagnostics.samples import cell_masses, mode_coverage
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.figures.targets import plane_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.schedules import CyclicalPlan
from lightning_sgmcmc.simulation import simulate
from lightning_sgmcmc.simulation.targets import GaussianMixture

METHODS = ("SGLD", "cSGLD")
RUNS, PARALLEL = 10, 4
STEPS = 50_000
CYCLES, EXPLORATION, CYCLICAL_LR = 30, 0.25, 0.09
REACH = 10.0
PAPER = {"SGLD": (1.8, 0.13), "cSGLD": (6.7, 0.52), "4 x SGLD": (18.0, 0.47), "4 x cSGLD": (24.4, 0.22)}
CELLS, WINDOW = 100, (-6.0, 6.0)


def draws(method: str, options: Options, runs: int = RUNS) -> torch.Tensor:
    """Return the draws of all chains, shape (S, C, 2)."""
    plan = CyclicalPlan(STEPS, CYCLES, EXPLORATION, 1)
    schedules: dict[str, tuple[Callable[[int], float], float | Callable[[int], float]]] = {
        "SGLD": (lambda k: 0.05 * k**-0.55, 1.0),
        "cSGLD": (lambda k: CYCLICAL_LR * plan.lr_factor(k), lambda k: 0.0 if plan.is_exploration(k) else 1.0),
    }
    lr, temperature = schedules[method]
    chains = PARALLEL * runs
    generator = torch.Generator().manual_seed(options.seed)
    start = REACH * (2 * torch.rand(chains, 2, generator=generator) - 1)
    done = simulate(
        GaussianMixture.twenty_five(),
        lr=lr,
        temperature=temperature,
        num_steps=STEPS,
        num_chains=chains,
        initial=start,
        keep_every=1,
        seed=options.seed,
    )
    if method == "SGLD":
        return done.positions
    return done.positions[torch.tensor([not plan.is_exploration(k) for k in done.steps.tolist()])]


class Outcome(NamedTuple):
    """Modes that each chain and each group of four covers, and the masses of the first group's cells."""

    single: list[float]
    grouped: list[float]
    masses: torch.Tensor


def one(method: str, runs: int, options: Options) -> Outcome:
    """Run all chains of a method."""
    modes, places = GaussianMixture.twenty_five().modes, draws(method, options, runs)
    groups = [places[:, c : c + PARALLEL].reshape(-1, 2) for c in range(0, places.shape[1], PARALLEL)]
    return Outcome(
        [float(mode_coverage(places[:, c], modes)) for c in range(places.shape[1])],
        [float(mode_coverage(group, modes)) for group in groups],
        cell_masses(groups[0], torch.ones(len(groups[0])), WINDOW, CELLS).reshape(CELLS, CELLS),
    )


def run(options: Options) -> list[Row]:
    """Run both methods, draw the densities of four chains, return the table; `full` has ten times the runs."""
    runs = len(options.repeated(RUNS * (10 if options.full else 1)))
    methods = options.chosen(METHODS)
    found = run_jobs(one, [(method, runs) for method in methods], options)
    covered = {method: found[method, runs].single for method in methods}
    covered |= {f"{PARALLEL} x {method}": found[method, runs].grouped for method in methods}
    axis = torch.linspace(*WINDOW, CELLS + 1, dtype=torch.float64)
    centres = (axis[1:] + axis[:-1]) / 2
    cells = torch.cartesian_prod(centres, centres)
    truth = (-GaussianMixture.twenty_five().energy(cells)).softmax(0).reshape(CELLS, CELLS)
    densities = {f"{PARALLEL} x {method}": found[method, runs].masses for method in methods}
    save_figure(plane_figure(truth, densities, WINDOW), options.out / "densities.png")
    return [mean_row(method, "modes covered", values, *PAPER[method]) for method, values in covered.items()]
