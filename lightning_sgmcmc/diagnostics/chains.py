"""Split R-hat and effective sample sizes of several chains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_sgmcmc.silence import silenced

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
            rhat=float(arviz.rhat(halves)),
            ess_bulk=float(arviz.ess(values, method="bulk")),
            ess_tail=float(arviz.ess(values, method="tail", prob=(0.05, 0.95))),
        )


def correlation_time(values: np.ndarray) -> float:
    """Return the number of draws that are worth an independent one, (1+ρ)/(1-ρ) ≥ 1, as for AR(1).

    ρ is the autocorrelation of successive draws about their chain's mean, the mean over quantities, corrected for the
    bias -(1+4ρ)/n of n draws; the time is at most that at which half a chain has `FEWEST_EFFECTIVE` effective draws.

    Args:
        values: shape (chain, draw, quantity).

    Source: Kendall 1954 (Note on bias in the estimation of autocorrelation), for the bias.
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

    With m parts of n draws each, R̂² = (n-1)/n + F/n, and F has the law F(m-1, m·(n-1)) if the draws are independent and
    normal; rank normalisation makes them normal, and R-hat is the larger of two (of the draws, and folded). Draws of
    which t are worth an independent one have F/t with m·(n-1)/t degrees of freedom, since only the variance of a
    part's mean is t times larger.

    Args:
        chains: number of chains, each split into halves; one chain is split twice.
        draws: draws per chain.
        false_alarm_rate: the probability that chains of one law exceed the limit.
        time: t, from `correlation_time`.
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
