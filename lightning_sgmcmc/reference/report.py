"""What a reference run reports, the folder that it fills, and the traces of its chains."""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.diagnostics.draws import chain_diagnostics, rhat_limit
from lightning_sgmcmc.files import parse_json, read_regular, write_atomically
from lightning_sgmcmc.plain import as_plain, check_known, from_plain
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.lock import StoreLock
from lightning_sgmcmc.posterior.manifest import MANIFEST
from lightning_sgmcmc.reference.chains import HamiltonianChains, Settings
from lightning_sgmcmc.reference.kernels import COUNTED, Move
from lightning_sgmcmc.tables import Columns

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
    content = json.dumps(as_plain(report, finite=True), indent=2, allow_nan=False)
    write_atomically(folder / REPORT, (content + "\n").encode())


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
        report: ReferenceReport = from_plain(ReferenceReport, content)
        check_known(ReferenceReport, content)
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    return report


def agreement(traces: np.ndarray) -> tuple[float, float, float]:
    """Return the largest R-hat and the smallest bulk and tail sizes of traces, shape (C, S, Q); NaN for few draws."""
    found = [chain_diagnostics(traces[:, :, place]) for place in range(traces.shape[2])]
    values = np.array([(one.rhat, one.ess_bulk, one.ess_tail) for one in found])
    known = values[np.isfinite(values).all(1)]
    if len(known) == 0:
        return math.nan, math.nan, math.nan
    return float(known[:, 0].max()), float(known[:, 1].min()), float(known[:, 2].min())


def missing_information(hamiltonians: np.ndarray) -> list[float]:
    """Return E(ΔH²)/Var(H) of each chain from H at each iteration's start, shape (C, S); NaN for fewer than two.

    Source: Betancourt 2016 (Diagnosing suboptimal cotangent disintegrations in Hamiltonian Monte Carlo).
    """
    if hamiltonians.shape[1] < 2:
        return [math.nan] * len(hamiltonians)
    variance = np.maximum(hamiltonians.var(1), np.finfo(np.float64).tiny)
    return [float(value) for value in (np.diff(hamiltonians, axis=1) ** 2).mean(1) / variance]


def doubts(report: ReferenceReport, quantities: int, still: Sequence[str] = ()) -> list[str]:
    """Return what makes a run's draws doubtful as a truth, a sentence each; parameters in `still` did not move."""
    chains, draws, found = report.chains, report.draws, []
    if still:
        found.append(
            f"{', '.join(map(repr, still[:3]))} did not move in any chain, as where the scales of parameters differ by "
            "many powers of ten: give the parameters units in which they are of the order of 1"
        )
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


# -- folder ------------------------------------------------------------------------------------------------------------


SAMPLES, STATE = "samples", "chains.pt"
LARGEST_STATE = 2**34


class RunFolder:
    """A folder with a store and the state of its chains, in which one process makes a run, or continues it."""

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, Any],
        description: Any,
        columns: Columns,
        shared: Mapping[str, Tensor],
    ) -> None:
        self.path = path
        self._facts = dict(facts)
        self._lock = StoreLock(path / SAMPLES)
        try:
            self.state = self._saved()
            create = partial(DiskStore.create, path / SAMPLES, description, columns, shared)
            self.store = self._created(create) if self.state is None else self._continued(self.state)
        except BaseException:
            self._lock.release()
            raise

    def _saved(self) -> dict[str, Any] | None:
        file = self.path / STATE
        try:
            content = read_regular(file, LARGEST_STATE)
        except FileNotFoundError:
            return None
        try:
            saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            facts = saved["facts"]
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(
                f"{file} is damaged ({str(error).splitlines()[0][:100]}): remove {self.path} and start again"
            ) from error
        for name, own in self._facts.items():
            if facts.get(name) != own:
                what = name if name in ("data", "what is not sampled", "parameters") else f"{name}={facts.get(name)!r}"
                now = repr(own) if len(repr(own)) <= 60 else f"{repr(own)[:60]}…"
                raise ValueError(
                    f"{self.path} has a run with another {what} (now {now}), and a run cannot change what its draws "
                    "depend on: pass the same, or another folder as out"
                )
        found: dict[str, Any] = saved["state"]
        return found

    def _created(self, create: Callable[[], DiskStore]) -> DiskStore:
        manifest = self.path / SAMPLES / MANIFEST
        if manifest.exists():
            if len(DiskStore(self.path / SAMPLES)):
                raise FileExistsError(
                    f"{self.path / SAMPLES} has samples of another run, without {STATE}: pass another folder as out"
                )
            manifest.unlink()  # of a run that ended before its first draw
        return create()

    def _continued(self, state: Mapping[str, Any]) -> DiskStore:
        """Return the store without draws after the saved iteration, which are made again."""
        store = DiskStore(self.path / SAMPLES)
        made = int(state["chains"]["iteration"])
        store.keep([record for record in store.records if record.step <= made])
        if len(store) != int(state["samples"]):
            raise ValueError(
                f"{self.path / SAMPLES} holds {len(store)} of the run's {state['samples']} samples: restore the "
                "folder, or pass another one as out"
            )
        return store

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the state of the chains."""
        content = io.BytesIO()
        torch.save({"facts": self._facts, "state": dict(state)}, content)
        write_atomically(self.path / STATE, content.getbuffer())

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock.release()


# -- traces ------------------------------------------------------------------------------------------------------------


class Traces:
    """Sums over iterations, the Hamiltonians after the warm-up, and energies and log-likelihoods of the draws."""

    def __init__(self, chains: int) -> None:
        self._sums = {name: torch.zeros(chains, dtype=torch.float64) for name in COUNTED}
        self._gradients = torch.zeros(chains, dtype=torch.float64)
        """With the warm-up's."""
        self._hamiltonians: list[Tensor] = []
        self._draws: list[Tensor] = []
        """Each of shape (C, 1 + M)."""

    def add(self, move: Move, in_warmup: bool) -> None:
        """Add an iteration."""
        self._gradients = self._gradients + move.leapfrogs.cpu()
        if in_warmup:
            return
        self._sums = {name: total + getattr(move, name).cpu() for name, total in self._sums.items()}
        self._hamiltonians.append(move.hamiltonian.cpu())

    def add_draw(self, energy: Tensor, log_likelihoods: Tensor) -> None:
        """Add a draw of each chain: energies, shape (C,), and log-likelihoods of some data, shape (C, M)."""
        self._draws.append(torch.cat([energy[:, None], log_likelihoods], 1).cpu())

    def progress(self, chains: HamiltonianChains, settings: Settings, seconds: float) -> str:
        """Return a line on how far the run is."""
        each = float(self._gradients.mean()) / max(chains.iteration, 1)
        stage = "warm-up" if chains.in_warmup else "draws"
        return (
            f"Iteration {chains.iteration} of {settings.iterations} ({stage}) after {seconds:.0f} s, "
            f"{each:.0f} gradients an iteration."
        )

    def report(
        self,
        chains: HamiltonianChains,
        settings: Settings,
        parameters: int,
        num_data: int,
        seconds: float,
        still: Sequence[str],
    ) -> ReferenceReport:
        """Return the record of a run that has ended, of P parameters, of which some did not move, and N data."""
        count = len(self._hamiltonians)
        means = {name: (total / count).tolist() for name, total in self._sums.items()}
        values = torch.stack(self._draws, 1).numpy()
        rhat, bulk, tail = agreement(values)
        found = ReferenceReport(
            settings=settings.law(),
            chains=len(values),
            draws=count,
            parameters=parameters,
            num_data=num_data,
            step_size=chains.step_size.tolist(),
            acceptance=means["acceptance"],
            divergences=[int(number) for number in self._sums["divergent"].tolist()],
            at_limit=means["at_limit"],
            leapfrogs=means["leapfrogs"],
            bfmi=missing_information(np.stack([h.numpy() for h in self._hamiltonians], 1)),
            gradients=[int(number) for number in self._gradients.tolist()],
            seconds=seconds,
            rhat=rhat,
            ess_bulk=bulk,
            ess_tail=tail,
        )
        found.warnings.extend(doubts(found, values.shape[2], still))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the present numbers; `to_write` makes tensors of their lists."""
        lists = {"hamiltonians": list(self._hamiltonians), "draws": list(self._draws)}
        return {"sums": self._sums, "gradients": self._gradients} | lists

    @staticmethod
    def to_write(traces: dict[str, Any]) -> dict[str, Any]:
        """Return what `state_dict` returned in the form of a file, which `load_state_dict` takes."""
        tensors = {name: traces[name] for name in ("hamiltonians", "draws")}
        return traces | {name: torch.stack(rows) if rows else torch.zeros(0) for name, rows in tensors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._gradients = dict(state["sums"]), state["gradients"]
        self._hamiltonians, self._draws = list(state["hamiltonians"].unbind()), list(state["draws"].unbind())
