"""Mushroom and Covertype: columns, targets, splits and messages."""

import gzip
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import joblib
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.datamodules import ArrayDataModule, CovertypeDataModule, MushroomDataModule
from lightning_sgmcmc.datamodules.files import read_dumped_array
from lightning_sgmcmc.datamodules.uci import ATTRIBUTES
from tests.support.configuration import configured_datamodule
from tests.support.paths import DATA_ROOT as ROOT

needs_data = pytest.mark.skipif(not ROOT.is_dir(), reason="no data files: set SGMCMC_DATA_ROOT to their folder")


def prepared(module: ArrayDataModule) -> ArrayDataModule:
    module.prepare_data()
    module.setup("fit")
    return module


def all_rows(module: ArrayDataModule) -> tuple[Tensor, Tensor]:
    inputs, targets = (torch.cat([getattr(part, name) for part in module.splits]) for name in ("inputs", "targets"))
    return inputs, targets


# -- Mushroom ---------------------------------------------------------------------------------------------------------


def mushroom_rows(count: int = 60) -> list[list[str]]:
    """Attributes of one to eight values, among them a '?'; the last two number the rows."""
    letters = "?abcdefg"
    rows = []
    for number in range(count):
        attributes = [letters[number % (i % 4 + 1)] for i in range(len(ATTRIBUTES) - 2)]
        rows.append(["e" if number % 3 else "p", *attributes, letters[number // 8], letters[number % 8]])
    return rows


def write_mushrooms(root: Path, lines: list[list[str]]) -> Path:
    path = root / "mushroom" / "mushroom.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(",".join(line) for line in lines).encode()))
    return path


HEADER = ["edible", *ATTRIBUTES]


def test_mushrooms_are_one_hot(tmp_path: Path) -> None:
    rows = mushroom_rows()
    write_mushrooms(tmp_path, [HEADER, *rows])
    module = MushroomDataModule(tmp_path, val_fraction=0.1)
    inputs, edible = module.table()
    assert inputs.dtype == torch.float32
    assert inputs.shape == (60, len(module.feature_names))
    assert edible.tolist() == [row[0] == "e" for row in rows]
    for row, line in zip(rows, inputs, strict=True):
        found = [name for name, value in zip(module.feature_names, line.tolist(), strict=True) if value == 1]
        assert found == [f"{name}={value}" for name, value in zip(ATTRIBUTES, row[1:], strict=True)]
        assert set(line.tolist()) <= {0.0, 1.0}
    population = [name for name in module.feature_names if name.startswith("population=")]
    assert population == [f"population={letter}" for letter in "?abcdefg"], "alphabetical"
    prepared(module)
    assert [len(part.targets) for part in module.splits] == [42, 6, 12]
    assert module.num_data == 42
    assert [part.targets.bincount().tolist() for part in module.splits] == [[14, 28], [2, 4], [4, 8]], "stratified"
    everything, targets = all_rows(module)
    table = torch.cat([inputs, edible[:, None].float()], 1)
    assert torch.equal(torch.cat([everything, targets[:, None].float()], 1).unique(dim=0), table.unique(dim=0))
    assert len(table.unique(dim=0)) == 60


def test_ucis_own_file_of_mushrooms_is_read(tmp_path: Path) -> None:
    rows = mushroom_rows()
    write_mushrooms(tmp_path / "one", [HEADER, *rows])
    path = tmp_path / "other" / "mushroom" / "agaricus-lepiota.data"
    path.parent.mkdir(parents=True)
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    (a, b), (c, d) = (MushroomDataModule(tmp_path / name).table() for name in ("one", "other"))
    assert torch.equal(a, c)
    assert torch.equal(b, d)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER[:-1], *mushroom_rows(3)], "mushroom.csv.gz should begin with the header edible,cap-shape,…, got edib"),
        ([HEADER, *mushroom_rows(2), ["e", "a"]], "row 4 of .* should be e or p and 22 attributes, got 'e,a'"),
        ([HEADER, ["x", *["a"] * 22]], "row 2 of .* should be e or p and 22 attributes, got 'x,a"),
        ([HEADER], "mushroom.csv.gz has no rows"),
    ],
)
def test_wrong_mushrooms_are_named(tmp_path: Path, lines: list[list[str]], message: str) -> None:
    write_mushrooms(tmp_path, lines)
    with pytest.raises(ValueError, match=message):
        prepared(MushroomDataModule(tmp_path))


def test_damaged_and_missing_mushrooms(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the Mushroom table is not at .*mushroom/mushroom.csv.gz: put the"):
        prepared(MushroomDataModule(tmp_path))
    path = write_mushrooms(tmp_path, [HEADER, *mushroom_rows()])
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"nothing", gzip.compress(b"\xff\xfe")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"mushroom.csv.gz is damaged .*: replace it"):
            prepared(MushroomDataModule(tmp_path))


# -- Covertype --------------------------------------------------------------------------------------------------------


def covertype_arrays(count: int = 210) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "numeric": rng.integers(-300, 7000, (count, 10)).astype(np.int16),
        "binary": np.packbits(rng.integers(0, 2, (count, 44)).astype(np.uint8), axis=1),
        "y": (np.arange(count) % 7 + 1).astype(np.uint8),
    }


def write_covertype(root: Path, arrays: dict[str, np.ndarray]) -> Path:
    path = root / "covertype" / "covertype_subset.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def test_covertype_standardises_the_numbers_by_the_training_part(tmp_path: Path) -> None:
    arrays = covertype_arrays()
    write_covertype(tmp_path, arrays)
    module = prepared(CovertypeDataModule(tmp_path, val_fraction=0.1))
    assert module.num_classes == 2
    assert module.input_shape == (54,)
    assert [len(part.targets) for part in module.splits] == [147, 21, 42]
    assert [part.targets.bincount().tolist() for part in module.splits] == [[126, 21], [18, 3], [36, 6]], "stratified"
    train, _, test = module.splits
    assert train.inputs.dtype == torch.float32
    assert train.inputs[:, :10].mean(0).abs().max() < 1e-5
    assert (train.inputs[:, :10].std(0, correction=0) - 1).abs().max() < 1e-5
    assert test.inputs[:, :10].mean(0).abs().max() > 1e-3, "the test part has no say in it"

    # every row of the file is in one part: its indicators (all different) say which row it is
    indicators = torch.as_tensor(np.unpackbits(arrays["binary"], axis=1)[:, :44])
    inputs, targets = all_rows(module)
    same = (inputs[:, None, 10:] == indicators[None]).all(2)
    assert (same.sum(0) == 1).all()
    assert (same.sum(1) == 1).all()
    row = same.byte().argmax(1)
    assert torch.equal(targets, (torch.as_tensor(arrays["y"])[row] == 2).long())
    numeric = torch.as_tensor(arrays["numeric"])[row].double()
    mean, std = numeric[:147].mean(0), numeric[:147].std(0, correction=0)
    torch.testing.assert_close(inputs[:, :10], ((numeric - mean) / std).float(), rtol=1e-5, atol=1e-5)


def test_options_of_covertype(tmp_path: Path) -> None:
    arrays = covertype_arrays()
    arrays["binary"][:, 0] |= 128  # a constant indicator
    write_covertype(tmp_path, arrays)
    module = prepared(CovertypeDataModule(tmp_path, binary=False, intercept=True, standardise_indicators=True))
    assert module.num_classes == 7
    assert module.splits[0].targets.bincount().tolist() == [24] * 7
    assert module.splits[2].targets.bincount().tolist() == [6] * 7
    train = module.splits[0].inputs
    assert train.shape == (168, 55)
    assert torch.equal(train[:, 0], torch.ones(168))
    assert torch.equal(train[:, 11], torch.zeros(168)), "a constant column is only centred"
    rest = torch.cat([train[:, 1:11], train[:, 12:]], 1)
    assert rest.mean(0).abs().max() < 1e-5
    assert (rest.std(0, correction=0) - 1).abs().max() < 1e-5
    other = prepared(CovertypeDataModule(tmp_path, seed=1))
    assert not torch.equal(other.splits[2].inputs[:, :10], prepared(CovertypeDataModule(tmp_path)).splits[2].inputs)


def test_the_full_set_comes_from_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = covertype_arrays()
    calls: list[tuple[str, bool]] = []

    def fetch(*, data_home: str, download_if_missing: bool) -> Any:
        calls.append((data_home, download_if_missing))
        indicators = np.unpackbits(arrays["binary"], axis=1)[:, :44]
        data = np.concatenate([arrays["numeric"], indicators], 1).astype(np.float64)
        return SimpleNamespace(data=data, target=arrays["y"].astype(np.int32))

    write_covertype(tmp_path / "subset", arrays)
    monkeypatch.setattr("sklearn.datasets.fetch_covtype", fetch)
    full = prepared(CovertypeDataModule(tmp_path, full=True))
    assert calls == [(str(tmp_path), True), (str(tmp_path), False)]
    subset = prepared(CovertypeDataModule(tmp_path / "subset"))
    for a, b in zip(full.splits, subset.splits, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)


def test_scikit_learns_files_are_read_and_not_unpickled(tmp_path: Path) -> None:
    """As `joblib.dump(…, compress=9)` writes them; a pickle of anything else is one sentence, and nothing runs."""
    arrays = covertype_arrays()
    indicators = np.unpackbits(arrays["binary"], axis=1)[:, :44]
    inputs = np.concatenate([arrays["numeric"], indicators], 1).astype(np.float64)
    folder = tmp_path / "covertype"
    folder.mkdir()

    def dump(samples: Any, targets: Any, compress: int = 9) -> CovertypeDataModule:
        joblib.dump(samples, folder / "samples_py3", compress=compress)
        joblib.dump(targets, folder / "targets_py3", compress=compress)
        return CovertypeDataModule(tmp_path, full=True)

    labels = arrays["y"].astype(np.int32)
    write_covertype(tmp_path / "subset", arrays)
    subset = prepared(CovertypeDataModule(tmp_path / "subset"))
    for order, compress in (("C", 9), ("F", 0)):
        full = prepared(dump(np.asarray(inputs, order=order), labels, compress))
        for a, b in zip(full.splits, subset.splits, strict=True):
            assert torch.equal(a.inputs, b.inputs)
            assert torch.equal(a.targets, b.targets)
    ran = tmp_path / "ran"
    for hostile, message in (
        (Touch(ran), r"it refers to pathlib\.Path\.touch|it refers to builtins\.getattr|it refers to pathlib"),
        (np.array([Touch(ran), 1], dtype=object), "its elements are not numbers"),
        ([1, 2], "should contain an array"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared(dump(hostile, labels))
        assert not ran.exists()
    dump(inputs, labels)
    with pytest.raises(ValueError, match="expands to more than 1,000 bytes"):
        read_dumped_array(folder / "samples_py3", 1000)
    (folder / "samples_py3").rename(tmp_path / "moved")
    (folder / "samples_py3").symlink_to(tmp_path / "moved")
    with pytest.raises(ValueError, match="links are not followed"):
        prepared(CovertypeDataModule(tmp_path, full=True))


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_small_files_that_expand_are_refused(tmp_path: Path) -> None:
    """20 MB of text in 90 kB, and an array of 90 PB in a small archive that only claims them."""
    (tmp_path / "mushroom").mkdir()
    (tmp_path / "mushroom" / "mushroom.csv.gz").write_bytes(gzip.compress(b"e,x\n" * 5_000_000, 1))
    with pytest.raises(ValueError, match=r"mushroom\.csv\.gz has more than 16.8 MB of text"):
        MushroomDataModule(tmp_path).setup("fit")
    write_covertype(tmp_path, covertype_arrays())
    path = tmp_path / "covertype" / "covertype_subset.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (2**50, 10)})
    with zipfile.ZipFile(path, "a") as archive:
        names = archive.namelist()
    content = {name: zipfile.ZipFile(path).read(name) for name in names}
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, header.getvalue() if name == "numeric.npy" else content[name])
    with pytest.raises(ValueError, match=r"numeric in .* cannot be read"):
        CovertypeDataModule(tmp_path).setup("fit")


def test_without_the_covertype_files_one_sentence_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(**_: Any) -> None:
        raise URLError("Name or service not known")  # what scikit-learn raises after its retries

    sentence = rf"the full Covertype set is not in {tmp_path}/covertype and .* \({{}}.*\): run sklearn.* and copy its"
    with pytest.raises(FileNotFoundError, match=sentence.format("Data not found")):
        CovertypeDataModule(tmp_path, full=True).setup("fit")
    monkeypatch.setattr("sklearn.datasets.fetch_covtype", unreachable)
    with pytest.raises(FileNotFoundError, match=sentence.format("<urlopen error Name or service not known>")):
        CovertypeDataModule(tmp_path, full=True).prepare_data()
    with pytest.raises(FileNotFoundError, match=r"the Covertype table is not at .*covertype/covertype_subset.npz: put"):
        prepared(CovertypeDataModule(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": None}, "covertype_subset.npz has no array y: it holds numeric, binary"),
        ({"y": np.zeros(210, np.uint8)}, "the cover types y in .* should be between 1 and 7, got 0 to 0"),
        ({"numeric": np.zeros((210, 10))}, r"numeric in .* integers of shape \(210, 10\), got float64 of shape \(210"),
        ({"binary": np.zeros((210, 44), np.uint8)}, r"binary in .* uint8 of shape \(210, 6\), .* got uint8 of shape"),
        ({"y": np.ones(209, np.uint8)}, r"numeric in .* of shape \(209, 10\), got int16 of shape \(210, 10\)"),
    ],
)
def test_wrong_covertype_arrays_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays = {name: value for name, value in (covertype_arrays() | change).items() if value is not None}
    write_covertype(tmp_path, arrays)
    with pytest.raises(ValueError, match=message):
        prepared(CovertypeDataModule(tmp_path))


# -- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MushroomDataModule, CovertypeDataModule])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_fraction": 1.0}, r"test_fraction must be in \[0, 1\), got 1.0"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, r"val_fraction \+ test_fraction"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_mistakes_say_what_is_wrong(kind: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_both_are_configured_by_name() -> None:
    for name, options in {
        "MushroomDataModule": {"val_fraction": 0.1},
        "CovertypeDataModule": {"binary": False, "full": True, "intercept": True},
    }.items():
        data = configured_datamodule(name, root="somewhere", batch_size=7, **options)
        assert type(data).__name__ == name
        assert data.root == Path("somewhere")


@needs_data
def test_mushroom_file() -> None:
    module = MushroomDataModule(ROOT)
    inputs, edible = module.table()
    assert inputs.shape == (8124, 117)
    assert int(edible.sum()) == 4208
    assert torch.equal(inputs.sum(1), torch.full((8124,), 22.0))
    names = module.feature_names
    assert int(inputs[:, names.index("stalk-root=?")].sum()) == 2480
    assert [name for name, total in zip(names, inputs.sum(0).tolist(), strict=True) if total == 8124] == ["veil-type=p"]
    prepared(module)
    assert module.splits[2].targets.bincount().tolist() == [783, 842]


@needs_data
def test_covertype_file() -> None:
    module = prepared(CovertypeDataModule(ROOT, binary=False))
    inputs, targets = all_rows(module)
    assert targets.bincount().tolist() == [33_894, 45_328, 5_721, 439, 1_519, 2_779, 3_282]
    assert inputs.shape == (92_962, 54)
    assert module.num_data == 92_962 - len(module.splits[2].targets)
    assert len(module.splits[2].targets) == pytest.approx(92_962 / 5, abs=7)
    for first, last in ((10, 14), (14, 54)):
        assert torch.equal(inputs[:, first:last].sum(1), torch.ones(len(inputs))), "one area, one soil"
    assert int(prepared(CovertypeDataModule(ROOT)).splits[0].targets.sum()) == round(0.8 * 45_328)
