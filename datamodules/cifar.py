"""CIFAR-10 and CIFAR-100."""

from lightning_sgmcmc.datamodules.torchvision_images import AugmentedDataModule


class CIFAR10DataModule(AugmentedDataModule):
    """CIFAR-10: 50,000 training and 10,000 test images in colour, 32×32 pixels, 10 classes.

    Arguments and exceptions are those of `AugmentedDataModule`; `augment` crops and mirrors. In `root` it looks for
    `cifar10/cifar10.npz`, then for torchvision's `cifar-10-batches-py` or `cifar-10-python.tar.gz`.

    Source: Krizhevsky 2009.
    """

    dataset = "CIFAR10"
    num_classes = 10
    train_size = 50_000
    flips = True


class CIFAR100DataModule(AugmentedDataModule):
    """CIFAR-100: 50,000 training and 10,000 test images in colour, 32×32 pixels, 100 (fine) classes.

    Arguments and exceptions are those of `AugmentedDataModule`; `augment` crops and mirrors. In `root` it looks for
    `cifar100/cifar100.npz`, then for torchvision's `cifar-100-python` or `cifar-100-python.tar.gz`.

    Source: Krizhevsky 2009.
    """

    dataset = "CIFAR100"
    num_classes = 100
    train_size = 50_000
    flips = True
