"""A mixture of two Gaussians by contour SGLD, with known π and without contour (CSGLD, Figures 1, 2 and 4).

0.4·N(-6, 1) + 0.6·N(4, 1) and 1/6·N(-6, 1) + 5/6·N(4, 1) with τ = 1, ζ = 0.75, m = 50, Δu = 1, ω = 1/(k^0.6 + 100), the
scheme of eq. (10), gradient noise of variance 0.01, ten chains; the first edge, which the paper does not give, is 2.
`full` makes the paper's 10⁷ steps, `quick` 4·10⁵. KSGLD keeps π at the truth. "bin" weights by π(J)^ζ as the paper
does, "interpolated" by Ψ(U)^ζ, for which the fixed point is exact. The paper gives pictures and no numbers.

Measured (full, 10 chains from both modes): the mean absolute error of E[x] at 10⁷ steps is 1.6 ± 0.5 by SGLD, which
hardly crosses the barrier of 12 nats, 0.064 ± 0.016 by CSGLD and 0.051 ± 0.012 by KSGLD: CSGLD has caught up with it,
as in the paper's figure. With bin weights, the paper's, it stays at 0.30 ± 0.02 (asymmetric 0.19 ± 0.01, interpolated
0.087 ± 0.010), since their fixed point is another π. The total-variation error of a π that 400 chains share is 0.014 at
ε=0.1 and 0.003 at ε=0.02 with interpolated weights, 0.11 and 0.13 with bin weights. That of a single chain's π at 10⁷
steps is 0.015 ± 0.004. At 4·10⁵ steps (quick) SGLD has an error of 4.8 ± 0.3, CSGLD 0.22 ± 0.06, KSGLD 0.15 ± 0.05, and
the bias of bin weights does not show yet (0.13 ± 0.04).
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_sgmcmc.contour import Contour, ContourRules, ContourState, DecayingStepSize, Weighting
from lightning_sgmcmc.contour.partition import EnergyPartition
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.figures.run import energy_histogram_figure, multiplier_figure
from lightning_sgmcmc.recipes.shared.figures import densities_figure, errors_figure, path_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.simulation import ContourRun, Simulation, simulate
from lightning_sgmcmc.simulation.targets import GaussianMixture


@dataclass(frozen=True)
class Settings:
    """The settings of `gaussian_mixture.yaml`.

    Attributes:
        steps, repeats: of each chain, and chains.
        lr, small_lr: ε, and a smaller one that shows its bias.
        zeta: ζ.
        gradient_noise: standard deviation of the noise on gradients.
        sharing, shared_steps: chains that learn one π together, and their steps.
    """

    steps: int
    repeats: int
    lr: float
    small_lr: float
    zeta: float
    gradient_noise: float
    sharing: int
    shared_steps: int

    @property
    def work(self) -> float:
        """The steps of all methods; chains side by side cost little more than one."""
        return float(len(TARGETS) * len(METHODS) * (self.steps + self.shared_steps))


PARTITION = EnergyPartition(first_edge=2.0, width=1.0, num_bins=50)
STEP_SIZE = DecayingStepSize(1, 0.6, 100)
METHODS = ("SGLD", "CSGLD", "CSGLD, bin weights", "KSGLD")
PICTURED = ("", "CSGLD")
TARGETS = {"": GaussianMixture.two_modes(), " asymmetric": GaussianMixture.two_modes(5 / 6)}


def learner(target: GaussianMixture, weighting: Weighting, known: bool, zeta: float) -> ContourRun:
    """Return a contour that learns π, or keeps it at the truth."""
    contour = Contour(PARTITION, ContourRules(zeta, "original", weighting=weighting))
    state = contour.known_state(true_masses(target).clamp(min=1e-300)) if known else None
    return ContourRun(contour, STEP_SIZE, state=state, learn=not known)


@functools.cache
def true_masses(target: GaussianMixture) -> torch.Tensor:
    """Return the target's mass in each bin, by quadrature."""
    return target.bin_masses(PARTITION.edges())


def chains(
    target: GaussianMixture, contour: ContourRun | None, repeats: int, settings: Settings, seed: int
) -> Simulation:
    """Run chains from both modes in turn, and record the weighted mean along the way."""
    steps, start = settings.steps, alternate_starts(repeats)
    marks = sorted({int(mark) for mark in np.geomspace(1000, steps, 13)})
    options: dict[str, Any] = {"initial": start, "observe": lambda x: x, "checkpoints": marks, "seed": seed}
    return simulate(
        target,
        lr=settings.lr,
        num_steps=steps,
        num_chains=repeats,
        contour=contour,
        gradient_noise=settings.gradient_noise,
        keep_every=max(1, steps // 200_000),
        **options,
    )


def variation(run: Simulation, contour_run: ContourRun, target: GaussianMixture) -> list[float]:
    """Return each chain's total-variation error of π."""
    assert run.contour is not None
    rows = (ContourState(*row) for row in zip(*run.contour, strict=True))
    masses = torch.stack([contour_run.contour.log_masses(row).exp() for row in rows])
    return (0.5 * (masses - true_masses(target)).abs().sum(1)).tolist()


def shared_variation(
    target: GaussianMixture, contour_run: ContourRun, lr: float, settings: Settings, seed: int
) -> float:
    """Return the total-variation error of one π that many chains learn together, so that only ε's bias remains."""
    many = replace(contour_run, shared=True)
    run = simulate(
        target,
        lr=lr,
        num_steps=settings.shared_steps,
        num_chains=settings.sharing,
        contour=many,
        gradient_noise=settings.gradient_noise,
        initial=alternate_starts(settings.sharing),
        seed=seed,
        compile=None if settings.shared_steps < 50_000 else True,
    )
    assert run.contour is not None
    return float(0.5 * (contour_run.contour.log_masses(run.contour).exp() - true_masses(target)).abs().sum())


def alternate_starts(count: int) -> torch.Tensor:
    """Return starts of chains in the two modes in turn, shape (count, 1)."""
    return torch.where(torch.arange(count) % 2 == 0, -6.0, 4.0)[:, None]


class Outcome(NamedTuple):
    """What a method gives on one of the mixtures.

    Attributes:
        errors: |error of E[x]| of each chain at the checkpoints, shape (S, C).
        checkpoints: their steps.
        variation: total-variation error of each chain's π, empty if π is not learned.
        shared: that of one π of many chains, by ε.
        run: the chains, for the pictures; None elsewhere.
    """

    errors: torch.Tensor
    checkpoints: list[int]
    variation: list[float]
    shared: dict[float, float]
    run: Simulation | None


def contour_of(method: str, target: GaussianMixture, zeta: float) -> ContourRun | None:
    """Return a method's contour."""
    if method == "SGLD":
        return None
    return learner(target, "bin" if "bin" in method else "interpolated", method == "KSGLD", zeta)


def one(suffix: str, method: str, repeats: int, settings: Settings, options: Options) -> Outcome:
    """Run a method on one of the mixtures."""
    target = TARGETS[suffix]
    contour = contour_of(method, target, settings.zeta)
    done = chains(target, contour, repeats, settings, options.seed)
    learns = contour is not None and contour.learn
    shared = {}
    if contour and learns:
        for lr in (settings.lr, settings.small_lr):
            shared[lr] = shared_variation(target, contour, lr, settings, options.seed)
    return Outcome(
        (done.averages[:, :, 0] - float(target.mean)).abs(),
        done.checkpoints.tolist(),
        variation(done, contour, target) if contour and learns else [],
        shared,
        done if (suffix, method) == PICTURED else None,
    )


def run(options: Options) -> list[Row]:
    """Run all methods on both mixtures, draw the pictures, return the table."""
    settings = read_settings(Settings, options)
    methods, repeats = options.chosen(METHODS), len(options.repeated(settings.repeats))
    jobs = list(itertools.product(TARGETS, methods, [repeats]))
    found = {job[:2]: outcome for job, outcome in run_jobs(one, jobs, options, settings).items()}
    rows: list[Row] = []
    for (suffix, method), outcome in found.items():
        steps = f"{settings.steps:.0e} steps"
        rows.append(mean_row(method + suffix, f"|error of E[x]| at {steps}", outcome.errors[-1].tolist()))
        if outcome.variation:
            rows.append(mean_row(method + suffix, f"TV error of one chain's π, ε={settings.lr:g}", outcome.variation))
        for lr, error in outcome.shared.items():
            rows.append(Row(method + suffix, f"TV error of π of {settings.sharing} chains, ε={lr:g}", error))
    for suffix in TARGETS:
        errors = {method: found[suffix, method].errors.mean(1).tolist() for method in methods}
        name = suffix.strip().replace("asymmetric", "_asymmetric")
        picture = errors_figure(found[suffix, methods[0]].checkpoints, errors, "mean absolute error of E[x]")
        save_figure(picture, options.out / f"error{name}.png")
    pictured = found[PICTURED].run if PICTURED in found else None
    if pictured is not None:
        _pictures(pictured, contour_of(PICTURED[1], TARGETS[PICTURED[0]], settings.zeta), settings.zeta, options)
    return rows


def _pictures(run: Simulation, contour_run: ContourRun | None, zeta: float, options: Options) -> None:
    target = TARGETS[PICTURED[0]]
    assert contour_run is not None
    assert run.contour is not None
    first = ContourState(*(part[0] for part in run.contour))
    centres = [PARTITION.first_edge + (i - 0.5) * PARTITION.width for i in range(PARTITION.num_bins)]
    visits, masses = first.visits.tolist(), contour_run.contour.log_masses(first).exp().tolist()
    figures = {
        "energies": energy_histogram_figure(centres, visits, masses, true_masses(target).tolist()),
        "multiplier": multiplier_figure(centres, contour_run.contour.multipliers(first, 1.0).tolist(), visits),
        "path": path_figure(
            run.steps[-20_000:].tolist(), run.positions[-20_000:, 0, 0].tolist(), run.multipliers[-20_000:, 0].tolist()
        ),
        "flattened": _flattened(run, target, zeta),
    }
    for name, figure in figures.items():
        save_figure(figure, options.out / f"{name}.png")


def _flattened(run: Simulation, target: GaussianMixture, own: float) -> Any:
    """Draw the flattened density for several ζ, and the weighted draws against the target."""
    x = torch.linspace(-11, 9, 401, dtype=torch.float64)
    density = torch.exp(-target.energy(x[:, None]))
    curves: dict[str, Sequence[float]] = {}
    for zeta in (0.5, own, 1.0):
        known = learner(target, "interpolated", known=True, zeta=zeta)
        assert known.state is not None
        place = known.contour.locate(known.state, target.energy(x[:, None]), 1.0, PARTITION.edges())
        flat = density * torch.exp(-known.contour.log_weight(place.log_density))
        curves[f"flattened, ζ={zeta}"] = (flat / flat.sum() * 20).tolist()
    weights = run.log_weights.exp().reshape(-1).numpy()
    counts, edges = np.histogram(run.positions.reshape(-1).numpy(), bins=100, range=(-11, 9), weights=weights)
    weighted = counts / weights.sum() / (edges[1] - edges[0])
    curves["weighted draws"] = np.interp(x.numpy(), (edges[1:] + edges[:-1]) / 2, weighted).tolist()
    return densities_figure(x.tolist(), density.tolist(), curves)
