"""Secrets in texts that a run writes: passwords, tokens and keys, told by their names or their form."""

import re
from collections.abc import Sequence

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
NAMED = re.compile(r"([\w.+-]+)[\"']?(?:\s*[=:]\s*)|--?([\w.-]+)\s+(?!-)")
VALUE = re.compile(r"(?:(?:bearer|basic|token)\s+)?(?:\"[^\"]*\"|'[^']*'|[^\s\"'&,;}\])]+)", re.IGNORECASE)
ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)|(?<=[?&]sig=)[^&\s]+")
"""The user of an address, and its signature."""
SHAPED = re.compile(r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[\w.-]{16,}")
"""Texts that services issue as secrets, by their beginnings."""


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return a program's arguments with `MASK` for the values of those that are secret by name, and of others' parts.

    Args:
        arguments: as in `sys.argv`.
    """
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
