"""Shared set-up: one thread, no W&B service, no chatter."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Autograd starts before any compilation, which registers a device: with one it would start threads, and tests that fork
# would fail.
torch.ones((), requires_grad=True).backward()


@pytest.fixture(autouse=True)
def _quiet_and_contained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run each test in a folder of its own, with one thread and without a seed left over from another test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
