"""Three projects from end to end: programs of users, in processes of their own."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.wandb_records import finished_records

pytestmark = pytest.mark.slow


def run(folder: Path, name: str, program: str, *arguments: str, **environment: str) -> str:
    """Run a program in a folder, and return what it printed."""
    (folder / name).write_text(textwrap.dedent(program))
    said = subprocess.run(
        [sys.executable, name, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert said.returncode == 0, said.stderr[-3_000:]
    return said.stdout


LESIONS = """
    import lightning as L
    import numpy as np
    import torch
    from lightning.pytorch.loggers import WandbLogger
    from sklearn.datasets import load_digits
    from torch import nn

    from lightning_sgmcmc import BayesianModule, Categorical, Posterior
    from lightning_sgmcmc.callbacks import recommended
    from lightning_sgmcmc.datamodules import TableDataModule


    class Lesions(BayesianModule):
        '''A small CNN that tells a rare kind of picture (the digit 8) from the others.'''

        def __init__(self, width: int = 8) -> None:
            super().__init__(likelihood=Categorical())
            self.layers = nn.Sequential(
                nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 2)
            )

        def forward(self, x):
            return self.layers(x)


    if __name__ == "__main__":
        L.seed_everything(0)
        pictures, digits = load_digits(return_X_y=True)
        data = TableDataModule(pictures / 16, digits == 8, task="classes")
        module = Lesions()
        trainer = L.Trainer(
            max_epochs=30,
            accelerator="cpu",
            callbacks=recommended("samples"),
            logger=WandbLogger(project="lesions", offline=True),
            enable_progress_bar=False,
        )
        trainer.fit(module, datamodule=data)
        trainer.test(module, datamodule=data)
        evaluation = module.evaluations["test"]
        assert isinstance(module, L.LightningModule)
        print(evaluation.bma["accuracy"], evaluation.bma["nll"], evaluation.guessing["nll"])
"""


def test_a_cnn_under_lightning_with_wandb(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("wandb")
    said = run(tmp_path, "lesions.py", LESIONS, WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(tmp_path))
    accuracy, nll, guess = map(float, said.strip().splitlines()[-1].split()[:3])
    assert accuracy > 0.95
    assert nll < 0.5 * guess
    records = finished_records(next(tmp_path.rglob("*.wandb")))
    logged = {item.key or "/".join(item.nested_key) for r in records for item in r.history.item}
    assert any("bma_nll" in name for name in logged)
    results = json.loads(next(tmp_path.rglob("results.json")).read_text())
    assert "guessing" in {row["method"] for row in results["rows"]}


CLAIMS = """
    import sys

    import numpy as np
    import pandas as pd
    from sklearn.dummy import DummyRegressor
    from sklearn.metrics import mean_poisson_deviance
    from sklearn.model_selection import GroupKFold, cross_val_predict

    from lightning_sgmcmc import Poisson
    from lightning_sgmcmc.estimators import BayesianRegressor

    rng = np.random.default_rng(0)
    count = 900
    frame = pd.DataFrame(
        {
            "age": np.where(rng.random(count) < 0.1, np.nan, rng.uniform(18, 80, count)),
            "power": rng.normal(size=count),
            "region": rng.choice(["north", "south", "west"], count),
            "fuel": pd.Categorical(rng.choice(["diesel", "petrol"], count)),
        }
    )
    customer = rng.integers(200, size=count)
    rate = np.exp(0.3 + 0.8 * frame["power"] + 0.7 * (frame["region"] == "south") - 0.5 * (frame["fuel"] == "petrol"))
    claims = rng.poisson(rate)
    model = BayesianRegressor(likelihood=Poisson(), hidden=(16,), max_epochs=40, num_chains=2, random_state=0)
    folds = GroupKFold(3)
    ours = cross_val_predict(model, frame, claims, groups=customer, cv=folds)
    guess = cross_val_predict(DummyRegressor(), frame, claims, groups=customer, cv=folds)
    model.fit(frame, claims)
    low, high = model.predict_interval(frame, level=0.9).T
    import torch
    found = model.posterior_.evaluate([(frame, torch.as_tensor(claims))], group=frame["region"])
    print(
        mean_poisson_deviance(claims, ours),
        mean_poisson_deviance(claims, guess),
        np.mean((low <= claims) & (claims <= high)),
        *(found.groups[name]["nll"] < found.groups[name]["guessing nll"] for name in ("north", "south", "west")),
    )
"""


def test_an_insurance_table_in_the_manner_of_scikit_learn(tmp_path: Path) -> None:
    said = run(tmp_path, "claims.py", CLAIMS).strip().splitlines()[-1].split()
    ours, guess, covered = map(float, said[:3])
    assert ours < 0.8 * guess
    assert covered > 0.85
    assert said[3:] == ["True"] * 3


TRAIN = """
    import sys
    from pathlib import Path

    import pytorch_lightning as pl
    import torch
    from torch.utils.data import Dataset
    from transformers import BertConfig, BertForSequenceClassification

    from lightning_sgmcmc import bayesianize
    from lightning_sgmcmc.callbacks import BayesianModelAverage, ChainHealth, CyclicalSchedule, RunSummary
    from lightning_sgmcmc.callbacks import SampleCollector
    from lightning_sgmcmc.datamodules import DatasetDataModule


    class Texts(Dataset):
        '''Texts of 8 words; those with word 7 are complaints.'''

        def __init__(self, count: int, seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            self.ids = torch.randint(8, 40, (count, 8), generator=generator)
            self.labels = torch.randint(2, (count,), generator=generator)
            self.ids[self.labels == 1, 3] = 7

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, i: int) -> dict:
            return {"input_ids": self.ids[i], "labels": self.labels[i]}


    def pretrained(net):
        '''Fine-tune the network once, as others have done it.'''
        path = Path("pretrained.pt")
        if not path.exists():
            optimizer, texts = torch.optim.Adam(net.parameters(), lr=0.005), Texts(800, 0)
            for step in range(150):
                rows = torch.randint(800, (64,))
                optimizer.zero_grad()
                net(input_ids=texts.ids[rows], labels=texts.labels[rows]).loss.backward()
                optimizer.step()
            torch.save(net.state_dict(), path)
        net.load_state_dict(torch.load(path))
        return net


    def main(night: int) -> None:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=40,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=8,
            num_labels=2,
        )
        net = pretrained(BertForSequenceClassification(config))
        module = bayesianize(net, "last_layer", lr=0.05)
        data = DatasetDataModule(Texts(400, night), val=Texts(99, 100 + night), batch_size=32)
        trainer = pl.Trainer(
            max_epochs=20,
            accelerator="cpu",
            devices=2,
            strategy="chains",
            callbacks=[
                CyclicalSchedule(num_cycles=2, samples_per_cycle=2),
                SampleCollector("served/samples"),
                BayesianModelAverage(),
                RunSummary(),
                ChainHealth(),
            ],
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, datamodule=data)
        if trainer.is_global_zero:
            print("accuracy", module.evaluations["val"].bma["accuracy"], len(module.posterior))


    if __name__ == "__main__":
        main(int(sys.argv[1]))
"""

SERVE = """
    import sys
    import time
    from pathlib import Path

    import torch
    import transformers.models.bert.modeling_bert  # the network's class

    from lightning_sgmcmc import Posterior

    posterior = Posterior.load("served/samples")
    ids = torch.randint(8, 40, (5, 8), generator=torch.Generator().manual_seed(5))
    first = posterior.predict({"input_ids": ids}).probabilities
    Path("ready").touch()
    while not Path("stop").exists():
        torch.testing.assert_close(posterior.predict({"input_ids": ids}).probabilities, first)
        time.sleep(0.1)
    torch.testing.assert_close(posterior.predict({"input_ids": ids}).probabilities, first)
    new = Posterior.load("served/samples")
    print("changed", not torch.allclose(new.predict({"input_ids": ids}).probabilities, first), len(new))
"""


IMAGES = """
    import sys
    from pathlib import Path

    import pytorch_lightning as pl
    import timm
    import torch
    from torch import nn
    from torch.utils.data import Dataset

    from lightning_sgmcmc import bayesianize
    from lightning_sgmcmc.callbacks import BayesianModelAverage, CyclicalSchedule, SampleCollector
    from lightning_sgmcmc.datamodules import DatasetDataModule


    class Pictures(Dataset):
        '''Noise of 32x32 pixels; pictures of class 1 are brighter in a corner.'''

        def __init__(self, count: int, seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            self.pixels = torch.randn(count, 3, 32, 32, generator=generator)
            self.labels = torch.randint(2, (count,), generator=generator)
            self.pixels[self.labels == 1, :, :16, :16] += 1.0

        def __len__(self) -> int:
            return len(self.labels)

        def __getitem__(self, i: int) -> tuple:
            return self.pixels[i], self.labels[i]


    def pretrained(net):
        '''Train the network once, as others have done it.'''
        path = Path("pretrained.pt")
        if not path.exists():
            optimizer, data = torch.optim.AdamW(net.parameters(), lr=0.003), Pictures(400, 0)
            for step in range(30):
                rows = torch.randint(400, (20,))
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(data.pixels[rows]), data.labels[rows]).backward()
                optimizer.step()
            torch.save(net.state_dict(), path)
        net.load_state_dict(torch.load(path))
        return net


    def main(night: int) -> None:
        torch.manual_seed(0)
        net = pretrained(timm.create_model("resnet10t", pretrained=False, num_classes=2))
        module = bayesianize(net, "last_layer", lr=0.05)
        data = DatasetDataModule(Pictures(200, night), val=Pictures(98, 100 + night), batch_size=50)
        callbacks = [
            CyclicalSchedule(num_cycles=2, exploration=0.5, samples_per_cycle=2),
            SampleCollector("served/samples"),
            BayesianModelAverage(),
        ]
        trainer = pl.Trainer(
            max_epochs=4,
            accelerator="cpu",
            devices=2,
            strategy="chains",
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, datamodule=data)
        if trainer.is_global_zero:
            print("accuracy", module.evaluations["val"].bma["accuracy"], len(module.posterior))


    if __name__ == "__main__":
        main(int(sys.argv[1]))
"""

SERVE_IMAGES = """
    import time
    from pathlib import Path

    import torch

    from lightning_sgmcmc import Posterior  # timm is not imported: the store names the network

    posterior = Posterior.load("served/samples")
    pixels = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    first = posterior.predict(pixels).probabilities
    Path("ready").touch()
    while not Path("stop").exists():
        torch.testing.assert_close(posterior.predict(pixels).probabilities, first)
        time.sleep(0.1)
    torch.testing.assert_close(posterior.predict(pixels).probabilities, first)
    new = Posterior.load("served/samples")
    print("changed", not torch.allclose(new.predict(pixels).probabilities, first), len(new))
"""


@pytest.mark.parametrize(
    ("library", "train", "serve"),
    [("transformers", TRAIN, SERVE), ("timm", IMAGES, SERVE_IMAGES)],
    ids=["text", "pictures"],
)
def test_a_classifier_that_is_retrained_while_it_serves(tmp_path: Path, library: str, train: str, serve: str) -> None:
    pytest.importorskip(library)
    said = run(tmp_path, "train.py", train, "1").strip().splitlines()[-1].split()
    assert float(said[1]) > 0.8
    (tmp_path / "serve.py").write_text(textwrap.dedent(serve))
    server = subprocess.Popen(
        [sys.executable, "serve.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (tmp_path / "ready").exists() and server.poll() is None:
            time.sleep(0.1)
        run(tmp_path, "train.py", train, "2")
        (tmp_path / "stop").touch()
        out, err = server.communicate(timeout=120)
    finally:
        server.kill()
    assert server.returncode == 0, err[-3_000:]
    assert out.split() == ["changed", "True", "8"]
