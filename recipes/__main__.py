"""`python -m recipes` lists the recipes, `python -m recipes NAME` runs one."""

import argparse
import ast
import importlib
import json
import sys
import time
from pathlib import Path

from lightning_sgmcmc.recipes.shared.results import Options, markdown, write_results

FOLDER = Path(__file__).parent


def descriptions() -> dict[str, str]:
    """Return a line for each recipe: the first of a module's docstring, or a YAML file's first comment."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix == ".yaml":
            found[path.stem] = path.read_text().splitlines()[0].removeprefix("# ")
        elif path.suffix == ".py" and not path.stem.startswith("_"):
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            found[path.stem] = docstring.splitlines()[0]
    return found


def run(name: str, options: Options) -> None:
    """Run a recipe and write `results.json`, `table.md` and pictures into its folder."""
    if (FOLDER / f"{name}.yaml").exists():
        _run_configuration(FOLDER / f"{name}.yaml", options)
        return
    recipe = importlib.import_module(f"lightning_sgmcmc.recipes.{name}")
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    rows = recipe.run(options)
    write_results(name, options, rows, time.monotonic() - start)
    print(markdown(rows))


def _run_configuration(path: Path, options: Options) -> None:
    """Run a plain configuration as `sgmcmc fit --config` does, into the requested folder."""
    from lightning_sgmcmc.cli.fit import main

    logger = ["--trainer.logger=pytorch_lightning.loggers.CSVLogger"]
    logger += [f"--trainer.logger.save_dir={options.out.parent}", f"--trainer.logger.name={options.out.name}"]
    logger += ["--trainer.logger.version="]
    main(["fit", f"--config={path}", f"--seed_everything={options.seed}", *logger])
    results = options.out / "results.json"
    written = json.loads(results.read_text()) | {"recipe": path.stem, "scale": options.scale}
    results.write_text(json.dumps(written, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    known = descriptions()
    parser = argparse.ArgumentParser(prog="python -m recipes", description=__doc__)
    parser.add_argument("name", nargs="?", help="the recipe; without a name all are listed")
    parser.add_argument("--full", action="store_true", help="the paper's setting instead of a quick one")
    parser.add_argument("--out", type=Path, help="folder of the run (runs/NAME)")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of the data sets (data)")
    parser.add_argument("--seed", type=int, default=0, help="seed (0)")
    given = parser.parse_args(arguments)
    if given.name is None:
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {line}" for name, line in known.items()))
        return 0
    if given.name not in known:
        print(f"NAME must be one of {', '.join(known)}, got {given.name!r}", file=sys.stderr)
        return 2
    out = given.out or Path("runs", given.name)
    try:
        run(given.name, Options(out, given.data_root, given.full, given.seed))
    except FileNotFoundError as error:  # missing data
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
