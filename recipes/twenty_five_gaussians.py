"""Mode coverage of 25 Gaussians by SGLD and cyclical SGLD, one chain and four (cSG-MCMC, Figure 2 and Table 1).

Means {-4, -2, 0, 2, 4}², variance 0.03, 50,000 steps a chain from uniform points in [-10, 10]² as in the authors'
program. SGLD: 0.05·k^-0.55. cSGLD: from 0.09 with 30 cycles and β = 1/4: no noise in the first quarter of a cycle, and
draws after it. A mode is covered by 100 draws within 0.25. The means are over ten groups of four chains.

The rows "program" have the step sizes of the authors' program: SGLD with 0.043 for 500 steps and then 0.043·(k -
500)^-0.55, cSGLD from 0.07, with noise throughout and draws after the first 50 steps of a cycle. (Its gradients are
noisy and its own noise reduced by as much; ours are exact.) They were added after the first results, to see whether
they give the paper's figures.

In the paper's table four chains of SGLD cover 18 modes; its Figure 2 shows 4. Measured (full, ten groups): 3.9 ± 0.1
for SGLD and 24.9 ± 0.1 for cSGLD with four chains, 1.0 and 17.6 ± 0.3 with one; by the program's settings 4.1 ± 0.2 and
25.0, 1.08 ± 0.04 and 18.1 ± 0.2. So SGLD is as in the figure: a chain stays in its first mode. One chain of cSGLD
covers far more than the table's 6.7.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.recipes.shared.figures import plane_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.plane import cell_masses, mode_coverage
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.schedules import CyclicalPlan
from lightning_sgmcmc.simulation import simulate
from lightning_sgmcmc.simulation.targets import GaussianMixture


@dataclass(frozen=True)
class Settings:
    """The settings of `twenty_five_gaussians.yaml`.

    Attributes:
        runs, parallel: groups of chains, and chains of a group.
        steps: of a chain.
        sgld_lr: a of SGLD's step size a·k^-0.55.
        cyclical_lr, cycles, exploration: the largest step size of cSGLD, its cycles, and β.
        reach: chains start in [-reach, reach]².
    """

    runs: int
    parallel: int
    steps: int
    sgld_lr: float
    cyclical_lr: float
    cycles: int
    exploration: float
    reach: float

    @property
    def work(self) -> float:
        """The gradients of all methods."""
        return float(len(METHODS) * self.runs * self.parallel * self.steps)


METHODS = ("SGLD", "cSGLD", "SGLD, program", "cSGLD, program")
DECAY = 0.55
PROGRAM_LR, PROGRAM_CONSTANT, PROGRAM_CYCLICAL_LR, PROGRAM_SKIPPED = 0.043, 500, 0.07, 50
PAPER = {"SGLD": (1.8, 0.13), "cSGLD": (6.7, 0.52), "4 x SGLD": (18.0, 0.47), "4 x cSGLD": (24.4, 0.22)}
CELLS, WINDOW = 100, (-6.0, 6.0)


def draws(method: str, runs: int, settings: Settings, seed: int) -> torch.Tensor:
    """Return the draws of all chains, shape (S, C, 2)."""
    plan = CyclicalPlan(settings.steps, settings.cycles, settings.exploration, 1)
    cycle = CyclicalPlan(settings.steps, settings.cycles, 0.0, 1)
    per_cycle = settings.steps // settings.cycles
    schedules: dict[str, tuple[Callable[[int], float], float | Callable[[int], float]]] = {
        "SGLD": (lambda k: settings.sgld_lr * k**-DECAY, 1.0),
        "cSGLD": (lambda k: settings.cyclical_lr * plan.lr_factor(k), lambda k: 0.0 if plan.is_exploration(k) else 1.0),
        "SGLD, program": (lambda k: PROGRAM_LR * max(1, k - PROGRAM_CONSTANT) ** -DECAY, 1.0),
        "cSGLD, program": (lambda k: PROGRAM_CYCLICAL_LR * cycle.lr_factor(k), 1.0),
    }
    lr, temperature = schedules[method]
    chains = settings.parallel * runs
    generator = torch.Generator().manual_seed(seed)
    start = settings.reach * (2 * torch.rand(chains, 2, generator=generator) - 1)
    done = simulate(
        GaussianMixture.twenty_five(),
        lr=lr,
        temperature=temperature,
        num_steps=settings.steps,
        num_chains=chains,
        initial=start,
        keep_every=1,
        seed=seed,
    )
    if method.startswith("SGLD"):
        return done.positions
    if method == "cSGLD, program":
        return done.positions[(done.steps - 1) % per_cycle >= PROGRAM_SKIPPED]
    return done.positions[torch.tensor([not plan.is_exploration(k) for k in done.steps.tolist()])]


class Outcome(NamedTuple):
    """Modes that each chain and each group of four covers, and the masses of the first group's cells."""

    single: list[float]
    grouped: list[float]
    masses: torch.Tensor


def one(method: str, runs: int, settings: Settings, options: Options) -> Outcome:
    """Run all chains of a method."""
    modes, places = GaussianMixture.twenty_five().modes, draws(method, runs, settings, options.seed)
    groups = [part.reshape(-1, 2) for part in places.split(settings.parallel, 1)]
    return Outcome(
        [float(mode_coverage(places[:, c], modes)) for c in range(places.shape[1])],
        [float(mode_coverage(group, modes)) for group in groups],
        cell_masses(groups[0], torch.ones(len(groups[0])), WINDOW, CELLS).reshape(CELLS, CELLS),
    )


def run(options: Options) -> list[Row]:
    """Run both methods, draw the densities of four chains, return the table."""
    settings = read_settings(Settings, options)
    runs, parallel = len(options.repeated(settings.runs)), settings.parallel
    methods = options.chosen(METHODS)
    found = run_jobs(one, [(method, runs) for method in methods], options, settings)
    covered = {method: found[method, runs].single for method in methods}
    covered |= {f"{parallel} x {method}": found[method, runs].grouped for method in methods}
    axis = torch.linspace(*WINDOW, CELLS + 1, dtype=torch.float64)
    centres = (axis[1:] + axis[:-1]) / 2
    cells = torch.cartesian_prod(centres, centres)
    truth = (-GaussianMixture.twenty_five().energy(cells)).softmax(0).reshape(CELLS, CELLS)
    densities = {f"{parallel} x {method}": found[method, runs].masses for method in methods}
    save_figure(plane_figure(truth, densities, WINDOW), options.out / "densities.png")
    return [
        mean_row(method, "modes covered", values, *PAPER.get(method, (None, None)))
        for method, values in covered.items()
    ]
