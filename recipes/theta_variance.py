"""The variance of the estimate of π: ten interacting chains against one ten times as long (ICSGLD, Figure 7).

The mixture 0.4·N(-6, 1) + 0.6·N(4, 1) with ζ = 0.9, Δu = 1, the scalable scheme with interpolated weights, and the rest
as in `gaussian_mixture`: ε = 0.1, τ = 1, m = 50 from 2 nats, ω_k = 1/(k^0.6 + 100), gradient noise of variance 0.01.
ICSGLD×P10: ten chains share one π for K steps. CSGLD×T10: one chain alone makes 10·K, the same number of gradients.
`full` has the paper's K = 10⁶, `quick` 10⁵. The paper repeats 10 times; the ratio of two variances of 10 repeats is
known to a factor of 4 only, so there are 100 here, which cost little because they run side by side. Chains start in the
two modes alternately. An estimate is the masses that π implies at the end (π^ζ, normalised, as the paper draws).

Theory (Corollary 1): ω_k^{-1/2}(θ_k - θ̂) tends to N(0, Σ) with one chain and to N(0, Σ/P) with P, so that the ratio of
the variances is ω_K/(P·ω_PK), which tends to P^{α-1} = 10^-0.4 = 0.40 for the exponent α = 0.6. At finite K the offset
of 100 in ω_k still counts: 0.37 (quick), 0.39 (full). Conditions: 1/2 < α < 1, chains that are independent given π, and
a K by which every short chain is near its stationary law and π near its fixed point.

Measured, the ratio of variances summed over the bins with the 95 % interval of its bootstrap over repeats: 0.32 (0.22
to 0.47) quick, 0.33 (0.22 to 0.49) full; the geometric mean over the six bins of mass ≥ 0.001 is 0.29 and 0.33. So ten
interacting chains have a third of the variance, 1 is excluded, and the theory's 0.37 and 0.39 lie within the intervals,
above their middles: 100 repeats cannot tell whether the difference is real. The mean of π is the same by both within
its error (first bin, full: 0.5858 ± 0.0006 and 0.5860 ± 0.0010), and not the truth (0.602): a total-variation error of
0.016 to 0.017 that ε = 0.1 leaves, see `gaussian_mixture`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightning_sgmcmc.contour import Contour, ContourRules, DecayingStepSize
from lightning_sgmcmc.contour.partition import EnergyPartition
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.recipes.shared.figures import estimates_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.simulation import ContourRun, simulate
from lightning_sgmcmc.simulation.targets import GaussianMixture

METHODS = ("ICSGLD×P10", "CSGLD×T10")
LEAST_MASS = 1e-3
"""Bins with less mass are excluded from the geometric mean of the bins' ratios; they do not affect the sum."""
DRAWN_BINS = 9
BOOTSTRAPS = 4000


@dataclass(frozen=True)
class Settings:
    """The settings of `theta_variance.yaml`.

    Attributes:
        steps: K, the steps of each of the interacting chains.
        repeats: repeats of both methods.
        parallel: interacting chains, and how many times longer the single one is.
        lr: ε.
        gradient_noise: standard deviation of the noise on gradients.
        zeta: ζ.
        exponent: α of ω_k = 1/(k^α + 100).
        first_edge, width, bins: of the partition of energies, in nats.
    """

    steps: int
    repeats: int
    parallel: int
    lr: float
    gradient_noise: float
    zeta: float
    exponent: float
    first_edge: float
    width: float
    bins: int

    @property
    def work(self) -> float:
        """The gradients of both methods."""
        return float(2 * self.steps * self.parallel * self.repeats)

    @property
    def contour(self) -> Contour:
        """The contour of both methods."""
        return Contour(EnergyPartition(self.first_edge, self.width, self.bins), ContourRules(self.zeta, "scalable"))

    @property
    def step_size(self) -> DecayingStepSize:
        """The step sizes ω_k."""
        return DecayingStepSize(1, self.exponent, 100)


class Ratio(NamedTuple):
    """A ratio of variances with the 95 % interval of its bootstrap."""

    value: float
    low: float
    high: float


def estimates(method: str, repeats: int, settings: Settings, options: Options) -> torch.Tensor:
    """Return the estimated masses of all repeats, shape (repeats, m).

    Args:
        method: the interacting chains, or the single one.
        repeats: their number.
        settings: the recipe's.
        options: the recipe's.
    """
    interacting = settings.parallel if method == METHODS[0] else 1
    steps, rules = settings.steps * settings.parallel // interacting, settings.contour
    chains = repeats * interacting
    groups = ContourRun(rules, settings.step_size, shared=True, groups=repeats)
    run = simulate(
        GaussianMixture.two_modes(),
        lr=settings.lr,
        num_steps=steps,
        num_chains=chains,
        contour=groups if interacting > 1 else ContourRun(rules, settings.step_size),
        gradient_noise=settings.gradient_noise,
        initial=torch.where(torch.arange(chains) % 2 == 0, -6.0, 4.0)[:, None],
        seed=options.seed,
        compile=None if steps < 50_000 else True,
    )
    assert run.contour is not None
    return rules.log_masses(run.contour).exp()


def summed_ratio(shorter: torch.Tensor, longer: torch.Tensor, seed: int) -> Ratio:
    """Return the ratio of the variances, each summed over the bins, with its bootstrap over repeats.

    Args:
        shorter: estimates of the numerator, shape (R, m).
        longer: estimates of the denominator.
        seed: seed of the bootstrap.
    """
    generator = torch.Generator().manual_seed(seed)

    def variances(masses: torch.Tensor) -> torch.Tensor:
        chosen = torch.randint(len(masses), (BOOTSTRAPS, len(masses)), generator=generator)
        return torch.stack([masses[row].var(0).sum() for row in chosen])

    value = float(shorter.var(0).sum() / longer.var(0).sum())
    low, high = (variances(shorter) / variances(longer)).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return Ratio(value, low, high)


def run(options: Options) -> list[Row]:
    """Run both methods, draw their estimates, return the table."""
    settings = read_settings(Settings, options)
    repeats, partition = len(options.repeated(settings.repeats)), settings.contour.partition
    truth = GaussianMixture.two_modes().bin_masses(partition.edges())
    holding = truth >= LEAST_MASS
    found = run_jobs(estimates, [(method, repeats) for method in options.chosen(METHODS)], options, settings)
    masses = {method: own for (method, _), own in found.items()}
    rows: list[Row] = []
    for name, own in masses.items():
        scatter = own.std(0)
        first = holding.nonzero()[:3, 0].tolist()
        rows += [mean_row(name, f"mass of bin {i + 1}", own[:, i].tolist()) for i in first]
        rows.append(Row(name, "TV error of the mean π", float(0.5 * (own.mean(0) - truth).abs().sum())))
        rows.append(Row(name, "variance of π, summed over bins", float(scatter.square().sum())))
    if len(masses) == len(METHODS):
        rows += ratios(masses[METHODS[0]], masses[METHODS[1]], holding, settings, options.seed)
    centres = (partition.edges() - 0.5 * partition.width)[:DRAWN_BINS].tolist()
    drawn = {name: found[:, :DRAWN_BINS].numpy() for name, found in masses.items()}
    save_figure(estimates_figure(centres, truth[:DRAWN_BINS].tolist(), drawn), options.out / "estimates.png")
    return rows


def ratios(
    interacting: torch.Tensor, alone: torch.Tensor, holding: torch.Tensor, settings: Settings, seed: int
) -> list[Row]:
    """Return the rows of the ratio of variances.

    Args:
        interacting, alone: the methods' estimates, shape (repeats, m).
        holding: the bins with mass, shape (m,).
        settings: the recipe's.
        seed: of the bootstrap.
    """
    steps, parallel = settings.steps, settings.parallel
    ratio = summed_ratio(interacting, alone, seed)
    by_bin = (interacting.var(0) / alone.var(0))[holding].log().mean().exp()
    expected = settings.step_size.at(steps) / settings.step_size.at(parallel * steps) / parallel
    return [
        Row("ratio of variances", "of the sums over bins", ratio.value, None, parallel ** (settings.exponent - 1)),
        Row("ratio of variances", "2.5 % of its bootstrap", ratio.low),
        Row("ratio of variances", "97.5 % of its bootstrap", ratio.high),
        Row("ratio of variances", f"geometric mean over bins of mass ≥ {LEAST_MASS}", float(by_bin)),
        Row("ratio of variances", "theory at this K, ω_K/(P·ω_PK)", expected),
    ]
