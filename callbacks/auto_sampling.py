"""AutoSampling: a fixed sampler and step size; prior scale, temperature and weights by validation data."""

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import yaml
from torch import Tensor

from lightning_sgmcmc.batches.rows import num_data_of
from lightning_sgmcmc.callbacks.bayesian_model_average import BayesianModelAverage, validation_loaders
from lightning_sgmcmc.callbacks.schedule import WholeRunSchedule
from lightning_sgmcmc.chains.callback import Run
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.samples import Drawing, PosteriorSample, draw_samples, on_cpu
from lightning_sgmcmc.chains.schedule import RunBudget, RunLength, StepControls
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.chains.trainer import fit_steps, instances_of, is_trial, run_folder
from lightning_sgmcmc.checks import check_choice, check_count, check_pairs, check_positive, check_within
from lightning_sgmcmc.diagnostics.decisions import stacking_weights, window_weights
from lightning_sgmcmc.evaluation.averages import WeightedAverage
from lightning_sgmcmc.evaluation.passes import score_samples, some_training_data
from lightning_sgmcmc.evaluation.scoring import DrawingScores
from lightning_sgmcmc.files import warning_of_failed_writes, write_output
from lightning_sgmcmc.fit.results import CHOICES, shown_path
from lightning_sgmcmc.health.findings import HEATING, FindingKind
from lightning_sgmcmc.likelihoods import ClassLikelihood
from lightning_sgmcmc.model import named_trainable, scale_of_fresh_weights
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.posterior.calibration import noise_share, overconfidence, unexplained
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.posterior import Posterior
from lightning_sgmcmc.posterior.predictive import check_sample
from lightning_sgmcmc.priors import GaussianPrior, HierarchicalPrior, Prior
from lightning_sgmcmc.priors.hierarchical import NEVER, VARIANCE, wide_enough
from lightning_sgmcmc.priors.state import prior_state
from lightning_sgmcmc.samplers import pSGHMC
from lightning_sgmcmc.schedules import LR_SHARE, WarmUpAndDecay

FIRST_BLOCK, BLOCK, LAST_CHANGE = 0.05, 0.1, 0.7
"""Shares of the draws: before the first change of a prior's scale, between later ones, and after which it stays."""
SMALLEST_STD, LARGEST_STD, SHRINKAGE, COLDEST = 0.1, 1.5, 0.15, 0.003
"""Of σ; standard deviation of the prior of log overconfidence; the lowest temperature that σ at its limit leads to."""
NOISE, POWERS, SHRINKAGE_OF_NUMBERS = (0.05, 0.1), (0.0, 3.0), 0.3
"""Of numbers: shares of the targets' variance that errors have, with the powers of the overconfidence by which the
temperature rises there; the standard deviation of the prior of its logarithm."""
LIMITS, HOT_LIMITS = (0.025, 1.0), (0.06, 0.35)
"""Largest weight decay 1/(N·σ²) at the start, with more of which few data do not move the weights away from 0, and the
largest σ that this gives; the same at temperature 1."""
FEW, LIMITS_OF_NUMBERS = 450, (0.2, 1.0)
"""Fewer data begin at a higher temperature, of a regression or 1; limits of a regression's prior like those above."""
LEAST_STEPS, LAST_DECISION, LEARNING, MOST_LEFT_OUT = 2_000, 0.45, 0.9, 4_096
"""Steps of a run whose temperature may fall from 1, and the share of its draws until which it may; how much less a
network that learns leaves unexplained than a block before; training data that tell."""
FOLLOWED, PREDICTED, FIRST_GAIN = (0.03, 0.08), (0.45, 0.65), 3.0
"""Unexplained shares of numbers, and of classes, up to which the samples become cold and from which they stay at
temperature 1; σ of classes until then, over that of fresh weights."""
CLEAR, CLEAR_STD = 0.15, 1.0  # unexplained share up to which cold samples of classes have this σ
HOT_SHARE, HOT_STD = 0.2, 0.2
"""Of objective "both": the share of the run at temperature 1, its last part, and σ there."""
LR_SHARE_OF_CLASSES = 0.3
"""Share of the first step size at which the cold samples of classes end; all others end at `LR_SHARE`."""
WEIGHTS = "windows of the last draws, then stacking"  # the rule of the samples' weights, for sentences


class AutoSampling(WholeRunSchedule[WarmUpAndDecay]):
    """Samples without a setting by hand: sampler and step size are fixed, validation data decide the rest.

    A share of the run optimizes (τ = 0, with a step size that ends near 0). The rest is one long stage in which
    `pSGHMC` samples at τ while its step size falls by a cosine to a share e, and draws are taken evenly:

        lr_k = lr·[e + (1-e)·(cos(π·u) + 1)/2],   u the elapsed share of the stage

    e is 0.3 for the cold samples of classes, so that they differ more, and 0.1 otherwise.

    Three decisions use the validation data, none the test data. The first two are made after a twentieth of the draws
    and then after every tenth, until 70 % of them:

    - The **prior** is N(0, σ²) with one σ for each chain. In classification a chain divides its σ by the calibration
      temperature of its newest samples' average: above 1 they are overconfident, and the prior becomes tighter; below
      1 it becomes looser. Where σ would exceed its limit, 1.5, by a factor c (the chains' geometric mean), τ is divided
      by c² instead, down to 0.003: weights that the data leave free spread by √τ·σ, which makes predictions less sure.
    - The **temperature** of numbers, counts and durations rises where noisy ones are predicted too surely. Of the
      newest samples' average let f be the overconfidence (the spread of the targets' normal scores), and s the share of
      the targets' variance in its errors, by their median. Then τ is multiplied by max(f, 1)^g, up to 1, and at 1 the
      chains' σ are divided by max(f, 1), down to 0.2. Here g = 3 from s = 0.1 on, 0 up to 0.05, and linear between.
    - The **weights** of the draws are those of stacking, at which their mixture predicts best. It starts from windows
      of the last 1, 2, 4, … draws and all, averaged by their likelihood; this start counts as 20 data.

    Without validation data, which a warning says, and below 450 data of classes, τ is 1 at first in runs of 2,000 steps
    (of numbers in all). After 15 % of the draws each training datum, of some 4,000 at most, is predicted by them
    without itself. If the NLL is below 0.45 of a guess's, or the errors of numbers below 3 % of the variance, τ and σ
    become the cold ones, σ up to 1 at 0.15; from 0.65 or 8 % on they stay; between they are interpolated. Without
    validation data earlier draws lose their weight.

    The callback sets the module's prior, sampler and lr when the fit begins. The default prior of `bayesianize(net,
    "all")` keeps its centre; others that are not a `GaussianPrior` with centre 0 stay. For samples on the disk it
    writes `auto.yaml` beside `summary.txt`, this callback with its choices as arguments, which repeats them.

    Args:
        objective: "nll", the likelihood of new data: τ = 0.03, in regression 0.1, or 45/N if that is more (below 450
            data), up to 1. "ood", telling out-of-distribution inputs: τ = 1, a tight prior whose scale stays, and equal
            weights. "both", for classes: as "nll", but the last fifth of the run samples at τ = 1 under σ = 0.2. Its
            draws are `posterior.novelty`, of which predictions have their mutual information.
        budget: time of the run, such as "90s", "10m" or "2h"; the epochs follow from the first steps' speed. None takes
            the trainer's max_epochs or max_steps.
        num_draws: number of draws of each chain, in both parts together.
        warm_up: share of the run that optimizes.
        prior_std: σ at the start; None is 0.3, and 0.2 for "ood", or 1/√(0.025·N) where that is more (below some 400
            data), up to 1; for "ood" 1/√(0.06·N), up to 0.35. In regression it is 0.35, for "ood" 0.2, or 1/√(0.2·N) if
            that is more, up to 1. Where data decide τ it begins at 3 times that of fresh weights, from 0.3 to these.
        temperature: τ, which stays; None begins at that of the objective.
        lr: step size of `pSGHMC`.
        prior_scales: [step, σ] pairs for each chain of the run, as in an earlier run's `auto.yaml`, instead of the
            choice on validation data.
        lengths: [step, steps of the run] pairs by which an earlier run's budget gave its length, instead of the time.
        temperatures: [step, τ] pairs of an earlier run, instead of the choice on validation data.

    Raises:
        ValueError: for an argument out of range; at the start of the fit, without an end of the run.

    Source: Guo et al. 2017 (calibration temperature); Yao et al. 2018 (stacking); Wenzel et al. 2020 (cold posteriors);
    Gelfand et al. 1992 (leave-one-out). The rules for σ and τ are this library's; recipe `equal_cost` shows their use.

    Example::

        trainer = pl.Trainer(max_epochs=100, callbacks=[AutoSampling(), SampleCollector(), RunSummary()])
    """

    needs_trainer = True
    claims: ClassVar[Mapping[str, str | None]] = {
        "prepare samples": None,  # their weights
        "expand samples": None,  # a draw is evaluated as it is
    }

    def __init__(
        self,
        objective: Literal["nll", "ood", "both"] = "nll",
        budget: str | None = None,
        num_draws: int = 80,
        warm_up: float = 0.2,
        prior_std: float | None = None,
        temperature: float | None = None,
        lr: float = 0.01,
        prior_scales: Sequence[Sequence[Sequence[float]]] | None = None,
        lengths: Sequence[Sequence[int]] | None = None,
        temperatures: Sequence[Sequence[float]] | None = None,
    ) -> None:
        check_choice("objective", objective, ("nll", "ood", "both"))
        check_count("num_draws", num_draws, optional=False)
        check_within("warm_up", warm_up, "(0, 1)")
        check_positive("lr", lr)
        for name, value in (("prior_std", prior_std), ("temperature", temperature)):
            if value is not None:
                check_positive(name, value)
        check_pairs("temperatures", temperatures, "[step, temperature]")
        for scales in prior_scales or ():
            check_pairs("prior_scales", scales, "[step, std]")
        self.objective = objective
        self.budget = budget
        self.num_draws = num_draws
        self.warm_up = warm_up
        self.prior_std = prior_std
        self.temperature = temperature
        self.lr = lr
        self.prior_scales = prior_scales
        self.lengths = lengths
        self.temperatures = temperatures
        given = temperatures or (), (prior_scales or [()])[0]
        taus, stds = ([value for step, value in pairs if step == 0] for pairs in given)
        self._given = (temperature or (*taus, None)[0], prior_std or (*stds, None)[0])
        self._start_std, self._is_regression, self._lr_share = 0.0, False, LR_SHARE
        self._num_data: int | None = None
        self._budget = RunBudget(budget, lengths)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._budget.reset()
        self._densities: dict[tuple[int, int], Tensor] = {}  # log p(y_i) of validation data, by step and chain
        self._blocks: dict[int, WeightedAverage] = defaultdict(WeightedAverage)  # of each chain's newest draws
        self._scores, self._training_scores = DrawingScores(), DrawingScores()
        self._num_scored = 0  # steps whose draws were evaluated
        self._scored: tuple[int, Tensor | None] | None = None  # the present draws' step, and the targets
        self.new_temperatures: list[tuple[int, float]] = []
        """The temperatures after the first, and the steps from which they hold."""
        self._validates: bool | None = None  # whether the run has validation data, once that is known
        self._left_out: list[Tensor] | None = None  # the newest draws' log p(y_i) of training data, while they decide
        self._training: tuple[Any, Tensor | None] = (None, None)  # those data during a drawing, and their y
        self._share: float | None = None  # unexplained at the last decision
        self._begins_warm: bool | None = None
        self._hot: list[PosteriorSample] = []  # the draws of the part at temperature 1, in host memory
        self.chosen: dict[int, list[tuple[int, float]]] = {}
        """For each chain of the run, the scales of its prior and the steps from which they hold."""

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        has_classes = isinstance(module.likelihood, ClassLikelihood)
        if self.objective == "both" and not has_classes:
            raise ValueError(
                "objective='both' takes the mutual information of classes from a part of the run, and the likelihood "
                "has none: pass objective='nll' or 'ood'"
            )
        self._lr_share = LR_SHARE_OF_CLASSES if has_classes and self.objective != "ood" else LR_SHARE
        self._num_data = num_data_of(trainer, module.given_num_data, type(module).__name__, module.replaces("setup"))
        self._is_regression = getattr(module.likelihood, "per_sample_term", None) == "mean"
        given, (temperature, std) = self._given, self._start(module)
        self.temperature = temperature if given[0] is None else given[0]
        self.prior_std = self._start_std = std if given[1] is None else given[1]
        module.prior = self._prior(module)
        module.sampler_factory, module.lr = functools.partial(pSGHMC, friction=0.1), self.lr
        if isinstance(module.prior, HierarchicalPrior):
            module.chains.claims.claim("draw scales", self, self._set_scale)

    def _start(self, module: ChainModel) -> tuple[float, float]:
        """Return τ and σ for N data: wide for few labels, warm for few numbers, which a cold network fits exactly."""
        is_hot, count = self.objective == "ood", self._num_data
        if self._is_regression:
            count = min(FEW if count is None else count, FEW)
            temperature = 1.0 if is_hot else float(f"{min(1.0, 0.1 * FEW / count):.3g}")
            return temperature, wide_enough(HOT_STD if is_hot else 0.35, count, *LIMITS_OF_NUMBERS)
        if is_hot:
            return 1.0, wide_enough(HOT_STD, count, *HOT_LIMITS)
        temperature, std = (0.03, 0.3) if isinstance(module.likelihood, ClassLikelihood) else (0.1, 0.35)
        return temperature, wide_enough(std, count, *LIMITS)

    def _prior(self, module: ChainModel) -> Prior:
        """Return the prior whose scale this callback sets, or the module's own."""
        own = module.prior
        is_free = type(own) is GaussianPrior and (own.center is None or own.is_default)
        if not is_free and not (isinstance(own, HierarchicalPrior) and own.every_n_steps == NEVER):  # its own choice
            rank_zero_info(f"AutoSampling keeps the module's {own!r}: it chooses the scale of a GaussianPrior only.")
            return own
        center: Any = getattr(getattr(own, "given", own), "center", None)  # the start, for bayesianize's prior
        noise = "likelihood.*"
        if not any(name.startswith(noise[:-1]) for name in named_trainable(module)):
            return HierarchicalPrior("all", std=self._start_std, every_n_steps=NEVER, center=center)
        stds = {noise: 3.0, "*": self._start_std}  # log std is no weight
        return HierarchicalPrior((noise, "*"), std=stds, every_n_steps=NEVER, center=center)

    def plan_over(self, steps: int, length: RunLength) -> WarmUpAndDecay:
        hot = HOT_SHARE if self.objective == "both" and not length.is_trial else 0.0
        draws = 1 if length.is_trial else self.num_draws
        return WarmUpAndDecay(self._budget.expected or steps, self.warm_up, draws, hot, self._lr_share)

    def plan(self, trainer: pl.Trainer, module: ChainModel) -> None:
        self._budget.begin(trainer)
        is_first, self._validates = self._validates is None, bool(validation_loaders(trainer))
        is_free = (self._given[0], self.prior_scales, self.temperatures) == (None, None, None)
        if self._begins_warm is None:
            is_few = not self._is_regression and self._num_data is not None and self._num_data < FEW
            steps = fit_steps(trainer) if self.budget is None else self._budget.expected or LEAST_STEPS * is_few
            learns = self._is_regression or steps >= LEAST_STEPS
            self._begins_warm = is_free and self.objective != "ood" and learns and (is_few or not self._validates)
        if is_first and self._begins_warm:
            self.temperature, self._left_out = 1.0, []
            if not self._is_regression and self._given[1] is None:
                std = min(max(0.3, FIRST_GAIN * scale_of_fresh_weights(module)), self._start_std)
                self.prior_std = self._start_std = float(f"{std:.3g}")
                module.prior = self._prior(module)
        super().plan(trainer, module)
        chains = module.chains.layout.total_chains
        if self.prior_scales is not None and len(self.prior_scales) != chains:
            raise ValueError(
                f"prior_scales has the scales of {len(self.prior_scales)} chains, and the run has {chains}: pass "
                "[step, std] pairs for each, or omit it"
            )
        if self._num_data is None and self._given[1] is None and self._left_out is None:
            self._num_data, std = self.run.sampler.num_data, self._start_std
            temperature, wanted = self._start(module)
            if wanted != std:
                is_told = self._given[0] is None and temperature != self.temperature
                also = f", temperature={temperature:g}" if is_told else ""
                rank_zero_warn(
                    f"AutoSampling: the prior std {std:g} does not suit {self._num_data} training data: pass "
                    f"AutoSampling(prior_std={wanted:g}{also}), or num_data=… to the module, which chooses it"
                )
        if is_first and not self._validates and not is_trial(trainer) and self.objective != "ood":
            chooses = ", the training data choose the temperature" if is_free else ""
            rank_zero_warn(
                f"AutoSampling has no validation data, so the samples count alike{chooses}: pass validation data, "
                "unless there are fewer than about 100 data, which are worth more in training"
            )

    def plan_note(self) -> str | None:
        if self.objective == "ood":
            return "The samples keep even weights: the objective is to tell out-of-distribution inputs."
        weighed = f"; the validation data will weigh them by {WEIGHTS}." if self._validates else ", as the run does."
        asked = "" if self._left_out is None else " The training data may lower the temperature, which is 1 at first."
        note = f"The plan counts samples alike{weighed}{asked}"
        if self.objective == "nll":
            return note
        return (
            f"{note} It is of the samples that predict, at temperature {self.temperature:g}; the last {HOT_SHARE:.0%} "
            f"of the run sample at temperature 1 under a prior of standard deviation {HOT_STD:g}, with even weights, "
            "for the mutual information."
        )

    def _missed(self, total: int) -> str:
        return f"its last step, {total}, and the newest draws, at the smallest step sizes,"

    def remedy(self, kind: str, side: str | None) -> str | None:
        """Name this callback's own arguments: its user passes neither a sampler nor a step size to the module."""
        if kind == FindingKind.PRECONDITIONER.value:
            return ""
        if kind == FindingKind.ENERGY.value or (kind == FindingKind.KINETIC.value and side == "below"):
            return f"train longer, or pass AutoSampling(warm_up={min(2 * self.warm_up, 0.5):g})"
        if kind in (FindingKind.DIVERGENCE.value, FindingKind.AT_CHANCE.value):
            return f"use a smaller step size: AutoSampling(lr={self.lr / 2:g})"
        if kind in [hot.value for hot in HEATING]:
            return f"halve the step size and train twice as long: AutoSampling(lr={self.lr / 2:g})"
        return None

    @property
    def has_moved_target(self) -> bool:
        lengths = [len({std for _, std in chain}) for chain in self.chosen.values()]
        return self._left_out is not None or bool(self.new_temperatures) or max(lengths, default=1) > 1

    # -- a step -------------------------------------------------------------------------------------------------------

    @property
    def has_length(self) -> bool:
        return not self._budget.is_timing

    @property
    def first_sample(self) -> int:
        return self.laid_out.draw_steps[0]

    def controls(self, step: int) -> StepControls:
        stages = self.laid_out
        step = min(step, stages.total_steps)  # epochs that become longer add steps
        if stages.is_warm_up(step):
            return StepControls(stages.lr_factor(step), 0.0, Stage.EXPLORATION)
        if step > stages.switch:  # what is measured of the stage of sampling, is of the samples that predict
            return StepControls(stages.lr_factor(step), 1.0, Stage.EXPLORATION)
        temperature = None
        if self.new_temperatures:
            own = step + self.run.chains.progress.warm_steps
            temperature = next((tau for first, tau in reversed(self.new_temperatures) if first < own), None)
        return StepControls(stages.lr_factor(step), temperature, Stage.SAMPLING)

    @property
    def seconds(self) -> float | None:
        return self._budget.seconds

    def draws(self, step: int) -> bool:
        return not self._budget.is_timing and self.laid_out.draws(step)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        warm = self.laid_out.warm_steps
        if self.has_stepped(pl_module) and self._budget.after_step(trainer, self._step, warm):
            self.total_steps = None
            self.plan(trainer, self.run.module)
        super().on_train_batch_end(trainer, pl_module, *args)
        if self.has_stepped(pl_module) and self._step in self.laid_out.last_draw_steps:
            check = functools.partial(check_sample, model=None)
            for drawing in draw_samples(self.run.chains, self.run.sampler, check):  # other callbacks do not see them
                self._hot += map(on_cpu, drawing.samples)

    def acts_in(self, step: int) -> bool:
        own = step - self.run.chains.progress.warm_steps
        return self._budget.looks_at(own) or own in self.laid_out.last_draw_steps or self._acts_before(step)

    def on_posterior_samples(self, trainer: pl.Trainer, pl_module: ChainModel, drawing: Drawing) -> None:
        self._scores.begin(drawing.samples)
        self._training_scores.begin(drawing.samples)
        if self._left_out is not None:
            self._training = some_training_data(trainer, MOST_LEFT_OUT), None
        step = drawing.samples[0].step
        past = [tau for first, tau in self.temperatures or () if 0 < first <= step]
        self.new_temperatures += [(step, tau) for tau in past[len(self.new_temperatures) :]]

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: ChainModel, sample: PosteriorSample) -> None:
        chain, module = sample.chain, pl_module
        self.chosen.setdefault(chain, [(0, self._start_std)])
        if loaders := validation_loaders(trainer):
            self._evaluate(trainer, module, sample, loaders[0])
        if self._left_out is not None and (data := self._training[0]) is not None:
            score = functools.partial(score_samples, trainer, module, data, math.inf, False)
            _, log_density, target = self._training_scores.of(sample, score).on_loaders[0]
            self._left_out.append(log_density)
            self._training = data, target
            self._scored = sample.step, None if self._scored is None else self._scored[1]
        if not isinstance(module.prior, HierarchicalPrior):
            return
        if self.prior_scales is not None:
            past = [std for step, std in self.prior_scales[chain] if 0 < step <= sample.step]
            for std in past[len(self.chosen[chain]) - 1 :]:  # a run of another length has other draws
                self._choose(module, chain, sample.step, std)
        elif self.objective == "both" and sample.step - module.chains.progress.warm_steps == self.laid_out.switch:
            self._choose(module, chain, sample.step, wide_enough(HOT_STD, self._num_data, *HOT_LIMITS))

    def _evaluate(self, trainer: pl.Trainer, module: ChainModel, sample: PosteriorSample, loader: Any) -> None:
        """Keep a draw's densities of the validation data, and add it to its chain's average."""
        averages, limit = instances_of(trainer, BayesianModelAverage), trainer.num_val_batches[0]
        is_first = not self._densities  # the targets are checked with it
        score = functools.partial(score_samples, trainer, module, loader, limit, is_first)
        scores = averages[0].scores_of(trainer, module, sample) if averages else self._scores.of(sample, score)
        terms, log_density, target = scores.on_loaders[0]
        self._densities[sample.step, sample.chain] = log_density.float().cpu()
        self._blocks[sample.chain].add(terms, log_density, 0.0)
        self._scored = sample.step, target

    def end_posterior_samples(self, trainer: pl.Trainer, pl_module: ChainModel) -> None:
        """Set scales and temperature after a block of draws."""
        if self._scored is None:
            return
        (step, target), self._scored = self._scored, None
        self._num_scored += 1
        first, size = (max(1, round(share * self.num_draws)) for share in (FIRST_BLOCK, BLOCK))
        if self.objective == "ood" or self._num_scored < first or (self._num_scored - first) % size:
            return
        if self._left_out is not None:
            return self._decide(pl_module, step) if self._num_scored > first else None
        blocks, self._blocks = self._blocks, defaultdict(WeightedAverage)
        is_late, likelihood = self._num_scored >= LAST_CHANGE * len(self.laid_out.draw_steps), pl_module.likelihood
        if is_late or target is None or likelihood is None:
            return
        together = WeightedAverage()
        for block in blocks.values():
            together.add(block.terms, block.log_density, block.log_total)
        noise = noise_share(likelihood, together.terms, target)
        if noise is None:
            if isinstance(pl_module.prior, HierarchicalPrior) and self.prior_scales is None:
                self._adapt(pl_module, step, blocks, target)
        elif self._given[0] is None and self.temperatures is None:
            factor = overconfidence(likelihood, together.terms, target, SHRINKAGE_OF_NUMBERS)
            if factor is not None:
                self._warm(pl_module, step, factor, noise)

    def _decide(self, module: ChainModel, step: int) -> None:
        """Let the samples become cold if those at temperature 1 predict the training data well, each datum left out."""
        (_, target), ends = self._training, FOLLOWED if self._is_regression else PREDICTED
        assert self._left_out is not None
        share = 1.0 if target is None else unexplained(module.likelihood, torch.stack(self._left_out), target)
        is_learning = share < LEARNING * (self._share or math.inf)
        self._left_out, self._share, self._training = [], share, (None, None)
        if share > ends[0] and is_learning and self._num_scored < LAST_DECISION * self.num_draws:
            return
        self._left_out, self._blocks = None, defaultdict(WeightedAverage)
        warmth, (cold, std) = float(np.interp(share, ends, (0.0, 1.0))), self._start(module)
        if isinstance(module.likelihood, ClassLikelihood):
            std *= max(CLEAR_STD / std, 1.0) ** float(np.interp(share, (CLEAR, ends[0]), (1.0, 0.0)))
        if warmth < 1:
            std = self._given[1] or std ** (1 - warmth) * self._start_std**warmth
            self.new_temperatures.append((step, float(f"{cold ** (1 - warmth):.4g}")))
            if isinstance(module.prior, HierarchicalPrior) and self._given[1] is None:
                for chain in self.chosen:
                    self._choose(module, chain, step, std)

    def _adapt(self, module: ChainModel, step: int, blocks: Mapping[int, WeightedAverage], target: Tensor) -> None:
        """Set the prior's scale of each chain by its newest draws, and a temperature that suits them."""
        now, beyond = self._newest_temperature, list[float]()
        for chain, block in blocks.items():
            factor = overconfidence(module.likelihood, block.terms, target, SHRINKAGE)
            if factor is not None:
                std = self.chosen[chain][-1][1] / min(max(factor, 0.5), 2.0)
                self._choose(module, chain, step, min(max(std, SMALLEST_STD), LARGEST_STD))
                beyond.append(max(std / LARGEST_STD, 1.0))
        lower = float(f"{max(now / geometric_mean(beyond or [1.0]) ** 2, COLDEST):.4g}")
        if lower < now < 1 and self._given[0] is None and self.temperatures is None:
            self.new_temperatures.append((step, lower))

    def _warm(self, module: ChainModel, step: int, factor: float, noise: float) -> None:
        """Raise the temperature of all chains by their overconfidence; at 1 make their priors tighter instead."""
        power, now = float(np.interp(noise, NOISE, POWERS)), self._newest_temperature
        raised = float(f"{min(now * max(factor, 1.0) ** power, 1.0):.4g}")
        if raised > now:
            self.new_temperatures.append((step, raised))
        elif now == 1 and power and isinstance(module.prior, HierarchicalPrior) and self.prior_scales is None:
            for chain, [*_, (_, std)] in self.chosen.items():
                if (tighter := max(std / max(factor, 1.0), min(HOT_STD, std))) < std:
                    self._choose(module, chain, step, tighter)

    @property
    def _newest_temperature(self) -> float:
        assert self.temperature is not None
        return self.new_temperatures[-1][1] if self.new_temperatures else self.temperature

    def _choose(self, module: ChainModel, chain: int, step: int, std: float) -> None:
        self.chosen[chain].append((step, float(f"{std:.4g}")))
        if chain in module.chains.layout.chains:
            self._set_scale(module, chain - module.chains.layout.first_chain, self.chosen[chain][-1][1])

    def _set_scale(self, module: ChainModel, index: int, std: float) -> None:
        """Set σ of a chain of this process, that of all parameters but a learned noise scale."""
        prior, variance = module.prior, prior_state(module)[VARIANCE]
        assert isinstance(prior, HierarchicalPrior)
        groups = list(dict.fromkeys(map(prior.group_of, module.chains.trainable)))
        own = variance[index] if module.chains.stacked is not None else variance
        own[groups.index("*")] = (std / self._start_std) ** 2

    # -- the end ------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module, posterior = self.run.module, self.run.module.posterior
        if trainer.interrupted or is_trial(trainer) or posterior is None or not self.chosen:
            return
        if self.objective != "ood":
            self._weigh(trainer, module, posterior)
        if self._hot:
            if trainer.is_global_zero or not isinstance(posterior.store, DiskStore):
                posterior.keep_novelty(self._hot)
            trainer.strategy.barrier("the samples for novelty are written")
            posterior.find_novelty()
        folder = run_folder(trainer) if isinstance(posterior.store, DiskStore) else None  # all ranks take part
        if trainer.is_global_zero:
            self._write_choices(folder, isinstance(module.prior, HierarchicalPrior), posterior)

    def _weigh(self, trainer: pl.Trainer, module: ChainModel, posterior: Posterior) -> None:
        """Store the samples' weights, and evaluate their average on the validation data again."""
        # Rank 0's store decides, since the others' may lag behind it until their collector's own hook.
        weights = trainer.strategy.broadcast(self._weights_of(posterior))
        if weights is None:
            return
        if trainer.is_global_zero or not isinstance(posterior.store, DiskStore):
            posterior.store.set_log_weights(weights)
        trainer.strategy.barrier("the weights are written")
        if isinstance(posterior.store, DiskStore):
            posterior.store.reload()
        for average in instances_of(trainer, BayesianModelAverage):
            average.evaluate_again(trainer, module)

    def _weights_of(self, posterior: Posterior) -> list[float] | None:
        """Return the logarithms of the stacking weights of a store's samples; None if not all were evaluated."""
        places = [(record.step, record.chain) for record in posterior.records]
        if places and not self._validates and any(tau < 1 == self.temperature for _, tau in self.new_temperatures):
            return [0.0 if step > self.new_temperatures[0][0] else -50.0 for step, _ in places]  # of the last
        if not places or not all(place in self._densities for place in places):
            return None
        each = torch.stack([self._densities[place] for place in places])
        start = window_weights(each, [step for step, _ in places])
        found: list[float] = stacking_weights(each, start).log().clamp_min(-50).tolist()
        return found

    def as_configuration(self) -> dict[str, Any]:
        """Return this callback with the choices of the run, as an entry of `trainer.callbacks` in a configuration."""
        names = ("objective", "budget", "num_draws", "warm_up", "prior_std", "temperature", "lr")
        scales = [[list(pair) for pair in self.chosen[chain]] for chain in sorted(self.chosen)]
        lengths = None if self.budget is None else [list(pair) for pair in self._budget.lengths]
        arguments = {name: getattr(self, name) for name in names} | {"prior_scales": scales, "lengths": lengths}
        if self.new_temperatures:
            arguments["temperatures"] = [[0, self.temperature], *map(list, self.new_temperatures)]
        return {"class_path": "lightning_sgmcmc.callbacks.AutoSampling", "init_args": arguments}

    def _write_choices(self, folder: Path | None, chose_prior: bool, posterior: Posterior) -> None:
        """Write the callback that repeats this run to the run's folder, and say what it chose."""
        where = "."
        if folder is not None:
            with warning_of_failed_writes():
                write_output(folder / CHOICES, yaml.safe_dump(self.as_configuration(), sort_keys=False).encode())
                where = f"; {shown_path(folder / CHOICES)} repeats these choices."
        end = self.run.chains.progress.warm_steps + self.laid_out.switch  # where the scale becomes that for novelty
        last = [[std for step, std in self.chosen[chain] if step < end] for chain in sorted(self.chosen)]
        final = ", ".join(f"{stds[-1]:.3g}" for stds in last)
        prior = f"prior std {final}" if chose_prior else "the module's prior"
        weights = "even weights"
        if (efficiency := posterior.weight_efficiency) < 1 - 1e-6:  # of rounding
            effective = efficiency * len(posterior)
            weights = f"weights by {WEIGHTS} (effective sample size {effective:.1f} of {len(posterior)})"
        count = 0 if posterior.novelty is None else len(posterior.novelty)
        told = f"; mutual information by {count} samples at temperature 1, prior std {HOT_STD:g}" if count else ""
        temperature = f"{self.temperature:g}" + (f" to {self._newest_temperature:.3g}" if self.new_temperatures else "")
        rank_zero_info(f"AutoSampling: {prior}, temperature {temperature}, {weights}{told}{where}")

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        if saved is not None:
            self._budget.restore(saved["budget_steps"], saved.get("budget_lengths", ()))
            self._densities, self.chosen = dict(saved["densities"]), dict(saved["chosen"])
            self._num_scored, self.new_temperatures = saved["num_scored"], list(saved["new_temperatures"])
            self._begins_warm = saved["warm"][0]
            shared = run.chains.sharing.tensors()
            self._hot = [PosteriorSample(**sample, shared=shared) for sample in saved.get("hot", [])]
            for chain, block in saved["blocks"].items():
                self._blocks[chain].load_state_dict(block)
        super().begin(run, saved)
        if saved is not None:
            self._left_out, self._share = saved["warm"][1:]

    def state(self) -> dict[str, Any]:
        return super().state() | {
            "budget_steps": self._budget.steps,
            "budget_lengths": list(self._budget.lengths),
            "densities": dict(self._densities),
            "blocks": {chain: block.state_dict() for chain, block in self._blocks.items()},
            "num_scored": self._num_scored,
            "new_temperatures": list(self.new_temperatures),
            "chosen": dict(self.chosen),
            "warm": (self._begins_warm, self._left_out, self._share),
            "hot": [{name: value for name, value in vars(s).items() if name != "shared"} for s in self._hot],
        }
