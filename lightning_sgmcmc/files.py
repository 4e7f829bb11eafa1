"""Reading and atomic writing of files, file sizes for messages, and secrets that no file is to hold."""

import codecs
import errno
import json
import locale
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from lightning_sgmcmc.namespace import rank_zero_warn

TEMPORARY = ".sgmcmc.tmp"
"""How the names of files end that are being written."""
LEFT_OVER = 600.0
"""Seconds after which a temporary file that nobody has written to is one of a process that was killed."""
PATIENCE, PAUSE = 2.0, 0.02
"""Seconds for which a change of files is tried again on Windows, and between two tries."""
LONGEST_INTEGER = 20
"""Characters of an integer of 64 bits."""
MASK = "HIDDEN"
_WORDS = """
apikey authorization bearer credential credentials passphrase passwd password passwords pwd secret secrets signature
"""
SECRETS = frozenset(_WORDS.split())
"""Words of a name whose value is secret."""
KEYS = frozenset(("", "access", "account", "api", "auth", "license", "private", "secret", "ssh", "subscription"))
"""Words before "key" in such a name; other keys are those of data."""
VOCABULARY = frozenset(("bos", "cls", "eos", "mask", "pad", "sep", "unk"))
"""Words before "token" in the names of a tokenizer's entries."""
# Only from a word's beginning: else a text of one long word takes the square of its length.
NAMED = re.compile(r"(?<![\w.+-])(?:([\w.+-]+)[\"']?\s*[=:]\s*|--?([\w.-]+)\s+(?!-))")
VALUE = re.compile(r"(?:(?:bearer|basic|token)\s+)?(?:\"[^\"]*\"|'[^']*'|[^\s\"'&,;}\])]+)", re.IGNORECASE)
ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)|(?<=[?&]sig=)[^&\s]+")
"""The user of an address, and its signature."""
SHAPED = re.compile(r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[\w.-]{16,}")
"""Texts that services issue as secrets, by their beginnings."""
REMOTE = re.compile(r"(?!file:)[A-Za-z][\w+.:-]+://")
"""The beginning of an address; one letter is a drive of Windows, as in C://runs."""
LOCAL = re.compile(r"\Afile://(?:/(?=[A-Za-z]:[/\\]))?")
"""The beginning of an address that is a path; none stands before a drive."""


def megabytes(count: int) -> str:
    """Return a number of bytes as text, such as '12.3 MB'."""
    return f"{count / 1e6:.3g} MB"


def free_space(folder: Path) -> str:
    """Return ' (12.3 MB are free there)' for error messages about a folder, or '' if that is unknown."""
    try:
        return f" ({megabytes(shutil.disk_usage(folder).free)} are free there)"
    except OSError:
        return ""


def is_remote(path: object) -> bool:
    """Return whether a path is the address of something that is not on a local disk, such as `s3://bucket/run`."""
    return REMOTE.match(str(path)) is not None


def local_path(path: str | Path, argument: str, remedy: str) -> Path:
    """Return the absolute path of a file or folder on a local disk."""
    if is_remote(path):
        raise ValueError(f"{argument}={str(path)!r} is not on a local disk, where samples are kept: {remedy}")
    return plain_path(path).absolute()


def plain_path(path: str | Path) -> Path:
    """Return the path that a local address (`file:///…`) names, and any other path as it is."""
    return Path(without_scheme(path))


def without_scheme(path: str | Path) -> str:
    """Return the text of a path, of an address `file:///run` or `file:///C:/run` without what is no path.

    >>> without_scheme("file:///C:/run"), without_scheme("C:/run")
    ('C:/run', 'C:/run')
    """
    return LOCAL.sub("", str(path))


def is_regular(path: Path) -> bool:
    """Return whether a path is a file itself: not a link, pipe or device, and not missing."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def check_regular(path: Path, limit: int | None = None) -> None:
    """Raise unless a path is a file itself: a folder from elsewhere can hold links, and pipes that never end."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.EINVAL, "it is a link, and links are not followed: replace it by the file")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    if limit is not None and status.st_size > limit:
        raise OSError(errno.EFBIG, f"it has {megabytes(status.st_size)}, more than {megabytes(limit)}")


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """Return the content of a file; see `check_regular`."""
    check_regular(path, limit)
    return path.read_bytes()


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON document that may come from anywhere."""
    try:
        return json.loads(content, parse_int=_parse_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _parse_integer(text: str) -> int:
    if len(text) > LONGEST_INTEGER:
        raise ValueError(f"it has a number of {len(text)} digits, {text[:10]}…, and integers have at most 64 bits")
    return int(text)


def text_of(content: bytes) -> str:
    """Return the text of a file that a user may have written: UTF-8, UTF-16 with its mark, as PowerShell's ">" writes,
    or the system's own encoding."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        own = locale.getpreferredencoding(False)
        if codecs.lookup(own).name in ("utf-8", "ascii"):
            raise
        return content.decode(own)


def write_atomically(path: Path, content: bytes | memoryview | Callable[[BinaryIO], Any], durable: bool = True) -> None:
    """Write a file into an existing folder so that a reader sees either the old or the new content, which may be
    written by a function; see `replacing`."""
    with replacing(path) as temporary, open(temporary, "xb") as file:
        if callable(content):
            content(file)
        else:
            file.write(content)
        if durable:
            flush(file)
    if durable:
        flush_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a temporary file of this thread that replaces `path` at the end, unless there is an error."""
    writer = f"{os.getpid():x}-{threading.get_ident():x}"
    # Hidden, since callers look for files by the beginnings of names; cut, since file systems limit their lengths.
    temporary = path.with_name(f".{path.name[:40]}.{writer}{TEMPORARY}")
    try:
        temporary.unlink(missing_ok=True)  # of an earlier process, or a link that someone left there
        yield temporary
        patiently(partial(os.replace, temporary, path))
    except Exception as error:
        if isinstance(error, OSError) and error.strerror and error.filename2 is None:  # names none or another
            error.filename = str(path)
        with suppress(OSError):  # of a disk that is read-only by now
            temporary.unlink(missing_ok=True)
        raise


def patiently(change: Callable[[], Any]) -> None:
    """Rename or delete a file or folder; again for some time where Windows refuses, since a reader, a virus scanner or
    an indexer may have opened it."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            change()
            return
        except PermissionError:
            if os.name == "posix" or time.monotonic() > until:  # which allows that for open files
                raise
        time.sleep(PAUSE)


def remove_left_over(folder: Path) -> None:
    """Delete the temporary files of writers that were killed; those of the last ten minutes may be in use, and stay."""
    for path in folder.glob(f".*{TEMPORARY}"):
        try:
            if is_regular(path) and time.time() - path.stat().st_mtime > LEFT_OVER:
                path.unlink()
        except OSError:  # another process has renamed or deleted it
            continue


def make_folder(path: Path) -> None:
    """Make a folder and its parents where they are missing, so that they survive a power failure."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush_folder(folder.parent)


def write_output(path: Path, content: bytes) -> None:
    """Write a file of a run's folder completely or not at all; the folder is made if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content, durable=False)


@contextmanager
def warning_of_failed_writes() -> Iterator[None]:
    """Warn where what a fit reports cannot be written: its samples may be in memory, so it goes on."""
    try:
        yield
    except OSError as error:
        folder = Path(str(error.filename)).parent
        rank_zero_warn(
            f"{error.filename} could not be written: {error.strerror}{free_space(folder)}; the run continues without "
            "it, and its samples do not need it: free or repair the disk."
        )


def free_name(path: Path) -> Path:
    """Return `path`, or the first of `name-1.suffix`, `name-2.suffix`, … that does not exist."""
    number, free = 0, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def flush(file: Any) -> None:
    """Flush an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Flush a folder's list of files to the disk."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- secrets ----------------------------------------------------------------------------------------------------------


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a program's arguments with `MASK` for the values of those that are secret by name."""
    kept: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        before = kept[-1] if kept else ""
        if equals and is_secret(name):
            kept.append(f"{name}={MASK}")
        elif before.startswith("-") and "=" not in before and is_secret(before) and not argument.startswith("--"):
            kept.append(MASK)
        else:
            kept.append(text_without_secrets(argument))
    return kept


def text_without_secrets(text: str) -> str:
    """Return a text with `MASK` for values that follow a secret's name, users of addresses, and what looks issued."""
    parts, place = [], 0
    for named in NAMED.finditer(text):
        value = VALUE.match(text, named.end()) if is_secret(named[1] or named[2]) else None
        if value is not None and named.start() >= place:
            parts += [text[place : named.end()], MASK]
            place = value.end()
    return SHAPED.sub(MASK, ADDRESS.sub(MASK, "".join([*parts, text[place:]])))


def is_secret(name: str) -> bool:
    """Return whether a setting of this name, such as `hf_token` or `--logger.apiKey`, has a value to keep secret."""
    words = [word.lower() for word in re.split(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])", name)]
    before, last = ["", *words][-2:]
    if SECRETS & set(words):
        return True
    return (last == "token" and before not in VOCABULARY) or (last == "key" and before in KEYS)
