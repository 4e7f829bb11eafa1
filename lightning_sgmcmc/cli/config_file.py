"""`config.yaml` in a run's folder."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.cli import SaveConfigCallback

from lightning_sgmcmc.files import free_name, is_regular, replacing, write_output
from lightning_sgmcmc.run.folder import run_folder

NAME = "config.yaml"


class ConfigFile(SaveConfigCallback):
    """Writes the configuration to `config.yaml` in the run's folder when the run begins, after all checks.

    An earlier `config.yaml`, of a run that is resumed with other settings, is kept as `config-1.yaml`.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write nothing yet: the checks of callbacks and data come later."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(trainer)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        if self.already_saved:
            return
        self.already_saved = True
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"skip_none": False, "multifile": False, "overwrite": True}
        path = folder / NAME
        with replacing(path) as temporary:  # at every moment there is a whole file of this name
            self.parser.save(self.config, temporary, **options)
            if is_regular(path) and (earlier := path.read_bytes()) != temporary.read_bytes():
                write_output(free_name(path), earlier)
