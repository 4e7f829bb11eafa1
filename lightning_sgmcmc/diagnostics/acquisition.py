"""Which data to label next: mutual information of labels and parameters, of single data and of batches."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import exact, sent, widest

MOST_CONFIGURATIONS = 10_000
"""Joint labels of the chosen data that are enumerated; of more, so many are drawn."""
TOGETHER = 64
"""Data whose joint entropies are computed at once."""
CHUNK = 2**24
"""Numbers of a table of joint labels that is in memory at once."""


class Acquisition(NamedTuple):
    """Data to label.

    Attributes:
        indices: of the data in the pool, in the order of choice, shape (k,).
        scores: what each adds to the mutual information with the parameters, in nats, shape (k,); of "bald" its own.
    """

    indices: Tensor
    scores: Tensor


def batch_bald(
    probabilities: Tensor,
    weights: Tensor,
    count: int,
    generator: torch.Generator,
    most_configurations: int = MOST_CONFIGURATIONS,
) -> Acquisition:
    """Return the data whose labels together say most about the parameters, chosen one by one.

        i_m = argmax_i I(y_(i_1), …, y_(i_(m-1)), y_i; θ),   I = H[Σ_s w_s·Π p_s] - Σ_s w_s·Σ H[p_s]

    Up to `most_configurations` joint labels of the chosen data are enumerated; beyond, as many are drawn from the
    average over samples. What an example adds is the mean over the joint labels of its information given them, which is
    never negative, and small where they leave little unknown.

    Args:
        probabilities: of each sample, shape (S, n, K).
        weights: of the samples, summing to 1, shape (S,).
        count: k, at most n.
        generator: of the draws, on the CPU.
        most_configurations: the limit of the enumeration.

    Source: Kirsch et al. 2019 (BatchBALD), sections 3.2 and 3.3.
    """
    p = widest(probabilities)
    known = _JointLabels(sent(widest(weights), p.device), most_configurations, generator)
    entropies = torch.special.entr(p).sum(-1)
    chosen: list[int] = []
    scores: list[float] = []
    gain = torch.full_like(entropies[0], math.inf)  # of each datum, when it was last computed
    for _ in range(count):
        best, largest = -1, -math.inf
        for few in gain.argsort(descending=True, stable=True).split(TOGETHER):
            if float(gain[few[0]]) <= largest:
                break  # what an example adds never grows with the others, so none of the rest is better
            gain[few] = known.information(p[:, few], entropies[:, few])
            gain[chosen] = -math.inf
            place = int(gain[few].argmax())
            if float(gain[few[place]]) > largest:
                best, largest = int(few[place]), float(gain[few[place]])
        chosen.append(best)
        scores.append(max(largest, 0.0))
        gain[best] = -math.inf
        known.extend(p[:, best])
    return Acquisition(torch.tensor(chosen), exact(scores))


class _JointLabels:
    """All joint labels of the chosen data, or draws of them: the chance of each, shape (C,), and the samples' weights
    given each, shape (C, S)."""

    def __init__(self, weights: Tensor, most: int, generator: torch.Generator) -> None:
        self._weights, self._chances = weights[None], weights.new_ones(1)
        self._most, self._generator = most, generator
        self._are_drawn = False

    def information(self, p: Tensor, entropies: Tensor) -> Tensor:
        """Return what each datum's label adds, shape (n,), from the samples' probabilities (S, n, K) of it and their
        entropies (S, n)."""
        found = []
        for part in p.split(max(1, CHUNK // (len(self._chances) * p.shape[2])), 1):
            mixed = torch.einsum("cs,snk->cnk", self._weights, part)
            found.append(self._chances @ torch.special.entr(mixed).sum(-1))
        return torch.cat(found) - self._chances @ self._weights @ entropies

    def extend(self, p: Tensor) -> None:
        """Add the label of an example, of which the samples have the probabilities (S, K)."""
        chances = self._weights @ p
        if not self._are_drawn and chances.numel() <= self._most:
            own = self._chances[:, None] * chances
            row, label = (own > 0).nonzero(as_tuple=True)
            self._chances = own[row, label]
        else:
            row = torch.arange(len(chances), device=p.device)
            if not self._are_drawn:
                row = self._drawn(self._chances, self._most)
                self._chances = p.new_full((self._most,), 1 / self._most)
            self._are_drawn = True
            label = self._drawn(chances[row], 1)[:, 0]
        weights = self._weights[row] * p[:, label].T
        self._weights = weights / weights.sum(1, keepdim=True)

    def _drawn(self, chances: Tensor, count: int) -> Tensor:
        places = torch.multinomial(chances.cpu(), count, replacement=True, generator=self._generator)
        return places.to(chances.device)


def batch_of_numbers(mean: Tensor, variance: Tensor, weights: Tensor, count: int) -> Acquisition:
    """Return the data whose numbers together say most about the parameters, chosen one by one, by moments.

        I(y_B; θ) ≈ ½·log det(1 + Λ^(-1/2)·C·Λ^(-1/2)),   C = Cov_s(μ_s) over B, Λ = diag E_s[σ_s²]

    It is exact for Gaussians whose means vary with the parameters as a Gaussian, and whose noise does not.

    Args:
        mean: of each sample's distributions, shape (S, n, D).
        variance: theirs, shape (S, n, D).
        weights: of the samples, summing to 1, shape (S,).
        count: k, at most n.

    Source: Kirsch et al. 2019 with the entropy of Gaussians; MacKay 1992 (Information-based objective functions).
    """
    rows = _rows(mean, variance, weights)
    inverse = torch.eye(rows.shape[2], dtype=rows.dtype, device=rows.device)  # of 1 + Σ over the chosen of rowsᵀ·rows
    chosen: list[int] = []
    scores: list[float] = []
    for _ in range(count):
        blocks = _plus_one(rows @ inverse @ rows.transpose(1, 2))
        gain = blocks.logdet() / 2
        gain[chosen] = -math.inf
        best = int(gain.argmax())
        chosen.append(best)
        scores.append(max(float(gain[best]), 0.0))
        across = rows[best] @ inverse
        inverse = inverse - across.T @ torch.linalg.solve(blocks[best], across)
    return Acquisition(torch.tensor(chosen), exact(scores))


def information_of_numbers(mean: Tensor, variance: Tensor, weights: Tensor) -> Tensor:
    """Return I(y_i; θ) of each datum alone, shape (n,), in nats, by moments; arguments as in `batch_of_numbers`."""
    rows = _rows(mean, variance, weights)
    return _plus_one(rows @ rows.transpose(1, 2)).logdet() / 2


def _rows(mean: Tensor, variance: Tensor, weights: Tensor) -> Tensor:
    """Return Λ^(-1/2)·√w_s·(μ_s - μ), shape (n, D, S), whose product with its transpose is Λ^(-1/2)·C·Λ^(-1/2)."""
    w = sent(widest(weights), mean.device)
    mu, noise = widest(mean), torch.einsum("s,snd->nd", w, widest(variance))
    centred = mu - torch.einsum("s,snd->nd", w, mu)
    return (centred * w.sqrt()[:, None, None] / noise.sqrt()).permute(1, 2, 0)


def _plus_one(blocks: Tensor) -> Tensor:
    return blocks + torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
