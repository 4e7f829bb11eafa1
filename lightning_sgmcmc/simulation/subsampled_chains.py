"""A light loop on posteriors that are sums over data: the library's samplers, and a choice of gradient estimators.

As `lightning_sgmcmc.simulation.loop` does for analytic targets, it makes the steps of `lightning_sgmcmc.samplers` by
their own code, on thousands of chains at once. What is compared are equal numbers of gradient evaluations, not of
steps: places are noted at asked numbers of data passes, one pass being N evaluations of one datum's gradient for each
chain.
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
from lightning_sgmcmc.simulation.gradient_runs import Gradients, SumRun
from lightning_sgmcmc.simulation.starts import starting_places


@dataclass(frozen=True)
class SumSamples:
    """What a run leaves.

    Attributes:
        passes: data passes spent at each mark: as asked, or what the asked steps took; shape (S,), float64.
        steps: steps made until each mark, shape (S,).
        positions: the chains' places there, shape (S, C, d).
        averages: of the observed function over the places after each step until there, float64, shape (S, C, F), F = 0
            without one.
        last: places in the end, shape (C, d).
        num_steps: steps made.
        evaluations: evaluations of one datum's gradient for each chain, all told.
        acceptance: share of candidates that the index chain accepted; None where there is none.
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
) -> SumSamples:
    """Run chains on a posterior.

    A mark of p passes has the places after the last step for which p·N evaluations suffice, snapshots and calibrations
    included. Momenta begin at zero. A preconditioner sees the gradient of U: for pSGLD with a paper's ε and λ, whose
    preconditioner sees that of U/N, take lr = ε·N and eps = λ·N.

    Args:
        target: the posterior; its data are taken to `dtype` and `device`.
        sampler: a sampler class, or a partial of one; N is 1, so that `lr` is the papers' ε or h.
        gradient: which gradient.
        lr: step size.
        num_passes: budget in passes; either this or `num_steps`.
        num_steps: steps of each chain.
        num_chains: C.
        temperature: τ.
        initial: where the chains start, shape (C, d) or (d,); None draws standard normal places.
        at_passes: marks in passes, rising, from 0 on; with `num_passes`.
        at_steps: marks in steps, rising, from 0 on; either these or `at_passes`.
        observe: function from (C, d) to (C, F) whose averages along each chain are wanted at the marks.
        seed: of all draws; one generator for each purpose (start, noise, batches, acceptance) serves all chains, so
            that a chain's law, but not its numbers, is the same however many chains there are.
        dtype: of the places.
        device: of everything.

    Raises:
        ValueError: for an argument out of range or of the wrong shape, a sampler that the estimator does not go with,
            or a place that is not finite in the end.
    """
    _check(num_passes, num_steps, num_chains, lr, temperature, at_passes, at_steps)
    device = torch.device(device)
    target = target.to(device, dtype)
    if initial is None:
        generator = torch.Generator().manual_seed(derive_seed(seed, "start"))
        initial = torch.randn(num_chains, target.dimension, generator=generator)
    place = nn.Parameter(starting_places(initial, num_chains, target.dimension, dtype, device))
    rule = sampler([place], lr=lr, num_data=1, temperature=temperature, num_chains=num_chains, seed=seed)
    run = SumRun(target, rule, rule.param_groups[0], place, seed)
    walk = _Walk(run, gradient.begin(run))
    record = _Record(observe, place)
    marks, wanted = [round(p * target.num_data) for p in at_passes], set(at_steps)
    budget = None if num_passes is None else round(num_passes * target.num_data)
    with torch.no_grad():
        while True:
            after = walk.spent + walk.gradients.cost
            if at_passes:
                for _ in range(len(record.steps), sum(mark < after for mark in marks)):
                    record.note(walk, at_passes[len(record.steps)])
            elif walk.steps in wanted:
                record.note(walk, walk.spent / target.num_data)
            if walk.steps == num_steps or (budget is not None and after > budget):
                break
            walk.step()
            record.observe()
    if not bool(place.isfinite().all()):
        raise ValueError(f"a chain left for infinity within {walk.steps} steps: take a smaller lr")
    return record.result(walk)


class _Walk:
    """The steps of all chains."""

    def __init__(self, run: SumRun, gradients: Gradients) -> None:
        self.run = run
        self.gradients = gradients
        self.steps = 0
        self.spent = 0
        self._noise = run.generator("noise")
        self._is_noisy = run.group["temperature"] > 0

    def step(self) -> None:
        """Make one step."""
        run = self.run
        self.spent += self.gradients.cost
        gradient = self.gradients.take()
        noise = None
        if self._is_noisy:
            options = {"dtype": gradient.dtype, "device": gradient.device}
            noise = [torch.randn(gradient.shape, generator=self._noise, **options)]  # type: ignore[call-overload]
        run.rule.update(run.group, [run.place], [gradient], noise)
        self.steps += 1


class _Record:
    """What is noted at the marks."""

    def __init__(self, observe: Callable[[Tensor], Tensor] | None, place: nn.Parameter) -> None:
        self._observe = observe
        self._place = place
        self._sum: Tensor | None = None
        self._count = 0
        self.steps: list[int] = []
        self._passes: list[float] = []
        self._positions: list[Tensor] = []
        self._averages: list[Tensor] = []

    def observe(self) -> None:
        """Take the present places into the averages."""
        if self._observe is None:
            return
        seen = self._observe(self._place.detach()).double()
        self._sum = seen if self._sum is None else self._sum.add_(seen)
        self._count += 1

    def note(self, walk: _Walk, passes: float) -> None:
        """Note a mark."""
        self.steps.append(walk.steps)
        self._passes.append(passes)
        self._positions.append(self._place.detach().clone())
        if self._observe is not None:
            empty = torch.full_like(self._observe(self._place.detach()), torch.nan).double()
            self._averages.append(empty if self._sum is None else self._sum / self._count)

    def result(self, walk: _Walk) -> SumSamples:
        """Return everything."""
        last = self._place.detach().clone()
        chains = len(last)
        averages = self._averages or [last.new_zeros(chains, 0).double()] * len(self.steps)
        return SumSamples(
            torch.tensor(self._passes, dtype=torch.float64),
            torch.tensor(self.steps, dtype=torch.int64),
            torch.stack(self._positions) if self._positions else last.new_zeros(0, *last.shape),
            torch.stack(averages) if averages else last.new_zeros(0, chains, 0).double(),
            last,
            walk.steps,
            walk.spent,
            walk.gradients.acceptance,
        )


def _check(
    num_passes: float | None,
    num_steps: int | None,
    num_chains: int,
    lr: float,
    temperature: float,
    at_passes: Sequence[float],
    at_steps: Sequence[int],
) -> None:
    if (num_passes is None) == (num_steps is None):
        raise ValueError(f"give either num_passes or num_steps, got {num_passes} and {num_steps}")
    check_count("num_steps", num_steps)
    check_count("num_chains", num_chains)
    for name, value in (("num_passes", num_passes), ("lr", lr), ("temperature", temperature)):
        check_number(name, value)
    if at_passes and at_steps:
        raise ValueError("give either at_passes or at_steps")
    marks, end, word = (at_steps, num_steps, "num_steps") if at_steps else (at_passes, num_passes, "num_passes")
    if marks and end is None:
        raise ValueError(f"marks in {word[4:]} go with {word}")
    if list(marks) != sorted(set(marks)) or any(not 0 <= mark <= (end or 0) for mark in marks):
        raise ValueError(f"marks must rise and lie between 0 and {word}={end}, got {list(marks)}")
