"""Faults at every file operation, kills at every tenth of a second, exceptions in every hook: nothing lost or mixed.

All of it: `uv run pytest -m slow -n 0 -s tests/fit/test_attack.py` (about ten minutes; `-s` prints the figures).
"""

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.fit.folder import newest_checkpoint
from lightning_sgmcmc.posterior.lock import is_in_use
from tests.fit.test_after_an_exception import HOOKS, Failing
from tests.support.recorders import Each
from tests.support.small_run import data, module
from tests.support.trainers import quiet_trainer

HALF, WHOLE = 4, 8
Samples = dict[tuple[int, int], torch.Tensor]


def fit(folder: Path, steps: int = WHOLE, *callbacks: pl.Callback, first: bool = False) -> None:
    """Begin a run of two chains, or go on from its newest checkpoint; other callbacks come first or last."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    saver = pl.callbacks.ModelCheckpoint(folder / "checkpoints", every_n_train_steps=3, save_last=True)
    own = [SamplingSchedule(every_n_steps=2), SampleCollector(folder / "samples")]
    own = [*callbacks, *own, saver] if first else [*own, *callbacks, saver]
    trainer = quiet_trainer(max_steps=steps, callbacks=own, enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(
        module(num_chains=2, seed=1),
        datamodule=DatasetDataModule(data(), batch_size=8),
        ckpt_path=newest_checkpoint(trainer),
    )


def samples_in(folder: Path) -> Samples:
    """Return a store's samples, all of which are read; none where there is no store yet."""
    if not (folder / "samples" / "manifest.jsonl").exists():
        return {}
    found = Posterior.load(folder / "samples")
    return {(s.step, s.chain): torch.cat([t.flatten() for t in s.parameters.values()]) for s in found}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """The samples of the run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    fit(folder)
    return samples_in(folder)


def in_a_fork(do: Callable[[], Any]) -> int:
    """Return the exit code of a process that does this: 1 after an exception, -9 for one that was killed."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = 1
        try:
            do()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check(folder: Path, whole: Samples, before: Samples) -> None:
    """What was written is there and right, and the run goes on to the samples of the undisturbed one."""
    found = samples_in(folder)
    kept = {place for aside in folder.glob("samples-*") for place in _places(aside)}
    assert set(before) <= set(found) | kept, "lost"
    assert all(torch.equal(found[place], whole[place]) for place in found), "mixed"
    assert in_a_fork(lambda: fit(folder)) == 0
    found = samples_in(folder)
    assert list(found) == list(whole)
    assert all(torch.equal(found[place], whole[place]) for place in found), "mixed"


def _places(store: Path) -> set[tuple[int, int]]:
    if not (store / "manifest.jsonl").exists():
        return set()
    return {(record.step, record.chain) for record in Posterior.load(store).records}


# -- faults at every file operation ------------------------------------------------------------------------------------


class Faulty:
    """Counts the calls of a file operation, and lets one of them fail.

    Args:
        name: of the function in `os`.
        kind: "error", "full disk", "kill before" or "kill after".
        at: the number of the call, from 1; 0 for none.
    """

    def __init__(self, name: str, kind: str = "error", at: int = 0) -> None:
        self._real, self._kind, self._at, self.calls = getattr(os, name), kind, at, 0
        setattr(os, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls != self._at:
            return self._real(*arguments, **options)
        if self._kind == "kill after":
            with contextlib.suppress(OSError):
                self._real(*arguments, **options)
        if "kill" in self._kind:
            os.kill(os.getpid(), signal.SIGKILL)
        number = errno.ENOSPC if self._kind == "full disk" else errno.EIO
        raise OSError(number, os.strerror(number))


OPERATIONS = ("replace", "fsync", "unlink", "link", "mkdir")
FAULTS = ("error", "full disk", "kill before", "kill after")


def calls_of(operation: str, folder: Path, begun: Callable[[Path], Any]) -> int:
    """Return how often a run, or its second half, calls an operation."""
    begun(folder)

    def count() -> None:
        faulty = Faulty(operation)
        fit(folder)
        (folder / "calls").write_text(str(faulty.calls))

    assert in_a_fork(count) == 0
    return int((folder / "calls").read_text())


def begin(folder: Path) -> None:
    folder.mkdir()


def begin_half(folder: Path) -> None:
    """Make the first part of a run, which has samples after its newest checkpoint."""
    folder.mkdir()
    fit(folder, HALF)


@pytest.mark.parametrize("begun", [begin, begin_half], ids=["fit", "resume"])
@pytest.mark.parametrize(
    ("operations", "stride"),
    [
        pytest.param(OPERATIONS[:2], 50, id="some"),
        *(pytest.param((name,), 1, id=f"every {name}", marks=pytest.mark.slow) for name in OPERATIONS),
    ],
)
def test_a_fault_at_every_file_operation(
    tmp_path: Path, whole: Samples, begun: Callable[[Path], Any], operations: tuple[str, ...], stride: int
) -> None:
    places = [
        (operation, kind, at)
        for operation in operations
        for at in range(1, calls_of(operation, tmp_path / f"count-{operation}", begun) + 1)
        for kind in FAULTS
    ][::stride]
    for number, (operation, kind, at) in enumerate(places):
        folder = tmp_path / str(number)
        begun(folder)
        before = samples_in(folder)

        def disturbed(folder: Path = folder, operation: str = operation, kind: str = kind, at: int = at) -> None:
            Faulty(operation, kind, at)
            fit(folder)

        code = in_a_fork(disturbed)
        assert code in ((-signal.SIGKILL,) if "kill" in kind else (0, 1)), (operation, kind, at)
        check(folder, whole, before)
    print(f"{begun.__name__}, {', '.join(operations)}: {len(places)} faults, 0 lost, 0 mixed")


# -- kills -------------------------------------------------------------------------------------------------------------


def moments(begun: Callable[[Path], Any], every: float) -> Iterator[float]:
    """Yield the moments of a run that takes 2 s, or of its second half."""
    number, end = 1, 1.2 if begun is begin_half else 2.4
    while every * number < end:
        yield every * number
        number += 1


@pytest.mark.parametrize("begun", [begin, begin_half], ids=["fit", "resume"])
@pytest.mark.parametrize("every", [pytest.param(0.9, id="some"), pytest.param(0.1, id="all", marks=pytest.mark.slow)])
def test_a_kill_at_every_tenth_of_a_second(
    tmp_path: Path, whole: Samples, begun: Callable[[Path], Any], every: float
) -> None:
    slow = Each("on_train_batch_end", lambda *_: time.sleep(0.25) or 0)
    kills = 0
    for number, moment in enumerate(moments(begun, every)):
        folder = tmp_path / str(number)
        begun(folder)
        before = samples_in(folder)
        child = os.fork()
        if not child:
            fit(folder, WHOLE, slow)
            os._exit(0)
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        check(folder, whole, before)
    print(f"{begun.__name__}: {kills} kills, 0 lost, 0 mixed")
    assert kills > 0


# -- exceptions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [KeyboardInterrupt, *(pytest.param(k, marks=pytest.mark.slow) for k in (RuntimeError, MemoryError, SystemExit))],
)
@pytest.mark.parametrize("hooks", [pytest.param(7, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_an_exception_in_every_hook(tmp_path: Path, whole: Samples, hooks: int, kind: type[BaseException]) -> None:
    """First and last of the callbacks: the folder is free again, what was written is right, and the run goes on."""
    raised = 0
    for number, hook in enumerate(HOOKS[::hooks]):
        for first in (True, False):
            folder, failing = tmp_path / f"{number}-{first}", Failing(hook, kind)
            folder.mkdir()
            with contextlib.suppress(kind, SystemExit):
                fit(folder, WHOLE, failing, first=first)
            raised += failing.has_raised
            assert not is_in_use(folder / "samples")
            check(folder, whole, {})
    print(f"{kind.__name__}: {raised} exceptions, 0 lost, 0 mixed")
    assert raised >= 2 * len(HOOKS[::hooks]) - 8  # this run has no validation
