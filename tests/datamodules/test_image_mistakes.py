"""Image datamodules: what is wrong or missing is said in a sentence."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets

from lightning_sgmcmc.datamodules import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
    NotMNISTDataModule,
    SVHNDataModule,
)
from tests.support.image_files import colour_arrays, grey_arrays, prepared, write, write_idx


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FashionMNISTDataModule(val_size=60_000), "val_size must be between 0 and 59999, got 60000"),
        (lambda: CIFAR10DataModule(val_size=-1), "val_size must be between 0 and 49999, got -1"),
        (lambda: SVHNDataModule(random_erasing=1.5), r"random_erasing must be in \[0, 1\], got 1.5"),
        (lambda: CIFAR100DataModule(batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: NotMNISTDataModule(test_size=-1), "test_size must not be negative, got -1"),
        (lambda: NotMNISTDataModule(val_size=5), "val_size=5 needs a test_size"),
        (lambda: NotMNISTDataModule(mean=None), "both be numbers or both None, got mean=None and std=0.3081"),
        (lambda: NotMNISTDataModule(mean=None, std=None), "which needs a test_size"),
        (lambda: NotMNISTDataModule(std=0.0), "std must be positive, got 0.0"),
    ],
)
def test_mistakes_say_what_is_wrong(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": None}, r"cifar10.npz has no array x_train: it holds y_train, x_test, y_test"),
        (
            {"x_train": np.zeros((60, 3, 28, 28), np.uint8)},
            r"x_train in .* \(n, 3, 32, 32\), got uint8 of shape \(60, 3",
        ),
        ({"x_test": np.zeros((20, 3, 32, 32), np.float32)}, r"x_test in .*cifar10.npz should be uint8 .* got float32"),
        ({"y_train": np.zeros(59, np.uint8)}, r"y_train in .* should be 60 integers, got uint8 of shape \(59,\)"),
        ({"y_test": np.zeros(20)}, r"y_test in .* should be 20 integers, got float64"),
        ({"y_test": np.full(20, 10)}, r"y_test in .* should be between 0 and 9, got 10 to 10"),
        ({"x_train": np.array([{}])}, r"x_train in .*cifar10.npz cannot be read \(Object arrays cannot be loaded"),
    ],
)
def test_wrong_arrays_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays = {name: value for name, value in (colour_arrays() | change).items() if value is not None}
    write(tmp_path, "cifar10", arrays)
    with pytest.raises(ValueError, match=message):
        prepared(CIFAR10DataModule(tmp_path, val_size=20))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "cifar10", colour_arrays())
    whole = path.read_bytes()
    module = CIFAR10DataModule(tmp_path, val_size=20)
    for content in (whole[: len(whole) // 2], b"", b"<html>Not found</html>"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cifar10.npz is damaged or not an .npz file: replace it$"):
            prepared(module)
    middle = len(whole) // 3
    path.write_bytes(whole[:middle] + bytes(100) + whole[middle + 100 :])
    with pytest.raises(ValueError, match=r"x_train in .*cifar10.npz cannot be read .*: replace the file"):
        prepared(module)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(
        ValueError, match=r"should be an .npz file with the arrays x_train, y_train, x_test, y_test, but"
    ):
        prepared(module)
    write(tmp_path, "cifar10", colour_arrays(train=20))
    with pytest.raises(ValueError, match="val_size=20 leaves none of the 20 training images"):
        prepared(module)


@pytest.mark.parametrize(
    ("kind", "npz", "wanted"),
    [
        (MNISTDataModule, "mnist/mnist.npz", "put train-images-idx3-ubyte.gz, .* into {root}/MNIST/raw"),
        (
            FashionMNISTDataModule,
            "fashionmnist/fashionmnist.npz",
            "put train-images-idx3-ubyte.gz, .* and t10k-labels-idx1-ubyte.gz into {root}/FashionMNIST/raw",
        ),
        (CIFAR10DataModule, "cifar10/cifar10.npz", r"put cifar-10-python.tar.gz \(from https://.*\) into {root},"),
        (CIFAR100DataModule, "cifar100/cifar100.npz", r"put cifar-100-python.tar.gz \(from https://.*\) into {root},"),
        (SVHNDataModule, "svhn/svhn.npz", r"put train_32x32.mat and test_32x32.mat \(from http://.*\) into {root},"),
    ],
)
def test_without_a_network_one_sentence_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[MNISTDataModule], npz: str, wanted: str
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("Name or service\nnot known")

    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", unreachable)
    module = kind(tmp_path)
    pattern = rf"^{kind.dataset} is not at {tmp_path}/{npz} and torchvision.datasets.{kind.dataset} "
    last = f"{wanted.format(root=tmp_path)}.* or put {Path(npz).name} with the arrays x_train, .* at the former path$"
    with pytest.raises(FileNotFoundError, match=rf"{pattern}could not download it \(.*{last}") as caught:
        module.prepare_data()
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=f"{pattern}has not downloaded it: {last}"):
        module.setup("fit")


def test_the_archives_that_the_sentence_names_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = grey_arrays()
    folder = tmp_path / "FashionMNIST" / "raw"
    write_idx(folder, arrays)
    for name, _ in torchvision.datasets.FashionMNIST.resources:
        file = folder / name.removesuffix(".gz")
        (folder / name).write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    known = [(name, None) for name, _ in torchvision.datasets.FashionMNIST.resources]  # no checksums
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "resources", known)
    module = prepared(FashionMNISTDataModule(tmp_path, val_size=10))
    assert torch.equal(module.splits[2].inputs, torch.as_tensor(arrays["x_test"])[:, None])
