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

    Up to `most_configurations` joint labels of the chosen data are enumerated; beyond, the joint entropy is estimated
    with so many draws of them from the average over samples.

    Args:
        probabilities: of each sample, shape (S, n, K).
        weights: of the samples, summing to 1, shape (S,).
        count: k, at most n.
        generator: of the draws, on the CPU.
        most_configurations: the limit of the enumeration.

    Source: Kirsch et al. 2019 (BatchBALD), sections 3.2 and 3.3.
    """
    p, w = widest(probabilities), sent(widest(weights), probabilities.device)
    conditional = torch.einsum("s,sn->n", w, torch.special.entr(p).sum(-1))
    chosen: list[int] = []
    scores: list[float] = []
    table = torch.ones(1, len(p), dtype=p.dtype, device=p.device)  # p_s of the chosen data's joint labels, (C, S)
    offset: Tensor | None = None
    joint = 0.0
    gain = torch.full_like(conditional, math.inf)  # of each datum, when it was last computed
    for _ in range(count):
        best, largest = -1, -math.inf
        for few in gain.argsort(descending=True, stable=True).split(TOGETHER):
            if float(gain[few[0]]) <= largest:
                break  # what an example adds never grows with the others, so none of the rest is better
            gain[few] = _joint_entropies(table, offset, p[:, few], w) - joint - conditional[few]
            gain[chosen] = -math.inf
            place = int(gain[few].argmax())
            if float(gain[few[place]]) > largest:
                best, largest = int(few[place]), float(gain[few[place]])
        chosen.append(best)
        scores.append(max(largest, 0.0))
        joint += largest + float(conditional[best])
        gain[best] = -math.inf
        if offset is None and len(table) * p.shape[2] <= most_configurations:
            table = torch.einsum("cs,sk->cks", table, p[:, best]).flatten(0, 1)
        else:
            table, offset = _draws(p[:, chosen], w, most_configurations, generator)
            joint = -float(((table @ w).log() + offset).mean())
    return Acquisition(torch.tensor(chosen), exact(scores))


def _joint_entropies(table: Tensor, offset: Tensor | None, p: Tensor, w: Tensor) -> Tensor:
    """Return the entropy of the chosen data's labels with those of each datum, shape (n,), from a table of all joint
    labels of the chosen, or of draws of them, each row divided by exp(offset)."""
    own = table @ w
    found = []
    for part in p.split(max(1, CHUNK // (len(table) * p.shape[2])), 1):
        mixed = torch.einsum("cs,snk->cnk", table * w, part)
        if offset is None:
            found.append(torch.special.entr(mixed).sum((0, 2)))
        else:  # the mean over draws of -Σ_k p(k | the draw)·log p(k, the draw)
            share = mixed / own[:, None, None]
            each = torch.special.entr(share) - share * (own.log() + offset)[:, None, None]
            found.append(each.sum(-1).mean(0))
    return torch.cat(found)


def _draws(p: Tensor, w: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the probabilities by each sample of joint labels that are drawn from the average, shape (count, S), each
    row divided by its largest, and the logarithms of these, shape (count,)."""
    sample = torch.multinomial(w.cpu(), count, replacement=True, generator=generator).to(p.device)
    logs = torch.zeros(count, len(p), dtype=p.dtype, device=p.device)
    for of_datum in p.unbind(1):
        labels = torch.multinomial(of_datum[sample].cpu(), 1, generator=generator)[:, 0].to(p.device)
        logs += of_datum[:, labels].T.log()
    offset = logs.max(1).values
    return (logs - offset[:, None]).exp(), offset


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
