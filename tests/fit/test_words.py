"""What a run says of mistakes and of itself: one remedy, said once, in the user's terms."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, LaplacePrior, Likelihood, StudentT
from lightning_sgmcmc.callbacks import (
    AutoSampling,
    BayesianModelAverage,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
    recommended,
)
from lightning_sgmcmc.datamodules import DatasetDataModule, TableDataModule
from tests.support.paths import REPOSITORY
from tests.support.problems import Data, Net
from tests.support.trainers import quiet_trainer


def narrow() -> BayesianModule:
    """Two outputs for three classes."""
    return BayesianModule(net=nn.Linear(5, 2), likelihood=Categorical())


def test_too_few_outputs_are_named_at_the_sanity_check() -> None:
    trainer = quiet_trainer(max_steps=2, callbacks=[SamplingSchedule(every_n_steps=1)])
    with pytest.raises(ValueError, match=r"class|output"):
        trainer.fit(narrow(), datamodule=Data())
    for run in (trainer.validate, trainer.test):
        with pytest.raises(ValueError, match=r"class|output"):
            run(narrow(), datamodule=Data())


@pytest.mark.filterwarnings("error:The run has no plan")
@pytest.mark.parametrize("shape", [(60,), (60, 1)])
def test_a_linear_regression_with_flat_targets_has_a_plan(shape: tuple[int, ...]) -> None:
    x = torch.randn(60, 3)
    sets = TensorDataset(x, x.sum(1).reshape(shape))
    module = BayesianModule(net=nn.Linear(3, 1), likelihood=Gaussian(), lr=1e-3)
    trainer = quiet_trainer(max_steps=4, callbacks=[SamplingSchedule(every_n_steps=1)])
    trainer.fit(module, datamodule=DatasetDataModule(sets, sets, batch_size=20))
    assert module.plan is not None


@pytest.mark.parametrize(
    ("likelihood", "warns"),
    [
        (Gaussian(), True),
        (Gaussian(0.3), False),
        (Gaussian(1, True), False),
        (StudentT(), True),
        (StudentT(4.0, 0.3), False),
        (StudentT(learned=True), False),
    ],
)
def test_a_fixed_noise_as_large_as_the_targets_is_named(
    likelihood: Likelihood, warns: bool, recwarn: pytest.WarningsRecorder
) -> None:
    x = torch.randn(60, 1)
    data = TableDataModule(x, 100 * x[:, 0], batch_size=20, task="regression")
    trainer = quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=1)])
    trainer.fit(BayesianModule(nn.Linear(1, 1), likelihood, lr=0.01), datamodule=data)
    said = [str(w.message) for w in recwarn if "as large as the spread of the standardised targets" in str(w.message)]
    assert len(said) == warns


@pytest.mark.parametrize(("std", "tells"), [(1.0, True), ([1.0, 1.0], False)])
def test_one_noise_for_several_targets_is_named(std: Any, tells: bool, recwarn: pytest.WarningsRecorder) -> None:
    x = torch.randn(60, 2)
    data = TableDataModule(x, 100 * x, batch_size=20, task="regression")
    trainer = quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=1)])
    trainer.fit(BayesianModule(nn.Linear(2, 2), Gaussian(std, learned=True), lr=0.01), datamodule=data)
    said = [str(w.message) for w in recwarn if "one noise for all 2 targets" in str(w.message)]
    assert len(said) == tells
    assert all("pass Gaussian(std=[1.0] * 2, learned=True)" in text for text in said)


def test_one_sample_of_a_trial_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [SamplingSchedule(every_n_steps=5), SampleCollector(), BayesianModelAverage(), RunSummary()]
    quiet_trainer(fast_dev_run=1, callbacks=callbacks).fit(Net(), datamodule=Data())
    said = " ".join(capsys.readouterr().out.split())
    assert "1 posterior sample on" in said
    assert "fast_dev_run" in said


def test_a_datamodule_says_how_many_data_it_has() -> None:
    data = Data()
    assert str(data) == "Data, whose data are read by setup()"
    data.setup("fit")
    assert "60 training" in str(data)


def test_a_budget_that_is_too_short_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "pytorch_lightning"):
        trainer = quiet_trainer(max_epochs=1, callbacks=[AutoSampling(budget="0.001s", num_draws=4)])
        trainer.fit(Net(), datamodule=Data())
    assert [m for m in caplog.messages if "budget=0.001s" in m and "has 240 at least" in m]


def test_private_values_stay_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The prior that `AutoSampling` sets has no number of steps, and a prior that it keeps no scale of its own."""
    for prior, words in ((None, "prior std 0."), (LaplacePrior(0.3), "the module's prior")):
        caplog.clear()
        module = Net(prior=prior)
        with caplog.at_level("INFO", "pytorch_lightning"):
            trainer = quiet_trainer(
                max_epochs=2,
                callbacks=recommended(tmp_path / words[:4], AutoSampling(num_draws=4)),
                default_root_dir=tmp_path,
            )
            trainer.fit(module, datamodule=Data())
        assert str(2**62) not in repr(module.prior)
        assert [words in m for m in caplog.messages if m.startswith("AutoSampling: ")] == [True]


@pytest.mark.slow
def test_the_way_to_load_a_class_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "project.py").write_text(
        "from torch import nn\nfrom lightning_sgmcmc import BayesianModule, Categorical\n\n\n"
        "class Mine(BayesianModule):\n    def __init__(self):\n        super().__init__(likelihood=Categorical())\n"
        "        self.net = nn.Linear(5, 3)\n\n    def forward(self, x):\n        return self.net(x)\n"
    )
    fit = (
        "import torch, project, pytorch_lightning as pl\nfrom lightning_sgmcmc.callbacks import *\n"
        "from tests.support.problems import Data\n"
        "callbacks = [SamplingSchedule(every_n_steps=1), SampleCollector('samples')]\n"
        "pl.Trainer(max_steps=2, callbacks=callbacks, logger=False, accelerator='cpu').fit(project.Mine(), Data())\n"
    )
    load = (
        "import torch\nfrom lightning_sgmcmc import Posterior\n"
        "try:\n    Posterior.load('samples').predict(torch.zeros(2, 5))\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    environment = {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}", "PATH": "", "OMP_NUM_THREADS": "1"}
    said = ""
    for code in (fit, load):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout
    assert "project is not imported" in said
    assert said.count("net=…") == said.count("model=…") == 1
