"""The lock of a store's folder, which other processes see, and shared locks of other folders."""

import contextlib
import errno
import importlib
import os
import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

from lightning_sgmcmc.files import check_regular, is_regular, make_folder
from lightning_sgmcmc.namespace import rank_zero_warn

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]
msvcrt: Any = None
with contextlib.suppress(ImportError):  # not Windows
    msvcrt = importlib.import_module("msvcrt")

LOCK = ".lock"
LOCKED_BYTE = 2**30
"""Windows locks bytes, here one behind the content, which others may then read."""
HELD_ELSEWHERE = (errno.EACCES, errno.EAGAIN)
TRIES, PAUSE = 6, 0.02
"""A reader that looks whether a fit is running holds the lock for some microseconds: so it is tried again."""
MOST_TRIES = 100
"""Times that a folder is taken which other fits move aside."""


class InUseError(RuntimeError):
    """Another fit writes to the folder."""


class StoreLock:
    """Holds a folder for one fit, by a lock of the open file `.lock`; the folder is made if needed.

    Another fit of this process raises an error like one of another process. The lock ends with the process;
    processes forked later do not have it. Where the file system has none, only fits of this process raise an error.
    """

    def __init__(self, path: Path) -> None:
        self._file: Any = None
        for remaining in reversed(range(MOST_TRIES)):
            try:
                make_folder(path)
                if os.path.lexists(path / LOCK):
                    check_regular(path / LOCK)  # not a link to another file, which would be emptied
                self._file = open(path / LOCK, "ab+", buffering=0)  # noqa: SIM115, it stays open as long as the lock is held
            except OSError as error:
                if isinstance(error, FileNotFoundError) and remaining:
                    continue  # the folder was moved meanwhile
                raise unusable(path, error) from error
            self._take(path)
            if self._is_file_of(path):
                break
            self._file.close()  # likewise
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n".encode())
        _HELD.add(self)

    def _take(self, path: Path) -> None:
        try:
            _lock(self._file)
        except OSError as error:
            if error.errno in HELD_ELSEWHERE or any(held._is_file_of(path) for held in list(_HELD)):
                self._file.seek(0)
                owner = self._file.read().decode(errors="replace").strip() or "unknown"
                self._file.close()
                by = "another fit of this process" if owner == str(os.getpid()) else f"another process (id {owner})"
                raise InUseError(
                    f"the sample store {path} is in use by {by}, and two runs in one store would mix their samples: "
                    "wait until it ends, or pass another dirpath"
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
        """Let other fits use the folder."""
        _HELD.discard(self)
        if self._file.closed:
            return
        with contextlib.suppress(OSError):  # a disk that fails must not hide why the fit has ended
            self._file.truncate(0)
            _unlock(self._file)
        self._file.close()


_HELD: WeakSet[StoreLock] = WeakSet()
"""The locks of this process."""


def _lock(file: Any) -> None:
    for remaining in reversed(range(TRIES)):
        try:
            _lock_at_once(file)
            return
        except OSError as error:
            if error.errno not in HELD_ELSEWHERE or not remaining:
                raise
        time.sleep(PAUSE)


def _lock_at_once(file: Any, shared: bool = False) -> None:
    """Lock an open file, or raise OSError; Windows has no shared locks of this kind."""
    if fcntl is not None:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    elif msvcrt is not None:
        os.lseek(file.fileno(), LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        raise OSError(errno.ENOTSUP, "this system has no file locks")


def _unlock(file: Any) -> None:
    """Unlock a file that is about to be closed, which Windows does some time later."""
    if fcntl is None and msvcrt is not None:
        os.lseek(file.fileno(), LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)


def _leave_all_to_parent() -> None:
    for held in list(_HELD):
        held._file.close()
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def is_in_use(path: Path) -> bool:
    """Return whether a fit, of this process or another one, holds a folder; False where that cannot be known."""
    if not is_regular(path / LOCK):
        return False
    try:
        with open(path / LOCK, "rb", buffering=0) as file:
            if file.read(1):  # a fit that has ended leaves it empty, a killed one does not
                _lock_at_once(file, shared=True)
                _unlock(file)
    except OSError as error:
        return error.errno in HELD_ELSEWHERE
    return False


def lock_shared(folder: Path) -> int | None:
    """Note that this process uses a folder, once no other is about to remove it: return a descriptor with a shared
    lock, which ends when it is closed; None without locks."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def lock_alone(descriptor: int | None) -> bool:
    """Return whether no other process has a lock by `lock_shared` of the same folder; later ones then wait."""
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def unusable(path: Path, error: OSError) -> OSError:
    """Return the error for a folder where no store can be written."""
    message = f"no sample store can be created at {path}: {error.strerror}; make it a writable folder, or"
    return OSError(error.errno, f"{message} pass another dirpath")
