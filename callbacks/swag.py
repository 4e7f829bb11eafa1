"""SWAG: Gaussians fitted to the iterates of SGD, and networks drawn from them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_sgmcmc.callbacks.planned_length import PlannedLength
from lightning_sgmcmc.callbacks.schedule import RunLength, Schedule, StepControls
from lightning_sgmcmc.chains.callback import ChainSizes
from lightning_sgmcmc.chains.chains import Chains, chains_of
from lightning_sgmcmc.chains.layout import ChainLayout, layout_of
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.checks import check_count, check_within
from lightning_sgmcmc.diagnostics.iterates import IterateMoments
from lightning_sgmcmc.evaluation.drawn_networks import check_statistics, refreshed
from lightning_sgmcmc.expansion import is_expanded
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.schedules import AveragingPlan
from lightning_sgmcmc.seeding import derive_seed


class SWAG(Schedule):
    """Fits a Gaussian to the iterates of each chain at a constant step size, and draws networks from it.

        θ = θ̄ + √(s/2)·Σ_diag^½·z₁ + √(s/(2·(K-1)))·D·z₂,   z₁, z₂ ~ N(0, I)

    θ̄ and Σ_diag are mean and variance of the collected iterates, D the last K deviations from the running mean. Chains
    are trained at temperature 0 (`SGHMC` is then SGD with momentum): the step size falls by a cosine to a constant,
    at which the last share of the run is collected. At its end each chain draws S networks, which are written as
    samples; they have BatchNorm statistics and energies of their own.

    Several chains are MultiSWAG. With `num_cycles` above 1 the step size restarts, and each cycle has a Gaussian of its
    own (cycSWAG). The moments are in host memory, K + 2 times the size of the parameters, and in checkpoints. A
    draw depends only on the iterates and (run's seed, chain, step, draw).

    Args:
        rank: K, deviations of the low-rank part, at most the number of iterates; 0 draws from N(θ̄, s·Σ_diag).
        num_draws: S, networks drawn from each Gaussian.
        num_cycles: number of cycles, each with a Gaussian.
        collection: share of a cycle in which iterates are collected.
        lr_factor: the constant step size over lr.
        every_n_steps: steps between iterates; None takes one each epoch, or more often, if a cycle would have fewer
            than 2K of them.
        scale: s, factor of the covariance.
        batch_norm_batches: training batches on which a network's BatchNorm statistics are estimated; None takes a pass
            over the data for each network.

    Raises:
        ValueError: for an argument out of range; at the start of the fit, if the run has no end, a cycle has fewer than
            two iterates, or BatchNorm's statistics cannot be estimated from the loader.

    Source: Maddox et al. 2019 (SWAG), Algorithm 1, eq. (1); Wilson & Izmailov 2020 (MultiSWAG), section 4.

    Example::

        trainer = pl.Trainer(max_epochs=100, callbacks=[SWAG(rank=20)])
    """

    temperature = 0.0

    def __init__(
        self,
        rank: int = 20,
        num_draws: int = 30,
        num_cycles: int = 1,
        collection: float = 0.25,
        lr_factor: float = 0.5,
        every_n_steps: int | None = None,
        scale: float = 1.0,
        batch_norm_batches: int | None = 100,
    ) -> None:
        check_count("rank", rank, least=0, optional=False)
        check_count("num_draws", num_draws, optional=False)
        check_count("num_cycles", num_cycles, optional=False)
        check_within("collection", collection, "(0, 1]")
        check_within("lr_factor", lr_factor, "(0, 1]")
        check_count("every_n_steps", every_n_steps)
        check_within("scale", scale, "(0, inf)")
        check_count("batch_norm_batches", batch_norm_batches)
        self.rank = rank
        self.num_draws = num_draws
        self.num_cycles = num_cycles
        self.collection = collection
        self.lr_factor = lr_factor
        self.every_n_steps = every_n_steps
        self.scale = scale
        self.batch_norm_batches = batch_norm_batches
        self.kind = "SWAG"
        self.moments = IterateMoments(rank)
        """Of the iterates of the current cycle; with several chains in the process, tensors have a chain axis."""
        self._length = PlannedLength("SWAG")
        self._layout: ChainLayout | None = None
        """Of the fit in progress."""
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._length.reset()
        self.moments.clear()
        self._plan: AveragingPlan | None = None
        self._run: tuple[pl.Trainer, Chains] | None = None
        self._cycle = 0
        self._restored: dict[str, Any] | None = None

    # -- before a run -------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        chains = chains_of(pl_module)
        total = layout_of(trainer, chains.num_chains).total_chains
        self.kind = "cycSWAG" if self.num_cycles > 1 else "MultiSWAG" if total > 1 else "SWAG"
        if any(map(is_expanded, pl_module.modules())):
            raise ValueError(
                "SWAG fits a Gaussian to the weights, and this network's are products of factors: use SWAG with the "
                "plain network, without expand"
            )
        if stage == "fit":
            chains.claims.claim("prepare samples", self)  # weights and energies would be those of an iterate
            chains.claims.claim("expand samples", self, self._draw)

    def lay_out(self, length: RunLength) -> None:
        total = self._length.steps_of(length)
        self._plan = AveragingPlan(
            total_steps=total,
            num_cycles=1 if length.is_trial else self.num_cycles,
            collection=1.0 if length.is_trial else self.collection,
            lr_factor=self.lr_factor,
            every_n_steps=self.every_n_steps or self._interval(length),
            least=1 if length.is_trial else 2,
        )

    def _interval(self, length: RunLength) -> int:
        stage = int(self.collection * math.ceil(length.steps / self.num_cycles))
        interval = max(stage // (2 * max(self.rank, 1)), 1)
        return min(interval, length.steps_per_epoch) if length.steps_per_epoch else interval

    def plan(self, trainer: pl.Trainer, module: BayesianModule) -> None:
        chains = module.chains
        check_statistics(trainer, module, "SWAG")
        super().plan(trainer, module)
        self._length.begin(trainer)
        layout = chains.layout
        self._run, self._layout = (trainer, chains), layout
        chains.tags.draws = self.num_draws
        chains.progress.num_cycles = self.laid_out.num_cycles if self.laid_out.num_cycles > 1 else None
        if self._restored is not None:
            self._cycle = self._restored["cycle"]
            self.moments.load_state_dict(self._restored["moments"], layout.own_stored)
            self._restored = None

    def memory(self, sizes: ChainSizes) -> int:
        iterates = sum(map(self.laid_out.collects, range(1, self.laid_out.period + 1)))
        return (2 + min(self.rank, iterates)) * sizes.parameters

    def announce_optimization(self, module: BayesianModule) -> None:
        """Say nothing: the callback's name says what its draws are."""

    # -- a step -------------------------------------------------------------------------------------------------------

    @property
    def laid_out(self) -> AveragingPlan:
        """The cycles over the run's length."""
        assert self._plan is not None, "the schedule has no length yet: call lay_out(RunLength(steps))"
        return self._plan

    @property
    def first_sample(self) -> int:
        return min(self.laid_out.period, self.laid_out.total_steps)

    def controls(self, step: int) -> StepControls:
        stage = Stage.SAMPLING if self.laid_out.is_collecting(step) else Stage.EXPLORATION
        return StepControls(self.laid_out.lr_factor_of(step), 0.0, stage)

    def apply(self, step: int, module: BayesianModule, sampler: Sampler) -> None:
        super().apply(step, module, sampler)
        module.chains.progress.cycle = self.laid_out.cycle_of(step)

    def draws(self, step: int) -> bool:
        return self.laid_out.ends_cycle(step)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self.has_stepped(pl_module) and self.laid_out.collects(self._step):
            cycle = self.laid_out.cycle_of(self._step)
            if cycle != self._cycle:
                self.moments.clear()
            self._cycle = cycle
            self.moments.add({name: p.detach().cpu() for name, p in chains_of(pl_module).trainable.items()})
        super().on_train_batch_end(trainer, pl_module, *args)

    def _draw(self, sample: PosteriorSample) -> Iterator[PosteriorSample]:
        """Yield networks drawn from the Gaussian of a sample's chain."""
        assert self._run is not None
        trainer, chains = self._run
        index = sample.chain - chains.layout.first_chain
        row = None if chains.stacked is None else index
        for draw in range(self.num_draws):
            seed = derive_seed(chains.seed or 0, "SWAG", sample.chain, sample.step, draw)
            drawn = self.moments.draw(torch.Generator().manual_seed(seed), self.scale, row)
            parameters = {name: drawn[name].to(p) if name in drawn else p for name, p in sample.parameters.items()}
            network = replace(sample, parameters=parameters, draw=draw)
            with chains.at(index):  # whose prior has its own scales, if it is hierarchical
                network = refreshed(trainer, chains, network, seed, self.batch_norm_batches)
            yield network

    # -- the end, checkpoints -----------------------------------------------------------------------------------------

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._run = self._layout = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._run = self._layout = None
        super().on_exception(trainer, pl_module, exception)

    def state_dict(self) -> dict[str, Any]:
        gather = self._layout.gather_stored if self._layout is not None else torch.clone
        return (
            super().state_dict()
            | self._length.state_dict()
            | {"cycle": self._cycle, "moments": self.moments.state_dict(gather)}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._length.load_state_dict(state_dict)
        self._restored = state_dict
