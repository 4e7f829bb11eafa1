"""Means of a loss along chains around a trained network, and covariances of two quantities, with errors."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import (
    MAX_BATCHES,
    chain_diagnostics,
    correlation_time,
    import_arviz,
    mean_and_error,
    merge_batches,
    rhat_limit,
    student_quantile,
)
from lightning_sgmcmc.diagnostics.findings import Finding, FindingKind
from lightning_sgmcmc.process import silenced
from lightning_sgmcmc.tensors import widest

FEWEST = 8
"""Blocks of a chain below which nothing is concluded."""
LARGEST_RHAT = 1.1
FALSE_ALARM_RATE = 0.01
SPIKE_NATS, SPIKE_DEVIATIONS = 50.0, 20.0
"""Nats and median absolute deviations by which a draw may be above the median: beyond those of a Gamma law, whose tail
is exponential, and 13 standard deviations of normal noise."""
DEPTH = 0.1
"""Share of the coefficient (or nats, if that is more) by which a loss may be below the centre's."""


def epoch_means(trace: Tensor, epochs: Tensor, sizes: Tensor) -> Tensor:
    """Return the means of a trace (C, T) over whole epochs, shape (C, B), weighted by the batches' sizes (T,).

    An epoch's batches contain every datum once, so the noise of a batch's choice cancels to first order: Σ_b n_b·L_b(w)
    = N·L(w). Epochs of which a part is missing are left out; fewer than 8 return the trace itself.

    >>> epoch_means(torch.arange(20.0)[None], torch.arange(20) // 2, torch.ones(20))[0, :3]
    tensor([0.5000, 2.5000, 4.5000], dtype=torch.float64)
    """
    trace = widest(trace)
    _, index, counts = epochs.unique_consecutive(return_inverse=True, return_counts=True)
    whole = counts == counts.max() if len(counts) else counts > 0
    if int(whole.sum()) < FEWEST:
        return trace
    weights = widest(sizes)
    sums = torch.zeros(len(trace), len(counts), dtype=torch.float64)
    totals = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, index, weights)
    sums.index_add_(1, index, trace * weights)
    return (sums / totals)[:, whole]


class ChainMean(NamedTuple):
    """The mean of draws, its standard error, R-hat, ESS and the chains' means (C,); NaN where draws are too few."""

    mean: float
    error: float
    rhat: float
    ess: float
    of_chains: Tensor


def chain_mean(values: Tensor) -> ChainMean:
    """Return the mean of draws, shape (chain, draw), with ArviZ's standard error and R-hat.

    Source: Vehtari et al. 2021.

    >>> found = chain_mean(torch.randn(4, 500, generator=torch.Generator().manual_seed(0)))
    >>> abs(found.mean) < 3 * found.error, 0.015 < found.error < 0.03
    (True, True)
    """
    values = values.cpu().double()
    of_chains = values.mean(1) if values.shape[1] else torch.full((len(values),), math.nan, dtype=torch.float64)
    mean = float(of_chains.mean())
    if values.shape[1] < FEWEST or not bool(values.isfinite().all()) or float(values.std()) == 0:
        return ChainMean(mean, math.nan, math.nan, math.nan, of_chains)
    arviz, array = import_arviz(), values.numpy()
    with silenced("arviz"):
        error, ess = float(arviz.mcse(array, method="mean")), float(arviz.ess(array, method="mean"))
    return ChainMean(mean, error, chain_diagnostics(array).rhat, ess, of_chains)


# -- findings ---------------------------------------------------------------------------------------------------------


def below_center(found: ChainMean, lowest: float | None) -> Finding | None:
    """Return the finding that the mean or lowest n·β·(L - L(w*)) lies below the chains' centre, or None."""
    limit = -DEPTH * max(1.0, found.mean)
    worst = float(found.of_chains.min())
    is_deep = lowest is not None and lowest < limit
    if found.mean >= 0 and not is_deep and not worst < limit:
        return None
    depth = min(worst, found.mean, lowest if lowest is not None else worst)
    return Finding(
        FindingKind.TARGET,
        f"target: n·β·(L - L(w*)) falls to {depth:.3g}, so the loss is lower near w* than at w*, which is no minimum",
        side="below",
        remedy="train the network until its loss stops falling, and measure at its new weights; or raise gamma",
    )


def disagreement(found: ChainMean, values: Tensor) -> Finding | None:
    """Return the finding that the R-hat of draws (C, B) is above 1.1 and that of few draws, or None."""
    time = correlation_time(values.cpu().double().numpy()[..., None])
    chains, draws = values.shape
    limit = max(LARGEST_RHAT, rhat_limit(chains, draws, FALSE_ALARM_RATE, time))
    if not found.rhat > limit:
        return None
    return Finding(
        FindingKind.CHAINS,
        f"chains: R-hat of the loss is {found.rhat:.2f}, above {limit:.2f}, so chains have not mixed",
        remedy="use more steps and a longer burn-in, or raise gamma",
    )


def drift(values: Tensor) -> Finding | None:
    """Return the finding that the loss of the later half of draws (C, B) differs from that of the earlier, or None."""
    half = values.shape[1] // 2
    first, second = chain_mean(values[:, :half]), chain_mean(values[:, half:])
    error, freedom = math.hypot(first.error, second.error), first.ess + second.ess - 2
    if not math.isfinite(error) or not freedom >= 1:
        return None
    change = second.mean - first.mean
    if abs(change) <= error * student_quantile(FALSE_ALARM_RATE / 2, int(freedom)):
        return None
    return Finding(
        FindingKind.ENERGY,
        f"energy: n·β·(L - L(w*)) drifts from {first.mean:.3g} in the earlier half to {second.mean:.3g} in the later",
        side="above" if change > 0 else "below",
        remedy="lengthen the burn-in; if the loss rises without end, use a smaller lr",
    )


def spikes(values: Tensor) -> Finding | None:
    """Return the finding that single draws (C, B) are far above the others, as a step too large makes them, or None.

    At large n·β the values have nearly a Gamma law (Watanabe 2009), whose tail is exponential.
    """
    middle = float(values.median())
    spread = float((values - middle).abs().median())
    limit = middle + SPIKE_NATS + SPIKE_DEVIATIONS * spread
    highest = float(values.max())
    if not highest > limit:
        return None
    return Finding(
        FindingKind.DIVERGENCE,
        f"divergence: n·β·(L - L(w*)) has a median of {middle:.3g} and rises to {highest:.3g} in single draws",
        side="above",
        remedy="use a smaller lr, and do not trust the mean of these draws",
    )


# -- covariances ------------------------------------------------------------------------------------------------------


class Covariance(NamedTuple):
    """Covariances (K, P) along chains, and standard errors for correlated draws; NaN with fewer than 2 draws."""

    value: Tensor
    error: Tensor


def covariance(first: Tensor, second: Tensor) -> Covariance:
    """Return Cov(a_k, b_p) over the draws of all chains, with standard errors by batch means within each chain.

    Args:
        first: a, shape (chain, draw) or (chain, draw, K).
        second: b, likewise, with P.

    >>> draws = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    >>> found = covariance(draws, 3 * draws)
    >>> round(float(found.value)), bool(found.error < 0.1)
    (3, True)
    """
    a, b = (widest(t)[..., None] if t.dim() == 2 else widest(t) for t in (first, second))
    if a.dim() != 3 or b.dim() != 3 or a.shape[:2] != b.shape[:2]:
        raise ValueError(
            f"both need the shape (chain, draw, …) of the same draws, got {tuple(first.shape)} and "
            f"{tuple(second.shape)}: pass values of the same samples"
        )
    chains, draws = a.shape[:2]
    if draws * chains < 2:
        raise ValueError(f"a covariance needs at least 2 draws, got {draws * chains}: draw more samples")
    a, b = a - a.mean((0, 1)), b - b.mean((0, 1))
    value = torch.einsum("ctk,ctp->kp", a, b) / (chains * draws - 1)
    size = max(1, draws // (MAX_BATCHES // 2))
    count = draws // size
    if count < 2:
        return Covariance(value, torch.full_like(value, math.nan))
    counts = torch.full((count,), float(size), dtype=torch.float64)
    squares = torch.zeros_like(value)
    for own in zip(a, b, strict=True):
        blocks = (tensor[: count * size].unflatten(0, (count, size)) for tensor in own)
        means = torch.einsum("nsk,nsp->nkp", *blocks) / size
        squares += mean_and_error(*merge_batches(means.flatten(1), counts))[1].reshape(value.shape).square()
    return Covariance(value, squares.sqrt() / chains)
