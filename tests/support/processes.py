"""Runs in processes of their own."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def in_a_process(target: Callable[[], Any], said: Path | None = None, timeout: float = 60) -> int:
    """Run in a process of its own; return its exit code (-9 for one killed by signal 9)."""

    def child() -> None:
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
        if said is not None:
            descriptor = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        target()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        pytest.fail("the run does not end")
    return process.exitcode
