"""The order of the callbacks in a trainer's list is not the user's matter: two ranks, and the results of one."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from lightning_sgmcmc import BayesianModule, Categorical, ContourRules, Posterior
from lightning_sgmcmc.callbacks import (
    AutoSampling,
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.fit import ranks as rank_watch
from tests.support.problems import Blobs, blob_network
from tests.support.trainers import quiet_trainer

FIVE = ("AutoSampling", "SampleCollector", "BayesianModelAverage", "RunSummary", "ChainHealth")
"""As README has them, with the one that the summary asks for."""
ORDERS = [FIVE, FIVE[::-1], (*FIVE[1:], FIVE[0]), ("ChainHealth", "RunSummary", *FIVE[:3]), (*FIVE[3:], *FIVE[:3])]


def five(names: Sequence[str], folder: Path) -> list[pl.Callback]:
    made = {
        "AutoSampling": AutoSampling(num_draws=6),
        "SampleCollector": SampleCollector(folder / "samples"),
        "BayesianModelAverage": BayesianModelAverage(),
        "RunSummary": RunSummary(),
        "ChainHealth": ChainHealth(),
    }
    return [made[name] for name in names]


def module(**options: Any) -> BayesianModule:
    return BayesianModule(net=blob_network(), likelihood=Categorical(), **options)


@pytest.mark.parametrize("strategy", ["ddp_fork", "chains_fork"])
@pytest.mark.parametrize(
    "order", [ORDERS[0], *(pytest.param(order, marks=pytest.mark.slow) for order in ORDERS[1:])], ids="-".join
)
def test_two_ranks_end_well_in_any_order(
    strategy: str, order: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a seed; before, README's order waited for ever after the last step."""
    monkeypatch.setattr(rank_watch, "DEFAULT_TIMEOUT", 20.0)
    trainer = quiet_trainer(
        max_epochs=6, devices=2, strategy=strategy, default_root_dir=tmp_path, callbacks=five(order, tmp_path)
    )
    trainer.fit(module(), datamodule=Blobs())
    records = Posterior.load(tmp_path / "samples").records
    assert len(records) == 6 * (2 if strategy.startswith("chains") else 1)
    assert any(record.log_weight != 0 for record in records), "the weights are those of stacking"


def results(folder: Path) -> Any:
    found = json.loads((folder / "sgmcmc" / "results.json").read_text())
    records = Posterior.load(folder / "samples").records
    weights = [(record.step, record.chain, record.log_weight) for record in records]
    return weights, found["rows"], found["sentences"], json.loads((folder / "sgmcmc" / "health.json").read_text())


def one_rank(order: Sequence[str], folder: Path) -> Any:
    trainer = quiet_trainer(max_epochs=6, default_root_dir=folder, callbacks=five(order, folder))
    trainer.fit(module(seed=3), datamodule=Blobs())
    return results(folder)


@pytest.mark.parametrize(
    "order",
    [ORDERS[1], *(pytest.param(o, marks=pytest.mark.slow) for o in itertools.islice(itertools.permutations(FIVE), 60))],
    ids="-".join,
)
def test_samples_weights_and_results_do_not_depend_on_the_order(order: Sequence[str], tmp_path: Path) -> None:
    assert one_rank(FIVE, tmp_path / "expected") == one_rank(order, tmp_path / "found")


def test_the_store_has_the_last_contour_in_any_order(tmp_path: Path) -> None:
    """A collector before the contour sampler; the others keep their places among the user's callbacks."""
    contour = ContourGradient(ContourRules(zeta=0.75), num_bins=30, warm_up_steps=4)
    own = pl.Callback()
    given = [PosteriorDashboard(figures=[]), SampleCollector(tmp_path / "samples"), own, contour]
    trainer = quiet_trainer(
        max_steps=23, default_root_dir=tmp_path, callbacks=[*given, SamplingSchedule(every_n_steps=5)]
    )
    net = module(seed=3)
    trainer.fit(net, datamodule=Blobs())
    stored = Posterior.load(tmp_path / "samples").store.contour
    assert stored is not None
    assert net.contour is not None
    assert stored.to_bytes() == net.contour.to_bytes()
    assert trainer.callbacks.index(own) == given.index(own)  # type: ignore[attr-defined]
