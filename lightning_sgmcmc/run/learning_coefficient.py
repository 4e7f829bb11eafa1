"""The estimate of a local learning coefficient: value, error, traces, findings, figure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from lightning_sgmcmc import figures
from lightning_sgmcmc.diagnostics.findings import Finding, FindingKind, ranked
from lightning_sgmcmc.diagnostics.health import Verdict
from lightning_sgmcmc.diagnostics.local import (
    FEWEST,
    below_center,
    chain_mean,
    disagreement,
    drift,
    epoch_means,
    spikes,
)
from lightning_sgmcmc.plain import as_plain
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
        center_loss: L(w*) over all data, in nats per datum, the mean over chains.
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
    facts: "LocalFacts",
    notes: Sequence[Finding | None] = (),
) -> LearningCoefficientEstimate:
    """Return the estimate from what a run recorded at each step or draw.

    Args:
        traces: n·β·(L - L(w*)), shape (C, T).
        steps, epochs, sizes: the optimizer step, the epoch, and the number of data of the batch, shape (T,).
        loss: "own", "full" or "step".
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
        **vars(facts),
        traces=widest(traces),
        steps=steps,
        loss=loss,
        findings=ranked(findings),
    )


@dataclass(frozen=True)
class LocalFacts:
    """Numbers of a run around a centre, as in `LearningCoefficientEstimate`."""

    nbeta: float
    gamma: float | None
    num_data: int
    center_loss: float


def few_relaxations(times: float | None) -> Finding | None:
    """Return the note that the localisation's directions have not relaxed, by the plan's relaxation times, or None."""
    if times is None or times >= 1:
        return None
    return Finding(
        FindingKind.RELAXATION,
        f"relaxation: the run covers {times:.2g} relaxation times of the directions in which only γ holds the chains",
        remedy="use a larger gamma or lr, or more steps",
        severity="note",
    )


def mode_difference() -> Finding:
    """Return the note that a network's loss differs between training and evaluation mode."""
    return Finding(
        FindingKind.OTHER,
        "other: dropout or BatchNorm makes the loss of a step another function than the loss in evaluation mode",
        remedy="pass loss='full', or remove dropout and freeze BatchNorm (module.eval())",
        severity="note",
    )


def other_temperature(first: float, last: float) -> Finding | None:
    """Return the finding that the temperature has changed among the draws, or None."""
    if math.isclose(first, last, rel_tol=1e-6):
        return None
    return Finding(
        FindingKind.OTHER,
        f"other: the temperature changed from {first:.4g} to {last:.4g}, so the draws have no one n·β",
        remedy="use a schedule with one temperature",
    )
