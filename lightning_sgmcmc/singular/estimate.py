"""The estimate of a local learning coefficient: value, error, traces, findings, figure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_sgmcmc import figures
from lightning_sgmcmc.diagnostics.draws import (
    MAX_BATCHES,
    chain_diagnostics,
    correlation_time,
    import_arviz,
    mean_and_error,
    merge_batches,
    number,
    rhat_limit,
    student_quantile,
)
from lightning_sgmcmc.health.findings import Finding, FindingKind, ranked
from lightning_sgmcmc.health.report import Verdict
from lightning_sgmcmc.plain import as_plain
from lightning_sgmcmc.process import silenced
from lightning_sgmcmc.tensors import widest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LearningCoefficientEstimate:
    """An estimate of the local learning coefficient.

        λ̂ = n·β·(E[L(w)] - L(w*)),   w ~ exp(-n·β·L(w) - γ/2·‖w - w*‖²)

    Attributes:
        value: λ̂, the mean over all draws of all chains.
        standard_error: of the value, for correlated draws; NaN for fewer than 8 draws of a chain.
        of_chains: the estimate of each chain, shape (C,).
        rhat: rank-normalised split R-hat of the loss.
        ess: effective number of draws for the mean loss.
        nbeta: n·β, the inverse temperature of the mean loss.
        gamma: γ; None if parameters have different ones.
        num_data: n.
        center_loss: L(w*) over all data, in nats per example, the mean over chains.
        traces: n·β·(L - L(w*)) of each chain at each step or draw after the burn-in, shape (C, T).
        steps: the optimizer step of each, shape (T,).
        loss: what L is at a step: "own", "full" or "step" (see `LearningCoefficient`).
        findings: what makes the value doubtful, the most urgent first.
    """

    WRITTEN: ClassVar = (
        *("value", "standard_error", "rhat", "ess", "nbeta", "gamma", "num_data", "center_loss"),
        *("of_chains", "draws", "loss", "verdict", "findings"),
    )

    value: float
    standard_error: float
    of_chains: Tensor
    rhat: float
    ess: float
    nbeta: float
    gamma: float | None
    num_data: int
    center_loss: float
    traces: Tensor
    steps: Tensor
    loss: str
    findings: tuple[Finding, ...] = ()

    @property
    def draws(self) -> int:
        """Number of values in each chain's trace."""
        return self.traces.shape[1]

    @property
    def verdict(self) -> Verdict:
        """ "ok", "warning" if a finding is a problem, or "unknown" without a standard error."""
        if any(finding.severity == "problem" for finding in self.findings):
            return "warning"
        return "ok" if math.isfinite(self.standard_error) else "unknown"

    @property
    def advice(self) -> str:
        """The remedy of the most urgent finding; "" without a finding."""
        return self.findings[0].remedy if self.findings else ""

    def figure(self) -> "Figure":
        """Draw the traces of the chains, and their running means with the estimate."""
        steps = self.steps.tolist()
        chains = {chain: (steps, values.tolist()) for chain, values in enumerate(self.traces)}
        return figures.learning_coefficient_figure(chains, self.value, self.standard_error)

    def scalars(self) -> dict[str, float]:
        """Return the numbers for a logger."""
        found = {"value": self.value, "standard_error": self.standard_error, "rhat": self.rhat, "ess": self.ess}
        found["center_loss"] = self.center_loss
        scalars = {f"learning_coefficient/{name}": number for name, number in found.items() if math.isfinite(number)}
        return scalars | {"learning_coefficient/findings": float(len(self.findings))}

    def as_json(self) -> dict[str, Any]:
        """Return the estimate without its traces: dictionaries, lists, strings and numbers; None for NaN."""
        return as_plain(self, finite=True)

    def __repr__(self) -> str:
        parts = [f"value={self.value:.4g}", f"standard_error={self.standard_error:.2g}", f"rhat={self.rhat:.3f}"]
        parts += [f"chains={len(self.traces)}", f"draws={self.traces.shape[1]}", f"verdict={self.verdict!r}"]
        return f"{type(self).__name__}({', '.join(parts)})"

    def __str__(self) -> str:
        lines = [
            f"learning coefficient {self.value:.4g} ± {self.standard_error:.2g} (n·β = {self.nbeta:.4g}, "
            f"{len(self.traces)} chains, R-hat {self.rhat:.2f}, {self.ess:.0f} effective draws): {self.verdict}"
        ]
        return "\n".join([*lines, *(finding.text for finding in self.findings)])


def estimate_of(
    traces: Tensor,
    steps: Tensor,
    epochs: Tensor,
    sizes: Tensor,
    loss: str,
    notes: Sequence[Finding],
    **facts: Any,
) -> LearningCoefficientEstimate:
    """Return the estimate from what a run recorded at each step or draw, and from known facts by their names.

    Args:
        traces: n·β·(L - L(w*)), shape (C, T).
        steps, epochs, sizes: the optimizer step, the epoch, and the number of data of the batch, shape (T,).
    """
    values = epoch_means(traces, epochs, sizes) if loss == "step" else widest(traces)
    found = chain_mean(values)
    findings: list[Finding | None] = [*notes]
    if values.shape[1] >= FEWEST:
        lowest = float(values.min()) if loss == "full" else None
        findings += [below_center(found, lowest), disagreement(found, values), drift(values), spikes(values)]
    return LearningCoefficientEstimate(
        value=found.mean,
        standard_error=found.error,
        of_chains=found.of_chains,
        rhat=found.rhat,
        ess=found.ess,
        **facts,
        traces=widest(traces),
        steps=steps,
        loss=loss,
        findings=ranked(findings),
    )


def notes_on(
    relaxation_times: float | None, differs_in_training: bool, temperatures: tuple[float, float]
) -> list[Finding]:
    """Return the findings on a run's settings, by the planned relaxation times of the directions that only γ holds, and
    the temperatures of the first and the last draw."""
    found = []
    if not math.isclose(*temperatures, rel_tol=1e-6):
        first, last = temperatures
        sentence = f"other: the temperature changed from {first:.4g} to {last:.4g}, so the draws have no one n·β"
        found.append(Finding(FindingKind.OTHER, sentence, remedy="use a schedule with one temperature"))
    if relaxation_times is not None and relaxation_times < 1:
        sentence = (
            f"relaxation: the run covers {relaxation_times:.2g} relaxation times of the directions in which only γ "
            "holds the chains"
        )
        remedy = "use a larger gamma or lr, or more steps"
        found.append(Finding(FindingKind.RELAXATION, sentence, remedy=remedy, severity="note"))
    if differs_in_training:
        sentence = (
            "other: dropout or BatchNorm makes the loss of a step another function than the loss in evaluation mode"
        )
        remedy = "pass loss='full', or remove dropout and freeze BatchNorm (module.eval())"
        found.append(Finding(FindingKind.OTHER, sentence, remedy=remedy, severity="note"))
    return found


# -- draws around a center ---------------------------------------------------------------------------------------------


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
        error, ess = number(arviz.mcse(array, method="mean")), number(arviz.ess(array, method="mean"))
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
