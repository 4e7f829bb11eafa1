"""Image datamodules: what is read of files, and the pixels' statistics."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

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
from lightning_sgmcmc.datamodules.images import Normalise, pixel_statistics
from tests.support.configuration import configured_datamodule
from tests.support.image_files import batches, colour_arrays, grey_arrays, prepared, write, write_idx
from tests.support.paths import DATA_ROOT as ROOT

needs_data = pytest.mark.skipif(not ROOT.is_dir(), reason="no data files: set SGMCMC_DATA_ROOT to their folder")


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
def test_colour_images_are_normalised_by_the_training_parts_channels(tmp_path: Path, channels_last: bool) -> None:
    arrays = colour_arrays()
    stored = dict(arrays)
    if channels_last:
        stored |= {name: np.moveaxis(arrays[name], 1, 3) for name in ("x_train", "x_test")}
        stored["y_train"] = arrays["y_train"][:, None]  # Keras keeps labels so
    write(tmp_path, "cifar10", stored)
    module = prepared(CIFAR10DataModule(tmp_path, batch_size=7, val_size=20))
    assert module.num_data == 40
    assert module.input_shape == (3, 32, 32)
    assert [part.inputs.dtype for part in module.splits] == [torch.uint8] * 3
    images, labels = batches(module.train_dataloader())
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert images.mean((0, 2, 3)).abs().max() < 1e-4
    assert (images.std((0, 2, 3)) - 1).abs().max() < 1e-4
    train = module.splits[0].inputs
    pixels = train.double().transpose(0, 1).flatten(1) / 255
    test, test_labels = batches(module.test_dataloader())
    by_hand = (torch.as_tensor(arrays["x_test"]) / 255 - pixels.mean(1)[:, None, None]) / pixels.std(1)[:, None, None]
    torch.testing.assert_close(test, by_hand.float(), rtol=1e-5, atol=1e-4)
    assert test_labels.tolist() == arrays["y_test"].tolist()
    everything = torch.cat([train, module.splits[1].inputs]).flatten(1)
    original = torch.as_tensor(arrays["x_train"]).flatten(1)
    assert torch.equal(everything.unique(dim=0), original.unique(dim=0)), "each image is in one part"
    assert len(original.unique(dim=0)) == 60
    other = prepared(CIFAR10DataModule(tmp_path, val_size=20, seed=1))
    assert not torch.equal(other.splits[1].inputs, module.splits[1].inputs)


def test_statistics_are_those_of_the_pixels() -> None:
    images = torch.randint(0, 256, (50, 2, 5, 4), dtype=torch.uint8)
    images[:, 1] = 17
    mean, std = pixel_statistics(images)
    pixels = images.double() / 255
    assert mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), rel=1e-12)
    assert std == [pytest.approx(pixels[:, 0].std().item(), rel=1e-12), 1.0]
    assert Normalise(mean, std)(images).isfinite().all()
    one_mean, one_std = pixel_statistics(images[:, :1])
    assert isinstance(one_mean, float)
    assert torch.equal(Normalise(one_mean, one_std)(images[:, :1]), Normalise([one_mean], [one_std])(images[:, :1]))


@pytest.mark.parametrize("kind", [MNISTDataModule, FashionMNISTDataModule])
def test_grey_images(tmp_path: Path, kind: type[MNISTDataModule]) -> None:
    arrays = grey_arrays()
    write(tmp_path, kind.dataset.lower(), arrays)
    module = prepared(kind(tmp_path, val_size=10))
    assert module.input_shape == (1, 28, 28)
    flat = prepared(kind(tmp_path, val_size=10, flatten=True))
    assert flat.input_shape == (784,)
    images, _ = batches(module.test_dataloader())
    flattened, _ = batches(flat.test_dataloader())
    assert torch.equal(images.flatten(1), flattened)
    train, _ = batches(flat.train_dataloader())
    assert abs(train.mean()) < 1e-4
    assert abs(train.std() - 1) < 1e-4


def write_cifar(root: Path, arrays: dict[str, np.ndarray], fine: bool) -> None:
    """CIFAR's format: pickled dictionaries, each image a row of 3,072 bytes."""
    known = torchvision.datasets.CIFAR100 if fine else torchvision.datasets.CIFAR10
    folder = root / known.base_folder
    folder.mkdir()
    for part, files in (("train", known.train_list), ("test", known.test_list)):
        rows, labels = arrays[f"x_{part}"].reshape(-1, 3072), arrays[f"y_{part}"].tolist()
        for i, (name, _) in enumerate(files):
            share = slice(i * len(rows) // len(files), (i + 1) * len(rows) // len(files))
            entry = {"data": rows[share], "fine_labels" if fine else "labels": labels[share]}
            (folder / name).write_bytes(pickle.dumps(entry))
    (folder / known.meta["filename"]).write_bytes(pickle.dumps({known.meta["key"]: ["a", "b"]}))


def write_svhn(root: Path, arrays: dict[str, np.ndarray]) -> None:
    """SVHN's format: MATLAB, the images along the last axis, the digit 0 labelled 10."""
    scipy_io = pytest.importorskip("scipy.io")
    for part in ("train", "test"):
        labels = arrays[f"y_{part}"].astype(np.uint8)[:, None].copy()
        labels[labels == 0] = 10
        images = np.transpose(arrays[f"x_{part}"], (2, 3, 1, 0))
        scipy_io.savemat(root / f"{part}_32x32.mat", {"X": images, "y": labels})


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchvision takes any file of the right name for the one that it knows."""

    def is_there(path: str, md5: str | None = None) -> bool:
        return os.path.isfile(path)

    for module in ("cifar", "svhn", "mnist", "utils"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.check_integrity", is_there)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("kind", "write_files"),
    [
        (MNISTDataModule, lambda root, arrays: write_idx(root / "MNIST" / "raw", arrays)),
        (FashionMNISTDataModule, lambda root, arrays: write_idx(root / "FashionMNIST" / "raw", arrays)),
        (CIFAR10DataModule, lambda root, arrays: write_cifar(root, arrays, fine=False)),
        (CIFAR100DataModule, lambda root, arrays: write_cifar(root, arrays, fine=True)),
        (SVHNDataModule, write_svhn),
    ],
)
def test_torchvisions_files_give_what_the_npz_file_gives(
    tmp_path: Path, kind: type[MNISTDataModule], write_files: Callable[[Path, dict[str, np.ndarray]], None]
) -> None:
    grey = kind in (MNISTDataModule, FashionMNISTDataModule)
    arrays = grey_arrays() if grey else colour_arrays(classes=kind.num_classes or 10)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    write(tmp_path / "one", kind.dataset.lower(), arrays)
    write_files(tmp_path / "other", arrays)
    ours, theirs = (prepared(kind(tmp_path / name, val_size=10)) for name in ("one", "other"))
    for a, b in zip(ours.splits, theirs.splits, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
    assert set(ours.splits[2].targets.tolist()) >= set(range(10)), "the digit 0 is class 0"


# -- notMNIST ---------------------------------------------------------------------------------------------------------


def write_letters(root: Path, count: int = 50) -> None:
    arrays = grey_arrays(count)
    path = root / "notmnist"
    path.mkdir(parents=True, exist_ok=True)
    np.savez(path / "notmnist_test.npz", x=arrays["x_train"], y=arrays["y_train"])


def test_notmnist_is_test_data_in_mnists_units(tmp_path: Path) -> None:
    write_letters(tmp_path)
    module = NotMNISTDataModule(tmp_path, flatten=True, batch_size=20)
    module.prepare_data()
    module.setup("test")
    images, labels = batches(module.test_dataloader())
    assert images.shape == (50, 784)
    assert module.input_shape == (784,)
    assert module.val_dataloader() == module.train_dataloader() == []
    original = torch.as_tensor(grey_arrays(50)["x_train"]).flatten(1)
    torch.testing.assert_close(images * 0.3081 + 0.1307, original / 255, rtol=0, atol=1e-6)
    assert labels.tolist() == [i % 10 for i in range(50)], "the order of the file"
    with pytest.raises(ValueError, match="all images of notMNIST are test data: give a test_size"):
        _ = module.num_data


def test_notmnist_can_be_trained_on(tmp_path: Path) -> None:
    write_letters(tmp_path)
    module = prepared(NotMNISTDataModule(tmp_path, test_size=10, val_size=5, mean=None, std=None))
    assert [len(part.targets) for part in module.splits] == [35, 5, 10]
    assert module.num_data == 35
    images, _ = batches(module.train_dataloader())
    assert abs(images.mean()) < 1e-4
    everything = torch.cat([part.inputs for part in module.splits]).flatten(1)
    assert len(everything.unique(dim=0)) == 50
    with pytest.raises(ValueError, match="test_size=40 and val_size=10 leave none of the 50 images"):
        prepared(NotMNISTDataModule(tmp_path, test_size=40, val_size=10))


@pytest.mark.usefixtures("unchecked")
def test_damaged_files_of_torchvision(tmp_path: Path) -> None:
    write_cifar(tmp_path, colour_arrays(), fine=False)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"files of torchvision.datasets.CIFAR10 in .* are damaged .*: remove them"):
        prepared(CIFAR10DataModule(tmp_path, val_size=20))


def test_every_image_datamodule_is_configured_by_name() -> None:
    for name, options in {
        "FashionMNISTDataModule": {"flatten": True, "device_resident": True},
        "CIFAR10DataModule": {"augment": True, "random_erasing": 0.5},
        "CIFAR100DataModule": {"drop_last": True},
        "SVHNDataModule": {"val_size": 0},
        "NotMNISTDataModule": {"test_size": 2000, "mean": None, "std": None},
    }.items():
        data = configured_datamodule(name, root="somewhere", batch_size=7, **options)
        assert type(data).__name__ == name
        assert data.root == Path("somewhere")
        assert data.batch_size == 7


# -- the files --------------------------------------------------------------------------------------------------------


@needs_data
def test_notmnist_file() -> None:
    module = NotMNISTDataModule(ROOT, batch_size=1000)
    module.setup("test")
    images, labels = batches(module.test_dataloader())
    assert images.shape == (10_000, 1, 28, 28)
    assert labels.bincount().tolist() == [1000] * 10
    assert len(module.splits[2].inputs.flatten(1).unique(dim=0)) == 9_804
