"""What callbacks and chains share: the state of this process's chains by subject, and which callback does what."""

import math
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.tensors import exact


@dataclass
class StepEnergy:
    """The energies of one micro-batch, as `ChainEnergies` returns them.

    Attributes:
        mean_potential: Ũ/N, shape () for a single unstacked chain and (C,) for several; with its graph unless there is
            a `loss`.
        log_prior: log p(θ), detached, with the same shape.
        log_likelihood: log p(y|x,θ) for each datum, detached, shape (n,) or (C, n); None unless requested.
        batch_size: n, data of each chain in this process.
        loss: the sum of `mean_potential` over the chains with its graph, shape (), where it is computed with it.
        excess: by how much that sum is below the one with the batch's mean, shape (); None where it is that one.
    """

    mean_potential: Tensor
    log_prior: Tensor
    log_likelihood: Tensor | None
    batch_size: int
    loss: Tensor | None = None
    excess: Tensor | None = None


@dataclass
class ValidationLoss:
    """The sum of -log p(y|x,θ) over validation data, of each chain, shape (C,), float64, and the number of data."""

    total: Tensor | None = None
    count: int = 0

    def add(self, log_likelihood: Tensor) -> None:
        """Add a batch's log p(y|x,θ), shape (C, n)."""
        batch = exact(log_likelihood.detach()).sum(1).neg()
        self.total = batch if self.total is None else self.total + batch
        self.count += log_likelihood.shape[1]

    def clear(self) -> None:
        """Begin a validation."""
        self.total, self.count = None, 0


@dataclass
class ObservedEnergy:
    """The last step's energies, on the device.

    Attributes:
        num_data: N.
        mean_potential: Ũ/N, the mean over the step's micro-batches so far, shape () or (C,).
        log_prior: log p(θ) at that step, with the same shape.
        log_likelihood: log p(y|x,θ) for each datum of the last micro-batch, shape (n,) or (C, n); None unless
            `keeps_each`.
        reference_log_likelihood: the same at a snapshot of the chains, shape (C, n); None without one.
        correction: a control variate's term in the energies that callbacks read, shape (C,); None means 0.
        keeps_each: whether log_likelihood is stored.
        batch_size: data of each chain in the last micro-batch, in this process.
        validation: the validation data's loss at the chains' states.
    """

    num_data: int = 1
    mean_potential: Tensor = field(default_factory=lambda: torch.full((1,), math.nan))
    log_prior: Tensor = field(default_factory=lambda: torch.zeros(()))
    log_likelihood: Tensor | None = None
    reference_log_likelihood: Tensor | None = None
    correction: Tensor | None = None
    keeps_each: bool = False
    batch_size: int = 0
    validation: ValidationLoss = field(default_factory=ValidationLoss)

    @property
    def energy(self) -> Tensor:
        """Ũ of the last step's mini-batch, shape (C,), in nats."""
        return self.mean_potential.reshape(-1) * self.num_data

    def corrected(self, include_prior: bool) -> Tensor:
        """Return Ũ with its control variate, and with -log p(θ) if wanted, shape (C,), float64, in nats."""
        energy = exact(self.mean_potential).reshape(-1) * self.num_data
        if self.correction is not None:
            energy = energy + self.correction
        return energy if include_prior else energy + self.log_prior.to(energy.device)

    def record(self, step: StepEnergy, position: int) -> None:
        """Add a micro-batch's energies to the mean of its step; `position` is its index in the step, from 0."""
        self.log_prior, self.log_likelihood = step.log_prior, step.log_likelihood
        self.batch_size = step.batch_size
        potential = step.mean_potential.detach()
        if position == 0:
            self.mean_potential = potential
        else:
            self.mean_potential = (potential - self.mean_potential) / (position + 1) + self.mean_potential


@dataclass
class Accumulation:
    """The run's position in an accumulated step.

    Attributes:
        candidates: candidate batches from which a step chooses one (EWSG); 1 without such a choice.
        accumulating: whether the run is between a step's micro-batches, with incomplete gradients.
        batch_complete: whether the last micro-batch ended a candidate batch (without candidates, the step).
        batch_share: weight of the current candidate batch in the accumulated gradient, 1 without candidates.
        window: micro-batches of the step, as far as known.
        rescaling: factor of the accumulated gradient at the step's end; not 1 if its epoch ended earlier than expected.
        loss_scale: factor of a loss in the backward pass, for a step with fewer micro-batches than the others.
    """

    candidates: int = 1
    accumulating: bool = False
    batch_complete: bool = True
    batch_share: float = 1.0
    window: int = 1
    rescaling: float = 1.0
    loss_scale: float = 1.0

    def advance(self, batch_idx: int, accumulated: int, batches: float, is_last: bool) -> tuple[int, int]:
        """Advance to a micro-batch; return its index in the step and by what to divide its gradient: their number.

        A loader of unknown length (`batches` is infinite) may end in mid-step; `rescaling` corrects its gradients.
        """
        position = batch_idx % accumulated
        expected = int(min(accumulated, batches - (batch_idx - position)))
        window = position + 1 if is_last else expected
        self.window, self.rescaling = window, expected / window
        self.accumulating = position + 1 < window
        each = accumulated // self.candidates
        first = position - position % each
        last = min(first + each, window)
        self.batch_complete = position + 1 == last
        self.batch_share = (last - first) / window
        return position, expected


class Stage(str, Enum):
    """Stage of a run."""

    WARM_START = "warm start"
    EXPLORATION = "exploration"
    BURN_IN = "burn-in"
    SAMPLING = "sampling"


@dataclass
class Progress:
    """The run's position in its schedule.

    Attributes:
        cycle: index of the cycle, from 0.
        num_cycles: number of cycles of the run; None without cycles.
        stage: warm start, exploration (temperature 0), burn-in or sampling.
        schedule: class name of the run's schedule; None without one.
        first_sample: the step after which the schedule draws its first sample, None if unknown.
        sample_due: whether the current states are samples; set by a schedule in `on_train_batch_end`.
        warm_steps: steps of a warm start, after which the schedule begins to count; as planned, until it ends.
        warm_lr: the step size of the warm start's optimizer, None outside it.
        steps_before: optimizer steps that the trainer has made in earlier fits.
    """

    cycle: int = 0
    num_cycles: int | None = None
    stage: Stage = Stage.SAMPLING
    schedule: str | None = None
    first_sample: int | None = None
    sample_due: bool = False
    warm_steps: int = 0
    warm_lr: float | None = None
    steps_before: int = 0


@dataclass
class SampleTags:
    """Labels and weights for samples of the current states.

    Attributes:
        log_weight: log importance weight of each chain's state, shape (C,), on the device.
        comparable: whether log-weights compare across chains; else each chain's have their own constant.
        bin: energy bin of each chain's state, shape (C,), from 0; None without an energy partition.
        energy: energy of each chain's state, shape (C,); None uses the last step's.
        labels: each chain's label in its samples, by its global index; None uses the index.
        sampled: labels of the chains that draw a sample when one is due.
        draws: number of samples into which the claim "expand samples" turns each state; 1 without it.
    """

    log_weight: Tensor = field(default_factory=lambda: torch.zeros(1))
    comparable: bool = True
    bin: Tensor | None = None
    energy: Tensor | None = None
    labels: Sequence[int] | None = None
    sampled: Container[int] = range(sys.maxsize)
    draws: int = 1


@dataclass
class Counters:
    """Per-datum gradients of each chain over all passes and ranks, and numbers of steps of a fit.

    Attributes:
        skipped_steps: steps skipped since they were not finite.
        hidden_steps: steps that Lightning's loop has not seen.
        compiled_steps: steps made by compiled functions.
    """

    gradient_evaluations: int = 0
    skipped_steps: int = 0
    hidden_steps: int = 0
    compiled_steps: int = 0


@dataclass
class Pulse:
    """The main thread's events so far, for other ranks, and whether the next may be late."""

    count: int = 0
    busy: bool = True


class NonFiniteEnergyError(RuntimeError):
    """A chain's energy, gradient or state has become NaN or infinite.

    Attributes:
        step: the optimizer step k = 1, 2, … that would have been made.
        chain: the chain's index.
        energy: Ũ of the step's mini-batch, in nats (finite if only the gradient or the state is not).
        checkpoint: the newest checkpoint of the run (a URL if it is on no local disk), which holds only finite numbers,
            or None.
    """

    def __init__(self, message: str, step: int, chain: int, energy: float, checkpoint: Path | str | None) -> None:
        super().__init__(message)
        self.step = step
        self.chain = chain
        self.energy = energy
        self.checkpoint = checkpoint


# -- claims ------------------------------------------------------------------------------------------------------------


SUBJECTS = {
    "seed chain": "both seed the random numbers of each chain",
    "snapshot gradients": "both compare the gradient of each batch with one at a snapshot, so one would count the "
    "noise that the other removes",
    "set controls": "both set a step's controls from its energy to cross the same barriers, and the weights would "
    "belong to no single temperature",
    "chain temperatures": "one gives each chain its own temperature, and the other compares all chains with "
    "the temperature of the run",
    "draw momenta": "both draw the momenta with which sampling begins",
    "choose gradient": "both choose the gradient of a step",
    "observe step": "both observe a step before its update",
    "prepare samples": "both set what samples carry",
    "expand samples": "both replace a sample by draws of their own",
    "energy correction": "both correct the same energies",
    "draw scales": "both set the prior's scales",
    "accept scales": "both decide which of the prior's scales are drawn",
}
"""The subjects, in the order of a step, and why two callbacks cannot share one."""

BEFORE_UPDATE = ("set controls", "draw momenta", "choose gradient", "observe step")
"""Subjects called before an update, in this order: momenta depend on the controls, the choice of a gradient on both,
and observers see the step as it will be made. Clipping follows."""


class Claims:
    """Registry of the callbacks that act on the chains; each subject has at most one claimant."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[object, Callable[..., Any] | None]] = {}
        self._called = False

    def claim(self, subject: str, by: object, call: Callable[..., Any] | None = None) -> None:
        """Assign a subject to a callback.

        Args:
            subject: one of `SUBJECTS`.
            by: the callback.
            call: the function for this part of the step; None only reserves the subject.

        Raises:
            ValueError: if another callback has claimed it; the message names both and the reason.
            KeyError: for a subject that is not in `SUBJECTS`.
        """
        reason, holder = SUBJECTS[subject], self._held.get(subject, (by, None))[0]
        if holder is not by:
            first, second = type(holder).__name__, type(by).__name__
            raise ValueError(f"{first} and {second} cannot be combined: {reason}; remove one of them")
        self._held[subject] = (by, call)

    def clear(self) -> None:
        """Free all subjects, when a fit begins."""
        self._held, self._called = {}, False

    def get(self, subject: str) -> Callable[..., Any] | None:
        """Return the function for a subject, or None."""
        held = self._held.get(subject)
        return None if held is None else held[1]

    def holder(self, subject: str) -> object | None:
        """Return the callback that has claimed a subject, or None."""
        held = self._held.get(subject)
        return None if held is None else held[0]

    def before_update(self, *args: Any) -> None:
        """Call the claims of `BEFORE_UPDATE` in their order, once until `end_update`.

        The first claimant in the trainer's list of callbacks calls this method, so the order does not depend on that
        list. Callbacks after all claimants see the gradient and the controls of the update.
        """
        if self._called:
            return
        self._called = True
        for subject in BEFORE_UPDATE:
            held = self._held.get(subject)
            if held is not None and held[1] is not None:
                held[1](*args)

    def end_update(self) -> None:
        """Let the next step call `before_update` again."""
        self._called = False
