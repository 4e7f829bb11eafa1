"""Ranks whose nodes have no folder in common: a sentence at the start that names both nodes and the folder."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from torch.multiprocessing import ProcessRaisedException

from lightning_sgmcmc import BayesianModule, Categorical, ChainStrategy
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.run import common_folder
from tests.support.problems import Blobs, blob_network
from tests.support.trainers import quiet_trainer

BOTH = r"rank \d on node (one|two) .*on node (one|two) .*default_root_dir, dirpath and ckpt_path"


class Nodes(pl.Callback):
    """Gives each rank a working folder and a host name of its own, as on two nodes without a common file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        node = ("one", "two")[trainer.global_rank]
        os.chdir(self.folder / node)
        common_folder.socket = type("Host", (), {"gethostname": staticmethod(lambda: node)})  # type: ignore[assignment]


def run(folder: Path, what: str, *first: pl.Callback, ranks: int = 2, samples: str = "samples", **options: Any) -> None:
    saver = pl.callbacks.ModelCheckpoint("checkpoints", save_last=True, every_n_train_steps=4)
    trainer = quiet_trainer(
        max_steps=options.pop("max_steps", 8),
        devices=ranks,
        strategy=ChainStrategy(start_method="fork") if ranks > 1 else "auto",
        enable_checkpointing=True,
        callbacks=[
            *first,
            SamplingSchedule(every_n_steps=2),
            SampleCollector(samples),
            BayesianModelAverage(),
            saver,
        ],
    )
    module = BayesianModule(net=blob_network(), likelihood=Categorical())
    getattr(trainer, what)(module, datamodule=Blobs(), **options)


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    for node in ("one", "two"):
        (tmp_path / node).mkdir()
    return Nodes(tmp_path)


def test_a_fit_names_both_nodes_and_the_folder(nodes: Nodes) -> None:
    """Before, rank 1 ended with "no sample store at samples", and rank 0 with a closed connection."""
    with pytest.raises(ProcessRaisedException, match=BOTH) as raised:
        run(nodes.folder, "fit", nodes)
    assert str(nodes.folder / "two" / "samples") in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["test", "validate", "predict", "resume"])
@pytest.mark.parametrize("other", ["nothing", "another run's"])
def test_so_do_evaluations_and_resumed_runs(
    what: str, other: str, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nodes.folder / "one")
    run(nodes.folder, "fit", ranks=1)
    if other != "nothing":
        monkeypatch.chdir(nodes.folder / "two")
        run(nodes.folder, "fit", ranks=1)
        shutil.rmtree("checkpoints") if what == "resume" else None
    options = {"ckpt_path": "checkpoints/last.ckpt", "max_steps": 16} if what == "resume" else {}
    monkeypatch.chdir(nodes.folder / "one")
    with pytest.raises(ProcessRaisedException, match=BOTH):
        run(nodes.folder, "fit" if what == "resume" else what, nodes, **options)


def test_a_common_folder_under_two_names_is_one(nodes: Nodes, tmp_path: Path) -> None:
    """Mounted at another place of each node: what counts is what lies there."""
    (tmp_path / "common").mkdir()
    for node in ("one", "two"):
        (tmp_path / node / "mount").symlink_to(tmp_path / "common")
    run(nodes.folder, "fit", nodes, samples="mount/samples")
    assert len(list((tmp_path / "common" / "samples").glob("sample-*"))) == 8
