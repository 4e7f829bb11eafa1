"""SIGTERM and Ctrl-C to runs of several ranks, under each of Lightning's launchers."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.fit import ranks as agreement
from lightning_sgmcmc.fit.ranks import FILE_NAME
from tests.support.comparisons import assert_same
from tests.support.paths import REPOSITORY
from tests.support.problems import Net
from tests.support.processes import in_a_process
from tests.support.trainers import fit_in_layout


class SignalToOne(pl.Callback):
    """Sends one rank a signal in the middle of a step."""

    def __init__(self, rank: int, step: int, number: int) -> None:
        self.rank, self.step, self.number = rank, step, number

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_one_of_two_forked_ranks_saves_the_state_of_both(number: int, tmp_path: Path) -> None:
    """All ranks end after the same batch, and the run continues bit for bit, here with both chains in one process."""
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        fit_in_layout(tmp_path, 1, 2, callbacks=[SignalToOne(0, 6, number)])
    assert torch.load(tmp_path / FILE_NAME, weights_only=True)["global_step"] == 7
    samples, _ = fit_in_layout(tmp_path, 2, 1, ckpt_path=tmp_path / FILE_NAME)
    assert_same(fit_in_layout(tmp_path / "whole", 2, 1)[0], samples)


class SignalAtStart(pl.Callback):
    """Sends all ranks SIGTERM once the sanity check has ended, before the first step."""

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_to_two_ranks_before_the_first_step_ends_them(tmp_path: Path) -> None:
    """Lightning's handler exchanges it at once, in which the ranks waited for one another for ever."""
    fit = lambda: fit_in_layout(tmp_path, 1, 2, callbacks=[SignalAtStart()], num_sanity_val_steps=1)  # noqa: E731
    assert in_a_process(fit, timeout=40) == 1


class Deletion(pl.Callback):
    """Rank 0 deletes the store's list, as somebody may who clears the disk."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 8:
            (pl_module.posterior.store.path / "manifest.jsonl").unlink()


def test_two_ranks_whose_samples_are_deleted_are_told_so(tmp_path: Path) -> None:
    told = r"the samples of step 10 could not be written to .*deleted, with the 2 earlier samples: start a new run"
    with pytest.raises(ProcessRaisedException, match=told):
        fit_in_layout(tmp_path, 1, 2, callbacks=[Deletion()])


def test_ranks_agree_later_where_steps_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to one rank only, after the first steps: both end before the same batch, at most two intervals later, and
    the run continues bit for bit from their common checkpoint."""
    monkeypatch.setattr(agreement, "LONGEST", 5)
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        fit_in_layout(tmp_path, 1, 2, callbacks=[SignalToOne(1, 12, signal.SIGTERM)], steps=60)
    ended = torch.load(tmp_path / FILE_NAME, weights_only=True)["global_step"]
    assert agreement.TIMED < 12 + 1 < ended <= 12 + 2 * 5 + 1
    samples, _ = fit_in_layout(tmp_path, 2, 1, ckpt_path=tmp_path / FILE_NAME, steps=ended + 5)
    assert_same(fit_in_layout(tmp_path / "whole", 2, 1, steps=ended + 5)[0], samples)


def _exchanges(rank: int, file: str, seconds: float, requests: dict[int, int]) -> None:
    store = torch.distributed.FileStore(file, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ours = agreement.StopAgreement()
    for batch in range(300):
        time.sleep(seconds * rank)  # the other rank is slower
        if ours.on_stop(requests.get(rank, 1000) <= batch):
            break
    ours.end(well=True)
    Path(f"{file}.{rank}").write_text(f"{batch} {ours._every}")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("seconds", "requests", "last", "every"),
    [
        (0.0, {}, (299, 299), (50, 50)),
        (0.0, {0: 3}, (3, 3), (1, 1)),
        (0.02, {1: 40}, (41, 40 + 2 * 25 + 1), (15, 25)),
        pytest.param(0.6, {0: 14}, (14, 14), (1, 1), marks=pytest.mark.slow),
    ],
)
def test_ranks_read_a_request_before_the_same_batch(
    seconds: float, requests: dict[int, int], last: Any, every: Any, tmp_path: Path
) -> None:
    """At once in the first batches and in long ones; in short ones within two half seconds of the slower rank."""
    file = str(tmp_path / "store")
    torch.multiprocessing.start_processes(_exchanges, (file, seconds, requests), 2, start_method="fork")
    ends = [tuple(map(int, Path(f"{file}.{rank}").read_text().split())) for rank in range(2)]
    assert ends[0] == ends[1]
    assert last[0] <= ends[0][0] <= last[1]
    assert every[0] <= ends[0][1] <= every[1]


SCRIPT = """
    import os, sys, time
    from pathlib import Path

    import pytorch_lightning as pl
    import torch
    from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
    from tests.support.problems import Data, Net

    class Slow(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            time.sleep(0.02)
            if trainer.global_step == 5:
                Path(f"{trainer.global_rank}.ready").write_text(str(os.getpid()))

    if __name__ == "__main__":
        torch.set_num_threads(1)
        strategy, ranks, steps, *resume = sys.argv[1:]
        collector = SampleCollector("samples")
        saver = pl.callbacks.ModelCheckpoint("checkpoints", save_last=True, every_n_train_steps=10**6)
        trainer = pl.Trainer(
            accelerator="cpu", devices=int(ranks), strategy=strategy, max_steps=int(steps), max_epochs=-1,
            logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[SamplingSchedule(every_n_steps=5), collector, *([] if resume else [Slow()]), saver],
        )
        torch.manual_seed(0)
        trainer.fit(Net(), datamodule=Data(), ckpt_path=resume[0] if resume else None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("to", ["all", "launcher", "last rank"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("launcher", ["chains", "chains_fork", "chains_spawn", "torchrun"])
def test_a_run_ends_soon_with_a_checkpoint_and_continues_bit_for_bit(
    launcher: str, number: signal.Signals, to: str, ranks: int, tmp_path: Path
) -> None:
    (tmp_path / "run.py").write_text(textwrap.dedent(SCRIPT))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable]
    if launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    strategy = launcher.replace("torchrun", "chains")
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [*command, "run.py", strategy, str(ranks), "100000"],
            cwd=tmp_path,
            env=environment,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        _wait(lambda: len(list(tmp_path.glob("*.ready"))) == ranks, 200, process)
        pids = [int((tmp_path / f"{rank}.ready").read_text()) for rank in range(ranks)]
        begun = time.monotonic()
        if to == "all":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid if to == "launcher" else pids[-1], number)
        process.wait(60)
        _wait(lambda: not any(map(_is_alive, pids)), 60 - (time.monotonic() - begun))
    finally:
        with_group = [process.pid, *(int(p.read_text() or 0) for p in tmp_path.glob("*.ready"))]
        for pid in with_group:
            if pid and _is_alive(pid):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode != 0
    checkpoint = tmp_path / "checkpoints" / FILE_NAME
    assert checkpoint.exists(), (tmp_path / "said").read_text()[-3000:]
    steps = torch.load(checkpoint, weights_only=True)["global_step"] + 10
    resume = [sys.executable, "run.py", "chains_fork", str(ranks), str(steps), str(checkpoint)]
    subprocess.run(resume, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=200)
    whole, _ = fit_in_layout(tmp_path / "whole", ranks, 1, steps=steps)
    assert_same(whole, list(Posterior.load(tmp_path / "samples", model=Net()).store))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait(until: Any, seconds: float, process: Any = None) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "too long"
        assert process is None or process.poll() is None, "the run has ended"
        time.sleep(0.1)
