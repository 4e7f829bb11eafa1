"""Mode coverage of 25 Gaussians by SGLD and cyclical SGLD, one chain and four (cSG-MCMC, Figure 2 and Table 1).

Means {-4, -2, 0, 2, 4}², variance 0.03, 50,000 steps a chain from uniform points in [-10, 10]² as in the authors'
program. SGLD: 0.05·k^-0.55. cSGLD: from 0.09 with 30 cycles and β = 1/4: no noise in the first quarter of a cycle, and
draws after it. A mode is covered by 100 draws within 0.25. The means are over ten groups of four chains.

In the paper's table four chains of SGLD cover 18 modes; its Figure 2 shows 4. Measured: 3.9 ± 0.1 for SGLD and 24.8 ±
0.1 for cSGLD with four chains, 1.0 and 17.4 ± 0.2 with one: SGLD is as in the figure, and one chain of cSGLD covers far
more than the table's 6.7.
"""

import itertools
from collections.abc import Callable

import torch

from lightning_sgmcmc.diagnostics.samples import cell_masses, mode_coverage
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.figures.targets import plane_figure
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.schedules import CyclicalPlan
from lightning_sgmcmc.simulation import simulate
from lightning_sgmcmc.simulation.targets import GaussianMixture

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


def run(options: Options) -> list[Row]:
    """Run both methods, draw the densities of four chains, return the table; `full` has ten times the runs."""
    torch.set_num_threads(1)
    target = GaussianMixture.twenty_five()
    runs = RUNS * (10 if options.full else 1)
    covered: dict[str, list[float]] = {}
    densities = {}
    for method in ("SGLD", "cSGLD"):
        places = draws(method, options, runs)
        covered[method] = [float(mode_coverage(places[:, c], target.modes)) for c in range(places.shape[1])]
        groups = [places[:, c : c + PARALLEL].reshape(-1, 2) for c in range(0, places.shape[1], PARALLEL)]
        covered[f"{PARALLEL} x {method}"] = [float(mode_coverage(group, target.modes)) for group in groups]
        masses = cell_masses(groups[0], torch.ones(len(groups[0])), WINDOW, CELLS)
        densities[f"{PARALLEL} x {method}"] = masses.reshape(CELLS, CELLS)
    axis = torch.linspace(*WINDOW, CELLS + 1, dtype=torch.float64)
    centres = (axis[1:] + axis[:-1]) / 2
    truth = (-target.energy(torch.cartesian_prod(centres, centres))).softmax(0).reshape(CELLS, CELLS)
    save_figure(plane_figure(truth, densities, WINDOW), options.out / "densities.png")
    order = itertools.chain(("SGLD", "cSGLD"), (f"{PARALLEL} x {m}" for m in ("SGLD", "cSGLD")))
    rows = []
    for method in order:
        ours = mean_row(method, "modes covered", covered[method])
        rows.append(Row(method, "modes covered", ours.value, ours.error, *PAPER[method]))
    return rows
