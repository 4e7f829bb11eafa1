"""`sgmcmc COMMAND …`: find the command, and end with a documented exit code."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl

from lightning_sgmcmc import __version__
from lightning_sgmcmc.cli import compare, example, report
from lightning_sgmcmc.cli.exits import Mistake, one_sentence
from lightning_sgmcmc.cli.fit import SamplingCLI, run_command
from lightning_sgmcmc.cli.help import COMMANDS, command_help, overview

DEBUG, FULL_HELP = "--debug", "--help_full"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: the arguments; None uses those of the process.

    Raises:
        SystemExit: with one of the codes in `lightning_sgmcmc.cli.exits.EXIT_CODES`, unless the command succeeds.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in given
    given = [argument for argument in given if argument != DEBUG]
    trainers: list[pl.Trainer] = []
    command = " ".join(["sgmcmc", *(given[:1] if given and given[0] in COMMANDS else [])])
    with one_sentence(command, debug, lambda: trainers[0].global_step if trainers else 0):
        _run(given, trainers)


def _run(given: list[str], trainers: list[pl.Trainer]) -> None:
    name, rest = (given[0], given[1:]) if given else ("", [])
    if name == "--version":
        print(f"lightning-sgmcmc {__version__}")
    elif name in ("-h", "--help"):
        print(overview(), end="")
    elif not name:
        raise Mistake(f"a command is missing: choose from {', '.join(COMMANDS)}, or see sgmcmc --help")
    elif name.startswith("-") and set(rest) & SamplingCLI.subcommands().keys():
        run_command(given, trainers.append)  # a configuration of several commands comes before the command
    elif name not in COMMANDS:
        raise Mistake(f"there is no command {name!r}: choose from {', '.join(COMMANDS)}")
    elif name in SamplingCLI.subcommands():
        if {"-h", "--help"} & set(rest):
            print(command_help(name), end="")
            return
        run_command([name, *("--help" if argument == FULL_HELP else argument for argument in rest)], trainers.append)
    elif name == "recipe":
        # By its name, because recipes are above the command line, which they use.
        recipes: Any = importlib.import_module("lightning_sgmcmc.recipes.__main__")
        recipes.run_recipe(rest, "sgmcmc recipe")
    else:
        {"report": report.main, "compare": compare.main, "example": example.main}[name](rest)
