"""A rank that hangs is noticed in every hook; one that computes, waits, sleeps or is started again is not."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, ChainStrategy
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.fit.ranks import Beat, Judge, prefix_of_fit
from tests.support.problems import Blobs, blob_network
from tests.support.trainers import quiet_trainer

# -- the judge, by a clock of the test --------------------------------------------------------------------------------


def beat(number: int, progress: int, busy: bool = False, ended: bool = False) -> Beat:
    return Beat(number, progress, busy, progress // 2, ended)


def verdicts(judge: Judge, seconds: int, *ranks: Any, every: int = 5, begin: int = 0) -> list[int | None]:
    """Return what a judge says at its looks; a rank is (progress, busy, ended), and alive."""
    looks = range(begin, begin + seconds + 1, every)
    return [judge.observe([beat(now, *rank) for rank in ranks], now) for now in looks]


def test_the_rank_that_is_least_far_hangs() -> None:
    judge = Judge(10, 5)
    assert judge.observe([beat(0, 5), beat(0, 4)], 0) is None
    assert judge.observe([beat(1, 5), beat(1, 4)], 10) is None
    assert judge.observe([beat(2, 5), beat(2, 4)], 11) == 1
    assert judge.observe([beat(3, 5), beat(3, 5)], 12) is None, "it goes on, and the other has only waited for it"
    assert Beat.from_text(beat(7, 3, True).to_text()) == beat(7, 3, True)


def test_a_process_that_gives_no_sign_hangs_whatever_it_does() -> None:
    judge = Judge(10, 5)
    assert set(verdicts(judge, 95, (5, True), (6,))) == {None}
    assert judge.observe([beat(95, 5, busy=True), beat(101, 6)], 104) is None
    assert judge.observe([beat(95, 5, busy=True), beat(102, 6)], 106) == 0
    assert judge.observe([beat(95, 5, ended=True), beat(103, 7)], 200) is None, "its fit has ended"


@pytest.mark.parametrize(
    ("ranks", "limit", "hangs"),
    [
        (((6, True), (5,)), None, 1),  # the other waits in a validation
        (((6, True), (5,)), 20, 1),
        (((6,), (5, True)), None, None),  # whoever waits for a long validation fails by its own timeout
        (((6,), (5, True)), 20, 1),  # or by the user's, with the rank's name
        (((5, True), (5, True)), 20, None),  # all compile, evaluate or save
        (((5,), (5, True)), 20, None),  # one does, and the other may wait for it or not
        (((9, False, True), (5, True)), None, None),  # the last rank writes its report
        (((9, False, True), (5, True)), 20, 1),
        (((9, False, True), (5,)), None, 1),
    ],
)
def test_busy_counts_only_of_the_rank_that_is_least_far(ranks: Any, limit: float | None, hangs: int | None) -> None:
    found = verdicts(Judge(10, 5, limit), 60, *ranks)
    assert found[-1] == hangs
    assert found[2] is None, "not before the time"


@pytest.mark.parametrize("busy", [False, True])
def test_a_job_that_was_stopped_and_continued_goes_on(busy: bool) -> None:
    """`scontrol suspend`, a virtual machine that moves, a computer that sleeps: the wall's clock jumps by an hour."""
    judge = Judge(10, 2, 10)
    assert set(verdicts(judge, 4, (5, busy), (4, busy), every=2)) == {None}
    assert judge.observe([beat(9, 5, busy), beat(9, 4, busy)], 3600) is None
    assert judge.observe([beat(9, 5, busy), beat(9, 4, busy)], 3601) is None, "their threads have not beaten yet"
    assert judge.observe([beat(10, 5, busy), beat(10, 5, busy)], 3602) is None
    assert verdicts(judge, 20, (6, busy), (5, busy), every=2, begin=3604)[-1] == 1, "a rank that hangs now is found"


def test_a_run_that_torchrun_starts_again_reads_no_beats_of_its_last_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        prefixes.append(prefix_of_fit().rsplit("/", 1)[0])
    assert prefixes[0] != prefixes[1]


# -- real ranks -------------------------------------------------------------------------------------------------------

TIMEOUT = 4.0
STRATEGIES: dict[str, Any] = {"ddp": DDPStrategy, "chains": ChainStrategy}
PLACES = {
    "on_fit_start": 0,
    "on_train_start": 0,
    "on_train_epoch_start": 4,
    "on_train_batch_start": 5,
    "on_before_optimizer_step": 5,
    "on_train_batch_end, first": 5,
    "on_train_batch_end, middle": 6,
    "on_train_batch_end, last": 8,
    "on_posterior_sample": 6,
    "on_validation_start": 4,
    "on_validation_batch_end": 4,
    "on_validation_epoch_end": 4,
    "on_train_epoch_end": 8,
    "on_save_checkpoint": 6,
    "on_train_end": 12,
}
"""Hooks and the step at which rank 1 stays in them, of 3 epochs of 4 batches."""
BY_DEFAULT = "on_train_batch_end, last"


class Hang(pl.Callback):
    """One rank stays in a hook, far longer than the test waits."""

    def __init__(self, rank: int, step: int, hook: str, seconds: float = 60) -> None:
        self.rank, self.step, self.seconds = rank, step, seconds
        setattr(self, hook, self._wait)

    def _wait(self, trainer: pl.Trainer, *args: Any) -> None:
        if (trainer.global_rank, trainer.global_step, trainer.sanity_checking) == (self.rank, self.step, False):
            time.sleep(self.seconds)


def fit(folder: Path, strategy: str, *callbacks: pl.Callback, **options: Any) -> None:
    saver = pl.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(
        **({"max_epochs": 3} | options),
        devices=2,
        strategy=STRATEGIES[strategy](start_method="fork", timeout=timedelta(seconds=TIMEOUT)),
        enable_checkpointing=True,
        callbacks=[*callbacks, SamplingSchedule(every_n_steps=2), SampleCollector(folder / "samples"), saver],
    )
    data = Blobs()
    size = 12 if strategy == "ddp" else 24  # four batches of each rank
    trainer.fit(
        BayesianModule(net=blob_network(), likelihood=Categorical()),
        DataLoader(TensorDataset(data.x[:96], data.y[:96]), size, shuffle=True),
        data.val_dataloader(),
    )


def check_that_it_ends(folder: Path, strategy: str, hook: str, step: int, **options: Any) -> None:
    begun = time.monotonic()
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        fit(folder, strategy, Hang(1, step, hook.split(",")[0]), **options)
    assert time.monotonic() - begun < 40


@pytest.mark.by_default(f"{BY_DEFAULT}-chains")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "place", [BY_DEFAULT, *(pytest.param(p, marks=pytest.mark.slow) for p in PLACES if p != BY_DEFAULT)]
)
def test_a_rank_that_stays_in_a_hook_ends_the_run_within_the_users_timeout(
    strategy: str, place: str, tmp_path: Path
) -> None:
    """`pytest -m slow tests/fit/test_hanging_ranks.py` tries all hooks; before, 5 of 14 waited half an hour."""
    check_that_it_ends(tmp_path, strategy, place, PLACES[place])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_one_batch_in_an_epoch_too(strategy: str, tmp_path: Path) -> None:
    check_that_it_ends(tmp_path, strategy, "on_train_batch_end", 5, max_epochs=12, limit_train_batches=1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("hook", "step"), [("on_train_batch_end", 6), ("on_validation_batch_end", 4)])
def test_a_slow_rank_is_waited_for(strategy: str, hook: str, step: int, tmp_path: Path) -> None:
    fit(tmp_path, strategy, Hang(1, step, hook, seconds=0.4 * TIMEOUT))
    assert (tmp_path / "step=12.ckpt").exists()
