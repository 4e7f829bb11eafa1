"""SIGTERM and Ctrl-C: finish the current step, save a checkpoint, and exit."""

import os
import signal
import threading
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from pytorch_lightning.utilities.exceptions import SIGTERMException
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sgmcmc.run.agreement import StopAgreement
from lightning_sgmcmc.run.checkpoints import describe_checkpoint
from lightning_sgmcmc.run.guard import NonFiniteEnergyError
from lightning_sgmcmc.run.trainer import is_trial, resume_command, was_terminated

FILE_NAME = "last-interrupted.ckpt"
"""Begins with "last", so that `Trainer.fit(ckpt_path="last")` finds it if it is the newest."""

REPEATED = 10.0
"""Seconds in which a second Ctrl-C to one of several ranks counts as the first."""

REQUEUE, STOP = 1, 2
"""What ranks are asked for, the larger before the smaller."""

SIGTERM_EXIT_CODE = 128 + int(signal.SIGTERM)


class Interruption:
    """Ends a run on request without losing its state, which is saved if the trainer writes checkpoints.

    Ctrl-C lets the current step finish, since half a step is not a state of the chain; a second one ends the run at
    once. SIGTERM does the same, and the process exits with code 143. With several ranks, either signal to any of them
    ends all of them after the same batch, and they save their state together.

    The signal by which SLURM requeues a job, where Lightning does so, is kept until the same point. Lightning's handler
    would save at once, half a step or amid another operation of the ranks; here it saves a state of the chain.
    """

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._previous: Any = None
        self._previous_term: Any = None
        self._after_a_step = False
        self._together = False
        self.requested = False
        self.term_requested = False
        self._requested_at = 0.0
        self._saved = False
        self._requeue: Any = None
        """Lightning's handler of SLURM's signal."""
        self._requeue_signal: Any = None
        self.requeue_requested = False
        self._agreement: StopAgreement | None = None

    def begin(self, trainer: pl.Trainer) -> None:
        """Listen for Ctrl-C in the main thread, if no other handler is installed, and for SIGTERM with several ranks.

        Args:
            trainer: the run's.
        """
        self.requested = self.term_requested = self._after_a_step = self._together = self._saved = False
        self._trainer = trainer
        in_main_thread = threading.current_thread() is threading.main_thread()
        if trainer.world_size > 1 and in_main_thread:
            self._begin_together(trainer)
        if in_main_thread:
            self._defer_requeue(trainer)
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)

    def _defer_requeue(self, trainer: pl.Trainer) -> None:
        """Take SLURM's signal for a new place in the queue, if Lightning's handler has it and ranks can agree."""
        environment = trainer._accelerator_connector.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return
        number = environment.requeue_signal or signal.SIGUSR1
        own = trainer._signal_connector._slurm_sigusr_handler_fn
        handler = signal.getsignal(number)
        is_lightnings = own in getattr(handler, "signal_handlers", ())
        if not is_lightnings or (trainer.world_size > 1 and self._agreement is None):
            return
        self.requeue_requested, self._requeue, self._requeue_signal = False, handler, number
        signal.signal(number, self._on_requeue)

    def _on_requeue(self, number: int, frame: Any) -> None:
        if not self.requeue_requested:
            rank_zero_info("\nSaving the run's state after this step, for SLURM's requeue.")
        self.requeue_requested = True

    def _save_and_requeue(self) -> None:
        """Call Lightning's handler: it saves `hpc_ckpt_….ckpt`, from which the requeued job resumes, and requeues."""
        self.requeue_requested = False
        self._requeue(self._requeue_signal, None)

    def _begin_together(self, trainer: pl.Trainer) -> None:
        """Defer signals to the point before a batch where Lightning lets the ranks agree on them.

        Lightning's own handler exchanges the signal at once, even during other collective operations, which deadlocks
        the ranks, and its agreement waits for the device before every batch.
        """
        loop = trainer.fit_loop.epoch_loop
        if not hasattr(loop, "_broadcast_sigterm_tensor") or not torch.distributed.is_initialized():
            return
        agreement = self._agreement = StopAgreement(getattr(trainer.strategy, "_timeout", None))

        def agree() -> None:
            own = STOP if self.requested or self.term_requested else REQUEUE if self.requeue_requested else 0
            agreed_on = agreement.on_stop(own)
            if agreed_on == REQUEUE:
                self._save_and_requeue()
            if agreed_on != STOP:
                return
            agreed = SIGTERMException()
            self._together = True
            self.save(trainer, agreed)  # here, since processes of a fork or spawn launcher call no `on_exception`
            self._together = False
            if self.requested and not self.term_requested:
                raise KeyboardInterrupt from agreed
            raise agreed

        loop._broadcast_sigterm_tensor = agree  # type: ignore[method-assign]
        self._previous_term = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher if self._trainer is not None else None
        if not self.term_requested and launcher is not None:
            launcher.kill(number)  # type: ignore[arg-type]
        self.term_requested = True

    def end(self, well: bool = False) -> None:
        """Stop listening for signals.

        Args:
            well: whether the fit has ended without an error.
        """
        if self._agreement is not None:
            self._agreement.end(well)
            self._agreement = None
        if self._previous_term is not None:
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.signal(signal.SIGTERM, self._previous_term)
            self._previous_term = None
        if self._requeue is not None:
            if signal.getsignal(self._requeue_signal) == self._on_requeue:
                signal.signal(self._requeue_signal, self._requeue)
            self._requeue = None
        if self._trainer is not None:
            self._trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        if self._previous is not None:
            if signal.getsignal(signal.SIGINT) == self._on_signal:
                signal.signal(signal.SIGINT, self._previous)
            self._previous = None
        self._trainer = None

    def _on_signal(self, number: int, frame: Any) -> None:
        together = self._trainer is not None and "_broadcast_sigterm_tensor" in vars(self._trainer.fit_loop.epoch_loop)
        if together and self.requested and time.monotonic() - self._requested_at < REPEATED:
            return  # a launcher passes on what the terminal has sent to all its processes
        if self._trainer is None or self.requested or not (together or in_a_step(self._trainer)):
            raise KeyboardInterrupt
        self.requested = True
        self._requested_at = time.monotonic()
        rank_zero_info("\nStopping after this step; press Ctrl-C again to stop at once.")

    def after_step(self, trainer: pl.Trainer) -> None:
        """Stop here if requested: runs write their checkpoints at this point, so resuming is exact.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SIGTERMException: after SIGTERM; Lightning would raise it a little later.
        """
        if self.requeue_requested and trainer.world_size == 1:
            self._save_and_requeue()
        if self.requested and trainer.world_size == 1:
            self._after_a_step = True
            raise KeyboardInterrupt
        if was_terminated(trainer) and trainer.world_size == 1:
            self._after_a_step = True
            raise SIGTERMException

    def save(self, trainer: pl.Trainer, exception: BaseException) -> None:
        """Save the chain's state after SIGTERM or Ctrl-C, if its step is complete and the trainer saves any."""
        if isinstance(exception, SIGTERMException):
            if exception.code is None:
                exception.code = SIGTERM_EXIT_CODE
        elif not isinstance(exception, KeyboardInterrupt):
            return
        if trainer.state.fn != "fit" or trainer.global_step == 0 or is_trial(trainer) or self._saved:
            return
        self._saved = self._together
        whole = self._after_a_step or isinstance(exception, SIGTERMException) or not in_a_step(trainer)
        # All ranks must save together, and elsewhere they may have stopped at different points.
        alone = trainer.world_size == 1 or self._together
        folder = next((d for c in trainer.checkpoint_callbacks if (d := getattr(c, "dirpath", None))), None)
        if folder is None or not whole or not alone:
            rank_zero_info(f"Interrupted at step {trainer.global_step}: {describe_checkpoint(trainer)}.")
            return
        path = os.path.join(folder, FILE_NAME)
        try:
            trainer.save_checkpoint(path)
        except (OSError, NonFiniteEnergyError) as error:
            rank_zero_warn(f"The state at step {trainer.global_step} was not saved: {error}")
            return
        how = resume_command(trainer) or f"trainer.fit(…, ckpt_path='{path}')"
        rank_zero_info(f"Interrupted at step {trainer.global_step}: the run's state is in {path}; resume with {how}.")


def in_a_step(trainer: pl.Trainer) -> bool:
    """Return whether a training step has begun and is not complete."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.ready > progress.completed)


def pass_on(trainer: pl.Trainer, exception: BaseException) -> None:
    """Pass Ctrl-C on to the ranks that a fork or spawn launcher has started from this process, which waits for them."""
    launcher: Any = trainer.strategy.launcher
    if isinstance(exception, KeyboardInterrupt) and isinstance(launcher, _MultiProcessingLauncher):
        launcher.kill(signal.SIGINT)
