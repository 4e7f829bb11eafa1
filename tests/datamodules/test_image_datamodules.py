"""Image datamodules: what is read, statistics, augmentation, and where the images lie."""

import gzip
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchvision.datasets
from torch import Tensor

from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior
from lightning_sgmcmc.datamodules import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    ImageDataModule,
    MNISTDataModule,
    NotMNISTDataModule,
    SVHNDataModule,
    images,
)
from lightning_sgmcmc.datamodules.augmentation import Augmentation, random_crop, random_erase, random_flip
from lightning_sgmcmc.datamodules.images import Normalise, pixel_statistics
from lightning_sgmcmc.files import megabytes
from lightning_sgmcmc.samplers import SGLD
from tests.support.configuration import configured_datamodule
from tests.support.paths import DATA_ROOT as ROOT

needs_data = pytest.mark.skipif(not ROOT.is_dir(), reason="no data files: set SGMCMC_DATA_ROOT to their folder")


def colour_arrays(train: int = 60, test: int = 20, classes: int = 10) -> dict[str, np.ndarray]:
    """Images of distinct pixels, whose channels differ in mean and spread."""
    rng = np.random.default_rng(0)
    low, high = np.array([0, 100, 200])[:, None, None], np.array([256, 140, 210])[:, None, None]
    return {
        "x_train": rng.integers(low, high, (train, 3, 32, 32)).astype(np.uint8),
        "y_train": (np.arange(train) % classes).astype(np.uint8),
        "x_test": rng.integers(low, high, (test, 3, 32, 32)).astype(np.uint8),
        "y_test": (np.arange(test) % classes).astype(np.int64),
    }


def grey_arrays(train: int = 60, test: int = 20) -> dict[str, np.ndarray]:
    arrays = colour_arrays(train, test)
    return {name: value[:, 0, :28, :28] if name[0] == "x" else value for name, value in arrays.items()}


def write(root: Path, name: str, arrays: dict[str, np.ndarray]) -> Path:
    path = root / name / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def prepared(module: ImageDataModule) -> ImageDataModule:
    module.prepare_data()
    module.setup("fit")
    return module


def batches(loader: Any) -> tuple[Tensor, Tensor]:
    inputs, labels = zip(*loader, strict=True)
    return torch.cat(inputs), torch.cat(labels)


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


def write_idx(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """The idx format: two zero bytes, the type (8 for bytes), the number of axes, the lengths, the data."""
    folder.mkdir(parents=True)
    for part, prefix in (("train", "train"), ("test", "t10k")):
        for name, kind in ((f"x_{part}", "images-idx3"), (f"y_{part}", "labels-idx1")):
            array = arrays[name].astype(np.uint8)
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(header + array.tobytes())


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


# -- augmentation -----------------------------------------------------------------------------------------------------


def coordinates(count: int, size: int = 8) -> Tensor:
    """Images (n, 2, size, size) that hold row + 1 and column + 1, so that a window of them tells where it was."""
    rows = torch.arange(1, size + 1, dtype=torch.uint8)
    image = torch.stack([rows[:, None].expand(size, size), rows.expand(size, size)])
    return image.repeat(count, 1, 1, 1)


def test_a_crop_is_a_shifted_window_with_black_around_it() -> None:
    torch.manual_seed(0)
    count, size, padding = 4050, 8, 2
    images = coordinates(count, size)
    cropped = random_crop(images, padding)
    assert cropped.shape == images.shape
    assert cropped.dtype == torch.uint8
    shift = cropped[:, :, 4, 4].long() - 5  # of the pixel in the middle, which is never black
    assert shift.min() == -padding
    assert shift.max() == padding
    wanted = torch.zeros_like(images)
    for i in range(count):
        down, right = shift[i].tolist()
        rows, columns = (slice(max(0, s), size + min(0, s)) for s in (down, right))
        window = images[i, :, rows, columns]
        wanted[i, :, max(0, -down) : size + min(0, -down), max(0, -right) : size + min(0, -right)] = window
    assert torch.equal(cropped, wanted)
    # 162 of each of the 25 windows are expected; beyond 5 standard deviations (62) once in 70,000 runs
    places = (shift + padding).mul(torch.tensor([5, 1])).sum(1).bincount(minlength=25)
    assert (places - count / 25).abs().max() < 62
    assert torch.equal(random_crop(images, 0), images)


def test_a_flip_is_a_mirror_image_of_about_half() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (1000, 3, 6, 5), dtype=torch.uint8)
    flipped = random_flip(images)
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert abs(int(mirrored.sum()) - 500) < 80  # 5 standard deviations


def erased_by_loop(size: int, rng: np.random.Generator) -> tuple[int, int]:
    """Algorithm 1 of Zhong et al. for one image: height and width of the rectangle."""
    while True:
        area, aspect = rng.uniform(0.02, 0.4) * size * size, rng.uniform(0.3, 1 / 0.3)
        height, width = round(float(np.sqrt(area * aspect))), round(float(np.sqrt(area / aspect)))
        if height < size and width < size:
            return height, width


def test_erased_rectangles_have_the_papers_law() -> None:
    torch.manual_seed(0)
    count, size = 20_000, 32
    images = torch.ones(count, 2, size, size)
    erased = random_erase(images, 0.5) == 0
    assert torch.equal(erased[:, 0], erased[:, 1]), "all channels at once"
    erased = erased[:, 0]
    rows, columns = erased.any(2), erased.any(1)
    assert torch.equal(erased, rows[:, :, None] & columns[:, None, :])
    for line in (rows, columns):
        assert ((line[:, 1:] != line[:, :-1]).sum(1) <= 2).all(), "one rectangle"
    hit = erased.flatten(1).any(1)
    assert abs(int(hit.sum()) - count / 2) < 5 * (count / 4) ** 0.5
    rng = np.random.default_rng(1)
    reference = np.array([erased_by_loop(size, rng) for _ in range(10_000)])
    ours = torch.stack([rows.sum(1), columns.sum(1)], 1)[hit].double().numpy()
    shares = [sizes.prod(1) / size**2 for sizes in (ours, reference)]
    assert shares[0].min() >= 0.02 * 0.75  # whole pixels: 2.48 x 8.26 becomes 2 x 8
    assert shares[0].max() <= 0.4 * 1.05
    for a, b in [(shares[0], shares[1]), (ours[:, 0], reference[:, 0]), (ours[:, 1], reference[:, 1])]:
        error = (a.var() / len(a) + b.var() / len(b)) ** 0.5
        assert abs(a.mean() - b.mean()) < 5 * error
    top, free = rows[hit].byte().argmax(1), size - rows[hit].sum(1)
    place = top / free  # uniform on 0, …, free: mean 1/2, whatever the height
    assert abs(place.mean() - 0.5) < 5 * place.std() / len(place) ** 0.5
    assert top.min() == 0
    assert (top == free).any()
    assert torch.equal(random_erase(images, 0.0), images)
    assert (random_erase(images[:500], 1.0) == 0).flatten(1).any(1).all()


def test_augmentation_is_a_function_of_the_default_generator_and_differs_between_images() -> None:
    image = torch.randint(1, 256, (1, 3, 32, 32), dtype=torch.uint8)
    images = image.repeat(64, 1, 1, 1)
    augment = Augmentation(Normalise([0.5, 0.4, 0.3], [0.1, 0.2, 0.3]), padding=4, flip=True, erasing=0.5)
    torch.manual_seed(3)
    first = augment(images)
    torch.manual_seed(3)
    assert torch.equal(augment(images), first)
    assert not torch.equal(augment(images), first)
    assert len(first.flatten(1).unique(dim=0)) > 50, "each image has draws of its own"
    assert torch.equal(images, image.expand_as(images)), "the data are left as they are"
    assert first.dtype == torch.float32


def test_only_training_batches_are_augmented(tmp_path: Path) -> None:
    write(tmp_path, "cifar10", colour_arrays())
    write(tmp_path, "svhn", colour_arrays())
    plain = prepared(CIFAR10DataModule(tmp_path, val_size=20, batch_size=40))
    module = prepared(CIFAR10DataModule(tmp_path, val_size=20, batch_size=40, augment=True, random_erasing=1.0))
    assert module.num_data == 40
    for name in ("val_dataloader", "test_dataloader"):
        assert torch.equal(batches(getattr(module, name)())[0], batches(getattr(plain, name)())[0])
    images = plain.splits[0].inputs
    assert torch.equal(plain.train_transform()(images), plain.transform()(images))
    (drawn, _), (again, _) = batches(module.train_dataloader()), batches(plain.train_dataloader())
    assert (drawn == 0).flatten(1).any(1).all(), "every image lost a rectangle"
    assert not (again == 0).any()
    digits = SVHNDataModule(tmp_path, val_size=20, augment=True).train_transform()
    assert isinstance(digits, Augmentation)
    assert (digits.padding, digits.flip, digits.erasing) == (4, False, 0.0), "a mirrored digit is none"
    assert isinstance(module.train_transform(), Augmentation)
    assert module.train_transform().flip


# -- on the device ----------------------------------------------------------------------------------------------------


def trainer_on(device: str) -> Any:
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))


def test_resident_parts_go_to_the_trainers_device_with_their_loader(tmp_path: Path) -> None:
    write(tmp_path, "cifar10", colour_arrays())
    module = prepared(CIFAR10DataModule(tmp_path, val_size=20, device_resident=True))
    module.train_dataloader()
    assert module.splits[0].inputs.device.type == "cpu", "no trainer, no device"
    module.trainer = trainer_on("meta")
    loader = module.train_dataloader()
    assert {tensor.device.type for tensor in loader.dataset.tensors} == {"meta"}
    assert [part.inputs.device.type for part in module.splits] == ["meta", "cpu", "cpu"]
    assert module.splits[0].inputs.dtype == torch.uint8, "bytes, a quarter of the memory"
    first = module.splits[0].inputs
    module.train_dataloader()
    assert module.splits[0].inputs is first, "moved once"
    assert module.num_data == 40


def test_images_stay_on_a_device_by_default_where_they_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than a quarter of the free memory, which a CPU does not have; decided and said once."""
    write(tmp_path, "cifar10", colour_arrays())
    free, said = {"meta": 0}, list[str]()
    monkeypatch.setattr(images, "rank_zero_info", said.append)
    monkeypatch.setattr(images, "free_memory", lambda device: free.get(device.type))

    def fresh(**options: Any) -> CIFAR10DataModule:
        return prepared(CIFAR10DataModule(tmp_path, val_size=20, batch_size=20, **options))

    def place(module: Any, device: str) -> str:
        module.trainer = trainer_on(device)
        module.val_dataloader()
        where: str = module.train_dataloader().dataset.device.type
        return where

    module = fresh()
    size = sum(tensor.nbytes for part in module.splits for tensor in (part.inputs, part.targets))
    free["meta"] = 4 * size
    assert (place(module, "cpu"), place(module, "meta")) == ("cpu", "cpu"), "a quarter is too much"
    free["meta"] += 1
    assert place(module, "meta") == "cpu", "decided already"
    assert place(fresh(device_resident=False), "meta") == "cpu"
    assert said == []
    assert place(fresh(), "meta") == "meta"
    assert said == [
        f"The images ({megabytes(size)}) are kept on meta, which has {megabytes(4 * size + 1)} free: "
        "device_resident=False keeps them in the host's memory."
    ]
    with pytest.raises(TypeError, match="device_resident must be True, False or 'auto', got 'yes'"):
        CIFAR10DataModule(tmp_path, device_resident="yes")


def test_resident_batches_are_passed_on_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, "cifar10", colour_arrays())
    module = prepared(CIFAR10DataModule(tmp_path, val_size=20, device_resident=True))
    module.trainer = trainer_on("cpu")
    batch = next(iter(module.val_dataloader()))
    assert module.transfer_batch_to_device(batch, torch.device("cpu"), 0) is batch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_resident_images_on_cuda(tmp_path: Path) -> None:
    write(tmp_path, "cifar10", colour_arrays())
    module = prepared(CIFAR10DataModule(tmp_path, val_size=20, device_resident=True, augment=True, random_erasing=0.5))
    plain = prepared(CIFAR10DataModule(tmp_path, val_size=20))
    module.trainer = trainer_on("cuda:0")
    images, labels = next(iter(module.train_dataloader()))
    assert images.device == labels.device == torch.device("cuda:0")
    torch.testing.assert_close(batches(module.val_dataloader())[0].cpu(), batches(plain.val_dataloader())[0])


def test_a_fit_on_resident_images_takes_the_same_walk(tmp_path: Path) -> None:
    write(tmp_path, "cifar10", colour_arrays())
    ends = []
    for resident in (False, True):
        pl.seed_everything(0)
        net = torch.nn.Sequential(
            *(torch.nn.Conv2d(3, 4, 3, stride=2), torch.nn.BatchNorm2d(4), torch.nn.ReLU()),
            *(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 10)),
        )
        module = BayesianModule(net=net, likelihood=Categorical(), prior=GaussianPrior(), sampler=SGLD, lr=0.01)
        data = CIFAR10DataModule(
            tmp_path, batch_size=16, val_size=20, augment=True, random_erasing=0.5, device_resident=resident
        )
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, datamodule=data)
        trainer.validate(module, datamodule=data, verbose=False)
        assert module.num_data == 40
        ends.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(ends[0], ends[1])
    assert ends[0].isfinite().all()


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


# -- mistakes ---------------------------------------------------------------------------------------------------------


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
