"""Datamodules: each has N (`num_data`) and its splits, and normalises by the training part only."""

from lightning_sgmcmc.datamodules.airfoil import AirfoilDataModule
from lightning_sgmcmc.datamodules.base import ArrayDataModule, Split
from lightning_sgmcmc.datamodules.cifar import CIFAR10DataModule, CIFAR100DataModule
from lightning_sgmcmc.datamodules.corruptions import CorruptedDataModule
from lightning_sgmcmc.datamodules.covertype import CovertypeDataModule
from lightning_sgmcmc.datamodules.digits import DigitsDataModule
from lightning_sgmcmc.datamodules.image_folder import ImageFolderDataModule
from lightning_sgmcmc.datamodules.images import ImageDataModule
from lightning_sgmcmc.datamodules.loading import TensorBatches
from lightning_sgmcmc.datamodules.mnist import FashionMNISTDataModule, MNISTDataModule
from lightning_sgmcmc.datamodules.mushroom import MushroomDataModule
from lightning_sgmcmc.datamodules.notmnist import NotMNISTDataModule
from lightning_sgmcmc.datamodules.stream import StreamDataModule
from lightning_sgmcmc.datamodules.svhn import SVHNDataModule
from lightning_sgmcmc.datamodules.table import TableDataModule
from lightning_sgmcmc.datamodules.uci import UCIClassificationDataModule, UCIRegressionDataModule
from lightning_sgmcmc.datamodules.wrapper import DatasetDataModule

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
