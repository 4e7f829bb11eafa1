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

_fits = itertools.count()


@dataclass(frozen=True)
class Beat:
    """What a rank publishes.

    Attributes:
        number: counts the beats of its thread; it grows as long as the process lives.
        progress: counts events of its main thread; equal numbers are equal places in the run.
        busy: whether its main thread does something of any length: a validation, a checkpoint, samples, the first step.
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
    wait, also hangs if it makes no progress for that time, in a step or waiting for data, while no rank is busy.

    Args:
        timeout: seconds.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._beats: dict[int, tuple[int, float]] = {}
        self._least = (-1, 0.0)
        """The progress of the rank that is least far, and since when."""

    def observe(self, beats: Sequence[Beat], now: float) -> int | None:
        """Return the rank that hangs, or None.

        Args:
            beats: the last beat of each rank.
            now: the time in seconds.
        """
        running = [rank for rank, beat in enumerate(beats) if not beat.ended]
        for rank in running:
            if self._unchanged(self._beats, rank, beats[rank].number, now) > self.timeout:
                return rank
        if not running or any(beats[rank].busy for rank in running):
            self._least = (-1, now)
            return None
        last = min(running, key=lambda rank: beats[rank].progress)
        if self._least[0] != beats[last].progress:
            self._least = (beats[last].progress, now)
        return last if now - self._least[1] > self.timeout else None

    @staticmethod
    def _unchanged(known: dict[int, Any], rank: int, value: Any, now: float) -> float:
        if rank not in known or known[rank][0] != value:
            known[rank] = (value, now)
        return now - float(known[rank][1])


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
        judge, keys = Judge(self.timeout), [str(rank) for rank in range(self._trainer.world_size)]
        beats: list[Beat] = []
        last_answer = time.monotonic()
        while not self._ended.wait(self._interval):
            now = time.monotonic()
            try:
                self._publish()
                if self._store.check(keys):
                    beats = [Beat.from_text(value.decode()) for value in self._store.multi_get(keys)]
                    last_answer = now
            except RuntimeError:  # rank zero, or the launcher that holds the store, does not answer
                if now - last_answer > self.timeout and not self._ended.is_set():
                    self._give_up(f"the store of the ranks has not answered for {self.timeout:g} s")
                continue
            rank = judge.observe(beats, now) if beats else None
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
    given = getattr(trainer.strategy, "_timeout", None)
    return 0.8 * float(given.total_seconds()) if given not in (None, default_pg_timeout) else DEFAULT_TIMEOUT


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
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        use_libuv=getattr(store, "libuvBackend", True),
    )
    return RankWatch(trainer, pulse, dist.PrefixStore(f"lightning_sgmcmc/{next(_fits)}", own))
