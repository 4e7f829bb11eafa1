"""The switching diffusion of two quadratic potentials: settings, stationary draws, distance to the target."""

import torch

from lightning_sgmcmc.simulation.switching_diffusion import Potentials, ornstein_uhlenbeck, switching_paths

SLOPES, CENTRES = (5.0, 15.0), (5.0, -5 / 3)
POTENTIALS = Potentials(SLOPES, CENTRES)
MEAN_SLOPE = 10.0
SWITCHING_TIMES = (10.0, 1.0, 0.1, 0.01, 0.001)
SETTLED = 3.0
GROUPS = 20


def stationary_draws(switching_time: float, chains: int, seed: int) -> torch.Tensor:
    """Return independent draws of μ^η: the index starts from its own law, and θ_0 = 0 has decayed to e^-15."""
    return switching_paths(ornstein_uhlenbeck(POTENTIALS), switching_time, [SETTLED], chains, seed).places[0]


def target_quantiles(count: int) -> torch.Tensor:
    """Return the quantiles of N(0, 0.1) at (i - 1/2)/count."""
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.special.ndtri(levels) / MEAN_SLOPE**0.5


def distances(draws: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return W₁ to N(0, 0.1), and W₁ without each of 20 groups of the draws, shape (GROUPS,).

    The distance of few draws is biased upwards, so the error uses all draws but one group at a time (jackknife).
    """
    parts = draws.view(GROUPS, -1)
    rest = [torch.cat([parts[:g], parts[g + 1 :]]).flatten() for g in range(GROUPS)]
    truth = target_quantiles(len(rest[0]))
    return wasserstein_distance(draws, target_quantiles(len(draws))), torch.tensor(
        [wasserstein_distance(one, truth) for one in rest], dtype=torch.float64
    )


def wasserstein_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return W₁ = ∫|F - G| dx between two sets of equally weighted numbers with distribution functions F and G.

    For the distance to a known law, pass as one set its quantiles at (i - 1/2)/n, i = 1, …, n.

    Args:
        first: shape (S,), finite.
        second: shape (R,), finite.

    >>> wasserstein_distance(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0]))
    2.0
    """
    from scipy.stats import wasserstein_distance as distance

    sets = [numbers.cpu() for numbers in (first, second) if numbers.dim() == 1 and len(numbers)]
    if len(sets) < 2 or not all(bool(numbers.isfinite().all()) for numbers in sets):
        raise ValueError("each set must be one-dimensional, finite and not empty")
    return float(distance(*sets))


def jackknife_error(without: torch.Tensor) -> float:
    """Return the jackknife standard error from the estimates without each group, shape (GROUPS,)."""
    return float(((len(without) - 1) * without.var(correction=0)).sqrt())
