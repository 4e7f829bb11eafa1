"""`sgmcmc COMMAND …`: find the command, end with a documented exit code; the small commands are here."""

import argparse
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import docstring_parser

import lightning_sgmcmc
from lightning_sgmcmc import __version__, callbacks, datamodules, samplers
from lightning_sgmcmc.callbacks import SamplerCallback
from lightning_sgmcmc.cli.before_fit import TuningTrainer
from lightning_sgmcmc.cli.exits import EXIT_CODES, Mistake, one_sentence, printable, sentence
from lightning_sgmcmc.cli.fit import SamplingCLI, run_command
from lightning_sgmcmc.datamodules import ImageDataModule
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import accept_both_names, pl
from lightning_sgmcmc.priors import Prior
from lightning_sgmcmc.report.compare import compare_runs, text, write_comparison
from lightning_sgmcmc.report.page import write_report
from lightning_sgmcmc.report.run_record import RunError, find_run
from lightning_sgmcmc.samplers import Sampler

WIDTH = 100
COMMANDS = {
    "fit": "sample from the posterior that a configuration describes, then test the average",
    "validate": "evaluate the newest run's samples on the validation data",
    "test": "evaluate the newest run's samples on the test data",
    "predict": "write the predictive distribution of the newest run's samples",
    "plan": "print what a fit will reach and cost, and what to call it, without training",
    "tune": "propose the setting of lr from short runs",
    "report": "write one HTML page of a run",
    "compare": "compare runs on the same data: paired differences with intervals, and cost",
    "example": "print a configuration that runs as it is",
    "recipe": "list the papers' experiments, or run one",
}
TRAINER = {
    "max_epochs": "length of the run in epochs; or max_steps, or max_time",
    "accelerator": "cpu, gpu, …",
    "devices": "number of devices; strategy: ddp, or chains for chains on each device",
    "precision": "32-true, bf16-mixed, …",
    "logger": "class path of a logger; its folder is the run's",
    "enable_progress_bar": "true or false",
}
OPTIONS = {
    "--config FILE": "the configuration, a YAML file; `sgmcmc example` prints one",
    "--ckpt_path FILE": "continue from this checkpoint",
    "--resume": "continue the newest run of this configuration, in its folder",
    "--auto": "AutoSampling, whose prior scale and weights the validation data decide",
    "--budget TIME": "with --auto: time of the run, such as 90s, 10m or 2h; the number of epochs follows",
    "--objective NAME": "with --auto: nll (likelihood of new data), ood (telling inputs of other sources) or both",
    "--baselines": "also train a single network and an ensemble of the same cost, and add them to results.json",
    "--seed_everything N": "seed of the run (0)",
    "--print_config": "print the configuration with all defaults, and exit",
    "--SECTION.help CLASS": "describe a class's arguments: --model.help lightning_sgmcmc.BayesianModule",
    "--help_full": "list all options, Lightning's included",
    "--debug": "show the traceback of an error",
}
OF_AUTO = ("--auto", "--budget TIME", "--objective NAME")
ONLY_IN_FIT = ("--ckpt_path FILE", "--resume", "--baselines")


def overview() -> str:
    """Return the help of `sgmcmc` without a command."""
    options = {"--help": "show this, or a command's help", "--version": "print the version"}
    options |= {name: text for name, text in OPTIONS.items() if name == "--debug"}
    parts = [
        "usage: sgmcmc COMMAND …\n\nBayesian deep learning by stochastic-gradient MCMC.\n",
        _section("commands", COMMANDS),
        _section("options", options),
        EXIT_CODES,
    ]
    return "\n".join(parts) + "\n"


def command_help(name: str) -> str:
    """Return the short help of a command that takes a configuration: the model's arguments first."""
    parts = [f"usage: sgmcmc {name} --config FILE [--SECTION.OPTION VALUE …]\n", _wrapped(_about(name)) + "\n"]
    if name == "fit":
        parts += [_section("model (--model.init_args.NAME VALUE)", _arguments(BayesianModule)), *_choices()]
        parts.append(_section("trainer (--trainer.NAME VALUE), of Lightning's", TRAINER))
    if name == "tune":
        parts.append(_section("tune (--NAME VALUE)", _arguments(TuningTrainer.tune, ("self", "model", "datamodule"))))
    left_out = () if name == "fit" else ONLY_IN_FIT if name == "plan" else (*ONLY_IN_FIT, *OF_AUTO)
    options = {option: text for option, text in OPTIONS.items() if option not in left_out}
    parts += [_section("options", options), EXIT_CODES]
    return "\n".join(parts) + "\n"


def _about(name: str) -> str:
    text = COMMANDS[name][0].upper() + COMMANDS[name][1:] + "."
    if name == "fit":
        return text + " An option replaces an entry of the configuration."
    if name in ("plan", "tune"):
        return text + " It takes the configuration of the fit (see `sgmcmc fit --help`)."
    return text + (
        f" It takes the configuration of the fit (see `sgmcmc fit --help`), and writes to the folder `{name}` in that "
        f"run's folder (`{name}-1`, … if there is one)."
    )


def _choices() -> Iterable[str]:
    """Return a section for each kind of part: the public classes, callbacks with a line about each."""
    for title, package, base in (
        ("samplers (lightning_sgmcmc.samplers.NAME)", samplers, Sampler),
        ("likelihoods (lightning_sgmcmc.NAME)", lightning_sgmcmc, Likelihood),
        ("priors (lightning_sgmcmc.NAME)", lightning_sgmcmc, Prior),
        ("data (--data lightning_sgmcmc.datamodules.NAME)", datamodules, pl.LightningDataModule),
    ):
        yield f"{title}:\n{_wrapped(', '.join(_subclasses(package, base)), '  ')}\n"
    lines = {
        name: textwrap.shorten(_first_sentence(inspect.getdoc(part) or ""), WIDTH - 26, placeholder=" …")
        for name, part in _subclasses(callbacks, pl.Callback).items()
    }
    yield _section("callbacks (--trainer.callbacks+ lightning_sgmcmc.callbacks.NAME)", lines)


def _subclasses(package: Any, base: type) -> dict[str, type]:
    """Return the public subclasses, without those that are only derived from."""
    known = {name: getattr(package, name) for name in package.__all__}
    abstract = (base, SamplerCallback, ImageDataModule)
    return {n: c for n, c in known.items() if inspect.isclass(c) and issubclass(c, base) and c not in abstract}


def _arguments(function: Any, left_out: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the first sentence about each argument, with its default."""
    found = {}
    parameters = inspect.signature(function).parameters
    for part in docstring_parser.parse(inspect.getdoc(function) or "").params:
        if part.arg_name in left_out or part.arg_name not in parameters:
            continue
        default = parameters[part.arg_name].default
        shown = "" if default in (None, inspect.Parameter.empty) else f" ({getattr(default, '__name__', default)})"
        found[part.arg_name] = _first_sentence(part.description or "") + shown
    return found


def _first_sentence(text: str) -> str:
    """Return the text up to the first full stop or semicolon outside of parentheses."""
    plain = " ".join(text.split())
    for end in re.finditer(r"[.;] ", plain):
        before = plain[: end.start()]
        if before.count("(") == before.count(")"):
            return before
    return plain.rstrip(".:")


def _section(title: str, lines: Mapping[str, str]) -> str:
    width = max(map(len, lines)) + 2
    said = [_wrapped(f"{name:<{width}}{text}", "  ", " " * (width + 2)) for name, text in lines.items()]
    return "\n".join([f"{title}:", *said, ""])


def _wrapped(text: str, first: str = "", later: str | None = None) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=first if later is None else later)


# -- commands ----------------------------------------------------------------------------------------------------------


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
    accept_both_names()
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
        parser.exit(2, printable(f"sgmcmc report: {sentence(error)}\n"))


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
        print(printable(text(runs)), end="")
        write_comparison(runs, Path(options.output))
    except (RunError, OSError) as error:
        parser.exit(2, printable(f"sgmcmc compare: {sentence(error)}\n"))
    print(printable(f"Page: {options.output}"))


@cache
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
