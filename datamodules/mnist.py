"""MNIST and Fashion-MNIST."""

from lightning_sgmcmc.datamodules.torchvision_images import TorchvisionDataModule


class MNISTDataModule(TorchvisionDataModule):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28×28 pixels.

    Images are kept as bytes and normalised batch by batch, by the training part's mean and standard deviation.

    Args:
        root: folder that holds `mnist/mnist.npz` (arrays `x_train`, `y_train`, `x_test`, `y_test`), or torchvision's
            `MNIST/raw`; otherwise torchvision downloads it there.
        batch_size: data per batch.
        val_size: number of training images held back for validation, 0 to 59,999.
        seed: seed of the validation images.
        flatten: inputs of shape (n, 784) instead of (n, 1, 28, 28).
        drop_last: leave out the last batch of an epoch if it is smaller.
        device_resident: keep the images on the trainer's device; "auto" does on CUDA if they are small there.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: for an argument out of range; at setup, if the files are damaged or hold something else.
        FileNotFoundError: if the data are not there and cannot be downloaded.
    """

    dataset = "MNIST"
    num_classes = 10
    train_size = 60_000
    image_shape = (1, 28, 28)


class FashionMNISTDataModule(TorchvisionDataModule):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes in 10 classes, 28×28 pixels.

    Images are kept as bytes and normalised batch by batch, by the training part's mean and standard deviation.

    Args:
        root: folder that holds `fashionmnist/fashionmnist.npz` (arrays `x_train`, `y_train`, `x_test`, `y_test`), or
            torchvision's `FashionMNIST/raw`; otherwise torchvision downloads it there.
        batch_size: data per batch.
        val_size: number of training images held back for validation, 0 to 59,999.
        seed: seed of the validation images.
        flatten: inputs of shape (n, 784) instead of (n, 1, 28, 28).
        drop_last: leave out the last batch of an epoch if it is smaller.
        device_resident: keep the images on the trainer's device; "auto" does on CUDA if they are small there.
        order: makes the order of the training data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: for an argument out of range; at setup, if the files are damaged or hold something else.
        FileNotFoundError: if the data are not there and cannot be downloaded.

    Source: Xiao, Rasul & Vollgraf 2017.
    """

    dataset = "FashionMNIST"
    num_classes = 10
    train_size = 60_000
    image_shape = (1, 28, 28)
