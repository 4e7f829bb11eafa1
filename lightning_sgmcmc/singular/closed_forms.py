"""Learning coefficients in closed form: regular models, reduced-rank regression, deep linear networks."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count, check_positive
from lightning_sgmcmc.tensors import widest


class LearningCoefficientTruth(NamedTuple):
    """A learning coefficient.

    Attributes:
        value: λ, the real log canonical threshold.
        multiplicity: m, the order of its pole: E[n·β·(L - L(w*))] = λ - (m - 1)/log(n·β) + ….
    """

    value: float
    multiplicity: int = 1


def regular_learning_coefficient(hessian: Tensor, nbeta: float, gamma: float = 0.0) -> float:
    """Return E[n·β·(L(w) - L(w*))] of a quadratic loss with minimum w* under the localised law, in closed form.

        Σ_i n·β·h_i/(2·(n·β·h_i + γ)),   h_i the eigenvalues of the Hessian of the mean loss

    It tends to d/2, the coefficient of a regular model of d parameters, as γ → 0.

    Args:
        hessian: of the mean loss L at w*, shape (d, d), not negative.
        nbeta: n·β > 0.
        gamma: γ ≥ 0.

    >>> regular_learning_coefficient(torch.eye(4), nbeta=1000.0)
    2.0
    >>> round(regular_learning_coefficient(torch.eye(4), nbeta=1000.0, gamma=100.0), 3)
    1.818
    """
    check_positive("nbeta", nbeta)
    curvatures = torch.linalg.eigvalsh(widest(hessian)).clamp(min=0)
    curvatures = curvatures[curvatures > 0]
    return float((nbeta * curvatures / (2 * (nbeta * curvatures + gamma))).sum())


def reduced_rank_learning_coefficient(inputs: int, hidden: int, outputs: int, rank: int) -> LearningCoefficientTruth:
    """Return λ of reduced-rank regression y = B·A·x + noise, where the true B·A has a lower rank than A and B allow.

    It is the global coefficient, the least over all true parameters. The local one has this value where A and B have
    the rank of the truth, and may be larger at other points with the same product.

    Args:
        inputs: M, columns of A.
        hidden: H, rows of A.
        outputs: N, rows of B.
        rank: r of the true product, 0 ≤ r ≤ H.

    Raises:
        ValueError: for a rank above one of the widths.

    Source: Aoyagi & Watanabe 2005 (Stochastic complexities of reduced rank regression in Bayesian estimation, Main
    Theorem).

    >>> reduced_rank_learning_coefficient(inputs=5, hidden=4, outputs=3, rank=2).value
    7.0
    """
    _check_rank((inputs, hidden, outputs), rank)
    m, h, n, r = inputs, hidden, outputs, rank
    if n + r <= m + h and m + r <= n + h and h + r <= m + n:
        odd = (m + h + n + r) % 2
        sum_of = -((h + r) ** 2) - m**2 - n**2 + 2 * (h + r) * (m + n) + 2 * m * n
        return LearningCoefficientTruth((sum_of + odd) / 8, 1 + odd)
    if m + h < n + r:
        return LearningCoefficientTruth((h * m - h * r + n * r) / 2)
    if n + h < m + r:
        return LearningCoefficientTruth((h * n - h * r + m * r) / 2)
    return LearningCoefficientTruth(m * n / 2)


def deep_linear_learning_coefficient(widths: Sequence[int], rank: int) -> LearningCoefficientTruth:
    """Return λ of a deep linear network y = W_L ⋯ W_1·x + noise, where the true product has a rank r.

        λ = (r·(H_0 + H_L) - r²)/2 + a·(ℓ - a)/(4·ℓ) - (ℓ - 1)/(4·ℓ)·S² + ½·Σ_{i<j} M_i·M_j

    with M_i = H_i - r over the ℓ + 1 widths that limit the product, S their sum, and a = S - (⌈S/ℓ⌉ - 1)·ℓ. The
    multiplicity is a·(ℓ - a) + 1. It is the global coefficient, as in `reduced_rank_learning_coefficient`.

    Args:
        widths: H_0, …, H_L, from the inputs to the outputs, at least two.
        rank: r, at most the least width.

    Raises:
        ValueError: for fewer than two widths, or a rank above one of them.

    Source: Aoyagi 2024 (Consideration on the learning efficiency of multiple-layered neural networks with linear
    units, Neural Networks 172, main theorem).

    >>> deep_linear_learning_coefficient([5, 4, 3], rank=2).value  # as reduced-rank regression
    7.0
    >>> deep_linear_learning_coefficient([4, 3, 3, 3], rank=1)
    LearningCoefficientTruth(value=4.5, multiplicity=1)
    """
    _check_rank(widths, rank)
    if len(widths) < 2:
        raise ValueError(f"widths must have at least two entries, the inputs and the outputs, got {list(widths)}")
    excess = sorted(width - rank for width in widths)
    # The limiting widths are the smallest, so it suffices to know how many there are.
    for count in range(2, len(excess) + 1):
        chosen, others = excess[:count], excess[count:]
        least, total, order = min(others, default=None), sum(chosen), count - 1
        if total >= order * chosen[-1] and (least is None or (chosen[-1] < least and total < order * least)):
            break
    pairs = sum(i * j for i, j in itertools.combinations(chosen, 2))
    remainder = total - (-(-total // order) - 1) * order
    value = (rank * (widths[0] + widths[-1]) - rank**2) / 2 + remainder * (order - remainder) / (4 * order)
    value += pairs / 2 - (order - 1) / (4 * order) * total**2
    return LearningCoefficientTruth(value, remainder * (order - remainder) + 1)


def _check_rank(widths: Sequence[int], rank: int) -> None:
    for width in widths:
        check_count("widths", width, optional=False)
    check_count("rank", rank, least=0, optional=False)
    if rank > min(widths):
        raise ValueError(f"rank must be at most the least width {min(widths)}, got {rank}")
