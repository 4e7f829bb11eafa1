"""Where a run comes from: its command, versions, commit and machine, so that it can be repeated."""

import functools
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("lightning-sgmcmc", "torch", "pytorch-lightning")


@functools.cache
def origin_of_run() -> dict[str, Any]:
    """Return plain data: date, command, versions, machine, and the working folder's commit, None if it is not known.

    They are those of the first call in the process, since files may change while it runs.
    """
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": shlex.join([program, *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions((*PACKAGES, "numpy")),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def commit(folder: Path | None = None) -> str | None:
    """Return the git commit of a folder, "… with changes" if files differ from it, and None if it is not known.

    Args:
        folder: the folder; None is the working folder.
    """
    try:
        name = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{name} with changes" if changed else name


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Return the versions of packages, None for one that runs from a copy of its source, and of "python".

    Args:
        packages: their names.
    """
    return {**{name: _version(name) for name in packages}, "python": platform.python_version()}


def _git(folder: Path | None, *command: str) -> str:
    found = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, timeout=5, check=True)
    return found.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
