"""Baselines: deep ensembles, SWAG and Monte Carlo dropout, whose networks come from optimization."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_sgmcmc.callbacks.schedule import WholeRunSchedule
from lightning_sgmcmc.chains.callback import ChainSizes, Place, Run, SamplerCallback
from lightning_sgmcmc.chains.chains import ChainModel, chains_of
from lightning_sgmcmc.chains.execution import MASK_SEED, dropout_layers
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.schedule import FirstStage, RunLength, StepControls, require_schedule
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.trainer import instances_of
from lightning_sgmcmc.chains.warm_start import ChainOptimizers, check_optimizer, chosen_decay, make_optimizer
from lightning_sgmcmc.checks import check_choice, check_count, check_within
from lightning_sgmcmc.evaluation.drawn_networks import check_statistics, refreshed
from lightning_sgmcmc.expansion import is_expanded
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.priors import FlatPrior
from lightning_sgmcmc.samplers.factories import name_of
from lightning_sgmcmc.schedules import AveragingPlan, cyclical_lr_factor
from lightning_sgmcmc.seeding import derive_seed

WITHOUT_MASK = (nn.MultiheadAttention, nn.RNNBase)
"""Layers with dropout of their own, which has no mask."""


class DeepEnsemble(WholeRunSchedule[int]):
    """Trains every chain by optimization, at temperature 0, and takes its last state as one member of the ensemble.

        lr_k = lr_0/2·[cos(π·(k-1)/K) + 1]·min(1, k/W),   K the run's optimizer steps, W = ⌈warm_up·K⌉

    `BayesianModule(num_chains=M)` has M members, each with its own start, data order and dropout, bit for bit the
    network that its chain would be alone. At temperature 0 `SGHMC` is SGD with momentum, `SGLD` is SGD and `pSGLD`
    is RMSprop; the prior is the weight decay. One chain is a single network. The members are written as samples, but
    they are not samples of the posterior.

    Args:
        lr_decay: "cosine" as above; "constant" keeps lr_0 after the warm-up, or without one leaves it to a scheduler of
            torch.
        optimizer: a class of `torch.optim`, or a partial of one, whose `step` needs no closure. It trains every chain
            at the module's lr, one number; None is the module's sampler at temperature 0. Its weight decay is 0, since
            the prior is in the loss, unless a partial sets one (AdamW's is decoupled), which needs `FlatPrior()`.
        warm_up: share of the run in which lr rises linearly, in [0, 1).

    Raises:
        ValueError: for an argument out of range; at the start of the fit, if the run has no end, its members would be
            equal because they share both their start and their batches, or the optimizer has several step sizes, a
            weight decay beside a prior, or a `WarmStart` before it.
        TypeError: for an optimizer that is none, or that needs a closure.

    Source: Lakshminarayanan et al. 2017, Algorithm 1 (without adversarial training).

    Example::

        trainer = pl.Trainer(max_epochs=50, callbacks=[DeepEnsemble()])
    """

    temperature = 0.0
    needs_trainer = True
    kinds = ("single network", "deep ensemble")

    def __init__(
        self,
        lr_decay: Literal["cosine", "constant"] = "cosine",
        optimizer: Callable[..., Optimizer] | None = None,
        warm_up: float = 0.0,
    ) -> None:
        check_choice("lr_decay", lr_decay, ("cosine", "constant"))
        check_within("warm_up", warm_up, "[0, 1)")
        if optimizer is not None:
            check_optimizer(optimizer, "BayesianModule(lr=…)", decays=True)
        self.lr_decay = lr_decay
        self.optimizer = optimizer
        self.warm_up = warm_up
        self._optimizers: ChainOptimizers | None = None

    @property
    def sets_lr(self) -> bool:  # type: ignore[override]
        return self.lr_decay == "cosine" or self.warm_up > 0

    def plan_over(self, steps: int, length: RunLength) -> int:
        return steps

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        members, start = run.layout.total_chains, run.chains.start
        if members > 1 and start == "same" and run.chains.shared_batch:
            raise ValueError(
                f"the {members} members of this DeepEnsemble would be equal, because chain_start='same' and "
                "shared_batch=True give them one start and one data order: omit one of the two"
            )
        super().begin(run, saved)
        if self.optimizer is not None:
            self._begin_optimizers(run, self.optimizer, None if saved is None else saved.get("optimizers"))

    def _begin_optimizers(self, run: Run, factory: Callable[..., Optimizer], saved: list[Any] | None) -> None:
        """Let torch's optimizers, whose states a checkpoint has for all chains, make the steps."""
        module, sampler, name, decay = run.module, run.sampler, name_of(factory), chosen_decay(factory)
        lr = sampler.param_groups[0]["initial_lr"]
        if len(sampler.param_groups) > 1 or not isinstance(lr, int | float):
            raise ValueError(f"DeepEnsemble(optimizer={name}) needs one step size, got lr={module.lr}: pass one number")
        if decay and not isinstance(module.prior, FlatPrior):
            raise ValueError(
                f"weight_decay={decay:g} of DeepEnsemble's {name} would act beside prior={module.prior!r}, which is in "
                "the loss: pass prior=FlatPrior() to the module, or omit weight_decay"
            )
        first = next(iter(instances_of(run.trainer, FirstStage)), None)
        if first is not None:
            raise ValueError(
                f"DeepEnsemble(optimizer={name}) optimizes the whole run, and {type(first).__name__} its beginning: "
                "remove one of the two"
            )
        make = functools.partial(make_optimizer, factory, lr=float(lr), weight_decay=decay)
        self._optimizers = ChainOptimizers(sampler, make, self._optimizer_controls)
        if saved is not None:
            for chain, index in enumerate(run.layout.chains):
                self._optimizers.load_state_dict(chain, saved[index])
        sampler.stand_in = self._optimizers

    def _optimizer_controls(self) -> tuple[Sequence[int], float]:
        """Return the chains that go on in the coming step, which are all, and the factor of lr."""
        group = self.run.sampler.param_groups[0]
        factor = float(group["lr"]) / float(group["initial_lr"]) if group["initial_lr"] else 1.0
        return range(self.run.module.num_chains), factor

    def announce_optimization(self, module: ChainModel) -> None:
        members = module.chains.layout.total_chains
        if members > 1:
            rank_zero_info(f"DeepEnsemble trains {members} networks by optimization (temperature 0).")
        else:
            rank_zero_info(
                "DeepEnsemble has one chain, so it trains a single network by optimization (temperature 0): pass "
                "num_chains=… to BayesianModule for an ensemble."
            )

    @property
    def first_sample(self) -> int:
        return self.laid_out

    def controls(self, step: int) -> StepControls:
        total = self.laid_out
        factor = cyclical_lr_factor(step, total) if self.lr_decay == "cosine" else 1.0
        if self.warm_up:
            factor *= min(1.0, step / math.ceil(self.warm_up * total))
        return StepControls(factor, 0.0, Stage.SAMPLING if step == total else Stage.EXPLORATION)

    def draws(self, step: int) -> bool:
        return step == self.laid_out

    def end(self) -> None:
        self.run.sampler.stand_in = self._optimizers = None

    def state(self) -> dict[str, Any]:
        state, optimizers = super().state(), self._optimizers
        if optimizers is None:
            return state
        own = [optimizers.state_dict(chain) for chain in range(self.run.module.num_chains)]
        return state | {"optimizers": self.run.layout.collect(own)}


class SWAG(WholeRunSchedule[AveragingPlan]):
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
    needs_trainer = True
    claims: ClassVar[Mapping[str, str | None]] = {
        "prepare samples": None,  # weights and energies would be those of an iterate
        "expand samples": "_draw",
    }

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
        self.kinds = ("cycSWAG", "cycSWAG") if num_cycles > 1 else ("SWAG", "MultiSWAG")
        self.moments = IterateMoments(rank)
        """Of the iterates of the current cycle; with several chains in the process, tensors have a chain axis."""
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.moments.clear()
        self._cycle = 0

    # -- before a run -------------------------------------------------------------------------------------------------

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        if any(map(is_expanded, module.modules())):
            raise ValueError(
                "SWAG fits a Gaussian to the weights, and this network's are products of factors: use SWAG with the "
                "plain network, without expand"
            )

    def plan_over(self, steps: int, length: RunLength) -> AveragingPlan:
        return AveragingPlan(
            total_steps=steps,
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

    def plan(self, trainer: pl.Trainer, module: ChainModel) -> None:
        chains = module.chains
        check_statistics(trainer, module, "SWAG")
        super().plan(trainer, module)
        chains.tags.draws = self.num_draws
        chains.progress.num_cycles = self.laid_out.num_cycles if self.laid_out.num_cycles > 1 else None

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        if saved is not None:
            self._cycle = saved["cycle"]
            self.moments.load_state_dict(saved["moments"], run.layout.own_stored)
        super().begin(run, saved)

    def memory(self, sizes: ChainSizes) -> int:
        iterates = sum(map(self.laid_out.collects, range(1, self.laid_out.period + 1)))
        return (2 + min(self.rank, iterates)) * sizes.parameters

    def announce_optimization(self, module: ChainModel) -> None:
        """Say nothing: the callback's name says what its draws are."""

    # -- a step -------------------------------------------------------------------------------------------------------

    @property
    def first_sample(self) -> int:
        return min(self.laid_out.period, self.laid_out.total_steps)

    def controls(self, step: int) -> StepControls:
        stage = Stage.SAMPLING if self.laid_out.is_collecting(step) else Stage.EXPLORATION
        return StepControls(self.laid_out.lr_factor_of(step), 0.0, stage)

    def cycle_of(self, step: int) -> int:
        return self.laid_out.cycle_of(step)

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
        trainer, chains = self.run.trainer, self.run.chains
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

    def state(self) -> dict[str, Any]:
        gather = torch.clone if self._run is None else self.run.layout.gather_stored
        return super().state() | {"cycle": self._cycle, "moments": self.moments.state_dict(gather)}


class MCDropout(SamplerCallback):
    """Turns each sample of the schedule into S samples with the same weights and different dropout masks.

        p(y|x,D) ≈ S⁻¹·Σ_s p(y|x, θ⊙m_s),   m_s the masks of all dropout layers

    With `DeepEnsemble()` as the schedule, a single chain gives MC dropout, and several an ensemble of it. A mask is
    drawn for each sample, not for each datum, so a sample is a network: its predictions do not depend on the batches or
    their order, and are the same in a new process. For each datum the average over masks has the law of MC dropout.

    A sample's file has the weights and, as the buffer `dropout_seed`, the seed of its masks, a function of (run's seed,
    chain, step, draw). `Posterior.predict`, `BayesianModelAverage` and reports apply the masks. The first axis of a
    layer's input is the batch's. The energy of the samples is that of the step.

    Args:
        num_draws: S, masks for each state.

    Raises:
        ValueError: if num_draws is below 1; at setup, if the network has no dropout layer (`nn.Dropout`, `nn.Dropout1d`
            to `nn.Dropout3d`) with p > 0, or has an `nn.AlphaDropout`, or no schedule would draw a sample.

    Source: Gal & Ghahramani 2016, "Dropout as a Bayesian Approximation", eq. (6).

    Example::

        trainer = pl.Trainer(max_epochs=50, callbacks=[DeepEnsemble(), MCDropout(num_draws=30)])
    """

    place = Place.CHAIN
    setting = "mc_dropout"
    kinds = ("MC dropout", "MC dropout ensemble")
    claims: ClassVar[Mapping[str, str | None]] = {"expand samples": "_expand"}

    def __init__(self, num_draws: int = 30) -> None:
        check_count("num_draws", num_draws, optional=False)
        self.num_draws = num_draws
        self._seed = 0

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        require_schedule(trainer, self)
        _check_layers(module)

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        run.chains.tags.draws = self.num_draws
        self._seed = run.chains.seed or 0

    def _expand(self, sample: PosteriorSample) -> Iterator[PosteriorSample]:
        for draw in range(self.num_draws):
            seed = derive_seed(self._seed, "MCDropout", sample.chain, sample.step, draw)
            yield replace(sample, buffers=sample.buffers | {MASK_SEED: torch.tensor(seed)}, draw=draw)


def _check_layers(module: ChainModel) -> None:
    """Raise unless the network has masks to draw; warn about dropout that has none."""
    name = type(module).__name__
    layers = list(module.named_modules())
    alpha = next((n for n, layer in layers if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout)), None)
    if alpha is not None:
        raise ValueError(f"MCDropout has no mask for '{alpha}' of {name}, an AlphaDropout: use nn.Dropout")
    if not dropout_layers(module):
        raise ValueError(
            f"MCDropout needs dropout, and {name} has no nn.Dropout layer with p > 0, so its draws would all be "
            "equal: add nn.Dropout layers to the network, or remove MCDropout"
        )
    inner = [n for n, layer in layers if isinstance(layer, WITHOUT_MASK) and layer.dropout > 0]
    if inner:
        rank_zero_warn(
            f"MCDropout has no mask for the dropout inside '{inner[0]}', so it is off in predictions: only nn.Dropout "
            "layers have masks."
        )


# -- iterates ----------------------------------------------------------------------------------------------------------


Values = dict[str, Tensor]


class IterateMoments:
    """Mean and variance of iterates, by Welford's formula, and the last K deviations from the running mean."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.clear()

    def clear(self) -> None:
        """Forget all iterates."""
        self.count = 0
        self.mean: Values = {}
        self.deviations: list[Values] = []
        self._squares: Values = {}
        """Σ(θ_i - θ̄)²."""

    def add(self, iterate: Mapping[str, Tensor]) -> None:
        """Add an iterate, tensors by name, which are copied."""
        self.count += 1
        if self.count == 1:
            self.mean = {name: value.clone() for name, value in iterate.items()}
            self._squares = {name: torch.zeros_like(value) for name, value in iterate.items()}
        deviations: Values = {}
        for name, value in iterate.items():
            before = value - self.mean[name]
            self.mean[name] += before / self.count
            deviations[name] = value - self.mean[name]
            self._squares[name] += before * deviations[name]
        if self.rank:
            self.deviations = [*self.deviations, deviations][-self.rank :]

    @property
    def variance(self) -> Values:
        """Σ_diag by name."""
        return {name: square / self.count for name, square in self._squares.items()}

    def draw(self, generator: torch.Generator, scale: float = 1.0, row: int | None = None) -> Values:
        """Return a draw from N(θ̄, scale·Σ), of the chain `row` if the tensors have a chain axis."""
        kept, deviations = ... if row is None else row, self.deviations
        low_rank = self.rank > 0
        shares = torch.randn(len(deviations), generator=generator).tolist() if len(deviations) > 1 else []
        drawn = {}
        for name, mean in self.mean.items():
            own = mean[kept]
            spread = (self._squares[name][kept] / self.count).sqrt()
            noise = torch.randn(own.shape, generator=generator, dtype=own.dtype)
            drawn[name] = own + spread * noise * math.sqrt(scale / 2 if low_rank else scale)
            for share, deviation in zip(shares, deviations if shares else (), strict=True):
                drawn[name] += deviation[name][kept] * (share * math.sqrt(scale / (2 * (len(shares) - 1))))
        return drawn

    def state_dict(self, gather: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return the state: numbers and tensors, each after `gather`."""
        tensors = {"mean": self.mean, "squares": self._squares, "deviations": self.deviations}
        return {"count": self.count} | tree_map(gather, tensors)

    def load_state_dict(self, state: Mapping[str, Any], own: Callable[[Tensor], Tensor]) -> None:
        """Restore from `state_dict`."""
        parts = [state["mean"], state["squares"], state["deviations"]]
        self.count = state["count"]
        self.mean, self._squares, self.deviations = tree_map(lambda tensor: own(tensor).clone(), parts)
