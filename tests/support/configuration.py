"""Objects as a configuration file names them."""

from typing import Any

import pytorch_lightning as pl
from jsonargparse import ArgumentParser


def configured_datamodule(name: str, **options: Any) -> Any:
    """Return the datamodule that a configuration makes from a class's name and its arguments."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.LightningDataModule, "data")
    config = parser.parse_object({"data": {"class_path": f"lightning_sgmcmc.datamodules.{name}", "init_args": options}})
    return parser.instantiate_classes(config).data
