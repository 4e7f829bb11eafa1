"""The noise of mini-batch energies in swaps: how large it is estimated, and that a run without noise swaps as such."""

import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, FlatPrior
from lightning_sgmcmc.callbacks import ReplicaExchange, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.support.recorders import Each
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:lr=0")

NUM_DATA = 64
LADDERS = 24


def numbers() -> Tensor:
    return torch.randn(NUM_DATA, generator=torch.Generator().manual_seed(4)).exp()


class Means(BayesianModule):
    """The mean of numbers under unit noise; chains stay where they start, as lr is 0."""

    def __init__(self, starts: list[float], **options: Any) -> None:
        super().__init__(
            prior=FlatPrior(), sampler=SGLD, lr=0.0, num_data=NUM_DATA, num_chains=len(starts), seed=0, **options
        )
        self.mean = nn.Parameter(torch.tensor(starts[0]))
        self.starts = starts

    def initialise_chain(self, chain: int) -> None:
        with torch.no_grad():
            self.mean.fill_(self.starts[chain])

    def log_likelihood(self, batch: Any) -> Tensor:
        return -((batch[0] - self.mean) ** 2) / 2


def fit(module: Means, data: Any, exchange: ReplicaExchange, steps: int, **options: Any) -> list[float]:
    """Fit; return the estimate of σ² after each step."""
    seen = Each("on_before_zero_grad", lambda *arguments: exchange.state_dict()["variance"])
    callbacks = [SamplingSchedule(every_n_steps=1), exchange, seen]
    trainer = quiet_trainer(max_steps=steps, callbacks=callbacks, **options)
    source = {"datamodule": data} if isinstance(data, pl.LightningDataModule) else {"train_dataloaders": data}
    trainer.fit(module, **source)
    return [float(variance.mean()) for variance in seen.seen if variance is not None]


def own_batches(size: int) -> Any:
    items = TensorDataset(numbers())
    return DatasetDataModule(items, items, batch_size=size)


def replaced(size: int) -> Any:
    items = TensorDataset(numbers())
    return DataLoader(items, size, sampler=RandomSampler(items, replacement=True, num_samples=NUM_DATA))


@pytest.mark.parametrize(
    ("make", "shared", "accumulated", "unseen"),
    [
        (own_batches, False, 1, 0.5),
        (own_batches, True, 1, 0.5),
        (replaced, True, 1, 1.0),
        (own_batches, False, 2, 0.5),
    ],
)
def test_the_estimate_has_the_mean_of_the_noise(make: Any, shared: bool, accumulated: int, unseen: float) -> None:
    """Half the variance of the difference of two energies, known from all data; half of them are in a step.

    The mean of 80 estimates has a standard error of 4 %, so the tolerance of 20 % has a false-alarm rate below 1e-6.
    """
    starts, x = [0.0, 3.0], numbers().double()
    torch.manual_seed(1)
    module = Means(starts, shared_batch=shared)
    exchange = ReplicaExchange([1.0, 2.0], smoothing=1.0)
    found = fit(module, make(32 // accumulated), exchange, 80, accumulate_grad_batches=accumulated)
    first, second = (-((x - start) ** 2) / 2 for start in starts)
    of_difference = float((first - second).var()) if shared else float(first.var() + second.var())
    truth = NUM_DATA**2 / 32 * unseen * of_difference / 2
    assert sum(found) / len(found) == pytest.approx(truth, rel=0.2)


@pytest.mark.parametrize("shared", [False, True])
def test_with_all_data_in_a_batch_the_swaps_are_those_without_noise(shared: bool, tmp_path: Path) -> None:
    """24 ladders of two chains, whose energies differ by 1.5 nats, against the exact law of their swaps.

    The colder chain has the lower energy at first, so a ladder swaps with chance exp(-δ·1.5) and then surely swaps
    back. The number of swaps in 40 attempts is compared with its mean: 5 standard errors, a chance of 6e-7.
    """
    x = numbers().double()
    lower = float(x.mean())
    upper = lower + math.sqrt(2 * 1.5 / NUM_DATA)  # U rises by N·(upper - lower)²/2
    module = Means([lower, upper] * LADDERS, shared_batch=shared, chain_execution="vmap")
    logger = pl.loggers.CSVLogger(tmp_path)
    exchange = ReplicaExchange([1.0, 2.0])
    estimates = fit(module, own_batches(NUM_DATA), exchange, 40, logger=logger, log_every_n_steps=40)
    assert max(estimates) == 0.0
    lines = [line.split(",") for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()]
    column = lines[0].index("exchange/swap_rate_0_1")
    (swaps,) = [float(line[column]) * 40 for line in lines[1:] if line[column]]
    mean, square = moments_of_swaps(math.exp(-1.5 / 2), 40)
    assert abs(swaps - mean) < 5 * math.sqrt((square - mean**2) / LADDERS)


def moments_of_swaps(chance: float, attempts: int) -> tuple[float, float]:
    """Return mean and mean square of a ladder's swaps, which succeed with a chance and are then surely undone."""
    law = torch.zeros(2, attempts + 1, dtype=torch.float64)  # by state and by number of swaps
    law[0, 0] = 1
    for _ in range(attempts):
        new = torch.zeros_like(law)
        new[0] += law[0] * (1 - chance)
        new[1, 1:] += law[0, :-1] * chance
        new[0, 1:] += law[1, :-1]
        law = new
    counts = torch.arange(attempts + 1).double()
    total = law.sum(0)
    return float(total @ counts), float(total @ counts**2)
