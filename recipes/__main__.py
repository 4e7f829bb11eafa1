"""`sgmcmc recipe`, or `python -m recipes` in a clone: list the recipes, or run one."""

import argparse
import ast
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_sgmcmc.cli.exits import Mistake, one_sentence
from lightning_sgmcmc.cli.fit import run_command
from lightning_sgmcmc.cli.folders import no_folder_left_behind
from lightning_sgmcmc.recipes.shared.results import Options, markdown, write_results
from lightning_sgmcmc.run.origin import origin_of_run

FOLDER = Path(__file__).parent


def descriptions() -> dict[str, str]:
    """Return a line for each recipe: the first of a module's docstring, or a YAML file's first comment."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix == ".yaml":
            found[path.stem] = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        source = path / "__init__.py" if path.is_dir() else path
        if source.suffix == ".py" and source.is_file() and not path.stem.startswith("_"):
            tree = ast.parse(source.read_text(encoding="utf-8"))
            if path.is_dir() and not any(
                isinstance(part, ast.FunctionDef) and part.name == "run" for part in tree.body
            ):
                continue  # what recipes share
            found[path.stem] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found


def run(name: str, options: Options) -> None:
    """Run a recipe and write `results.json`, `table.md` and pictures into its folder; print its page or table."""
    if (FOLDER / f"{name}.yaml").exists():
        _run_configuration(FOLDER / f"{name}.yaml", options)
        return
    recipe = importlib.import_module(f"lightning_sgmcmc.recipes.{name}")
    start = time.monotonic()
    origin_of_run()  # before files change
    with no_folder_left_behind(options.out, "choose another one by --out", lambda: not any(options.out.iterdir())):
        options.out.mkdir(parents=True, exist_ok=True)
        rows = recipe.run(options)
    write_results(name, options, rows, time.monotonic() - start)
    page = options.out / "page.md"
    print(page.read_text(encoding="utf-8") if page.exists() else markdown(rows))


def _run_configuration(path: Path, options: Options) -> None:
    """Run a plain configuration as `sgmcmc fit --config` does, into the requested folder."""
    logger = ["--trainer.logger=pytorch_lightning.loggers.CSVLogger"]
    logger += [f"--trainer.logger.save_dir={options.out.parent}", f"--trainer.logger.name={options.out.name}"]
    logger += ["--trainer.logger.version="]
    run_command(["fit", f"--config={path}", f"--seed_everything={options.seed}", *logger])
    results = options.out / "results.json"
    written = json.loads(results.read_text()) | {"recipe": path.stem, "scale": options.scale}
    results.write_text(json.dumps(written, indent=2) + "\n")


def run_recipe(arguments: Sequence[str] | None = None, program: str = "python -m recipes") -> None:
    """List the recipes, or run the one that the arguments name.

    Args:
        arguments: the command line's arguments; None uses those of the process.
        program: how the user calls this.

    Raises:
        Mistake: if there is no such recipe.
        FileNotFoundError: if data are missing.
    """
    known = descriptions()
    parser = argparse.ArgumentParser(
        prog=program, description="List the papers' experiments, or run one: it ends with a table and pictures."
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the recipe; without a name all are listed")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--quick", action="store_true", help="a setting of some minutes (the default)")
    scale.add_argument("--full", action="store_true", help="the paper's setting")
    parser.add_argument("--out", type=Path, help="folder of the run (runs/NAME)")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of the data sets (data)")
    parser.add_argument("--seed", type=int, default=0, help="seed (0)")
    given = parser.parse_args(arguments)
    if given.name is None:
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {line}" for name, line in known.items()))
        return
    if given.name not in known:
        raise Mistake(f"NAME must be one of {', '.join(known)}, got {given.name!r}")
    run(given.name, Options(given.out or Path("runs", given.name), given.data_root, given.full, given.seed))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a mistake prints one sentence and exits with code 2."""
    with one_sentence("python -m recipes", debug=False):
        run_recipe(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
