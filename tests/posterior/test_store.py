"""Sample stores: what goes in comes out, and what is named is complete, also if files are torn, foreign or damaged."""

import json
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.manifest import MANIFEST
from lightning_sgmcmc.posterior.store import MemoryStore, SampleStore
from tests.support.stored_samples import assert_is_sample, files, sample


def file_of(step: int, chain: int = 0) -> str:
    return f"sample-{step:08d}-chain-{chain:03d}.safetensors"


STORES: dict[str, Callable[[Path], SampleStore]] = {
    "disk": lambda path: DiskStore.create(path),
    "memory": lambda path: MemoryStore(),
}


@pytest.mark.parametrize("kind", STORES)
def test_every_kind_of_tensor_comes_back(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path / "s")
    shared = torch.randn(3)
    base = torch.randn(4, 6)
    parameters = {
        "float32": torch.randn(3, 4),
        "float64": torch.randn(2, dtype=torch.float64),
        "half": torch.randn(5).half(),
        "bfloat16": torch.randn(5).bfloat16(),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0),
        "empty rows": torch.empty(0, 3),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1).expand(7),
        "tied.a": shared,
        "tied.b": shared,
        "a view": shared[:2],
        "special": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
        "parameter.buffer.x": torch.ones(1),
        "of the net": nn.Parameter(torch.randn(2)),
    }
    buffers = {
        "long": torch.tensor([2**62, -1]),
        "bool": torch.tensor([True, False]),
        "uint8": torch.tensor([255], dtype=torch.uint8),
        "buffer.y": torch.zeros(2),
        "float32": torch.ones(1),  # the name of a parameter too
    }
    store.append(PosteriorSample(3, 1, 2, -1.25e6, -7.5, parameters, buffers))
    (record,) = store.records
    assert (record.step, record.cycle, record.chain, record.energy, record.log_weight) == (3, 1, 2, -1.25e6, -7.5)
    found = (DiskStore(tmp_path / "s") if kind == "disk" else store)[0]
    for before, after in ((parameters, found.parameters), (buffers, found.buffers)):
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype, name
            assert not after[name].requires_grad
            assert after[name].shape == tensor.shape
            assert torch.equal(
                after[name].nan_to_num(7, 8, 9) if after[name].is_floating_point() else after[name],
                tensor.detach().nan_to_num(7, 8, 9) if tensor.is_floating_point() else tensor,
            ), name


@pytest.mark.parametrize("kind", STORES)
def test_a_stored_sample_does_not_follow_the_chain(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path / "s")
    drawn = sample(1)
    store.append(drawn)
    drawn.parameters["w"].fill_(-1)
    drawn.buffers["count"].fill_(-1)
    assert_is_sample(store[0], 1)


@pytest.mark.parametrize("no_tensors", [{}, {"parameters": {"w": torch.ones(2)}}])
def test_samples_without_buffers_or_tensors(no_tensors: dict[str, Any], tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path / "s")
    store.append(PosteriorSample(1, 0, 0, 0.0, **no_tensors))
    found = DiskStore(tmp_path / "s")[0]
    assert found.buffers == {}
    assert found.parameters.keys() == no_tensors.get("parameters", {}).keys()


def test_strange_numbers_survive_the_manifest(tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path / "s")
    values = [(math.nan, -math.inf), (1 / 3, 0.1 + 0.2), (-math.inf, 1e-320), (1.7e308, -0.0)]
    for step, (energy, log_weight) in enumerate(values):
        store.append(PosteriorSample(step, 0, 0, energy, log_weight))
    for record, (energy, log_weight) in zip(DiskStore(tmp_path / "s").records, values, strict=True):
        assert record.energy == energy or (math.isnan(record.energy) and math.isnan(energy))
        assert record.log_weight == log_weight


def test_the_manifest_names_every_sample(tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path / "deep" / "s", model_description={"class": "a:B", "arguments": {"n": [1, None]}})
    for step, chain in ((5, 0), (5, 1), (10, 0)):
        store.append(sample(step, chain))
    header, *lines = (tmp_path / "deep" / "s" / MANIFEST).read_text().splitlines()
    assert {k: v for k, v in json.loads(header).items() if k != "run"} == {
        "format": "lightning-sgmcmc samples",
        "version": 1,
        "library": version("lightning-sgmcmc"),
        "model": {"class": "a:B", "arguments": {"n": [1, None]}},
    }
    assert [json.loads(line)["file"] for line in lines] == [file_of(5), file_of(5, 1), file_of(10)]
    assert json.loads(lines[1]) | {"file": "", "checksum": ""} == {
        "step": 5,
        "cycle": 0,
        "chain": 1,
        "energy": -12.5,
        "log_weight": 2.5,
        "file": "",
        "checksum": "",
        "bin": None,
    }
    again = DiskStore(tmp_path / "deep" / "s")
    assert again.records == store.records
    assert again.model_description == {"class": "a:B", "arguments": {"n": [1, None]}}
    assert files(tmp_path / "deep" / "s") == [file_of(5), file_of(5, 1), file_of(10)]
    assert [s.chain for s in again] == [0, 1, 0]
    assert_is_sample(again[-1], 10)


def test_a_store_is_not_made_twice(tmp_path: Path) -> None:
    DiskStore.create(tmp_path).append(sample())
    with pytest.raises(FileExistsError, match="already contains a sample store"):
        DiskStore.create(tmp_path)
    assert len(DiskStore(tmp_path)) == 1


# -- torn, foreign, damaged -------------------------------------------------------------------------------------------


def test_a_torn_last_line_is_ignored_and_written_over(tmp_path: Path) -> None:
    """The manifest cut at every byte of its last line: two samples or three, and it can go on."""
    store = DiskStore.create(tmp_path)
    for step in (1, 2, 3):
        store.append(sample(step))
    whole = (tmp_path / MANIFEST).read_bytes()
    start_of_last = whole[:-1].rfind(b"\n") + 1
    for cut in range(start_of_last, len(whole)):
        (tmp_path / MANIFEST).write_bytes(whole[:cut])
        torn = DiskStore(tmp_path)
        assert [r.step for r in torn.records] == [1, 2]
        if cut % 20 == 0:
            torn.append(sample(4))
            again = DiskStore(tmp_path)
            assert [r.step for r in again.records] == [1, 2, 4] == [r.step for r in torn.records]
            for found, step in zip(again, (1, 2, 4), strict=True):
                assert_is_sample(found, step)


def test_a_long_torn_line_is_found(tmp_path: Path) -> None:
    """Longer than one block of the search from the end."""
    store = DiskStore.create(tmp_path)
    store.append(sample(1))
    with open(tmp_path / MANIFEST, "ab") as manifest:
        manifest.write(b"x" * 10_000)
    store.append(sample(2))
    assert [r.step for r in DiskStore(tmp_path).records] == [1, 2]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"not json\n",
        b"[1, 2]\n",
        b"17\n",
        b"{}\n",
        b'{"format": "something else", "version": 1, "model": null}\n',
        b"\x80\x04\x95pickled\n",
        b'{"format": "lightning-sgmcmc samples", "version": 1, "model": null, "run": "a"}\nnot json\n',
        b'{"format": "lightning-sgmcmc samples", "version": 1, "model": null, "run": "a"}\n{"step": 1}\n',
        b'{"format": "lightning-sgmcmc samples", "version": 1, "model": null, "run": "a"}',
    ],
)
def test_a_foreign_manifest_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ValueError, match="is not the manifest of a sample store"):
        DiskStore(tmp_path)
    assert (tmp_path / MANIFEST).read_bytes() == content


@pytest.mark.parametrize("missing", ["version", "model", "run"])
def test_a_header_without_version_model_or_run_is_refused(missing: str, tmp_path: Path) -> None:
    header = {name: value for name, value in {"version": 1, "model": None, "run": "a"}.items() if name != missing}
    (tmp_path / MANIFEST).write_text(json.dumps({"format": "lightning-sgmcmc samples", **header}) + "\n")
    with pytest.raises(ValueError, match="is not the manifest of a sample store"):
        DiskStore(tmp_path)


@pytest.mark.parametrize(("number", "remedy"), [(4, "update it"), (0, "load it with the version that wrote it")])
def test_another_version_is_refused(number: int, remedy: str, tmp_path: Path) -> None:
    header = {"format": "lightning-sgmcmc samples", "version": number, "model": None, "run": "a"}
    (tmp_path / MANIFEST).write_text(json.dumps(header) + "\n")
    with pytest.raises(ValueError, match=f"has version {number}, this library reads up to 3: {remedy}"):
        DiskStore(tmp_path)


def test_a_sample_without_a_checksum_is_refused(tmp_path: Path) -> None:
    DiskStore.create(tmp_path).append(sample())
    header, line = (tmp_path / MANIFEST).read_text().splitlines()
    (tmp_path / MANIFEST).write_text(f"{header}\n{json.dumps(json.loads(line) | {'checksum': ''})}\n")
    with pytest.raises(ValueError, match=r"line 2 of .* is damaged"):
        DiskStore(tmp_path)


def test_a_newer_version_with_more_fields_says_so(tmp_path: Path) -> None:
    DiskStore.create(tmp_path).append(sample())
    text = (tmp_path / MANIFEST).read_text().replace('"version": 1', '"version": 4')
    (tmp_path / MANIFEST).write_text(text.replace('"step"', '"bin": 3, "step"'))
    with pytest.raises(ValueError, match="has version 4, this library reads up to 3"):
        DiskStore(tmp_path)


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_no_store(path: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no sample store at .*there is no {MANIFEST}"):
        DiskStore(tmp_path / path)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "noise", "header"])
def test_a_damaged_sample_is_named(damage: str, tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path)
    for step in (1, 2):
        store.append(sample(step))
    file = tmp_path / file_of(2)
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        broken = {"empty": b"", "cut": content[:-7], "noise": b"\xff" * 300, "header": b"\x08" + content[1:]}
        file.write_bytes(broken[damage])
    again = DiskStore(tmp_path)
    assert_is_sample(again[0], 1)
    with pytest.raises(ValueError, match=rf"sample file .*{file_of(2)} is missing or damaged"):
        again[1]


# -- dropping samples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STORES)
def test_keep(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path / "s")
    for step in range(1, 7):
        store.append(sample(step))
    store.keep([store.records[4], store.records[1]])  # in whatever order they are named
    assert [r.step for r in store.records] == [2, 5]
    assert_is_sample(store[0], 2)
    store.append(sample(9))
    if kind == "disk":
        store = DiskStore(tmp_path / "s")
        assert files(tmp_path / "s") == [file_of(2), file_of(5), file_of(9)]
    for found, step in zip(store, (2, 5, 9), strict=True):
        assert_is_sample(found, step)
    store.keep([])
    assert len(store) == 0
    if kind == "disk":
        assert files(tmp_path / "s") == []
        assert len(DiskStore(tmp_path / "s")) == 0


def test_keep_leaves_the_header(tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path, model_description=[1])
    store.append(sample(1))
    store.append(sample(2))
    store.keep(store.records[1:])
    again = DiskStore(tmp_path)
    assert (again.model_description, again.run_id) == ([1], store.run_id)
    assert [r.step for r in again.records] == [2]


def test_a_step_of_a_chain_is_stored_once(tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path)
    store.append(sample(1))
    store.append(sample(1, chain=1))
    with pytest.raises(ValueError, match="already has a sample of step 1, chain 0"):
        store.append(sample(1))
    assert len(DiskStore(tmp_path)) == 2


def test_keep_all_writes_nothing(tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path)
    store.append(sample(1))
    before = (tmp_path / MANIFEST).stat().st_mtime_ns
    store.keep(list(store.records))
    assert (tmp_path / MANIFEST).stat().st_mtime_ns == before


def test_keep_a_sample_whose_energy_is_nan(tmp_path: Path) -> None:
    store = DiskStore.create(tmp_path)
    store.append(PosteriorSample(1, 0, 0, math.nan))
    store.keep(DiskStore(tmp_path).records)
    assert len(store) == 1


def test_state_joins_parameters_and_buffers() -> None:
    drawn = sample(2)
    assert set(drawn.state) == {"w", "b", "count"}
    assert isinstance(drawn.state["count"], Tensor)


def test_tensors_come_back_in_the_order_of_the_module(tmp_path: Path) -> None:
    """Safetensors sorts or shuffles them; who flattens several samples needs one order."""
    names = [f"layer{index}" for index in (3, 1, 20, 2, 11, 0)]
    store = DiskStore.create(tmp_path / "s")
    for step in range(1, 6):
        parameters = {name: torch.full((step,), float(index)) for index, name in enumerate(names)}
        store.append(
            PosteriorSample(step, 0, 0, 0.0, parameters=parameters, buffers={"b": torch.ones(1), "a": torch.ones(1)})
        )
    for found in DiskStore(tmp_path / "s"):
        assert list(found.parameters) == names
        assert list(found.buffers) == ["b", "a"]
