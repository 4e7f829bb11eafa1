"""The command line: `sgmcmc fit`, `validate`, `test`, `predict`, `tune`, `report`, `example` and `recipe`."""

from lightning_sgmcmc.cli.commands import main
from lightning_sgmcmc.cli.fit import SamplingCLI

__all__ = ["SamplingCLI", "main"]
