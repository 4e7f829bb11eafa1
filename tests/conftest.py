"""Shared set-up: one thread, no W&B service, no chatter."""

import gc
import logging
import os
import signal
from pathlib import Path

import pytest
import torch

# Autograd starts before any compilation, which registers a device: with one it would start threads, and tests that fork
# would fail.
torch.ones((), requires_grad=True).backward()

torch.set_num_threads(1)  # for the fixtures of files too
os.fsync = lambda fd: None  # a flush guards against a failing machine only; `test_files.py` watches the calls

LEFT_BY_LIGHTNING = ("PL_GLOBAL_SEED", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
"""What an earlier trainer leaves in the environment: with a LOCAL_RANK, the next one starts no ranks and waits."""


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


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """Leave the millions of objects of imports and earlier files out of every collection of garbage."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report leaks as the process ends


@pytest.fixture(autouse=True)
def _quiet_and_contained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run each test in a folder of its own, with one thread and without what Lightning leaves in the environment.

    Ctrl-C ends the program: a shell's background jobs ignore it, and so does Lightning after a KeyboardInterrupt.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in LEFT_BY_LIGHTNING:
        monkeypatch.delenv(name, raising=False)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    torch.set_num_threads(1)
