"""Labels of every integer dtype, calibration with NaN inputs, empty batches and PITs, through a fit."""

import functools
import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    BayesianModule,
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianPrior,
    MultiLabelBernoulli,
    Ordinal,
    PixelCategorical,
    Poisson,
    TokenCategorical,
)
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.diagnostics import pit_histogram
from tests.support.trainers import quiet_trainer

COUNT = 24
INTEGERS = ["uint8", "int8", "int16", "int32", "uint16", "bool"]


class Shaped(nn.Linear):
    """A linear layer whose output has a shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(2, math.prod(shape))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(len(x), *self.shape)


KINDS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "Categorical": (Categorical, (2,), ()),
    "Ordinal": (lambda: Ordinal(3), (), ()),
    "Bernoulli": (Bernoulli, (), ()),
    "MultiLabelBernoulli": (MultiLabelBernoulli, (3,), (3,)),
    "PixelCategorical": (PixelCategorical, (2, 2, 2), (2, 2)),
    "TokenCategorical": (TokenCategorical, (3, 2), (3,)),
    "Poisson": (Poisson, (), ()),
}


def fitted(kind: str, dtype: str, chains: int = 1) -> tuple[BayesianModule, dict[str, float]]:
    make, output, label = KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 2, generator=generator)
    y = torch.randint(0, 2, (COUNT, *label), generator=generator).to(getattr(torch, dtype))
    torch.manual_seed(0)
    module = BayesianModule(Shaped(output), make(), GaussianPrior(1.0), lr=0.01, seed=0, num_chains=chains)
    trainer = quiet_trainer(
        max_epochs=2, callbacks=[SamplingSchedule(every_n_epochs=1), SampleCollector(), BayesianModelAverage()]
    )
    loader = DataLoader(TensorDataset(x, y), 10)
    trainer.fit(module, loader, loader)
    assert module.posterior is not None
    if kind in ("Categorical", "Ordinal", "Bernoulli"):
        module.posterior.calibrate(loader)
        module.posterior.conformal(loader, 0.8)
    return module, module.evaluations["val"].bma


@functools.cache
def of_int64(kind: str) -> tuple[Tensor, dict[str, float]]:
    """Return the weights and the metrics of the run that the others are compared with."""
    module, found = fitted(kind, "int64")
    return module.net.weight.detach().clone(), found


@pytest.mark.by_default("uint8", "Categorical-uint16", "Poisson-uint16", "Categorical-int16", "Bernoulli-bool")
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_every_integer_dtype(kind: str, dtype: str) -> None:
    """The same run as with int64, to the last bit: steps, metrics, calibration."""
    module, found = fitted(kind, dtype)
    weight, metrics = of_int64(kind)
    assert found == metrics
    assert torch.equal(module.net.weight, weight)


@pytest.mark.parametrize("kind", ["Categorical", "Ordinal", "PixelCategorical", "TokenCategorical"])
def test_labels_as_floats_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="integer labels"):
        fitted(kind, "float32")


def test_a_label_of_bytes_is_not_the_ignored_one() -> None:
    """torch compares the uint8 156 with -100 as equal."""
    logits, y = torch.randn(1, 3, 200), torch.tensor([[156, 3, 156]])
    likelihood, terms = TokenCategorical(), TokenCategorical().terms(logits)
    found, expected = (likelihood.metrics(terms, logits[:, 0, 0], t, 1.0) for t in (y.to(torch.uint8), y))
    assert found == expected


@pytest.mark.parametrize("method", ["calibrate", "conformal"])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()])
def test_a_prediction_that_is_not_finite_is_refused(likelihood: Any, method: str) -> None:
    x = torch.randn(20, 2)
    y = torch.zeros(20).long() if isinstance(likelihood, Categorical) else torch.zeros(20, 2)
    module = BayesianModule(nn.Linear(2, 2), likelihood, lr=1e-3)
    trainer = quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_epochs=1), SampleCollector()])
    trainer.fit(module, DataLoader(TensorDataset(x, y), 10))
    bad = x.clone()
    bad[3, 1], bad[7, 0] = math.nan, math.inf
    posterior: Any = module.posterior
    for value in (TensorDataset(bad, y), TensorDataset(x, y)):
        call = getattr(posterior, method)
        arguments = (DataLoader(value, 20), *((0.9,) if method == "conformal" else ()))
        if value.tensors[0] is x:
            call(*arguments)
            continue
        with pytest.raises(ValueError, match=f"{method} needs finite predictions, and 2 of 20 are NaN or infinite"):
            call(*arguments)


class Energies(pl.Callback):
    """Keeps the energies of the steps, and -log p(θ) before them."""

    def __init__(self) -> None:
        self.energies: list[float] = []
        self.priors: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        with pl_module.at_chain(0), torch.no_grad():
            self.priors.append(-float(pl_module.log_prior()))
        self.energies.append(float(pl_module.chains.observed.energy[0]))


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("likelihood", [Categorical(), Ordinal(3), Gaussian(), Poisson()])
def test_an_empty_batch_has_no_likelihood(likelihood: Any, chains: int) -> None:
    """The mean over the epoch's batches is U: Σ of all data and the prior, with one empty batch among three."""
    width = 3 if isinstance(likelihood, Categorical) else 1
    y = torch.zeros(8, 1) if isinstance(likelihood, Gaussian | Poisson) else torch.zeros(8).long()
    data = TensorDataset(torch.randn(8, 2), y)

    def collate(rows: list[Any]) -> Any:
        return tuple(torch.stack(part) for part in zip(*rows, strict=True)) if rows else (data.tensors[0][:0], y[:0])

    batches = [list(range(4)), [], list(range(4, 8))]
    loader: Any = DataLoader(data, batch_sampler=batches, collate_fn=collate)
    module = BayesianModule(nn.Linear(2, width), likelihood, lr=1e-12, temperature=0.0, num_chains=chains)
    kept = Energies()
    quiet_trainer(max_epochs=1, callbacks=[kept]).fit(module, loader)
    assert kept.energies[1] == pytest.approx(kept.priors[1], rel=1e-6)
    with module.at_chain(0), torch.no_grad():
        whole = -float(module.log_likelihood(data.tensors).sum() + module.log_prior())
    assert sum(kept.energies) / 3 == pytest.approx(whole, rel=1e-5)


def test_the_pit_of_a_calibrated_count_is_flat() -> None:
    """4,000 counts of Poisson(1) with the right rate: each tenth has .1 ± .0047; 5 standard errors."""
    y = torch.poisson(torch.ones(4000, 1), generator=torch.Generator().manual_seed(0))
    module = BayesianModule(nn.Linear(1, 1), Poisson(), GaussianPrior(1.0), lr=1e-12)
    with torch.no_grad():
        for parameter in module.net.parameters():
            parameter.zero_()
    loader = DataLoader(TensorDataset(torch.zeros(4000, 1), y), 1000)
    callbacks = [SamplingSchedule(every_n_epochs=1), BayesianModelAverage()]
    quiet_trainer(max_epochs=1, callbacks=callbacks).fit(module, loader, loader)
    pit = module.evaluations["val"].pit
    assert pit is not None
    assert (pit_histogram(pit) - 0.1).abs().max() < 0.024
