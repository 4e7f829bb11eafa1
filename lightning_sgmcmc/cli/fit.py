"""The commands of Lightning: `sgmcmc fit|validate|test|predict|plan|tune --config …`."""

import copy
import json
import os
import pydoc
import re
import shlex
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse
import yaml
from jsonargparse import Namespace
from rich.table import Table

from lightning_sgmcmc import callbacks
from lightning_sgmcmc.callbacks import AutoSampling, PredictionWriter, RunSummary, SampleCollector, recommended
from lightning_sgmcmc.chains.callback import RunCallback
from lightning_sgmcmc.chains.chains import chains_of
from lightning_sgmcmc.chains.state import SUBJECTS
from lightning_sgmcmc.chains.trainer import instances_of, is_trial, remote_root, run_folder
from lightning_sgmcmc.cli.before_fit import TuningTrainer, plan, tune
from lightning_sgmcmc.cli.exits import Mistake, NoSamplesError, no_folder_left_behind
from lightning_sgmcmc.files import (
    free_name,
    is_regular,
    is_remote,
    plain_path,
    replacing,
    text_of,
    write_atomically,
    write_output,
)
from lightning_sgmcmc.fit.checks import why_without_samples
from lightning_sgmcmc.fit.folder import (
    continue_run_of,
    evaluate_beside,
    folder_of_runs,
    newest_checkpoint,
    newest_store,
)
from lightning_sgmcmc.fit.results import (
    BASELINES,
    CHOICES,
    METHODS,
    RESULTS,
    SUMMARY,
    plain_console,
    shown_path,
    write_results,
)
from lightning_sgmcmc.fit.safeguards import samples_drawn
from lightning_sgmcmc.likelihoods import ClassLikelihood
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import cli, fabric, pl, rank_zero_info, rank_zero_warn
from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.process import silenced, without_messages
from lightning_sgmcmc.report.run_record import CONFIG

if TYPE_CHECKING:
    from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
else:
    LightningArgumentParser = cli.LightningArgumentParser
    LightningCLI = cli.LightningCLI
    SaveConfigCallback = cli.SaveConfigCallback

PACKAGE = "lightning_sgmcmc.callbacks."
OF_LIGHTNING = ("LightningCLI's args parameter", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
"""Beginnings of Lightning's warnings on how this library and Lightning itself are written, not on the run."""
EVALUATE = ("validate", "test", "predict")
"""The subcommands that read the samples of a fit."""
NOT_OF_THE_RUN = (
    *("💡 Tip:", "Seed set to", "`Trainer.fit` stopped: `max_"),
    *(f"{device} available: False" for device in ("GPU", "TPU", "HPU")),
)
"""Beginnings of Lightning's messages that no user of the command waits for."""


class SamplingCLI(LightningCLI):
    """A LightningCLI for `BayesianModule`s.

    After a fit that collected samples it tests their average, if there are test data; `fit --resume` continues the
    newest run. `validate`, `test` and `predict` use the newest run with samples and write to a new folder in it.

    Args:
        started: called with the trainer before it runs.
        commands: the subcommands that can be given, in the form of `subcommands`; all unless given. Each takes 40 ms.
        options: as for `LightningCLI`.
    """

    def __init__(
        self,
        *,
        started: Callable[[pl.Trainer], None] = lambda trainer: None,
        commands: dict[str, set[str]] | None = None,
        **options: Any,
    ) -> None:
        self._started = started
        self._held: list[RunSummary] = []
        if commands is not None:
            vars(self)["subcommands"] = lambda: commands
        super().__init__(**options)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--resume`, `--baselines`, and `--auto` with its options."""
        parser.add_argument(
            "--resume",
            action="store_true",
            help="fit: continue from the newest checkpoint of this configuration",
        )
        parser.add_argument(
            "--auto",
            action="store_true",
            help="fit, plan: AutoSampling, whose prior scale and weights the validation data decide",
        )
        parser.add_argument(
            "--baselines",
            action="store_true",
            help="fit: also train a single network and an ensemble of the same cost, for results.json",
        )
        parser.add_argument("--verbose", action="store_true", help="print all that summary.txt has")
        parser.add_argument(
            "--objective", choices=["nll", "ood", "both"], default="nll", help="with --auto: what to choose by"
        )
        parser.add_argument("--budget", default=None, help="with --auto: time of the run, such as 10m")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, and raise for options that contradict each other or name no checkpoint."""
        super().parse_arguments(parser, args)
        self._resume_command = _resume_command(args)
        subcommand = self.config.subcommand
        config = self.config[subcommand]
        path = config.get("ckpt_path")
        for option, (commands, what) in WITH.items():
            if _is_given(option, args) and subcommand not in commands:
                raise Mistake(f"{option} {what}, so it has no effect in {subcommand}: omit it")
        if config.auto and subcommand in WITH["--auto"][0]:
            choose_sampling(config, config.objective, config.budget)
        elif config.budget is not None and not config.auto:
            raise Mistake("--budget is an option of --auto: add --auto, or set trainer.max_epochs")
        elif _is_given("--objective", args) and not config.auto:
            raise Mistake("--objective is an option of --auto: add --auto, or set the objective of AutoSampling")
        entries = _entries(config.trainer.get("callbacks"))
        if subcommand in EVALUATE and not any(issubclass(_declared(entry), SampleCollector) for entry in entries):
            config.trainer.callbacks = _with_recommended(entries)
        if config.resume and path:
            raise Mistake("--resume finds the checkpoint itself: pass either --ckpt_path or --resume")
        if path and path not in ("best", "last", "hpc") and not is_remote(path):
            if not plain_path(path).exists():
                raise Mistake(f"--ckpt_path={path} does not exist: pass a checkpoint, or --resume to find the newest")
            if plain_path(path).is_file() and not zipfile.is_zipfile(plain_path(path)):
                raise Mistake(f"--ckpt_path={path} is not a complete checkpoint: pass another one")

    def _parse_ckpt_path(self) -> None:
        """Build the model from the configuration: a checkpoint's hyperparameters leave out network and prior."""

    def after_instantiate_classes(self) -> None:
        """Pass the trainer on, with the command that continues its run."""
        vars(self.trainer)["resume_command"] = self._resume_command
        self._started(self.trainer)

    def before_fit(self) -> None:
        """Hold the summary of the fit back, since a test of the samples may follow; find the checkpoint to continue."""
        summaries = [summary for summary in instances_of(self.trainer, RunSummary) if summary.show == "summary"]
        self._held = [] if self.config.fit.verbose else summaries
        for summary in summaries:
            summary.show = "all" if self.config.fit.verbose else "none"
        if not self.config.fit.resume:
            return
        folders = (remote_root(self.trainer), *(getattr(c, "dirpath", None) for c in self.trainer.checkpoint_callbacks))
        remote = next((folder for folder in folders if folder is not None and is_remote(folder)), None)
        if remote is not None:
            raise Mistake(f"--resume searches local folders, and this run's is {remote}: pass --ckpt_path={remote}/…")
        checkpoint = newest_checkpoint(self.trainer, self._named_run("fit"))
        if checkpoint is None:
            where = folder_of_runs(self.trainer)
            rank_zero_info(f"--resume found no checkpoint of an earlier run in {where}: this run starts from step 0")
            return
        rank_zero_info(f"Continuing from {checkpoint}")
        continue_run_of(self.trainer, checkpoint)
        self.config_init.fit.ckpt_path = str(checkpoint)

    def fit(self, **options: Any) -> None:
        """Fit; a run that fails before its first step leaves no folder."""
        with _own_folder(self.trainer):
            self.trainer.fit(**options)

    def after_fit(self) -> None:
        """Evaluate the collected samples on the test data."""
        module = self.model
        write_repeating_configuration(self.trainer)
        if samples_drawn(self.trainer) == 0 and not is_trial(self.trainer):
            steps = self.trainer.global_step
            why = "it made no step; raise max_epochs or max_time"
            if steps > 0:
                why = why_without_samples(self.trainer, chains_of(module).progress, steps)
            raise NoSamplesError(f"the run ended without a posterior sample: {why}")
        is_tested = module.posterior is not None and len(module.posterior) > 0 and _has_test_data(self.datamodule)
        if is_tested:
            self.trainer.test(module, datamodule=self.datamodule, verbose=False)
        has_baselines = is_tested and self.config.fit.baselines and not is_trial(self.trainer)
        for summary in self._held:
            summary.print_last(table=not has_baselines)  # theirs is the table of a run with baselines
        if has_baselines:
            run_baselines(self.trainer, module, run_command)

    def validate(self, **options: Any) -> None:
        """Evaluate the newest run's samples on the validation data."""
        self._evaluate("validate", self.trainer.validate, **options)

    def test(self, **options: Any) -> None:
        """Evaluate the newest run's samples on the test data."""
        self._evaluate("test", self.trainer.test, **options)

    def predict(self, **options: Any) -> None:
        """Write the predictive distribution of the newest run's samples."""
        self._evaluate("predict", self.trainer.predict, **options)

    def _evaluate(self, stage: str, run: Callable[..., Any], **options: Any) -> None:
        collectors = instances_of(self.trainer, SampleCollector)
        if collectors[0].in_memory:
            raise Mistake("SampleCollector(in_memory=True) leaves no samples to evaluate: fit with in_memory=False")
        if collectors[0].dirpath is None:
            store = newest_store(self.trainer, self._named_run(stage))
            if store is None:
                where = folder_of_runs(self.trainer)
                if where.is_relative_to(Path.cwd()):
                    where = where.relative_to(Path.cwd())
                raise Mistake(f"no run in {where} has posterior samples: run sgmcmc fit with this configuration first")
            evaluate_beside(self.trainer, store, stage)
        for summary in instances_of(self.trainer, RunSummary):
            summary.show = "all" if self.config[stage].verbose else summary.show
            if stage == "test":
                options["verbose"] = False  # which prints a table of its own
        with _own_folder(self.trainer):
            run(**options)

    def _named_run(self, stage: str) -> Path | None:
        """Return the folder of the run whose `config.yaml` or `auto.yaml` the command was given, None of another
        configuration."""
        paths = [Path(path.absolute) for path in self.config[stage].get("config") or []]
        return next((path.parent for path in paths if path.name in (CONFIG, CHOICES)), None)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands, `plan` and `tune`, each with the arguments that the parser leaves out."""
        known = {name: {*left_out, "verbose"} for name, left_out in LightningCLI.subcommands().items()}
        return known | {"plan": {"model", "datamodule"}, "tune": {"model", "datamodule"}}

    def plan(self, **options: Any) -> None:
        """Print what the configuration's fit will reach and cost, without training."""
        config = self._get(self.config_init, "trainer", default={})
        plan(self.trainer, lambda **changes: self.trainer_class(**{**config, **changes}), **options)

    def tune(self, **options: Any) -> None:
        """Propose a step size from short runs with the configuration's trainer, without its callbacks."""
        config = self._get(self.config_init, "trainer", default={})
        tune(self.trainer, lambda **changes: self.trainer_class(**{**config, **changes}), **options)


def _own_folder(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Return the context of a run: if it fails before its first step, it leaves no folder."""
    folder = run_folder(trainer)
    if not trainer.is_global_zero:
        return nullcontext()
    return no_folder_left_behind(
        folder,
        "choose another one by --trainer.default_root_dir, or by the logger's save_dir",
        lambda: trainer.global_step == 0 and not any(folder.rglob("*.safetensors")),
    )


def _resume_command(arguments: Any) -> str | None:
    """Return the command that continues the run of `sgmcmc` with these arguments, None for this process's own."""
    if not isinstance(arguments, list | None):
        return None
    words = ["sgmcmc", *map(str, arguments)] if arguments is not None else ["python", *sys.argv]
    # `--resume` finds the checkpoint itself and allows no other.
    starts = [place for place, word in enumerate(words) if word.partition("=")[0] in ("--resume", "--ckpt_path")]
    dropped = {place + more for place in starts for more in range(2 if words[place] == "--ckpt_path" else 1)}
    return shlex.join([*(word for place, word in enumerate(words) if place not in dropped), "--resume"])


def _is_given(option: str, arguments: Any) -> bool:
    """Return whether an option is among a command's arguments; a fit's `config.yaml` has it too."""
    words = arguments if isinstance(arguments, list) else sys.argv[1:] if arguments is None else []
    return any(str(word).partition("=")[0] == option for word in words)


def _has_test_data(datamodule: pl.LightningDataModule | None) -> bool:
    if datamodule is None:
        return False
    datamodule.setup("test")
    try:
        return bool(datamodule.test_dataloader())
    except (NotImplementedError, pl.utilities.exceptions.MisconfigurationException):
        return False


class _OnceLoader(yaml.SafeLoader):
    """Reads YAML whose keys are different: of equal ones the last would count, and the others without a word not."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        known: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.value in known:
                problem = f"the key {key.value!r} is there twice, so its first value would not count: join the two"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            known |= {key.value} if isinstance(key.value, str) else set()
        return super().construct_mapping(node, deep)


def _check_config_files(arguments: list[str]) -> None:
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option not in ("-c", "--config"):
            continue
        path = Path(value if equals else "".join(arguments[place + 1 : place + 2]))
        if not path.is_file():
            raise Mistake(f"there is no file {path} to configure the run: `sgmcmc example > example.yaml` makes one")
        try:
            content = yaml.load(text_of(path.read_bytes()), _OnceLoader)
        except yaml.MarkedYAMLError as error:
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
            what = "" if isinstance(error, yaml.constructor.ConstructorError) else " is not YAML"
            raise Mistake(f"{path}{line}{what}: {error.problem}") from error
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, yaml.YAMLError) as error:
            raise Mistake(f"{path} is not a YAML file: {error}") from error
        if not isinstance(content, dict):
            kind = "nothing" if content is None else f"a {type(content).__name__}"
            raise Mistake(f"{path} holds {kind}, but a configuration has keys and values (model, data, trainer)")


@contextmanager
def _reading_any_encoding() -> Iterator[None]:
    """Let jsonargparse read configurations as `_check_config_files` does: Windows' own encoding is not UTF-8."""
    paths: Any = jsonargparse.Path
    own = paths.read_text

    def read_text(self: Any) -> str:
        path = Path(self.absolute)
        return text_of(path.read_bytes()) if path.is_file() else str(own(self))

    paths.read_text = read_text
    try:
        yield
    finally:
        paths.read_text = own


def run_command(arguments: Any, started: Callable[[pl.Trainer], None] = lambda trainer: None) -> None:
    """Run a command of Lightning."""
    # Configurations may name classes of the working directory.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if isinstance(arguments, list):
        _check_config_files(arguments)
    raising = {"exit_on_error": False}
    known = SamplingCLI.subcommands()
    asked: set[str] = {name for name in arguments[:1] if name in known} if isinstance(arguments, list) else set()
    known = {name: known[name] for name in asked or known}
    silent = without_messages((pl.__name__, fabric.__name__), NOT_OF_THE_RUN)
    with warnings.catch_warnings(), silent, _reading_any_encoding():
        for message in OF_LIGHTNING:
            warnings.filterwarnings("ignore", message=message)
        SamplingCLI(
            started=started,
            commands=known,
            model_class=BayesianModule,
            datamodule_class=pl.LightningDataModule,
            trainer_class=TuningTrainer,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            save_config_callback=ConfigFile,
            seed_everything_default=0,
            parser_kwargs={**raising, **{name: dict(raising) for name in known}},
            trainer_defaults={"callbacks": [PredictionWriter()]},
            args=arguments,
        )


# -- the configuration that `--auto` makes, and the one that a run writes ----------------------------------------------

WITH = {
    "--auto": (("fit", "plan"), "is an option of fit and plan"),
    "--baselines": (("fit",), "is an option of fit"),
    "--resume": (("fit",), "continues a fit"),
}
"""The commands on which an option has an effect, and what it is."""
AUTO = PACKAGE + "AutoSampling"
WITH_IT = tuple(type(callback).__name__ for callback in recommended()[1:])
"""What `AutoSampling` runs with."""


def choose_sampling(config: Any, objective: str, budget: str | None) -> None:
    """Replace what decides about sampling in a fit's configuration by `AutoSampling` and the missing ones of
    `recommended`, in place."""
    entries = _entries(config.trainer.get("callbacks"))
    kept = [entry for entry in entries if not _declared(entry).changes_chain]
    dropped = [name for entry in entries if (name := _name(entry)) != "AutoSampling" and entry not in kept]
    for entry in kept:
        shared = _declared(entry).claims.keys() & AutoSampling.claims
        if shared:
            raise Mistake(
                f"--auto and {_name(entry)} cannot be combined: {SUBJECTS[min(shared)]}; remove one of the two"
            )
    if dropped:
        rank_zero_info(f"--auto replaces {', '.join(dropped)} and the module's prior, sampler and lr.")
    options = Namespace(objective=objective, budget=budget)
    config.trainer.callbacks = [Namespace(class_path=AUTO, init_args=options), *_with_recommended(kept)]


def _entries(given: Any) -> list[Any]:
    """Return a configuration's callbacks as a list."""
    return given if isinstance(given, list) else [given] if given else []


def _with_recommended(entries: list[Any]) -> list[Any]:
    """Return callbacks with the missing ones of `recommended`."""
    known = {_name(entry) for entry in entries}
    return [*entries, *(Namespace(class_path=PACKAGE + name) for name in WITH_IT if name not in known)]


def _name(entry: Any) -> str:
    path = entry.get("class_path", "") if isinstance(entry, Namespace | dict) else type(entry).__name__
    return str(path).rpartition(".")[2]


def _declared(entry: Any) -> type[RunCallback]:
    """Return the class of a callback in a configuration; `RunCallback` for one that declares nothing."""
    path = entry.get("class_path", "") if isinstance(entry, Namespace | dict) else ""
    kind = pydoc.locate(str(path)) if path else type(entry)
    return kind if isinstance(kind, type) and issubclass(kind, RunCallback) else RunCallback


def write_repeating_configuration(trainer: pl.Trainer) -> None:
    """Complete `auto.yaml` in the folder of a run of `AutoSampling`: its configuration with the choices it made."""
    folder = run_folder(trainer)
    auto = next(iter(instances_of(trainer, AutoSampling)), None)
    if auto is None or not trainer.is_global_zero or not (folder / CONFIG).exists() or not auto.chosen:
        return
    config = yaml.safe_load((folder / CONFIG).read_bytes())
    entries, entry = config["trainer"]["callbacks"], auto.as_configuration()
    config["trainer"]["callbacks"] = [entry if one.get("class_path") == AUTO else one for one in entries]
    config |= {"auto": False, "budget": None}
    write_atomically(folder / CHOICES, yaml.safe_dump(config, sort_keys=False).encode())


def with_public_names(configuration: str) -> str:
    """Return a configuration's text that names callbacks by the package of users, not by the module that holds them."""
    for name in callbacks.__all__:
        inner = re.escape(f"class_path: {getattr(callbacks, name).__module__}.{name}")
        configuration = re.sub(f"{inner}$", f"class_path: {callbacks.__name__}.{name}", configuration, flags=re.M)
    return configuration


class ConfigFile(SaveConfigCallback):
    """Writes the configuration to `config.yaml` in the run's folder when the run begins, after all checks.

    An earlier `config.yaml`, of a run that is resumed with other settings, is kept as `config-1.yaml`.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write nothing yet: the checks of callbacks and data come later."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.already_saved or trainer.sanity_checking:
            return
        self.already_saved = True
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        text = self.parser.dump(self.config, skip_unset=False)  # `save` writes the system's own encoding
        path = folder / CONFIG
        with replacing(path) as temporary:  # at every moment there is a whole file of this name
            temporary.write_text(with_public_names(text), encoding="utf-8")
            if is_regular(path) and (earlier := path.read_bytes()) != temporary.read_bytes():
                write_output(free_name(path), earlier)

    on_validation_start = on_test_start = on_predict_start = on_train_start


# -- --baselines: networks trained at the cost of the run, beside its average ------------------------------------------

MEMBERS = {"sgd": 1, "ensemble": 4}
DECAY = 5e-4
"""Weight decay of the baselines, the usual default."""


def run_baselines(trainer: pl.Trainer, module: BayesianModule, run: Callable[[dict[str, Any]], None]) -> None:
    """Train the baselines with as many gradient evaluations as a run has made, and add them to its `results.json`.

    They are trained as most users would: in classification by SGD with momentum 0.9 and lr 0.1, otherwise by AdamW with
    lr 0.01, both with a cosine after a warm-up of 3 % and a weight decay of 5e-4. Each is a run of its own, in the
    folder `baselines` of the run's.
    """
    folder = run_folder(trainer)
    if trainer.world_size > 1:
        rank_zero_warn("--baselines trains on one device, and this run had several processes: none is trained.")
        return
    config = yaml.safe_load((folder / CONFIG).read_bytes())
    arguments = config["model"].get("init_args", {})
    if not {"sampler", "lr", "prior", "num_chains"} <= arguments.keys():
        rank_zero_warn("--baselines changes sampler, lr, prior and num_chains, which the model's class does not take.")
        return
    has_classes = isinstance(module.likelihood, ClassLikelihood)
    steps = trainer.global_step * module.num_chains
    for name, members in MEMBERS.items():
        own = folder / "baselines" / name
        many = "1 network" if members == 1 else f"{members} networks"
        rank_zero_info(f"Baseline {name}: {many} of {steps // members:,} steps.")
        with silenced(pl.__name__):
            run(
                {
                    "subcommand": "fit",
                    "fit": _configuration_of_baseline(config, own, name, members, steps // members, has_classes),
                }
            )
        _add_rows(folder, own, name)
    _print_baselines(folder)


def _configuration_of_baseline(
    config: dict[str, Any], folder: Path, name: str, members: int, steps: int, has_classes: bool
) -> dict[str, Any]:
    """Return the configuration of a baseline, made from that of the run."""
    config = copy.deepcopy(config)
    options: dict[str, Any] = {"momentum": 0.9} if has_classes else {}
    kind = "torch.optim.SGD" if has_classes else "torch.optim.AdamW"
    optimizer = {"class_path": kind, "init_args": options | {"weight_decay": DECAY}}
    config["model"]["init_args"] |= {
        "sampler": "lightning_sgmcmc.samplers.SGHMC",
        "lr": 0.1 if has_classes else 0.01,
        "prior": "lightning_sgmcmc.FlatPrior",
        "num_chains": members,
        "temperature": 1.0,
        "chain_start": "own",
    }
    schedule = {"class_path": PACKAGE + "DeepEnsemble", "init_args": {"optimizer": optimizer, "warm_up": 0.03}}
    averaged = [{"class_path": PACKAGE + one} for one in ("SampleCollector", "BayesianModelAverage")]
    summary = {"class_path": PACKAGE + "RunSummary", "init_args": {"name": name, "show": "none"}}
    place = {"save_dir": str(folder.parent), "name": name, "version": ""}
    logger = {"class_path": f"{pl.__name__}.loggers.CSVLogger", "init_args": place}
    config["trainer"] |= {
        "max_steps": steps,
        "max_epochs": -1,
        "max_time": None,
        "logger": logger,
        "enable_checkpointing": False,
        "callbacks": [schedule, *averaged, summary],
    }
    return config | {"auto": False, "budget": None, "baselines": False, "resume": False, "ckpt_path": None}


def _add_rows(folder: Path, baseline: Path, name: str) -> None:
    """Add a baseline's average to the run's rows, under the baseline's name."""
    results, other = (json.loads((place / RESULTS).read_bytes()) for place in (folder, baseline))
    results["rows"] += [row | {"method": name, "error": None} for row in other["rows"] if row["method"] == "bma"]
    rows = [[row["method"], row["metric"], f"{row['value']:.4f}"] for row in results["rows"]]
    write_results(folder, results, markdown_table(["method", "metric", "value"], rows))


def _print_baselines(folder: Path) -> None:
    results = json.loads((folder / RESULTS).read_bytes())
    values = {(row["method"], row["metric"]): row["value"] for row in results["rows"]}
    methods = [method for method in ("guessing", "single", "bma", *MEMBERS) if any(key[0] == method for key in values)]
    metrics = [metric for method, metric in values if method == "sgd"]
    table = Table(title="At equal cost, on the test data")
    table.add_column("", no_wrap=True, min_width=max(map(len, metrics), default=0))  # cut, coverages are alike
    for method in methods:
        table.add_column((METHODS | BASELINES).get(method, method).replace(" ", "\n", 1), justify="right")
    for metric in metrics:
        cells = (values.get((method, metric)) for method in methods)
        table.add_row(
            metric, *("" if value is None else f"{value:.{4 if abs(value) < 1e4 else 1}f}" for value in cells)
        )
    plain_console().print(table)
    plain_console().print(f"The rest is in {shown_path(folder / SUMMARY)}", highlight=False)
