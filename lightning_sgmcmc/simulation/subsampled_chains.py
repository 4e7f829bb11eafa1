"""Posteriors that are sums over data in the light loop: `sample_sum`, with a choice of gradient estimators.

Methods are compared at equal numbers of gradient evaluations, not of steps: positions are recorded after given numbers
of epochs. One pass is N evaluations of one datum's gradient for each chain. The cost of a step counts those of
every candidate batch, and the passes of snapshots and calibrations.

Batches are drawn uniformly and independently at every step, and within a batch with replacement too, so that
one of size b has 1/b of the covariance of a single datum's gradient.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lightning_sgmcmc.checks import check_choice, check_count, check_number, check_positive
from lightning_sgmcmc.samplers import Sampler, UnderdampedLangevin
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation.finite_sums import FiniteSum, batch_moments
from lightning_sgmcmc.simulation.loop import (
    BLOCK,
    LightLoop,
    Recorder,
    Step,
    StepPart,
    check_finite,
    compiles_blocks,
    shared_normals,
    starting_places,
)
from lightning_sgmcmc.subsampling.covariance_friction import GradientMoments, advance_moments_, extra_friction
from lightning_sgmcmc.subsampling.ewsg import Guess, index_log_weights, metropolis_index
from lightning_sgmcmc.tensors import widest_dtype


@dataclass(frozen=True)
class SumSamples:
    """Results of a run.

    Attributes:
        passes: epochs at each mark: those of `at_passes`, or the cost of the steps; shape (S,), float64.
        steps: steps made before each mark, shape (S,).
        positions: the chains' positions at the marks, shape (S, C, d).
        averages: averages of the observed function over the positions after each step up to the mark, float64, shape
            (S, C, F), F = 0 without one.
        last: the chains' final positions, shape (C, d).
        num_steps: steps made.
        evaluations: total evaluations of one datum's gradient for each chain.
        acceptance: share of candidates that the index chain accepted; None without an index chain.
    """

    passes: Tensor
    steps: Tensor
    positions: Tensor
    averages: Tensor
    last: Tensor
    num_steps: int
    evaluations: int
    acceptance: float | None


def _advance(loop: LightLoop, recorder: Recorder, num_steps: int, compiles: bool) -> None:
    """Make a run's steps, and record its positions."""
    present = loop.place.detach()[None]
    with torch.no_grad():
        recorder.record(0, {"positions": present})
        while loop.count < num_steps:
            first = loop.count + 1
            # The first step creates the rule's buffers, so it is not compiled; the last block may exceed the run.
            rows = loop.advance(BLOCK if compiles and first > 1 else 1)
            for step, row in enumerate(rows["positions"].split(1) if compiles else [present], first):
                recorder.record(step, {"positions": row})


def sample_sum(
    target: FiniteSum,
    sampler: Callable[..., Sampler],
    gradient: "GradientEstimator",
    *,
    lr: float,
    num_passes: float | None = None,
    num_steps: int | None = None,
    num_chains: int = 1,
    temperature: float = 1.0,
    initial: Tensor | None = None,
    at_passes: Sequence[float] = (),
    at_steps: Sequence[int] = (),
    observe: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    compile: bool | None = None,
) -> SumSamples:
    """Run chains on a posterior.

    A mark of p passes records the positions after the last step within p·N evaluations, including snapshots and
    calibrations. Momenta start at zero. A preconditioner uses the gradient of U. For pSGLD with a paper's ε and
    λ, whose preconditioner uses that of U/N, set lr = ε·N and eps = λ·N.

    Args:
        target: the posterior; its data are moved to `dtype` and `device`.
        sampler: a sampler class, or a partial of one; N is 1, so that `lr` is the papers' ε or h.
        gradient: the gradient estimator.
        lr: step size.
        num_passes: budget in passes; pass either this or `num_steps`.
        num_steps: steps of each chain.
        num_chains: C.
        temperature: τ.
        initial: initial positions, shape (C, d) or (d,); None draws them from a standard normal.
        at_passes: increasing marks in passes, ≥ 0; with `num_passes`.
        at_steps: increasing marks in steps, ≥ 0; pass either these or `at_passes`.
        observe: function from (C, d) to (C, F) whose averages along each chain are recorded at the marks.
        seed: seed of all draws. One generator per purpose (start, noise, batches, acceptance) serves all chains, so a
            chain's law does not depend on the number of chains, but its numbers do.
        dtype: dtype of the positions.
        device: device of all tensors.
        compile: whether to compile blocks of steps, for `FullGradient` or `UniformGradient`; None compiles runs of
            200,000 steps or more if there is a C++ compiler. The numbers of a seed change by rounding only.

    Raises:
        ValueError: for an argument out of range or of the wrong shape, a sampler that the estimator does not support,
            compile=True with an estimator that chooses or corrects gradients or a sampler that counts steps, or a
            final position that is not finite.

    Example::

        from lightning_sgmcmc.samplers import SGLD
        from lightning_sgmcmc.simulation import GaussianSum, UniformGradient, sample_sum

        run = sample_sum(GaussianSum(torch.randn(100, 2)), SGLD, UniformGradient(10), lr=1e-3, num_steps=500)
        run.last.mean(0)
    """
    _check_budget(num_passes, num_steps, num_chains, lr, temperature, at_passes, at_steps)
    target = target.to(device, dtype)
    if initial is None:
        generator = torch.Generator().manual_seed(derive_seed(seed, "start"))
        initial = torch.randn(num_chains, target.dimension, generator=generator)
    place = starting_places(initial, num_chains, target.dimension, dtype, torch.device(device))
    rule = sampler([place], lr=lr, num_data=1, temperature=temperature, num_chains=num_chains, seed=seed)
    run, data = SumRun(target, rule, place, seed), target.num_data
    gradient.begin(run)
    spent = _evaluations(gradient, data, num_steps, num_passes)
    num_steps = len(spent) - 1
    compiles = _compiles(compile, gradient, num_steps, rule, place.device)
    gradients = _Gradients(gradient, run, traced=compiles)
    normals = shared_normals(run.generator("noise"), place, rule.draws if temperature > 0 else 0)
    loop = LightLoop(rule, place, run.group, normals, [gradients], BLOCK if compiles else None)
    marks = list(at_steps) or [bisect_right(spent, round(passes * data)) - 1 for passes in at_passes]
    kept = sorted({*marks, num_steps})
    recorder = Recorder(kept, sorted({*marks}), None if observe is None else lambda rows: observe(rows[0])[None])
    _advance(loop, recorder, num_steps, compiles)
    positions, at = recorder.rows()["positions"], [bisect_left(kept, mark) for mark in marks]
    check_finite(positions[-1], num_steps)
    averages = place.new_zeros(len(marks), num_chains, 0) if observe is None else recorder.averages(num_chains)[at]
    return SumSamples(
        passes=torch.tensor(list(at_passes) or [spent[mark] / data for mark in marks], dtype=torch.float64),
        steps=torch.tensor(marks, dtype=torch.int64),
        positions=positions[at],
        averages=averages.double(),
        last=positions[-1].clone(),
        num_steps=num_steps,
        evaluations=spent[-1],
        acceptance=gradient.acceptance(run, num_steps),
    )


def _check_budget(
    num_passes: float | None,
    num_steps: int | None,
    num_chains: int,
    lr: float,
    temperature: float,
    at_passes: Sequence[float],
    at_steps: Sequence[int],
) -> None:
    if (num_passes is None) == (num_steps is None):
        raise ValueError(f"pass either num_passes or num_steps, got {num_passes} and {num_steps}")
    check_count("num_steps", num_steps)
    check_count("num_chains", num_chains)
    for name, value in (("num_passes", num_passes), ("lr", lr), ("temperature", temperature)):
        check_number(name, value)
    if at_passes and at_steps:
        raise ValueError("pass either at_passes or at_steps, not both")
    marks, end, word = (at_steps, num_steps, "num_steps") if at_steps else (at_passes, num_passes, "num_passes")
    if marks and end is None:
        raise ValueError(f"marks in {word[4:]} need {word}, which is None")
    if list(marks) != sorted(set(marks)) or any(not 0 <= mark <= (end or 0) for mark in marks):
        raise ValueError(f"marks must increase and lie between 0 and {word}={end}, got {list(marks)}")


def _evaluations(
    gradient: "GradientEstimator", num_data: int, num_steps: int | None, num_passes: float | None
) -> list[int]:
    """Return the evaluations of the first 0, 1, … steps, up to all of the run, that is all within its budget."""
    spent = [0]
    while num_steps is None or len(spent) <= num_steps:
        after = spent[-1] + gradient.cost(len(spent) - 1, num_data)
        if num_passes is not None and after > round(num_passes * num_data):
            break
        spent.append(after)
    return spent


def _compiles(
    compile: bool | None, gradient: "GradientEstimator", num_steps: int, rule: Sampler, device: torch.device
) -> bool:
    if compile and not gradient.is_memoryless:
        raise ValueError(
            "compile=True needs FullGradient or UniformGradient, whose gradients depend on the present place alone: "
            "pass compile=None"
        )
    return gradient.is_memoryless and compiles_blocks(compile, num_steps, rule, device)


class SumRun:
    """The parts of a run, and what its gradients carry from step to step.

    Attributes:
        accepted: candidates that index chains have accepted.
        snapshot, full_gradient: places of the last snapshot, and ∇U there, shape (C, d).
        reference, moments: places of the last calibration, and the moments of batches' gradients since then.
        friction: Γ - γ·I of the last step, shape (C, d, d), or its diagonal, (C, d).
    """

    snapshot: Tensor
    full_gradient: Tensor
    reference: Tensor
    moments: GradientMoments
    friction: Tensor

    def __init__(self, target: FiniteSum, rule: Sampler, place: nn.Parameter, seed: int) -> None:
        self.target = target
        self.rule = rule
        self.group = rule.param_groups[0]
        self.place = place
        self.seed = seed
        self.step = 0
        self.batches, self.uniforms = self.generator("batches"), self.generator("acceptance")
        self.accepted = torch.zeros((), dtype=torch.int64, device=place.device)

    def generator(self, purpose: str) -> torch.Generator:
        """Return the generator for a purpose, for all chains."""
        return torch.Generator(self.place.device).manual_seed(derive_seed(self.seed, purpose))


class _Gradients(StepPart):
    """An estimator's gradients; a compiled block traces the places after its steps."""

    def __init__(self, estimator: "GradientEstimator", run: SumRun, traced: bool) -> None:
        self._estimator = estimator
        self._run = run
        self._traced = traced

    def draw(self, first: int, count: int) -> tuple[Tensor, ...]:
        self._run.step = first - 1
        return (self._estimator.draw(self._run, count),)

    def before(self, step: Step, *numbers: Tensor) -> None:
        step.gradient = self._estimator.estimate(self._run, numbers[0])

    def after(self, step: Step) -> None:
        if self._traced:
            step.trace("positions", step.place.clone())


# -- gradient estimators ----------------------------------------------------------------------------------------------


class GradientEstimator(ABC):
    """Describes how to estimate a gradient; the state of a run is in its `SumRun`."""

    @property
    def is_memoryless(self) -> bool:
        """Whether a gradient depends on the present place and the drawn numbers alone, so that blocks compile."""
        return False

    def begin(self, run: SumRun) -> None:  # noqa: B027
        """Begin a run; raise ValueError for a sampler or a temperature that the estimator does not support."""

    @abstractmethod
    def cost(self, step: int, num_data: int) -> int:
        """Return the evaluations of a step for each chain, given the number of steps before it."""

    def draw(self, run: SumRun, steps: int) -> Tensor:
        """Return the random numbers of some steps' gradients, shape (K, …)."""
        return run.place.new_empty(steps, 0)

    @abstractmethod
    def estimate(self, run: SumRun, drawn: Tensor) -> Tensor:
        """Return the gradient of the full potential at the chains' places, shape (C, d), given the step's numbers."""

    def acceptance(self, run: SumRun, num_steps: int) -> float | None:
        """Return the share of proposed candidates that were accepted, over all chains; None without proposals."""
        return None


@dataclass(frozen=True)
class FullGradient(GradientEstimator):
    """∇U from all data; N evaluations per step."""

    @property
    def is_memoryless(self) -> bool:
        return True

    def cost(self, step: int, num_data: int) -> int:
        return num_data

    def estimate(self, run: SumRun, drawn: Tensor) -> Tensor:
        return run.target.gradient(run.place)


class BatchGradient(GradientEstimator):
    """The gradient of one of J candidate batches of b data, with or without a control variate."""

    batch_size: int

    @property
    def candidates(self) -> int:
        """J."""
        return 1

    @property
    def variate(self) -> "ControlVariateGradient | None":
        """The control variate of all candidates."""
        return None

    @property
    def is_memoryless(self) -> bool:
        return self.variate is None and self.candidates == 1

    def cost(self, step: int, num_data: int) -> int:
        again = self.variate is not None and not self.variate.stored
        return self.candidates * self.batch_size * (1 + again) + self._refreshes(step, num_data) * num_data

    def _refreshes(self, step: int, num_data: int) -> bool:
        """Return whether a snapshot is taken before a step."""
        variate = self.variate
        return variate is not None and step % self.steps_of(variate.refresh_every_passes, num_data) == 0

    def steps_of(self, passes: float, num_data: int) -> int:
        """Return the number of steps in `passes` passes, rounded up as in Algorithm 2."""
        return max(1, math.ceil(passes * num_data / (self.candidates * self.batch_size) - 1e-9))

    def draw(self, run: SumRun, steps: int) -> Tensor:
        shape = (steps, len(run.place), self.candidates, self.batch_size)
        return torch.randint(run.target.num_data, shape, generator=run.batches, device=run.place.device)

    def estimate(self, run: SumRun, drawn: Tensor) -> Tensor:
        return self.chosen(run, drawn)[0]

    def chosen(self, run: SumRun, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient (C, d) and its data (C, b), given the candidates' data, shape (C, J, b)."""
        target = run.target
        if self._refreshes(run.step, target.num_data):
            run.snapshot, run.full_gradient = run.place.detach().clone(), target.gradient(run.place)
        gradients = target.batch_gradients(run.place, drawn)
        if self.variate is not None:
            gradients += run.full_gradient[:, None] - target.batch_gradients(run.snapshot, drawn)
        if self.candidates == 1:
            return gradients[:, 0], drawn[:, 0]
        chains, choice = torch.arange(len(gradients), device=gradients.device), self._choose(run, gradients)
        return gradients[chains, choice], drawn[chains, choice]

    def _choose(self, run: SumRun, gradients: Tensor) -> Tensor:
        """Return the index of each chain's candidate, shape (C,), given all gradients, shape (C, J, d)."""
        raise NotImplementedError


@dataclass(frozen=True)
class UniformGradient(BatchGradient):
    """The gradient of a uniformly drawn batch; b evaluations a step.

    Args:
        batch_size: b.
    """

    batch_size: int = 1

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)


@dataclass(frozen=True)
class ControlVariateGradient(BatchGradient):
    """The gradient of a uniform batch with a control variate (SVRG-LD, if the sampler is SGLD).

        g(θ) = g_B(θ) - g_B(θ_q) + ∇U(θ_q)

    θ_q is each chain's own snapshot, taken at regular passes. A snapshot costs N evaluations, in addition to the steps.

    Args:
        batch_size: b.
        refresh_every_passes: passes between snapshots, of N/b steps each.
        stored: whether each datum's gradient at the snapshot counts as stored, N·d numbers per chain. Then a step
            costs b evaluations; otherwise it is recomputed, and a step costs 2b.

    Source: Dubey et al. 2016, Algorithm 2 (SVRG-LD); Li et al. 2021 (EWSG), section 5.1.
    """

    batch_size: int = 1
    refresh_every_passes: float = 1.0
    stored: bool = True

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_positive("refresh_every_passes", self.refresh_every_passes)

    @property
    def variate(self) -> "ControlVariateGradient":
        return self


@dataclass(frozen=True)
class ExponentialGradient(BatchGradient):
    """The gradient of a batch chosen by a Metropolis chain on its index (EWSG); (M+1)·b evaluations per step.

    The index chain restarts at each step, from a uniform batch. With no proposals it is `UniformGradient`, bit for bit.

    Args:
        batch_size: b.
        num_proposals: M.
        guess: approximation of the momentum after the step, see `lightning_sgmcmc.subsampling.Guess`.
        control_variate: corrects the gradients of all candidates, with the same batch size; None corrects none.

    Source: Li et al. 2021 (EWSG), Algorithm 1 and appendices D and E.
    """

    batch_size: int = 1
    num_proposals: int = 1
    guess: Guess = "unchanged"
    control_variate: ControlVariateGradient | None = None

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_count("num_proposals", self.num_proposals, least=0)
        check_choice("guess", self.guess, get_args(Guess))
        if self.control_variate is not None and self.control_variate.batch_size != self.batch_size:
            raise ValueError(
                f"the control variate's batch_size={self.control_variate.batch_size} is not the candidates' "
                f"{self.batch_size}"
            )

    @property
    def candidates(self) -> int:
        return self.num_proposals + 1

    @property
    def variate(self) -> ControlVariateGradient | None:
        return self.control_variate

    def begin(self, run: SumRun) -> None:
        if run.rule.plain_law(run.group) is None:
            raise ValueError(
                f"{type(run.rule).__name__} has no step law of the form that EWSG's weights need: use SGLD, "
                "SGHMC, SGNHT or UnderdampedLangevin"
            )
        if not run.group["temperature"] > 0:
            raise ValueError("EWSG matches the law of a step, and temperature=0 has none: keep it positive")

    def _choose(self, run: SumRun, gradients: Tensor) -> Tensor:
        momenta, law = run.rule.momenta(run.group), run.rule.law(run.group)
        assert law is not None
        weights = index_log_weights(gradients, momenta[0] if momenta else None, law, self.guess)
        of_run: dict[str, Any] = {"generator": run.uniforms, "device": gradients.device}
        uniforms = torch.rand(len(gradients), self.num_proposals, dtype=widest_dtype(gradients.device), **of_run)
        choice, accepted = metropolis_index(weights, uniforms.log())
        run.accepted += accepted.sum()
        return choice

    def acceptance(self, run: SumRun, num_steps: int) -> float | None:
        proposed = num_steps * len(run.place) * self.num_proposals
        return float(run.accepted) / proposed if proposed else None


@dataclass(frozen=True)
class CalibratedFriction(GradientEstimator):
    """A batch's gradient, and a friction that cancels the heating by batch noise (EWSG-VR, with `ExponentialGradient`).

    The friction Γ = γ·I + h·cov/(2τ) follows from the moments of uniform batches' gradients. These are computed from
    all data at calibrations, which cost N evaluations, and updated by each step's batch in between. The sampler
    receives it as `UnderdampedLangevin.extra_drag`; EWSG's weights still use γ. An Euler step needs h·Γ below 2.

    As printed, Algorithm 2 spends every L-th pass only on calibration, so that with the paper's L = 1 it never
    samples. Here L passes of steps follow each calibration, whose own pass is additional.

    Args:
        gradient: gradient estimator of the steps, without control variates, whose moments would differ.
        calibrate_every_passes: L.
        matrix: whether to use the full covariance for each chain, or its diagonal.
        stored: whether each datum's gradient at the calibration counts as stored, N·d numbers per chain;
            otherwise that of the chosen batch is recomputed, for b more evaluations per step.

    Raises:
        ValueError: for gradients with control variates.

    Source: Li et al. 2021 (EWSG), appendix F and Algorithm 2.
    """

    gradient: UniformGradient | ExponentialGradient
    calibrate_every_passes: float = 1.0
    matrix: bool = True
    stored: bool = True

    def __post_init__(self) -> None:
        check_positive("calibrate_every_passes", self.calibrate_every_passes)
        if not isinstance(self.gradient, UniformGradient | ExponentialGradient):
            raise ValueError(
                f"friction is calibrated for UniformGradient or ExponentialGradient, not {type(self.gradient).__name__}"
            )
        if isinstance(self.gradient, ExponentialGradient) and self.gradient.control_variate is not None:
            raise ValueError("friction is calibrated for plain batches: omit the control variate")

    def begin(self, run: SumRun) -> None:
        if not isinstance(run.rule, UnderdampedLangevin):
            raise ValueError(f"calibrated friction needs UnderdampedLangevin, got {type(run.rule).__name__}")
        if not run.group["temperature"] > 0:
            raise ValueError("calibrated friction divides by 2τ: keep the temperature positive")
        self.gradient.begin(run)

        def drag(momenta: list[Tensor]) -> list[Tensor]:
            (momentum,) = momenta
            return [(run.friction @ momentum[:, :, None])[:, :, 0] if self.matrix else run.friction * momentum]

        run.rule.extra_drag = drag

    def _calibrates(self, step: int, num_data: int) -> bool:
        """Return whether the moments are calibrated before a step."""
        return step % self.gradient.steps_of(self.calibrate_every_passes, num_data) == 0

    def cost(self, step: int, num_data: int) -> int:
        again = 0 if self.stored else self.gradient.batch_size
        return self.gradient.cost(step, num_data) + again + self._calibrates(step, num_data) * num_data

    def draw(self, run: SumRun, steps: int) -> Tensor:
        return self.gradient.draw(run, steps)

    def estimate(self, run: SumRun, drawn: Tensor) -> Tensor:
        target, batch_size = run.target, self.gradient.batch_size
        if self._calibrates(run.step, target.num_data):
            run.reference = run.place.detach().clone()
            run.moments = batch_moments(target, run.reference, batch_size, self.matrix)
        run.friction = extra_friction(run.moments, run.group["lr"], run.group["temperature"])
        present, indices = self.gradient.chosen(run, drawn)
        reference = target.batch_gradients(run.reference, indices[:, None])[:, 0]
        advance_moments_(run.moments, present, reference, batch_size / target.num_data)
        return present

    def acceptance(self, run: SumRun, num_steps: int) -> float | None:
        return self.gradient.acceptance(run, num_steps)
