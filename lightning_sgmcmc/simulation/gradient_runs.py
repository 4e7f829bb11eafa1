"""The gradients of one run, step by step: the state of `lightning_sgmcmc.simulation.gradient_estimators`."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers import Sampler, UnderdampedLangevin
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation.finite_sums import FiniteSum, batch_moments
from lightning_sgmcmc.subsampling.covariance_friction import GradientMoments, advance_moments_, extra_friction
from lightning_sgmcmc.subsampling.ewsg import Guess, index_log_weights, metropolis_index
from lightning_sgmcmc.tensors import widest_dtype


@dataclass(frozen=True)
class SumRun:
    """The parts of a run that an estimator uses.

    Attributes:
        target: the posterior.
        rule: the sampler, with N = 1.
        group: its parameter group, with the controls of the run.
        place: the chains' positions, shape (C, d).
        seed: the run's seed.
    """

    target: FiniteSum
    rule: Sampler
    group: dict[str, Any]
    place: nn.Parameter
    seed: int

    def generator(self, purpose: str) -> torch.Generator:
        """Return the generator for a purpose, for all chains."""
        return torch.Generator(self.place.device).manual_seed(derive_seed(self.seed, purpose))


class Gradients(ABC):
    """The gradients of one run, step by step."""

    @property
    @abstractmethod
    def cost(self) -> int:
        """Evaluations of the next step, for each chain."""

    @abstractmethod
    def take(self) -> Tensor:
        """Return the gradient of the full potential for the next step, shape (C, d)."""

    @property
    def acceptance(self) -> float | None:
        """Share of proposed candidates accepted so far, over all chains; None without proposals."""
        return None

    @property
    def is_memoryless(self) -> bool:
        """Whether `take` is `at` the chains' places of what `draw` returns, so that blocks of steps compile."""
        return False

    def draw(self, steps: int) -> Tensor:
        """Return the random numbers of some steps' gradients, shape (K, …)."""
        raise NotImplementedError

    def at(self, place: Tensor, drawn: Tensor) -> Tensor:
        """Return the gradient at places (C, d) with a step's numbers of `draw`."""
        raise NotImplementedError


class OfAllData(Gradients):
    """∇U of all data at each step."""

    def __init__(self, run: SumRun) -> None:
        self._run = run

    @property
    def cost(self) -> int:
        return self._run.target.num_data

    def take(self) -> Tensor:
        return self._run.target.gradient(self._run.place)

    @property
    def is_memoryless(self) -> bool:
        return True

    def draw(self, steps: int) -> Tensor:
        return self._run.place.new_empty(steps, 0)

    def at(self, place: Tensor, drawn: Tensor) -> Tensor:
        return self._run.target.gradient(place)


class OfBatches(Gradients):
    """The gradient of one of J = M+1 candidate batches, with or without control variates.

    Attributes:
        shape: chains, candidates of each, and data of a candidate: (C, J, b).
        indices: the data of the last step's batch, shape (C, b).
    """

    def __init__(
        self,
        run: SumRun,
        batch_size: int,
        num_proposals: int = 0,
        guess: Guess = "unchanged",
        refresh: float | None = None,
        stored: bool = True,
    ) -> None:
        self._run = run
        self.shape = (len(run.place), num_proposals + 1, batch_size)
        self._guess = guess
        self._batches = run.generator("batches")
        self._uniforms = run.generator("acceptance")
        self._every = _steps(refresh, run.target, self.shape) if refresh is not None else None
        self._of_step = (num_proposals + 1) * batch_size * (1 if stored or refresh is None else 2)
        self._step = 0
        self._snapshot = self._full = self.indices = torch.zeros(0)
        self._accepted = torch.zeros((), dtype=torch.int64, device=run.place.device)

    def _is_due(self) -> bool:
        return self._every is not None and self._step % self._every == 0

    @property
    def cost(self) -> int:
        return self._of_step + self._is_due() * self._run.target.num_data

    def take(self) -> Tensor:
        target, place = self._run.target, self._run.place
        if self._is_due():
            self._snapshot, self._full = place.detach().clone(), target.gradient(place)
        self._step += 1
        (indices,) = self.draw(1)
        candidates = target.batch_gradients(place, indices)
        if self._every is not None:
            candidates += self._full[:, None] - target.batch_gradients(self._snapshot, indices)
        if self.shape[1] == 1:
            self.indices = indices[:, 0]
            return candidates[:, 0]
        chains, chosen = torch.arange(self.shape[0], device=place.device), self._choose(candidates)
        self.indices = indices[chains, chosen]
        return candidates[chains, chosen]

    @property
    def is_memoryless(self) -> bool:
        return self._every is None and self.shape[1] == 1

    def draw(self, steps: int) -> Tensor:
        place, shape = self._run.place, (steps, *self.shape)
        return torch.randint(self._run.target.num_data, shape, generator=self._batches, device=place.device)

    def at(self, place: Tensor, drawn: Tensor) -> Tensor:
        return self._run.target.batch_gradients(place, drawn)[:, 0]

    def _choose(self, candidates: Tensor) -> Tensor:
        """Return the index of each chain's candidate, shape (C,)."""
        run, (chains, count, _) = self._run, self.shape
        momenta, law = run.rule.momenta(run.group), run.rule.law(run.group)
        assert law is not None
        weights = index_log_weights(candidates, momenta[0] if momenta else None, law, self._guess)
        of_run: dict[str, Any] = {"generator": self._uniforms, "device": candidates.device}
        uniforms = torch.rand(chains, count - 1, dtype=widest_dtype(candidates.device), **of_run)
        chosen, accepted = metropolis_index(weights, uniforms.log())
        self._accepted += accepted.sum()
        return chosen

    @property
    def acceptance(self) -> float | None:
        proposed = self._step * self.shape[0] * (self.shape[1] - 1)
        return float(self._accepted) / proposed if proposed else None


class WithFriction(Gradients):
    """A batch's gradient, and the moments that determine the sampler's friction."""

    def __init__(self, run: SumRun, inner: OfBatches, calibrate: float, matrix: bool, stored: bool) -> None:
        self._run = run
        self._inner = inner
        self._every = _steps(calibrate, run.target, inner.shape)
        self._matrix = matrix
        self._stored = stored
        self._batch_size = inner.shape[2]
        self._step = 0
        self._reference = torch.zeros(0)
        self._moments = GradientMoments(self._reference, self._reference)
        self.friction = torch.zeros(0)
        """Γ - γ·I of the last step, shape (C, d, d), or its diagonal, (C, d)."""
        assert isinstance(run.rule, UnderdampedLangevin)
        run.rule.extra_drag = self._drag

    @property
    def cost(self) -> int:
        again = 0 if self._stored else self._batch_size
        return self._inner.cost + again + (self._step % self._every == 0) * self._run.target.num_data

    @property
    def acceptance(self) -> float | None:
        return self._inner.acceptance

    def _drag(self, momenta: list[Tensor]) -> list[Tensor]:
        (momentum,) = momenta
        if not self._matrix:
            return [self.friction * momentum]
        return [(self.friction @ momentum[:, :, None])[:, :, 0]]

    def take(self) -> Tensor:
        run, target = self._run, self._run.target
        if self._step % self._every == 0:
            self._reference = run.place.detach().clone()
            self._moments = batch_moments(target, self._reference, self._batch_size, self._matrix)
        self._step += 1
        self.friction = extra_friction(self._moments, run.group["lr"], run.group["temperature"])
        present = self._inner.take()
        reference = target.batch_gradients(self._reference, self._inner.indices[:, None])[:, 0]
        advance_moments_(self._moments, present, reference, self._batch_size / target.num_data)
        return present


def _steps(passes: float, target: FiniteSum, shape: tuple[int, int, int]) -> int:
    """Return the number of steps of J batches of b data in `passes` passes, rounded up as in Algorithm 2."""
    return max(1, math.ceil(passes * target.num_data / (shape[1] * shape[2]) - 1e-9))
