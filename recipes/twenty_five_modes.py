"""Modes on a grid by interacting contour SGLD and other samplers at equal budget (ICSGLD, Figures 3 and 6).

U(x) = 0.2·‖x‖² - 2·Σcos(2πx_i) with a regulariser beyond ‖x‖² = 20; noise of standard deviation 0.25 on energies and
gradients, P5's starts and the pilot as in the authors' program. Each of 20 repeats (100 with `full`) spends 400,000
gradients: P5 is five chains of 80,000 steps, T5 one of 400,000. Contour: ε = 0.003, τ = 1, ζ = 0.75, m = 100, Δu =
0.125 from -3.875, ω = min(0.003, 1/(k^0.6 + 100)), the scalable scheme for both, and π from the energies of a pilot of
20,000 steps of SGLD, which count. reSGLD: lr 0.001 to 0.005, τ 1 to 5, pairs try to swap at every step in turn; only
the coldest slot draws. Its correction uses a variance of energies that starts at 30 and is re-estimated every 100 steps
with that ω, as published, or the true 0.0625. Cyclical SGLD: from 0.01, 10 cycles, noise throughout, draws where lr <
0.009. SVGD: 100 particles from a uniform square, 0.003. Every method that runs chains keeps 30,000 to 40,000 draws.
KL(truth ‖ draws) on 50 x 50 cells with 1 % of uniform mixed in; for a method's end also the KL of the unit squares
around the modes. A mode is found if its square has half of its mass. Seconds are for all repeats side by side on one
thread, without compilation, so P5's chains cost little more than one.

Measured (quick; KL at the end, mean ± standard deviation over repeats; 40,000 independent draws have 0.016):

    reSGLD×P5, true variance  0.030 ± 0.004    SGLD×P5     0.162 ± 0.032
    ICSGLD×P5                 0.049 ± 0.010    reSGLD×P5   0.255 ± 0.031
    CSGLD×T5                  0.057 ± 0.012    cycSGLD×T5  0.258 ± 0.072
    ICSGLD×P5, uniform π      0.064 ± 0.014    SVGD        3.1 ± 0.2
    CSGLD×T5, uniform π       0.053 ± 0.014

The paper's order is ICSGLD, reSGLD, cyclical SGLD, SGLD. Here two methods rank differently, and a third's lead is
small:

- reSGLD depends on its correction. The variance falls from 30 only to 7.7 by the end: the rate of a swap between τ = 1
  and 2 is exp(-7.5) of the uncorrected rate at the start and exp(-1.9) at the end. With the true variance the method is
  the best of all, in steps and in seconds.
- Cyclical SGLD loses to SGLD mostly at the ends of its cycles, where lr falls to 0 and the chain stays in one mode but
  draws as often as elsewhere: weighted by lr, its draws have 0.19 ± 0.06. The barriers are four nats, which SGLD
  crosses.
- ICSGLD needs π near its fixed point from the start ("proper initialization", Lemma 1): from a uniform π a single chain
  is better, because it makes five times as many updates of π; with the pilot it is worse, by 2.2 standard errors.

The pilot, the noise on its energies and the cells were chosen after first results: without a pilot ICSGLD was worse
than CSGLD (the rows with a uniform π), and on finer cells or with fewer draws KL measures the number of draws.

In the authors' program contour chains are confined to the box [-2.5, 2.5]² and the other methods are not, although the
truth is that of the box. The box has 0.80 of the mass, which adds -log 0.80 = 0.22 nats to the KL of the other methods,
SGLD included. Here all methods move in the plane, and the truth is that of the plane. Of 25 modes reSGLD as published
and cyclical SGLD find 22, SVGD 21, and the other methods 24 to 25.

SVGD's KL is that of 100 independent draws, 3.1; on the squares, where the number of draws matters less, it has 1.0 ±
0.1, and 100 independent draws 0.77 ± 0.13.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.contour import Contour, ContourRules, ContourState, DecayingStepSize
from lightning_sgmcmc.contour.partition import EnergyPartition, bin_index
from lightning_sgmcmc.diagnostics.samples import cell_masses, divergence
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.figures.targets import plane_figure, progress_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.plane import Clock, Draws, Squares
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.schedules import CyclicalPlan
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation import ContourRun, simulate
from lightning_sgmcmc.simulation.exchange_run import ExchangeRun
from lightning_sgmcmc.simulation.svgd import descend
from lightning_sgmcmc.simulation.targets import CosineTarget

REPEATS = 20
STEPS, PARALLEL = 80_000, 5
BURN_IN, EVERY = 1000, 10
MARKS = 25
NOISE = 0.25
STARTS = ((0.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (0.0, 1.0), (1.0, 0.0))
LR = 3e-3
RULES = Contour(EnergyPartition(-3.875, 0.125, 100), ContourRules(0.75, "scalable"))
PILOT_STEPS, PILOT_BURN_IN, PILOT_FLOOR = 20_000, 5000, 1e-4
STEP_SIZE = DecayingStepSize(1, 0.6, 100, maximum=3e-3)
CYCLICAL_LR, CYCLES, COLLECTED = 1e-2, 10, 0.9
LADDER = (1.0, 2.0, 3.0, 4.0, 5.0)
COLDEST_LR, FIRST_VARIANCE, REESTIMATED_EVERY = 1e-3, 30.0, 100
PARTICLES, REACH = 100, 2.5
CELLS = 50
DRAWN_CELLS, SHOWN_CELLS = 100, 60
TARGET = CosineTarget.twenty_five_modes()
METHODS = (
    "ICSGLD×P5",
    "CSGLD×T5",
    "ICSGLD×P5, uniform π",
    "CSGLD×T5, uniform π",
    "reSGLD×P5",
    "reSGLD×P5, true variance",
    "cycSGLD×T5",
    "SGLD×P5",
    "SVGD",
)


def estimated_variance(step: int) -> float:
    """Return reSGLD's published estimate of an energy's variance, smoothed from 30 towards the noise's variance.

    The estimates, every 100 steps, are replaced by their mean; the program's scatter around it, with ten energies each.
    """
    return _VARIANCES[min(step // REESTIMATED_EVERY, len(_VARIANCES) - 1)]


def _variances(count: int) -> list[float]:
    values = [FIRST_VARIANCE]
    for update in range(1, count):
        share = STEP_SIZE.at(update * REESTIMATED_EVERY)
        values.append((1 - share) * values[-1] + share * NOISE**2)
    return values


_VARIANCES = _variances(10_000)


def pilot(repeats: int, seed: int) -> tuple[ContourState, float]:
    """Return the initial π of each repeat, from the noisy energies of a run of SGLD from the origin, and its time.

    Without the noise six pilots of 20 leave the lowest bin empty, and six repeats end at a KL of 0.11 to 0.22.
    """
    clock = Clock()
    done = simulate(
        TARGET,
        lr=LR,
        num_steps=PILOT_STEPS,
        num_chains=repeats,
        gradient_noise=NOISE,
        initial=torch.zeros(2),
        keep_every=1,
        burn_in=PILOT_BURN_IN,
        observe=clock,
        seed=derive_seed(seed, "pilot"),
        compile=None if PILOT_STEPS < 20_000 else True,
    )
    generator = torch.Generator().manual_seed(derive_seed(seed, "pilot", "energy noise"))
    seen = done.energies + NOISE * torch.randn(done.energies.shape, generator=generator)
    bins = bin_index(seen.T.double().contiguous(), RULES.partition.edges())
    visits = torch.stack([torch.bincount(row, minlength=RULES.partition.num_bins) for row in bins])
    share = visits / visits.sum(1, keepdim=True).double() + PILOT_FLOOR
    return ContourState((share / share.sum(1, keepdim=True)).log(), visits), clock.seconds(PILOT_STEPS)


def chains(method: str, repeats: int, seed: int) -> Draws:
    """Run all repeats of a method with chains, side by side."""
    parallel = PARALLEL if "P5" in method else 1
    steps = STEPS * PARALLEL // parallel
    burn_in = BURN_IN * PARALLEL // parallel
    clock, earlier, spent = Clock(), 0.0, 0
    options: dict[str, Any] = {"lr": LR, "energy_noise": 0.0}
    plan = CyclicalPlan(steps, CYCLES, 0.0, 1)
    if "CSGLD" in method:
        contour = ContourRun(RULES, STEP_SIZE, shared=parallel > 1, groups=repeats if parallel > 1 else 1)
        if "uniform" not in method:
            state, earlier = pilot(repeats, seed)
            contour, spent = replace(contour, state=state), PILOT_STEPS // parallel
            steps -= spent
        options |= {"contour": contour, "energy_noise": NOISE}
    elif method.startswith("reSGLD"):
        variance = NOISE**2 if "true" in method else estimated_variance
        options |= {"exchange": ExchangeRun(LADDER, LADDER, variance=variance)}
        options |= {"lr": COLDEST_LR, "energy_noise": NOISE}
    elif method == "cycSGLD×T5":
        options["lr"] = lambda k: CYCLICAL_LR * plan.lr_factor(k)
    done = simulate(
        TARGET,
        num_steps=steps,
        num_chains=repeats * parallel,
        gradient_noise=NOISE,
        initial=torch.tensor(STARTS[:parallel]).repeat(repeats, 1),
        keep_every=max(1, EVERY // len(LADDER)) if "exchange" in options else EVERY,  # one slot of five is kept
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


def particles(repeats: int, seed: int) -> Draws:
    """Run all repeats of SVGD, with as many gradients of one particle as the chains have."""
    steps = STEPS * PARALLEL // PARTICLES
    generator = torch.Generator().manual_seed(seed)
    start = REACH * (2 * torch.rand(repeats, PARTICLES, 2, generator=generator) - 1)
    kept, noted = [], sorted({max(1, round(steps * mark / MARKS)) for mark in range(1, MARKS + 1)})

    def note(step: int, places: Tensor) -> None:
        if step in noted:
            kept.append(places)

    begin = time.monotonic()
    descend(TARGET.gradient, start, LR, steps, note)
    seconds = time.monotonic() - begin
    places = torch.stack(kept)
    return Draws(torch.tensor(noted) / steps, places, torch.zeros(places.shape[:3]), seconds)


def estimates(draws: Draws, masses: Callable[[Tensor, Tensor], Tensor], repeat: int, moving: bool) -> list[Tensor]:
    """Return the masses of cells by the draws up to each of the marks.

    Args:
        draws: the draws of all repeats.
        masses: a function of places (n, 2) and weights (n,), normalised by the weights' sum.
        repeat: index of the repeat.
        moving: whether draws are the same particles at later times, so that only the last ones count.
    """
    weights = draws.log_weights[:, repeat].double()
    weights = (weights - weights.max()).exp()
    found, total, weight = [], torch.zeros(()), 0.0
    first = 0
    for mark in range(1, MARKS + 1):
        last = int((draws.progress <= mark / MARKS + 1e-9).sum())
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


def one(method: str, repeats: int, options: Options) -> Outcome:
    """Run all repeats of a method."""
    truth, squares, moving = TARGET.cell_masses(CELLS), Squares(TARGET), method == "SVGD"
    draws = particles(repeats, options.seed) if moving else chains(method, repeats, options.seed)
    divergences, coarse, found = [], [], []
    for repeat in range(repeats):
        fine = estimates(draws, lambda x, w: cell_masses(x, w, TARGET.bounds, CELLS), repeat, moving)
        divergences.append([divergence(truth, masses) for masses in _known(fine, CELLS * CELLS)])
        end = estimates(draws, squares.masses, repeat, moving)[-1]
        coarse.append(divergence(squares.truth, end))
        found.append(float(squares.found(end)))
    return Outcome(divergences, coarse, found, draws.seconds, picture(draws, moving))


def run(options: Options) -> list[Row]:
    """Run the methods, draw divergences and densities, return the table; `full` has 100 repeats."""
    repeats = len(options.repeated(REPEATS * (5 if options.full else 1)))
    outcomes = run_jobs(one, [(method, repeats) for method in options.chosen(METHODS)], options)
    rows, by_steps, by_time, densities = [], {}, {}, {}
    shares = [mark / MARKS for mark in range(1, MARKS + 1)]
    for (method, _), outcome in outcomes.items():
        by_steps[method] = ([share * STEPS * PARALLEL for share in shares], outcome.divergences)
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
    return [*rows, *independent(TARGET.cell_masses(CELLS), Squares(TARGET), repeats, options.seed)]


def picture(draws: Draws, moving: bool) -> Tensor:
    """Return the masses of finer cells around the origin by the first repeat's draws."""
    first = len(draws.places) - 1 if moving else 0
    places, log_weights = draws.places[first:, 0].reshape(-1, 2), draws.log_weights[first:, 0].reshape(-1)
    return _middle(cell_masses(places, log_weights.softmax(0), TARGET.bounds, DRAWN_CELLS))


def independent(truth: Tensor, squares: Squares, repeats: int, seed: int) -> list[Row]:
    """Return the divergences of independent draws of the target, a lower limit for every sampler."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for count in (STEPS * PARALLEL // EVERY, PARTICLES):
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
