"""Networks of five kinds through every door: four chains, a kill, a resumed run, a test, a load elsewhere, an export.

`uv run pytest -m slow tests/pretrained/test_any_network.py` takes a few minutes. The run that was killed and
resumed has the samples of one that was not, bit for bit.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_sgmcmc import (
    SGHMC,
    BayesianModule,
    Categorical,
    HeteroscedasticGaussian,
    PixelCategorical,
    Posterior,
    bayesianize,
)
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.pretrained.networks import Sentences, encoder, lora, resnet
from tests.support.paths import REPOSITORY
from tests.support.trainers import quiet_trainer

STEPS = 12


class Pairs(Dataset[Any]):
    """Inputs, which may be a tuple, and targets."""

    def __init__(self, x: Any, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return (tuple(part[i] for part in self.x) if isinstance(self.x, tuple) else self.x[i]), self.y[i]


class Recurrent(nn.Module):
    """The class of a sequence by the state at its last token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(12, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(ids))
        out: Tensor = self.head(states[torch.arange(len(ids)), lengths - 1])
        return out


class UNet(nn.Module):
    """One level down and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.up, self.last = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x).relu()
        out: Tensor = self.last(torch.cat([fine, self.up(self.down(fine).relu())], 1))
        return out


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _images() -> Any:
    x = torch.randn(32, 3, 32, 32, generator=_generator())
    return Pairs(x, torch.arange(32) % 3), x[:5]


def _sequences() -> Any:
    ids = torch.randint(12, (32, 6), generator=_generator())
    lengths = torch.arange(32) % 6 + 1
    return Pairs((ids, lengths), ids[:, 0] % 2), (ids[:5], lengths[:5])


def _pixels() -> Any:
    x = torch.randn(32, 1, 8, 8, generator=_generator())
    return Pairs(x, (x[:, 0] > 0).long()), x[:5]


def _numbers() -> Any:
    x = torch.randn(32, 4, generator=_generator())
    return Pairs(x, x[:, :1] * 2), x[:5]


def _texts() -> Any:
    return Sentences(32), {name: value[:5] for name, value in Sentences(32).inputs.items()}


OPTIONS: dict[str, Any] = {"sampler": SGHMC, "lr": 0.01, "num_chains": 4, "seed": 2}


def make(kind: str, execution: Any) -> tuple[BayesianModule, Dataset[Any], Any, nn.Module | None]:
    """Return a module, its data, inputs, and a network like its own where a store cannot describe it."""
    torch.manual_seed(0)
    options = OPTIONS | {"chain_execution": execution}
    if kind == "resnet18":
        return bayesianize(resnet(), "last_layer", Categorical(), **options), *_images(), None
    if kind == "lora":
        return bayesianize(encoder(0.1), lora(), Categorical(), **options), *_texts(), None
    if kind == "lstm":
        return BayesianModule(Recurrent(), Categorical(), **options), *_sequences(), Recurrent()
    if kind == "unet":
        return BayesianModule(UNet(), PixelCategorical(), **options), *_pixels(), UNet()
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return BayesianModule(net, HeteroscedasticGaussian(), **options), *_numbers(), None


class KillAt(pl.Callback):
    """Ends the process without a word after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run(kind: str, execution: str, folder: Path, kill: int, resume: bool) -> None:
    """Fit, test and write the predictions; or die."""
    torch.set_num_threads(1)
    model, data, inputs, _ = make(kind, execution)
    saver = pl.callbacks.ModelCheckpoint(folder, filename="last", every_n_train_steps=5, save_top_k=1, monitor=None)
    callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(folder / "samples"), BayesianModelAverage()]
    callbacks += [saver, *([KillAt(kill)] if kill else [])]
    trainer = quiet_trainer(max_steps=STEPS, enable_checkpointing=True, callbacks=callbacks)
    source = DatasetDataModule(data, data, test=data, batch_size=8)
    trainer.fit(model, datamodule=source, ckpt_path=folder / "last.ckpt" if resume else None)
    (found,) = trainer.test(model, datamodule=source, verbose=False)
    assert torch.tensor(list(found.values())).isfinite().all()
    assert model.posterior is not None
    torch.save(model.posterior.predict(inputs).parts, folder / "predictions.pt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "execution"),
    [
        ("resnet18", "loop"),
        ("resnet18", "vmap"),
        ("lora", "loop"),
        ("lora", "vmap"),
        ("lstm", "loop"),
        ("lstm", "unrolled"),
        ("unet", "loop"),
        ("unet", "vmap"),
        ("heteroscedastic", "loop"),
        ("heteroscedastic", "vmap"),
    ],
)
def test_through_every_door(kind: str, execution: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def process(folder: Path, kill: int = 0, resume: bool = False) -> int:
        code = f"from tests.pretrained.test_any_network import *; run({kind!r}, {execution!r}, Path({str(folder)!r}), "
        return subprocess.run(
            [sys.executable, "-c", f"{code}{kill}, {resume})"], check=False, cwd=REPOSITORY
        ).returncode

    assert process(whole) == 0
    assert process(parts, kill=8) == -signal.SIGKILL
    assert process(parts, resume=True) == 0
    _, _, inputs, net = make(kind, execution)
    stores = [Posterior.load(folder / "samples", net=net) for folder in (whole, parts)]
    assert len(stores[0]) == len(stores[1]) == 24
    for one, other in zip(*stores, strict=True):
        assert (one.step, one.chain) == (other.step, other.chain)
        for name, tensor in one.own_state.items():
            assert torch.equal(tensor, other.own_state[name]), name
    expected = torch.load(parts / "predictions.pt", weights_only=True)
    found = stores[1].predict(inputs).parts
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    ensemble = stores[1][-3:].ensemble().eval()
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    arguments: Any = ((), inputs) if isinstance(inputs, dict) else (given, None)
    exported = torch.export.export(ensemble, *arguments).module()
    first = exported(**inputs) if isinstance(inputs, dict) else exported(*given)
    direct = ensemble(**inputs) if isinstance(inputs, dict) else ensemble(*given)
    torch.testing.assert_close(first, direct, rtol=1e-4, atol=1e-5)
