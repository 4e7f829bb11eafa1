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

from typing import NamedTuple

import torch

from lightning_sgmcmc.contour import Contour, ContourRules, DecayingStepSize
from lightning_sgmcmc.contour.partition import EnergyPartition
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.figures.targets import estimates_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.simulation import ContourRun, simulate
from lightning_sgmcmc.simulation.targets import GaussianMixture

REPEATS = 100
PARALLEL = 10
STEPS = {"quick": 100_000, "full": 1_000_000}
LR = 0.1
GRADIENT_NOISE = 0.1
ALPHA = 0.6
RULES = Contour(EnergyPartition(first_edge=2.0, width=1.0, num_bins=50), ContourRules(0.9, "scalable"))
STEP_SIZE = DecayingStepSize(1, ALPHA, 100)
LEAST_MASS = 1e-3
"""Bins with less mass are excluded from the geometric mean of the bins' ratios; they do not affect the sum."""
DRAWN_BINS = 9
BOOTSTRAPS = 4000


class Ratio(NamedTuple):
    """A ratio of variances with the 95 % interval of its bootstrap."""

    value: float
    low: float
    high: float


def estimates(interacting: int, steps: int, options: Options) -> torch.Tensor:
    """Return the estimated masses of all repeats, shape (REPEATS, m).

    Args:
        interacting: number of chains that share one π.
        steps: steps of each chain.
        options: the recipe's.
    """
    chains = REPEATS * interacting
    groups = ContourRun(RULES, STEP_SIZE, shared=True, groups=REPEATS)
    run = simulate(
        GaussianMixture.two_modes(),
        lr=LR,
        num_steps=steps,
        num_chains=chains,
        contour=groups if interacting > 1 else ContourRun(RULES, STEP_SIZE),
        gradient_noise=GRADIENT_NOISE,
        initial=torch.where(torch.arange(chains) % 2 == 0, -6.0, 4.0)[:, None],
        seed=options.seed,
        compile=None if steps < 50_000 else True,
    )
    assert run.contour is not None
    return RULES.log_masses(run.contour).exp()


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
    steps = STEPS[options.scale]
    truth = GaussianMixture.two_modes().bin_masses(RULES.partition.edges())
    holding = truth >= LEAST_MASS
    methods = {f"ICSGLD×P{PARALLEL}": (PARALLEL, steps), f"CSGLD×T{PARALLEL}": (1, PARALLEL * steps)}
    found = run_jobs(estimates, list(methods.values()), options)
    masses = {name: found[setting] for name, setting in methods.items()}
    rows = []
    for name, own in masses.items():
        scatter = own.std(0)
        first = holding.nonzero()[:3, 0].tolist()
        rows += [mean_row(name, f"mass of bin {i + 1}", own[:, i].tolist()) for i in first]
        rows.append(Row(name, "TV error of the mean π", float(0.5 * (own.mean(0) - truth).abs().sum())))
        rows.append(Row(name, "variance of π, summed over bins", float(scatter.square().sum())))
    interacting, alone = masses.values()
    ratio = summed_ratio(interacting, alone, options.seed)
    by_bin = (interacting.var(0) / alone.var(0))[holding].log().mean().exp()
    expected = STEP_SIZE.at(steps) / STEP_SIZE.at(PARALLEL * steps) / PARALLEL
    rows += [
        Row("ratio of variances", "of the sums over bins", ratio.value, None, PARALLEL ** (ALPHA - 1)),
        Row("ratio of variances", "2.5 % of its bootstrap", ratio.low),
        Row("ratio of variances", "97.5 % of its bootstrap", ratio.high),
        Row("ratio of variances", f"geometric mean over bins of mass ≥ {LEAST_MASS}", float(by_bin)),
        Row("ratio of variances", "theory at this K, ω_K/(P·ω_PK)", expected),
    ]
    centres = (RULES.partition.edges() - 0.5 * RULES.partition.width)[:DRAWN_BINS].tolist()
    drawn = {name: found[:, :DRAWN_BINS].numpy() for name, found in masses.items()}
    save_figure(estimates_figure(centres, truth[:DRAWN_BINS].tolist(), drawn), options.out / "estimates.png")
    return rows
