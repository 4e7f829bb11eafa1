"""The exact second moments of a sampler's linear recursion, for coordinates of given curvature.

With the gradient g = h·θ of a harmonic mean potential h·θ²/2, a step of a linear rule is z ← A·z + s·w·ξ for the state
z = (θ, m). Its second moments follow M ← A·M·Aᵀ + s²·w·wᵀ, which is exact for any sequence of step sizes and
temperatures. A block of equal steps is a power of one matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sgmcmc.samplers.law import Move, bridge_variance, half_move

SIZE = 6
SQUARE, CROSS, MOMENTUM, ANCHOR, ANCHOR_MOMENTUM, ONE = range(SIZE)
"""Entries of a state: E[θ²], E[θm], E[m²], E[cθ], E[cm], 1, with c the position when the stage began."""


@dataclass(frozen=True)
class LinearRule:
    """A linear update of position and momentum, m ← (1-a)·m - b·h·θ + s·ξ, in each of B blocks and H coordinates.

    Attributes:
        move: how the position follows.
        damping: a, shape (B, H).
        force: b for the gradient of the mean potential, shape (B, H).
        variance: s², shape (B, H).
        time_step: the factor of the momentum in the position's move, shape (B, H).
        scale: factor of the momentum before a block, shape (B, H): rules that store m over lr rescale it.
    """

    move: Move
    damping: Tensor
    force: Tensor
    variance: Tensor
    time_step: Tensor
    scale: Tensor

    def mapped(self, change: Callable[..., Tensor], *others: "LinearRule") -> "LinearRule":
        """Return the rule whose tensors a function makes of those of this rule, and of others beside them."""
        parts = ([r.damping, r.force, r.variance, r.time_step, r.scale] for r in (self, *others))
        return LinearRule(self.move, *map(change, *parts))

    def step(self, curvature: Tensor) -> tuple[Tensor, Tensor]:
        """Return A, shape (B, H, 2, 2), and the noise's covariance, shape (B, H, 2, 2).

        Args:
            curvature: h of the mean potential, shape (H,).
        """
        keep, zero = 1 - self.damping, torch.zeros_like(self.damping)
        kick, one, dt = self.force * curvature, torch.ones_like(self.damping), self.time_step
        extra = zero  # variance of the position's noise given the momentum's
        if self.move == "alone":
            entries, noise = (1 - kick, zero, zero, zero), (one, zero)
        elif self.move == "after":
            entries, noise = (1 - dt * kick, dt * keep, -kick, keep), (dt, one)
        elif self.move == "before":
            entries, noise = (one, dt, -kick, keep), (zero, one)
        else:  # the force of these laws is damped already
            move = dt / 2
            if self.move == "ubu":
                tiny = 1e-100  # where the step size is 0
                friction = (-torch.log1p(-self.damping) / dt.clamp_min(tiny)).clamp_min(tiny)
                temperature = self.variance / (self.damping * (1 + keep)).clamp_min(tiny)
                move = torch.as_tensor(half_move(dt, friction))
                extra = torch.as_tensor(bridge_variance(dt, friction, temperature))
            both = move * (1 + keep)
            entries, noise = (1 - both * kick / keep, both, -kick, keep), (move, one)
        matrix = torch.stack(entries, -1).unflatten(-1, (2, 2))
        vector = torch.stack(noise, -1)
        covariance = self.variance[..., None, None] * vector[..., :, None] * vector[..., None, :]
        covariance[..., 0, 0] += extra
        return matrix, covariance

    def relaxation(self, curvature: Tensor) -> Tensor:
        """Return the relaxation times that one step covers, -log of the largest modulus of A's eigenvalues, (B, H).

        A negative number is an unstable step.
        """
        matrix, _ = self.step(curvature)
        trace, determinant = matrix.diagonal(dim1=-2, dim2=-1).sum(-1) / 2, torch.det(matrix)
        root = torch.sqrt((trace.square() - determinant).to(torch.complex128))
        largest = torch.maximum((trace + root).abs(), (trace - root).abs())
        return -largest.clamp_min(1e-300).log()


def draws_of_mean(rule: LinearRule, counts: Sequence[int], curvature: Tensor) -> Tensor:
    """Return the independent draws that the mean of a stationary chain over a run is worth, shape (H,).

        Var(Σ_t w_t·θ_t)/Var(θ) = Σ_t w_t² + 2·Σ_t w_t·c_t,   c ← A·(c + w·s),   s = (1, E[θm]/E[θ²])

    c is the covariance of the state with the sum so far. Over a block of equal steps its sum is closed,
    Σ_k A^k·x = (I - Aⁿ)·(I - A)⁻¹·x, for complex and for several eigenvalues. Steps have their relaxation times as
    weights w, so a step that moves little counts little. Of equal steps the result is exactly Var(θ)/Var(mean).

    Args:
        rule: the update in B blocks of steps, for H coordinates.
        counts: steps of each block.
        curvature: h of the mean potential for each coordinate, shape (H,).
    """
    matrix, noise = rule.step(curvature)
    weights = rule.relaxation(curvature).clamp_min(0)
    three = _one_step(matrix, noise)[..., : MOMENTUM + 1, :]
    still = torch.eye(2, dtype=torch.float64) - matrix
    moves = (weights > 0) & (rule.variance > 0)
    eye = torch.eye(3, dtype=torch.float64)
    moments = torch.linalg.solve(torch.where(moves[..., None, None], eye - three[..., :3], eye), three[..., ONE])
    ratio = torch.where(moves, moments[..., CROSS] / torch.where(moves, moments[..., SQUARE], 1.0), 0.0)
    inverse = torch.linalg.inv(torch.where((weights > 0)[..., None, None], still, torch.eye(2, dtype=torch.float64)))
    covariance = torch.zeros(len(curvature), 2, dtype=torch.float64)
    variance, total = torch.zeros(2, len(curvature), dtype=torch.float64)
    for block, count in enumerate(counts):
        weight = weights[block]
        step = weight[:, None] * torch.stack([torch.ones_like(weight), ratio[block]], -1)
        covariance = covariance * torch.stack([torch.ones_like(weight), rule.scale[block]], -1)
        power = torch.linalg.matrix_power(matrix[block], count)
        fixed = (matrix[block] @ inverse[block] @ step[..., None])[..., 0]
        away = covariance - fixed
        summed = count * fixed + (inverse[block] @ (away[..., None] - power @ away[..., None]))[..., 0]
        variance = variance + weight * (weight * count + 2 * summed[:, 0])
        covariance = torch.where((weight > 0)[:, None], fixed + (power @ away[..., None])[..., 0], covariance)
        total = total + weight * count
    return torch.where(total > 0, total.square() / variance.clamp_min(1e-300), 1.0)


@dataclass(frozen=True)
class StageMoments:
    """Weighted second moments of H coordinates, averaged over the observed steps of the sampling stages.

    Attributes:
        plain: mean of E[θ²] before the observed steps, shape (H,).
        anchored: mean of E[(θ-c)·θ], with c the position when the stage began, shape (H,).
    """

    plain: Tensor
    anchored: Tensor


def stage_moments(
    rule: LinearRule,
    counts: Sequence[int],
    is_sampling: Sequence[bool],
    curvature: Tensor,
    start: Tensor,
    weights: Tensor,
    warm_up: float = 0.25,
) -> StageMoments:
    """Propagate the second moments over a run and average them over its sampling stages.

    Args:
        rule: the update in B blocks of steps, for H coordinates.
        counts: steps of each block.
        is_sampling: whether each block belongs to a sampling stage.
        curvature: h of the mean potential for each coordinate, shape (H,).
        start: E[θ²] at the first step, shape (H,); the momentum is 0.
        weights: factor of the moments in each block, shape (B, H), such as h·N/τ for temperatures over τ.
        warm_up: share of each sampling stage, at its beginning, that is not averaged, as in `ChainHealth`.

    Returns:
        the weighted averages over all observed steps; NaN without any.
    """
    maps = _maps(rule, counts, curvature)
    state = torch.zeros(len(curvature), SIZE, dtype=torch.float64)
    state[:, SQUARE], state[:, ONE] = start, 1.0
    ignored = _ignored(counts, is_sampling, warm_up)
    sums = torch.zeros(2, len(curvature), dtype=torch.float64)
    observed, was_sampling = 0.0, False
    rescaled = (rule.scale != 1).any(1).tolist()
    for block, (count, sampling) in enumerate(zip(counts, is_sampling, strict=True)):
        if sampling and not was_sampling:
            state[:, ANCHOR], state[:, ANCHOR_MOMENTUM] = state[:, SQUARE], state[:, CROSS]
        was_sampling = sampling
        if rescaled[block]:
            factor = rule.scale[block]
            state = state * torch.stack([factor**0, factor, factor**2, factor**0, factor, factor**0], -1)
        advanced, summed = maps[block]
        if sampling and ignored[block] < 1:
            total = (summed @ state[..., None])[..., 0]
            share = 1 - ignored[block]
            if ignored[block] > 0:  # the block's later part alone
                total = _later_part(rule, block, count, ignored[block], curvature, state)
            weighted = weights[block] * torch.stack([total[:, SQUARE], total[:, SQUARE] - total[:, ANCHOR]])
            sums += weighted
            observed += share * count
        state = (advanced @ state[..., None])[..., 0]
    plain, anchored = sums / observed if observed else sums * torch.nan
    return StageMoments(plain, anchored)


def _ignored(counts: Sequence[int], is_sampling: Sequence[bool], warm_up: float) -> list[float]:
    """Return the share of each block's steps that belongs to the warm-up of its stage."""
    shares, block = [1.0] * len(counts), 0
    while block < len(counts):
        end = block
        while end < len(counts) and is_sampling[end] == is_sampling[block]:
            end += 1
        if is_sampling[block]:
            left = warm_up * sum(counts[block:end])
            for place in range(block, end):
                shares[place] = min(left / counts[place], 1.0)
                left = max(left - counts[place], 0.0)
        block = end
    return shares


def _later_part(rule: LinearRule, block: int, count: int, ignored: float, curvature: Tensor, state: Tensor) -> Tensor:
    """Return the sum of the states before the later steps of a block, shape (H, 6)."""
    skipped = round(ignored * count)
    if skipped >= count:
        return torch.zeros_like(state)
    one = rule.mapped(lambda tensor: tensor[block : block + 1])
    advanced, _ = _maps(one, [skipped], curvature)[0] if skipped else (torch.eye(SIZE, dtype=torch.float64), None)
    _, summed = _maps(one, [count - skipped], curvature)[0]
    later: Tensor = (summed @ (advanced @ state[..., None]))[..., 0]
    return later


def _maps(rule: LinearRule, counts: Sequence[int], curvature: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return for each block the map of the state over it, and the sum of the maps to before each of its steps."""
    maps = _one_step(*rule.step(curvature))
    result: list[tuple[Tensor, Tensor]] = [(maps, maps)] * len(counts)
    identity = torch.eye(SIZE, dtype=torch.float64)
    steps = torch.tensor(counts)
    for count in steps.unique().tolist():
        places = (steps == count).nonzero()[:, 0]
        if count == 1:
            of_blocks = maps[places]
            sums = identity.expand_as(of_blocks)
        else:
            doubled = torch.zeros(*maps[places].shape[:2], 2 * SIZE, 2 * SIZE, dtype=torch.float64)
            doubled[..., :SIZE, :SIZE] = maps[places]
            doubled[..., SIZE:, :SIZE] = doubled[..., SIZE:, SIZE:] = identity
            power = torch.linalg.matrix_power(doubled, count)
            of_blocks, sums = power[..., :SIZE, :SIZE], power[..., SIZE:, :SIZE]
        for row, place in enumerate(places.tolist()):
            result[place] = (of_blocks[row], sums[row])
    return result


def _one_step(matrix: Tensor, noise: Tensor) -> Tensor:
    """Return the map of the state over one step, shape (B, H, 6, 6)."""
    a, b, c, d = matrix[..., 0, 0], matrix[..., 0, 1], matrix[..., 1, 0], matrix[..., 1, 1]
    step = torch.zeros(*a.shape, SIZE, SIZE, dtype=torch.float64)
    step[..., SQUARE, SQUARE], step[..., SQUARE, CROSS], step[..., SQUARE, MOMENTUM] = a * a, 2 * a * b, b * b
    step[..., CROSS, SQUARE], step[..., CROSS, CROSS], step[..., CROSS, MOMENTUM] = a * c, a * d + b * c, b * d
    step[..., MOMENTUM, SQUARE], step[..., MOMENTUM, CROSS], step[..., MOMENTUM, MOMENTUM] = c * c, 2 * c * d, d * d
    step[..., ANCHOR, ANCHOR], step[..., ANCHOR, ANCHOR_MOMENTUM] = a, b
    step[..., ANCHOR_MOMENTUM, ANCHOR], step[..., ANCHOR_MOMENTUM, ANCHOR_MOMENTUM] = c, d
    step[..., SQUARE, ONE], step[..., CROSS, ONE] = noise[..., 0, 0], noise[..., 0, 1]
    step[..., MOMENTUM, ONE], step[..., ONE, ONE] = noise[..., 1, 1], 1.0
    return step
