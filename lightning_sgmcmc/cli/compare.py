"""`sgmcmc compare RUN RUN …`: several runs on the same data beside one another."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_sgmcmc.cli.sentences import printable
from lightning_sgmcmc.report.compare import compare_runs, text, write_comparison
from lightning_sgmcmc.report.run_record import RunError


def main(args: Sequence[str]) -> None:
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
