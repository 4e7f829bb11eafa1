"""Folders of images: what is read, how they are divided, and the sentences on folders that cannot be used."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import ImageFolderDataModule
from tests.support.configuration import configured_datamodule
from tests.support.image_folders import COLOURS, write_folder


def prepared(root: Path, **options: Any) -> ImageFolderDataModule:
    data = ImageFolderDataModule(root, **({"batch_size": 10, "size": 8} | options))
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_labels_colours_and_sizes(tmp_path: Path, suffix: str) -> None:
    """An image is resized, and its class is its folder's place among the names."""
    write_folder(tmp_path, {"train": 4, "test": 3}, suffix)
    (tmp_path / "train" / "blue" / ".hidden.png").write_bytes(b"")
    (tmp_path / "train" / "blue" / "notes.txt").write_text("no image")
    data = prepared(tmp_path, val_fraction=0.0)
    assert data.classes == ("blue", "green", "red")
    assert data.num_classes == 3
    train, val, test = data.splits
    assert train.inputs.shape == (12, 3, 8, 8)
    assert train.inputs.dtype == torch.uint8
    assert (len(val.targets), len(test.targets), data.num_data) == (0, 9, 12)
    for part in (train, test):
        for image, label in zip(part.inputs.double(), part.targets.tolist(), strict=True):
            wanted = torch.tensor(COLOURS[data.classes[label]], dtype=torch.float64)
            torch.testing.assert_close(image.mean((1, 2)), wanted, rtol=0, atol=12)


def test_the_centre_of_an_image_is_read_exactly(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3)).astype(np.uint8)
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "train" / name / "1.png")
    data = prepared(tmp_path, val_fraction=0.0, test_fraction=0.0)
    assert torch.equal(data.splits[0].inputs[0], torch.as_tensor(pixels[:, 2:10].transpose(2, 0, 1).copy()))
    grey = prepared(tmp_path, grey=True, val_fraction=0.0, test_fraction=0.0)
    assert grey.splits[0].inputs.shape == (2, 1, 8, 8)


def test_the_parts(tmp_path: Path) -> None:
    """What is not a folder of its own is a share of each class of the training images, the same at every read."""
    write_folder(tmp_path, {"train": 10})
    first, again, other = (prepared(tmp_path, seed=seed).splits for seed in (0, 0, 1))
    assert [part.targets.bincount().tolist() for part in first] == [[7] * 3, [1] * 3, [2] * 3]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[2].inputs, other[2].inputs)
    few = prepared(tmp_path, limit=13, val_fraction=0.0, test_fraction=0.0).splits[0]
    assert few.targets.bincount().tolist() == [4] * 3
    write_folder(tmp_path, {"val": 2})
    assert [len(part.targets) for part in prepared(tmp_path).splits] == [27, 3, 6]
    write_folder(tmp_path, {"test": 4})
    assert [len(part.targets) for part in prepared(tmp_path).splits] == [30, 6, 12]


def test_through_a_fit_and_a_posterior(tmp_path: Path) -> None:
    """A linear network learns the colours; a stored posterior predicts the test images."""
    write_folder(tmp_path, {"train": 20, "test": 5})
    data = prepared(tmp_path, augment=True, random_erasing=0.5, val_fraction=0.0)
    assert data.train_transform().padding == 1  # type: ignore[attr-defined]
    pl.seed_everything(0, verbose=False)
    module = BayesianModule(
        net=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3)),
        likelihood=Categorical(),
        prior=GaussianPrior(1.0),
        lr=0.05,
    )
    folder = tmp_path / "samples"
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=10,
        callbacks=[SamplingSchedule(burn_in_epochs=6, every_n_epochs=1), SampleCollector(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    posterior = Posterior.load(folder, module)
    inputs, targets = next(iter(data.test_dataloader()))
    assert abs(inputs.mean()) < 0.5
    prediction = posterior.predict(inputs)
    assert (prediction.probabilities.argmax(1) == targets).double().mean() > 0.9


def test_it_is_configured_by_name() -> None:
    data = configured_datamodule("ImageFolderDataModule", root="somewhere", size=16, augment=True)
    assert data.image_shape == (3, 16, 16)
    assert data.root == Path("somewhere")


def without(folder: str) -> Callable[[Path], None]:
    def remove(root: Path) -> None:
        for file in (root / folder).iterdir():
            file.unlink()
        (root / folder).rmdir()

    return remove


def broken(root: Path) -> None:
    (root / "train" / "red" / "2.png").write_bytes(b"nothing")


def more(root: Path) -> None:
    write_folder(root, {"test": 1}, classes=("pink",))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (without("test/red"), {}, r"test has no images of the classes red: add some, or remove these classes$"),
        (more, {}, r"test has the classes pink, which the training images lack: remove them"),
        (broken, {}, r"train/red/2.png cannot be read as an image \(.*\): replace or remove it$"),
        (lambda root: [without(f"train/{name}")(root) for name in ("red", "blue")], {}, r"1 class folders \(green\)"),
        (lambda root: None, {"val_fraction": 0.01}, "val_fraction=0.01 of each class of .*train is less than one"),
        (
            lambda root: None,
            {"val_fraction": 0.99, "test_fraction": 0.0},
            "has no images left for training: choose smaller shares",
        ),
    ],
)
def test_folders_that_cannot_be_used(
    tmp_path: Path, change: Callable[[Path], Any], options: dict[str, Any], message: str
) -> None:
    write_folder(tmp_path, {"train": 4, "test": 2})
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, **({"val_fraction": 0.0} | options))


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train is not a folder: put the images of each class into .*train/<c"):
        prepared(tmp_path)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        ImageFolderDataModule(tmp_path, size=0)
    with pytest.raises(ValueError, match=r"val_fraction \+ test_fraction must be in \[0, 1\), got 1.2"):
        ImageFolderDataModule(tmp_path, val_fraction=0.6, test_fraction=0.6)


@pytest.mark.slow
def test_a_small_file_with_a_large_picture_takes_bounded_memory(tmp_path: Path) -> None:
    """Four files of 164 kB with 169 megapixels each, in a process of its own: `pytest -m slow` on this file, 40 s."""
    script = f"""
import resource, shutil, warnings, torch
from pathlib import Path
from PIL import Image
from lightning_sgmcmc.datamodules import ImageFolderDataModule
warnings.simplefilter("ignore")
root = Path({str(tmp_path)!r}) / "img"
for name in "ab":
    (root / "train" / name).mkdir(parents=True)
Image.MAX_IMAGE_PIXELS = None
Image.new("L", (13000, 13000)).save(root / "train/a/0.png")
for name, number in (("a", 1), ("b", 0), ("b", 1)):
    shutil.copy(root / "train/a/0.png", root / f"train/{{name}}/{{number}}.png")
Image.MAX_IMAGE_PIXELS = 89478485
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ImageFolderDataModule(root, size=8, val_fraction=0.0, test_fraction=0.5).setup("fit")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(said.split()[-1]) < 1300
