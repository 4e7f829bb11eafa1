"""One writer for each sample store: a lock that the operating system releases when its process ends."""

import errno
import os
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from lightning_sgmcmc.files import check_regular

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN)


class StoreLock:
    """Holds a folder for this process, by a POSIX record lock on its file `.lock`; the folder is made if needed.

    The lock ends with the process, however it ends, and processes forked later do not inherit it. Where the file system
    has no locks, a warning says so and the folder is used without one.

    Args:
        path: the folder.

    Raises:
        RuntimeError: if another process holds the folder.
        OSError: if the folder cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self._file: Any = None
        while True:
            try:
                path.mkdir(parents=True, exist_ok=True)
                if os.path.lexists(path / LOCK):
                    check_regular(path / LOCK)  # not a link to another file, which would be emptied
                self._file = open(path / LOCK, "a+")  # noqa: SIM115, it stays open as long as the lock is held
            except OSError as error:
                raise unusable(path, error) from error
            self._take(path)
            if self._is_file_of(path):
                break
            self._file.close()  # the folder was moved meanwhile
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def _take(self, path: Path) -> None:
        try:
            if fcntl is None:
                raise OSError(errno.ENOTSUP, "this system has no POSIX locks")
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD_ELSEWHERE:
                self._file.seek(0)
                owner = self._file.read().strip() or "unknown"
                self._file.close()
                raise RuntimeError(
                    f"the sample store {path} is in use by another process (id {owner}), and two runs in one store "
                    "would mix their samples: wait until it ends, or pass another dirpath"
                ) from None
            rank_zero_warn(
                f"{path} cannot be locked ({error.strerror}), so nothing prevents another process from writing there: "
                "start only one run in this folder."
            )

    def _is_file_of(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(path / LOCK))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let other processes use the folder."""
        self._file.close()


def unusable(path: Path, error: OSError) -> OSError:
    """Return the error for a folder where no store can be written."""
    message = f"no sample store can be created at {path}: {error.strerror}; make it a writable folder, or"
    return OSError(error.errno, f"{message} pass another dirpath")
