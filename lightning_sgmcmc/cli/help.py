"""The short help: of the command line as a whole, and of the commands that Lightning runs."""

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import docstring_parser
import pytorch_lightning as pl

import lightning_sgmcmc
from lightning_sgmcmc import callbacks, datamodules, samplers
from lightning_sgmcmc.callbacks import SamplerCallback
from lightning_sgmcmc.cli.before_fit import TuningTrainer
from lightning_sgmcmc.cli.exits import EXIT_CODES
from lightning_sgmcmc.datamodules import ImageDataModule
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.priors import Prior
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
    "--auto": "choose prior, sampler, step sizes, temperature and weights on the validation data",
    "--budget TIME": "with --auto: time of the run, such as 90s, 10m or 2h; the number of epochs follows",
    "--objective NAME": "with --auto: nll (likelihood of new data) or ood (telling inputs of other sources)",
    "--baselines": "also train a single network and an ensemble of the same cost, and add them to results.json",
    "--seed_everything N": "seed of the run (0)",
    "--print_config": "print the configuration with all defaults, and exit",
    "--SECTION.help CLASS": "describe a class's arguments: --model.help lightning_sgmcmc.BayesianModule",
    "--help_full": "list all options, Lightning's included",
    "--debug": "show the traceback of an error",
}
ONLY_IN_FIT = ("--ckpt_path FILE", "--resume", "--auto", "--budget TIME", "--objective NAME", "--baselines")


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
    options = {o: text for o, text in OPTIONS.items() if name == "fit" or o not in ONLY_IN_FIT}
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
