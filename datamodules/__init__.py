"""Datamodules: each knows N (`num_data`), its splits, and normalises by the training part only."""

from lightning_sgmcmc.datamodules.base import ArrayDataModule, Split
from lightning_sgmcmc.datamodules.digits import DigitsDataModule
from lightning_sgmcmc.datamodules.loading import TensorBatches
from lightning_sgmcmc.datamodules.mnist import MNISTDataModule
from lightning_sgmcmc.datamodules.uci import UCIClassificationDataModule, UCIRegressionDataModule
from lightning_sgmcmc.datamodules.wrapper import DatasetDataModule

__all__ = [
    "ArrayDataModule",
    "DatasetDataModule",
    "DigitsDataModule",
    "MNISTDataModule",
    "Split",
    "TensorBatches",
    "UCIClassificationDataModule",
    "UCIRegressionDataModule",
]
