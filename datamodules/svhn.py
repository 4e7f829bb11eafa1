"""Street View House Numbers."""

from typing import Any

from lightning_sgmcmc.datamodules.torchvision_images import AugmentedDataModule


class SVHNDataModule(AugmentedDataModule):
    """SVHN: 73,257 training and 26,032 test images of house numbers' digits in colour, 32×32 pixels, 10 classes.

    Arguments and exceptions are those of `AugmentedDataModule`; `augment` crops and does not mirror. In `root` it looks
    for `svhn/svhn.npz`, then for torchvision's `train_32x32.mat` and `test_32x32.mat`. The digit 0 is class 0.

    Source: Netzer et al. 2011.
    """

    dataset = "SVHN"
    num_classes = 10
    train_size = 73_257
    flips = False

    def _open(self, train: bool, download: bool) -> Any:
        from torchvision.datasets import SVHN

        return SVHN(str(self.root), split="train" if train else "test", download=download)

    def _wanted(self) -> str:
        from torchvision.datasets import SVHN

        first, second = (SVHN.split_list[part] for part in ("train", "test"))
        return f"{first[1]} and {second[1]} (from {first[0].rsplit('/', 1)[0]}) into {self.root}"
