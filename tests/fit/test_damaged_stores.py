"""Damaged, foreign, lost and limited stores: what is kept, and what the user reads."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.posterior.manifest import MANIFEST
from tests.support import corpus
from tests.support.faults import STEPS, fit, loader, module
from tests.support.recorders import Each
from tests.support.trainers import quiet_trainer

# -- damaged and foreign stores ---------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Path:
    fit(tmp_path, keep=False)
    return tmp_path / "samples"


def file_of(step: int) -> str:
    return f"sample-{step:08d}-chain-000.safetensors"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(bytes(content))


def rename(path: Path) -> None:
    path.write_bytes((path.parent / file_of(6)).read_bytes())


def rewrite(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Return what changes a file's tensors and makes the manifest agree, as a foreign program would."""

    def damage(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"step": "4", "chain": "0"})
        corpus.with_their_checksums(path.parent)

    return damage


WEIGHT = "parameter.net.0.weight"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "is missing or damaged: its checksum differs from the manifest"),
    "flipped": (flip, "is missing or damaged: its checksum differs from the manifest"),
    "missing": (lambda path: path.unlink(), "is missing or damaged: .*No such file"),
    "renamed": (rename, "is missing or damaged: its checksum differs from the manifest"),
    "shape": (
        rewrite(lambda t: t.update({WEIGHT: torch.zeros(3, 2)})),
        r"'net.0.weight' has shape \(3, 2\) in the samples and \(8, 2\) in the model",
    ),
    "dtype": (
        rewrite(lambda t: t.update({WEIGHT: t[WEIGHT].long()})),
        "'net.0.weight' has type int64 in the samples and float32 in the model",
    ),
    "missing key": (
        rewrite(lambda t: t.pop(WEIGHT)),
        "'net.0.weight' has shape none in the samples",
    ),
    "extra key": (
        rewrite(lambda t: t.update({"parameter.more": torch.zeros(2)})),
        r"'more' has shape \(2,\) in the samples and none in the model",
    ),
    "nan": (
        rewrite(lambda t: t[WEIGHT].view(-1)[0].fill_(float("nan"))),
        "sample of step 4, chain 0 has NaN or infinite numbers in 'net.0.weight'",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_sample_is_named_and_the_rest_can_be_had(kind: str, store: Path) -> None:
    damage, message = DAMAGES[kind]
    damage(store / file_of(4))
    before = sorted(path.name for path in store.iterdir())
    x = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=message) as caught:
        Posterior.load(store).predict(x)
    assert "\n" not in str(caught.value)
    assert "skip_damaged=True" in str(caught.value)
    with pytest.warns(UserWarning, match=r"1 of 12 samples .* skipped, the first since .*"):
        rest = Posterior.load(store, skip_damaged=True)
    assert [r.step for r in rest.records] == [2, *range(6, STEPS + 1, 2)]
    assert rest.predict(x).probabilities.isfinite().all()  # type: ignore[union-attr]
    assert sorted(path.name for path in store.iterdir()) == before, "nothing is deleted"


def test_a_damaged_line_in_the_middle(store: Path) -> None:
    lines = (store / MANIFEST).read_text().splitlines()
    lines[3] = lines[3][:20]
    (store / MANIFEST).write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"line 4 of .*manifest.jsonl .*damaged.*skip_damaged=True"):
        Posterior.load(store)
    with pytest.warns(UserWarning, match="1 of 12 samples .* skipped"):
        rest = Posterior.load(store, skip_damaged=True)
    assert [r.step for r in rest.records] == [2, 4, *range(8, STEPS + 1, 2)]


def test_a_sound_store_is_loaded_without_a_word(store: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert len(Posterior.load(store, skip_damaged=True)) == 12
    assert not [w for w in recwarn if "skipped" in str(w.message)]


def test_a_store_of_another_network(store: Path) -> None:
    message = (
        r"samples belong to another network than the model: 'net.0.bias' has shape \(8,\) in the samples and \(5,\)"
    )
    with pytest.raises(ValueError, match=message):
        Posterior.load(store, model=module(width=5))


def test_a_store_with_a_buffer_of_another_type(tmp_path: Path) -> None:
    def net(scale: Any) -> nn.Module:
        made = nn.Linear(2, 2)
        made.register_buffer("scale", torch.tensor(scale))
        return made

    x = torch.randn(20, 2)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 10)
    callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(tmp_path)]
    quiet_trainer(max_steps=4, callbacks=callbacks).fit(BayesianModule(net(1.0), Categorical()), data)
    with pytest.raises(ValueError, match=r"'net\.scale' has type float32 in the samples and int64 in the model"):
        Posterior.load(tmp_path, net=net(1))


def test_the_network_of_a_fit_with_several_chains(tmp_path: Path) -> None:
    net, x = nn.Linear(2, 2), torch.randn(20, 2)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 10)
    several = BayesianModule(net, Categorical(), num_chains=3)
    callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(tmp_path)]
    quiet_trainer(max_steps=4, callbacks=callbacks).fit(several, data)
    with pytest.raises(ValueError, match=r"a fit with 3 chains, .*: pass a new network as net=…, or .* as model=…"):
        Posterior.load(tmp_path, net=net)
    found = [Posterior.load(tmp_path, **given).predict(x).entropy for given in ({"net": nn.Linear(2, 2)}, {})]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("make", [lambda p: p.write_text(""), lambda p: (p.parent / "x").write_text("")])
def test_a_folder_that_cannot_be_written_is_seen_before_the_first_step(make: Any, tmp_path: Path) -> None:
    """(Permissions do not stop root, so the folder is a file, or lies in one.)"""
    path = tmp_path / "samples"
    make(path)
    count = Each("on_train_batch_start", lambda *args: 1)
    where = path if path.exists() else tmp_path / "x" / "samples"
    with pytest.raises(OSError, match=rf"no sample store can be created at {where}: .*pass another dirpath"):
        quiet_trainer(max_steps=4, callbacks=[SamplingSchedule(every_n_steps=1), SampleCollector(where), count]).fit(
            module(), loader()
        )
    assert not count.seen


def test_no_permission_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError, match=r"no sample store can be created at .*: Permission denied"):
        fit(tmp_path, keep=False)


def test_a_store_that_is_gone_on_resume(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop here"):
        fit(tmp_path, FailAt(10))
    (tmp_path / "samples").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"checkpoint refers to 4 samples in .*, which holds 0: restore the folder"):
        fit(tmp_path, ckpt_path="last")


def test_a_store_that_is_deleted_in_mid_fit(tmp_path: Path) -> None:
    """The sentence does not speak of samples that are complete."""

    def delete(trainer: pl.Trainer, *_: Any) -> int:
        if trainer.global_step == 5:
            shutil.rmtree(tmp_path / "samples")
        return 0

    with pytest.raises(OSError, match=r"step 6 could not be written to .*deleted, with the 2 earlier.*a new run"):
        fit(tmp_path, Each("on_train_batch_end", delete))


class FailAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise ValueError("stop here")


# -- a limited number of samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail", [9, 15])
def test_samples_that_were_pushed_out_come_back_on_resume(fail: int, tmp_path: Path) -> None:
    """The posterior of a resumed run is that of one without a stop, also where the limit pushed samples out since."""

    def run(folder: Path, *callbacks: pl.Callback, **options: Any) -> Posterior:
        collector = SampleCollector(folder / "samples", max_samples=3)
        keep = pl.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=6)
        own = [SamplingSchedule(every_n_steps=1), collector, keep, *callbacks]
        trainer = quiet_trainer(max_steps=18, callbacks=own, enable_checkpointing=True)
        trainer.fit(module(), loader(), **options)
        return Posterior.load(folder / "samples")

    whole = run(tmp_path / "whole")
    with pytest.raises(ValueError, match="stop here"):
        run(tmp_path / "stopped", FailAt(fail))
    store = tmp_path / "stopped" / "samples"
    assert [r.step for r in Posterior.load(store).records] == [fail - 3, fail - 2, fail - 1]
    seen: list[list[int]] = []

    class AtStart(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen.append([r.step for r in pl_module.posterior.records])

    again = run(tmp_path / "stopped", AtStart(), ckpt_path="last")
    checkpoint = fail // 6 * 6
    assert seen == [[checkpoint - 2, checkpoint - 1, checkpoint]]
    assert again.records == whole.records
    assert len(list(store.glob("*.safetensors"))) == 3, "what is no longer wanted is gone"
