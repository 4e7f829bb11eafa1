"""A light loop on posteriors that are sums over data: this library's samplers with a choice of gradient estimators.

As `lightning_sgmcmc.simulation.loop` does for analytic targets, it calls the update rules of
`lightning_sgmcmc.samplers` on thousands of chains at once. Methods are compared at equal numbers of gradient
evaluations, not of steps: positions are recorded after given numbers of data passes. One pass is N evaluations of one
datum's gradient for each chain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_sgmcmc.checks import check_count, check_number
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation.finite_sums import FiniteSum
from lightning_sgmcmc.simulation.gradient_estimators import GradientEstimator
from lightning_sgmcmc.simulation.gradient_runs import SumRun
from lightning_sgmcmc.simulation.starts import starting_places
from lightning_sgmcmc.simulation.sum_steps import SumSteps, steps_of


@dataclass(frozen=True)
class SumSamples:
    """Results of a run.

    Attributes:
        passes: data passes at each mark: those of `at_passes`, or the cost of the steps; shape (S,), float64.
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


def sample_sum(
    target: FiniteSum,
    sampler: Callable[..., Sampler],
    gradient: GradientEstimator,
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
            compile=True with an estimator that chooses or corrects gradients, or a final position that is not finite.
    """
    _check_budget(num_passes, num_steps, num_chains, lr, temperature, at_passes, at_steps)
    device = torch.device(device)
    target = target.to(device, dtype)
    if initial is None:
        generator = torch.Generator().manual_seed(derive_seed(seed, "start"))
        initial = torch.randn(num_chains, target.dimension, generator=generator)
    place = nn.Parameter(starting_places(initial, num_chains, target.dimension, dtype, device))
    rule = sampler([place], lr=lr, num_data=1, temperature=temperature, num_chains=num_chains, seed=seed)
    run = SumRun(target, rule, rule.param_groups[0], place, seed)
    gradients = gradient.begin(run)
    budget = None if num_passes is None else round(num_passes * target.num_data)
    planned = num_steps if budget is None else budget // gradients.cost
    steps = steps_of(run, gradients, planned or 0, compile)
    recorder = _MarkRecorder(observe)
    marks, at_steps_set = [round(p * target.num_data) for p in at_passes], set(at_steps)
    with torch.no_grad():
        while True:
            after = steps.spent + steps.gradients.cost
            if at_passes:
                for _ in range(len(recorder.steps), sum(mark < after for mark in marks)):
                    recorder.record(steps, at_passes[len(recorder.steps)])
            elif steps.count in at_steps_set:
                recorder.record(steps, steps.spent / target.num_data)
            if steps.count == num_steps or (budget is not None and after > budget):
                break
            steps.step()
            recorder.observe(steps)
    if not bool(steps.place.isfinite().all()):
        raise ValueError(f"a chain diverged to infinity within {steps.count} steps: use a smaller lr")
    return recorder.result(steps)


class _MarkRecorder:
    """Records positions and running averages at the marks."""

    def __init__(self, observe: Callable[[Tensor], Tensor] | None) -> None:
        self._observe = observe
        self._sum: Tensor | None = None
        self._count = 0
        self.steps: list[int] = []
        self._passes: list[float] = []
        self._positions: list[Tensor] = []
        self._averages: list[Tensor] = []

    def observe(self, steps: SumSteps) -> None:
        """Add the current places to the running averages."""
        if self._observe is None:
            return
        seen = self._observe(steps.place).double()
        self._sum = seen if self._sum is None else self._sum.add_(seen)
        self._count += 1

    def record(self, steps: SumSteps, passes: float) -> None:
        """Record a mark."""
        self.steps.append(steps.count)
        self._passes.append(passes)
        self._positions.append(steps.place.clone())
        if self._observe is not None:
            empty = torch.full_like(self._observe(steps.place), torch.nan).double()
            self._averages.append(empty if self._sum is None else self._sum / self._count)

    def result(self, steps: SumSteps) -> SumSamples:
        """Return the run's results."""
        last = steps.place.clone()
        chains = len(last)
        averages = self._averages or [last.new_zeros(chains, 0).double()] * len(self.steps)
        return SumSamples(
            torch.tensor(self._passes, dtype=torch.float64),
            torch.tensor(self.steps, dtype=torch.int64),
            torch.stack(self._positions) if self._positions else last.new_zeros(0, *last.shape),
            torch.stack(averages) if averages else last.new_zeros(0, chains, 0).double(),
            last,
            steps.count,
            steps.spent,
            steps.gradients.acceptance,
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
