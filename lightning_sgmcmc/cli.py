"""The command line: `sgmcmc fit|validate|test|predict|tune --config …`, a LightningCLI."""

import os
import sys
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningCLI

from lightning_sgmcmc.module import BayesianModule


class SamplingCLI(LightningCLI):
    """A LightningCLI for `BayesianModule`s: after a fit that collected samples it tests their average, if there are
    test data."""

    def after_fit(self) -> None:
        """Evaluate the collected samples on the test data."""
        module = self.model
        if module.posterior is None or len(module.posterior) == 0 or not _has_test_data(self.datamodule):
            return
        self.trainer.test(module, datamodule=self.datamodule, verbose=False)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands and `tune`, each with the arguments that are not options."""
        return LightningCLI.subcommands() | {"tune": {"model", "datamodule"}}

    def tune(self, **options: Any) -> None:
        """Propose a step size from short runs with the configuration's trainer, without its callbacks."""
        from lightning_sgmcmc.tune import tune

        config = self._get(self.config_init, "trainer", default={})
        tune(self.trainer, lambda **changes: self.trainer_class(**{**config, **changes}), **options)


def _has_test_data(datamodule: pl.LightningDataModule | None) -> bool:
    if datamodule is None:
        return False
    datamodule.setup("test")
    try:
        return bool(datamodule.test_dataloader())
    except (NotImplementedError, pl.utilities.exceptions.MisconfigurationException):
        return False


def main(args: Any = None) -> None:
    """Run the command line.

    Args:
        args: the arguments in place of the process's own.
    """
    from lightning_sgmcmc.callbacks import PredictionWriter
    from lightning_sgmcmc.tune import TuningTrainer

    # Configurations name classes of the folder that the command is called in.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    SamplingCLI(
        model_class=BayesianModule,
        datamodule_class=pl.LightningDataModule,
        trainer_class=TuningTrainer,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
        trainer_defaults={"callbacks": [PredictionWriter()]},
        args=args,
    )
