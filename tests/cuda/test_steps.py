"""`Trainer.fit` on a stand-in for a CUDA device: no mixed devices, no wait of the host, few launches.

The stand-in registers a torch backend, so the fits run in a process of their own (`cases.py`), once for each set of
cases.
"""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.cases import WITHOUT_FLOAT64
from tests.cuda.checks import CHECKS
from tests.cuda.correct import CHECKS as CORRECT
from tests.cuda.inputs import CHECKS as INPUTS
from tests.cuda.limits import LAUNCHES, MORE_WAITS_OF_A_DRAW, WAITS_OF_A_DRAW
from tests.support.paths import REPOSITORY

DEFAULT = (
    "ResNet-20, contour and clipping",
    "replica exchange",
)
DEFAULT_CORRECT = (
    "starts_on_the_device_are_drawn_by_chain",
    "resumes_with_an_lr_for_each_chain",
    "samples_are_the_chains_states",
    "batches_of_the_host_move_as_one_stack",
    "steps_in_blocks_are_the_loops",
)
WITHOUT_FLOAT64_BY_DEFAULT = ("own contour", "a_posterior_tells_what_it_tells_on_the_cpu")
LARGE = tuple(name for name in LAUNCHES if name.startswith(("ResNet-20", "cifar_sprint")))
WITHOUT_FLOAT64_SLOW = tuple(name for name in LAUNCHES if name not in (*WITHOUT_FLOAT64_BY_DEFAULT, *LARGE))
SLOW = tuple(name for name in LAUNCHES if name not in DEFAULT)
SLOW_CORRECT = tuple(name for name in CORRECT | INPUTS if name not in DEFAULT_CORRECT)

Found = dict[str, dict[str, Any]]


def _of_a_process(names: tuple[str, ...], shared: Path) -> Found:
    """Run cases in a process, once for all workers of the test run."""
    said = shared / "cases.json"
    with open(shared / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, "-m", "tests.cuda.cases", *names],
                cwd=REPOSITORY,
                env=environment,
                capture_output=True,
                text=True,
                timeout=900,
            )
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            if len(lines) != len(names):
                raise RuntimeError(f"the process ended with {done.returncode}: {done.stderr[-3000:]}")
            said.write_text(json.dumps({line["name"]: line for line in lines}))
    found: Found = json.loads(said.read_text())
    return found


def _shared(factory: pytest.TempPathFactory, name: str) -> Path:
    base = factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Found:
    without = [WITHOUT_FLOAT64 + name for name in WITHOUT_FLOAT64_BY_DEFAULT]
    return _of_a_process((*CHECKS, *DEFAULT_CORRECT, *DEFAULT, *without), _shared(tmp_path_factory, "cuda"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return _of_a_process((*SLOW_CORRECT, *SLOW), _shared(tmp_path_factory, "cuda_slow"))


@pytest.fixture(scope="module")
def slow_without_float64(tmp_path_factory: pytest.TempPathFactory) -> Found:
    names = tuple(WITHOUT_FLOAT64 + name for name in WITHOUT_FLOAT64_SLOW)
    return _of_a_process(names, _shared(tmp_path_factory, "cuda_without_float64"))


def _assert_no_error(found: dict[str, Any]) -> None:
    assert "error" not in found, found["traceback"]


def _assert_a_good_step(found: dict[str, Any]) -> None:
    """An ordinary step waits for nothing, and launches no more than its limit; a draw waits no more than its own."""
    _assert_no_error(found)
    name, ordinary = found["name"], found["ordinary"]
    assert ordinary["waits"] == 0, ordinary["by_source_line"]["waits"]
    assert ordinary["launches"] <= LAUNCHES[name], ordinary["by_source_line"]["launches"]
    drawn = found["drawn"]
    assert drawn["waits"] <= MORE_WAITS_OF_A_DRAW.get(name, WAITS_OF_A_DRAW), drawn["by_source_line"]["waits"]


@pytest.mark.parametrize("name", CHECKS)
def test_the_stand_in(default: Found, name: str) -> None:
    """The stand-in is true: aliasing, devices, generators, graphs and counts are CUDA's."""
    _assert_no_error(default[name])


@pytest.mark.parametrize("name", DEFAULT_CORRECT)
def test_a_fit_is_correct(default: Found, name: str) -> None:
    _assert_no_error(default[name])


@pytest.mark.parametrize("name", DEFAULT)
def test_a_step_waits_for_nothing(default: Found, name: str) -> None:
    _assert_a_good_step(default[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CORRECT)
def test_every_fit_is_correct(slow: Found, name: str) -> None:
    _assert_no_error(slow[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_no_step_waits(slow: Found, name: str) -> None:
    _assert_a_good_step(slow[name])


@pytest.mark.parametrize("name", WITHOUT_FLOAT64_BY_DEFAULT)
def test_a_device_needs_no_float64(default: Found, name: str) -> None:
    """As on Apple's: what needs float64 is computed on the host, and nothing else is made of it."""
    _assert_no_error(default[WITHOUT_FLOAT64 + name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_FLOAT64_SLOW)
def test_no_fit_needs_float64(slow_without_float64: Found, name: str) -> None:
    _assert_no_error(slow_without_float64[WITHOUT_FLOAT64 + name])
