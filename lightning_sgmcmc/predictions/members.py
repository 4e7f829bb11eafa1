"""Every sample's probabilities: quantiles over the samples, and draws of labels."""

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import sent, widest


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """Return p_k^(1/T) / Σ_j p_j^(1/T), the softmax of log p / T, shape (…, K).

    >>> tempered(Tensor([[0.9, 0.1]]), 2.0)
    tensor([[0.7500, 0.2500]])
    """
    return (widest(probabilities).clamp_min(FLOOR).log() / temperature).softmax(-1).to(probabilities.dtype)


def moved(each: Tensor, mean: Tensor, wanted: Tensor) -> Tensor:
    """Return each sample's probabilities after the least move of labels that turns their mean into the wanted one.

        q_sk = p_sk·min(1, w_k/p̄_k) + (Σ_j p_sj·(1 - w_j/p̄_j)⁺)·(w_k - p̄_k)⁺/Σ_j (w_j - p̄_j)⁺

    A label of a class whose probability falls is changed, by chance, into one of a class whose probability rises,
    alike for all samples. So the mean of q over the samples is exactly w, and the mutual information of label and
    parameters is at most that before (data processing inequality).

    Args:
        each: p, shape (S, n, …, K).
        mean: p̄, their mean, shape (n, …, K).
        wanted: w, shape (n, …, K).

    Source: the maximal coupling of two laws, Lindvall 1992, chapter I.5.

    >>> each = torch.tensor([[[1.0, 0.0]], [[0.6, 0.4]]])
    >>> moved(each, each.mean(0), torch.tensor([[0.9, 0.1]])).mean(0)
    tensor([[0.9000, 0.1000]])
    """
    before, after, own = widest(mean), widest(wanted), widest(each)
    kept = torch.where(before > 0, (after / before.clamp_min(FLOOR)).clamp_max(1.0), 1.0)
    risen = (after - before).clamp_min(0)
    share = risen / risen.sum(-1, keepdim=True).clamp_min(FLOOR)
    leaving = (own * (1 - kept)).sum(-1, keepdim=True)
    return (own * kept + leaving * share).to(each.dtype)


FLOOR = 1e-30
"""Smallest probability whose logarithm is taken."""


class Members:
    """The probabilities of each sample, with the samples' weights.

    Args:
        probabilities: shape (S, n, …, K).
        weights: w, shape (S,), summing to 1, on any device.
    """

    def __init__(self, probabilities: Tensor, weights: Tensor) -> None:
        self.probabilities = probabilities
        self.weights = weights

    def to(self, device: torch.device | str) -> "Members":
        """Return a copy on a device."""
        return Members(self.probabilities.to(device), sent(self.weights, torch.device(device)))

    def quantile(self, q: float) -> Tensor:
        """Return the smallest probability that samples of weight q or more do not exceed, shape (n, …, K)."""
        ordered, order = self.probabilities.sort(0)
        # A cumulative sum of equal weights differs from its exact value by rounding.
        reached = widest(sent(self.weights, order.device))[order].cumsum(0) >= q - 1e-12
        first = reached.long().argmax(0, keepdim=True)
        return ordered.gather(0, first)[0]

    def cdf(self, p: Tensor | float) -> Tensor:
        """Return the weight of the samples whose probability is at most p, shape (n, …, K)."""
        below = widest(self.probabilities <= p)
        return torch.einsum("s,s...->...", widest(sent(self.weights, below.device)), below).to(self.probabilities.dtype)

    def chosen(self, num: int, generator: torch.Generator) -> Tensor:
        """Return the probabilities of a sample drawn by the weights for each of num·n draws, shape (num, n, …, K)."""
        count = self.probabilities.shape[1]
        chosen = torch.multinomial(self.weights.cpu(), num * count, replacement=True, generator=generator)
        rows = torch.arange(count, device=self.probabilities.device)
        return self.probabilities[chosen.view(num, count).to(self.probabilities.device), rows]


def labels_of(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Return a label drawn from each row, shape (…, K) to (…), by inversion."""
    uniform = torch.rand(probabilities.shape[:-1], generator=generator, dtype=torch.float64)
    total = widest(probabilities).cumsum(-1)
    below = total < (uniform.to(probabilities.device) * total[..., -1])[..., None]
    return below.sum(-1)


def generator_of(seed: int | torch.Generator) -> torch.Generator:
    """Return the generator, or a new one with this seed."""
    return seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
