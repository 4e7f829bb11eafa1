"""The end of a command: its exit code, a user's mistake in one sentence, and no folder of a run that did nothing."""

import argparse
import difflib
import importlib
import inspect
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_sgmcmc.checks import similar
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.posterior.lock import LOCK, InUseError, is_in_use, lock_alone, lock_shared
from lightning_sgmcmc.process import printing_anything

MisconfigurationException = pl.utilities.exceptions.MisconfigurationException

FAILED, MISTAKE, NO_SAMPLES = 1, 2, 3

EXIT_CODES = """\
exit codes:
  0    the command has succeeded
  1    the run failed or was interrupted after its first step
  2    the command, its configuration, data or folders are wrong; nothing was run
  3    the run ended without a posterior sample
  143  SIGTERM ended the run"""

EXPECTED = (ValueError, TypeError, RuntimeError, OSError, ImportError, LookupError, MisconfigurationException)
"""Types of errors that a user's mistake can have; another one is a fault of the program and shows its traceback."""
KEY = re.compile(r'Parser key "(.+)":')
CLASS = re.compile(r"Problem with given class_path '(.+)':")
NOT_ACCEPTED = re.compile(r"(?:Option|Key) '(.+?)' is not (?:accepted|expected)")
NO_ATTRIBUTE = re.compile(r"module '.+?' has no attribute '.+?'")
EXPECTED_TYPE = re.compile(r"Expected an? (.+)")
SUBCOMMAND = re.compile(r"Subcommand '.+?' does not accept option '(.+?)'")
NO_PATH = re.compile(r"(?:Expected a dot import path string|Unexpected import path format): (.+)")
UNRECOGNIZED = re.compile(r"unrecognized arguments: .*?([\w./-]+\.ya?ml)\b")
REQUIRED = re.compile(r"the following arguments are required: (.+)")
TYPES = {
    "float": "a number",
    "int": "a whole number",
    "str": "a text",
    "bool": "true or false",
    "Sequence": "a list",
    "Mapping": "a mapping",
}
EXAMPLE = "lightning_sgmcmc.datamodules.TableDataModule"
NAMED = tuple(f"lightning_sgmcmc{part}" for part in (".datamodules", ".callbacks", ".samplers", ""))
"""The modules whose classes a configuration names most."""
FRAME = (
    "Does not validate against",
    "Subtypes:",
    "Errors:",
    "Given value",
    "Not a valid subclass",
    "Subclass types expect",
    "a class path (str)",
    "a dict with",
)
"""Beginnings of the lines that only frame the reason."""


class Mistake(Exception):
    """A user's mistake; its message is for the user."""


class NoSamplesError(Exception):
    """Raised if a run ends without a posterior sample."""


@contextmanager
def one_sentence(command: str, debug: bool = False, steps: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Print a user's mistake as one sentence that begins with the command, and exit with its code; other errors pass.

    After the first of a run's steps only an error of this package is one, since other code's needs its traceback.
    """
    try:
        with printing_anything():
            yield
    except Exception as error:
        begun = steps() > 0
        known = isinstance(error, Mistake | NoSamplesError | argparse.ArgumentError)
        if debug:
            traceback.print_exc()
        elif known or (isinstance(error, EXPECTED) and (not begun or _is_raised_here(error))):
            print(printable(f"{command}: {sentence(error)}"), file=sys.stderr)
            if not known:
                print("(--debug shows where it was raised)", file=sys.stderr)
        else:
            raise
        raise SystemExit(NO_SAMPLES if isinstance(error, NoSamplesError) else FAILED if begun else MISTAKE) from None


def _is_raised_here(error: Exception) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and str(place.tb_frame.f_globals.get("__name__")).startswith("lightning_sgmcmc")


# -- messages ---------------------------------------------------------------------------------------------------------


def sentence(error: BaseException) -> str:
    """Return an error's message as one sentence, with its type's name if the message is not from this package."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = str(error).strip()
    if not text:
        return type(error).__name__
    if isinstance(error, argparse.ArgumentError) or "Does not validate against" in text:
        return config_sentence(text)
    return " ".join(text.split())


def printable(text: str) -> str:
    """Return a text for a terminal: names of files and metrics may hold escape sequences, or bytes that are no text."""
    return "".join(one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in text)


def config_sentence(message: str) -> str:
    """Return jsonargparse's message as one sentence: the key, the class, and the reason."""
    keys: list[str] = []
    given_class = ""
    reason, expected, value = "", [], ""
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        if key := KEY.match(text):
            keys.append(key[1])
            text = text[key.end() :].strip()
        elif found := CLASS.match(text):
            given_class = found[1]
            continue
        if not text:
            continue
        if NO_PATH.match(text):
            reason = reason or text
        elif kind := EXPECTED_TYPE.match(text):
            if not value and "NoneType" not in kind[1]:
                expected.append(_plain_type(kind[1]))
        elif text.startswith("Given value: "):
            value = value or text.removeprefix("Given value: ")
        elif not text.startswith(FRAME) and not reason:
            reason = text
    place = ".".join(keys)
    if reason:
        said = _reason(reason, given_class)
        return f"{place}: {said}" if place else said
    if expected:
        return f"{place} must be {' or '.join(dict.fromkeys(expected))}, got {value!r}"
    return " ".join(message.split())


def _reason(text: str, given_class: str) -> str:
    name = given_class.rpartition(".")[2]
    if found := NOT_ACCEPTED.search(text):
        return f"{name} has no argument {found[1]!r}{similar(found[1], _arguments(given_class))}"
    if found := SUBCOMMAND.search(text):
        name, known = found[1], ["model", "data", "trainer", "seed_everything", "ckpt_path"]
        if name.startswith("trainer."):
            known = [f"trainer.{option}" for option in inspect.signature(pl.Trainer).parameters]
        return f"a configuration has no key {name!r}{similar(name, known)}"
    if found := REQUIRED.search(text):
        keys = [key.split(".", 1)[-1] for key in found[1].split(", ")]
        return f"the configuration has no {' and no '.join(keys)}: pass --config FILE (`sgmcmc example` prints one)"
    if found := NO_PATH.search(text):
        paths = {public: f"{module}.{public}" for module in NAMED for public in _names(module)}
        close = difflib.get_close_matches(found[1], paths, 1)
        return f"{found[1]!r} is not the path of a class, such as {paths[close[0]] if close else EXAMPLE}"
    if found := UNRECOGNIZED.search(text):
        return f"{text}; a configuration is passed as --config {found[1]}"
    if found := NO_ATTRIBUTE.search(text):
        named = re.search(r"class_path='([^']+)'", text)
        path = named[1] if named else given_class
        return f"there is no class {path}{similar(path.rpartition('.')[2], _names(path.rpartition('.')[0]))}"
    if text.startswith("No module named"):
        return f"{given_class} cannot be imported: {text}"
    if text.startswith("Import path "):
        return text.replace("Import path ", "").replace("does not correspond to a subclass of", "is not a")
    return text


def _names(module: str) -> list[str]:
    try:
        return [name for name in dir(importlib.import_module(module)) if not name.startswith("_")]
    except (ImportError, ValueError):
        return []


def _arguments(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    try:
        return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    except (ImportError, AttributeError, ValueError, TypeError):
        return []


def _plain_type(text: str) -> str:
    name = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text).replace("typing.Literal", "one of ")
    return TYPES.get(name, name)


# -- folders -----------------------------------------------------------------------------------------------------------


@contextmanager
def no_folder_left_behind(folder: Path, remedy: str, is_worthless: Callable[[], bool]) -> Iterator[None]:
    """Check that a run's folder can be written; remove it after a failure if this process made it and it is worthless.

    Loggers fill the folder before data, callbacks and network are checked. It stays if another process has it too.
    """
    made: list[Path] = []
    try:
        use = _enter(folder, made)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _remove_empty(made)
        raise Mistake(f"the run's folder {folder} cannot be written ({error.strerror}): {remedy}") from error
    try:
        yield
    except Exception as error:
        is_ours = folder in made and not isinstance(error, InUseError) and lock_alone(use)
        if is_ours and is_worthless() and not any(is_in_use(path.parent) for path in folder.rglob(LOCK)):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if use is not None:
            os.close(use)
        _remove_empty(made)


def _enter(folder: Path, made: list[Path]) -> int | None:
    """Make a folder, note what of it this process has made, and return the lock that says that it is in use."""
    while True:
        for path in [path for path in (folder, *folder.parents) if not path.exists()][::-1]:
            try:
                path.mkdir()
                made.insert(0, path)
            except FileExistsError:  # another process was faster
                continue
        try:
            use = lock_shared(folder)
            if use is None or os.path.samestat(os.fstat(use), os.stat(folder)):
                return use
            os.close(use)
        except FileNotFoundError:
            pass
        made.clear()  # another process has removed it meanwhile


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # it is not empty
            continue
