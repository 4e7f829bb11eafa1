"""Parse the commands of the documentation by the real command line, without running them."""

import importlib
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_sgmcmc import cli
from lightning_sgmcmc.cli import SamplingCLI, commands
from lightning_sgmcmc.cli.commands import DEFAULT, examples
from lightning_sgmcmc.cli.fit import run_command
from tests.docs.markdown import code_blocks, inline_code
from tests.support.paths import REPOSITORY

SHELLS = ("", "console", "bash", "sh", "shell")
ENDS = re.compile(r"[|>&;#]")
START = re.compile(r"(?:^|[\s`(])(?:(sgmcmc)|python3? -m ((?:recipes|tests|lightning_sgmcmc)[\w.]*))(?=\s|$)")
EXAMPLE = re.compile(r"sgmcmc example ?(\w*) > (\S+)")


class _Parsed(BaseException):
    """Ends a command after its arguments were parsed."""


def commands_of(path: Path) -> Iterator[str]:
    """Return the commands of the library in a page: in blocks of shells, then in inline code, which may omit --config.

    Args:
        path: a Markdown file.
    """
    for block in code_blocks(path):
        if block.language in SHELLS:
            for line in re.sub(r" *\\\n\s*", " ", block.code).splitlines():
                yield from _commands_in(line)
    for code in inline_code(path):
        if code.startswith(("sgmcmc ", "uv run sgmcmc ", "python -m ", "uv run python -m ")):
            for command in _commands_in(code):
                words = command.split()
                bare = len(words) > 2 and words[1] in SamplingCLI.subcommands() and "--config" not in words
                yield f"{command} --config" if bare else command


def _commands_in(line: str) -> Iterator[str]:
    found = START.search(line)
    if found is not None and not line.lstrip().startswith("#"):
        rest = ENDS.split(line[found.end() :])[0].replace("…", " ").strip()
        yield f"{found[1] or found[2]} {rest}".strip()


def configurations(path: Path) -> dict[str, str]:
    """Return the example that a page writes to each file name, by `sgmcmc example NAME > FILE`."""
    return {file: name or DEFAULT for name, file in EXAMPLE.findall(path.read_text(encoding="utf-8"))}


def check(command: str, known: dict[str, str], folder: Path) -> None:
    """Parse a command as the command line does.

    A configuration that the page does not make is the default example; `NAME` is a recipe's name.

    Args:
        command: "sgmcmc" or a module, with its arguments.
        known: the example of each configuration's file name.
        folder: an empty folder for the configurations.

    Raises:
        ValueError: if it does not parse.
    """
    program, *words = shlex.split(command)
    if program != "sgmcmc":
        _check_module(program)
        if program != "recipes":
            return
        words = ["recipe", *words]
    if not words or (words[0] == "compare" and words[1:] == []) or words == ["recipe", "NAME"]:
        return  # the command's name in a sentence
    kept = [_local(word, previous, known, folder) for previous, word in zip(["", *words], words, strict=False)]
    if len(kept) == 1 and kept[0] in cli.commands.COMMANDS:
        return  # likewise
    if kept[-1] in ("--config", "-c"):
        kept.append(str(_written(DEFAULT, folder)))
    try:
        _parse(kept)
    except SystemExit as end:
        if end.code not in (0, None):
            raise ValueError(f"{command!r} ends with code {end.code}") from end
    except Exception as error:
        raise ValueError(f"{command!r}: {error}") from error


def _check_module(name: str) -> None:
    path = REPOSITORY.joinpath(*name.split("."))
    if not path.is_dir() and not path.with_suffix(".py").is_file():
        raise ValueError(f"python -m {name}: there is no such module")


def _local(word: str, previous: str, known: dict[str, str], folder: Path) -> str:
    """Return a word with a configuration that exists, or a recipe's name for NAME."""
    option, equals, value = word.partition("=")
    if option in ("--config", "-c") and equals:
        return f"{option}={_written(known.get(value, Path(value).stem), folder)}"
    if previous in ("--config", "-c"):
        return str(_written(known.get(word, Path(word).stem), folder))
    return DEFAULT if word == "NAME" else word


def _written(name: str, folder: Path) -> Path:
    texts = examples()
    path = folder / f"{name if name in texts else DEFAULT}.yaml"
    if not path.exists():
        path.write_text(texts[path.stem], encoding="utf-8")
    return path


@cache
def _lightning_parser(command: str) -> Any:
    """Return the parser of a command that Lightning runs; building it takes as long as using it."""
    found = []

    def stop(self: SamplingCLI, parser: Any, arguments: Any) -> None:
        found.append(parser)
        raise _Parsed

    with patch.object(SamplingCLI, "parse_arguments", stop), suppress(_Parsed):
        run_command([command])
    return found[0]


def _parse(words: list[str]) -> None:
    """Parse the arguments; what the command would do is replaced by nothing."""
    if words[0] in SamplingCLI.subcommands() and not {"-h", "--help", "--help_full"} & set(words):
        _lightning_parser(words[0]).parse_args([word for word in words if word != "--debug"])
        return
    with ExitStack() as stack:
        for module, name, result in (
            (commands, "find_run", (Path(), 1)),
            (commands, "write_report", Path()),
            (commands, "compare_runs", []),
            (commands, "write_comparison", None),
            (commands, "text", ""),
        ):
            stack.enter_context(patch.object(module, name, lambda *given, result=result: result))
        recipes: Any = importlib.import_module("lightning_sgmcmc.recipes.__main__")
        stack.enter_context(patch.object(recipes, "run", lambda *given: None))
        cli.main(words)
