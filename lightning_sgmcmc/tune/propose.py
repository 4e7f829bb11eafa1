"""`propose_lr`: the setting of lr for a run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth, SamplerCallback
from lightning_sgmcmc.chains.chains import ChainModel, values_of
from lightning_sgmcmc.chains.schedule import StepControls
from lightning_sgmcmc.chains.state import NonFiniteEnergyError, Stage
from lightning_sgmcmc.checks import check_count, check_positive
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import pl, rank_zero_info
from lightning_sgmcmc.samplers import MCLMC
from lightning_sgmcmc.samplers.sampler import NO_COLD_LIMIT
from lightning_sgmcmc.seeding import TorchStates, unchanged_generators
from lightning_sgmcmc.tensors import exact
from lightning_sgmcmc.tune.probes import Prober, Training
from lightning_sgmcmc.tune.proposal import (
    Limit,
    Probe,
    StepProposal,
    choose,
    repeat_longer,
    scaled,
    search,
    tail_mean,
)
from lightning_sgmcmc.tune.runs import HOT, Energies, FixedControls, HotMomenta, RunForm, ShortRuns, State

MIN_STEPS = 100
"""The fewest steps of a probe."""
MAX_STEPS = 500
"""The most steps of a probe whose length is not given."""
LONGER = 4
"""A probe that decides by validation data is so many times as long, or as long as the run's first stages."""
RUN_SHARE = 8
"""A probe whose length is not given has the run's steps over this number."""


def propose_lr(
    module: BayesianModule,
    train_dataloaders: Any = None,
    datamodule: pl.LightningDataModule | None = None,
    val_dataloaders: Any = None,
    *,
    steps: int | None = None,
    burn_in_steps: int | None = None,
    tolerance: float = 0.2,
    max_probes: int = 10,
    make_trainer: Callable[..., pl.Trainer] = pl.Trainer,
) -> StepProposal:
    """Return the setting of the module's lr for a run: the largest at which short runs are healthy.

    `make_trainer` makes the run's trainer, so that its schedule, length, batches, accumulation, clipping, warm start
    and the callbacks that change the gradient's noise (`EWSG`, `ControlVariates`, …) are known. The call first
    optimizes from the run's start in some steps at several step sizes, and continues from the best with a step that
    shrinks; so the module's own lr may be wrong by many powers of ten. From the state that it reached, each probe runs
    the first cycle, or burn-in and sampling, in short form. A probe is unhealthy

    * if the first steps from the run's start raise the energy, or the exploration stage (the full lr at temperature 0)
      diverges or ends with less than half of what had been learned ("exploration");
    * if a `MetropolisTest` accepts less than 0.65 of the trajectories ("acceptance"), where the chains sample: they are
      moved there without it, at the largest step that is right without it;
    * if `ChainHealth` finds heat in the sampling stage, if the estimate of a tensor's mini-batch noise is above
      tolerance times the injected noise, the kinetic temperature of all tensors together above τ·(1 + tolerance), or
      the energy above that of d harmonic coordinates, U_0 + τ·(1 + tolerance)·d/2, with U_0 the energy of the
      warmed-up state ("gradient noise", "discretization"), or if the model is at chance.

    Temperatures below τ do not count: they depend on the length of the run. Step sizes are tried by factors of two up
    or down until health changes, and twice between. Where a run ends in one stage of sampling at a constant step, the
    proposal is the largest healthy one: a smaller step only leaves the chain colder, and whether that predicts better
    is a question of the temperature. In other runs it is the largest healthy one that trains within the first stage
    and whose average predicts the validation data as well as the best, within noise. Short runs favour small steps, so
    where these data speak against the largest healthy step, longer probes decide. If none is healthy, it is the best of
    those tried.

    `MCLMC` and `pMCLMC`, which have no excess variance, get the lr at which the energy error of a step has a
    variance of 5e-4 for each coordinate (Robnik et al. 2023), from probes at step sizes that the law lr⁶ corrects. Both
    ends of a step are taken on the step's own mini-batch (see `lightning_sgmcmc.tune.propose.EnergyErrors`), so the
    energies' noise between batches does not count. They also get a friction, from the width of the positions in the
    probes; all chains get one.

    The call restores the module: parameters and buffers, lr, evaluations.

    Args:
        module: the module; its lr is a number, or numbers by pattern and chain, which are scaled together.
        train_dataloaders: training data, or
        datamodule: the datamodule that has them and validation data.
        val_dataloaders: validation data; the test data are never used.
        steps: optimizer steps of a probe, at least 100; None is an eighth of the run's, between 100 and 500.
        burn_in_steps: optimizer steps at temperature 0 before the probes; None is the same as steps.
        tolerance: accepted relative deviation of temperatures.
        max_probes: the largest number of probes.
        make_trainer: makes the run's trainer, such as `functools.partial(Trainer, max_epochs=200, callbacks=[…])`;
            keyword arguments replace its own.

    Raises:
        ValueError: for an argument out of range, a module at temperature 0, a schedule that the sampler refuses, or a
            run of which no probe could begin.
        TypeError: if the module is not a `BayesianModule`.
    """
    if not isinstance(module, BayesianModule):
        raise TypeError(
            f"propose_lr works with a BayesianModule, got {type(module).__name__}: derive the module from "
            "lightning_sgmcmc.BayesianModule"
        )
    check_count("steps", steps, least=MIN_STEPS)
    check_count("burn_in_steps", burn_in_steps, least=0)
    check_positive("tolerance", tolerance)
    check_count("max_probes", max_probes, optional=False)
    numbers = [number for number in values_of(module.lr) if number is not None]
    if any(number == 0 for number in numbers):
        raise ValueError("lr is 0: set the module's lr to a step size to start the search from")
    data: dict[str, Any] = {"train_dataloaders": train_dataloaders, "datamodule": datamodule}
    if val_dataloaders is not None:
        data["val_dataloaders"] = val_dataloaders
    runs = ShortRuns(module, data, make_trainer)
    own = getattr(runs.schedule, "temperature", None)
    if not any(values_of(module.temperature if own is None else own)):
        raise ValueError("at temperature 0 the chain does not sample, so no step has excess variance: set temperature")
    module.configure_model()  # stacks several chains, for good
    with runs.restored():
        return _proposal(runs, steps, burn_in_steps, tolerance, max_probes)


def _proposal(
    runs: ShortRuns, steps: int | None, burn_in_steps: int | None, tolerance: float, max_probes: int
) -> StepProposal:
    """Return the proposal of `propose_lr`; it leaves the module in another state."""
    start = runs.state()
    energies, setting = runs.look()
    runs.set_state(start)
    setting = dict(setting) if hasattr(setting, "items") else setting
    given = max(values_of(setting))
    form = RunForm(runs.schedule, runs.length._replace(lr=setting if isinstance(setting, int | float) else given))
    length = steps or int(max(MIN_STEPS, min(MAX_STEPS, runs.length.steps // RUN_SHARE)))
    energy, error = tail_mean(energies, 1.0), float(energies.mean(1).std()) / len(energies) ** 0.5
    training = Training(runs, setting, given, energy, error)
    sampler = runs.module.sampler
    if form.explores and not sampler.has_cold_limit:  # it makes no step there
        raise ValueError(NO_COLD_LIMIT.format(type(sampler).__name__))
    training.warm_up(length if burn_in_steps is None else burn_in_steps)
    rank_zero_info(f"Warmed up: energy {energy:.6g} to {training.energy:.6g} nats.")
    friction = None
    if runs.is_microcanonical:
        probes = solve(EnergyProber(runs, training, form, length, tolerance), training.lr, max_probes)
        lr, friction, is_healthy, reason = choose_by_energy(probes)
        limit = Limit.ENERGY_ERROR
    else:
        probes, (lr, limit, is_healthy, reason) = _by_health(
            Prober(runs, training, form, length, tolerance), max_probes
        )
    setting = scaled(setting, lr / max(values_of(setting)))
    ordered = tuple(sorted(probes, key=lambda probe: probe.lr))
    made, whole = runs.steps_made, runs.length.steps
    return StepProposal(lr, setting, limit, is_healthy, reason, ordered, made, whole, friction)


def _by_health(prober: Prober, max_probes: int) -> tuple[list[Probe], tuple[float, Limit, bool, str]]:
    """Return probes of a sampler that heats, and the choice among them by their health."""
    runs, training, form = prober.runs, prober.training, prober.form
    least = training.time / form.lead if form.lead > 1 else 0.0
    first = _heat(prober, least, max_probes) if runs.is_tested else training.lr
    probes = search(prober, first, least, max_probes)
    longer = replace(prober, steps=max(prober.steps, min(LONGER * prober.steps, form.stage_end)))
    if longer.steps > prober.steps:
        probes = repeat_longer(probes, longer, least, training.lr)
    smallest = min(probes, key=lambda probe: probe.lr)
    if smallest.refusal and not any(probe.healthy for probe in probes):  # then the reason is not the step
        raise ValueError(f"no short run could begin: {smallest.refusal}")
    return probes, choose(probes, least, training.lr)


def _heat(prober: Prober, least: float, max_probes: int) -> float:
    """Move the chains from the optimum towards typical states without their test; return the largest stable step.

    At an optimum the mini-batch noise is smaller than where a chain samples, so a test would accept more.
    """
    runs, training = prober.runs, prober.training
    untested = replace(prober, tested=False)
    lr, *_ = choose(search(untested, training.lr, least, max_probes), least, training.lr)
    runs.set_state(training.state)
    training.set_lr(lr)
    steps = LONGER * prober.steps
    try:
        energies = runs.fit(prober.form.steady(steps), steps, with_noise=True, tested=False)
    except NonFiniteEnergyError:  # no step was healthy
        return lr
    training.state, training.energy = runs.state(), tail_mean(energies.of())
    rank_zero_info(f"Without MetropolisTest at lr={lr:.3g}: energy {training.energy:.6g} nats.")
    return lr


# -- mclmc -------------------------------------------------------------------------------------------------------------


WANTED = 5e-4
"""Variance of the energy error of a step, for each coordinate (Robnik et al. 2023)."""
POWER = 6.0
"""The variance grows with this power of the time step."""
TOLERATED = 1.2
"""A probe is healthy up to this factor of the wanted variance."""
NEAR = 2.0
"""A probe is near the wanted variance within this factor, where the law of sixth order corrects its step size."""
MOST = 4.0
"""The largest factor between two step sizes."""
LONGEST = 3
"""Lengths of a probe that a preconditioner may take before it."""
ENOUGH = 3
"""Probes near the wanted variance that end the search."""


class EnergyErrors(SamplerCallback):
    """Measures by how much each step of a sampling stage changes the energy, which the exact flow would keep.

        ΔE = K(θ, half) + [Ũ(θ') - Ũ(θ)]/τ + K(θ', half)

    with K what half of the momentum's flow adds to the kinetic energy over τ (`MCLMC.kinetic_gain`): the last half of
    the step's own flow, and the first half of the next one. Potentials and gradients are of the step's own mini-batch
    and dropout masks, so ΔE has only the integrator's error, of third order in the time step: energies of two batches
    would differ by their noise, and gradients by a term of first order. A measured step costs a second gradient.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[Any, TorchStates]] = []
        """The step's micro-batches, each with the states of torch's generators before it."""
        self._begun: Tensor | None = None
        self._step = 0
        self._errors: list[Tensor] = []
        self._anchors: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._squares: list[Tensor] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batches.append((batch, TorchStates([pl_module.device])))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        module = self.run.module
        self._step = module.sampler.step_count
        self._begun = None
        if module.chains.progress.stage is Stage.SAMPLING:
            gains = [self._gain(module, [p.grad for p in self._parameters(module)], share) for share in (1.0, 0.5)]
            self._begun = gains[0] - gains[1] - self._reduced(module, module.chains.observed.mean_potential)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        module = self.run.module
        if module.sampler.step_count == self._step:
            return  # an accumulated micro-batch
        batches, self._batches = self._batches, []
        if self._begun is not None:
            potential, gradients = self._at_end(trainer, module, batches)
            end = self._gain(module, gradients, 0.5) + self._reduced(module, potential)
            self._errors.append(self._begun + end)
            self._add_position(self._parameters(module))

    def _parameters(self, module: ChainModel) -> list[Tensor]:
        return [p for group in module.sampler.param_groups for p in group["params"]]

    def _gain(self, module: ChainModel, gradients: list[Tensor | None], share: float) -> Tensor:
        """Return what a share of the flow adds to K over all parameter groups, shape (C,)."""
        sampler, place, gains = module.sampler, 0, []
        assert isinstance(sampler, MCLMC)
        for group in sampler.param_groups:
            own = zip(group["params"], gradients[place:], strict=False)
            pairs = [(p, g) for p, g in own if g is not None]
            place += len(group["params"])
            gains.append(sampler.kinetic_gain(group, [p for p, _ in pairs], [g for _, g in pairs], share))
        return torch.stack(gains).sum(0)

    @staticmethod
    def _reduced(module: ChainModel, mean_potential: Tensor) -> Tensor:
        """Return Ũ/τ, shape (C,)."""
        temperature = module.sampler.param_groups[0]["temperature"]
        found = exact(mean_potential.detach().reshape(-1)) * (module.num_data or 1)
        return found / (temperature.to(found.device) if isinstance(temperature, Tensor) else temperature)

    def _at_end(
        self, trainer: pl.Trainer, module: ChainModel, batches: list[tuple[Any, TorchStates]]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return Ũ/N of a step's batches at the present state, shape (C,), and its gradients."""
        chains, params, potentials = module.chains, self._parameters(module), []
        assert chains.energies is not None
        for batch, states in batches:
            precision = trainer.precision_plugin.train_step_context()
            with torch.enable_grad(), precision, unchanged_generators([module.device]):
                states.restore()
                found = chains.energies(batch, through_stack=True, seed_chain=chains.claims.get("seed chain"))
            potentials.append(found.mean_potential.reshape(-1))
        potential = torch.stack(potentials).mean(0)
        return potential, list(torch.autograd.grad(potential.sum(), params, allow_unused=True))

    @torch.no_grad()
    def _add_position(self, params: list[Tensor]) -> None:
        if not self._anchors:
            self._anchors = [p.detach().clone() for p in params]
            self._sums, self._squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
        moved = torch._foreach_sub(params, self._anchors)
        torch._foreach_add_(self._sums, moved)
        torch._foreach_addcmul_(self._squares, moved, moved)

    # -- what was found -----------------------------------------------------------------------------------------------

    def variance(self, sampler: MCLMC) -> float:
        """Return the variance of ΔE over the number of a chain's coordinates, infinite if it is not finite."""
        errors = torch.stack(self._errors)
        count = sum(sampler.sampled_numel(p) for group in sampler.param_groups for p in group["params"])
        found = float(errors.var(0).mean()) / count
        return found if math.isfinite(found) else math.inf

    def friction(self, sampler: MCLMC) -> float:
        """Return √(τ/s²), at which the momentum forgets its direction over √d·s.

        s² is the mean variance of the coordinates over the measured steps, scaled as the momenta.
        """
        steps, total, count, place = len(self._errors), 0.0, 0, 0
        for group in sampler.param_groups:
            metric = sampler.preconditioner(group["params"]) or [torch.ones(())] * len(group["params"])
            for scale, parameter in zip(metric, group["params"], strict=True):
                spread = self._squares[place] / steps - (self._sums[place] / steps).square()
                total += float((spread / scale.to(spread)).sum())
                count, place = count + sampler.sampled_numel(parameter) * sampler.num_chains, place + 1
        temperature = exact(torch.as_tensor(sampler.param_groups[0]["temperature"])).mean()
        return math.sqrt(float(temperature) * count / max(total, 1e-300))


@dataclass
class EnergyProber(Prober):
    """Makes probes of MCLMC, each from the end of the last, and judges them by their energy errors.

    Callbacks that change the gradient, and clipping, take no part: such steps conserve no energy.
    """

    _state: State = field(default_factory=list)
    _errors: EnergyErrors = field(default_factory=EnergyErrors)

    def _repeated(self, lr: float) -> Probe:
        self._errors = EnergyErrors()
        probe = self._probe(lr, self._state or self.training.state)
        if probe.energy is None:
            return probe
        self._state = self.runs.state()
        sampler = self.runs.module.sampler
        assert isinstance(sampler, MCLMC)
        variance, friction = self._errors.variance(sampler), self._errors.friction(sampler)
        limit, reason = None, ""
        if variance > TOLERATED * WANTED:
            limit = Limit.ENERGY_ERROR
            reason = f"energy error: a variance of {variance:.3g} for each coordinate and step, wanted {WANTED:g}"
        return replace(probe, limit=limit, reason=reason, energy_variance=variance, friction=friction)

    def _first_steps(self) -> list[StepControls]:
        """Return those of a burn-in of at most three probes' lengths at the full lr: the scale of a full gradient shows
        only while the chain moves, and MCLMC cannot inflate the variance on the way."""
        return [HOT] * min(round(self.form.lead), LONGEST * self.steps) if self.runs.has_preconditioner else []

    def _fit(self, schedule: FixedControls, steps: int, health: ChainHealth) -> Energies:
        # Momenta of zero would all begin along the gradient, and oscillate.
        callbacks = [BayesianModelAverage(), health, HotMomenta(), self._errors]
        return self.runs.fit(schedule, steps, *callbacks, clips=False)


def corrected(probe: Probe) -> float:
    """Return the step size at which the law of sixth order expects the wanted variance, within a factor of 4."""
    if probe.energy_variance is None or not math.isfinite(probe.energy_variance):
        return probe.lr / MOST
    factor = (WANTED / max(probe.energy_variance, 1e-300)) ** (1 / POWER)
    return probe.lr * min(max(factor, 1 / MOST), MOST)


def solve(probe: Callable[[float], Probe], lr: float, max_probes: int) -> list[Probe]:
    """Probe at lr, and at each probe's corrected step size, until three are near the wanted variance."""
    probes: list[Probe] = []
    while len(probes) < max_probes and len(_near(probes)) < ENOUGH:
        probes.append(probe(lr))
        lr = corrected(probes[-1])
    return probes


def _near(probes: Sequence[Probe]) -> list[Probe]:
    """Return the probes whose variance is near the wanted one."""
    return [p for p in probes if p.energy_variance is not None and 1 / NEAR < p.energy_variance / WANTED < NEAR]


def choose_by_energy(probes: Sequence[Probe]) -> tuple[float, float | None, bool, str]:
    """Return the mean corrected step size and friction of the probes near the wanted variance, else of the last one
    made, whether they are healthy, and a sentence."""
    used = _near(probes) or list(probes[-1:])
    lr = _geometric_mean([corrected(p) for p in used])
    frictions = [p.friction for p in used if p.friction is not None]
    friction = _geometric_mean(frictions) if frictions else None
    if _near(used):
        return lr, friction, True, Limit.ENERGY_ERROR.sentence
    return lr, friction, False, f"No probe came near it; {used[-1].reason or 'the last one was far below'}"


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
