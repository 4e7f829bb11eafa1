"""The switching diffusion (SGLDiff) on one-dimensional quadratic potentials, simulated exactly, without a time step.

With Φ_i(θ) = a_i/2·(θ - b_i)² each piece between two jumps of the data index is linear. Given the jumps, the position
at any time is therefore Gaussian, with mean and covariance in closed form; noise is drawn only at the requested times.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count, check_positive
from lightning_sgmcmc.seeding import derive_seed


class Potentials:
    """Quadratic potentials Φ_i(θ) = a_i/2·(θ - b_i)² of S data indices, and the temperature of the diffusion on them.

    Args:
        slopes: a_i > 0, shape (S,).
        centres: b_i, shape (S,).
        inverse_temperature: β > 0.

    Raises:
        ValueError: for numbers out of range or incompatible shapes.
    """

    def __init__(
        self, slopes: Tensor | Sequence[float], centres: Tensor | Sequence[float], inverse_temperature: float = 1.0
    ) -> None:
        a, b = (torch.as_tensor(values, dtype=torch.float64) for values in (slopes, centres))
        if a.dim() != 1 or a.shape != b.shape or len(a) == 0:
            raise ValueError(f"slopes and centres must share a shape (S,), got {tuple(a.shape)} and {tuple(b.shape)}")
        if not bool(((a > 0) & a.isfinite() & b.isfinite()).all()):
            raise ValueError("slopes must be positive, and slopes and centres finite")
        check_positive("inverse_temperature", inverse_temperature)
        self.slopes = a
        self.centres = b
        self.inverse_temperature = inverse_temperature


class SwitchingPaths(NamedTuple):
    """Positions and indices of chains at the requested times.

    `places` has shape (T, C), or (T, C, 2) for two variables, in float64; `states`, the indices i, has shape (T, C).
    """

    places: Tensor
    states: Tensor


class LinearDiffusions(NamedTuple):
    """Linear diffusions dz = -A_i·(z - m_i)dt + noise of S data indices i, whose stationary covariances are Σ_i.

    A is `drifts`, of shape (S, d, d), m `means`, of shape (S, d), and Σ `covariances`, of shape (S, d, d). With
    E = exp(-A_i·t) a time t takes a mean m to m_i + E(m - m_i) and a covariance C to Σ_i + E(C - Σ_i)Eᵀ.
    """

    drifts: Tensor
    means: Tensor
    covariances: Tensor

    def advance(self, states: Tensor, mean: Tensor, covariance: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean (C, d) and covariance (C, d, d) after a time (C,)."""
        centre, limit = self.means[states], self.covariances[states]
        factor = self._exponential(states, time)
        moved = (factor @ (mean - centre)[..., None])[..., 0]
        return centre + moved, limit + factor @ (covariance - limit) @ factor.mT

    def _exponential(self, states: Tensor, time: Tensor) -> Tensor:
        """Return exp(-A_i·t), shape (C, d, d), for d = 1 or 2.

        For d = 2 with s = -tr(A)/2 and B = -A - s·I, whose square is q²·I, it is e^{st}·(cosh(qt)·I + sinh(qt)/q·B).
        """
        drifts = self.drifts[states]
        if drifts.shape[-1] == 1:
            return torch.exp(-drifts * time[:, None, None])
        half = -(drifts[:, 0, 0] + drifts[:, 1, 1]) / 2
        rest = -drifts - half[:, None, None] * torch.eye(2, dtype=torch.float64)
        square = rest[:, 0, 0].square() + rest[:, 0, 1] * rest[:, 1, 0]
        root = square.abs().sqrt()
        angle = root * time
        # Both growing factors are put inside e^{st}, where they cannot overflow: s + q < 0.
        larger = torch.exp((half + root) * time)
        swings = torch.exp(half * time)
        even = torch.where(square < 0, swings * angle.cos(), larger * (1 + torch.exp(-2 * angle)) / 2)
        twice = (2 * angle).clamp(min=1e-300)
        odd = torch.where(square < 0, swings * torch.sinc(angle / torch.pi), larger * -torch.expm1(-twice) / twice)
        return even[:, None, None] * torch.eye(2, dtype=torch.float64) + (odd * time)[:, None, None] * rest


def ornstein_uhlenbeck(potentials: Potentials) -> LinearDiffusions:
    """Return dθ_t = -a_i·(θ_t - b_i)dt + √(2/β) dW_t.

    Source: Jin, Liu & Latz 2023 (SGLDiff), eq. (1.4) and (4.1), Figure 1.2.
    """
    a, b, inverse_temperature = potentials.slopes, potentials.centres, potentials.inverse_temperature
    return LinearDiffusions(a[:, None, None], b[:, None], (1 / (inverse_temperature * a))[:, None, None])


def underdamped(potentials: Potentials, friction: float = 1.0) -> LinearDiffusions:
    """Return dX_t = V_t dt, dV_t = -γ·V_t dt - a_i·(X_t - b_i)dt + √(2γ/β) dW_t.

    Its places are (X, V). With one index its stationary law is N(b, 1/(βa)) × N(0, 1/β). The paper's noise √2·dW_t is
    that of β = γ.

    Args:
        potentials: a, b and β.
        friction: γ > 0.

    Raises:
        ValueError: if the friction is not a positive finite number.

    Source: Jin, Liu & Latz 2023 (SGLDiff), section 4.1, Momentum.
    """
    a, b, inverse_temperature = potentials.slopes, potentials.centres, potentials.inverse_temperature
    check_positive("friction", friction)
    drift = torch.zeros(len(a), 2, 2, dtype=torch.float64)
    drift[:, 0, 1], drift[:, 1, 0], drift[:, 1, 1] = -1, a, friction
    variances = torch.stack([1 / a, torch.ones_like(a)], 1) / inverse_temperature
    return LinearDiffusions(drift, torch.stack([b, torch.zeros_like(b)], 1), variances.diag_embed())


def coupled_ornstein_uhlenbeck(potentials: Potentials) -> LinearDiffusions:
    """Return the switching diffusion θ and the one with the mean potential, ζ, on the same Brownian path.

        dθ_t = -a_i·(θ_t - b_i)dt + √(2/β) dW_t,   dζ_t = -ā·(ζ_t - b̄)dt + √(2/β) dW_t,

    with ā the mean of a and b̄ that of a·b over ā. Its places are (θ, ζ).

    Source: Jin, Liu & Latz 2023 (SGLDiff), Theorem 1.1.
    """
    a, b, inverse_temperature = potentials.slopes, potentials.centres, potentials.inverse_temperature
    mean_slope = a.mean()
    rates = torch.stack([a, mean_slope.expand_as(a)], 1)
    means = torch.stack([b, ((a * b).mean() / mean_slope).expand_as(b)], 1)
    covariances = 2 / inverse_temperature / (rates[:, :, None] + rates[:, None, :])
    return LinearDiffusions(rates.diag_embed(), means, covariances)


def switching_paths(
    diffusions: LinearDiffusions,
    switching_time: float,
    times: Tensor | Sequence[float],
    num_chains: int,
    seed: int = 0,
    initial: Tensor | float = 0.0,
) -> SwitchingPaths:
    """Run the diffusions with i = i(t/η), which jumps to each other index at rate 1.

    Args:
        diffusions: one for each index: `ornstein_uhlenbeck`, `underdamped` or `coupled_ornstein_uhlenbeck`.
        switching_time: η > 0; an index is held for an exponential time with mean η/(S-1).
        times: of the places, rising and not negative, shape (T,).
        num_chains: C.
        seed: of jumps and noise, which have separate streams; paths depend on the number of chains, too.
        initial: the first place: a number for all variables, or of shape (C,) for one variable, and (2,) or (C, 2) for
            two; i(0) is uniform.

    Raises:
        ValueError: for numbers out of range or shapes that do not fit.

    Source: Jin, Liu & Latz 2023 (SGLDiff), eq. (1.4).
    """
    count, dimension = diffusions.means.shape
    place, now = _start(initial, num_chains, dimension), 0.0
    check_positive("switching_time", switching_time)
    when = torch.as_tensor(times, dtype=torch.float64)
    if when.dim() != 1 or bool((when.diff(prepend=when.new_zeros(1)) < 0).any()) or not bool(when.isfinite().all()):
        raise ValueError("times must be finite, increasing, not negative, and have shape (T,)")
    noise = torch.Generator().manual_seed(derive_seed(seed, "noise"))
    jumps = _Jumps(count, num_chains, switching_time, seed)
    places, states = [], []
    for time in when.tolist():
        mean, covariance = place, place.new_zeros(*place.shape, dimension)
        remaining = torch.full((num_chains,), time - now, dtype=torch.float64)
        while bool((remaining > 0).any()):
            step = torch.minimum(jumps.left, remaining)
            mean, covariance = diffusions.advance(jumps.states, mean, covariance, step)
            remaining = remaining - step
            jumps.advance_(step)
        draws = torch.randn(place.shape, generator=noise, dtype=torch.float64)
        place, now = mean + (_lower(covariance) @ draws[..., None])[..., 0], time
        places.append(place[:, 0] if dimension == 1 else place)
        states.append(jumps.states)
    return SwitchingPaths(torch.stack(places), torch.stack(states))


def stationary_moments(potentials: Potentials, switching_time: float) -> tuple[float, float]:
    """Return the exact mean and variance of the switching diffusion's stationary law μ^η.

    They are the sums over i of u_i = E[θ·1{i}] and w_i = E[θ²·1{i}], which solve the linear equations

        0 = a_i·(b_i/S - u_i) + Σ_j (u_j - u_i)/η,   0 = 2·a_i·(b_i·u_i - w_i) + 2/(β·S) + Σ_j (w_j - w_i)/η.

    Args:
        potentials: a, b and β.
        switching_time: η > 0.

    Raises:
        ValueError: for numbers out of range or shapes that do not fit.

    Source: the generator of Jin, Liu & Latz 2023 (SGLDiff), eq. (1.4) and (4.1), applied to θ and θ².
    """
    a, b, inverse_temperature = potentials.slopes, potentials.centres, potentials.inverse_temperature
    check_positive("switching_time", switching_time)
    count = len(a)
    mixing = (count * torch.eye(count, dtype=torch.float64) - 1) / switching_time
    first = torch.linalg.solve(torch.diag(a) + mixing, a * b / count)
    second = torch.linalg.solve(torch.diag(2 * a) + mixing, 2 * a * b * first + 2 / (inverse_temperature * count))
    mean = float(first.sum())
    return mean, float(second.sum()) - mean**2


class _Jumps:
    """The data index of each chain, and the time until it jumps."""

    def __init__(self, count: int, chains: int, switching_time: float, seed: int) -> None:
        self._count = count
        self._rate = (count - 1) / switching_time
        self._generator = torch.Generator().manual_seed(derive_seed(seed, "switching"))
        self.states = torch.randint(count, (chains,), generator=self._generator)
        self.left = self._holding_times(chains)

    def _holding_times(self, chains: int) -> Tensor:
        times = torch.empty(chains, dtype=torch.float64)
        if self._count == 1:
            return times.fill_(torch.inf)
        return times.exponential_(self._rate, generator=self._generator)

    def advance_(self, time: Tensor) -> None:
        """Advance by a time (C,), at most `left`; chains with no time left jump."""
        self.left = self.left - time
        jumps = self.left <= 0
        if bool(jumps.any()):
            among = int(jumps.sum())
            steps = torch.randint(1, self._count, (among,), generator=self._generator)
            self.states = self.states.clone()
            self.states[jumps] = (self.states[jumps] + steps) % self._count
            self.left[jumps] = self._holding_times(among)


def _lower(covariance: Tensor) -> Tensor:
    """Return L with LLᵀ = C for d = 1 or 2; short times leave covariances that are singular up to rounding."""
    lower = torch.zeros_like(covariance)
    lower[:, 0, 0] = covariance[:, 0, 0].clamp(min=0).sqrt()
    if covariance.shape[-1] == 2:
        lower[:, 1, 0] = covariance[:, 1, 0] / lower[:, 0, 0].clamp(min=1e-150)
        lower[:, 1, 1] = (covariance[:, 1, 1] - lower[:, 1, 0].square()).clamp(min=0).sqrt()
    return lower


def _start(initial: Tensor | float, chains: int, dimension: int) -> Tensor:
    check_count("num_chains", chains)
    start = torch.as_tensor(initial, dtype=torch.float64)
    if dimension == 1 and start.dim() == 1:
        start = start[:, None]
    try:
        return start.expand(chains, dimension).clone()
    except RuntimeError:
        raise ValueError(f"initial of shape {tuple(start.shape)} does not fit {chains} chains") from None
