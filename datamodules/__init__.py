"""Datamodules: each has N (`num_data`) and its splits, and normalises by the training part only."""

from lightning_sgmcmc.datamodules.base import ArrayDataModule, Split, TensorBatches
from lightning_sgmcmc.datamodules.corruptions import CorruptedDataModule
from lightning_sgmcmc.datamodules.datasets import DatasetDataModule, StreamDataModule
from lightning_sgmcmc.datamodules.image_folder import ImageFolderDataModule
from lightning_sgmcmc.datamodules.image_sets import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
    NotMNISTDataModule,
    SVHNDataModule,
)
from lightning_sgmcmc.datamodules.images import ImageDataModule
from lightning_sgmcmc.datamodules.table import TableDataModule
from lightning_sgmcmc.datamodules.uci import (
    AirfoilDataModule,
    CovertypeDataModule,
    DigitsDataModule,
    MushroomDataModule,
    UCIClassificationDataModule,
    UCIRegressionDataModule,
)

__all__ = [
    "AirfoilDataModule",
    "ArrayDataModule",
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "CorruptedDataModule",
    "CovertypeDataModule",
    "DatasetDataModule",
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "ImageDataModule",
    "ImageFolderDataModule",
    "MNISTDataModule",
    "MushroomDataModule",
    "NotMNISTDataModule",
    "SVHNDataModule",
    "Split",
    "StreamDataModule",
    "TableDataModule",
    "TensorBatches",
    "UCIClassificationDataModule",
    "UCIRegressionDataModule",
]
