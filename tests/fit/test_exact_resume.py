"""A run that goes on from a checkpoint, wherever it was saved, is the run that was never stopped, bit for bit."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import Dataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, Posterior
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.orders import BatchOrder, OrderSpec
from lightning_sgmcmc.callbacks import (
    ChainHealth,
    CyclicalSchedule,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from tests.support.comparisons import differences
from tests.support.problems import BATCH, NUM_DATA, Data, Net, Stream, data, network
from tests.support.recorders import Dump, SaveEverywhere
from tests.support.trainers import SETTINGS, Outcome, quiet_trainer, resumable_run, seeded


def check_every_save_point(tmp_path: Path, setting: str, kind: str, stride: int = 1) -> int:
    whole_folder = tmp_path / "whole"
    whole = resumable_run(whole_folder, SETTINGS[setting], kind, SaveEverywhere(tmp_path))
    checkpoints = sorted(tmp_path.glob("*.ckpt"))[::stride]
    bad = {}
    for checkpoint in checkpoints:
        torch.load(checkpoint, weights_only=True)  # nothing in it needs unpickling
        folder = tmp_path / checkpoint.stem
        shutil.copytree(whole_folder / "samples", folder / "samples")
        resumed = resumable_run(folder, SETTINGS[setting], kind, ckpt_path=checkpoint)
        if found := differences(whole, resumed):
            bad[checkpoint.stem] = found[:3]
        shutil.rmtree(folder)
    assert not bad, bad
    return len(checkpoints)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_save_point(tmp_path: Path, setting: str) -> None:
    assert check_every_save_point(tmp_path, setting, "memory") >= 20


@pytest.mark.by_default("steps in mid-epoch", "mid-window", "everything")
@pytest.mark.parametrize("setting", SETTINGS)
def test_some_save_points(tmp_path: Path, setting: str) -> None:
    assert check_every_save_point(tmp_path, setting, "memory", stride=7) >= 3


def test_with_every_callback(tmp_path: Path) -> None:
    """Those that only watch do not change the run, and the dashboard's record is whole after a resume."""

    def watch() -> tuple[PosteriorDashboard, list[pl.Callback]]:
        dashboard = PosteriorDashboard(every="end", figures=["tables"])
        return dashboard, [dashboard, ChainHealth(every_n_steps=2, warn=False), RunSummary()]

    plain = resumable_run(tmp_path / "plain", SETTINGS["everything"], "memory")
    dashboard, watchers = watch()
    whole = resumable_run(tmp_path / "whole", SETTINGS["everything"], "memory", *watchers, SaveEverywhere(tmp_path))
    assert not differences(plain, whole)
    for checkpoint in sorted(tmp_path.glob("*.ckpt"))[3::12]:
        torch.load(checkpoint, weights_only=True)
        folder = tmp_path / checkpoint.stem
        shutil.copytree(tmp_path / "whole" / "samples", folder / "samples")
        again, watchers = watch()
        assert not differences(
            whole, resumable_run(folder, SETTINGS["everything"], "memory", *watchers, ckpt_path=checkpoint)
        )
        assert again.history.as_json() == dashboard.history.as_json()


@pytest.mark.by_default("2")
@pytest.mark.parametrize("workers", [0, 2])
def test_decoded_data_with_workers(tmp_path: Path, workers: int) -> None:
    """Items that draw from NumPy's and torch's default generators, loaded by this process or by two others."""
    assert check_every_save_point(tmp_path, "validation in mid-epoch", f"workers {workers}", stride=5) >= 6


def test_the_number_of_workers_does_not_change_the_run(tmp_path: Path) -> None:
    outcomes = [resumable_run(tmp_path / f"w{n}", {}, f"workers {n}") for n in (0, 1, 2)]
    assert not differences(outcomes[0], outcomes[1])
    assert not differences(outcomes[0], outcomes[2])


def test_another_order_of_the_data_is_another_run(tmp_path: Path) -> None:
    """What the other tests compare does depend on the data, their order, and the seed's augmentation."""

    class Ordered(Data):
        def train_dataloader(self) -> Any:
            loader = super().train_dataloader()
            loader.adopt_seed(7)
            return loader

    class Plain(Data):
        def train_transform(self) -> Any:
            return None

    whole = resumable_run(tmp_path / "a", {}, "memory")
    for other in (Ordered(), Plain()):
        module = BayesianModule(net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=3)
        schedule = CyclicalSchedule(2, 0.4, 3)
        quiet_trainer(max_epochs=3, num_sanity_val_steps=0, callbacks=[schedule]).fit(module, datamodule=other)
        assert differences(whole["state"], module.state_dict())


def test_an_unseeded_run_goes_on_with_its_own_seed(tmp_path: Path) -> None:
    """The seed that a run drew for itself is in its checkpoint: for the noise, the order of the data and dropout."""

    def fit(epochs: int, *callbacks: pl.Callback, **options: Any) -> BayesianModule:
        module = BayesianModule(net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05)
        schedule = CyclicalSchedule(1, 0.4, 1)
        trainer = quiet_trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[schedule, *callbacks])
        trainer.fit(module, datamodule=Data(), **options)
        return module

    whole = fit(3, SaveEverywhere(tmp_path))
    resumed = fit(3, ckpt_path=tmp_path / "011-batch.ckpt")
    assert not differences(whole.state_dict(), resumed.state_dict())
    assert differences(whole.state_dict(), fit(3).state_dict())


def test_other_data_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    resumable_run(tmp_path / "whole", {}, "memory", SaveEverywhere(tmp_path))
    module = BayesianModule(net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=3)
    other = Data()
    other.batch_size = 10
    trainer = quiet_trainer(max_epochs=3, callbacks=[CyclicalSchedule(2, 0.4, 3)])
    with pytest.raises(ValueError, match="the checkpoint's epochs have 8 batches, this loader's have 6: continue with"):
        trainer.fit(module, datamodule=other, ckpt_path=tmp_path / "010-batch.ckpt")


def test_a_loader_without_a_state_goes_on_at_the_end_of_an_epoch_and_says_so(tmp_path: Path) -> None:
    def fit(**options: Any) -> BayesianModule:
        module = BayesianModule(net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=3)
        split = data(NUM_DATA, 0)
        dataset = torch.utils.data.TensorDataset(split.inputs, split.targets)
        loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True)
        saver = [SaveEverywhere(tmp_path)] if not options else []
        trainer = quiet_trainer(
            max_epochs=4, enable_checkpointing=True, callbacks=[CyclicalSchedule(2, 0.4, 3), *saver]
        )
        torch.manual_seed(len(options))
        with pytest.warns(UserWarning, match="resuming is bit-exact only from checkpoints at the end of an epoch"):
            trainer.fit(module, loader, **options)
        return module

    whole = fit()
    for name in ("008-epoch", "024-epoch", "016-batch"):
        assert not differences(whole.state_dict(), fit(ckpt_path=tmp_path / f"{name}.ckpt").state_dict()), name


def test_a_run_limited_by_epochs_can_be_made_longer(tmp_path: Path) -> None:
    """The trainer's limit of epochs comes back after a fit, so that fit, more epochs, fit again works."""
    module = BayesianModule(net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=3)
    trainer = quiet_trainer(max_epochs=2, callbacks=[SamplingSchedule(every_n_steps=4)])
    trainer.fit(module, datamodule=Data())
    assert trainer.global_step == 16
    assert trainer.max_steps == -1
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=Data())
    assert trainer.global_step == 24


def outcome(module: Any) -> Outcome:
    return {
        "state": module.state_dict(),
        "sampler": module.sampler.state_dict(),
        "step": module.trainer.global_step,
    }


@pytest.mark.slow
def test_two_ranks_go_on_from_micro_batches_too(tmp_path: Path) -> None:
    """Two data-parallel ranks (gloo), from checkpoints between micro-batches, behind steps, validations and epochs."""
    options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_epochs": 8}

    def fit(folder: Path, *extra: pl.Callback, **fit_options: Any) -> list[Outcome]:
        module = BayesianModule(net=network(), likelihood=Categorical(), sampler=SGHMC, lr=0.05, seed=3)
        callbacks = [CyclicalSchedule(2, 0.4, 3), SampleCollector(folder / "samples"), Dump(folder, outcome), *extra]
        trainer = quiet_trainer(
            strategy="ddp_fork", devices=2, enable_checkpointing=True, callbacks=callbacks, **options
        )
        trainer.fit(module, datamodule=Data(), **fit_options)
        ranks = Dump.read(folder)
        posterior = Posterior.load(folder / "samples")
        return [*ranks, {"records": posterior.records, "samples": [sample.state for sample in posterior]}]

    whole_folder = tmp_path / "whole"
    whole_folder.mkdir()
    whole = fit(whole_folder, SaveEverywhere(tmp_path))
    assert not differences(whole[0]["state"]["net.0.weight"], whole[1]["state"]["net.0.weight"])
    assert whole[0]["step"] == 16
    for name in ("003-batch", "003-validation", "006-batch", "008-epoch"):
        folder = tmp_path / name
        shutil.copytree(whole_folder / "samples", folder / "samples")
        assert not differences(whole, fit(folder, ckpt_path=tmp_path / f"{name}.ckpt")), name


# -- the order itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_data", "replicas"), [(20, 1), (21, 2), (22, 4), (3, 4)])
def test_an_epoch_holds_every_datum_once(num_data: int, replicas: int) -> None:
    """... and the few that fill up the replicas' shares twice."""
    for drop_last in (False, True):
        seen: list[int] = []
        for rank in range(replicas):
            order = BatchOrder(OrderSpec(num_data, 4, seed=1, drop_last=drop_last, num_replicas=replicas, rank=rank))
            batches = [order.indices(b).tolist() for b in range(order.batches_per_epoch)]
            seen += [index for batch in batches for index in batch]
            assert all(len(batch) == 4 for batch in batches[:-1] if drop_last)
        if not drop_last:
            assert set(seen) == set(range(num_data))
            assert len(seen) == -(-num_data // replicas) * replicas
        elif replicas == 1:
            assert len(set(seen)) == len(seen) == num_data // 4 * 4


def test_the_order_is_a_function_of_seed_chain_epoch_and_position() -> None:
    def epoch(seed: int = 0, chain: int = 0, number: int = 0) -> list[list[int]]:
        order = BatchOrder(OrderSpec(50, 8, seed=seed, chain=chain))
        return [order.indices(number * 7 + position).tolist() for position in range(7)]

    assert epoch() == epoch()
    orders = [epoch(), epoch(seed=1), epoch(chain=1), epoch(number=1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    backwards = BatchOrder(OrderSpec(50, 8, seed=0))
    assert [backwards.indices(b).tolist() for b in reversed(range(7))][::-1] == epoch()


def test_every_order_is_equally_likely() -> None:
    """Chi-square test of the first datum over 2,000 epochs of 10 data; false alarms at 1 in 1,000."""
    order = BatchOrder(OrderSpec(10, 1, seed=5))
    counts = torch.bincount(torch.tensor([int(order.indices(10 * e)) for e in range(2000)]), minlength=10).double()
    assert float(((counts - 200) ** 2 / 200).sum()) < 27.9


def test_a_pass_goes_on_where_the_last_one_stopped() -> None:
    class Numbers(Dataset[Any]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            return index

    def batches(loader: ResumableLoader, count: int) -> list[list[int]]:
        return [batch.tolist() for batch in itertools.islice(loader, count)]

    for workers in (0, 2):
        straight = ResumableLoader(Numbers(), 3, seed=2, num_workers=workers)
        assert len(straight) == 4
        first, second = list(straight), list(straight)
        expected = [batch.tolist() for batch in [*first, *second]]
        for epoch in (first, second):
            assert torch.cat(epoch).sort().values.tolist() == list(range(10))
        pieces = ResumableLoader(Numbers(), 3, seed=2)
        found = batches(pieces, 3)
        other = ResumableLoader(Numbers(), 3, num_workers=workers)
        other.load_state_dict(pieces.state_dict())
        found += batches(other, 2) + batches(other, 3)
        assert found == expected
        straight.close()
        other.close()


def test_mistakes_with_the_loader() -> None:
    tensors = torch.utils.data.TensorDataset(torch.zeros(5))
    for build, message in (
        (lambda: ResumableLoader(Stream(), 3), "Stream has no length, so the order of its data cannot be fixed"),
        (lambda: ResumableLoader(tensors, 0), "batch_size must be at least 1, got 0"),
        (lambda: ResumableLoader(tensors, 2, num_workers=-1), "num_workers must be at least 0, got -1"),
        (lambda: ResumableLoader(tensors, 6, drop_last=True), "batch_size=6 with drop_last=True leaves no batch of 5"),
        (lambda: ResumableLoader(torch.utils.data.TensorDataset(torch.zeros(0)), 6), "there is no batch of 0 data"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


def test_a_checkpoint_saved_by_hand_after_the_end_continues(tmp_path: Path) -> None:
    """`max_steps` ends a fit in mid-epoch; the file of `trainer.save_checkpoint` continues as if it had not."""

    def fit(**limits: Any) -> tuple[BayesianModule, pl.Trainer]:
        module = seeded(Net)
        callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(in_memory=True)]
        options = {name: limits.pop(name) for name in ("ckpt_path",) if name in limits}
        trainer = quiet_trainer(callbacks=callbacks, accumulate_grad_batches=2, **limits)
        trainer.fit(module, datamodule=Data(), **options)
        return module, trainer

    whole, trainer = fit(max_epochs=3)
    steps = trainer.global_step
    fit(max_steps=steps // 2 + 1)[1].save_checkpoint(tmp_path / "by-hand.ckpt")
    for limits in ({"max_steps": steps}, {"max_epochs": 3}):
        resumed, trainer = fit(**limits, ckpt_path=tmp_path / "by-hand.ckpt")
        assert trainer.global_step == steps
        assert not differences(whole.state_dict(), resumed.state_dict())
        assert not differences(whole.sampler.state_dict(), resumed.sampler.state_dict())


HOOKS = [
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_start",
]


class FailsAt(pl.Callback):
    """Raises in a hook, once a number of batches has begun."""

    def __init__(self, hook: str, batch: int) -> None:
        self.begun, self.batch = 0, batch
        setattr(self, hook, self.fail)
        if hook == "on_train_batch_start":
            setattr(self, hook, self.begin_and_fail)

    def on_train_batch_start(self, *args: Any) -> None:
        self.begun += 1

    def begin_and_fail(self, *args: Any) -> None:
        self.begun += 1
        self.fail()

    def fail(self, *args: Any, **kwargs: Any) -> None:
        if self.begun >= self.batch:
            raise ValueError("a mistake of the user's")


class Normed(BayesianModule):
    """With everything that a step changes before its update: statistics, and random numbers of the network."""

    def __init__(self, chains: int = 1) -> None:
        net = torch.nn.Sequential(
            torch.nn.Linear(5, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(), torch.nn.Linear(5, 3)
        )
        super().__init__(net, Categorical(), sampler=SGHMC, lr=0.01, seed=3, num_chains=chains)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("accumulated", "chains", "batch"),
    [
        (1, 1, 5),
        (3, 2, 6),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, 1, 5), (2, 1, 7), (1, 2, 1))),
    ],
)
def test_a_run_goes_on_from_a_checkpoint_of_an_error(
    hook: str, accumulated: int, chains: int, batch: int, tmp_path: Path
) -> None:
    def trained(*callbacks: pl.Callback, **options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = Normed(chains)
        settings = {"max_epochs": 4, "accumulate_grad_batches": accumulated, "callbacks": list(callbacks)}
        data_ = Data() if hook != "on_validation_start" else DataWithValidation()
        trainer = quiet_trainer(**settings, enable_checkpointing=bool(callbacks), num_sanity_val_steps=0)
        trainer.fit(module, datamodule=data_, **options)
        counts = {"steps": trainer.global_step, "epochs": trainer.current_epoch}
        return dict(module.state_dict()) | {name: torch.tensor(count) for name, count in counts.items()}

    whole = trained()
    saver = pl.callbacks.OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="a mistake"):
        trained(FailsAt(hook, batch), saver)
    resumed = trained(ckpt_path=tmp_path / "on_exception.ckpt")
    assert [name for name, value in whole.items() if not torch.equal(value, resumed[name])] == []


class DataWithValidation(Data):
    def val_dataloader(self) -> Any:
        return self.train_dataloader()
