"""`sgmcmc COMMAND …`: find the command, end with a documented exit code; the small commands are here."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from lightning_sgmcmc import __version__
from lightning_sgmcmc.cli.exits import Mistake, one_sentence, printable
from lightning_sgmcmc.cli.fit import SamplingCLI, run_command
from lightning_sgmcmc.cli.help import COMMANDS, command_help, overview
from lightning_sgmcmc.report.compare import compare_runs, text, write_comparison
from lightning_sgmcmc.report.page import write_report
from lightning_sgmcmc.report.run_record import RunError, find_run

DEBUG, FULL_HELP = "--debug", "--help_full"
DEFAULT = "digits_auto"
"""The configuration that `sgmcmc example` prints."""


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
        {"report": report, "compare": compare, "example": example}[name](rest)


def report(args: Sequence[str]) -> None:
    """Run `sgmcmc report`; an error prints one sentence and exits with code 2."""
    parser = argparse.ArgumentParser(
        prog="sgmcmc report", description="Write one self-contained HTML page of a finished run: tables and pictures."
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, or a folder of runs: the newest with samples")
    parser.add_argument("--output", metavar="FILE", help="the file to write (default: report.html in the run's folder)")
    parser.add_argument(
        "--parameters",
        metavar="NAME",
        nargs="+",
        help="parameters whose R-hat and ESS are reported: names or shell patterns (default: those of one element)",
    )
    options = parser.parse_args(args)
    try:
        folder, among = find_run(options.run)
        if among > 1:
            print(printable(f"{options.run} holds {among} runs; this is the newest with samples: {folder}"))
        print(printable(f"Report: {write_report(folder, options.output, options.parameters)}"))
    except (RunError, OSError) as error:
        parser.exit(2, printable(f"sgmcmc report: {error}\n"))


def compare(args: Sequence[str]) -> None:
    """Run `sgmcmc compare`; an error prints one sentence and exits with code 2."""
    parser = argparse.ArgumentParser(
        prog="sgmcmc compare",
        description="Compare runs on the same data: metrics with intervals, paired differences from the first, cost.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's folder, or a folder of runs: the newest")
    parser.add_argument(
        "--output", metavar="FILE", default="comparison.html", help="the page, .html or .md (default: comparison.html)"
    )
    options = parser.parse_args(args)
    try:
        runs = compare_runs(options.runs)
        write_comparison(runs, Path(options.output))
    except (RunError, OSError) as error:
        parser.exit(2, printable(f"sgmcmc compare: {error}\n"))
    print(printable(text(runs)), end="")
    print(printable(f"Page: {options.output}"))


def examples() -> dict[str, str]:
    """Return the configurations among the recipes, by name."""
    folder = files("lightning_sgmcmc.recipes")
    files_there = {path.name for path in folder.iterdir()}
    names = sorted(name.removesuffix(".yaml") for name in files_there if name.endswith(".yaml"))
    alone = [name for name in names if not files_there & {name, f"{name}.py"}]  # the others are a program's settings
    return {name: (folder / f"{name}.yaml").read_text(encoding="utf-8") for name in alone}


def example(arguments: Sequence[str]) -> None:
    """Run `sgmcmc example`."""
    known = examples()
    listed = "\n".join(f"  {name}: {text.splitlines()[0].removeprefix('# ')}" for name, text in known.items())
    parser = argparse.ArgumentParser(
        prog="sgmcmc example",
        description="Print a configuration that runs as it is, on data that come with scikit-learn:\n\n"
        f"  sgmcmc example > example.yaml\n  sgmcmc fit --config example.yaml\n\nexamples:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", default=DEFAULT, help=f"the example ({DEFAULT})")
    name = parser.parse_args(arguments).name
    if name not in known:
        parser.exit(2, f"sgmcmc example: there is no example {name!r}: choose from {', '.join(known)}\n")
    print(known[name], end="")
