"""Contour sampling under a trainer: CSGLD, CSGHMC and their variants, from any sampler."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sgmcmc.chains.callback import Place, Run, StepClaimant
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.row_steps import StepPart
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.chains.schedule import begin_first_stage, target_of
from lightning_sgmcmc.chains.trainer import fit_steps, is_logged, is_trial, log_scalars, log_values
from lightning_sgmcmc.checks import check_choice, check_count, check_flag, check_kind
from lightning_sgmcmc.contour.auto import ContourGoals
from lightning_sgmcmc.contour.contour import Contour, ContourRules, ContourState, DecayingStepSize, Location
from lightning_sgmcmc.contour.learned import ContourWatch
from lightning_sgmcmc.contour.learner import ContourLearner, LearningInSteps
from lightning_sgmcmc.contour.partition import EnergyRange
from lightning_sgmcmc.contour.start import ContourStart, EnergiesOfSteps
from lightning_sgmcmc.evaluation.passes import Kind, available_kind, sample_energies
from lightning_sgmcmc.namespace import pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.samplers.sampler import Control
from lightning_sgmcmc.tensors import exact, exact_device, sent


class ContourGradient(StepClaimant):
    """Flattens the target in its energy, so that the chain crosses barriers, and weights the samples accordingly.

        κ = 1 + ζ·τ·(log π(J) - log π((J-1)∨1))/Δu

    multiplies the gradient of each step, with J the bin of the mini-batch's energy Ũ. After the step, π, a probability
    for each energy bin, is learned; the importance weight of a sample is Ψ(Ũ)^ζ (see `Contour`). With `SGLD` this is
    CSGLD, with `SGHMC` CSGHMC, with `pSGLD` pCSGLD; with a schedule that anneals step size and temperature, saCSGHMC.

    Each of several chains learns its own π, so its weights have their own unknown constant: averages normalise weights
    within each chain, and chains count alike. With `interacting=True` all chains of the run learn one π by the mean of
    their steps (ICSGLD, ICSGHMC, pICSGLD); each sends one integer per step, its encoded energy. While the temperature
    is 0 (exploration of a cyclical schedule), the contour is idle.

    `auto=True` chooses rules, bins and whether the prior is in the energy from the energies of a warm-up, for a wanted
    spread of κ and a wanted efficiency of the weights, and begins with the warm-up's π (`ContourGoals`,
    `choose_contour`). It says what it chose in one sentence, and writes it to the loggers, `results.json` and
    checkpoints. Arguments that it chooses raise an error beside it.

    A step's energy is that of its batch, over all micro-batches and ranks. `module.contour` holds the learned π and
    can reweight samples by the final one. Every `trainer.log_every_n_steps` the callback logs `contour/multiplier`,
    `contour/bin`, `contour/step_size` and, if κ has limits, `contour/clamped`: the share of steps at a limit.

    Args:
        rules: ζ, how π is learned, how samples are weighted, limits of κ; None with `auto`.
        num_bins: m, number of energy bins.
        first_edge: u_1 in nats, upper end of the lowest bin, above the lowest energies of the chain; None learns it.
        width: Δu in nats; None learns it, together with first_edge.
        step_size: ω_k of the stochastic approximation; None uses `DecayingStepSize()`.
        warm_up_steps: optimizer steps without contour at the start of the run, and without samples. A range is learned
            from the energies of their second half. With `auto`, 0 takes the first half of the steps between the first
            one at τ > 0 and the first sample.
        lowest: share of the warm-up's energies below a learned first edge.
        headroom: extent of the bins above the warm-up's largest energy, in units of its range.
        include_prior: whether the energy includes -log p(θ), as the potential does; the authors' code excludes it. κ
            multiplies the whole gradient, so without the prior the weights are only approximate.
        sample_energy: "own" computes a sample's energy and weight at the sample itself, on fresh training data, as many
            as a step has: one more forward pass per sample, about a third of a step. "full" does so on all training
            data, without augmentation and in evaluation mode. "step" takes both from the step before, at no cost;
            weights then belong to the state before that step, so averages are biased by O(lr).
        interacting: one π for all chains of the run, learned by all.
        exchange_every: number of steps between exchanges of the interacting chains' energies.
        auto: True, or `ContourGoals`, to choose the settings in the warm-up.

    Raises:
        ValueError: if arguments are out of range or contradict each other; at the start of the fit, if the temperature
            is always 0 or the warm-up does not end; when a sample is due in the warm-up; if `auto` has too few
            energies or infinite ones.

    Source: Deng et al. 2020 (CSGLD), Algorithm 1, eq. (6), (8), (10), (15), (57), appendix D.1; Deng et al. 2022
    (ICSGLD), Algorithm 1, eq. (8), appendix B.1.2.

    Example::

        contour = ContourGradient(ContourRules(zeta=0.75), num_bins=100, warm_up_steps=2000)
        schedule = SamplingSchedule(burn_in_epochs=100, every_n_epochs=1)
        trainer = pl.Trainer(max_epochs=200, callbacks=[schedule, contour])
    """

    changes_chain = True
    place = Place.CHAIN
    setting = "contour"
    claims: ClassVar[Mapping[str, str | None]] = {
        "set controls": "_set_controls",
        "prepare samples": "_prepare_samples",
        "accept scales": "_accept_scales",
    }

    def __init__(
        self,
        rules: ContourRules | None = None,
        num_bins: int = 100,
        first_edge: float | None = None,
        width: float | None = None,
        step_size: DecayingStepSize | None = None,
        warm_up_steps: int = 0,
        lowest: float = 0.05,
        headroom: float = 1.0,
        include_prior: bool = True,
        sample_energy: Kind = "own",
        interacting: bool = False,
        exchange_every: int = 1,
        auto: bool | ContourGoals = False,
    ) -> None:
        check_kind("rules", rules, ContourRules)
        check_kind("step_size", step_size, DecayingStepSize)
        check_count("exchange_every", exchange_every, optional=False)
        if exchange_every > 1 and not interacting:
            raise ValueError(f"exchange_every={exchange_every} needs interacting chains: pass interacting=True")
        check_count("warm_up_steps", warm_up_steps, least=0)
        check_choice("sample_energy", sample_energy, ("own", "step", "full"))
        check_flag("include_prior", include_prior)
        check_flag("interacting", interacting)
        if not isinstance(auto, ContourGoals):
            check_flag("auto", auto)
        if rules is not None and rules.zeta == 0:
            rank_zero_warn("ContourGradient has no effect: ContourRules(zeta=0) leaves the posterior as it is.")
        goals = auto if isinstance(auto, ContourGoals) else ContourGoals() if auto else None
        self.range = EnergyRange(num_bins, first_edge, width, lowest, headroom)
        self._start = ContourStart(rules, self.range, include_prior, goals)
        if first_edge is None and warm_up_steps < 2 and goals is None:
            remedy = f"a warm-up to learn it from (warm_up_steps of a few hundred, got {warm_up_steps})"
            raise ValueError(f"the energy range is unknown: pass first_edge and width, or {remedy}, or auto=True")
        self.rules = rules
        self.num_bins = num_bins
        self.first_edge = first_edge
        self.width = width
        self.lowest = lowest
        self.headroom = headroom
        self.step_size = step_size if step_size is not None else DecayingStepSize()
        self.warm_up_steps = warm_up_steps
        self.include_prior = include_prior
        self.sample_energy = sample_energy
        self.interacting = interacting
        self.exchange_every = exchange_every
        self.auto = auto
        self.reset()

    def reset(self) -> None:
        self._begun = 0
        """Steps of the sampler before this callback, where a run continues from a checkpoint without it."""
        self._start.reset()
        self._learner: ContourLearner | None = None
        """None until the energy range is known."""
        self._watch = ContourWatch(rank_zero_warn)
        self._location: Location | None = None
        """κ of the coming update; None while the contour is idle."""
        self._location_step = -1
        self._part: StepPart | None = None
        """Its work in compiled steps."""
        self._rests = False
        """Whether it does nothing in the coming steps, since their temperature is 0."""
        self._seen: Location | None = None
        """That of a compiled step whose end is to come."""
        self._energy_kind: Kind = self.sample_energy
        self._is_on = True
        """Whether the sampler's multiplier may differ from 1, as after loading a checkpoint."""

    def check(self, trainer: pl.Trainer, module: ChainModel) -> None:
        if target_of(trainer, module) == 0:
            raise ValueError(
                "ContourGradient flattens a target, and temperature=0 has none: set a temperature above 0, or remove "
                "the callback"
            )

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        begin_first_stage(run.trainer, run.module)
        self._begun = run.sampler.step_count if saved is None else int(saved["begun"])
        self._device = exact_device(run.module.device)
        self._layout = run.layout if run.layout.is_spread else replace(run.layout, strategy=None)
        """It outlives the fit, and holds its trainer only where chains are spread over processes."""
        self._start.reset(self._layout, self._device)
        self._on_host = run.module.device.type == "cpu" and run.module.num_chains == 1
        """Whether a number is cheaper than a tensor."""
        if is_trial(run.trainer):
            self._start.open(0)
        elif self.warm_up_steps or self._start.goals is None:
            self._start.open(self.warm_up_steps)
        steps = fit_steps(run.trainer)
        if steps <= self._first_step:
            raise ValueError(
                f"the run has {steps:.0f} steps, and the contour begins after {self._first_step} of them: shorten "
                "warm_up_steps or lengthen the run"
            )
        self._energy_kind = available_kind(self.sample_energy, run.trainer, run.module)
        contour = None
        if saved is not None:
            self._watch.load_state_dict(saved["watch"])
            contour = self._start.load_state_dict(saved)
        if contour is not None:
            self._open(contour, saved=saved)
        elif (given := self._start.given()) is not None:
            self._open(given)

    def plan_note(self) -> str:
        return "A contour scales the gradient; the plan is for the unflattened target."

    def _open(self, contour: Contour, initial: ContourState | None = None, saved: dict[str, Any] | None = None) -> None:
        """Start the contour, with an initial π or that of a checkpoint."""
        run = self.run
        on_gpu = run.chains.flat is not None and run.chains.flat.fused
        learner = ContourLearner(
            contour,
            self.step_size,
            self._layout,
            self._device,
            self.interacting,
            self.exchange_every,
            on_gpu,
            initial,
        )
        if saved is not None:
            learner.load_state_dict(saved)
        self._learner = learner
        self._publish()
        run.chains.tags.comparable = learner.is_shared
        choice = self._start.choice
        if choice is not None:
            log_values(run.trainer, "contour", choice.scalars())
        limits = () if choice is None else ("min_multiplier", "max_multiplier")  # chosen ones act too rarely to count
        inexact = {name: value for name, value in contour.rules.regularisation.items() if name not in limits}
        inexact |= {} if self._start.include_prior else {"include_prior": False}
        if inexact:
            settings = ", ".join(f"{name}={value}" for name, value in inexact.items())
            rank_zero_info(f"ContourGradient is regularised ({settings}), so its weights are only approximate")

    def _publish(self) -> None:
        """Let the module hold what has been learned."""
        assert self._learner is not None
        learned = self.run.module.contour = self._learner.of_all_chains()
        learned.choice, learned.shares = self._start.choice, self._watch.shares
        learned.temperature = self._temperature

    # -- a step -------------------------------------------------------------------------------------------------------

    @property
    def _first_step(self) -> int:
        """Steps of the sampler before the contour begins: those of a warm start, and then of its own warm-up."""
        return self._start.first_step(max(self._begun, self.run.chains.progress.warm_steps))

    @property
    def _temperature(self) -> Control:
        """τ of the coming step, a number or a tensor where the contour is."""
        temperature: Control = self.run.sampler.param_groups[0]["temperature"]
        return sent(temperature, self._device) if isinstance(temperature, Tensor) else temperature

    @property
    def _energy(self) -> Tensor:
        """The energy of the step's data over all ranks, shape (C,), float64."""
        chains = self.run.chains
        return chains.layout.mean_over_data(chains.observed.corrected(self._start.include_prior))

    def _set_controls(self, trainer: pl.Trainer) -> None:
        """Set κ of the coming update, since the energy of its batch is known."""
        run = self.run
        self._location = None
        temperature = self._temperature
        if not (isinstance(temperature, Tensor) or temperature > 0):
            if self._is_on:
                run.sampler.set_control("gradient_multiplier", 1.0)
                self._is_on = False
            return
        if self._learner is None:
            self._warm_up(temperature)
        learner, step = self._learner, run.sampler.step_count
        if learner is None or step < self._first_step:
            return
        try:
            location = learner.locate(self._energy, temperature)
        except ValueError:  # a NaN: the guard reports it and refuses the step
            return
        self._location, self._location_step, self._is_on = location, step, True
        multiplier = location.multiplier
        kappa = multiplier.item() if self._on_host else sent(multiplier, run.module.device)
        run.sampler.set_control("gradient_multiplier", kappa)

    def _warm_up(self, temperature: Control) -> None:
        """Record the energy of a step of the warm-up; after the last one, begin the contour."""
        chains, step, start = self.run.chains, self.run.sampler.step_count, self._start
        if step < max(self._begun, chains.progress.warm_steps):
            return
        if start.length is None:  # auto, at the first step at a temperature above 0
            start.open_until(step, chains.progress.first_sample)
        if step >= self._first_step:
            made = start.decide(float(exact(torch.as_tensor(temperature)).mean()))
            if made is not None:
                rank_zero_info(f"ContourGradient {made[2]}")
                self._open(*made[:2])
        elif start.is_recording:
            start.record(self._place_in_warm_up, self._energy[None], chains.observed.log_prior.reshape(1, -1))

    @property
    def _place_in_warm_up(self) -> int:
        """The number of the coming step in the warm-up, from 1."""
        return self.run.sampler.step_count + 1 - self._first_step + (self._start.length or 0)

    def _accept_scales(self, change: Tensor) -> Tensor:
        """Return the log probability of accepting a draw of a prior's scales that changes the energies, shape (C,)."""
        if self._learner is None or self._location is None or not self._start.include_prior:
            return change.new_zeros(change.shape)
        found = self._learner.log_acceptance(self._location, change.to(self._location.energy.device))
        return sent(found, change.device)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        run, learner, location = self.run, self._learner, self._location
        if learner is not None and self._seen is not None and is_logged(trainer, run.chains, run.sampler.step_count):
            log_scalars(trainer, learner.scalars(self._seen), trainer.global_step)
        self._seen = None
        if learner is None or location is None:
            return
        if run.sampler.step_count != self._location_step + 1:
            return  # a micro-batch that only accumulates, or a step that was skipped
        self._location = None
        learner.learn(location)
        run.chains.tags.log_weight = location.log_weight
        run.chains.tags.bin = location.index
        if is_logged(trainer, run.chains, run.sampler.step_count):
            log_scalars(trainer, learner.scalars(location), trainer.global_step)
        self._watch.after_update(learner.learned, learner.updates)

    # -- compiled steps -----------------------------------------------------------------------------------------------

    def acts_in(self, step: int) -> bool:
        learner = self._learner
        if self._part is None:
            return not self._rests
        if learner is None:
            return step > self._first_step  # the first one opens the contour
        return learner.updates + step - self.run.sampler.step_count == self._watch.next_check

    def step_part(self) -> StepPart | None:
        learner, run, start = self._learner, self.run, self._start
        temperature, part = run.sampler.param_groups[0]["temperature"], self._part
        is_known = not isinstance(temperature, Tensor) and run.module.device.type in ("cpu", "cuda")
        self._rests = is_known and temperature == 0 and not self._is_on
        self._part = None
        if is_known and temperature > 0:
            if learner is None and start.length is not None:
                self._part = EnergiesOfSteps(self._record_steps)
            elif learner is not None and learner.is_local:
                is_present = isinstance(part, LearningInSteps) and part.is_of(learner)
                made = part if is_present else LearningInSteps(learner, start.include_prior, self._end_steps)
                self._part = made
        return self._part

    def _record_steps(self, energies: Tensor) -> None:
        """Record the energies of several steps of the warm-up, Ũ/N and log p(θ), shape (K, 2, C)."""
        potentials, log_priors = exact(energies).unbind(1)
        potentials = potentials * self.run.chains.observed.num_data
        used = potentials if self._start.include_prior else potentials + log_priors
        self._start.record(self._place_in_warm_up, used, log_priors)

    def _end_steps(self, location: Location) -> None:
        """Take the location of the last of several steps in which the learner has learned."""
        run = self.run
        multiplier = location.multiplier
        run.sampler.set_control("gradient_multiplier", multiplier.item() if self._on_host else multiplier)
        self._is_on, self._location = True, None
        self._seen = location
        run.chains.tags.log_weight, run.chains.tags.bin = location.log_weight, location.index

    # -- a sample -----------------------------------------------------------------------------------------------------

    def _prepare_samples(self) -> None:
        """Update energy, bin and weight of the current states before they become samples."""
        run, learner = self.run, self._learner
        tags = run.chains.tags
        if learner is None or tags.bin is None:
            if is_trial(run.trainer):
                return
            raise ValueError(
                f"a sample is due after step {run.sampler.step_count}, but it has no weight before the contour "
                f"begins: let the schedule draw its first sample after the {self._first_step} steps of the warm-up"
            )
        self._publish()
        energy = sample_energies(self._energy_kind, run.trainer, run.chains, run.sampler, self._start.include_prior)
        if energy is None:
            tags.energy = self._energy
            return
        location = learner.locate(energy)
        tags.energy, tags.bin = energy, location.index
        tags.log_weight = location.log_weight

    reads_all_samples = False  # but their weights

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: ChainModel, sample: PosteriorSample) -> None:
        self._watch.after_sample(sample.log_weight, sample.chain if not sample.comparable else None)

    # -- the end, checkpoints -----------------------------------------------------------------------------------------

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._learner is not None:
            self._watch.finish(self._learner.learned, self._learner.updates)
            self._publish()

    def end(self) -> None:
        self.run.chains.tags.energy = None

    def state(self) -> dict[str, Any]:
        learner = self._learner
        nothing = {"updates": 0, "rules": None, "state": None, "waiting": None}
        return (
            (nothing if learner is None else learner.state_dict())
            | self._start.state_dict()
            | {"begun": self._begun, "watch": self._watch.state_dict()}
        )
