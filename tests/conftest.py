"""Shared set-up: one thread, no W&B service, no chatter."""

import functools
import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

gc.set_threshold(20_000, 5, 2)  # else collections of a fit's few cycles are a twentieth of a test's time
os.fsync = lambda fd: None  # a flush guards against a failing machine only; `test_files.py` watches the calls

LEFT_BY_LIGHTNING = ("PL_GLOBAL_SEED", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
"""What an earlier trainer leaves in the environment: with a LOCAL_RANK, the next one starts no ranks and waits."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Take one process more than there are cores: an eighth of the time tests wait for processes of their own."""
    return (yield) + 1


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import torch in a process that runs tests, not in the one that hands them out, for which the others wait."""
    if session.config.getoption("numprocesses", None):
        return
    import torch
    from lightning_fabric.utilities import registry

    # Autograd starts before any compilation, which registers a device: with one it would start threads, and tests that
    # fork would fail.
    torch.ones((), requires_grad=True).backward()
    torch.set_num_threads(1)  # for the fixtures of files too
    registry.entry_points = functools.cache(registry.entry_points)  # each trainer reads all packages' metadata


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow the parameter sets of a test that its `by_default` does not name.

    Raises:
        pytest.UsageError: if a part of `by_default` is in no set's id, where whole files are collected.
    """
    found: dict[tuple[str, str], bool] = {}
    for item in items:
        if mark := item.get_closest_marker("by_default"):
            name, _, parameters = item.nodeid.partition("[")
            parts = {part: part in parameters for part in mark.args}
            found |= {(name, part): here or found.get((name, part), False) for part, here in parts.items()}
            if not any(parts.values()):
                item.add_marker(pytest.mark.slow)
    missing = [pair for pair, here in found.items() if not here]
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"by_default has parts that no parameter set has: {missing}")


@pytest.fixture(autouse=True, scope="session")
def _few_objects() -> None:
    """Leave the millions of objects of imports out of every collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.collect()  # which counts those that are left, so that the next full collection is not far away


@pytest.fixture(autouse=True, scope="session")
def _small_pictures() -> Iterator[None]:
    """Draw at few dots per inch and once, without a layout, but for files for print: most of a short run's time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from lightning_sgmcmc import figures
    from lightning_sgmcmc.figures import logging as of_loggers

    save, few = Figure.savefig, 100

    def quickly(figure: Figure, target: Any, *, dpi: Any = "figure", **options: Any) -> None:
        if dpi != few:
            save(figure, target, dpi=dpi, **options)
            return
        engine, own = figure.get_layout_engine(), figure.dpi
        figure.set_layout_engine("none")
        figure.dpi = few
        FigureCanvasAgg(figure).print_png(target)
        figure.set_layout_engine(engine)
        figure.dpi = own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "PRINT_DPI", few)
        patch.setattr(of_loggers, "DPI", few)
        patch.setattr(Figure, "savefig", quickly)
        yield


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report leaks as the process ends


@pytest.fixture(autouse=True)
def _quiet_and_contained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run each test in a folder of its own, with one thread and without what Lightning leaves in the environment.

    Ctrl-C ends the program: a shell's background jobs ignore it, and so does Lightning after a KeyboardInterrupt.
    """
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in LEFT_BY_LIGHTNING:
        monkeypatch.delenv(name, raising=False)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    torch.set_num_threads(1)
