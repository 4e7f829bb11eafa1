"""Diagnostics of weighted samples and of chains: pure functions of tensors."""

import math
from typing import Literal

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_count
from lightning_sgmcmc.tensors import widest


def normalised_weights(log_weights: Tensor) -> Tensor:
    """Return w_j = exp(l_j)/Σ_i exp(l_i), computed in log space in float64.

    Args:
        log_weights: shape (S,), any constant offset; -inf means weight 0.

    Raises:
        ValueError: if there are no samples, one is NaN or +inf, or all are -inf.

    >>> normalised_weights(torch.tensor([0.0, 0.0, -torch.inf])).tolist()
    [0.5, 0.5, 0.0]
    """
    log_weights = widest(log_weights)
    if log_weights.numel() == 0:
        raise ValueError("log_weights has no samples to weight")
    if bool((log_weights.isnan() | (log_weights == torch.inf)).any()):
        raise ValueError("a sample's log-weight is NaN or infinite")
    if bool((log_weights == -torch.inf).all()):
        raise ValueError("all samples have weight 0")
    return log_weights.softmax(0)


def within_groups(log_weights: Tensor, groups: Tensor) -> Tensor:
    """Return log-weights normalised within each group, l_j - log Σ_{i in group of j} exp(l_i), so groups count alike.

    Chains that each learn their own π have weights with an unknown constant for each chain, which cancels here.

    Args:
        log_weights: shape (S,); -inf means weight 0, and a group with no other weight does not count.
        groups: an integer for each sample, such as its chain, shape (S,).

    Returns:
        shape (S,), float64.

    >>> within_groups(torch.tensor([0.0, 0.0, 700.0]), torch.tensor([0, 0, 1])).exp().tolist()
    [0.5, 0.5, 1.0]
    """
    log_weights = widest(log_weights)
    labels, rows = groups.unique(return_inverse=True)
    largest = log_weights.new_full((len(labels),), -torch.inf)
    largest = largest.scatter_reduce(0, rows, log_weights, "amax").nan_to_num(neginf=0.0)
    sums = torch.zeros_like(largest).index_add_(0, rows, (log_weights - largest[rows]).exp())
    return torch.where(log_weights == -torch.inf, log_weights, log_weights - (largest + sums.log())[rows])


def weight_efficiency(log_weights: Tensor) -> float:
    """Return (Σw)²/(S·Σw²) of importance weights, a share in (0, 1]; 1 for equal weights.

    S times it is Kish's effective number of the weights. It ignores the correlation of the draws.

    Args:
        log_weights: shape (S,), any constant offset.

    >>> round(weight_efficiency(torch.tensor([0.5, 0.25, 0.25]).log()), 3)
    0.889
    """
    return 1 / (len(log_weights) * float(normalised_weights(log_weights).square().sum()))


def autocorrelation(draws: Tensor, lags: int) -> Tensor:
    """Return the autocorrelation of a chain at the lags 0 … lags - 1, shape (lags, …).

        ρ_t = c_t/c_0,   c_t = n⁻¹·Σ_k (x_k - x̄)(x_{k+t} - x̄)

    Args:
        draws: consecutive draws, shape (n, …); trailing entries are treated separately.
        lags: number of lags, at most n.

    Raises:
        ValueError: for fewer than two draws, more lags than draws, or constant draws.
    """
    check_count("lags", lags)
    if len(draws) < max(2, lags):
        raise ValueError(f"{len(draws)} draws have no autocorrelation at {lags} lags")
    centred = widest(draws) - widest(draws).mean(0)
    spectrum = torch.fft.rfft(centred, 2 * len(draws), dim=0).abs().square()
    covariance = torch.fft.irfft(spectrum, dim=0)[:lags]
    if not bool((covariance[0] > 0).all()):
        raise ValueError("a constant chain has no autocorrelation")
    return covariance / covariance[0]


def autocorrelation_time(draws: Tensor) -> Tensor:
    """Return the integrated autocorrelation time 1 + 2·Σ_{t≥1} ρ_t: the number of draws worth one independent draw.

    The sums of neighbours ρ_{2j} + ρ_{2j+1} of a reversible chain are positive and decreasing; their estimates are
    made monotone and truncated at the first that is not positive.

    Args:
        draws: consecutive draws, shape (n, …); trailing entries are treated separately.

    Returns:
        shape (…); at least 1/log₁₀n. The estimate is too low for a chain shorter than about a hundred times its value.

    Raises:
        ValueError: for fewer than four draws, or constant draws.

    Source: Geyer 1992 (Practical Markov chain Monte Carlo), section 3.3, the initial monotone sequence; the lower
    bound as in Stan and ArviZ.
    """
    count = len(draws) // 2 * 2
    if count < 4:
        raise ValueError(f"an autocorrelation time needs at least four draws, got {len(draws)}")
    rho = autocorrelation(draws, count)
    pairs = rho[0::2] + rho[1::2]
    kept = (pairs > 0).cumprod(0)
    time = -1 + 2 * (pairs.cummin(0).values * kept).sum(0)
    return time.clamp(min=1 / math.log10(count))


def resample(
    log_weights: Tensor,
    count: int | None = None,
    method: Literal["systematic", "multinomial"] = "systematic",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return sorted indices of samples drawn with replacement by their importance weights, shape (count,).

    Multinomial draws are independent. Systematic ones take the quantiles (u + i)/count of the weights' distribution
    for one uniform u, so a sample of weight w is drawn ⌊count·w⌋ or ⌈count·w⌉ times: the same mean, less variance.

    Args:
        log_weights: shape (S,), any constant offset; -inf is never drawn.
        count: number of draws; None means S.
        method: "systematic" or "multinomial".
        generator: generator of the uniform numbers; None uses torch's default.

    Raises:
        ValueError: for another method, a count below 1, or weights as in `normalised_weights`.

    Source: Deng et al. 2020 (CSGLD), Algorithm 1.
    """
    check_choice("method", method, ("systematic", "multinomial"))
    check_count("count", count)
    weights = normalised_weights(log_weights.cpu())
    count = len(weights) if count is None else count
    if method == "multinomial":
        return torch.multinomial(weights, count, replacement=True, generator=generator).sort().values
    start = torch.rand((), generator=generator, dtype=torch.float64)
    places = (start + torch.arange(count, dtype=torch.float64)) / count
    cumulative = weights.cumsum(0)
    # Rounding may leave the sum below the last quantile, which then selects the last sample with a weight.
    last = int(weights.nonzero()[-1])
    return torch.searchsorted(cumulative, places, right=True).clamp(max=last)


def mode_coverage(samples: Tensor, modes: Tensor, radius: float = 0.25, least: int = 100) -> int:
    """Return the number of modes with at least `least` samples within a distance.

    Args:
        samples: shape (S, d).
        modes: shape (M, d).
        radius: the distance.
        least: the number of samples.

    Source: Zhang et al. 2020 (cSG-MCMC), appendix.
    """
    near = torch.zeros(len(modes), dtype=torch.int64)
    for part in widest(samples).split(100_000):
        near += (torch.cdist(part, widest(modes)) < radius).sum(0)
    return int((near >= least).sum())


def cell_masses(samples: Tensor, weights: Tensor, bounds: tuple[float, float], count: int) -> Tensor:
    """Return the weighted share of samples in each cell of a square grid, shape (count²,), ignoring those outside.

    Args:
        samples: shape (S, 2).
        weights: shape (S,), not negative.
        bounds: lower and upper ends of both axes.
        count: cells along each axis.
    """
    low, high = bounds
    index = ((widest(samples) - low) / (high - low) * count).floor().long()
    inside = ((index >= 0) & (index < count)).all(1)
    flat = index[inside, 0] * count + index[inside, 1]
    masses = torch.zeros(count * count, dtype=torch.float64).index_add_(0, flat, widest(weights[inside]))
    return masses / widest(weights).sum()


def divergence(truth: Tensor, estimate: Tensor, smoothing: float = 0.01) -> float:
    """Return the Kullback-Leibler divergence Σ p·log(p/q) between masses on the same cells, in nats.

    Args:
        truth: p, shape (cells,), summing to 1.
        estimate: q, shape (cells,), summing to 1 at most.
        smoothing: share of the uniform distribution mixed into q, so that an empty cell contributes a finite amount.
    """
    mixed = (1 - smoothing) * estimate + smoothing / len(estimate)
    return float(torch.xlogy(truth, truth).sum() - torch.xlogy(truth, mixed).sum())


def wasserstein_distance(first: Tensor, second: Tensor) -> float:
    """Return W₁ = ∫|F - G| dx between two sets of equally weighted numbers with distribution functions F and G.

    For the distance to a known law, pass as one set its quantiles at (i - 1/2)/n, i = 1, …, n.

    Args:
        first: shape (S,), finite.
        second: shape (R,), finite.

    Raises:
        ValueError: if a set is empty, not one-dimensional, or not finite.

    >>> wasserstein_distance(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0]))
    2.0
    """
    ordered = [widest(numbers).sort().values for numbers in (first, second) if numbers.dim() == 1 and len(numbers)]
    if len(ordered) < 2 or not all(bool(numbers.isfinite().all()) for numbers in ordered):
        raise ValueError("each set must be one-dimensional, finite and not empty")
    places = torch.cat(ordered).sort().values
    low, high = (torch.searchsorted(numbers, places[:-1], right=True) / len(numbers) for numbers in ordered)
    return float((widest((low - high).abs()) * places.diff()).sum())
