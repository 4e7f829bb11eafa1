"""A disk that is full when a certain file is written."""

import errno
from pathlib import Path

import pytest

from lightning_sgmcmc.posterior import manifest


def full_at(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Let the writing of samples' files whose name contains `part` fail as on a full disk.

    Args:
        monkeypatch: the test's.
        part: of the file's name, such as "00000008" for the sample of step 8.
    """
    write = manifest.write_atomically

    def fail(path: Path, content: bytes) -> None:
        if part in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(manifest, "write_atomically", fail)
