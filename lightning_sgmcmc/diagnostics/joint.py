"""The joint score of several data: the NLL of τ targets together, and the groups of data that it is taken over."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.diagnostics.draws import normalised_weights
from lightning_sgmcmc.tensors import widest

MOST_GROUPS = 1000
"""Groups of near data, each of which needs two searches among all data."""


class JointScore(NamedTuple):
    """A joint NLL with what is needed to read it.

    Attributes:
        nll: the joint NLL, in nats per input.
        standard_error: of it over groups; NaN for a single group.
        marginal_nll: the mean of the ordinary NLL of the same data. The joint NLL is lower where the posterior knows
            how its errors go together.
        effective_samples: the median over groups of the number of samples that carry a group's average, (Σ a)²/Σ a²
            with a = w·Π_t p. Near 1 the joint NLL is that of the best sample, and more samples would lower it.
        tau: inputs in a group.
        groups: the number of groups.
    """

    nll: float
    standard_error: float
    marginal_nll: float
    effective_samples: float
    tau: int
    groups: int


def joint_nll(log_densities: Tensor, groups: Tensor, weights: Tensor | None = None) -> JointScore:
    """Return the mean over groups of the joint NLL of a group's τ targets, per input.

        -1/τ·log Σ_s w_s·Π_(t≤τ) p(y_t | x_t, θ_s)

    For τ = 1 it is the ordinary NLL. For τ > 1 it also scores how the errors of several predictions go together,
    which decisions over many inputs depend on. For one sample it equals the ordinary NLL at every τ.

    Args:
        log_densities: log p(y_i | x_i, θ_s) in nats, shape (S, n).
        groups: the data of each group, indices in 0..n-1, shape (G, τ).
        weights: of the samples, ≥ 0, shape (S,); None weighs all alike.

    Raises:
        ValueError: if a shape is another one, or there are no samples or groups.

    Source: Osband et al. 2022 (Evaluating high-order predictive distributions in deep learning), section 3.

    >>> opposed = torch.tensor([[0.9, 0.9], [0.1, 0.1]]).log()  # two samples that contradict each other, on two data
    >>> score = joint_nll(opposed, torch.tensor([[0, 1]]))
    >>> round(score.nll, 3), round(score.marginal_nll, 3)
    (0.446, 0.693)
    """
    if log_densities.dim() != 2 or not log_densities.numel() or groups.dim() != 2 or not groups.numel():
        raise ValueError(
            f"log_densities and groups should have shapes (S, n) and (G, τ), none of them 0, got "
            f"{tuple(log_densities.shape)} and {tuple(groups.shape)}"
        )
    logs = widest(log_densities)
    if weights is None:
        weights = torch.ones(len(logs))
    if weights.shape != logs.shape[:1]:
        raise ValueError(f"weights should have the shape ({len(logs)},), one for each sample, got {len(weights)}")
    log_weights = normalised_weights(widest(weights).log()).to(logs).log()[:, None]
    groups = groups.to(logs.device)
    together = log_weights.expand(-1, len(groups)).clone()
    for members in groups.unbind(1):
        together += logs[:, members]
    joint = -together.logsumexp(0) / groups.shape[1]
    marginal = -(logs + log_weights).logsumexp(0)[groups]
    effective = together.softmax(0).square().sum(0).reciprocal()
    error = joint.std() / len(joint) ** 0.5 if len(joint) > 1 else torch.tensor(torch.nan)
    return JointScore(
        nll=float(joint.mean()),
        standard_error=float(error),
        marginal_nll=float(marginal.mean()),
        effective_samples=float(effective.nanmedian()),
        tau=groups.shape[1],
        groups=len(groups),
    )


# -- groups ------------------------------------------------------------------------------------------------------------


def random_groups(count: int, tau: int, generator: torch.Generator) -> Tensor:
    """Return disjoint groups of τ of `count` data by chance, shape (⌊count/τ⌋, τ)."""
    _check_enough(count, tau, tau)
    return torch.randperm(count, generator=generator)[: count // tau * tau].view(-1, tau)


def dyadic_groups(count: int, tau: int, generator: torch.Generator) -> Tensor:
    """Return groups of τ draws, with replacement, from a pair of the data each, shape (⌊count/2⌋, τ); pairs are by
    chance and disjoint. For τ = 1 each datum is a group.

    Source: Osband et al. 2022 (Evaluating high-order predictive distributions in deep learning), dyadic sampling with
    κ = 2 anchor points.
    """
    if tau == 1:
        return random_groups(count, tau, generator)
    _check_enough(count, tau, 2)
    pairs = random_groups(count, 2, generator)
    return pairs.gather(1, torch.randint(2, (len(pairs), tau), generator=generator))


def nearest_groups(inputs: Tensor, tau: int, generator: torch.Generator) -> Tensor:
    """Return disjoint groups of τ data: two data by chance, each with the nearest ones that are left, half of the
    group each, shape (G, τ), G ≤ 1000; distances are Euclidean, over all numbers of an input, (n, …).
    """
    _check_enough(len(inputs), tau, tau)
    if tau == 1:
        return random_groups(len(inputs), 1, generator)
    x = inputs.detach().cpu().reshape(len(inputs), -1).float()
    left = torch.ones(len(x), dtype=torch.bool)
    sizes = (tau - tau // 2, tau // 2)
    cells: list[Tensor] = []
    for centre in torch.randperm(len(x), generator=generator).tolist():
        size = sizes[len(cells) % 2]
        if not left[centre]:
            continue
        if len(cells) == 2 * MOST_GROUPS or int(left.sum()) < size:
            break
        distances = (x - x[centre]).square().sum(1).masked_fill(~left, torch.inf)
        distances[centre] = -1  # of data that are equal, the centre is the first
        cells.append(distances.topk(size, largest=False).indices)
        left[cells[-1]] = False
    return torch.stack([torch.cat([a, b]) for a, b in zip(cells[::2], cells[1::2], strict=False)])


def _check_enough(count: int, tau: int, needed: int) -> None:
    check_count("tau", tau, optional=False)
    if count < needed:
        raise ValueError(
            f"groups of tau={tau} inputs need at least {needed} data, got {count}: pass more, or lower tau"
        )
