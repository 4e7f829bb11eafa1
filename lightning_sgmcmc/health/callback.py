"""The verdict on a run: temperatures, mini-batch noise, energies, predictions; ranked findings and one advice."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from lightning_sgmcmc.chains.callback import ChainSizes, Place, Run, StepClaimant
from lightning_sgmcmc.chains.chains import ChainModel
from lightning_sgmcmc.chains.row_steps import Controls
from lightning_sgmcmc.chains.schedule import Schedule, is_optimization, schedule_of
from lightning_sgmcmc.chains.state import NonFiniteEnergyError, Stage
from lightning_sgmcmc.chains.trainer import declared, is_trial, log_scalars, run_folder
from lightning_sgmcmc.checks import check_count, check_flag, check_positive, check_within
from lightning_sgmcmc.files import warning_of_failed_writes, write_output
from lightning_sgmcmc.health.assessment import assess
from lightning_sgmcmc.health.estimates import Clipping, GroupStep, StepObserver, unreduced
from lightning_sgmcmc.health.facts import facts_of
from lightning_sgmcmc.health.findings import FindingKind
from lightning_sgmcmc.health.held_out import with_held_out
from lightning_sgmcmc.health.report import HEALTH, HealthReport
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.samplers import StepLaw
from lightning_sgmcmc.tensors import Control, exact

URGENT = (FindingKind.DIVERGENCE, FindingKind.AT_CHANCE, FindingKind.CLIPPING)
"""Findings that deserve a warning before the end of the run; heat does too."""
WARNED_ELSEWHERE = (FindingKind.CONTOUR, FindingKind.ACCEPTANCE)
"""Findings of which other callbacks warn, `ContourGradient` and `MetropolisTest`."""
QUARTER_MORE = 1.25
"""Growth factor of the number of observations after which a validation reports again."""


class ChainHealth(StepClaimant):
    """Measures what a run samples, and ends in one ranked list of findings with one advice.

    For each parameter tensor it compares the kinetic and the configurational temperature with the target's τ, and
    estimates the share of mini-batch noise in the variance of a step; for the chain, it tests whether the energy still
    drifts (formulas in `lightning_sgmcmc.health.estimates`). Only steps of a sampling stage count, each with
    its own step size and temperature. For the run it asks whether the model is at chance, whether it has
    too many parameters for the data, how many relaxation times a stage covers and, at the end and with a
    `BayesianModelAverage`, whether the chains' predictions agree and whether the average gets worse with more samples;
    and with a contour, whether it does nothing or gives one sample all the weight.
    A preconditioner that adapts while samples are drawn is a note. With a `MetropolisTest`, which makes the law exact,
    the excess variance of its steps is not a finding, but a low acceptance is.
    A configurational temperature below the target's is a note in a cyclical run: its samples are a cold ensemble.

    The callback reports at the end of every sampling stage, after a validation with a quarter more observations, and
    at the end of the fit. A report is in `module.health` and in the run folder's `health.json`; its totals are logged
    as `health/…`. It warns of the most urgent finding only, once for each kind: during the run of divergence, chance,
    heat and clipping, at the end of any problem. If the schedule sets the step size, which falls within a stage, heat
    is reported at any time and warned of at the end of a stage, since a stage's first steps are its hottest.

    The mini-batch noise is half the mean square of the difference of two successive gradients, which needs no
    per-datum gradients. Its relative bias is at most lr·λ, with λ the curvature along the noise. Gradients are taken
    before clipping and multiplied by the gradient multiplier, since the chain samples the law of that force. A tensor
    without a gradient in a step is omitted. With several chains the numbers are means over them, each in units of its
    own step size and temperature. The callback stores three copies of the parameters.

    Args:
        every_n_steps: number of optimizer steps between observations.
        tolerance: accepted relative deviation from the target.
        false_alarm_rate: probability of a warning in a report on a chain that is within the tolerance.
        warm_up: share of each sampling stage, at its beginning, that is ignored.
        warn: whether to warn and to write `health.json`.

    Raises:
        ValueError: for an argument out of range.

    Source: Wenzel et al. 2020, section 4 and appendix I.

    Example::

        trainer = pl.Trainer(max_epochs=200, callbacks=[CyclicalSchedule(num_cycles=4), ChainHealth()])
    """

    place = Place.DIAGNOSIS
    claims: ClassVar[Mapping[str, str | None]] = {"observe step": "_observe", "chain temperatures": None}

    def __init__(
        self,
        every_n_steps: int = 20,
        tolerance: float = 0.2,
        false_alarm_rate: float = 0.01,
        warm_up: float = 0.25,
        warn: bool = True,
    ) -> None:
        check_count("every_n_steps", every_n_steps, optional=False)
        check_positive("tolerance", tolerance)
        check_within("false_alarm_rate", false_alarm_rate, "(0, 1)")
        check_within("warm_up", warm_up, "[0, 1)")
        check_flag("warn", warn)
        self.every_n_steps = every_n_steps
        self.tolerance = tolerance
        self.false_alarm_rate = false_alarm_rate
        self.warm_up = warm_up
        self.warn = warn
        self.reset()

    def reset(self) -> None:
        self._observer: StepObserver | None = None
        self._schedule: Schedule | None = None
        self._warned: set[str] = set()
        self._reported_observations = -1
        self._folder = Path()

    def begin(self, run: Run, saved: dict[str, Any] | None) -> None:
        module, sampler = run.module, run.sampler
        self._folder, self._schedule = run_folder(run.trainer), schedule_of(run.trainer)
        names = {p: name for name, p in module.named_parameters()}
        algorithm = str(run.trainer.gradient_clip_algorithm or "norm").split(".")[-1].lower()
        self._params = [p for group in sampler.param_groups for p in group["params"]]
        self._observer = StepObserver(
            [names.get(p, f"parameter {i}") for i, p in enumerate(self._params)],
            self._params,
            [len(group["params"]) for group in sampler.param_groups],
            sampler.num_chains,
            self.every_n_steps,
            self.warm_up,
            Clipping(run.trainer.gradient_clip_val, "value" if algorithm == "value" else "norm"),
            [sampler.sampled_numel(p) for p in self._params],
        )
        self._step = sampler.step_count
        if saved is None:
            return
        self._warned = set(saved["warned"])
        own = run.layout.own_stored if run.layout.is_spread else unreduced  # as `state` has saved it
        if not self._observer.load_state_dict(saved, own):
            rank_zero_warn(
                "The checkpoint's health record is for a network with other parameters: ChainHealth starts a new one."
            )

    def memory(self, sizes: ChainSizes) -> int:
        return 3 * sizes.parameters

    # -- a step -------------------------------------------------------------------------------------------------------

    def _observe(self, trainer: pl.Trainer) -> None:
        """Observe a step of a sampling stage, when its gradient and controls are final except for clipping."""
        sampler, observer, chains = self.run.sampler, self._observer, self.run.chains
        assert observer is not None
        if chains.progress.stage is not Stage.SAMPLING or not all(map(sampler.is_noisy, sampler.param_groups)):
            return
        if not observer.in_stage:
            observer.begin_stage()
        step = sampler.step_count + 1
        if observer.needs(step):
            observer.before_update(step, [p.grad for p in self._params], self._metric)

    def acts_in(self, step: int) -> bool:
        observer, schedule = self._observer, self._schedule
        if observer is None or schedule is None or not schedule.has_length:
            return True
        own = step - self.run.chains.progress.warm_steps
        samples = own > 0 and schedule.controls(own).stage is Stage.SAMPLING
        return samples != observer.in_stage or (samples and observer.needs(step))

    def pass_over(self, trainer: pl.Trainer, batches: int, controls: Sequence[Controls]) -> None:
        observer, groups = self._observer, self.run.sampler.param_groups
        if observer is None or not observer.in_stage:
            return
        steps = zip(*(zip(own.lr, own.temperature, strict=True) for own in controls), strict=True)
        for _, alike in itertools.groupby(steps, _key_of_controls):
            first, *others = alike
            pairs = zip(groups, first, strict=True)
            laws = [self._law({**group, "lr": lr, "temperature": own}) for group, (lr, own) in pairs]
            observer.after_update(laws, 1 + len(others))

    def _metric(self) -> list[Tensor]:
        """Return the preconditioner's tensors, if any."""
        scales: list[Tensor] = []
        for group in self.run.sampler.param_groups:
            scales += self.run.sampler.preconditioner(group["params"]) or []
        return scales

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sampler, observer = self.run.sampler, self._observer
        if observer is None or not observer.in_stage:
            return
        if sampler.step_count == self._step:  # an accumulated micro-batch, or a step that the loss scaler skipped
            observer.discard()
            return
        self._step = sampler.step_count
        module = self.run.module
        if module.chains.progress.stage is not Stage.SAMPLING:
            observer.end_stage()
            self._report(trainer, module)
            return
        laws = [self._law(group) for group in sampler.param_groups]
        observer.after_update(laws)
        if observer.is_pending:
            num_data, seen = sampler.num_data, module.chains.observed
            assert num_data is not None  # the step had noise
            steps = []
            for group, law in zip(sampler.param_groups, laws, strict=True):
                controls = group["temperature"], group["gradient_multiplier"]
                steps.append(GroupStep(law, *controls, num_data, sampler.stored_momenta(group)))
            observer.add(steps, seen.energy.mean(), seen.log_prior.mean())

    def _law(self, group: dict[str, Any]) -> StepLaw:
        law = self.run.sampler.law(group)
        return self.run.sampler.langevin_law(group) if law is None else law

    # -- reports ------------------------------------------------------------------------------------------------------

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or self._observer is None:
            return
        if self._observer.count > QUARTER_MORE * self._reported_observations:
            self._report(trainer, self.run.module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._observer is not None
        self._observer.end_stage()
        self._reported_observations = -1
        self._report(trainer, self.run.module, is_final=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # The energy guard stops a diverging chain before it is observed; the report should give the cause.
        if isinstance(exception, NonFiniteEnergyError) and trainer.state.fn == "fit":
            self._reported_observations = -1
            self._report(trainer, self.run.module, has_diverged=True)

    def _report(
        self, trainer: pl.Trainer, module: ChainModel, has_diverged: bool = False, is_final: bool = False
    ) -> None:
        """Assess the observations, unless they have been assessed, and publish the report."""
        observer, sampler = self._observer, self.run.sampler
        if observer is None or observer.count == self._reported_observations:
            return
        self._reported_observations = observer.count
        pairs = [(self._law(group), len(group["params"])) for group in sampler.param_groups]
        allowance = [law.gradient_noise_allowance for law, count in pairs for _ in range(count)]
        # After a failure the ranks may be at different steps, so nothing is reduced over them.
        shared = not has_diverged and trainer.world_size > 1
        # Each rank's energies of a step come from its own data.
        of_energies = self._mean_over_processes if shared else unreduced
        of_chains = self._mean_over_processes if shared and self.run.layout.is_spread else unreduced
        seen = observer.observations(allowance, of_chains, of_energies)
        evaluation = module.evaluations.get("val") if is_final else None
        rates = next((c.acceptance_rate for c in declared(trainer) if c.tests_trajectories), None)
        accepted = None if has_diverged or rates is None else float(of_chains(rates.mean().reshape(1)))
        moved = any(callback.has_moved_target for callback in declared(trainer))
        facts = facts_of(module, sampler, evaluation, is_optimization(trainer, module), accepted, moved, is_final)
        report = assess(seen, sampler.step_count, self.tolerance, self.false_alarm_rate, facts)
        report = report.with_divergence() if has_diverged else report
        report = with_held_out(report, evaluation, facts.baseline is None and facts.temperature != 0)
        module.health = report = report.with_remedies(callback.remedy for callback in declared(trainer))
        self._publish(trainer, report, is_final or has_diverged)

    def _publish(self, trainer: pl.Trainer, report: HealthReport, is_final: bool) -> None:
        # One finding, the most urgent: the remedies of others may contradict its own.
        finding = next(iter(report.findings), None)
        if finding is not None and self.warn and finding.severity == "problem" and finding.kind not in WARNED_ELSEWHERE:
            amid = self._observer is not None and self._observer.in_stage
            # Later steps of a stage are smaller, and so less hot.
            is_cooling = amid and any(callback.sets_lr for callback in declared(trainer))
            is_urgent = finding.kind in URGENT or (finding.is_heat and not is_cooling)
            if (is_final or is_urgent) and finding.kind.value not in self._warned:
                self._warned.add(finding.kind.value)
                rank_zero_warn(f"ChainHealth: {finding.text}.")
        if trainer.is_global_zero and self.warn and not is_trial(trainer):
            content = json.dumps(report.as_json(), indent=2) + "\n"
            store = None if self.run.module.posterior is None else self.run.module.posterior.store
            with warning_of_failed_writes():
                write_output(self._folder / HEALTH, content.encode())
                if isinstance(store, DiskStore) and store.path.parent != self._folder:  # a folder of their own
                    write_output(store.path / HEALTH, content.encode())
        log_scalars(trainer, report.scalars(), trainer.global_step)

    def _mean_over_processes(self, means: Tensor) -> Tensor:
        reduced = self.run.trainer.strategy.reduce(means.to(self._params[0]), reduce_op="mean")
        assert isinstance(reduced, Tensor)
        return exact(reduced).cpu()

    def end(self) -> None:
        self._params = []

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        if self._observer is None:
            state: dict[str, Any] = {"means": None, "counts": None, "missing": [], "observations": 0}
        elif self._run is not None and self.run.layout.is_spread:
            # A checkpoint holds all chains.
            state = self._observer.state_dict(self._mean_over_processes, self.run.layout.gather_stored)
        else:
            state = self._observer.state_dict()
        return state | {"warned": sorted(self._warned)}


def _key_of_controls(step: tuple[tuple[Control, Control], ...]) -> list[float]:
    """Return what tells a step's controls of all groups from others; tensors of several chains by their identity."""
    return [id(value) if isinstance(value, Tensor) else value for pair in step for value in pair]
