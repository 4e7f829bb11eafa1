"""Diagnostics of draws: weighted samples, chains, batch means and the bootstrap. Pure functions of tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_count
from lightning_sgmcmc.process import silenced
from lightning_sgmcmc.tensors import along_first_axis, widest


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


# -- chains ------------------------------------------------------------------------------------------------------------

MIXED = 1.05
"""No R-hat below this is large."""
FEWEST_EFFECTIVE = 5
"""Effective draws that half a chain should have; a slower one is not excused by its autocorrelation."""


@dataclass(frozen=True)
class ChainGrid:
    """Positions of samples in an array of shape (chain, draw).

    Attributes:
        chains: the chains' global indices.
        positions: index of each sample in the store's order, shape (chain, draw).
        dropped: number of samples left out of the array.
    """

    chains: list[int]
    positions: np.ndarray
    dropped: int

    @classmethod
    def of_chains(cls, chains_of_samples: Sequence[int]) -> "ChainGrid":
        """Return the grid for samples of several chains; longer chains keep their newest draws.

        Args:
            chains_of_samples: the chain of each sample in the store's order, at least one.
        """
        by_chain: dict[int, list[int]] = {}
        for position, chain in enumerate(chains_of_samples):
            by_chain.setdefault(chain, []).append(position)
        chains = sorted(by_chain)
        draws = min(len(positions) for positions in by_chain.values())
        positions = np.array([by_chain[chain][-draws:] for chain in chains])
        return cls(chains, positions, len(chains_of_samples) - positions.size)

    @property
    def draws(self) -> int:
        """Number of draws of each chain."""
        return int(self.positions.shape[1])

    def arrange(self, values: Any) -> np.ndarray:
        """Arrange one value per sample, shape (S, …), as an array of shape (chain, draw, …)."""
        return np.asarray(values)[self.positions]


@dataclass(frozen=True)
class ChainDiagnostics:
    """R-hat and effective sample sizes of one quantity; NaN for too few or constant draws.

    Attributes:
        rhat: rank-normalised split R-hat.
        ess_bulk: effective number of draws for the centre of the distribution.
        ess_tail: the smaller of those for its 5 % and 95 % quantiles.

    Source: Vehtari et al. 2021.
    """

    rhat: float
    ess_bulk: float
    ess_tail: float


def chain_diagnostics(values: np.ndarray) -> ChainDiagnostics:
    """Return ArviZ's diagnostics of a quantity along chains.

    Args:
        values: shape (chain, draw). For a single chain, R-hat compares its halves; it cannot detect
            other modes.

    >>> draws = np.random.default_rng(0).normal(size=(4, 500))
    >>> apart = draws + np.arange(4)[:, None]  # four chains that do not mix
    >>> bool(chain_diagnostics(draws).rhat < 1.01), bool(chain_diagnostics(apart).rhat > 1.5)
    (True, True)
    """
    arviz = import_arviz()
    values = np.asarray(values, dtype=np.float64)
    half = values.shape[1] // 2
    halves = values[:, : 2 * half].reshape(2, half) if len(values) == 1 else values
    if halves.shape[1] < 4 or not np.isfinite(values).all() or np.ptp(values) == 0:
        return ChainDiagnostics(math.nan, math.nan, math.nan)
    with silenced("arviz"):  # its messages about short chains, whose result is NaN
        return ChainDiagnostics(
            rhat=number(arviz.rhat(halves)),
            ess_bulk=number(arviz.ess(values, method="bulk")),
            ess_tail=number(arviz.ess(values, method="tail", prob=(0.05, 0.95))),
        )


def number(found: Any) -> float:
    """Return what ArviZ finds of one quantity, which with Numba installed is an array of one number."""
    return float(np.ravel(found)[0])


def correlation_time(values: np.ndarray) -> float:
    """Return the number of draws (chain, draw, quantity) worth an independent one, (1+ρ)/(1-ρ) ≥ 1, as for AR(1).

    ρ is the autocorrelation of successive draws about their chain's mean, the mean over quantities, corrected for the
    bias -(1+4ρ)/n of n draws (Kendall 1954); half a chain has at least `FEWEST_EFFECTIVE` effective draws.
    """
    draws = values.shape[1]
    most = max(1.0, draws / 2 / FEWEST_EFFECTIVE)
    centred = np.asarray(values, dtype=np.float64) - np.mean(values, 1, dtype=np.float64, keepdims=True)
    squares = (centred**2).sum((0, 1))
    moves = squares > 0
    if draws <= 2 * FEWEST_EFFECTIVE or not np.isfinite(squares).all() or not moves.any():
        return 1.0
    found = float(((centred[:, 1:] * centred[:, :-1]).sum((0, 1))[moves] / squares[moves]).mean())
    rho = (found + 1 / draws) / (1 - 4 / draws)
    return min(max((1 + rho) / (1 - rho), 1.0), most) if rho < 1 else most


def rhat_limit(chains: int, draws: int, false_alarm_rate: float, time: float = 1.0) -> float:
    """Return the upper limit of R-hat: 1.05, or for few draws the quantile that chains of one law rarely exceed.

    With m parts of n draws each, R̂² = (n-1)/n + F/n, and F has the law F(m-1, m·(n-1)) for independent normal draws,
    which rank normalisation makes; R-hat is the larger of two. Draws of which t = `time` are worth an independent one
    have F/t with m·(n-1)/t degrees of freedom. One chain is split twice, several into halves.
    """
    from scipy.special import fdtri

    parts, length = (4, draws // 4) if chains == 1 else (2 * chains, draws // 2)
    if length < 2:
        return math.inf
    freedom = max(parts * (length - 1) / time, 2.0)
    quantile = time * float(fdtri(parts - 1, freedom, 1 - false_alarm_rate / 2))
    return max(MIXED, math.sqrt((length - 1 + quantile) / length))


def import_arviz() -> Any:
    """Return the module `arviz`, whose import is slow and warns about its next version."""
    with silenced():
        import arviz
    return arviz


# -- means of batches of steps -----------------------------------------------------------------------------------------

MAX_BATCHES = 40


class BatchMeans:
    """Means of consecutive batches of a stream of vectors, on the stream's device.

    There are at most `limit` batches: when all are full, neighbours are merged and the batch length doubles, so batches
    outgrow any autocorrelation in constant memory.
    """

    def __init__(self, length: int, like: Tensor, limit: int = MAX_BATCHES) -> None:
        self._sums = torch.zeros(limit, length, dtype=like.dtype, device=like.device)
        self._counts = [0] * limit
        self._limit, self._size, self._last = limit, 1, 0

    def add(self, values: Tensor) -> None:
        """Add the next vector."""
        self._sums[self._last].add_(values)
        self._counts[self._last] += 1
        if self._counts[self._last] < self._size:
            return
        self._last += 1
        if self._last == self._limit:
            half = self._limit // 2
            merged = self._sums[0::2] + self._sums[1::2]
            self._sums.zero_()
            self._sums[:half] = merged
            self._counts = [self._size * 2] * half + [0] * half
            self._last, self._size = half, self._size * 2

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, lengths and positions of the batches."""
        return {"sums": self._sums, "counts": list(self._counts), "size": self._size, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._sums.copy_(state["sums"])
        self._counts, self._size, self._last = list(state["counts"]), state["size"], state["last"]

    def full(self) -> tuple[Tensor, Tensor]:
        """Return the means (B, length) and the lengths (B,) of the full batches, on the CPU in float64."""
        counts = torch.tensor(self._counts[: self._last], dtype=torch.float64)
        return self._sums[: self._last].cpu().double() / counts[:, None], counts


def without_warm_up(means: Tensor, counts: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the batches without those of the first `share` of the steps."""
    keep = counts.cumsum(0) - counts >= share * counts.sum()
    return means[keep], counts[keep]


def merge_batches(means: Tensor, counts: Tensor, limit: int = MAX_BATCHES) -> tuple[Tensor, Tensor]:
    """Merge neighbouring batches until there are at most `limit`, and return them."""
    while len(counts) > limit:
        if len(counts) % 2:
            means, counts = torch.cat([means, means[-1:] * 0]), torch.cat([counts, counts[-1:] * 0])
        pairs = counts.reshape(-1, 2)
        counts = pairs.sum(1)
        means = (means.reshape(len(counts), 2, -1) * pairs[..., None]).sum(1) / counts[:, None]
    return means, counts


def mean_and_error(means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over weighted batches (B, …), B ≥ 2, and its error, with a positive correlation of neighbours."""
    weights = along_first_axis(counts / counts.sum(), means.dim())
    mean = (weights * means).sum(0)
    deviations = weights * (means - mean)
    neighbours = 2 * (deviations[1:] * deviations[:-1]).sum(0).clamp(min=0)
    batches = len(counts)
    return mean, ((deviations.square().sum(0) + neighbours) * batches / (batches - 1)).sqrt()


def student_quantile(probability: float, dof: int) -> float:
    """Return the upper quantile of Student's t, exceeded with the given probability."""
    from scipy.special import stdtrit

    return float(-stdtrit(dof, probability))


def chi_square_interval(mean: float, error: float, probability: float, dof: int) -> tuple[float, float]:
    """Return the interval of a mean of squares, from chi-square with the degrees of freedom implied by its error.

        ν = 2·(mean/error)²,   [ν·mean/χ²_ν(1-p), ν·mean/χ²_ν(p)],   p a miss on either side

    The error's own degrees of freedom, `dof`, widen it as in Student's t.
    """
    from scipy.special import chdtri, ndtri

    widened = error * student_quantile(probability, dof) / float(-ndtri(probability))
    nu = min(2 * (mean / widened) ** 2, 1e12) if widened > 0 else 1e12
    return nu * mean / float(chdtri(nu, probability)), nu * mean / max(float(chdtri(nu, 1 - probability)), 1e-300)


# -- bootstrap ---------------------------------------------------------------------------------------------------------

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
CHUNK = 2**22
"""Resampled values that are held at once."""
MOST_BLOCKS = 4000
"""More data than this are resampled in blocks, so that time is bounded."""
RESAMPLES = 2000
CONFIDENCE = 0.95


def resampled_means(values: Array, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """Return the means (m, B) of resampled data (m, n) in an order without meaning, paired over the m quantities.

    Source: Efron & Tibshirani 1993, chapter 6.
    """
    sums = np.concatenate([values, np.ones_like(values[:1])])  # the last row is the sizes of data or blocks
    rows, count = sums.shape
    if count > MOST_BLOCKS:  # of sizes that differ by at most 1
        sums, count = np.add.reduceat(sums, np.arange(MOST_BLOCKS) * count // MOST_BLOCKS, axis=1), MOST_BLOCKS
    generator = np.random.default_rng(seed)
    at_once = max(CHUNK // (rows * count), 1)
    parts = []
    for start in range(0, resamples, at_once):
        indices = generator.integers(count, size=(min(at_once, resamples - start), count))
        drawn = sums.take(indices, axis=1).sum(-1)
        parts.append(drawn[:-1] / drawn[-1])
    return np.concatenate(parts, 1)


def percentile_interval(draws: Array, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the central interval of bootstrap draws, shape (B,); NaN if one is not finite.

    >>> percentile_interval(np.arange(101.0), confidence=0.5)
    (25.0, 75.0)
    """
    if not np.isfinite(draws).all():
        return float("nan"), float("nan")
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
