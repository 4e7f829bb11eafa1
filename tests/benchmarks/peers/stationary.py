"""The stationary variances of samplers on a Gaussian, from their update rules: the check that steps are mapped right.

A coordinate of curvature λ, with a gradient noise of standard deviation σ, is a linear recursion z ← Az + Bξ of
z = (x, m), so its covariance solves S = ASAᵀ + BBᵀ. NumPy only.
"""

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def variance(program: str, sampler: str, curvature: float, noise: float, step: float, friction: float) -> float:
    """Return the stationary variance of x, infinite if the chain is not stable; NaN if there is no formula.

    Args:
        program: "ours", "blackjax" or "posteriors".
        sampler: our name.
        curvature: λ.
        noise: σ.
        step: ε of SGLD, h² of a sampler with a momentum.
        friction: η, the share of its momentum that a step takes.
    """
    h = step**0.5
    if sampler == "SGLD":
        return solved(np.array([[1 - step * curvature]]), np.array([[2 * step + (step * noise) ** 2]]))
    kick, drift = np.array([[1, 0], [-h * curvature, 1]]), np.array([[1, h], [0, 1]])
    heat = np.diag([0, 1.0])
    if sampler == "BAOAB":  # r - h·g, half a drift, the friction, half a drift
        half, kept = np.array([[1, h / 2], [0, 1]]), np.exp(-friction)
        turn = half @ np.diag([1, kept])
        added = (1 - kept**2) * half @ heat @ half.T
        through = turn @ half
        return solved(through @ kick, added + (h * noise) ** 2 * through @ heat @ through.T)
    if sampler != "SGHMC":
        return float("nan")
    kick_with_drag = np.array([[1, 0], [-h * curvature, 1 - friction]])
    if program == "ours":  # the momentum first, then the place by the new momentum
        return solved(drift @ kick_with_drag, (2 * friction + (h * noise) ** 2) * drift @ heat @ drift.T)
    at_once = drift + kick_with_drag - np.eye(2)  # the place by the old momentum
    if program == "posteriors":
        return solved(at_once, (2 * friction + (h * noise) ** 2) * heat)
    return _refreshed(at_once, 2 * friction, h * noise)


def solved(matrix: Matrix, added: Matrix) -> float:
    """Return the first variance of S = ASAᵀ + Q, infinite if A does not contract.

    Args:
        matrix: A.
        added: Q.
    """
    if np.abs(np.linalg.eigvals(matrix)).max() >= 1:
        return float("inf")
    size = len(matrix)
    return float(np.linalg.solve(np.eye(size**2) - np.kron(matrix, matrix), added.reshape(-1))[0])


def _refreshed(matrix: Matrix, heat: float, batch_noise: float) -> float:
    """Return the variance between trajectories that begin with a new momentum, and have one batch each.

    Args:
        matrix: A of an inner step.
        heat: variance that an inner step adds to the momentum.
        batch_noise: what the batch's noise adds to the momentum in each inner step, over its standard deviation.
    """
    from turns import INNER_STEPS

    whole = np.zeros((3, 3))
    whole[:2, :2], whole[1, 2], whole[2, 2] = matrix, -batch_noise, 1

    def after(of_place: float) -> float:
        found = np.diag([of_place, 1.0, 1.0])
        for _ in range(INNER_STEPS):
            found = whole @ found @ whole.T + np.diag([0, heat, 0])
        return float(found[0, 0])

    constant = after(0.0)
    slope = after(1.0) - constant
    return constant / (1 - slope) if slope < 1 else float("inf")
