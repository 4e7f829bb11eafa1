"""Split conformal prediction: sets and intervals with guaranteed coverage, on top of any predictive."""

import math

import torch
from torch import Tensor


def conformal_threshold(scores: Tensor, level: float) -> Tensor:
    """Return the ⌈(n + 1)·level⌉-th smallest score, +∞ if n is too small for it; columns are separate.

    A new datum, exchangeable with the n, has a score of at most this with probability at least `level`, and at most
    level + 1/(n + 1) if no scores are equal.

    Args:
        scores: nonconformity of the calibration data, shape (n, …).
        level: in (0, 1).

    Raises:
        ValueError: for a level outside of (0, 1), or no scores.

    Source: Vovk et al. 2005; Lei et al. 2018, algorithm 2.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    if not len(scores):
        raise ValueError("conformal prediction needs calibration data, and there are none")
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    if rank > len(scores):
        return torch.full_like(scores[0], torch.inf)
    return scores.sort(0).values[rank - 1]


def class_scores(probabilities: Tensor, adaptive: bool, uniform: Tensor | None = None) -> Tensor:
    """Return each class's nonconformity, shape (n, K).

        1 - p_k,   or adaptive: Σ_j p_j·1{p_j > p_k} + u·p_k

    Args:
        probabilities: shape (n, K).
        adaptive: whether sets grow with the datum's difficulty, for coverage that is more even over data.
        uniform: u in [0, 1] for each datum, shape (n,), which makes the coverage exact; None is 1.

    Source: Sadinle et al. 2019 (least ambiguous sets); Romano et al. 2020 (adaptive sets).
    """
    if not adaptive:
        return 1 - probabilities
    ordered, places = probabilities.sort(-1, descending=True)
    above = torch.zeros_like(probabilities).scatter(-1, places, ordered.cumsum(-1) - ordered)
    share = torch.ones_like(probabilities[:, :1]) if uniform is None else uniform[:, None].to(probabilities)
    return above + share * probabilities
