"""The command line: `sgmcmc fit|validate|test|predict|tune --config …`, a LightningCLI, and `sgmcmc report RUN`."""

import os
import sys
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from lightning_sgmcmc.module import BayesianModule


class SamplingCLI(LightningCLI):
    """A LightningCLI for `BayesianModule`s: after a fit that collected samples it tests their average, if there are
    test data; `fit --resume` continues the newest run."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `--resume`."""
        parser.add_argument(
            "--resume",
            action="store_true",
            help="fit: continue from the newest checkpoint of this configuration",
        )

    def before_instantiate_classes(self) -> None:
        """Raise for options that contradict each other."""
        config = self.config[self.subcommand]
        if config.resume and self.subcommand != "fit":
            raise ValueError(f"--resume continues a fit, so it has no effect in {self.subcommand}: omit it")
        if config.resume and config.get("ckpt_path"):
            raise ValueError("--resume finds the checkpoint itself: pass either --ckpt_path or --resume")

    def before_fit(self) -> None:
        """Find the checkpoint to continue from."""
        if not self.config.fit.resume:
            return
        from lightning_sgmcmc.run.folder import continue_run_of, newest_checkpoint, run_folder

        checkpoint = newest_checkpoint(self.trainer)
        if checkpoint is None:
            where = run_folder(self.trainer).parent
            rank_zero_info(f"--resume found no checkpoint of an earlier run in {where}: this run starts from step 0")
            return
        rank_zero_info(f"Continuing from {checkpoint}")
        continue_run_of(self.trainer, checkpoint)
        self.config_init.fit.ckpt_path = str(checkpoint)

    def after_fit(self) -> None:
        """Evaluate the collected samples on the test data."""
        module = self.model
        if module.posterior is None or len(module.posterior) == 0 or not _has_test_data(self.datamodule):
            return
        self.trainer.test(module, datamodule=self.datamodule, verbose=False)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands and `tune`, each with the arguments that the parser leaves out."""
        return LightningCLI.subcommands() | {"tune": {"model", "datamodule"}}

    def tune(self, **options: Any) -> None:
        """Propose a step size from short runs with the configuration's trainer, without its callbacks."""
        from lightning_sgmcmc.cli.tune import tune

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
        args: the arguments; None uses those of the process.
    """
    from lightning_sgmcmc.callbacks import PredictionWriter
    from lightning_sgmcmc.cli.tune import TuningTrainer

    given = sys.argv[1:] if args is None else args
    if isinstance(given, list) and given[:1] == ["report"]:
        from lightning_sgmcmc.cli.report import main as report

        return report(given[1:])
    # Configurations may name classes of the working directory.
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
        parser_kwargs={
            "epilog": "`sgmcmc report RUN` writes one HTML page of a finished run (see `sgmcmc report --help`)."
        },
        trainer_defaults={"callbacks": [PredictionWriter()]},
        args=args,
    )
