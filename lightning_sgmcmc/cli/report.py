"""`sgmcmc report RUN`: write the HTML page of a run."""

import argparse
from collections.abc import Sequence

from lightning_sgmcmc.cli.sentences import printable
from lightning_sgmcmc.report.page import write_report
from lightning_sgmcmc.report.run_record import RunError, find_run


def main(args: Sequence[str]) -> None:
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
