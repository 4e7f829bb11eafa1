"""Runs of a recipe side by side in other processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from lightning_sgmcmc.recipes.shared import workers as recipe_workers

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def busy(name: object, options: object) -> None:
    """Write the process's id, and do nothing for ten minutes."""
    folder: Path = options.out  # type: ignore[attr-defined]
    (folder / f"worker-{os.getpid()}").touch()
    time.sleep(600)


def worker() -> None:
    recipe_workers.end_with_the_parent()
    Path(f"worker-{os.getpid()}").touch()
    time.sleep(600)


def recipe() -> None:
    """A recipe with one worker."""
    one = multiprocessing.get_context("fork").Process(target=worker)
    one.start()
    one.join()


def is_running(process: int) -> bool:
    """Return whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def waited_for(what: Callable[[], bool], seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def workers() -> list[int]:
    return [int(path.name.partition("-")[2]) for path in Path.cwd().glob("worker-*")]


def test_calls_share_their_processes_until_one_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies fails the jobs of its call, and the next call has new ones."""
    monkeypatch.setattr(recipe_workers, "START", "fork")  # fast, and nothing here uses torch

    def processes(job: Callable[..., object] = os.getpid, *arguments: object) -> set[object]:
        with recipe_workers.workers(None) as pool:
            return {pool.submit(job, *arguments).result() for _ in range(4)}

    with recipe_workers.LastingWorkers():
        first = processes()
        assert first & processes()
        with pytest.raises(BrokenProcessPool):
            processes(os._exit, 3)
        second = processes()
        assert not second & first
        with pytest.raises(ZeroDivisionError):
            processes(divmod, 1, 0)
        assert processes()
    assert recipe_workers.LastingWorkers.current is None
    assert not processes() & second


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_ends_with_the_recipe(number: signal.Signals) -> None:
    process = multiprocessing.get_context("fork").Process(target=recipe)
    process.start()
    assert waited_for(lambda: bool(workers()))
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == -number
    ended = waited_for(lambda: not any(map(is_running, workers())), 30)
    for one in filter(is_running, workers()):
        os.kill(one, signal.SIGKILL)
    assert ended, "the worker runs on"


PROGRAM = """
from pathlib import Path
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from tests.recipes.test_jobs import busy
if __name__ == "__main__":
    run_jobs(busy, [(0,), (1,)], Options(Path.cwd(), Path("data")), in_turn=False)
"""


@pytest.mark.slow
def test_sigterm_to_a_program_with_jobs_ends_them() -> None:
    Path("program.py").write_text(PROGRAM)
    repository = str(Path(__file__).parents[2])
    program = subprocess.Popen([sys.executable, "program.py"], env=os.environ | {"PYTHONPATH": repository})
    assert waited_for(lambda: bool(workers()))
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == -signal.SIGTERM
    assert waited_for(lambda: not any(map(is_running, workers())), 30)
