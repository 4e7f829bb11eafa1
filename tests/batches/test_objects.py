"""Batches that are objects of a class of their own, such as graphs of torch_geometric."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sgmcmc import BayesianModule, Categorical, FeatureDataModule, Gaussian, Posterior, bayesianize
from lightning_sgmcmc.callbacks import AutoSampling, BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.support.trainers import quiet_trainer

COUNTS = (85, 27)


@dataclass
class Bags:
    """Sets of points of different sizes; `bag` says to which set a point belongs."""

    points: Tensor
    bag: Tensor
    y: Tensor | None = None

    def to(self, device: Any, **options: Any) -> "Bags":
        y = None if self.y is None else self.y.to(device, **options)
        return Bags(self.points.to(device, **options), self.bag.to(device, **options), y)


def joined(items: list[tuple[Tensor, int]]) -> Bags:
    sizes = torch.tensor([len(points) for points, _ in items])
    bag = torch.arange(len(items)).repeat_interleave(sizes)
    return Bags(torch.cat([points for points, _ in items]), bag, torch.tensor([label for _, label in items]))


def items(count: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 6, (count,), generator=generator).tolist()
    points = [torch.randn(size, 3, generator=generator) + 4 * (i % 2) for i, size in enumerate(sizes)]
    return [(each, i % 2) for i, each in enumerate(points)]


class Pooling(nn.Module):
    """Mean over a set's points, after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

    def pooled(self, points: Tensor, bag: Tensor) -> Any:
        each = torch.relu(self.body(points))
        counts = torch.zeros(int(bag.max()) + 1).index_add(0, bag, torch.ones(len(bag)))
        return self.head(torch.zeros(len(counts), 8).index_add(0, bag, each) / counts[:, None])


class Whole(Pooling):
    """It gets the batch."""

    def forward(self, bags: Bags) -> Any:
        return self.pooled(bags.points, bags.bag)


class ByName(Pooling):
    """It gets the batch's attributes by their names."""

    def forward(self, points: Tensor, bag: Tensor) -> Any:
        return self.pooled(points, bag)


def loaders(cut: int = 20) -> tuple[Any, Any]:
    own = [items(count, seed) for seed, count in enumerate(COUNTS)]
    return (
        DataLoader(own[0], cut, shuffle=True, collate_fn=joined),
        DataLoader(own[1], cut, collate_fn=joined),
    )


@pytest.mark.by_default("ByName")
@pytest.mark.parametrize("network", [Whole, ByName])
def test_from_fit_to_decisions(network: Any, tmp_path: Path) -> None:
    """85 sets in batches of 20: the last batch is odd."""
    train, val = loaders()
    module = BayesianModule(network(), Categorical(), num_chains=2)
    callbacks = [AutoSampling(num_draws=8), SampleCollector(tmp_path), BayesianModelAverage()]
    trainer = quiet_trainer(max_epochs=50, callbacks=callbacks)
    trainer.fit(module, train, val)
    assert module.plan is not None
    assert module.plan.num_data == 85
    assert module.evaluations["val"].bma["accuracy"] > 0.9
    posterior = Posterior.load(tmp_path, net=network())
    batches = list(val)
    whole = posterior.predict(val).probabilities
    torch.testing.assert_close(posterior.predict(batches[0]).probabilities, whole[:20])
    unlabelled = Bags(batches[0].points, batches[0].bag)
    torch.testing.assert_close(posterior.predict(unlabelled).probabilities, whole[:20])
    torch.testing.assert_close(posterior.ensemble()(batches[0]), whole[:20])
    found: Any = trainer.predict(module, val)
    torch.testing.assert_close(found[0].probabilities, whole[:20])
    assert posterior.evaluate(val).bma["nll"] == pytest.approx(module.evaluations["val"].bma["nll"], abs=1e-4)
    assert posterior.log_likelihood(val).shape == (len(posterior), 27)
    assert posterior.conformal(val, 0.5).predict(val).sets.shape == (27, 2)
    refusing: list[Any] = [posterior.calibrate, posterior.predict_batches, posterior.evaluate]
    for method in refusing:
        with pytest.raises(TypeError, match="got a Bags"):
            method(batches[0])


def test_data_modules_chains_of_their_own_batches_and_features() -> None:
    train, val = (items(count, seed) for seed, count in enumerate(COUNTS))
    data = DatasetDataModule(train, val, batch_size=20, collate_fn=joined)
    module = BayesianModule(Whole(), Categorical(), num_chains=2, shared_batch=False)
    last = bayesianize(Whole(), "last_layer", Categorical())
    for one, of in ((module, data), (last, FeatureDataModule(last, *loaders()))):
        quiet_trainer(max_epochs=6, callbacks=[AutoSampling(num_draws=4), SampleCollector(in_memory=True)]).fit(one, of)
        assert one.posterior is not None
        assert one.posterior.predict(joined(val)).probabilities.shape == (27, 2)


def test_a_batch_without_a_target_says_what_to_write() -> None:
    module = BayesianModule(Whole(), Categorical(), lr=0.01)
    with pytest.raises(
        TypeError, match=r"class Bags needs its target as labels, label, target, y: set it, yield pairs"
    ):
        module.log_likelihood(Bags(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)))


def test_graphs_of_torch_geometric(tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    class GNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.head = GCNConv(3, 8), nn.Linear(8, 2)

        def forward(self, data: Any) -> Any:
            hidden = torch.relu(self.convolution(data.x, data.edge_index))
            return self.head(global_mean_pool(hidden, data.batch))

    ring = [torch.arange(n) for n in range(6)]
    train, val = (
        [
            Data(x=x, edge_index=torch.stack([ring[len(x)], ring[len(x)].roll(1)]), y=torch.tensor([label]))
            for x, label in own
        ]
        for own in (items(count, seed) for seed, count in enumerate(COUNTS))
    )
    module = BayesianModule(GNN(), Categorical())
    callbacks = [AutoSampling(num_draws=8), SampleCollector(tmp_path), BayesianModelAverage()]
    loader = GraphLoader(val, batch_size=20)
    quiet_trainer(max_epochs=50, callbacks=callbacks).fit(
        module, GraphLoader(train, batch_size=20, shuffle=True), loader
    )
    assert module.plan is not None
    assert module.plan.num_data == 85
    assert module.evaluations["val"].bma["accuracy"] > 0.9
    posterior = Posterior.load(tmp_path, net=GNN())
    whole = posterior.predict(loader).probabilities
    torch.testing.assert_close(posterior.predict(next(iter(loader))).probabilities, whole[:20])
    with pytest.raises(TypeError, match="got a DataBatch"):
        posterior.calibrate(next(iter(loader)))


class Row(NamedTuple):
    number: Tensor
    value: Tensor


class Turned(NamedTuple):
    value: Tensor
    number: Tensor


@dataclass
class Record:
    """Lightning moves it to a device by its fields."""

    number: Tensor
    value: Tensor


def of_pair(kind: str, x: Tensor, y: Tensor) -> Any:
    """Numbers of one type as inputs and targets, so that one is not told from the other."""
    if kind in ("pair", "turned pair", "dict"):
        return {"pair": (x, y), "turned pair": (y, x), "dict": {"number": x, "value": y}}[kind]
    return {"row": Row, "turned row": Turned, "record": Record}[kind](number=x, value=y)


class TakenApart(BayesianModule):
    kind = "pair"

    def inputs_and_target(self, batch: Any) -> tuple[Any, Any]:
        if self.kind in ("pair", "turned pair"):
            return (batch[0], batch[1]) if self.kind == "pair" else (batch[1], batch[0])
        return (batch["number"], batch["value"]) if self.kind == "dict" else (batch.number, batch.value)


def asked(kind: str) -> dict[str, Any]:
    """What a fit of batches of one kind returns, by each method that takes batches."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(45, 1, generator=generator)
    y = 0.5 * x + 2 + 0.3 * torch.randn(45, 1, generator=generator)
    batches: Any = [of_pair(kind, x[i : i + 10], y[i : i + 10]) for i in range(0, 45, 10)]
    loader: Any = DataLoader(batches, batch_size=None)
    torch.manual_seed(0)
    module = TakenApart(nn.Linear(1, 1), Gaussian(std=0.3), lr=0.05, num_data=45, seed=1)
    module.kind = kind
    callbacks = [SamplingSchedule(burn_in_steps=20, every_n_steps=5), SampleCollector(in_memory=True)]
    trainer = quiet_trainer(max_epochs=8, callbacks=[*callbacks, BayesianModelAverage()])
    trainer.fit(module, loader, loader)
    posterior = module.posterior
    assert posterior is not None
    torch.manual_seed(0)
    student = posterior.distill(nn.Linear(1, 3), loader, epochs=3, accelerator="cpu")
    predicted: Any = trainer.predict(module, loader)
    return {
        "predict": posterior.predict(loader).mean,
        "predict a list": posterior.predict(batches).mean,
        "trainer.predict": torch.cat([one.mean for one in predicted]),
        "evaluate": posterior.evaluate(batches).bma["nll"],
        "numbers of NumPy's type": posterior.evaluate([of_pair(kind, x.double(), y.double())]).bma["nll"],
        "trainer.test": trainer.test(module, loader, verbose=False)[0]["test/bma_nll"],
        "calibrate": posterior.calibrate(loader).predict(x).std,
        "conformal": posterior.conformal(loader, 0.9).predict(loader).low,
        "joint_nll": posterior.joint_nll(loader).nll,
        "log_likelihood": posterior.log_likelihood(batches),
        "compress": posterior.compress(2, loader).weights,
        "distill": student.predict(x).mean,
    }


@pytest.mark.parametrize("kind", ["turned pair", "dict", "row", "turned row", "record"])
def test_batches_that_the_module_takes_apart_are_those_of_the_fit(kind: str) -> None:
    """Every method sees the inputs and targets that `inputs_and_target` returns in training."""
    expected = asked("pair")
    for name, found in asked(kind).items():
        torch.testing.assert_close(found, expected[name], msg=name)


@pytest.mark.parametrize("method", ["evaluate", "calibrate", "log_likelihood"])
def test_a_datamodule_without_validation_data_is_named(method: str) -> None:
    class Alone(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return []

    posterior = Posterior.from_states(nn.Linear(1, 1), [nn.Linear(1, 1)], Gaussian())
    with pytest.raises(ValueError, match=r"Alone has none: pass a loader"):
        getattr(posterior, method)(Alone())
