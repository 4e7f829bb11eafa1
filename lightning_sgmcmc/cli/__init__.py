"""The command line: `sgmcmc fit`, `validate`, `test`, `predict`, `tune` and `report`."""

from lightning_sgmcmc.cli.fit import SamplingCLI, main

__all__ = ["SamplingCLI", "main"]
