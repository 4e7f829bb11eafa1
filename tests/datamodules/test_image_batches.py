"""Image datamodules: augmentation of batches, and where the images lie."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior
from lightning_sgmcmc.datamodules import (
    CIFAR10DataModule,
    SVHNDataModule,
    images,
)
from lightning_sgmcmc.datamodules.augmentation import Augmentation, random_crop, random_erase, random_flip
from lightning_sgmcmc.datamodules.images import Normalise
from lightning_sgmcmc.files import megabytes
from lightning_sgmcmc.samplers import SGLD
from tests.support.image_files import batches, colour_arrays, prepared, write

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
    length = {"max_epochs": 2, "max_steps": -1, "accumulate_grad_batches": 1}
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)), **length)


@pytest.mark.parametrize(
    ("length", "compiles"),
    [
        ({"max_epochs": 2}, False),
        ({"max_epochs": 4_000}, True),
        ({"max_steps": 6_000}, True),
        ({"max_steps": 60}, False),
    ],
)
def test_augmentation_is_compiled_for_long_fits_alone(tmp_path: Path, length: dict[str, int], compiles: bool) -> None:
    """An epoch has two batches: 2, 8,000, 6,000 and 60 batches."""
    write(tmp_path, "cifar10", colour_arrays())
    module = prepared(CIFAR10DataModule(tmp_path, batch_size=20, val_size=20, augment=True))
    module.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **length)
    assert module.train_dataloader().dataset.transform.compiles == compiles


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
    monkeypatch.setattr(images, "room_for_data", lambda device: free.get(device.type, 0) // 4)

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
    free["meta"] += 4
    assert place(module, "meta") == "cpu", "decided already"
    assert place(fresh(device_resident=False), "meta") == "cpu"
    assert said == []
    assert place(fresh(), "meta") == "meta"
    assert said == [
        f"The images ({megabytes(size)}) are kept on meta, which has {megabytes(size + 1)} for them: "
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
