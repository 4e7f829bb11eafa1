"""Runs of a recipe side by side in other processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
from pathlib import Path
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.results import Options
from tests.recipes.test_jobs import busy
if __name__ == "__main__":
    run_jobs(busy, [(0,), (1,)], Options(Path({folder!r}), Path("data")), in_turn=False)
"""


def busy(number: int, options: object) -> None:
    """Write the process's id, and compute for ten minutes."""
    folder: Path = options.out  # type: ignore[attr-defined]
    (folder / f"{number}-{os.getpid()}").touch()
    time.sleep(600)


def is_running(process: int) -> bool:
    """Return whether a process is there and not a zombie."""
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_signal_to_a_recipe_ends_its_workers(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(folder=str(tmp_path)))
    repository = str(Path(__file__).parents[2])
    recipe = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")], env=os.environ | {"PYTHONPATH": repository}
    )
    workers: list[int] = []
    try:
        end = time.monotonic() + 120
        while not workers:
            assert time.monotonic() < end
            assert recipe.poll() is None
            workers = [int(path.name.partition("-")[2]) for path in tmp_path.glob("*-*")]
            time.sleep(0.05)
        recipe.send_signal(number)
        assert recipe.wait(60) == -number
        end = time.monotonic() + 60
        while any(map(is_running, workers)):
            assert time.monotonic() < end, "the workers run on"
            time.sleep(0.05)
    finally:
        recipe.kill()
        for worker in filter(is_running, workers):
            os.kill(worker, signal.SIGKILL)
