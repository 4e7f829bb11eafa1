"""The pages' programs run on two ranks, as they are written: with their order of callbacks, and without a seed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import code_blocks
from tests.docs.test_readme import README, lines_of_readme
from tests.support.paths import REPOSITORY

PREAMBLE = """
import os
import pytorch_lightning as pl

os.environ.setdefault("MASTER_PORT", "{port}")
_init = pl.Trainer.__init__


def _on_two_ranks(self, **options):
    _init(self, **options | {{"accelerator": "cpu", "devices": 2, "strategy": "{strategy}"}})


if __name__ == "__main__":
    pl.Trainer.__init__ = _on_two_ranks
"""
"""What makes a page's trainers have two ranks."""

START = "docs/start/bayesian.py"
SHORTER = ("max_epochs=60,", "max_epochs=10,")


def program_of(page: str) -> str:
    """Return what a page runs, in the order in which it is written, without its seeds."""
    path = REPOSITORY / page
    if path == README:
        code = [lines_of_readme().replace(*SHORTER)]
    elif path.suffix == ".py":
        code = [path.read_text().replace(*SHORTER)]
    else:
        code = [block.code for block in code_blocks(path) if block.options.get("exec") == "on"]
    # Ranks share the data, so an epoch has half the steps.
    text = "\n".join(code).replace("max_epochs=10,", "max_epochs=20,")
    text = re.sub(r"^(pl\.)?seed_everything\(.*\)$", "", text, flags=re.M)
    return re.sub(r",\s*\bseed=\d+", "", text)


def run_on_two_ranks(page: str, strategy: str, folder: Path, seconds: float) -> str:
    """Run a page's program under Lightning's launcher; return what it said. It is killed after a time."""
    port = 20000 + (os.getpid() * 7 + hash((page, strategy))) % 20000
    file = folder / "program.py"
    file.write_text(PREAMBLE.format(strategy=strategy, port=port) + program_of(page))
    said = folder / "said.txt"
    environment = {name: value for name, value in os.environ.items() if name != "PL_GLOBAL_SEED"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    with said.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, str(file)],
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,  # the launcher's ranks end with it
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, f"{page} on two ranks, {strategy}: code {code} (None: hangs)\n{said.read_text()[-4000:]}"
    return said.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "strategy"), [("README.md", "ddp"), (START, "chains")])
def test_the_first_pages(page: str, strategy: str, tmp_path: Path) -> None:
    said = run_on_two_ranks(page, strategy, tmp_path, seconds=400)
    assert said.count("The average of") == 1, "the summary is printed once, by the first rank"
    assert len(list(tmp_path.rglob("manifest*"))) == 1, "one store of all ranks"


PAGES = [
    path.relative_to(REPOSITORY).as_posix()
    for path in [README, REPOSITORY / START, *sorted((REPOSITORY / "docs").rglob("*.md"))]
    if path.suffix == ".py"
    or path == README
    or any("Trainer(" in block.code for block in code_blocks(path) if block.options.get("exec") == "on")
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "chains"])
@pytest.mark.parametrize("page", PAGES)
def test_every_page(page: str, strategy: str, tmp_path: Path) -> None:
    """`pytest -m slow tests/docs/test_two_ranks.py`: an hour on one core."""
    run_on_two_ranks(page, strategy, tmp_path, seconds=600)
