"""A watch over the ranks of a run: if one makes no progress, all end, instead of waiting for it."""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_sgmcmc.chains.state import Pulse
from lightning_sgmcmc.run.checkpoints import describe_checkpoint

DEFAULT_TIMEOUT = 300.0
LAST_WORDS = 10.0
"""Seconds for the last message, which reads a folder that may hang."""

ANSWER = 30.0
"""Seconds that the store has for an answer."""

_fits = itertools.count()


@dataclass(frozen=True)
class Beat:
    """What a rank publishes.

    Attributes:
        number: counts the beats of its thread; it grows as long as the process lives.
        progress: counts events of its main thread; equal numbers are equal places in the run.
        busy: whether its main thread does something of any length: a validation, a checkpoint, samples, a batch of a
            new shape, whose network may be compiled.
        step: optimizer steps made.
        ended: whether its fit has ended.
    """

    number: int
    progress: int
    busy: bool
    step: int
    ended: bool

    def to_text(self) -> str:
        return " ".join(str(int(value)) for value in astuple(self))

    @classmethod
    def from_text(cls, text: str) -> "Beat":
        number, progress, busy, step, ended = map(int, text.split())
        return cls(number, progress, bool(busy), step, bool(ended))


class Judge:
    """Decides from beats which rank hangs.

    A rank hangs if its process gives no sign for `timeout` seconds. The rank that is least far, for which others may
    wait, also hangs if it makes no progress for that time, in a step or waiting for data. While it is busy its progress
    is not judged, or, with a `limit`, only where another rank is farther or has ended.

    Time is that between this judge's own looks, each counted as two intervals at most. So a job that is stopped and
    continued, or a machine that sleeps, hangs no longer than its ranks are awake.

    Args:
        timeout: seconds.
        interval: seconds from one look to the next.
        limit: seconds after which a busy rank hangs; None leaves it to the timeouts of the others' operations.
    """

    def __init__(self, timeout: float, interval: float, limit: float | None = None) -> None:
        self.timeout = timeout
        self.limit = limit
        self._longest = 2 * interval
        self._looked: float | None = None
        self._clock = 0.0
        self._beats: dict[int, tuple[int, float]] = {}
        """The last number of each rank, and since when."""
        self._least: tuple[Any, float] = (None, 0.0)
        """The progress of the rank that is least far, whether it is busy, and since when."""

    def observe(self, beats: Sequence[Beat], now: float) -> int | None:
        """Return the rank that hangs, or None.

        Args:
            beats: the last beat of each rank.
            now: the time in seconds.
        """
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

    A thread does both; the main thread only counts its events. See `timeout_of` for the time.

    Args:
        trainer: the run's.
        pulse: what the main thread counts.
        store: the ranks' common store.
    """

    def __init__(self, trainer: pl.Trainer, pulse: Pulse, store: Any) -> None:
        self._trainer = trainer
        self._pulse = pulse
        self._store = store
        self.timeout = timeout_of(trainer)
        self._limit = given_timeout(trainer)
        self._interval = min(5.0, self.timeout / 20)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
        self._number = 0
        self._publish()
        self._thread.start()

    def end(self, well: bool) -> None:
        """Stop watching.

        Args:
            well: whether the fit has ended without an error.
        """
        self._ended.set()
        self._thread.join(2 * self._interval)
        if well:
            with contextlib.suppress(RuntimeError):
                self._publish(ended=True)

    def _publish(self, ended: bool = False) -> None:
        pulse, self._number = self._pulse, self._number + 1
        beat = Beat(self._number, pulse.count, pulse.busy, self._trainer.global_step, ended)
        self._store.set(str(self._trainer.global_rank), beat.to_text())

    def _run(self) -> None:
        judge = Judge(self.timeout, self._interval, self._limit)
        keys = [str(rank) for rank in range(self._trainer.world_size)]
        beats: list[Beat] = []
        silent = 0.0
        while not self._ended.wait(self._interval):
            began = time.monotonic()
            try:
                self._publish()
                if self._store.check(keys):
                    beats = [Beat.from_text(value.decode()) for value in self._store.multi_get(keys)]
                    silent = 0.0
            except RuntimeError:  # rank zero, or the launcher that holds the store, does not answer
                if beats and beats[0].ended and self._limit is None:
                    return  # nobody waits for this rank
                silent += self._interval + min(time.monotonic() - began, ANSWER)
                if silent > self.timeout and not self._ended.is_set():
                    self._give_up(f"the store of the ranks has not answered for {self.timeout:g} s")
                continue
            rank = judge.observe(beats, time.monotonic()) if beats else None
            if rank is not None and not self._ended.is_set():
                self._give_up(f"rank {rank} has made no progress for {self.timeout:g} s after step {beats[rank].step}")

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


def timeout_of(trainer: pl.Trainer) -> float:
    """Return the seconds without progress after which a rank hangs.

    They are five minutes, or most of the strategy's timeout if the user set one (`DDPStrategy(timeout=…)`), so that the
    watch names the rank before a collective operation fails.
    """
    given = given_timeout(trainer)
    return DEFAULT_TIMEOUT if given is None else 0.8 * given


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
    """Return where the beats of this process's next fit are in the common store, the same on all ranks.

    torchrun's store outlives the processes that it starts again, whose beats are others than those of the last attempt.
    """
    return f"lightning_sgmcmc/attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_fits)}"
