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
from lightning_sgmcmc.chains.trainer import callbacks_of
from lightning_sgmcmc.fit import checkpoints as common_folder
from tests.support.problems import Blobs, blob_network
from tests.support.trainers import quiet_trainer

BOTH = r"rank \d on node (one|two) .*on node (one|two) .*default_root_dir, dirpath and ckpt_path"


class OnNodes(BayesianModule):
    """Gives each rank a working folder and a host name of its own, as on two nodes without a common file system."""

    folder: Path | None = None
    started = Path()

    def configure_callbacks(self) -> list[pl.Callback]:
        if self.folder is not None and self.trainer.strategy.local_rank >= 0:  # type: ignore[attr-defined]
            node = ("one", "two")[self.trainer.strategy.local_rank]  # type: ignore[attr-defined]
            os.chdir(self.folder / node)
            for callback in callbacks_of(self.trainer):  # made before the processes part, and by each node in earnest
                if getattr(callback, "dirpath", None) is not None:
                    callback.dirpath = self.folder / node / os.path.relpath(callback.dirpath, self.started)  # type: ignore[attr-defined]
            common_folder.socket = type("Host", (), {"gethostname": staticmethod(lambda: node)})  # type: ignore[assignment]
        return super().configure_callbacks()


def run(what: str, nodes: Path | None = None, samples: str = "samples", **options: Any) -> None:
    """Run on two nodes, if they are given, else in this process."""
    saver = pl.callbacks.ModelCheckpoint("checkpoints", save_last=True, every_n_train_steps=4)
    trainer = quiet_trainer(
        max_steps=options.pop("max_steps", 8),
        devices=1 if nodes is None else 2,
        strategy="auto" if nodes is None else ChainStrategy(start_method="fork"),
        enable_checkpointing=True,
        callbacks=[
            SamplingSchedule(every_n_steps=2),
            SampleCollector(samples),
            BayesianModelAverage(),
            saver,
        ],
    )
    module = OnNodes(net=blob_network(), likelihood=Categorical())
    module.folder, module.started = nodes, Path.cwd()
    getattr(trainer, what)(module, datamodule=Blobs(), **options)


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    for node in ("one", "two"):
        (tmp_path / node).mkdir()
    return tmp_path


def test_a_fit_names_both_nodes_and_the_folder(nodes: Path) -> None:
    """Before, rank 1 ended with "no sample store at samples", and rank 0 with a closed connection."""
    with pytest.raises(ProcessRaisedException, match=BOTH) as raised:
        run("fit", nodes)
    assert str(nodes / "two" / "samples") in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["test", "validate", "predict", "resume"])
@pytest.mark.parametrize("other", ["nothing", "another run's"])
def test_so_do_evaluations_and_resumed_runs(
    what: str, other: str, nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nodes / "one")
    run("fit")
    if other != "nothing":
        monkeypatch.chdir(nodes / "two")
        run("fit")
        shutil.rmtree("checkpoints") if what == "resume" else None
    options = {"ckpt_path": "checkpoints/last.ckpt", "max_steps": 16} if what == "resume" else {}
    monkeypatch.chdir(nodes / "one")
    with pytest.raises(ProcessRaisedException, match=BOTH):
        run("fit" if what == "resume" else what, nodes, **options)


def test_a_common_folder_under_two_names_is_one(nodes: Path, tmp_path: Path) -> None:
    """Mounted at another place of each node: what counts is what lies there."""
    (tmp_path / "common").mkdir()
    for node in ("one", "two"):
        (tmp_path / node / "mount").symlink_to(tmp_path / "common")
    run("fit", nodes, samples="mount/samples")
    assert len(list((tmp_path / "common" / "samples").glob("sample-*"))) == 8
