"""Messages of errors as one sentence; those of jsonargparse have up to 60 lines."""

import argparse
import importlib
import inspect
import re

import pytorch_lightning as pl

from lightning_sgmcmc.checks import similar

KEY = re.compile(r'Parser key "(.+)":')
CLASS = re.compile(r"Problem with given class_path '(.+)':")
NOT_ACCEPTED = re.compile(r"(?:Option|Key) '(.+?)' is not (?:accepted|expected)")
NO_ATTRIBUTE = re.compile(r"module '.+?' has no attribute '.+?'")
EXPECTED_TYPE = re.compile(r"Expected an? (.+)")
SUBCOMMAND = re.compile(r"Subcommand '.+?' does not accept option '(.+?)'")
REQUIRED = re.compile(r"the following arguments are required: (.+)")
TYPES = {
    "float": "a number",
    "int": "a whole number",
    "str": "a text",
    "bool": "true or false",
    "Sequence": "a list",
    "Mapping": "a mapping",
}
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
    """Return jsonargparse's message as one sentence: the key, the class, and the reason.

    Args:
        message: the message, with nested reasons on lines of their own.
    """
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
        if kind := EXPECTED_TYPE.match(text):
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
    if found := NO_ATTRIBUTE.search(text):
        path = _class_path(text) or given_class
        return f"there is no class {path}{similar(path.rpartition('.')[2], _names(path.rpartition('.')[0]))}"
    if text.startswith("No module named"):
        return f"{given_class} cannot be imported: {text}"
    if text.startswith("Import path "):
        return text.replace("Import path ", "").replace("does not correspond to a subclass of", "is not a")
    return text


def _class_path(text: str) -> str:
    found = re.search(r"class_path='([^']+)'", text)
    return found[1] if found else ""


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
