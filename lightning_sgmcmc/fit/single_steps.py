"""Steps of a fit batch by batch, in the place of Lightning's loop, and the counts and records of all steps in blocks.

A step has one batch, or several whose gradients are accumulated, or among which `EWSG` chooses. As in Lightning's loop,
hooks and counts are those of batches, and the update follows the last one.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from lightning_sgmcmc.chains.callback import RunCallback
from lightning_sgmcmc.chains.chains import ChainModel, sampler_of
from lightning_sgmcmc.chains.row_steps import Controls
from lightning_sgmcmc.chains.state import StepEnergy
from lightning_sgmcmc.chains.traced import NotTraceableError
from lightning_sgmcmc.fit.block_runs import OF_A_STEP, has_hooks
from lightning_sgmcmc.fit.passes import hooks_of
from lightning_sgmcmc.fit.prior_state import PriorScales
from lightning_sgmcmc.namespace import pl, rank_zero_info
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.rows import clipped_rows
from lightning_sgmcmc.tensors import exact

call = pl.trainer.call


class Made(NamedTuple):
    """A step that is made: its energies, the size of its last batch, and gradients of each datum that it took."""

    energies: Tensor
    size: int
    gradients: int


class SingleSteps:
    """Makes the batches of steps one by one; counts and records steps that are made at once.

    Args:
        acting: the callbacks that act in steps.
        scales: draws the prior's scales between steps, if it has some.

    Attributes:
        each: batches of a step; the last of an epoch may have fewer.
        clip: clips the gradients of all chains, shape (C, P); None if they stay as they are.
    """

    def __init__(
        self, trainer: pl.Trainer, module: ChainModel, acting: Sequence[RunCallback], scales: PriorScales | None
    ) -> None:
        self._trainer: Any = trainer
        self._module, self._sampler = module, sampler_of(module)
        self._acting, self._scales = acting, scales
        self._hooks = {name: hooks_of(trainer, name) for name in OF_A_STEP}
        limit, algorithm = trainer.gradient_clip_val, _text(trainer.gradient_clip_algorithm)
        self._clip = limit, algorithm
        self._loop: Any = trainer.fit_loop.epoch_loop
        self._counters = module.chains.counters
        self.each: int = trainer.accumulate_grad_batches
        self.clip = partial(clipped_rows, limit=float(limit), by_value=algorithm == "value") if limit else None
        self._epoch, self._first_epoch = -1, -1
        """The epochs of the last traced step and of the first; below 0 if the next one compares its energies."""

    def begins(self, index: int) -> bool:
        """Return whether a batch of the present epoch is the first of its step."""
        return index % self.each == 0

    def ends(self, index: int) -> bool:
        """Return whether a batch of the present epoch is the last of its step."""
        return self.begins(index + 1) or index + 1 >= self._trainer.num_training_batches

    # -- comparisons --------------------------------------------------------------------------------------------------

    def checks(self, ahead: int = 0) -> bool:
        """Return whether the coming step, or the first so many epochs ahead, compares traced energies with others: at
        the start of the first epochs of such steps, and then of one in 8 or in 1,000 steps."""
        epoch = self._trainer.current_epoch + ahead
        every = max(8, 1_000 // self._trainer.num_training_batches)
        return epoch != self._epoch and (epoch < self._first_epoch + 8 or epoch % every == 0 or self._epoch < 0)

    def take_check(self) -> bool:
        """Return whether the coming step compares its energies, and take note that it does."""
        checks, self._epoch = self.checks(), self._trainer.current_epoch
        if self._first_epoch < 0:
            self._first_epoch = self._epoch
        return checks

    def check_next(self) -> None:
        """Let the next step compare its energies."""
        self._epoch = -1

    # -- counts -------------------------------------------------------------------------------------------------------

    def count_over(
        self, sizes: list[int], index: int, steps: int, gradients: int, controls: Sequence[Controls]
    ) -> None:
        """Count batches of some sizes, the first at a place in its epoch, that neither Lightning nor callbacks see.

        Args:
            steps: how many steps end with them.
            gradients: those of each datum.
            controls: each group's of at least so many steps.
        """
        if not sizes:
            return
        trainer, loop = self._trainer, self._loop
        optimizer = loop.automatic_optimization.optim_progress.optimizer
        for counts, count in ((loop.batch_progress, len(sizes)), (optimizer.step, steps), (optimizer.zero_grad, steps)):
            for numbers in (counts.total, counts.current):
                own = vars(numbers)
                for name in own:  # ready, completed, and others
                    own[name] += count
        loop._batches_that_stepped += steps
        self._count(sizes, index, steps, gradients)
        passed = [Controls(own.lr[:steps], own.temperature[:steps]) for own in controls]
        for callback in self._acting:
            callback.pass_over(trainer, len(sizes), passed)
        self._counters.hidden_steps += steps

    def _count(self, sizes: list[int], index: int, steps: int, gradients: int) -> None:
        chains, trainer = self._module.chains, self._trainer
        assert chains.weights is not None
        self._sampler.step_count += steps
        for size, alike in itertools.groupby(sizes):
            same = len([*alike])
            chains.weights.add(size, index, same)
            index += same
        chains.accumulation.advance(index - 1, self.each, trainer.num_training_batches, is_last=False)
        chains.counters.gradient_evaluations += sum(sizes) * gradients
        chains.pulse.count += len(sizes)

    def uncount(self, steps: int, sizes: Sequence[int]) -> None:
        """Take back the count of steps that are to be made again."""
        self._sampler.step_count -= steps
        self._counters.gradient_evaluations -= sum(sizes)

    def record(self, energies: Tensor, size: int) -> Tensor:
        """Record the last of some steps, with a last batch of a size, Ũ/N, log p(θ) and perhaps the term of a variate,
        shape (2 or 3, C); return its loss."""
        chains, sampler = self._module.chains, self._sampler
        chains.clear_gradients(sampler)
        if len(energies) > 2:
            chains.observed.correction = exact(energies[2]) * chains.observed.num_data
        potential, log_prior = energies[:2] if chains.stacked is not None else energies[:2, 0]
        chains.observed.record(StepEnergy(potential, log_prior, None, size), 0)
        if sampler.guard is not None:
            sampler.guard.allows_update()
        if self._scales is not None:
            self._scales.after_update()
        return potential.sum()

    # -- batches ------------------------------------------------------------------------------------------------------

    def make_seen(self, batch: Any, index: int, made: Made | None = None) -> None:
        """Process the last batch of a step, which may be made already, with all that Lightning does around it."""
        trainer, batches = self._trainer, self._loop.batch_progress
        batches.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        call._call_callback_hooks(trainer, "on_train_batch_start", batch, index)
        batches.increment_started()
        loss = self._process(batch, index, made)
        batches.increment_processed()
        call._call_callback_hooks(trainer, "on_train_batch_end", {"loss": loss}, batch, index)
        trainer._logger_connector.on_batch_end()
        batches.increment_completed()
        trainer._logger_connector.update_train_step_metrics()

    def make_hidden(self, batch: Any, index: int) -> None:
        """Process a batch that Lightning does not see."""
        trainer, module, batches = self._trainer, self._module, self._loop.batch_progress
        batches.increment_ready()
        for hook in self._hooks["on_train_batch_start"]:
            hook(trainer, module, batch, index)
        batches.increment_started()
        loss = self._process(batch, index)
        batches.increment_processed()
        for hook in self._hooks["on_train_batch_end"]:
            hook(trainer, module, {"loss": loss}, batch, index)
        batches.increment_completed()
        if self.ends(index):
            self._loop._batches_that_stepped += 1
            self._counters.hidden_steps += 1

    def _process(self, batch: Any, index: int, made: Made | None = None) -> Tensor:
        """Compute the gradient and, with the last batch of a step, make the update, unless it is made; return the
        loss."""
        optimizer = self._loop.automatic_optimization.optim_progress.optimizer
        if self.begins(index) or made is not None:
            optimizer.zero_grad.increment_ready()
            optimizer.zero_grad.increment_started()
            optimizer.zero_grad.increment_completed()
        if self.ends(index):
            optimizer.step.increment_ready()
        if made is not None:
            optimizer.step.increment_completed()
            self._count([made.size], index, 1, made.gradients)
            return self.record(made.energies, made.size)
        loss = self.compute(batch, index)
        if self.ends(index):
            optimizer.step.increment_completed()
        return loss

    def compute(self, batch: Any, index: int) -> Tensor:
        """Compute the gradient and, with the last batch of a step, make the update; return the loss."""
        trainer, module, sampler, hooks = self._trainer, self._module, self._sampler, self._hooks
        with trainer.precision_plugin.forward_context():
            loss = self._with_gradient(batch, index)
        for hook in hooks["on_after_backward"]:
            hook(trainer, module)
        detached: Tensor = loss.detach()
        if not self.ends(index):
            return detached
        for hook in hooks["on_before_optimizer_step"]:
            hook(trainer, module, sampler)
        if self.clip is not None:
            module.configure_gradient_clipping(sampler, *self._clip)
        _step_of(sampler)()
        return detached

    def _with_gradient(self, batch: Any, index: int) -> Tensor:
        """Compute the gradient, and return the loss."""
        trainer, module = self._trainer, self._module
        chains = module.chains
        loss: Any = None
        if chains.traces and chains.stacked is not None:  # one chain gains from many steps at once alone
            checks = self.take_check()
            try:
                loss = chains.take_gradient(batch, index, trainer, checks)
            except NotTraceableError as error:
                rank_zero_info(f"The steps are not traced, since the network is more than tensor operations: {error}.")
                chains.stop_tracing(trainer)
                if not self.begins(index):
                    chains.spread_gradients()  # of the batches before
            else:
                if (seed := chains.claims.get("seed chain")) is not None:
                    seed(chains.num_chains - 1)  # where other steps leave the generators, from which data sets may draw
        if loss is None:
            loss = module.training_step(batch, index)
            if self.begins(index):
                module.optimizer_zero_grad(trainer.current_epoch, index, self._sampler)
            module.backward(loss / self.each if self.each > 1 else loss)
        found: Tensor = loss
        return found


def _step_of(sampler: Sampler) -> Callable[[], Any]:
    """Return the sampler's step, without what torch does around it for profilers if no hook waits there."""
    step: Any = type(sampler).step
    return sampler.step if has_hooks(sampler) or not hasattr(step, "hooked") else partial(step.__wrapped__, sampler)


def _text(algorithm: Any) -> str | None:
    return None if algorithm is None else str(getattr(algorithm, "value", algorithm))
