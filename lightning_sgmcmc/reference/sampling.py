"""The truth of a small network: `sample` draws from a module's posterior by NUTS or HMC with full gradients."""

import math
import time
from pathlib import Path
from typing import Any

import torch

from lightning_sgmcmc.chains.starts import ChainStart
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import rank_zero_info, rank_zero_warn
from lightning_sgmcmc.posterior.description import description_for_store
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.export import unmoved
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.posterior.store import MemoryStore, SampleStore
from lightning_sgmcmc.reference.chains import HamiltonianChains, Kernel, Settings
from lightning_sgmcmc.reference.problem import Problem, plain_copy
from lightning_sgmcmc.reference.report import ReferenceReport, RunFolder, Traces, write_report

SAVE_EVERY = 30.0
"""Seconds between two saved states."""
TELL_EVERY = 60.0
"""Seconds between two messages."""
LIKELY_LEAPFROGS = (15, 255)
"""Gradients of an iteration after the warm-up, for the cost that is told before."""


class ReferencePosterior(Posterior):
    """A posterior of reference draws, with the record of their run.

    Attributes:
        report: the record; None of a selection of draws.
    """

    report: ReferenceReport | None = None


def sample(
    module: BayesianModule,
    data: Any,
    kernel: Kernel = "nuts",
    chains: int = 4,
    warmup: int = 1000,
    draws: int = 1000,
    seed: int = 0,
    out: str | Path | None = None,
    *,
    every_n_draws: int = 1,
    start: "ChainStart | None" = None,
    dtype: torch.dtype | None = None,
    target_acceptance: float = 0.8,
    max_depth: int = 10,
    length: float = math.pi / 2,
    jitter: float = 0.5,
    batch_size: int = 10_000,
) -> ReferencePosterior:
    """Draw from a module's posterior by Hamiltonian Monte Carlo with full gradients: the truth of a small network.

        exp(-U(θ)/τ),   U(θ) = -Σ_i log p(y_i|x_i,θ) - log p(θ),   τ the module's temperature

    The posterior is that of a fit of the same module: its likelihood, prior, sampled parameters and `log_likelihood`.
    A Metropolis test or multinomial sampling over the trajectory removes the error of the step size, and there is no
    mini-batch noise. The warm-up adapts each chain's step size by dual averaging and its diagonal inverse mass in
    windows, as Stan does. The network is in evaluation mode, so BatchNorm's statistics are constants and dropout is
    off. The scales of a `HierarchicalPrior` are integrated out, and drawn for each sample. With a prior whose centre is
    "start", the centre of all chains is the module's own state.

    Chain c of iteration k draws only from the stream of (seed, c, k). A run that was interrupted continues bit for bit
    by the same call, on the same machine; a run that has ended is opened, and continued if `draws` is larger than
    before. All computation is on the module's device, in the calling process.

    Args:
        module: the module; it is copied and stays as it is. Its sampler, lr and number of chains have no effect; its
            `chain_execution` says how chains are computed, on a CPU one after another unless it is "vmap".
        data: the training data: a datamodule, a loader or data set with a length, or a pair of tensors (x, y). All of
            it is held on the module's device.
        kernel: "nuts", or "hmc" with trajectories of the length `length`.
        chains: C; at least 4 for a reliable R-hat.
        warmup: iterations that adapt, without draws.
        draws: iterations of each chain after these.
        seed: of starts and draws.
        out: folder of the run, which `Posterior.load` opens; None keeps the samples in memory.
        every_n_draws: keep every n-th draw as a sample.
        start: how chains start, as `chain_start` of `BayesianModule`; None is as the module says.
        dtype: torch.float64 for chains in double precision; None is the module's own.
        target_acceptance: mean acceptance that the step size is adapted to; nearer to 1 is slower, with fewer
            divergences.
        max_depth: doublings of a trajectory at most: 2^max_depth - 1 gradients; also the limit of "hmc". Before the
            first window of the warm-up has ended it is at most 7.
        length: mean length of a trajectory of "hmc" in units of time, where every coordinate has about the standard
            deviation 1.
        jitter: the length of "hmc" is uniform within this share of its mean.
        batch_size: data in a piece of the energy; it bounds the memory, and has no other effect.

    Returns:
        the posterior, whose `report` has step sizes, acceptance, divergences, R-hat and effective sample sizes, with a
        sentence for each doubt. In a folder it is also `reference.json`.

    Raises:
        TypeError: if the module is no `BayesianModule`, or `data` has another type.
        ValueError: for an argument out of range, a module with stacked chains, a temperature that is not one positive
            number, data with NaN or without a length, a start whose energy is not finite, or a folder with another run.
        FileExistsError: if the folder has samples of another kind of run.

    Example::

        from lightning_sgmcmc import reference

        module = BayesianModule(torch.nn.Linear(2, 1), Gaussian(1.0))
        x = torch.randn(30, 2)
        truth = reference.sample(module, (x, x[:, :1]), chains=2, warmup=60, draws=30)
        mean, report = truth.predict(x).mean, truth.report

    Source: Hoffman & Gelman 2014 (The No-U-Turn sampler); Betancourt 2017 (A conceptual introduction to Hamiltonian
    Monte Carlo); Neal 2011; Izmailov et al. 2021 (HMC as the reference of Bayesian neural networks).
    """
    law = target_acceptance, max_depth, float(length), float(jitter)
    settings = Settings(kernel, warmup, draws, every_n_draws, *law, seed)
    check_count("chains", chains, optional=False)
    check_count("batch_size", batch_size, optional=False)
    problem = Problem(module, data, batch_size, chains, start, seed, dtype)
    store, report = _made(problem, settings, None if out is None else Path(out), module)
    for text in report.warnings:
        rank_zero_warn(f"The reference draws are doubtful: {text}.")
    posterior = ReferencePosterior(store, plain_copy(module).eval())
    posterior.report = report
    return posterior


def _made(
    problem: Problem, settings: Settings, out: Path | None, module: BayesianModule
) -> tuple[SampleStore, ReferenceReport]:
    """Return the samples of a run, in memory or in the folder `out`, and its report."""
    if out is None:
        store = MemoryStore()
        store.columns = problem.columns
        return store, _Run(problem, settings, store, None).make()
    facts = problem.facts() | settings.law() | {"chains": len(problem.initial)}
    folder = RunFolder(out, facts, description_for_store(module), problem.columns, problem.shared())
    try:
        report = _Run(problem, settings, folder.store, folder).make()
        write_report(folder.path, report)
    finally:
        folder.close()
    return DiskStore(folder.store.path), report


class _Run:
    """Makes the iterations of a run, from the folder's state if it has one, and keeps its samples, traces and state."""

    def __init__(self, problem: Problem, settings: Settings, store: SampleStore, folder: RunFolder | None) -> None:
        self._problem = problem
        self._settings = settings
        self._store = store
        self._folder = folder
        self._chains = HamiltonianChains(problem.energy, problem.initial, settings)
        self._traces = Traces(len(problem.initial))
        self._seconds = 0.0
        if folder is not None and folder.state is not None:
            self._chains.load_state_dict(folder.state["chains"])
            self._traces.load_state_dict(folder.state["traces"])
            self._seconds = float(folder.state["seconds"])
        if self._chains.iteration > settings.iterations:
            made = self._chains.iteration - settings.warmup
            raise ValueError(
                f"the folder has a run of {made} draws, and draws={settings.draws} are fewer: pass draws={made}, and "
                "thin the posterior"
            )
        self._complete = self._state()

    def make(self) -> ReferenceReport:
        """Make the iterations that remain; return the run's record."""
        self._tell_cost()
        begun = saved = told = time.monotonic()
        earlier = self._seconds
        try:
            while self._chains.iteration < self._settings.iterations:
                self._iterate()
                now = time.monotonic()
                self._seconds = earlier + now - begun
                self._complete = self._state()
                if now - saved > SAVE_EVERY or self._chains.iteration == self._settings.warmup:
                    self._save()
                    saved = time.monotonic()
                if now - told > TELL_EVERY:
                    told = now
                    rank_zero_info(self._traces.progress(self._chains, self._settings, now - begun))
        except BaseException:
            self._save()
            if self._folder is not None:
                made = self._complete["chains"]["iteration"]
                rank_zero_info(f"The run is saved at iteration {made}; the same call continues it.")
            raise
        self._save()
        sizes = self._problem.initial.shape[1], self._problem.num_data
        return self._traces.report(self._chains, self._settings, *sizes, self._seconds, unmoved(self._store))

    def _iterate(self) -> None:
        chains, settings, problem = self._chains, self._settings, self._problem
        in_warmup = chains.in_warmup
        move = chains.advance()
        self._traces.add(move, in_warmup)
        drawn = chains.iteration - settings.warmup
        if in_warmup or drawn % settings.every_n_draws:
            return
        for chain, row, energy in zip(chains.chains, move.phase.place, move.phase.energy.tolist(), strict=True):
            self._store.append(problem.sample(row, energy, chains.iteration, chain))
        self._traces.add_draw(move.phase.energy, problem.energy.log_likelihoods(move.phase.place))

    def _state(self) -> dict[str, Any]:
        return {
            "chains": self._chains.state_dict(),
            "traces": self._traces.state_dict(),
            "samples": len(self._store),
            "seconds": self._seconds,
        }

    def _save(self) -> None:
        if self._folder is not None:
            self._folder.save(self._complete | {"traces": Traces.to_write(self._complete["traces"])})

    def _tell_cost(self) -> None:
        """Say what the run will cost, from one gradient, if that is more than a minute."""
        left = self._settings.iterations - self._chains.iteration
        begun = time.monotonic()
        self._problem.energy(self._problem.initial)
        each = time.monotonic() - begun
        low, high = (left * leapfrogs * each for leapfrogs in LIKELY_LEAPFROGS)
        if low < 60:
            return
        text = (
            f"A gradient over all {self._problem.num_data} data takes {each:.2g} s for {len(self._problem.initial)} "
            f"chains of {self._problem.initial.shape[1]} parameters, so {left} iterations of {LIKELY_LEAPFROGS[0]} to "
            f"{LIKELY_LEAPFROGS[1]} gradients take {_duration(low)} to {_duration(high)}."
        )
        if low > 3600:
            rank_zero_warn(f"{text} For a network of this size, a sampler with mini-batches is the usual choice.")
        else:
            rank_zero_info(text)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds > 3600 else f"{seconds / 60:.0f} min"
