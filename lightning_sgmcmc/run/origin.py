"""Where a run comes from: its command, versions, commit and machine, so that it can be repeated."""

import functools
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_sgmcmc.files import without_secrets

PACKAGES = ("lightning-sgmcmc", "torch", "pytorch-lightning")
INERT = re.compile(
    r"core\.(repositoryformatversion|filemode|bare|logallrefupdates|ignorecase|precomposeunicode|symlinks|autocrlf|eol)"
    r"|extensions\.(objectformat|refstorage)|remote\..*\.(url|pushurl|fetch|tagopt)|branch\..*|user\.(name|email)"
    r"|submodule\..*\.(url|active)|submodule\.active|(pull|push|init|color|advice)\..*",
    re.DOTALL,
)
"""Entries of a repository's configuration that make `git status` start no program and read no other folder."""


@functools.cache
def origin_of_run() -> dict[str, Any]:
    """Return plain data: date, command, versions, machine, and the working folder's commit, None if it is not known.

    They are those of the first call in the process, since files may change while it runs.
    """
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": shlex.join([program, *without_secrets(sys.argv[1:])]),
        "commit": commit(),
        "versions": versions((*PACKAGES, "numpy")),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def commit(folder: Path | None = None) -> str | None:
    """Return the git commit of a folder, "… with changes" if files differ from it, and None if it is not known.

    A working folder can come from elsewhere, and its `.git/config` can name programs. Git compares the files only if
    that configuration has no other entries than `INERT`; else the commit is followed by ", changes not looked for".

    Args:
        folder: the folder; None is the working folder.
    """
    try:
        name = _git(folder, "rev-parse", "HEAD")
        keys = _git(folder, "config", "--local", "--list", "--name-only", "-z").split("\0")
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    try:
        if not all(INERT.fullmatch(key) for key in keys if key):
            return f"{name}, changes not looked for"
        # Submodules have configurations of their own.
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return f"{name}, changes not looked for"
    return f"{name} with changes" if changed else name


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Return the versions of packages, None for one that runs from a copy of its source, and of "python".

    Args:
        packages: their names.
    """
    return {**{name: _version(name) for name in packages}, "python": platform.python_version()}


def _git(folder: Path | None, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
    found = subprocess.run(
        ["git", "--no-pager", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=5,
        check=True,
    )
    return found.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
