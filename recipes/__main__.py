"""`sgmcmc recipe`, or `python -m recipes` in a clone: list the recipes, run one, or run all."""

import argparse
import importlib
import inspect
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from lightning_sgmcmc.cli.commands import examples
from lightning_sgmcmc.cli.exits import FAILED, Mistake, no_folder_left_behind, one_sentence
from lightning_sgmcmc.cli.fit import run_command
from lightning_sgmcmc.fit.results import origin_of_run
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.shared import needs
from lightning_sgmcmc.recipes.shared.expected import compare, predicted_seconds
from lightning_sgmcmc.recipes.shared.jobs import SECONDS, Planned, duration
from lightning_sgmcmc.recipes.shared.listing import descriptions
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.pages import write_pages
from lightning_sgmcmc.recipes.shared.results import markdown, write_results
from lightning_sgmcmc.recipes.shared.settings import plain_settings, read_settings
from lightning_sgmcmc.recipes.shared.workers import LastingWorkers

FOLDER = Path(__file__).parent
ALL = "all"


def run(name: str, options: Options) -> None:
    """Run a recipe and write `results.json`, `table.md` and pictures into its folder; print its page or table.

    Args:
        name: the recipe.
        options: its options; in a dry run only the number of jobs and their predicted time are printed.

    Raises:
        ValueError: if the recipe has no such method or setting.
        FileNotFoundError: if data are missing.
    """
    if name in examples():
        _run_configuration(FOLDER / f"{name}.yaml", options)
        return
    recipe = importlib.import_module(f"lightning_sgmcmc.recipes.{name}")
    _check(name, recipe, options)
    settings = read_settings(recipe.Settings, options)
    if options.dry_run:
        print(f"{name}: {_dry_run(name, recipe, settings.work, options)}")
        return
    start = time.process_time()
    origin_of_run()  # before files change
    SECONDS.clear()
    needs.CHECKSUMS.clear()
    with no_folder_left_behind(options.out, "choose another one by --out", lambda: not any(options.out.iterdir())):
        options.out.mkdir(parents=True, exist_ok=True)
        rows = recipe.run(options)
    seconds = time.process_time() - start + sum(SECONDS)
    write_results(name, options, rows, seconds, plain_settings(settings), settings.work, needs.CHECKSUMS)
    page = options.out / "page.md"
    print(page.read_text(encoding="utf-8") if page.exists() else markdown(rows))


def _check(name: str, recipe: ModuleType, options: Options) -> None:
    """Raise if an option was given that the recipe's program does not read."""
    source = inspect.getsource(recipe)
    given = (
        ("--methods", options.methods, ("options.chosen(",)),
        ("--repeats", options.repeats, ("options.repeated(", "options.seeds(")),
        ("--device", options.device == "gpu", ("options.accelerator(",)),
    )
    for option, value, calls in given:
        if value and not any(call in source for call in calls):
            raise ValueError(f"{option} has no effect on the recipe {name}: omit it")


def _dry_run(name: str, recipe: ModuleType, work: float, options: Options) -> str:
    """Return a sentence on the jobs of a recipe, and the time that they need."""
    try:
        recipe.run(options)
    except Planned as plan:
        left = f"{plan.jobs} jobs, {plan.finished} of them finished"
        if plan.seconds:
            seconds = sum(plan.seconds) / plan.finished * (plan.jobs - plan.finished)
            return f"{left}; about {duration(seconds / plan.workers)} more on {plan.workers} cores, by those"
        found = predicted_seconds(name, options.scale, work)
        if found is None:
            return f"{left}; their time is not known"
        return f"{left}; about {duration(found / plan.workers)} on {plan.workers} cores like those of the kept run"
    return "it has no jobs to plan"


def _run_configuration(path: Path, options: Options) -> None:
    """Run a plain configuration as `sgmcmc fit --config` does, into the requested folder."""
    if options.full or options.methods or options.repeats or options.executor:
        raise ValueError(
            f"{path.stem} is one configuration of `sgmcmc fit`: omit --full, --methods, --repeats, --executor"
        )
    if options.dry_run:
        print(f"{path.stem}: 1 job")
        return
    logger = [f"--trainer.logger={pl.__name__}.loggers.CSVLogger"]
    logger += [f"--trainer.logger.save_dir={options.out.parent}", f"--trainer.logger.name={options.out.name}"]
    logger += ["--trainer.logger.version="]
    changed = [f"--{key}={value}" for key, value in options.changed.items()]
    changed += [] if options.device == "auto" else [f"--trainer.accelerator={options.device}"]
    results = options.out / "results.json"
    if not results.exists():  # an earlier run ended early
        newest = max(options.out.glob("checkpoints/*.ckpt"), key=lambda file: file.stat().st_mtime, default=None)
        changed += [] if newest is None else [f"--ckpt_path={newest}"]
    run_command(["fit", f"--config={path}", f"--seed_everything={options.seed}", *logger, *changed, *_own_flags(path)])
    written = json.loads(results.read_bytes()) | {"recipe": path.stem, "scale": options.scale}
    results.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _own_flags(path: Path) -> list[str]:
    """Return the flags of `sgmcmc fit` that the head of a configuration names behind its file."""
    found = re.search(rf"sgmcmc fit --config {re.escape(path.name)}(.*)", path.read_text(encoding="utf-8"))
    return found[1].split() if found else []


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description="List the papers' experiments, or run one: it ends with a table and pictures."
    )
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="the recipe, or all; without a name all are listed")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--quick", action="store_true", help="a setting of some minutes (the default)")
    scale.add_argument("--full", action="store_true", help="the paper's setting")
    add("--out", type=Path, help="folder of the run (runs/NAME); a run that ended early continues in its folder")
    add("--data-root", type=Path, default=Path("data"), help="folder of the data sets (data)")
    add("--seed", type=int, default=0, help="seed (0); repeats use the seeds after it")
    add("--repeats", type=int, help="number of repeats (the setting's)")
    add(
        "--methods",
        action="append",
        default=[],
        metavar="A,B",
        help="methods to run (all); once for each, or with commas",
    )
    add("--set", action="append", default=[], metavar="KEY=VALUE", dest="changed", help="change a setting")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="where networks are trained (auto)")
    add("--executor", metavar="WHERE", help="where jobs run: here, or the scheduler of a dask.distributed cluster")
    add("--dry-run", action="store_true", help="print the number of jobs and their predicted time")
    add("--check", action="store_true", help="compare the results with the kept ones; differences end with code 1")
    add("--report", metavar="FOLDER", type=Path, help="write a page for each result and a table of verdicts")
    return parser


def run_recipe(arguments: Sequence[str] | None = None, program: str = "python -m recipes") -> None:
    """List the recipes, or run the one that the arguments name.

    Args:
        arguments: the command line's arguments; None uses those of the process.
        program: how the user calls this.

    Raises:
        Mistake: if there is no such recipe.
        FileNotFoundError: if data are missing.
        SystemExit: with code 1 if a recipe of `all` fails, Ctrl-C ends it, or results differ from the kept ones.
    """
    known = descriptions()
    given = _parser(program).parse_args(arguments)
    if given.name is None:
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {line}" for name, line in known.items()))
        return
    if given.name != ALL and given.name not in known:
        raise Mistake(f"NAME must be one of {', '.join(known)}, or {ALL}, got {given.name!r}")
    if given.repeats is not None and given.repeats < 1:
        raise Mistake(f"--repeats must be ≥ 1, got {given.repeats}")
    options = Options(
        given.out or Path("runs", *([] if given.name == ALL else [given.name])),
        given.data_root,
        given.full,
        given.seed,
        tuple(given.methods),
        given.repeats,
        given.device,
        given.executor,
        _changed(given.changed),
        given.dry_run,
    )
    folders = {given.name: options.out} if given.name != ALL else {name: options.out / name for name in known}
    try:
        with LastingWorkers():
            failed = _run_each(folders, options, alone=given.name != ALL)
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command goes on from the jobs that have ended", file=sys.stderr)
        raise SystemExit(FAILED) from None
    if given.check and not given.dry_run:
        failed |= any([_differs(name, folder) for name, folder in folders.items()])
    if given.report is not None and not given.dry_run:
        print(f"Pages: {write_pages(given.report, folders) / 'index.md'}")
    if failed:
        raise SystemExit(1)


def _changed(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if not pair.partition("=")[1]:
            raise Mistake(f"--set must be KEY=VALUE, got {pair!r}")
    return {key.strip(): value for key, _, value in (pair.partition("=") for pair in pairs)}


def _run_each(folders: dict[str, Path], options: Options, alone: bool) -> bool:
    """Run recipes into their folders; return whether one of several failed."""
    failed = False
    for name, folder in folders.items():
        if alone:
            run(name, replace(options, out=folder))
            continue
        if options.full and name in examples():
            continue
        print(f"\n{name}", file=sys.stderr)
        try:
            run(name, replace(options, out=folder))
        except Exception as error:  # the other recipes run
            failed = True
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
    return failed


def _differs(name: str, folder: Path) -> bool:
    """Print how results compare with the kept ones, and return whether they differ."""
    if not (folder / "results.json").exists():
        return False
    found = compare(name, json.loads((folder / "results.json").read_text(encoding="utf-8")))
    for line in found.lines:
        print(f"{name}: {line}")
    alone = f"; {found.left_out} of one repeat have no error, so they were not" if found.left_out else ""
    print(f"{name}: {found.compared} figures compared{alone}")
    return bool(found.lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a mistake prints one sentence and exits with code 2."""
    with one_sentence("python -m recipes", debug=False):
        run_recipe(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
