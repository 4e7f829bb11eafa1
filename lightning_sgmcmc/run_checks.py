"""What a trainer is refused for, or warned of, before the first step."""

from typing import TYPE_CHECKING

import pytorch_lightning as pl

if TYPE_CHECKING:
    from lightning_sgmcmc.module import BayesianModule


def check_run(trainer: pl.Trainer, module: "BayesianModule") -> None:
    """Refuse a trainer's settings with which the chain would not sample its posterior."""
