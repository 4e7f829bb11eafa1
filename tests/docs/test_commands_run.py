"""The measurements that the pages name run at their smallest settings (`-m slow`)."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

COMMANDS = (
    "tests.cuda.step_report --chains 4 --contour --clip",
    "tests.benchmarks.chain_health --scale 0.001",
    "tests.benchmarks.chains --rounds 1 --steps 4",
    "tests.benchmarks.contour_step --rounds 1 --scale 0.01",
    "tests.benchmarks.frequency --data 1 --repeats 1",
    "tests.benchmarks.learning_coefficient --steps 20 --sizes 1",
    "tests.benchmarks.predict --rounds 1 --samples 2",
    "tests.benchmarks.readme_picture --out OUT/readme.png --epochs 10",
    "tests.benchmarks.sampler_step --rounds 1",
    "tests.benchmarks.temperature_one --tasks 'network 2-10-3' --seeds 2 --out OUT/found.json",
    "tests.benchmarks.window_weights --only 'digits MLP, 160' --seeds 1",
    "tests.benchmarks.trainer_step --networks 'MLP 784-400' --samplers SGHMC --chains 1",
)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=[command.split()[0] for command in COMMANDS])
def test_a_command_runs(command: str, tmp_path: Path) -> None:
    words = [word.replace("OUT", str(tmp_path)) for word in shlex.split(command)]
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=REPOSITORY, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
