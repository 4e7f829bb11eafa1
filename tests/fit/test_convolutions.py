"""cuDNN's search for fast convolutions: on for a fit on CUDA with data of one shape, and restored."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import ResumableLoader
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.fit import safeguards as convolutions
from tests.support.problems import Data, Net, blobs
from tests.support.trainers import quiet_trainer

CUDA = torch.device("cuda")


def test_when_the_search_pays() -> None:
    loader = ResumableLoader(TensorBatches(torch.zeros(4, 2)), 2)
    assert convolutions.pays(CUDA, loader)
    assert not convolutions.pays(torch.device("cpu"), loader)
    assert not convolutions.pays(CUDA, ResumableLoader(blobs(), 2)), "items may differ in shape"
    assert not convolutions.pays(CUDA, torch.utils.data.DataLoader(blobs(), 2))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert not convolutions.pays(CUDA, loader), "as the user wants it"
    finally:
        torch.use_deterministic_algorithms(False)


class Sees(pl.Callback):
    def __init__(self, fails: bool) -> None:
        self.fails, self.seen = fails, set[bool]()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.add(torch.backends.cudnn.benchmark)
        if self.fails:
            raise RuntimeError("a fault")


@pytest.mark.parametrize("before", [False, True])
def test_the_setting_is_restored_after_a_fit_and_after_an_error(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "pays", lambda device, loader: True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    ends, fails = Sees(False), Sees(True)
    quiet_trainer(max_steps=2, callbacks=[ends]).fit(Net(), datamodule=Data())
    assert (ends.seen, torch.backends.cudnn.benchmark) == ({True}, before)
    with pytest.raises(RuntimeError, match="a fault"):
        quiet_trainer(max_steps=2, callbacks=[fails]).fit(Net(), datamodule=Data())
    assert (fails.seen, torch.backends.cudnn.benchmark) == ({True}, before)
