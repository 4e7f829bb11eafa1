"""`sgmcmc example`: print a configuration to start from."""

import argparse
from collections.abc import Sequence
from importlib.resources import files

DEFAULT = "digits_auto"


def examples() -> dict[str, str]:
    """Return the configurations among the recipes, by name."""
    folder = files("lightning_sgmcmc.recipes")
    files_there = {path.name for path in folder.iterdir()}
    names = sorted(name.removesuffix(".yaml") for name in files_there if name.endswith(".yaml"))
    alone = [name for name in names if not files_there & {name, f"{name}.py"}]  # the others are a program's settings
    return {name: (folder / f"{name}.yaml").read_text(encoding="utf-8") for name in alone}


def main(arguments: Sequence[str]) -> None:
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
