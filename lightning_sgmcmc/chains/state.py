"""The plain object through which callbacks and module meet."""

import math
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class ChainState:
    """What callbacks read and write about the chains of this process, one value per chain where a shape (C,) is named.

    A plain object, because attributes of a module are dear to set at every step.

    Attributes:
        mean_potential: Ũ/N of the last step's mini-batch, the mean over its micro-batches, C numbers on the device.
        num_data: N.
        log_prior: log p(θ) at that step, of the shape of mean_potential, on the device.
        energy_correction: what a control variate adds to the energies that callbacks look at, shape (C,); None is 0.
        log_likelihood: log p(y|x,θ) of each datum of the last mini-batch, shape (n,) or (C, n); None unless asked for.
        reference_log_likelihood: the same of a snapshot of the chains, shape (C, n); None without one.
        keeps_each: whether log_likelihood is wanted.
        log_weight: log importance weight of the present states, shape (C,), on the device.
        bin: energy bin of the present states, shape (C,), from 0; None without an energy partition.
        sample_energy: energy that the present states' samples carry, shape (C,); None is `energy`.
        begin_chain: called with a chain's index in this process before its turn in a step: seeds its random numbers.
        before_sample: called when samples are drawn, before these fields are read, to bring them up to date.
        cycle: index of the cycle, from 0.
        num_cycles: how many cycles the run has; None without cycles.
        stage: "exploration" (temperature 0), "burn-in" or "sampling".
        accumulating: between the micro-batches of a step, so the gradients are not complete.
        candidates: batches of which a step chooses one; without such a choice a step has one.
        batch_complete: whether the last micro-batch ended a candidate batch, or without candidates the step.
        batch_share: weight of the present candidate batch in the accumulated gradient, 1 where there is one.
        correct_gradient: called when the gradient of a batch is complete, before anyone looks at it: a control variate.
        batch_size: data in the last micro-batch of each chain, in this process.
        gradient_evaluations: data whose gradient has been computed for each chain, all passes and ranks counted.
        labels: what each chain of the run is called in its samples, by its global index; None is the index.
        sampled: labels of the chains whose states are samples when one is due.
        sample_due: set by a schedule in `on_train_batch_end`: the present states are samples.
        skipped_steps: steps that were left out because their energy or gradient was not finite.
    """

    mean_potential: Tensor = field(default_factory=lambda: torch.full((1,), math.nan))
    num_data: int = 1
    log_prior: Tensor = field(default_factory=lambda: torch.zeros(()))
    energy_correction: Tensor | None = None
    log_likelihood: Tensor | None = None
    reference_log_likelihood: Tensor | None = None
    keeps_each: bool = False
    log_weight: Tensor = field(default_factory=lambda: torch.zeros(1))
    bin: Tensor | None = None
    sample_energy: Tensor | None = None
    begin_chain: Callable[[int], None] | None = None
    before_sample: Callable[[], None] | None = None
    cycle: int = 0
    num_cycles: int | None = None
    stage: str = "sampling"
    accumulating: bool = False
    candidates: int = 1
    batch_complete: bool = True
    batch_share: float = 1.0
    correct_gradient: Callable[[], None] | None = None
    batch_size: int = 0
    gradient_evaluations: int = 0
    labels: Sequence[int] | None = None
    sampled: Container[int] = range(sys.maxsize)
    sample_due: bool = False
    skipped_steps: int = 0

    @property
    def energy(self) -> Tensor:
        """Ũ of the last step's mini-batch, shape (C,), on the device, in nats."""
        return self.mean_potential.reshape(-1) * self.num_data

    def observed_energy(self, include_prior: bool) -> Tensor:
        """Return the last step's energy as callbacks look at it, shape (C,), float64: with its control variate, and
        with -log p(θ) or without.

        Args:
            include_prior: whether it holds -log p(θ), as the potential does.
        """
        energy = self.mean_potential.double().reshape(-1) * self.num_data
        if self.energy_correction is not None:
            energy = energy + self.energy_correction
        return energy if include_prior else energy + self.log_prior
