"""The recipes' runner: nothing that has ended is run again, and nothing that ended early is lost."""

import ast
import functools
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.recipes.shared import trainers
from lightning_sgmcmc.recipes.shared.jobs import Planned, duration, run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.records import Recording
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.store import JobStore, program
from lightning_sgmcmc.recipes.shared.trainers import kept_samples, quiet_trainer, resumed_fit, silence_lightning
from lightning_sgmcmc.samplers import SGHMC
from tests.recipes.test_jobs import waited_for
from tests.support.problems import blobs, classifier
from tests.support.recipe_jobs import computed, slow, square

in_turn = functools.partial(run_jobs, in_turn=True)


def test_a_finished_job_is_not_repeated_and_a_failure_stops_no_other(tmp_path: Path, capsys: Any) -> None:
    options = Options(tmp_path / "out", tmp_path)
    (tmp_path / "broken").touch()
    jobs = [(number,) for number in (2, 3, 4)]
    with pytest.raises(RuntimeError, match=r"1 of 3 jobs failed, the first is 3 .ValueError: no square today.*again"):
        in_turn(square, jobs, options, 2.0)
    (tmp_path / "broken").unlink()
    assert in_turn(square, jobs, options, 2.0) == {(2,): 4, (3,): 9, (4,): 16}
    assert computed(options) == [2, 3, 3, 4]
    assert "2 of 3 jobs are of an earlier run" in capsys.readouterr().err
    assert in_turn(square, [*jobs, (5,)], options, 2.0)[(5,)] == 25
    assert computed(options) == [2, 3, 3, 4, 5]
    for other in (replace(options, seed=1), replace(options, changed={"lr": "1"})):
        assert in_turn(square, [(2,)], other, 2.0) == {(2,): 4}
    assert in_turn(square, [(2,)], options, 3.0) == {(2,): 8}
    assert computed(options).count(2) == 4


def test_a_job_with_tensors_has_the_same_name_for_the_same_values(tmp_path: Path) -> None:
    """Pickles of equal tensors differ, so a run that began again found no job."""

    def name(shift: float) -> str:
        tensors = {"weights": torch.arange(3.0) + shift, "more": [torch.ones(2, dtype=torch.int64)]}
        return JobStore(square, (2.0, tensors), Options(tmp_path, tmp_path)).path((torch.zeros(2), 1)).name

    assert name(0) == name(0)
    assert name(0) != name(1)


def test_a_docstring_or_comment_makes_no_other_jobs_and_a_number_does() -> None:
    source = '"""Text."""\n\ndef one(x: int) -> int:\n    """More."""\n    return x + 1  # why\n'
    same = (
        source.replace("Text", "Other text").replace("More", "Less").replace("  # why", "").replace("x + 1", "(x + 1)")
    )
    assert program(source) == program(same)
    assert program(source) != program(source.replace("x + 1", "x + 2"))
    assert program("def one():\n    '''Only text.'''\n") == program("def one():\n    '''Other.'''\n")


def test_a_damaged_outcome_is_computed_again(tmp_path: Path) -> None:
    options = Options(tmp_path / "out", tmp_path)
    in_turn(square, [(2,), (4,)], options, 2.0)
    store = JobStore(square, (2.0,), options)
    first = store.path((2,))
    file = first.with_name(f"{first.name}.pickle")
    file.write_bytes(file.read_bytes()[:-3])
    assert in_turn(square, [(2,), (4,)], options, 2.0) == {(2,): 4, (4,): 16}
    assert computed(options) == [2, 2, 4]


def test_methods_are_chosen_by_name_also_with_a_comma_in_it(tmp_path: Path) -> None:
    known = ["SGLD", "reSGLD", "reSGLD, true variance"]
    chosen = {
        (): known,
        ("reSGLD,SGLD",): ["SGLD", "reSGLD"],
        ("reSGLD, true variance", "SGLD"): ["SGLD", "reSGLD, true variance"],
    }
    for given, names in chosen.items():
        assert Options(tmp_path, tmp_path, methods=given).chosen(known) == names
    with pytest.raises(ValueError, match="some of SGLD; reSGLD; reSGLD, true variance, got 'SGHMC'"):
        Options(tmp_path, tmp_path, methods=("SGLD, SGHMC",)).chosen(known)


def test_a_dry_run_counts(tmp_path: Path) -> None:
    options = Options(tmp_path / "out", tmp_path)
    in_turn(square, [(2,)], options, 2.0)
    with pytest.raises(Planned) as found:
        run_jobs(square, [(2,), (3,)], replace(options, dry_run=True), 2.0)
    assert (found.value.jobs, found.value.finished) == (2, 1)
    assert [duration(seconds) for seconds in (5, 600, 7200)] == ["5 s", "10 min", "2.0 h"]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_jobs_run_on_a_cluster(tmp_path: Path, threads: int) -> None:
    """Two workers of dask.distributed, in processes of their own; those with two threads are refused."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=threads, processes=True, dashboard_address=None
    ) as cluster:
        options = Options(tmp_path / "out", tmp_path, executor=cluster.scheduler_address)
        if threads > 1:
            with pytest.raises(ValueError, match=r"2 threads.*--nthreads 1"):
                run_jobs(square, [(2,)], options, 2.0)
            return
        assert run_jobs(square, [(n,) for n in range(4, 9)], options, 2.0) == {(n,): n * n for n in range(4, 9)}
    assert run_jobs(square, [(4,), (8,)], options, 2.0) == {(4,): 16, (8,): 64}  # without the cluster
    assert computed(options) == [4, 5, 6, 7, 8]


class Interruption(pl.Callback):
    """Ends a fit at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("the power is gone")


class Notes(Recording, pl.Callback):
    """Notes the energy of each step, and draws a number with it."""

    recorded = ("notes", "generator")

    def __init__(self) -> None:
        self.notes: list[torch.Tensor] = []
        self.generator = torch.Generator().manual_seed(0)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.notes.append(pl_module.chains.observed.energy.mean() + torch.rand((), generator=self.generator))


def samples(seed: int, stop: int, options: Options) -> list[torch.Tensor]:
    """Return the samples of a small network, and a callback's notes; the fit ends early if there is a file `broken`."""
    silence_lightning()
    pl.seed_everything(seed, verbose=False)
    module = classifier(sampler=SGHMC, lr=0.01)
    callbacks: list[pl.Callback] = [
        SamplingSchedule(burn_in_steps=10, every_n_steps=5),
        kept_samples(),
        noted := Notes(),
    ]
    if (options.data_root / "broken").exists():
        callbacks.append(Interruption(stop))
    trainer = quiet_trainer(accelerator="cpu", max_steps=60, max_epochs=-1, callbacks=callbacks)
    resumed_fit(trainer, module, DatasetDataModule(blobs(), batch_size=24))
    (options.data_root / f"steps-{trainer.global_step}").touch()
    assert module.posterior is not None
    return [*(next(iter(sample.state.values())) for sample in module.posterior), torch.stack(noted.notes)]


@pytest.mark.parametrize("full", [False, True])
def test_a_job_that_ended_early_continues_from_its_checkpoint(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples equal those of a run without interruption, bit for bit; at the paper's setting they are kept."""
    whole = in_turn(samples, [(0, 33)], Options(tmp_path / "whole", tmp_path))
    monkeypatch.setattr(trainers, "BETWEEN_CHECKPOINTS", timedelta(0))
    options = Options(tmp_path / "out", tmp_path, full)
    (tmp_path / "broken").touch()
    with pytest.raises(RuntimeError, match="the power is gone"):
        in_turn(samples, [(0, 33)], options)
    (checkpoint,) = (tmp_path / "out" / "jobs").rglob("fit-0.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] in (32, 33)
    (tmp_path / "broken").unlink()
    continued = in_turn(samples, [(0, 33)], options)
    pairs = list(zip(whole[0, 33], continued[0, 33], strict=True))
    assert len(pairs) == 10 + 1
    assert len(pairs[-1][0]) == 60
    assert all(torch.equal(first, second) for first, second in pairs)
    stores = list((tmp_path / "out" / "jobs").rglob("fit-0-samples"))
    assert [len(Posterior.load(store)) for store in stores] == [10] * full


def test_the_callbacks_of_all_recipes_keep_their_notes() -> None:
    """A job that continues from a checkpoint has what its callbacks noted before; `Clock` measures anew."""
    forgetful = []
    for path in Path(trainers.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if any(base.endswith("Callback") for base in bases) and "Recording" not in bases:
                forgetful.append(node.name)
    assert forgetful == ["Clock"]


def test_a_killed_recipe_keeps_what_had_ended(tmp_path: Path) -> None:
    options, jobs = Options(tmp_path / "out", tmp_path), [(number,) for number in range(40)]
    program = multiprocessing.get_context("fork").Process(target=in_turn, args=(slow, jobs, options))
    program.start()
    assert waited_for(lambda: len(list(options.out.rglob("*.pickle"))) >= 5)
    program.kill()
    program.join()
    assert 5 <= len(list(options.out.rglob("*.pickle"))) < 40
    in_turn(slow, jobs, options)
    assert 0 <= len(computed(options)) - 40 <= 1  # at most the job of the kill ran twice


@dataclass(frozen=True)
class Noise:
    """A part of the settings."""

    mean: float
    std: float = 3.0


@dataclass(frozen=True)
class Settings:
    """Settings of this file's tests, with a name beside it."""

    epochs: int
    lr: dict[str, float]
    noise: Noise
    names: tuple[str, ...] = ("a",)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Return a function that reads settings with given changes."""
    from lightning_sgmcmc.recipes.shared import settings

    file = tmp_path / "here.yaml"
    scales = "quick: {epochs: 3, noise.std: 2.0}\nfull: {epochs: 100, names: [a, b]}\n"
    file.write_text(f"{scales}lr: {{first: 1e-3}}\nnoise: {{mean: 0.5, std: 1.0}}\n")
    monkeypatch.setattr(settings, "settings_file", lambda module: file)
    return lambda full=False, **changed: read_settings(Settings, Options(tmp_path, tmp_path, full, changed=changed))


def test_settings(beside: Callable[..., Settings]) -> None:
    lr, quick, full = {"first": 1e-3}, Noise(0.5, std=2.0), Noise(0.5, std=1.0)
    assert beside() == Settings(3, lr, quick)
    assert beside(full=True) == Settings(100, lr, full, ("a", "b"))
    assert beside(epochs="7", names="[c]") == Settings(7, lr, quick, ("c",))
    assert beside(**{"noise.mean": "4"}) == Settings(3, lr, Noise(4.0, std=2.0))
    with pytest.raises(ValueError, match=r"here\.yaml"):
        beside(epochs="many")
    with pytest.raises(ValueError, match=r"here\.yaml.*epoch"):
        beside(epoch="7")
