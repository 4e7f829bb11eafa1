"""Results of a simulation: draws and running averages, recorded from whole chunks of steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.contour.contour import Contour, ContourState


@dataclass(frozen=True)
class Simulation:
    """Results of a simulation; a draw is a chain's position, with its energy and the π of that step.

    Attributes:
        steps: the draws' steps k = 1, 2, …, shape (S,).
        positions: positions of the draws, shape (S, C, d).
        energies: energies without the added noise, shape (S, C).
        log_weights: log importance weights from the π of the draw's step, shape (S, C), zeros without a contour.
        multipliers: κ of the step from there, shape (S, C).
        averages: weighted averages of the observed function from the burn-in up to each checkpoint, shape (T, C, F).
        checkpoints: steps of the averages, shape (T,).
        last: the chains' final positions, shape (C, d).
        contour: the learned state, None without a contour; with groups, one row of π per group.
        slots: the exchange's slot of the step from there, 0 the coldest, shape (S, C); None without an exchange.
    """

    steps: Tensor
    positions: Tensor
    energies: Tensor
    log_weights: Tensor
    multipliers: Tensor
    averages: Tensor
    checkpoints: Tensor
    last: Tensor
    contour: ContourState | None
    slots: Tensor | None = None


@dataclass(frozen=True)
class Recording:
    """Which draws and averages a simulation records.

    Attributes:
        keep_every: steps between draws that are kept after the burn-in; None keeps none.
        burn_in: steps before the first draw's interval and before averages count.
        observe: function from (…, d) to (…, F) whose weighted averages are recorded.
        checkpoints: increasing steps at which the averages are recorded.
    """

    keep_every: int | None
    burn_in: int
    observe: Callable[[Tensor], Tensor] | None
    checkpoints: Sequence[int]

    def check(self, num_steps: int) -> None:
        """Raise ValueError unless the arguments suit a run of `num_steps` steps."""
        check_count("keep_every", self.keep_every)
        check_count("burn_in", self.burn_in, 0)
        marks = list(self.checkpoints)
        if marks and self.observe is None:
            raise ValueError("checkpoints record averages of an observed function, but observe is None: pass observe")
        if marks != sorted(set(marks)) or any(not self.burn_in < c <= num_steps for c in marks):
            raise ValueError(
                f"checkpoints must increase and lie between burn_in={self.burn_in} and num_steps={num_steps}, got "
                f"{marks}"
            )


class DrawRecorder:
    """Collects draws and running averages from whole chunks of steps.

    Args:
        recording: the draws and averages to record.
        contour: partition, ζ and other rules, None without a contour.
    """

    def __init__(self, recording: Recording, contour: Contour | None) -> None:
        self._recording = recording
        self._contour = contour
        self._kept: list[tuple[Tensor, ...]] = []
        self._noted: list[Tensor] = []
        self._sum = self._weight = torch.zeros((), dtype=torch.float64)

    def record(self, first: int, places: Tensor, energies: Tensor, *others: Tensor) -> None:
        """Record the steps first, first + 1, …; the tensors are those returned by `TargetSteps.run`."""
        if self._contour is not None:
            densities, multipliers, *slots = others
            log_weights = self._contour.log_weight(densities)
        else:
            slots = list(others)
            log_weights, multipliers = torch.zeros_like(energies).double(), torch.ones_like(energies)
        steps = torch.arange(first, first + len(places))
        burn_in, keep_every = self._recording.burn_in, self._recording.keep_every
        if keep_every is not None:
            chosen = ((steps > burn_in) & ((steps - burn_in) % keep_every == 0)).nonzero()[:, 0]
            if len(chosen):
                at = chosen.to(places.device)
                parts = (places, energies, log_weights, multipliers, *slots)
                self._kept.append((steps[chosen], *(part[at] for part in parts)))
        if self._recording.observe is not None:
            self._average(first, log_weights.exp(), self._recording.observe(places))

    def _average(self, first: int, weights: Tensor, observed: Tensor) -> None:
        start = min(max(self._recording.burn_in + 1 - first, 0), len(weights))
        products = weights[..., None] * observed
        due = [c for c in self._recording.checkpoints if first <= c < first + len(weights)]
        for stop in [*(c - first + 1 for c in due), len(weights)]:
            if stop > start:
                self._sum = self._sum + products[start:stop].sum(0)
                self._weight = self._weight + weights[start:stop].sum(0)
                start = stop
            if due and stop == due[0] - first + 1:
                due.pop(0)
                self._noted.append(self._sum / self._weight[..., None])

    def result(self, last: Tensor, state: ContourState | None) -> Simulation:
        """Return the simulation's results, given the chains' final positions and the contour's state."""
        chains, dimension = last.shape
        slots: list[Tensor] = []
        if self._kept:
            whole = (torch.cat(part) for part in zip(*self._kept, strict=True))
            steps, places, energies, log_weights, multipliers, *slots = whole
        else:
            steps, places = torch.zeros(0, dtype=torch.int64), torch.zeros(0, chains, dimension).to(last)
            energies = log_weights = multipliers = torch.zeros(0, chains, device=last.device)
        return Simulation(
            steps=steps,
            positions=places,
            energies=energies,
            log_weights=log_weights,
            multipliers=multipliers,
            averages=torch.stack(self._noted) if self._noted else torch.zeros(0, chains, 0),
            checkpoints=torch.tensor(list(self._recording.checkpoints)[: len(self._noted)], dtype=torch.int64),
            last=last,
            contour=state,
            slots=slots[0] if slots else None,
        )
