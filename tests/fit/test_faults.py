"""Signals, kills and full disks: real processes and real files; what is kept, and what the user reads."""

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

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ChainHealth,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.fit import ranks as interruption
from lightning_sgmcmc.fit.checkpoints import AtomicCheckpointIO
from lightning_sgmcmc.fit.ranks import FILE_NAME
from tests.support.faults import STEPS, SignalAt, fit, limited_files, loader, module, steps_of
from tests.support.processes import in_a_process
from tests.support.trainers import quiet_trainer

# -- signals ----------------------------------------------------------------------------------------------------------


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


def test_a_full_disk_at_a_report_leaves_the_samples_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What only describes the run is named in a warning; the fit ends well, and its sentences are printed."""
    collector = SampleCollector(in_memory=True)

    def run() -> None:
        reports = [BayesianModelAverage(), ChainHealth(), RunSummary(), PosteriorDashboard(figures=["tables"])]
        callbacks = [SamplingSchedule(every_n_steps=2), collector, *reports, FileLimit(6, 0)]
        trainer = quiet_trainer(max_steps=STEPS, callbacks=callbacks, default_root_dir=tmp_path)
        trainer.fit(module(), loader(), torch.utils.data.DataLoader(loader().dataset, 8))

    with limited_files(), pytest.warns(UserWarning, match="the run continues without it") as caught:
        run()
    assert collector.posterior is not None
    assert [record.step for record in collector.posterior.records] == list(range(2, STEPS + 1, 2))
    said = " ".join(str(one.message) for one in caught)
    for name in ("health.json", "results.json", "summary.txt"):
        assert f"{tmp_path / 'sgmcmc' / name} could not be written: File too large (" in said
    assert said.count("PosteriorDashboard could not") == 1
    assert "The average of 12 samples is" in " ".join(capsys.readouterr().out.split())


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
