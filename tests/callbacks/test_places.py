"""The order of the trainer's list of callbacks does not matter: samples, weights and results are equal."""

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.loggers import CSVLogger

from lightning_sgmcmc import AMAGOLD, BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import (
    EWSG,
    AutoSampling,
    ContourGradient,
    ControlVariates,
    CyclicalSchedule,
    MetropolisTest,
    PosteriorDashboard,
    SamplingSchedule,
    WarmStart,
    recommended,
)
from lightning_sgmcmc.contour import ContourRules
from tests.support.problems import Data, network
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore")


def usual() -> list[pl.Callback]:
    return recommended(sampling=AutoSampling(num_draws=6))


def with_a_contour() -> list[pl.Callback]:
    contour = ContourGradient(ContourRules(zeta=0.75), first_edge=20.0, width=2.0, num_bins=30)
    shown = PosteriorDashboard(every="end", figures=["tables", "schedule"])
    return [*recommended(sampling=CyclicalSchedule(2, 0.5, 2)), contour, shown, LearningRateMonitor("step")]


def with_better_batches() -> list[pl.Callback]:
    return [*recommended(sampling=SamplingSchedule(burn_in_steps=4, every_n_steps=3)), EWSG(1), ControlVariates(0, 2)]


def after_a_warm_start() -> list[pl.Callback]:
    return [*recommended(sampling=CyclicalSchedule(2, 0.5, 2)), WarmStart(lr=0.1, steps=6), LearningRateMonitor("step")]


def outcome(callbacks: list[pl.Callback], folder: Path, **options: Any) -> dict[str, Any]:
    """Fit with a list of callbacks; return what the run leaves, without its times and folders."""
    torch.manual_seed(0)
    module = BayesianModule(net=network(), likelihood=Categorical(), lr=0.05, seed=3, **options)
    trainer = quiet_trainer(max_epochs=3, logger=CSVLogger(folder, "", ""), callbacks=callbacks, log_every_n_steps=1)
    trainer.fit(module, datamodule=Data())
    posterior = Posterior.load(folder / "samples")
    results = json.loads((folder / "results.json").read_text())
    health = json.loads((folder / "health.json").read_text())
    return {
        "states": torch.stack([torch.cat([t.flatten() for t in s.state.values()]) for s in posterior]),
        "weights": [record.log_weight for record in posterior.records],
        "results": {name: results[name] for name in ("samples", "kind", "sentences", "verdict", "rows", "contour")},
        "health": health,
        "logged": sorted((folder / "metrics.csv").read_text().splitlines()) if len(callbacks) > 5 else None,
    }


def check(make: Callable[[], list[pl.Callback]], order: tuple[int, ...], tmp_path: Path, **options: Any) -> None:
    written = outcome(make(), tmp_path / "written", **options)
    callbacks = make()
    other = outcome([callbacks[index] for index in order], tmp_path / "other", **options)
    torch.testing.assert_close(other.pop("states"), written.pop("states"), rtol=0, atol=0)
    assert other == written


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (1, 2, 0, 4, 3), (3, 0, 4, 1, 2)])
def test_the_usual_five_in_any_order(order: tuple[int, ...], tmp_path: Path) -> None:
    check(usual, order, tmp_path)


@pytest.mark.slow
def test_the_usual_five_in_every_order(tmp_path: Path) -> None:
    """`pytest -m slow tests/callbacks/test_places.py`"""
    for number, order in enumerate(permutations(range(5))):
        check(usual, order, tmp_path / str(number))


@pytest.mark.parametrize("make", [with_a_contour, with_better_batches, after_a_warm_start])
def test_the_last_is_the_first(make: Callable[[], list[pl.Callback]], tmp_path: Path) -> None:
    check(make, tuple(reversed(range(len(make())))), tmp_path)


def test_a_test_of_trajectories_may_stand_before_the_schedule(tmp_path: Path) -> None:
    def make() -> list[pl.Callback]:
        return [*recommended(sampling=SamplingSchedule(every_n_steps=4)), MetropolisTest(4)]

    check(make, (5, 0, 1, 2, 3, 4), tmp_path, sampler=AMAGOLD)


class Own(pl.Callback):
    """A callback of a user."""


def test_other_callbacks_stay_where_they_are(tmp_path: Path) -> None:
    """The library's change places among themselves."""
    first, last = Own(), Own()
    five = recommended(tmp_path / "samples", SamplingSchedule(every_n_steps=1))
    trainer = quiet_trainer(max_steps=1, callbacks=[first, *reversed(five), last], default_root_dir=tmp_path)
    trainer.fit(BayesianModule(net=network(), likelihood=Categorical()), datamodule=Data())
    assert list(trainer.callbacks[:7]) == [first, *five, last]  # type: ignore[attr-defined]


def test_the_usual_callbacks_take_a_schedule_a_folder_and_a_name() -> None:
    schedule = SamplingSchedule(every_n_steps=2)
    callbacks = recommended("draws", schedule, name="mine")
    assert callbacks[0] is schedule
    assert [str(getattr(c, "dirpath", "")) for c in callbacks].count(str(Path("draws").absolute())) == 1
    assert [getattr(c, "name", "") for c in callbacks].count("mine") == 1
    for wrong in (SamplingSchedule, "cyclical"):
        with pytest.raises(TypeError, match="sampling should be a schedule, got"):
            recommended(sampling=wrong)  # type: ignore[arg-type]
