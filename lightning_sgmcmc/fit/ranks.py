"""The ranks of a run: what they agree on, a watch that ends all if one hangs, and interruptions."""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_sgmcmc.chains.layout import new_group
from lightning_sgmcmc.chains.state import NonFiniteEnergyError, Pulse
from lightning_sgmcmc.chains.trainer import is_trial, resume_command, was_terminated
from lightning_sgmcmc.fit.checkpoints import describe_checkpoint
from lightning_sgmcmc.namespace import fabric, pl, rank_zero_info, rank_zero_warn

SLURMEnvironment = fabric.plugins.environments.SLURMEnvironment
SIGTERMException = pl.utilities.exceptions.SIGTERMException

LONGEST = 50
"""Most batches from one agreement to the next."""

SECONDS = 0.5
"""Batches of more than this time are agreed upon one by one."""

TIMED = 10
"""The first batches are agreed upon one by one, too; their times say how long a batch takes."""


class StopAgreement:
    """Lets the ranks of a run find out that one of them is to stop; making it and each call are collective."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._group: Any = new_group(None, timeout, backend="gloo")
        self._pending: Any = None
        self._value = torch.zeros(2, dtype=torch.float64)
        """The request, and the seconds of a batch."""
        self._every = 1
        """Batches from the beginning of an exchange to its result, and to the next one."""
        self._batch = 0
        self._next = 0
        self._read = (0, time.monotonic())
        """The batch before which the last exchange began, and when."""

    def on_stop(self, requested: int) -> int:
        """Return the largest request of all ranks, to be met before the coming batch; 0 for none."""
        batch, self._batch = self._batch, self._batch + 1
        if self._group is None or batch < self._next:
            return 0
        try:
            return self._exchange(batch, requested)
        except RuntimeError as error:
            self._group = self._pending = None
            if "timed out" in str(error).lower():
                raise RuntimeError(
                    f"a rank has not come to batch {batch} of this fit within the strategy's timeout ({error}): it "
                    "hangs, or needs a longer one, as in DDPStrategy(timeout=timedelta(hours=1))"
                ) from error
            return 0  # a rank has ended; what the others do without it shows soon

    def _exchange(self, batch: int, requested: int) -> int:
        if self._pending is not None and (found := self._wait()):
            return found
        began, since = self._read
        now = time.monotonic()
        self._read = (batch, now)
        self._value = torch.tensor([float(requested), (now - since) / max(batch - began, 1)], dtype=torch.float64)
        self._pending = dist.all_reduce(self._value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._next = batch + self._every
        return self._wait() if self._every == 1 else 0

    def _wait(self) -> int:
        """Read what the ranks have exchanged; return the largest request."""
        self._pending.wait()
        self._pending = None
        requested, seconds = self._value.tolist()
        if self._batch > TIMED:
            self._every = max(1, min(LONGEST, int(SECONDS / max(seconds, 1e-9))))
        return int(requested)

    def end(self, well: bool) -> None:
        """Stop exchanging."""
        if well and self._group is not None:
            if self._pending is not None:
                self._pending.wait()
            dist.destroy_process_group(self._group)
        self._group = self._pending = None


# -- rank watch --------------------------------------------------------------------------------------------------------

DEFAULT_TIMEOUT = 300.0
LAST_WORDS = 10.0
"""Seconds for the last message, which reads a folder that may hang."""

ANSWER = 30.0
"""Seconds that the store has for an answer."""

_fits = itertools.count()


@dataclass(frozen=True)
class Beat:
    """What a rank publishes."""

    number: int
    """Of the beats of its thread, which grows as long as the process lives."""
    progress: int
    """Number of events of its main thread; equal numbers are equal places in the run."""
    busy: bool
    """Whether its main thread does something of any length, such as a validation or a first compilation."""
    step: int
    ended: bool
    hangs: int = -1
    """The rank that the first one has found to hang."""

    def to_text(self) -> str:
        return " ".join(str(int(value)) for value in astuple(self))

    @classmethod
    def from_text(cls, text: str) -> "Beat":
        number, progress, busy, step, ended, hangs = map(int, text.split())
        return cls(number, progress, bool(busy), step, bool(ended), hangs)


class Judge:
    """Decides from beats which rank hangs: one without a sign, or the one that is least far, for `timeout` seconds."""

    def __init__(self, timeout: float, interval: float, limit: float | None = None) -> None:
        self.timeout = timeout
        self.limit = limit
        """Seconds of a busy rank in which another is farther or has ended; None allows any number."""
        self._longest = 2 * interval  # of a look, so that a job that was asleep hangs no longer than it is awake
        self._looked: float | None = None
        self._clock = 0.0
        self._beats: dict[int, tuple[int, float]] = {}
        """The last number of each rank, and since when."""
        self._least: tuple[Any, float] = (None, 0.0)
        """The progress of the rank that is least far, whether it is busy, and since when."""

    def observe(self, beats: Sequence[Beat], now: float) -> int | None:
        """Return the rank that hangs, or None; `now` is the time in seconds."""
        self._clock += 0.0 if self._looked is None else min(now - self._looked, self._longest)
        self._looked = now
        running = [rank for rank, beat in enumerate(beats) if not beat.ended]
        for rank in running:
            if self._beats.get(rank, (None, 0.0))[0] != beats[rank].number:
                self._beats[rank] = (beats[rank].number, self._clock)
            elif self._clock - self._beats[rank][1] > self.timeout:
                return rank
        if not running:
            return None
        last = min(running, key=lambda rank: (beats[rank].progress, not beats[rank].busy))
        place = (beats[last].progress, beats[last].busy)
        if self._least[0] != place:
            self._least = (place, self._clock)
        longest: float | None = self.timeout
        if beats[last].busy:
            is_awaited = any(beat.ended or beat.progress > beats[last].progress for beat in beats)
            longest = self.limit if is_awaited else None
        return last if longest is not None and self._clock - self._least[1] > longest else None


class RankWatch:
    """Publishes this rank's beats through torch.distributed's store, and ends this process if a rank hangs.

    The first rank reads and judges all; the others read its beat alone, with what it has found, and judge whether it
    lives. Once its fit has ended, each rank reads all.
    """

    def __init__(self, trainer: pl.Trainer, pulse: Pulse, store: Any) -> None:
        self._trainer = trainer
        self._pulse = pulse
        self._store = store
        self._limit = given_timeout(trainer)
        # Less than the strategy's, so that the watch names the rank before a collective operation fails.
        self.timeout = DEFAULT_TIMEOUT if self._limit is None else 0.8 * self._limit
        self._interval = min(5.0, self.timeout / 20)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
        self._number = 0
        self._publish()
        self._thread.start()

    def end(self, well: bool) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join(2 * self._interval)
        if well:
            with contextlib.suppress(RuntimeError):
                self._publish(ended=True)

    def _publish(self, ended: bool = False, hangs: int = -1) -> None:
        pulse, self._number = self._pulse, self._number + 1
        beat = Beat(self._number, pulse.count, pulse.busy, self._trainer.global_step, ended, hangs)
        self._store.set(str(self._trainer.global_rank), beat.to_text())

    def _read(self, ranks: range) -> list[Beat]:
        """Return the beats of ranks, none before each has published one."""
        keys = [str(rank) for rank in ranks]
        found = self._store.multi_get(keys) if self._store.check(keys) else []
        return [Beat.from_text(value.decode()) for value in found]

    def _run(self) -> None:
        judge = Judge(self.timeout, self._interval, self._limit)
        everyone, first = range(self._trainer.world_size), self._trainer.global_rank == 0
        beats: list[Beat] = []
        silent = 0.0
        while not self._ended.wait(self._interval):
            began = time.monotonic()
            judges = first or (bool(beats) and beats[0].ended)
            try:
                self._publish()
                beats, silent = self._read(everyone if judges else everyone[:1]) or beats, 0.0
                if not beats:
                    continue
                own = beats if judges else [replace(beats[0], progress=beats[0].number, busy=False)]
                rank = judge.observe(own, time.monotonic())
                if not judges and beats[0].hangs >= 0:
                    rank = beats[0].hangs
                if rank is None or self._ended.is_set():
                    continue
                step = self._read(everyone[rank : rank + 1])[0].step
                if first:
                    self._publish(hangs=rank)
                    time.sleep(1.5 * self._interval)  # until the others have read it
            except RuntimeError:  # rank zero, or the launcher that holds the store, does not answer
                if beats and beats[0].ended and self._limit is None:
                    return  # nobody waits for this rank
                silent += self._interval + min(time.monotonic() - began, ANSWER)
                if silent > self.timeout and not self._ended.is_set():
                    self._give_up(f"the store of the ranks has not answered for {self.timeout:g} s")
                continue
            self._give_up(f"rank {rank} has made no progress for {self.timeout:g} s after step {step}")

    def _give_up(self, cause: str) -> None:
        exit_anyway = threading.Timer(LAST_WORDS, os._exit, (1,))
        exit_anyway.daemon = True
        exit_anyway.start()
        rank = self._trainer.global_rank
        where = describe_checkpoint(self._trainer)
        print(
            f"Rank {rank} ends the run, since {cause}, and the others wait for it; {where}; to wait longer, set the "
            "strategy's timeout, as in DDPStrategy(timeout=timedelta(hours=1))",
            file=sys.stderr,
            flush=True,
        )
        kill: Callable[[Any], None] | None = getattr(self._trainer.strategy.launcher, "kill", None)
        if kill is not None:
            time.sleep(1)  # the other ranks end by themselves; a stopped process does not
            with contextlib.suppress(Exception):
                kill(signal.SIGKILL)
        os._exit(1)


def given_timeout(trainer: pl.Trainer) -> float | None:
    """Return the seconds of the strategy's timeout, None unless the user set one."""
    given = getattr(trainer.strategy, "_timeout", None)
    return None if given in (None, default_pg_timeout) else float(given.total_seconds())


def watch_ranks(trainer: pl.Trainer, pulse: Pulse) -> RankWatch | None:
    """Return a watch over the ranks of a run; None for one rank, or without a common store."""
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    # With a connection of its own, since the main thread may wait in the other. `TCPStore.clone` came after torch 2.6.
    own = dist.TCPStore(
        store.host,
        store.port,
        timeout=timedelta(seconds=ANSWER),
        wait_for_workers=False,
        use_libuv=getattr(store, "libuvBackend", True),
    )
    return RankWatch(trainer, pulse, dist.PrefixStore(prefix_of_fit(), own))


def prefix_of_fit() -> str:
    """Return where the beats of this process's next fit are in the store, which outlives torchrun's attempts."""
    return f"lightning_sgmcmc/attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_fits)}"


# -- interruption ------------------------------------------------------------------------------------------------------

FILE_NAME = "last-interrupted.ckpt"
"""Begins with "last", so that `Trainer.fit(ckpt_path="last")` finds it if it is the newest."""

REPEATED = 10.0
"""Seconds in which a second Ctrl-C to one of several ranks counts as the first."""

REQUEUE, STOP = 1, 2
"""What ranks are asked for, the larger before the smaller."""

SIGTERM_EXIT_CODE = 128 + int(signal.SIGTERM)


class Interruption:
    """Lets Ctrl-C, SIGTERM and SLURM's requeue take effect after a step, on all ranks after the same batch."""

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._handlers: dict[int, tuple[Any, Any]] = {}
        """By signal, this object's handler and the one before."""
        self._after_a_step = False
        self._together = False
        self.requested = False
        self.term_requested = False
        self._requested_at = 0.0
        self._saved = False
        self._requeue: Any = None
        """Calls Lightning's handler of SLURM's signal."""
        self.requeue_requested = False
        self._agreement: StopAgreement | None = None

    def begin(self, trainer: pl.Trainer) -> None:
        """Listen for Ctrl-C in the main thread, unless another handler is installed; with several ranks for SIGTERM.

        A second call in a fit does nothing.
        """
        if self._trainer is trainer:
            return
        self.requested = self.term_requested = self._after_a_step = self._together = self._saved = False
        self._trainer = trainer
        in_main_thread = threading.current_thread() is threading.main_thread()
        if trainer.world_size > 1 and in_main_thread:
            self._begin_together(trainer)
        if in_main_thread:
            self._defer_requeue(trainer)
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._listen(signal.SIGINT, self._on_signal)

    def _listen(self, number: int, handler: Any) -> None:
        self._handlers[number] = handler, signal.signal(number, handler)

    def _defer_requeue(self, trainer: pl.Trainer) -> None:
        """Take SLURM's signal for a new place in the queue, if Lightning's handler has it and ranks can agree."""
        environment = trainer._accelerator_connector.cluster_environment
        if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
            return
        number = environment.requeue_signal or signal.SIGUSR1
        own = trainer._signal_connector._slurm_sigusr_handler_fn
        handler: Any = signal.getsignal(number)
        is_lightnings = own in getattr(handler, "signal_handlers", ())
        if not is_lightnings or (trainer.world_size > 1 and self._agreement is None):
            return
        self.requeue_requested, self._requeue = False, partial(handler, number, None)
        self._listen(number, self._on_requeue)

    def _on_requeue(self, number: int, frame: Any) -> None:
        if not self.requeue_requested:
            rank_zero_info("\nSaving the run's state after this step, for SLURM's requeue.")
        self.requeue_requested = True

    def _save_and_requeue(self) -> None:
        """Call Lightning's handler: it saves `hpc_ckpt_….ckpt`, from which the requeued job resumes, and requeues."""
        self.requeue_requested = False
        self._requeue()

    def _begin_together(self, trainer: pl.Trainer) -> None:
        """Defer signals to the point before a batch: Lightning's handler exchanges them at once, which deadlocks."""
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
        self._listen(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher if self._trainer is not None else None
        if not self.term_requested and launcher is not None:
            launcher.kill(number)  # type: ignore[arg-type]
        self.term_requested = True

    def end(self, well: bool = False) -> None:
        """Stop listening for signals."""
        if self._agreement is not None:
            self._agreement.end(well)
            self._agreement = None
        for number, (own, before) in self._handlers.items():
            if signal.getsignal(number) == own:
                signal.signal(number, before)
        self._handlers, self._requeue = {}, None
        if self._trainer is not None:
            self._trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
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
        """Stop here if requested: runs write their checkpoints at this point, so resuming is exact."""
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
            trainer.save_checkpoint(path, weights_only=False)  # without it Lightning prints a line
        except (OSError, NonFiniteEnergyError) as error:
            rank_zero_warn(f"The state at step {trainer.global_step} was not saved: {error}")
            return
        how = resume_command(trainer) or f"trainer.fit(…, ckpt_path='{path}')"
        rank_zero_info(f"Interrupted at step {trainer.global_step}: the run's state is in {path}; resume with {how}.")


def in_a_step(trainer: pl.Trainer) -> bool:
    """Return whether a training step has begun and is not complete."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.ready > progress.completed)
