"""What a reference run says of itself: step sizes, acceptance, divergences, agreement of its chains."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_sgmcmc.diagnostics.chains import chain_diagnostics, rhat_limit
from lightning_sgmcmc.files import parse_json, read_regular, write_atomically
from lightning_sgmcmc.finite import finite_or_none
from lightning_sgmcmc.posterior.manifest import MANIFEST

REPORT = "reference.json"
LARGEST_REPORT = 2**24
FEWEST_PER_CHAIN = 100
"""Effective draws that each chain should have (Vehtari et al. 2021)."""
FALSE_ALARM_RATE = 0.01
"""Of the warning that chains disagree, over all quantities together."""
LOWEST_BFMI = 0.3
MOST_AT_LIMIT = 0.01


@dataclass(frozen=True)
class ReferenceReport:
    """The record of a reference run, also in `reference.json` of its folder.

    Attributes:
        settings: of the run: kernel, warmup, target_acceptance, seed, ….
        chains: C.
        draws: draws of each chain after the warm-up.
        parameters: number of sampled parameters.
        num_data: N.
        step_size: of each chain after the warm-up.
        acceptance: mean of each chain after the warm-up.
        divergences: trajectories of each chain that diverged after the warm-up.
        at_limit: share of each chain's trajectories that were cut at their largest length.
        leapfrogs: mean gradients of an iteration of each chain after the warm-up.
        bfmi: E(ΔH²)/Var(H) of each chain, the estimated Bayesian fraction of missing information.
        gradients: gradients over all data of each chain, warm-up included.
        seconds: time that the run took, over all its parts.
        rhat: the largest R-hat of the energy and of the log-likelihoods of up to 32 data; NaN for too few draws.
        ess_bulk: the smallest effective sample size of these.
        ess_tail: likewise, for the tails.
        warnings: what makes the draws doubtful as a truth, a sentence each.

    Source: Vehtari et al. 2021 (R-hat, effective sample sizes); Betancourt 2016 (bfmi).
    """

    settings: dict[str, Any]
    chains: int
    draws: int
    parameters: int
    num_data: int
    step_size: list[float]
    acceptance: list[float]
    divergences: list[int]
    at_limit: list[float]
    leapfrogs: list[float]
    bfmi: list[float]
    gradients: list[int]
    seconds: float
    rhat: float
    ess_bulk: float
    ess_tail: float
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the record in a few lines."""
        numbers = " ".join(f"{value:.2f}" for value in self.acceptance)
        steps = " ".join(f"{value:.3g}" for value in self.step_size)
        return "\n".join(
            [
                f"{self.settings['kernel']}: {self.chains} chains of {self.draws} draws, {self.parameters} parameters, "
                f"N = {self.num_data}, {self.seconds:.0f} s",
                f"acceptance {numbers}; step sizes {steps}; {sum(self.divergences)} divergences; "
                f"{np.mean(self.leapfrogs):.1f} gradients an iteration",
                f"R-hat {self.rhat:.3f}, effective draws {self.ess_bulk:.0f} (tails {self.ess_tail:.0f})",
                *(f"warning: {text}" for text in self.warnings),
            ]
        )


def write_report(folder: Path, report: ReferenceReport) -> None:
    """Write `reference.json` of a run's folder."""
    content = {name: _written(value) for name, value in asdict(report).items()}
    write_atomically(folder / REPORT, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def _written(value: Any) -> Any:
    """Return plain data in which None takes the place of numbers that are not finite."""
    if isinstance(value, list):
        return [_written(one) for one in value]
    return finite_or_none(value)


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(one) for one in value]
    return math.nan if value is None else value


def read_report(path: str | Path) -> ReferenceReport:
    """Return the record of a reference run.

    Args:
        path: the run's folder, or that of its samples.

    Raises:
        FileNotFoundError: if there is none: the run has not ended, or is of another kind.
        ValueError: if the file is damaged.
    """
    folder = Path(path)
    file = (folder.parent if (folder / MANIFEST).exists() else folder) / REPORT
    if not file.exists():
        raise FileNotFoundError(f"there is no {REPORT} in {path}: the run has not ended, or is no reference run")
    try:
        content = parse_json(read_regular(file, LARGEST_REPORT))
        return ReferenceReport(**{name: _read(value) for name, value in content.items()})
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def agreement(traces: np.ndarray) -> tuple[float, float, float]:
    """Return the largest R-hat and the smallest bulk and tail sizes of several quantities; NaN for too few draws.

    Args:
        traces: shape (C, S, Q).
    """
    found = [chain_diagnostics(traces[:, :, place]) for place in range(traces.shape[2])]
    values = np.array([(one.rhat, one.ess_bulk, one.ess_tail) for one in found])
    known = values[np.isfinite(values).all(1)]
    if len(known) == 0:
        return math.nan, math.nan, math.nan
    return float(known[:, 0].max()), float(known[:, 1].min()), float(known[:, 2].min())


def missing_information(hamiltonians: np.ndarray) -> list[float]:
    """Return E(ΔH²)/Var(H) of each chain; NaN for fewer than two iterations.

    Args:
        hamiltonians: H at the start of each iteration, shape (C, S).

    Source: Betancourt 2016 (Diagnosing suboptimal cotangent disintegrations in Hamiltonian Monte Carlo).
    """
    if hamiltonians.shape[1] < 2:
        return [math.nan] * len(hamiltonians)
    variance = np.maximum(hamiltonians.var(1), np.finfo(np.float64).tiny)
    return [float(value) for value in (np.diff(hamiltonians, axis=1) ** 2).mean(1) / variance]


def doubts(report: ReferenceReport, quantities: int) -> list[str]:
    """Return what makes a run's draws doubtful as a truth, a sentence each.

    Args:
        report: the run's, without warnings.
        quantities: number of quantities that R-hat is of.
    """
    chains, draws, found = report.chains, report.draws, []
    diverged = sum(report.divergences)
    if diverged:
        found.append(
            f"{diverged} of {chains * draws} trajectories diverged, so a region of high curvature is left out: raise "
            "target_acceptance, for instance to 0.95, or choose a prior without such a region"
        )
    if max(report.at_limit) > MOST_AT_LIMIT:
        remedy = "max_depth" if report.settings["kernel"] == "nuts" else "max_depth, or shorten length"
        found.append(
            f"{max(report.at_limit):.0%} of a chain's trajectories were cut at their largest length: raise {remedy}"
        )
    if min(report.bfmi) < LOWEST_BFMI:
        found.append(
            f"the momenta move the energy too little (bfmi {min(report.bfmi):.2f}, below {LOWEST_BFMI}), so heavy "
            "tails are visited rarely: make the run longer"
        )
    if chains == 1:
        found.append("one chain alone cannot show that it has missed a mode: run several")
    if math.isnan(report.rhat):
        found.append(f"{draws} draws of a chain are too few to compare chains: raise draws")
        return found
    limit = rhat_limit(chains, draws, FALSE_ALARM_RATE / max(quantities, 1))
    if report.rhat > limit:
        found.append(
            f"the chains disagree (R-hat {report.rhat:.2f}, above {limit:.2f}): make warm-up and run longer, or take "
            "them as samples of separate modes"
        )
    if report.ess_bulk < FEWEST_PER_CHAIN * chains:
        found.append(
            f"the run is worth {report.ess_bulk:.0f} independent draws, fewer than {FEWEST_PER_CHAIN} of each chain: "
            "raise draws"
        )
    return found
