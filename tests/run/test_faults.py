"""Signals, full disks, damaged stores: real processes and real files; what is kept, and what the user reads."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, Posterior
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.posterior.manifest import MANIFEST
from lightning_sgmcmc.run import interruption
from lightning_sgmcmc.run.checkpoints import AtomicCheckpointIO
from lightning_sgmcmc.run.interruption import FILE_NAME
from tests.support.processes import in_a_process
from tests.support.recorders import Each
from tests.support.trainers import quiet_trainer

STEPS, PER_EPOCH = 24, 6


def loader() -> ResumableLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PER_EPOCH * 4, 2, generator=generator)
    return ResumableLoader(TensorDataset(x, (x.sum(1) > 0).long()), 4)


def module(width: int = 8) -> BayesianModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
    return BayesianModule(net=net, likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=1)


def fit(folder: Path, *callbacks: pl.Callback, width: int = 8, keep: bool = True, **fit_options: Any) -> BayesianModule:
    """Run, or go on with, the run that the others are interruptions of."""
    model = module(width)
    own: list[pl.Callback] = [SamplingSchedule(every_n_steps=2), SampleCollector(folder / "samples"), *callbacks]
    if keep:
        own.append(pl.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=4))
    trainer = quiet_trainer(max_steps=STEPS, callbacks=own, enable_checkpointing=keep)
    trainer.fit(model, loader(), **fit_options)
    return model


def steps_of(folder: Path) -> list[int]:
    return [record.step for record in Posterior.load(folder / "samples").records]


# -- signals ----------------------------------------------------------------------------------------------------------


class SignalAt(pl.Callback):
    """Sends this process a signal in the middle of a step: the gradient is known, the update not made."""

    def __init__(self, step: int, *signals: int) -> None:
        self.step, self.signals = step, signals

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step - 1:
            for number in self.signals:
                os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code", "step"),
    [(signal.SIGTERM, 143, 12), (signal.SIGINT, 1, 12), (signal.SIGTERM, 143, 9), (signal.SIGINT, 1, 9)],
)
def test_an_interrupted_run_leaves_its_state_and_goes_on_exactly(
    number: int, code: int, step: int, tmp_path: Path
) -> None:
    whole = fit(tmp_path / "whole")
    stopped = tmp_path / "stopped"
    assert in_a_process(lambda: fit(stopped, SignalAt(step, number)), tmp_path / "said") == code
    assert steps_of(stopped) == list(range(2, step + 1, 2)), "the step in hand is finished, and its sample drawn"
    checkpoint = stopped / FILE_NAME
    state = torch.load(checkpoint, weights_only=True)
    assert state["optimizer_states"][0]["sampler"]["step_count"] == step
    resumed = fit(stopped, ckpt_path="last")
    assert steps_of(stopped) == steps_of(tmp_path / "whole") == list(range(2, STEPS + 1, 2))
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_sentence_of_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(interruption, "rank_zero_info", said.append)
    with pytest.raises(SystemExit):
        fit(tmp_path, SignalAt(5, signal.SIGTERM))
    path = tmp_path / FILE_NAME
    advice = f"resume with trainer.fit(…, ckpt_path='{path}')."
    assert said == [f"Interrupted at step 5: the run's state is in {path}; {advice}"]


def test_a_second_ctrl_c_stops_at_once_and_saves_no_half_step(tmp_path: Path) -> None:
    assert in_a_process(lambda: fit(tmp_path, SignalAt(9, signal.SIGINT, signal.SIGINT)), tmp_path / "said") == 1
    assert steps_of(tmp_path) == [2, 4, 6, 8]
    assert not (tmp_path / FILE_NAME).exists()
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 8


def test_an_interrupted_run_without_checkpoints(tmp_path: Path) -> None:
    run = lambda: fit(tmp_path, SignalAt(9, signal.SIGTERM), keep=False)  # noqa: E731
    assert in_a_process(run, tmp_path / "said") == 143
    assert steps_of(tmp_path) == [2, 4, 6, 8]
    assert not list(tmp_path.rglob("*.ckpt"))


def test_ctrl_c_is_the_users_own_again_after_a_fit(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    fit(tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ValueError, match="stop here"):
        fit(tmp_path, Fail())
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / FILE_NAME).exists(), "an error is no interruption"


class Fail(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        raise ValueError("stop here")


@pytest.mark.parametrize("when", [3, 8, 15])
def test_a_kill_loses_nothing_that_was_written(when: int, tmp_path: Path) -> None:
    assert in_a_process(lambda: fit(tmp_path, SignalAt(when, signal.SIGKILL))) == -9
    assert steps_of(tmp_path) == list(range(2, when, 2))
    for sample in Posterior.load(tmp_path / "samples"):
        assert all(t.isfinite().all() for t in sample.parameters.values())
    for path in tmp_path.glob("*.ckpt"):
        torch.load(path, weights_only=True)


@pytest.mark.slow
def test_sigterm_to_the_command_line(tmp_path: Path) -> None:
    config = f"""
        trainer:
          accelerator: cpu
          max_steps: 100000
          enable_progress_bar: false
          default_root_dir: {tmp_path}
          logger: {{class_path: pytorch_lightning.loggers.CSVLogger, init_args: {{save_dir: {tmp_path}}}}}
          callbacks:
            - {{class_path: lightning_sgmcmc.callbacks.SamplingSchedule, init_args: {{every_n_steps: 5}}}}
            - {{class_path: lightning_sgmcmc.callbacks.SampleCollector, init_args: {{dirpath: {tmp_path}/samples, max_samples: 20}}}}
            - class_path: pytorch_lightning.callbacks.ModelCheckpoint
              init_args: {{dirpath: {tmp_path}, every_n_train_steps: 1000}}
        model:
          class_path: lightning_sgmcmc.BayesianModule
          init_args:
            net: {{class_path: torch.nn.Linear, init_args: {{in_features: 64, out_features: 10}}}}
            likelihood: lightning_sgmcmc.Categorical
            lr: 0.01
        data: {{class_path: lightning_sgmcmc.datamodules.DigitsDataModule}}
    """  # noqa: E501
    (tmp_path / "run.yaml").write_text(textwrap.dedent(config))
    command = [sys.executable, "-m", "lightning_sgmcmc.cli", "fit", "--config", str(tmp_path / "run.yaml")]
    code = "from lightning_sgmcmc.cli import main; main()"
    command = [sys.executable, "-c", code, *command[3:]]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 120
        while not list((tmp_path / "samples").glob("*.safetensors")):
            assert time.monotonic() < end
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert f"the run's state is in {tmp_path / FILE_NAME}" in said
    assert "Traceback" not in said
    step = torch.load(tmp_path / FILE_NAME, weights_only=True)["global_step"]
    assert steps_of(tmp_path)[-1] == step // 5 * 5


# -- full disks -------------------------------------------------------------------------------------------------------


class FileLimit(pl.Callback):
    """From a step on, no file of this process may be larger than so many bytes: a real, partly made write."""

    def __init__(self, step: int, size: int) -> None:
        self.step, self.size = step, size

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def told(run: Callable[[], Any], where: Path) -> str:
    """Run in a process of its own and return the error that it ended with."""

    def guarded() -> None:
        try:
            run()
        except Exception as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            where.write_text(f"{type(error).__name__}: {error}")
            raise SystemExit(7) from error

    assert in_a_process(guarded) == 7
    return where.read_text()


def test_a_full_disk_at_a_sample(tmp_path: Path) -> None:
    message = told(lambda: fit(tmp_path, FileLimit(6, 500), keep=False), tmp_path / "error")
    assert message.startswith("OSError: [Errno 27]")
    path = tmp_path / "samples" / "sample-00000008-chain-000.safetensors"
    assert f"the sample of step 8 could not be written to {path} (0.00" in message
    assert "MB are free there); the 3 earlier samples are complete: free space, and resume from the last" in message
    assert steps_of(tmp_path) == [2, 4, 6]
    assert len(list(Posterior.load(tmp_path / "samples"))) == 3
    assert not list((tmp_path / "samples").glob("*.tmp"))


def test_a_full_disk_at_a_checkpoint_leaves_the_one_before(tmp_path: Path) -> None:
    message = told(lambda: fit(tmp_path, FileLimit(6, 2500)), tmp_path / "error")
    assert "could not be written: File too large (" in message
    assert "earlier checkpoints and samples are complete: free or repair the disk, and resume from the last" in message
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4
    assert steps_of(tmp_path) == [2, 4, 6, 8]
    assert not list(tmp_path.glob(".*"))
    fit(tmp_path, ckpt_path="last")
    assert steps_of(tmp_path) == list(range(2, STEPS + 1, 2))


def test_checkpoints_stay_the_users_own_way() -> None:
    class Mine(pl.plugins.io.TorchCheckpointIO):
        pass

    mine = Mine()
    trainer = quiet_trainer(max_steps=1, plugins=[mine])
    trainer.fit(module(), loader())
    assert trainer.strategy.checkpoint_io is mine
    plain = quiet_trainer(max_steps=1)
    plain.fit(module(), loader())
    assert isinstance(plain.strategy.checkpoint_io, AtomicCheckpointIO)


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
        lines = (path.parent / MANIFEST).read_text().splitlines()
        lines = [line if '"step": 4,' not in line else _without_checksum(line) for line in lines]
        (path.parent / MANIFEST).write_text("\n".join(lines) + "\n")

    return damage


def _without_checksum(line: str) -> str:
    record = json.loads(line)
    record.pop("checksum")
    return json.dumps(record)


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


def test_a_store_from_before_there_were_checksums(store: Path) -> None:
    lines = (store / MANIFEST).read_text().splitlines()
    (store / MANIFEST).write_text("\n".join([lines[0], *map(_without_checksum, lines[1:])]) + "\n")
    assert Posterior.load(store).predict(torch.zeros(1, 2)).probabilities is not None
    rename(store / file_of(4))
    with pytest.raises(ValueError, match="it holds step 6, chain 0, but the manifest has step 4, chain 0"):
        Posterior.load(store)[1]


def test_a_store_of_another_network(store: Path) -> None:
    message = (
        r"samples belong to another network than the model: 'net.0.bias' has shape \(8,\) in the samples and \(5,\)"
    )
    with pytest.raises(ValueError, match=message):
        Posterior.load(store, model=module(width=5))


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
