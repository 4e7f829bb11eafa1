"""Runs whose samples a thread writes, as on CUDA: what a signal, a kill, or a full disk leaves behind."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.samples import Drawing
from lightning_sgmcmc.fit.ranks import FILE_NAME
from lightning_sgmcmc.posterior import manifest
from tests.support.faults import STEPS, SignalAt, fit, loader, module, steps_of
from tests.support.full_disk import full_at
from tests.support.processes import in_a_process
from tests.support.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def samples_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the collector treat samples as a CUDA device's, and let the thread be slower than a step."""

    def slow(path: Path, content: bytes) -> None:
        time.sleep(0.03)
        write(path, content)

    write = manifest.write_atomically
    monkeypatch.setattr(Drawing, "on_cuda", property(lambda drawing: True))
    monkeypatch.setattr(manifest, "write_atomically", slow)


def counted(checkpoint: Path) -> int:
    """Return how many samples a checkpoint refers to."""
    callbacks = torch.load(checkpoint, weights_only=True)["callbacks"]
    return int(next(state["count"] for name, state in callbacks.items() if name.startswith("SampleCollector")))


def test_an_interrupted_run_loses_no_sample_and_goes_on_exactly(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    stopped = tmp_path / "stopped"
    assert in_a_process(lambda: fit(stopped, SignalAt(9, signal.SIGTERM)), tmp_path / "said") == 143
    assert steps_of(stopped) == [2, 4, 6, 8]
    assert counted(stopped / FILE_NAME) == 4
    resumed = fit(stopped, ckpt_path="last")
    assert steps_of(stopped) == steps_of(tmp_path / "whole") == list(range(2, STEPS + 1, 2))
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for one, other in zip(Posterior.load(stopped / "samples"), Posterior.load(tmp_path / "whole/samples"), strict=True):
        assert all(torch.equal(tensor, other.state[name]) for name, tensor in one.state.items())


def test_a_kill_leaves_every_sample_that_a_checkpoint_refers_to(tmp_path: Path) -> None:
    assert in_a_process(lambda: fit(tmp_path, SignalAt(15, signal.SIGKILL))) == -9
    steps = steps_of(tmp_path)
    assert steps == list(range(2, 2 * len(steps) + 1, 2)), "those before the last ones that were written"
    checkpoints = list(tmp_path.glob("*.ckpt"))
    assert checkpoints
    assert all(counted(path) <= len(steps) for path in checkpoints)
    assert len(list(Posterior.load(tmp_path / "samples"))) == len(steps)
    fit(tmp_path, ckpt_path="last")
    assert steps_of(tmp_path) == list(range(2, STEPS + 1, 2))


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_full_disk_ends_the_run_at_the_next_sample_or_checkpoint(
    checkpoints: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_at(monkeypatch, "00000008")
    with pytest.raises(OSError, match=r"the sample of step 8 could not be written.*the 3 earlier samples are complete"):
        fit(tmp_path, keep=checkpoints)
    assert steps_of(tmp_path) == [2, 4, 6]
    saved = sorted(counted(path) for path in tmp_path.glob("*.ckpt"))
    assert max(saved, default=0) == (2 if checkpoints else 0), "the state of step 8 counts a sample that is lost"


def test_the_newest_samples_are_kept(tmp_path: Path) -> None:
    collector = SampleCollector(tmp_path / "samples", max_samples=3)
    trainer = quiet_trainer(max_steps=STEPS, callbacks=[SamplingSchedule(every_n_steps=2), collector])
    trainer.fit(module(), loader())
    assert steps_of(tmp_path) == [20, 22, 24]
    assert len(list((tmp_path / "samples").glob("*.safetensors"))) == 3


def test_samples_in_memory(tmp_path: Path) -> None:
    collector = SampleCollector(in_memory=True)
    trainer = quiet_trainer(max_steps=STEPS, callbacks=[SamplingSchedule(every_n_steps=2), collector])
    own: Any = module()
    trainer.fit(own, loader())
    assert [record.step for record in own.posterior.records] == list(range(2, STEPS + 1, 2))
    last = own.posterior[-1].parameters
    assert all(torch.equal(last[name], p) for name, p in own.named_parameters())
