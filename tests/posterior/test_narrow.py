"""Samples in 16 bits: half the bytes, float32 when read, and nearly the same predictions."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_sgmcmc import BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.datamodules import TableDataModule
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.store import MemoryStore, Narrow
from tests.support.faults import limited_files
from tests.support.trainers import quiet_trainer

DTYPES = {"bfloat16": 2**-8, "float16": 2**-11}
"""Half the distance of two neighbours, relative to them: at most."""


def fitted(collector: SampleCollector, ckpt_path: Path | None = None, steps: int = 12) -> BayesianModule:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(75, 5, generator=generator)
    data = TableDataModule(x, x[:, :3].argmax(1), batch_size=16, val_fraction=0.2, test_fraction=0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(5, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))
    module = BayesianModule(net, Categorical(), lr=0.02, seed=1, num_chains=2)
    trainer = quiet_trainer(max_steps=steps, callbacks=[SamplingSchedule(every_n_steps=4), collector])
    trainer.fit(module, datamodule=data, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return module


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", [None, "mean"])
def test_what_is_read_is_what_was_drawn_but_for_the_rounding(dtype: str, base: Any, tmp_path: Path) -> None:
    posterior = fitted(SampleCollector(tmp_path / "wide")).posterior
    assert posterior is not None
    posterior.save(tmp_path / "narrow", dtype=dtype, base=base)
    found = Posterior.load(tmp_path / "narrow")
    assert [vars(r) | {"checksum": ""} for r in found.records] == [
        vars(r) | {"checksum": ""} for r in posterior.records
    ]
    means = {name: torch.stack([s.parameters[name] for s in posterior]).mean(0) for name in posterior[0].parameters}
    for one, other in zip(posterior, found, strict=True):
        for name, parameter in one.parameters.items():
            difference = parameter if base is None else parameter - means[name]
            assert other.parameters[name].dtype == torch.float32
            error = (other.parameters[name] - parameter).abs()
            assert bool((error <= DTYPES[dtype] * difference.abs() + 1e-6 * parameter.abs() + 1e-7).all()), name
        torch.testing.assert_close(other.buffers, one.buffers, rtol=0, atol=0)
        assert next(iter(found.store.parameters(0, ["net.0.weight"]).values())).dtype == torch.float32
    x = torch.randn(33, 5)
    assert found.predict(x).probabilities.dtype == torch.float32
    torch.testing.assert_close(found.predict(x).probabilities, posterior.predict(x).probabilities, rtol=0.05, atol=0.01)
    stored = load_file(tmp_path / "narrow" / found.records[0].file)
    assert stored["parameter.net.0.weight"].dtype == getattr(torch, dtype)
    assert stored["buffer.net.1.running_mean"].dtype == torch.float32


def test_the_mean_as_base_keeps_more_digits_of_samples_that_differ_little(tmp_path: Path) -> None:
    store = MemoryStore()
    for step in range(5):
        store.append(PosteriorSample(step, 0, 0, 0.0, parameters={"w": 1 + 1e-3 * torch.randn(2000)}))
    posterior = Posterior(store)
    error = {}
    for base in (None, "mean"):
        saved = posterior.save(tmp_path / str(base), dtype="bfloat16", base=base)  # type: ignore[arg-type]
        pairs = zip(saved, posterior, strict=True)
        error[base] = max(float((a.parameters["w"] - b.parameters["w"]).abs().max()) for a, b in pairs)
    assert error[None] > 1e-3
    assert error["mean"] < 2e-5


def test_a_fit_stores_half_the_bytes_and_goes_on_in_its_own_dtype(tmp_path: Path) -> None:
    wide = fitted(SampleCollector(tmp_path / "wide")).posterior
    module = fitted(SampleCollector(tmp_path / "narrow", dtype="bfloat16"))
    narrow, resident = module.posterior, fitted(SampleCollector(in_memory=True, dtype="bfloat16")).posterior
    assert wide is not None
    assert narrow is not None
    assert resident is not None
    for one, other, third in zip(wide, narrow, resident, strict=True):
        for name, parameter in one.parameters.items():
            assert torch.equal(parameter.bfloat16().float(), other.parameters[name])
            assert torch.equal(third.parameters[name], other.parameters[name])
    header = (tmp_path / "narrow" / "manifest.jsonl").read_text().splitlines()[0]
    assert json.loads(header) | {"run": ""} == json.loads(
        (tmp_path / "wide" / "manifest.jsonl").read_text().splitlines()[0]
    ) | {"run": "", "version": 3, "dtype": "bfloat16"}
    checkpoint = tmp_path / "last.ckpt"
    module.trainer.save_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=r"dtype=None differs from that of the samples in .*, 'bfloat16'"):
        fitted(SampleCollector(tmp_path / "narrow"), checkpoint, 16)
    further = fitted(SampleCollector(tmp_path / "narrow", dtype="bfloat16"), checkpoint, 16).posterior
    assert further is not None
    assert len(further) == len(narrow) + 2


def test_any_selection_is_saved_with_its_weights_and_calibration(tmp_path: Path) -> None:
    module = fitted(SampleCollector(in_memory=True))
    assert module.posterior is not None
    x = torch.randn(20, 5)
    chosen = module.posterior.resample(11, "multinomial", seed=3)
    saved = chosen.save(tmp_path / "drawn")
    assert len(saved) < 11
    torch.testing.assert_close(saved.predict(x).probabilities, chosen.predict(x).probabilities)
    calibrated = module.posterior[::2].calibrate([(x, torch.randint(3, (20,)))])
    calibrated.save(tmp_path / "calibrated", dtype=torch.bfloat16, base="mean")
    again = Posterior.load(tmp_path / "calibrated")  # builds the network from its description
    assert again.calibration is not None
    assert again.calibration.value == calibrated.calibration.value  # type: ignore[union-attr]
    assert size(tmp_path / "calibrated") > 0
    twice = again[1:].save(tmp_path / "twice")  # as it is stored
    assert twice.store.narrow is not None
    for one, other in zip(again[1:], twice, strict=True):
        torch.testing.assert_close(one.parameters, other.parameters, rtol=1e-5, atol=1e-6)
    assert again.save(tmp_path / "full", dtype="float32").store.narrow is None
    with pytest.raises(FileExistsError, match="already contains a sample store"):
        again.save(tmp_path / "twice")


@pytest.mark.parametrize("why", ["a number", "a full disk"])
def test_a_save_that_fails_leaves_nothing_that_loads_like_all_samples(why: str, tmp_path: Path) -> None:
    nets = [nn.Linear(20, 2) for _ in range(5)]
    nets[3].weight.data[0, 0] = 1e6 if why == "a number" else 1.0
    posterior = Posterior.from_states(nn.Linear(20, 2), nets, Categorical())
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "README").write_text("mine")
    if why == "a number":
        with pytest.raises(ValueError, match="numbers above the largest float16"):
            posterior.save(folder, dtype="float16")
    else:
        with (
            limited_files(1000),
            pytest.raises(OSError, match=r"could not be written to .*mine: File too large.*free space"),
        ):
            posterior.save(folder)
    assert [path.name for path in folder.iterdir()] == ["README"]
    assert len(Posterior.load(posterior.save(folder, dtype="bfloat16").store.path)) == 5


def test_a_thread_writes_what_the_run_would(tmp_path: Path) -> None:
    """As on a GPU, where samples are queued."""
    store = DiskStore.create(tmp_path / "s", narrow=Narrow("bfloat16"))
    samples = [PosteriorSample(step, 0, 0, 0.0, parameters={"w": torch.randn(50)}) for step in range(4)]
    for one in samples:
        store.append_later(one, lambda one=one: one)  # type: ignore[misc]
    store.close()
    for one, other in zip(samples, DiskStore(tmp_path / "s"), strict=True):
        assert torch.equal(one.parameters["w"].bfloat16().float(), other.parameters["w"])


def test_a_foreign_base_is_named(tmp_path: Path) -> None:
    """One of another shape would be broadcast to any size."""
    store = DiskStore.create(tmp_path / "s", narrow=Narrow("bfloat16", {"w": torch.ones(1, 5)}))
    store.append(PosteriorSample(0, 0, 0, 0.0, parameters={"w": torch.ones(3, 1)}))
    with pytest.raises(ValueError, match=r"base has 'w' of shape \(1, 5\) .* a sample of \(3, (1|5)\)"):
        DiskStore(tmp_path / "s")[0]


def test_a_missing_base_is_named(tmp_path: Path) -> None:
    store = MemoryStore()
    store.append(PosteriorSample(0, 0, 0, 0.0, parameters={"w": torch.ones(3)}))
    Posterior(store).save(tmp_path / "s", dtype="bfloat16", base="mean")
    (tmp_path / "s" / "base.safetensors").unlink()
    with pytest.raises(ValueError, match=r"base.safetensors, the base of the samples' differences, is missing"):
        DiskStore(tmp_path / "s")[0]


@pytest.mark.parametrize(
    ("parameter", "options", "message"),
    [
        (torch.ones(2).double(), {"dtype": "bfloat16"}, r"rounds float32 parameters, and 'w' is torch.float64"),
        (torch.full((2,), 1e5), {"dtype": "float16"}, r"above the largest float16: pass dtype='bfloat16'"),
        (torch.ones(2), {"base": "mean"}, r"base='mean' only helps parameters in 16 bits"),
        (torch.ones(2), {"dtype": "int8"}, r"dtype='int8'|dtype.*int8"),
        (torch.ones(2), {"dtype": "bfloat16", "base": "first"}, r"base='first' is not known"),
    ],
)
def test_what_cannot_be_narrowed(parameter: Any, options: Any, message: str, tmp_path: Path) -> None:
    store = MemoryStore()
    store.append(PosteriorSample(0, 0, 0, math.nan, parameters={"w": parameter}))
    with pytest.raises(ValueError, match=message):
        Posterior(store).save(tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()
    with pytest.raises(ValueError, match="dtype"):
        SampleCollector(dtype="int8")


def test_networks_that_were_trained_elsewhere_are_saved_and_load_by_themselves(tmp_path: Path) -> None:
    members = [nn.Linear(4, 3) for _ in range(3)]
    posterior = Posterior.from_states(nn.Linear(4, 3), members, Categorical(), weights=[1, 2, 0])
    posterior.save(tmp_path / "s")
    x = torch.randn(7, 4)
    found = Posterior.load(tmp_path / "s").predict(x).probabilities
    torch.testing.assert_close(found, posterior.predict(x).probabilities)
    merged = Posterior.merge(posterior, Posterior.load(tmp_path / "s"))
    again = merged.save(tmp_path / "merged", dtype="bfloat16")
    assert len(again) == 6
    torch.testing.assert_close(again.predict(x).probabilities, found, rtol=0.02, atol=0.01)


@pytest.mark.slow
def test_onnx_of_five_samples_predicts_what_they_do(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript", minversion="0.4")
    posterior = fitted(SampleCollector(tmp_path / "s", dtype="bfloat16"), steps=16).posterior
    assert posterior is not None
    five, x, file = posterior.thin(count=5), torch.randn(8, 5), str(tmp_path / "five.onnx")
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    torch.onnx.export(five.ensemble(), (x,), file, input_names=["x"], dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for count in (1, 8):
        (found,) = session.run(None, {"x": x[:count].numpy()})
        expected = five.predict(x[:count]).probabilities
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-5)
