"""Comparison of a run's chains, with one another and with all chains pooled: energies and predictions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import ChainDiagnostics, ChainGrid, chain_diagnostics
from lightning_sgmcmc.diagnostics.scores import predictive_entropy
from lightning_sgmcmc.evaluation.averages import WeightedAverage

PROBES = 256
"""Number of evaluation data, evenly spaced, on which chains are compared."""
FOLLOWED = 32
"""Number of these data whose log densities are stored for every sample."""
KEPT = ("probabilities", "mean", "square", "variance")
"""Terms of the predictive by which chains are compared."""


class ChainComparison:
    """Each chain's own average on part of an evaluation set, and the samples' log densities on fewer data."""

    def __init__(self) -> None:
        self.averages: dict[int, WeightedAverage] = {}
        """By chain."""
        self.chains: list[int] = []
        """Each sample's chain."""
        self.comparable = True
        """Whether log-weights compare across chains; else chains count alike."""
        self._densities: list[Tensor] = []

    def add(
        self, chain: int, log_weight: float, terms: Mapping[str, Tensor], log_density: Tensor, comparable: bool = True
    ) -> None:
        """Add a sample's terms, first axis n, and log p(y|x,θ), shape (n,), on the evaluation data."""
        self.comparable &= comparable
        probes = _spread(len(log_density), PROBES).to(log_density.device)
        average = self.averages.setdefault(chain, WeightedAverage())
        average.add({name: terms[name][probes] for name in KEPT if name in terms}, log_density[probes], log_weight)
        self.chains.append(chain)
        self._densities.append(log_density[_spread(len(log_density), FOLLOWED).to(log_density.device)].float().cpu())

    @property
    def disagreement(self) -> float:
        """Disagreement between the chains' predictives: 0 if all agree, NaN with one chain.

        For classification it is the entropy of the chains' mean predictive minus their mean entropy,
        H(mean_c p_c) - mean_c H(p_c), in nats, averaged over the data. For regression it is the variance between the
        chains' predictive means as a share of the pooled predictive variance.
        """
        known = [average for average in self.averages.values() if average.log_total > -math.inf]
        if len(known) < 2:
            return math.nan
        of_chains = {
            name: torch.stack([average.terms[name].cpu().double() for average in known]) for name in known[0].terms
        }
        if "probabilities" in of_chains:
            each = of_chains["probabilities"]
            return float((predictive_entropy(each.mean(0)) - predictive_entropy(each).mean(0)).mean())
        if "mean" in of_chains:
            means = of_chains["mean"]
            total = of_chains["square"].mean(0) - means.mean(0).square() + of_chains["variance"].mean(0)
            return float((means.var(0, correction=0) / total).mean())
        return math.nan

    def nll(self, chain: int) -> float:
        """Return the mean negative log likelihood of a chain's own average, in nats per example."""
        average = self.averages[chain]
        return -float(average.log_density.mean()) if average.log_total > -math.inf else math.nan

    @property
    def densities(self) -> np.ndarray:
        """The samples' log densities on the tracked data, shape (S, K)."""
        return torch.stack(self._densities).numpy() if self._densities else np.zeros((0, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers and tensors."""
        return {
            "averages": {chain: average.state_dict() for chain, average in self.averages.items()},
            "chains": list(self.chains),
            "comparable": self.comparable,
            "densities": torch.stack(self._densities) if self._densities else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.averages = {chain: WeightedAverage.of(saved) for chain, saved in state["averages"].items()}
        self.chains = list(state["chains"])
        self.comparable = state["comparable"]
        self._densities = list(state["densities"]) if state["densities"] is not None else []


@dataclass(frozen=True)
class ChainRow:
    """Summary statistics of one chain, or of all chains pooled (`chain` is None): energies in nats, their diagnostics
    (for one chain, between its halves), and the NLL of the average on the compared data, NaN if none was evaluated."""

    chain: int | None
    samples: int
    energy: float
    energy_std: float
    diagnostics: ChainDiagnostics
    nll: float


def chain_rows(
    chains: Sequence[int], energies: Sequence[float], comparison: ChainComparison | None = None
) -> list[ChainRow]:
    """Return one row per chain and, last, one for all; `energies` are each sample's energy, in nats."""
    values, labels = np.asarray(energies, dtype=float), np.asarray(chains)
    rows = []
    for chain in sorted(set(chains)):
        own = values[labels == chain]
        nll = comparison.nll(chain) if comparison is not None and chain in comparison.averages else math.nan
        rows.append(ChainRow(chain, *_summary(own), chain_diagnostics(own[None]), nll))
    pooled = math.nan
    if comparison is not None and comparison.averages:
        together = WeightedAverage()
        for average in comparison.averages.values():
            if average.log_total > -math.inf:
                share = average.log_total if comparison.comparable else 0.0  # else chains count alike
                together.add({}, average.log_density.cpu(), share)
        pooled = -float(together.log_density.mean()) if together.log_total > -math.inf else math.nan
    rows.append(
        ChainRow(None, *_summary(values), chain_diagnostics(ChainGrid.of_chains(chains).arrange(values)), pooled)
    )
    return rows


def prediction_diagnostics(comparison: ChainComparison) -> ChainDiagnostics:
    """Return the worst diagnostics of log p(y|x,θ) along the chains, over the tracked data."""
    known: list[ChainDiagnostics] = []
    if comparison.chains:
        grid = ChainGrid.of_chains(comparison.chains)
        each = [chain_diagnostics(grid.arrange(column)) for column in comparison.densities.T]
        known = [one for one in each if math.isfinite(one.rhat)]
    return ChainDiagnostics(
        rhat=max((one.rhat for one in known), default=math.nan),
        ess_bulk=min((one.ess_bulk for one in known), default=math.nan),
        ess_tail=min((one.ess_tail for one in known), default=math.nan),
    )


def _summary(energies: np.ndarray) -> tuple[int, float, float]:
    deviation = float(np.std(energies, ddof=1)) if len(energies) > 1 else math.nan
    return len(energies), float(np.mean(energies)), deviation


def _spread(count: int, most: int) -> Tensor:
    """Return indices of at most `most` data, evenly spaced."""
    return torch.linspace(0, count - 1, min(count, most)).round().long()


# -- html table --------------------------------------------------------------------------------------------------------


def html_table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table; numbers have four significant digits, and all text is escaped."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(_text(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
