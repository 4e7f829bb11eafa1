"""A run resumes only with the settings of its checkpoint, unless the user allows a change."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from torch.utils.data import TensorDataset

from lightning_sgmcmc import (
    SGHMC,
    BayesianModule,
    Categorical,
    CyclicOrder,
    GaussianPrior,
    SwitchingOrder,
    SymmetricOrder,
)
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.orders import BatchOrder, OrderSpec
from lightning_sgmcmc.callbacks import CyclicalSchedule, ExactResume, SampleCollector
from lightning_sgmcmc.datamodules import DigitsDataModule
from lightning_sgmcmc.fit.resume import fingerprint, is_same_data, text_of
from lightning_sgmcmc.posterior.disk import DiskStore
from tests.support.problems import network
from tests.support.trainers import quiet_trainer


def loader(count: int = 24, shift: float = 0.0) -> ResumableLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    return ResumableLoader(TensorDataset(x + shift, (x.sum(1) > 0).long()), 4 * count // 24)


def fit(
    folder: Path, *extra: pl.Callback, cycles: int = 1, data: Any = None, ckpt_path: Any = None, **changes: Any
) -> Any:
    torch.manual_seed(0)
    friction = changes.pop("friction", 0.1)
    net = torch.nn.Linear(4, 2)
    options: dict[str, Any] = {"prior": GaussianPrior(1.0), "lr": 0.01, "seed": 1} | changes
    sampler = lambda *a, **k: SGHMC(*a, friction=friction, **k)  # noqa: E731
    module = BayesianModule(net=net, likelihood=Categorical(), sampler=sampler, **options)
    saver = pl.callbacks.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=4, save_top_k=-1, enable_version_counter=False
    )
    schedule = CyclicalSchedule(cycles, 0.0, 12 // cycles)
    trainer = quiet_trainer(
        max_steps=12, enable_checkpointing=True, callbacks=[schedule, SampleCollector(folder / "s"), *extra, saver]
    )
    trainer.fit(module, data or loader(), ckpt_path=ckpt_path)
    return module


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "prior": ({"prior": GaussianPrior(0.01)}, "prior GaussianPrior(std=1.0) there, GaussianPrior(std=0.01) here"),
    "temperature": ({"temperature": 0.5}, "temperature 1.0 there, 0.5 here"),
    "lr": ({"lr": 0.02}, "lr 0.01 there, 0.02 here"),
    "seed": ({"seed": 2}, "seed 1 there, 2 here"),
    "sampler.friction": ({"friction": 0.2}, "sampler.friction 0.1 there, 0.2 here"),
    "schedule.num_cycles": ({"cycles": 2}, "schedule.num_cycles 1 there, 2 here"),
    "num_data": ({"data": loader(48)}, "num_data 24 there, 48 here"),
    "data": ({"data": loader(24, 1.0)}, "data 24 items beginning with ["),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    fit(folder)
    return folder


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_refused_before_the_store_is_touched(name: str, run: Path) -> None:
    change, listed = CHANGES[name]
    before = DiskStore(run / "s").records
    message = re.escape(f"the checkpoint is of a run with other settings ({listed}" if name != "schedule" else listed)
    with pytest.raises(ValueError, match=f"{message}.*: resume with its settings, start a new run, or pass") as caught:
        fit(run, ckpt_path=run / "step=8.ckpt", **change)
    assert name in str(caught.value).rsplit("allow=", 1)[1]
    assert DiskStore(run / "s").records == before
    assert not list(run.glob("s-*"))


def test_all_differences_come_in_one_sentence(run: Path) -> None:
    with pytest.raises(ValueError, match=r"prior .*; lr .* there, .* here\).*allow=\['prior', 'lr'\]"):
        fit(run, ckpt_path=run / "step=8.ckpt", lr=0.02, prior=GaussianPrior(0.01))


def test_an_allowed_change_applies(tmp_path: Path) -> None:
    """A run resumed with other controls makes the steps of those controls: nothing of them is ignored."""
    fit(tmp_path)
    allow = ExactResume(allow=["lr", "sampler.friction", "prior"])
    changes: dict[str, Any] = {"lr": 0.02, "friction": 0.2, "prior": GaussianPrior(0.5)}
    module = fit(tmp_path, allow, ckpt_path=tmp_path / "step=8.ckpt", **changes)
    (group,) = module.sampler.param_groups
    assert (group["initial_lr"], group["friction"]) == (0.02, 0.2)
    assert group["lr"] == pytest.approx(0.02 * (1 + torch.cos(torch.tensor(torch.pi * 11 / 12))) / 2)
    # The new settings are the run's own from now on.
    fit(tmp_path, ckpt_path=tmp_path / "step=12.ckpt", **changes)
    with pytest.raises(ValueError, match=r"lr 0.02 there, 0.01 here"):
        fit(tmp_path, ckpt_path=tmp_path / "step=12.ckpt")
    with pytest.raises(ValueError, match="names no setting 'learning_rate': the settings are prior, likelihood, "):
        fit(tmp_path, ExactResume(allow=["learning_rate"]), ckpt_path=tmp_path / "step=12.ckpt")


def test_a_checkpoint_without_settings_is_refused(tmp_path: Path, run: Path) -> None:
    fit(tmp_path)
    checkpoint = torch.load(tmp_path / "step=8.ckpt", weights_only=True)
    del checkpoint["callbacks"]["ExactResume"]["settings"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with pytest.raises(
        ValueError, match=r"the checkpoint is damaged: its callbacks\.ExactResume\.settings is 'None'; "
    ):
        fit(tmp_path, ckpt_path=tmp_path / "old.ckpt", lr=0.02)


def test_fingerprints_of_data() -> None:
    """Random items have no fingerprint, rounding does not change one, and generators are left as they were."""

    class Random(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            return {"x": torch.randn(2) + index, "y": next(counter)}

    counter = iter(range(1000))
    plain = loader()
    x, y = plain.dataset.tensors  # type: ignore[attr-defined]
    rounded = ResumableLoader(TensorDataset(x * (1 + 1e-6), y), 4)
    assert is_same_data(fingerprint(plain), fingerprint(rounded))
    assert not is_same_data(fingerprint(plain), fingerprint(ResumableLoader(TensorDataset(x, 1 - y), 4)))
    state = torch.get_rng_state()
    found = fingerprint(torch.utils.data.DataLoader(Random()))
    assert found == {"length": 9, "numbers": []}
    assert torch.equal(state, torch.get_rng_state())
    assert fingerprint([1, 2]) == {"length": None, "numbers": []}


@pytest.mark.parametrize(
    ("words", "order"),
    [
        ([], BatchOrder),
        (["SymmetricOrder"], SymmetricOrder),
        (
            ["SwitchingOrder", "switching_time=0.1", "time_step=0.01"],
            functools.partial(SwitchingOrder, switching_time=0.1, time_step=0.01),
        ),
    ],
)
def test_an_order_is_the_same_from_a_configuration_and_from_python(words: list[str], order: Any) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(DigitsDataModule, "data")
    given = [f"--data.order{'=' if place == 0 else '.'}{word}" for place, word in enumerate(words)]
    instance = parser.instantiate_classes(parser.parse_args(given)).data
    assert text_of(instance.order) == text_of(order)
    spec = OrderSpec(num_data=20, batch_size=5, seed=3)
    assert all(torch.equal(instance.order(spec).indices(batch), order(spec).indices(batch)) for batch in range(9))


def test_texts_of_objects_are_the_same_in_every_process() -> None:
    class Plain:
        def __init__(self, scale: float) -> None:
            self.scale, self._cache = scale, object()

    assert text_of(Plain(2.0)) == "Plain(scale=2.0)"
    assert text_of(CyclicOrder) == text_of(functools.partial(CyclicOrder)) == "CyclicOrder"
    assert " at 0x" not in text_of([Plain(1.0), network(), lambda: 0])
