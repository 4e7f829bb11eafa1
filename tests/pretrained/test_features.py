"""The frozen layers' outputs, computed once: the draws are those of the whole network."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, FeatureDataModule, Gaussian, Posterior, bayesianize
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import (
    ArrayDataModule,
    DatasetDataModule,
    ImageFolderDataModule,
    Split,
    TableDataModule,
)
from lightning_sgmcmc.datamodules.datasets import collate_rows
from tests.pretrained.networks import encoder
from tests.support.image_folders import write_folder
from tests.support.trainers import quiet_trainer


def table() -> TableDataModule:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 5, generator=generator)
    return TableDataModule(x, x[:, :3].argmax(1), batch_size=16, val_fraction=0.2, test_fraction=0.2)


def network(*before: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        trunk = nn.Sequential(nn.Linear(5, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Dropout(0.2))
        return nn.Sequential(trunk, *before, nn.Linear(20, 3))


def module(net: nn.Module | None = None, **options: Any) -> BayesianModule:
    chosen: dict[str, Any] = {"sampler": SGHMC, "lr": 0.05, "num_chains": 2, "seed": 3, "chain_start": "own"} | options
    return bayesianize(network() if net is None else net, "last_layer", Categorical(), **chosen)


def fit(model: BayesianModule, data: pl.LightningDataModule, folder: Path) -> pl.Trainer:
    callbacks: list[pl.Callback] = [SamplingSchedule(every_n_steps=2), SampleCollector(folder), BayesianModelAverage()]
    trainer = quiet_trainer(max_steps=8, callbacks=callbacks)
    trainer.fit(model, datamodule=data)
    return trainer


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_draws_and_predictions_are_those_of_the_whole_network(tmp_path: Path, execution: Any) -> None:
    whole, part, data = module(chain_execution=execution), module(chain_execution=execution), table()
    of_whole = fit(whole, table(), tmp_path / "whole")
    of_part = fit(part, FeatureDataModule(part, data), tmp_path / "part")
    stores = [Posterior.load(tmp_path / name) for name in ("whole", "part")]
    assert len(stores[0]) == len(stores[1]) == 8
    for one, other in zip(*stores, strict=True):
        torch.testing.assert_close(one.state, other.state, rtol=1e-4, atol=1e-5)
        assert one.energy == pytest.approx(other.energy, rel=1e-5)
    for name in ("val/bma_nll", "val/bma_accuracy"):
        assert float(of_part.callback_metrics[name]) == pytest.approx(float(of_whole.callback_metrics[name]), rel=1e-4)
    x = data.splits[2].inputs
    expected = stores[0].predict(x).probabilities
    for posterior in (stores[1], part.posterior):
        assert posterior is not None
        torch.testing.assert_close(posterior.predict(x).probabilities, expected, rtol=1e-4, atol=1e-5)


class Augmented(ArrayDataModule):
    def load(self) -> tuple[Split, Split, Split]:
        return table().load()

    def train_transform(self) -> Any:
        return lambda x: x + torch.randn_like(x)


class Scaled(nn.Module):
    """Does more with its last layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 20), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 2 * self.head(self.body(x))
        return out


def test_what_cannot_be_computed_once() -> None:
    with pytest.raises(TypeError, match=r"data should be a datamodule or a loader of training data, got a Tensor"):
        FeatureDataModule(module(), torch.randn(5, 5))
    with pytest.raises(ValueError, match=r"list does not say its batch_size: pass batch_size"):
        FeatureDataModule(module(), [(torch.randn(5, 5), torch.zeros(5).long())])
    saved = pl.LightningDataModule()
    saved.save_hyperparameters({"batch_size": 7})
    assert FeatureDataModule(module(), saved).batch_size == 7
    with pytest.raises(ValueError, match=r"val and test are for loaders"):
        FeatureDataModule(module(), table(), val=[])
    for model, data, message in (
        (module(), Augmented(8), "Augmented augments its training data, so features would be of other inputs"),
        (module(Scaled()), table(), r"output is not that of its sampled part 'net.head'"),
        (module(network(nn.Dropout(0.5))), table(), r"'net.1' drops out in training"),
        (module(frozen_dropout=True), table(), r"'net.0.3' drops out in training"),
        (BayesianModule(net=network(), likelihood=Categorical()), table(), r"are in several parts of the network"),
    ):
        with pytest.raises(ValueError, match=message):
            FeatureDataModule(model, data).setup("fit")


# -- data that are not arrays in memory --------------------------------------------------------------------------------


class Named(nn.Module):
    """Takes its inputs by name, as a model of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, 12), network()[0], nn.Linear(20, 3)
        self.narrow = nn.Linear(12, 5)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        pooled = (self.embed(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        out: Tensor = self.head(self.body(self.narrow(pooled)))
        return out


def named() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Named()


class Rows(Dataset[dict[str, Any]]):
    """Rows with a text that no network takes."""

    def __init__(self, count: int, first: int = 0) -> None:
        generator = torch.Generator().manual_seed(first)
        self.ids = torch.randint(11, (count, 6), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        return {"ids": ids, "mask": torch.ones(6), "labels": int(ids[0]) % 3, "text": str(index)}


class Foreign(pl.LightningDataModule):
    """A user's datamodule: a shuffling loader that leaves out the short last batch, and labels by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 16

    def setup(self, stage: str) -> None:
        self.rows = Rows(53), Rows(21, 1)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows[0], self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(self.rows[1], self.batch_size)]


@pytest.mark.parametrize("kind", ["data sets", "a user's datamodule", "loaders", "workers"])
def test_features_of_dict_batches_are_those_of_the_whole_network(kind: str, tmp_path: Path) -> None:
    """53 data in batches of 16: the last one is odd."""
    train, val = Rows(53), Rows(21, 1)
    model = module(named())
    before = torch.get_rng_state()
    if kind == "data sets":
        features = FeatureDataModule(model, DatasetDataModule(train, val, batch_size=16))
    elif kind == "a user's datamodule":
        features = FeatureDataModule(model, Foreign())
    else:
        workers = 2 if kind == "workers" else 0
        loader = DataLoader(train, 16, shuffle=True, drop_last=True, num_workers=workers)
        features = FeatureDataModule(model, loader, val=DataLoader(val, 16))
    features.setup("fit")
    assert torch.equal(torch.get_rng_state(), before)
    assert features.num_data == 53
    for part, rows in zip(features.splits, (train, val), strict=False):
        assert torch.equal(part.targets, rows.ids[:, 0] % 3)
        own = named().eval()
        pooled = own.embed(rows.ids).mean(1)  # type: ignore[operator]
        torch.testing.assert_close(part.inputs, own.body(own.narrow(pooled)), rtol=1e-4, atol=1e-5)  # type: ignore[operator]
    assert len(features.splits[2].targets) == 0
    if kind == "workers":
        return
    whole = module(named())
    fit(whole, DatasetDataModule(train, val, batch_size=16), tmp_path / "whole")
    fit(model, features, tmp_path / "part")
    inputs = {"ids": val.ids, "mask": torch.ones(21, 6)}
    assert whole.posterior is not None
    assert model.posterior is not None
    expected = whole.posterior.predict(inputs).probabilities
    torch.testing.assert_close(model.posterior.predict(inputs).probabilities, expected, rtol=1e-3, atol=1e-4)


def test_a_model_of_transformers_and_its_own_batches(tmp_path: Path) -> None:
    """The last layer of a BERT, with dict batches that have a mask."""
    rows: Any = [
        {"input_ids": [1 + i % 7, 2, 3 + i % 5, 0], "attention_mask": [1, 1, 1, 0], "labels": i % 3} for i in range(21)
    ]
    model = module(encoder(num_labels=3))
    features = FeatureDataModule(model, DatasetDataModule(rows, rows[:9], batch_size=8, collate_fn=collate_rows))
    fit(model, features, tmp_path / "part")
    assert features.num_data == 21
    assert features.splits[0].targets.tolist() == [row["labels"] for row in rows]
    assert model.posterior is not None
    first: Any = next(iter(model.posterior.networks()))
    batch = collate_rows(rows)
    whole = first(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(whole, first.classifier(features.splits[0].inputs), rtol=1e-4, atol=1e-5)


def test_a_missing_target_is_no_augmentation() -> None:
    x, y = torch.randn(21, 5), torch.randn(21, 1)
    y[3] = torch.nan
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    model = bayesianize(net, "last_layer", Gaussian(0.3))
    features = FeatureDataModule(model, DataLoader(TensorDataset(x, y), 8, shuffle=True))
    features.setup("fit")
    torch.testing.assert_close(features.splits[0].targets, y, equal_nan=True)


class Noisy(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"mask": torch.rand(6)}


class NoisyOnDevice(Foreign):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch | {"mask": torch.rand_like(batch["mask"])}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield Rows(1)[0]


def test_loaders_whose_features_are_not_computed_once() -> None:
    weighted = WeightedRandomSampler([1.0] * 53, 53)
    few = 1e-9 * 16 * 20 * 4 * 2.5
    for data, options, message in (
        (DataLoader(Noisy(53), 16), {}, r"data augments its training data"),
        (DatasetDataModule(Noisy(53), batch_size=16), {}, r"DatasetDataModule augments its training data"),
        (NoisyOnDevice(), {}, r"NoisyOnDevice augments its training data"),
        (DataLoader(Rows(53), 16, sampler=weighted), {}, r"by a WeightedRandomSampler, .*: pass DataLoader"),
        (DataLoader(Endless(), 16), {"max_gb": few}, r"first 48 data take more than max_gb=.*, 0.08 kB each"),
    ):
        with pytest.raises(ValueError, match=message):
            FeatureDataModule(module(named()), data, **options).setup("fit")


def test_images_without_augmentation(tmp_path: Path) -> None:
    """The images that a fit would augment are refused, the same without are computed once."""
    write_folder(tmp_path, {"train": 11, "val": 5})
    net = nn.Sequential(nn.Conv2d(3, 4, 3, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 5 * 5, 3))
    augmented = ImageFolderDataModule(tmp_path, size=16, batch_size=10, augment=True)
    features = FeatureDataModule(bayesianize(net, "last_layer", Categorical()), augmented)
    with pytest.raises(ValueError, match="ImageFolderDataModule augments its training data"):
        features.setup("fit")
    data = ImageFolderDataModule(tmp_path, size=16, batch_size=10)
    features = FeatureDataModule(bayesianize(net, "last_layer", Categorical()), data)
    features.setup("fit")
    x, y = next(iter(features.val_dataloader()))
    images, labels = next(iter(data.val_dataloader()))
    torch.testing.assert_close(x.values, net[:3](images))
    assert torch.equal(y, labels)
    assert features.num_data == len(data.splits[0].targets)


class Dropping(nn.Module):
    """Drops out in its forward, without a layer for it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Depth(nn.Module):
    """Stochastic depth as user code has it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1) > 0.5) * 2 if self.training else x


@pytest.mark.parametrize("layer", [Dropping, Depth, lambda: nn.BatchNorm1d(20, affine=False)])
def test_inputs_that_are_others_in_training(layer: Any, tmp_path: Path) -> None:
    """Else the samples would be of another network than in a fit without features; in evaluation mode they agree."""
    model = module(network(layer()))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    features = FeatureDataModule(model, table())
    with pytest.raises(ValueError, match=r"inputs of 'net\.2' are others in training than in evaluation"):
        features.setup("fit")
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    states = []
    for place in (table(), None):
        model = module(network(layer().eval()))
        fit(model, place or FeatureDataModule(model, table()), tmp_path / f"{place is None}")
        assert model.posterior is not None
        states.append([sample.state for sample in model.posterior])
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
