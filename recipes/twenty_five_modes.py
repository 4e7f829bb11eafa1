"""Modes on a grid by interacting contour SGLD and other samplers at equal budget (ICSGLD, Figures 3 and 6).

U(x) = 0.2·‖x‖² - 2·Σcos(2πx_i) with a regulariser beyond ‖x‖² = 20; noise of standard deviation 0.25 on energies and
gradients, P5's starts and the pilot as in the authors' program. Each of 10 repeats (20 with `full`) spends 400,000
gradients: P5 is five chains of 80,000 steps, T5 one of 400,000. Contour: ε = 0.003, τ = 1, ζ = 0.75, m = 100, Δu =
0.125 from -3.875, ω = min(0.003, 1/(k^0.6 + 100)), the scalable scheme for both, and π from the energies of a pilot of
20,000 steps of SGLD, which count. reSGLD: lr 0.001 to 0.005, τ 1 to 5, pairs try to swap at every step in turn; only
the coldest slot draws. Its correction uses a variance of energies that starts at 30 and is re-estimated every 100 steps
with that ω, as published, or the true 0.0625. Cyclical SGLD: from 0.01, 10 cycles, noise throughout, draws where lr <
0.009. SVGD: 100 particles from a uniform square, 0.003. Every method that runs chains keeps 30,000 to 40,000 draws.
KL(truth ‖ draws) on 50 x 50 cells with 1 % of uniform mixed in; for a method's end also the KL of the unit squares
around the modes. A mode is found if its square has half of its mass. Seconds are for all repeats side by side on one
thread, without compilation, so P5's chains cost little more than one.

Measured (full; KL at the end, mean ± standard error over 20 repeats; 40,000 independent draws have 0.016):

    reSGLD×P5, true variance  0.030 ± 0.001    reSGLD×P5, ω by estimates, from 25  0.159 ± 0.005
    ICSGLD×P5                 0.049 ± 0.002    SGLD×P5                             0.162 ± 0.007
    CSGLD×T5                  0.057 ± 0.003    reSGLD×P5, ω by estimates           0.190 ± 0.004
    CSGLD×T5, uniform π       0.053 ± 0.003    reSGLD×P5                           0.255 ± 0.007
    ICSGLD×P5, uniform π      0.064 ± 0.003    cycSGLD×T5                          0.258 ± 0.016

- The paper's order is ICSGLD, reSGLD, cyclical SGLD, SGLD. reSGLD's place depends on its correction. Rows "ω by
  estimates" read ω's index as the number of estimates, not the iteration, "from 25" starts from the program's variance,
  and "true variance" needs no estimate.
- Cyclical SGLD loses to SGLD mostly at the ends of its cycles, where the chain stays in one mode but draws.
- ICSGLD needs π near its fixed point from the start ("proper initialization", Lemma 1): from a uniform π a single chain
  is better, because it makes five times as many updates of π. With the pilot it is ahead, by 0.008 ± 0.004.
The pilot, the noise on its energies and the cells were chosen after first results: without a pilot ICSGLD was worse
than CSGLD, and on finer cells or with fewer draws KL measures the number of draws. The readings of ω were added after
it was seen that reSGLD's place depends on them. The program confines contour chains alone to a box; here none is
confined.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.contour import Contour, ContourRules, ContourState, DecayingStepSize
from lightning_sgmcmc.contour.partition import EnergyPartition, bin_index
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.recipes.shared.figures import plane_figure, progress_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.plane import Clock, Draws, Squares, VarianceEstimate, cell_masses, divergence
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.schedules import CyclicalPlan
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation import ContourRun, ExchangeRun, simulate
from lightning_sgmcmc.simulation.densities import descend
from lightning_sgmcmc.simulation.targets import CosineTarget


@dataclass(frozen=True)
class Settings:
    """The settings of `twenty_five_modes.yaml`.

    Attributes:
        repeats: of each method, side by side.
        steps: of each of five chains.
        burn_in, every: steps before the first draw and between two draws of five chains.
        lr: ε of the methods with one constant step size.
        noise: standard deviation of the noise on energies and on each part of the gradients.
        pilot_steps, pilot_burn_in: of the run from which π starts.
        cyclical_lr, cycles: the largest step size of the cyclical method, and its cycles.
        coldest_lr, ladder: of replica exchange; step sizes grow with temperatures.
        first_variance, program_variance: the first value of its variance, in the paper and in the program.
        reestimated_every: steps between two estimates of it.
        particles: of SVGD.
        marks: points of a curve.
    """

    repeats: int
    steps: int
    burn_in: int
    every: int
    lr: float
    noise: float
    pilot_steps: int
    pilot_burn_in: int
    cyclical_lr: float
    cycles: int
    coldest_lr: float
    ladder: tuple[float, ...]
    first_variance: float
    program_variance: float
    reestimated_every: int
    particles: int
    marks: int

    @property
    def work(self) -> float:
        """The gradients of all methods."""
        return float(self.repeats * self.steps * PARALLEL * len(METHODS))


PARALLEL = 5
STARTS = ((0.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (0.0, 1.0), (1.0, 0.0))
RULES = Contour(EnergyPartition(-3.875, 0.125, 100), ContourRules(0.75, "scalable"))
PILOT_FLOOR = 1e-4
STEP_SIZE = DecayingStepSize(1, 0.6, 100, maximum=3e-3)
COLLECTED = 0.9
REACH = 2.5
CELLS = 50
DRAWN_CELLS, SHOWN_CELLS = 100, 60
TARGET = CosineTarget.twenty_five_modes()
METHODS = (
    "ICSGLD×P5",
    "CSGLD×T5",
    "ICSGLD×P5, uniform π",
    "CSGLD×T5, uniform π",
    "reSGLD×P5",
    "reSGLD×P5, ω by estimates",
    "reSGLD×P5, ω by estimates, from 25",
    "reSGLD×P5, true variance",
    "cycSGLD×T5",
    "SGLD×P5",
    "SVGD",
)


def variance_of(method: str, settings: Settings) -> float | VarianceEstimate:
    """Return the variance in replica exchange's correction, by the method's reading."""
    if "true" in method:
        return settings.noise**2
    first = settings.program_variance if "from 25" in method else settings.first_variance
    every = settings.reestimated_every
    count = settings.steps // every + 1
    return VarianceEstimate(first, settings.noise**2, every, STEP_SIZE, "by estimates" not in method, count)


def pilot(repeats: int, settings: Settings, seed: int) -> tuple[ContourState, float]:
    """Return the initial π of each repeat, from the noisy energies of a run of SGLD from the origin, and its time.

    Without the noise six pilots of 20 leave the lowest bin empty, and six repeats end at a KL of 0.11 to 0.22.
    """
    clock = Clock()
    done = simulate(
        TARGET,
        lr=settings.lr,
        num_steps=settings.pilot_steps,
        num_chains=repeats,
        gradient_noise=settings.noise,
        initial=torch.zeros(2),
        keep_every=1,
        burn_in=settings.pilot_burn_in,
        observe=clock,
        seed=derive_seed(seed, "pilot"),
        compile=None if settings.pilot_steps < 20_000 else True,
    )
    generator = torch.Generator().manual_seed(derive_seed(seed, "pilot", "energy noise"))
    seen = done.energies + settings.noise * torch.randn(done.energies.shape, generator=generator)
    bins = bin_index(seen.T.double().contiguous(), RULES.partition.edges())
    visits = torch.stack([torch.bincount(row, minlength=RULES.partition.num_bins) for row in bins])
    share = visits / visits.sum(1, keepdim=True).double() + PILOT_FLOOR
    return ContourState((share / share.sum(1, keepdim=True)).log(), visits), clock.seconds(settings.pilot_steps)


def chains(method: str, repeats: int, settings: Settings, seed: int) -> Draws:
    """Run all repeats of a method with chains, side by side."""
    parallel = PARALLEL if "P5" in method else 1
    steps = settings.steps * PARALLEL // parallel
    burn_in, every = settings.burn_in * PARALLEL // parallel, settings.every
    clock, earlier, spent = Clock(), 0.0, 0
    options: dict[str, Any] = {"lr": settings.lr, "energy_noise": 0.0}
    plan = CyclicalPlan(steps, settings.cycles, 0.0, 1)
    if "CSGLD" in method:
        contour = ContourRun(RULES, STEP_SIZE, shared=parallel > 1, groups=repeats if parallel > 1 else 1)
        if "uniform" not in method:
            state, earlier = pilot(repeats, settings, seed)
            contour, spent = replace(contour, state=state), settings.pilot_steps // parallel
            steps -= spent
        options |= {"contour": contour, "energy_noise": settings.noise}
    elif method.startswith("reSGLD"):
        ladder = settings.ladder
        options |= {"exchange": ExchangeRun(ladder, ladder, variance=variance_of(method, settings))}
        options |= {"lr": settings.coldest_lr, "energy_noise": settings.noise}
    elif method == "cycSGLD×T5":
        options["lr"] = lambda k: settings.cyclical_lr * plan.lr_factor(k)
    done = simulate(
        TARGET,
        num_steps=steps,
        num_chains=repeats * parallel,
        gradient_noise=settings.noise,
        initial=torch.tensor(STARTS[:parallel]).repeat(repeats, 1),
        keep_every=max(1, every // len(settings.ladder))
        if "exchange" in options
        else every,  # one slot of five is kept
        burn_in=burn_in,
        observe=clock,
        seed=seed,
        compile=None if steps < 50_000 else True,
        **options,
    )
    log_weights = done.log_weights.clone()
    if done.slots is not None:
        log_weights[done.slots != 0] = -torch.inf
    if method == "cycSGLD×T5":
        too_long = torch.tensor([plan.lr_factor(k) >= COLLECTED for k in done.steps.tolist()])
        log_weights[too_long] = -torch.inf
    shape = (len(done.steps), repeats, parallel)
    places, log_weights = done.positions.view(*shape, 2), log_weights.view(shape)
    return Draws((done.steps + spent) / (steps + spent), places, log_weights, earlier + clock.seconds(steps))


def particles(repeats: int, settings: Settings, seed: int) -> Draws:
    """Run all repeats of SVGD, with as many gradients of one particle as the chains have."""
    particles, marks = settings.particles, settings.marks
    steps = settings.steps * PARALLEL // particles
    generator = torch.Generator().manual_seed(seed)
    start = REACH * (2 * torch.rand(repeats, particles, 2, generator=generator) - 1)
    kept, noted = [], sorted({max(1, round(steps * mark / marks)) for mark in range(1, marks + 1)})

    def note(step: int, places: Tensor) -> None:
        if step in noted:
            kept.append(places)

    begin = time.monotonic()
    descend(TARGET.gradient, start, settings.lr, steps, note)
    seconds = time.monotonic() - begin
    places = torch.stack(kept)
    return Draws(torch.tensor(noted) / steps, places, torch.zeros(places.shape[:3]), seconds)


def estimates(
    draws: Draws, masses: Callable[[Tensor, Tensor], Tensor], repeat: int, marks: int, moving: bool
) -> list[Tensor]:
    """Return the masses of cells by the draws up to each of the marks.

    Args:
        draws: the draws of all repeats.
        masses: a function of places (n, 2) and weights (n,), normalised by the weights' sum.
        repeat: index of the repeat.
        marks: their number.
        moving: whether draws are the same particles at later times, so that only the last ones count.
    """
    weights = draws.log_weights[:, repeat].double()
    weights = (weights - weights.max()).exp()
    found, total, weight = [], torch.zeros(()), 0.0
    first = 0
    for mark in range(1, marks + 1):
        last = int((draws.progress <= mark / marks + 1e-9).sum())
        if moving:
            first, total, weight = last - 1, torch.zeros(()), 0.0
        here = weights[first:last].reshape(-1)
        if float(here.sum()) > 0:
            total = total + masses(draws.places[first:last, repeat].reshape(-1, 2), here) * here.sum()
            weight += float(here.sum())
        first = last
        found.append(total / weight if weight > 0 else torch.zeros(()))
    return found


class Outcome(NamedTuple):
    """What a method gives.

    Attributes:
        divergences: KL of each repeat at the marks.
        coarse: KL of the squares' masses at the end.
        found: modes found.
        seconds: time of all repeats side by side.
        masses: the first repeat's masses of finer cells around the origin.
    """

    divergences: list[list[float]]
    coarse: list[float]
    found: list[float]
    seconds: float
    masses: Tensor


def one(method: str, repeats: int, settings: Settings, options: Options) -> Outcome:
    """Run all repeats of a method."""
    truth, squares, moving = TARGET.cell_masses(CELLS), Squares(TARGET), method == "SVGD"
    draws = particles(repeats, settings, options.seed) if moving else chains(method, repeats, settings, options.seed)
    divergences, coarse, found = [], [], []
    for repeat in range(repeats):
        fine = estimates(draws, lambda x, w: cell_masses(x, w, TARGET.bounds, CELLS), repeat, settings.marks, moving)
        divergences.append([divergence(truth, masses) for masses in _known(fine, CELLS * CELLS)])
        end = estimates(draws, squares.masses, repeat, settings.marks, moving)[-1]
        coarse.append(divergence(squares.truth, end))
        found.append(float(squares.found(end)))
    return Outcome(divergences, coarse, found, draws.seconds, picture(draws, moving))


def run(options: Options) -> list[Row]:
    """Run the methods, draw divergences and densities, return the table."""
    settings = read_settings(Settings, options)
    repeats = len(options.repeated(settings.repeats))
    outcomes = run_jobs(one, [(method, repeats) for method in options.chosen(METHODS)], options, settings)
    rows, by_steps, by_time, densities = [], {}, {}, {}
    shares = [mark / settings.marks for mark in range(1, settings.marks + 1)]
    for (method, _), outcome in outcomes.items():
        by_steps[method] = ([share * settings.steps * PARALLEL for share in shares], outcome.divergences)
        by_time[method] = ([share * outcome.seconds for share in shares], outcome.divergences)
        densities[method] = outcome.masses
        rows += [
            mean_row(method, "KL to the truth (nats)", [curve[-1] for curve in outcome.divergences]),
            mean_row(method, "KL of the squares' masses (nats)", outcome.coarse),
            mean_row(method, "modes found of 25", outcome.found),
            Row(method, f"seconds of {repeats} repeats side by side", outcome.seconds),
        ]
    label = "KL to the truth (nats)"
    save_figure(progress_figure(by_steps, "gradients", label), options.out / "divergence_steps.png")
    save_figure(progress_figure(by_time, "seconds", label, log_x=True), options.out / "divergence_time.png")
    edge = TARGET.bounds[1] * SHOWN_CELLS / DRAWN_CELLS
    middle = _middle(TARGET.cell_masses(DRAWN_CELLS))
    save_figure(plane_figure(middle, densities, (-edge, edge), TARGET.modes.tolist()), options.out / "densities.png")
    return [*rows, *independent(settings, repeats, options.seed)]


def picture(draws: Draws, moving: bool) -> Tensor:
    """Return the masses of finer cells around the origin by the first repeat's draws."""
    first = len(draws.places) - 1 if moving else 0
    places, log_weights = draws.places[first:, 0].reshape(-1, 2), draws.log_weights[first:, 0].reshape(-1)
    return _middle(cell_masses(places, log_weights.softmax(0), TARGET.bounds, DRAWN_CELLS))


def independent(settings: Settings, repeats: int, seed: int) -> list[Row]:
    """Return the divergences of independent draws of the target, a lower limit for every sampler."""
    truth, squares = TARGET.cell_masses(CELLS), Squares(TARGET)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for count in (settings.steps * PARALLEL // settings.every, settings.particles):
        for metric, masses in (("KL to the truth", truth), ("KL of the squares' masses", squares.truth)):
            chosen = torch.multinomial(masses, repeats * count, replacement=True, generator=generator)
            counts = [torch.bincount(part, minlength=len(masses)) for part in chosen.split(count)]
            values = [divergence(masses, part / count) for part in counts]
            name = f"{count} independent draws"
            rows.append(mean_row(name, f"{metric} (nats)", values))
    return rows


def _known(masses: list[Tensor], count: int) -> list[Tensor]:
    """Replace estimates without a draw by empty ones."""
    return [part if part.dim() else torch.zeros(count, dtype=torch.float64) for part in masses]


def _middle(masses: Tensor) -> Tensor:
    """Return the cells around the origin, shape (SHOWN_CELLS, SHOWN_CELLS)."""
    cut = (DRAWN_CELLS - SHOWN_CELLS) // 2
    return masses.reshape(DRAWN_CELLS, DRAWN_CELLS)[cut : DRAWN_CELLS - cut, cut : DRAWN_CELLS - cut]
