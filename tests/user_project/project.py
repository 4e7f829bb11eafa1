"""A user's project; `.ci/run` checks it by mypy --strict and pyright against the installed package."""

from collections.abc import Mapping
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    SGHMC,
    BayesianModule,
    Categorical,
    Gaussian,
    GaussianPrior,
    Posterior,
    PosteriorSample,
    Prediction,
    Prior,
)
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    CyclicalSchedule,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
    SamplerCallback,
)
from lightning_sgmcmc.datamodules import DatasetDataModule


class TextClassifier(BayesianModule):
    """A network with two inputs."""

    def __init__(self, words: int = 20, width: int = 8) -> None:
        super().__init__(likelihood=Categorical(), prior=GaussianPrior(std=0.5), sampler=SGHMC, lr=0.01)
        self.embedding = nn.Embedding(words, width)
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states: Tensor = self.embedding(ids) * mask[..., None]
        logits: Tensor = self.head(states.mean(1))
        return logits

    def output_and_target(self, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, mask, label = batch
        return self(ids, mask), label


class Poisson(BayesianModule):
    """A log-likelihood of the user's own."""

    def __init__(self) -> None:
        super().__init__(net=nn.Linear(2, 1), lr=1e-3, temperature=0.5)

    def log_likelihood(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, counts = batch
        log_rate = self(x).squeeze(-1)
        log_density: Tensor = counts * log_rate - log_rate.exp() - torch.lgamma(counts + 1)
        return log_density


class Horseshoe(Prior):
    """A prior of the user's own."""

    def log_prob(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([-(1 + p.square()).log().sum() for p in parameters.values()]).sum()


class Energies(SamplerCallback):
    """A callback of the user's own."""

    def __init__(self) -> None:
        self.energies: list[float] = []

    def on_posterior_sample(self, trainer: pl.Trainer, pl_module: BayesianModule, sample: PosteriorSample) -> None:
        self.energies.append(sample.energy)


def texts(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, (count, 6), generator=generator)
    return TensorDataset(ids, torch.ones(count, 6), ids[:, 0] % 3)


def classify(folder: Path, epochs: int = 4) -> tuple[float, list[float]]:
    """Fit, and return the validation accuracy of the average and the samples' energies."""
    module = TextClassifier()
    energies = Energies()
    trainer = pl.Trainer(
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[
            CyclicalSchedule(num_cycles=2, exploration=0.5, samples_per_cycle=1),
            SampleCollector(folder / "samples"),
            BayesianModelAverage(),
            PosteriorDashboard(figures=["tables"]),
            RunSummary(),
            energies,
        ],
    )
    trainer.fit(module, datamodule=DatasetDataModule(texts(), val=texts(), batch_size=12))
    return module.evaluations["val"].bma["accuracy"], energies.energies


def regress(folder: Path) -> Prediction:
    """Fit a regression, and predict with each sample."""
    x = torch.linspace(-1, 1, 24)[:, None]
    module = BayesianModule(net=nn.Linear(1, 1), likelihood=Gaussian(std=0.1), prior=Horseshoe(), lr=0.01)
    collector = SampleCollector(folder)
    trainer = pl.Trainer(
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        callbacks=[CyclicalSchedule(num_cycles=1, exploration=0.5, samples_per_cycle=2), collector],
    )
    trainer.fit(module, DataLoader(TensorDataset(x, 2 * x), batch_size=12, shuffle=True))
    posterior = Posterior.load(folder)
    prediction = posterior.predict(x, return_samples=True)
    print(prediction.mean.squeeze(-1), (prediction.std - prediction.epistemic_std).min())
    print(prediction.sample_means.std(0).max(), [sample.step for sample in posterior])
    return prediction


def labels(posterior: Posterior, inputs: DataLoader[tuple[Tensor, ...]]) -> list[int]:
    """Return the most probable classes, of the inputs whose predictive is certain."""
    prediction = posterior.predict(inputs)
    certain = prediction.entropy < 0.1
    chosen: list[int] = prediction.probabilities.argmax(-1)[certain].tolist()
    return chosen
