"""Datamodules: N, splits and statistics."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, CyclicOrder, Gaussian, datamodules
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import (
    ArrayDataModule,
    DatasetDataModule,
    DigitsDataModule,
    MNISTDataModule,
    TableDataModule,
    TensorBatches,
    UCIClassificationDataModule,
    UCIRegressionDataModule,
)
from lightning_sgmcmc.datamodules.base import evaluation_loader, random_split, standardise
from tests.support.paths import DATA_ROOT as ROOT
from tests.support.problems import Stream, blobs, classifier
from tests.support.trainers import quiet_trainer

needs_data = pytest.mark.skipif(not ROOT.is_dir(), reason="no data files: set SGMCMC_DATA_ROOT to their folder")


def rows(loader: Any) -> torch.Tensor:
    return torch.cat([batch[0].flatten(1) for batch in loader])


def write_regression(root: Path, shift: float = 0.0) -> None:
    """A table of 40 rows whose first two rows are the test part of split 0; `shift` moves those only."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(3, 2, size=(40, 3)), rng.normal(-5, 4, size=40)
    x[:, 2] = 7.0  # a constant column
    x[:2] += shift
    y[:2] += shift
    tests = np.stack([np.roll(np.arange(40), 2 * i)[:2] for i in range(20)]).astype(np.int32)
    (root / "uci_regression").mkdir(parents=True, exist_ok=True)
    np.savez(root / "uci_regression" / "yacht.npz", x=x, y=y, test_indices=tests)


def prepared(module: ArrayDataModule) -> ArrayDataModule:
    module.prepare_data()
    module.setup("fit")
    return module


def test_whole_batches_are_the_rows_that_item_wise_collation_gives() -> None:
    x, y = torch.randn(50, 3), torch.arange(50)
    ours = evaluation_loader(TensorBatches(x, y), 16)
    plain = DataLoader(TensorDataset(x, y), 16)
    for (a, b), (c, d) in zip(ours, plain, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)
    assert TensorBatches(x, y)[3][0].shape == (3,)


def test_random_split_is_a_function_of_the_seed_alone() -> None:
    labels = torch.arange(100) % 4
    first = random_split(100, (0.1, 0.2), 5, labels)
    torch.manual_seed(123)
    again, other = random_split(100, (0.1, 0.2), 5, labels), random_split(100, (0.1, 0.2), 6, labels)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(torch.cat(first).sort().values, torch.arange(100))
    assert [len(part) for part in first] == [72, 8, 20]  # 0.1 of 25 is 2, in each of four classes
    assert all(labels[first[2]].bincount() == 5)


def test_standardise_uses_the_training_part_and_survives_constants() -> None:
    train, other = torch.randn(30, 2).double() * 3 + 5, torch.randn(10, 2).double() + 100
    train[:, 1] = 7.0
    (a, b), mean, std = standardise(train, other)
    assert a[:, 0].mean().abs() < 1e-6
    assert a[:, 0].std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert torch.equal(a[:, 1], torch.zeros(30))
    assert b.isfinite().all()
    torch.testing.assert_close(b.double() * std + mean, other, rtol=1e-5, atol=1e-4)


MODULES = [made for name in datamodules.__all__ if name.endswith("DataModule") for made in [getattr(datamodules, name)]]


@pytest.mark.parametrize("module", [made for made in MODULES if made is not datamodules.CorruptedDataModule])
def test_a_configuration_sets_what_a_datamodule_shares_with_others(module: type[Any]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(module, "data")
    names = {action.dest.removeprefix("data.") for action in parser._actions}
    shared = {"batch_size", "order"}
    if not issubclass(module, ArrayDataModule):
        assert shared <= names
        return
    assert shared | {"seed", "drop_last"} <= names
    with pytest.raises(TypeError, match=f"{module.__name__} has no argument 'batchsize'; did you mean 'batch_size'"):
        module(batchsize=3)


def test_the_training_loader_has_the_order() -> None:
    loader = prepared(DigitsDataModule(order=CyclicOrder)).train_dataloader()
    passes = [torch.cat([loader.order_of(0).indices(batch + start) for batch in range(13)]) for start in (0, 13)]
    assert torch.equal(*passes)


@pytest.mark.parametrize("drop_last", [False, True])
def test_digits(drop_last: bool) -> None:
    module = prepared(DigitsDataModule(batch_size=64, drop_last=drop_last))
    sizes = [len(split.targets) for split in module.splits]
    assert sum(sizes) == 1797
    assert module.num_data == sizes[0] == len(module.splits[0].inputs)
    assert module.input_shape == (64,)
    train = module.splits[0].inputs
    assert abs(train.mean()) < 1e-5
    assert abs(train.std() - 1) < 1e-5
    everything = torch.cat([rows(module.val_dataloader()), rows(module.test_dataloader()), train])
    assert len(everything) == 1797
    assert len(everything.unique(dim=0)) >= 1790, "the parts do not overlap (scikit-learn's digits are all distinct)"
    assert prepared(DigitsDataModule(flatten=False)).input_shape == (1, 8, 8)


def test_no_validation_part_is_no_loader() -> None:
    assert prepared(DigitsDataModule(val_fraction=0)).val_dataloader() == []


def test_uci_regression_knows_its_test_rows_from_nothing_but_the_file(tmp_path: Path) -> None:
    write_regression(tmp_path)
    module = prepared(UCIRegressionDataModule("yacht", tmp_path, split=0))
    assert module.num_data == 38
    train, _, test = module.splits
    assert len(test.targets) == 2
    assert abs(train.targets.mean()) < 1e-6
    assert train.inputs[:, :2].std(0, correction=0).numpy() == pytest.approx(1, abs=1e-5)
    write_regression(tmp_path, shift=1000.0)
    moved = prepared(UCIRegressionDataModule("yacht", tmp_path, split=0))
    assert torch.equal(moved.splits[0].inputs, train.inputs), "test rows do not reach the training statistics"
    assert moved.target_std == module.target_std
    assert not torch.equal(moved.splits[2].inputs, test.inputs)
    with np.load(tmp_path / "uci_regression" / "yacht.npz") as arrays:
        original = torch.as_tensor(arrays["y"][arrays["test_indices"][0]])[:, None]
    assert module.target_mean is not None
    assert module.target_std is not None
    back = moved.splits[2].targets.double() * module.target_std + module.target_mean
    torch.testing.assert_close(back, original, rtol=1e-4, atol=1e-2)


@needs_data
def test_uci_files() -> None:
    for name, count in (("energy", 768), ("wine-quality-red", 1599)):
        for split in (0, 19):
            module = prepared(UCIRegressionDataModule(name, ROOT, split=split, val_fraction=0.1))
            assert sum(len(part.targets) for part in module.splits) == count
            with np.load(ROOT / "uci_regression" / f"{name}.npz") as arrays:
                expected = np.sort(arrays["y"][arrays["test_indices"][split]])
            assert module.target_mean is not None
            assert module.target_std is not None
            found = module.splits[2].targets.double() * module.target_std + module.target_mean
            assert np.sort(found.squeeze(1).numpy()) == pytest.approx(expected, abs=1e-4)
    heart = prepared(UCIClassificationDataModule("heart", ROOT, intercept=True))
    assert heart.input_shape == (14,)
    assert heart.splits[0].targets.dtype == torch.int64
    assert heart.splits[2].targets.bincount().tolist() == [30, 24]


@needs_data
def test_mnist_files() -> None:
    module = prepared(MNISTDataModule(ROOT, batch_size=5000))
    assert module.num_data == 55_000
    assert [len(part.targets) for part in module.splits] == [55_000, 5_000, 10_000]
    train = rows(module.train_dataloader())
    assert train.shape == (55_000, 784)
    assert train.dtype == torch.float32
    assert abs(train.mean()) < 1e-4
    assert abs(train.std() - 1) < 1e-4
    assert next(iter(module.test_dataloader()))[1][:5].tolist() == [7, 2, 1, 0, 4]
    assert prepared(MNISTDataModule(ROOT, flatten=True)).input_shape == (784,)


def test_wrapper() -> None:
    data = TensorDataset(torch.randn(30, 2), torch.zeros(30))
    module = DatasetDataModule(data, val=data, batch_size=7, drop_last=True)
    assert module.num_data == 30
    assert len(module.train_dataloader()) == 4
    assert len(module.val_dataloader()) == 5
    assert module.test_dataloader() == []
    stream = DatasetDataModule(Stream([(torch.zeros(2), torch.tensor(0))] * 8), batch_size=4, num_data=8)
    assert stream.num_data == 8
    assert len(list(stream.train_dataloader())) == 2
    joined = DatasetDataModule(
        data, val=data, batch_size=7, collate_fn=lambda items: torch.stack([x for x, _ in items])
    )
    assert [next(iter(loader)).shape for loader in (joined.train_dataloader(), joined.val_dataloader())] == [(7, 2)] * 2


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_batches_for_cuda_are_pinned(kind: str) -> None:
    data = TensorDataset(torch.randn(30, 2), torch.zeros(30))
    module = DatasetDataModule(data, val=data, num_workers=1)
    assert not module.train_dataloader().pin_memory
    strategy = SimpleNamespace(root_device=torch.device(kind))
    module.trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
    assert [module.train_dataloader().pin_memory, module.val_dataloader().pin_memory] == [kind == "cuda"] * 2


@pytest.mark.parametrize("chains", [1, 2])
def test_a_tensor_data_set_has_the_draws_of_its_items(chains: int) -> None:
    """With dropout and a validation set; a subclass is indexed item by item, as before."""

    class Items(TensorDataset):
        pass

    walks = []
    for kind in (TensorDataset, Items):
        train, val = (kind(*blobs(count, seed).tensors) for count, seed in ((50, 0), (30, 1)))
        collector, module = SampleCollector(in_memory=True), classifier(dropout=0.5, seed=1, num_chains=chains)
        data = DatasetDataModule(train, val=val, batch_size=12)
        callbacks = [SamplingSchedule(every_n_steps=2), collector, BayesianModelAverage()]
        quiet_trainer(max_steps=7, callbacks=callbacks).fit(module, datamodule=data)
        assert collector.posterior is not None
        walks.append(([sample.state for sample in collector.posterior], module.evaluations["val"].bma))
        assert isinstance(data.train_dataloader().dataset, TensorBatches) == (kind is TensorDataset)
    assert walks[0][1] == walks[1][1]
    for first, second in zip(walks[0][0], walks[1][0], strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_table_of_numpy_arrays(tmp_path: Path) -> None:
    """A regression in units of its own: rows of all parts together are the table, and the metrics are in its units."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(5.0, [1.0, 100.0], size=(200, 2)), rng.normal(size=200)
    y = 1000 + 50 * (x[:, 0] - 5) + y
    data = TableDataModule(x, y, batch_size=40, val_fraction=0.2, test_fraction=0.1)
    prepared(data)
    assert (data.num_data, data.num_classes) == (140, None)
    assert data.target_mean is not None
    assert data.target_std is not None
    inputs, targets = (torch.cat([getattr(split, name) for split in data.splits]) for name in ("inputs", "targets"))
    assert inputs.dtype == targets.dtype == torch.float32
    torch.testing.assert_close(data.splits[0].inputs.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.splits[0].targets.std(0, correction=0), torch.ones(1))
    back = targets[:, 0].double() * data.target_std + data.target_mean
    torch.testing.assert_close(back.sort().values, torch.tensor(y).sort().values, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(data.inputs(x).sort(0).values, inputs.sort(0).values)
    module = BayesianModule(net=torch.nn.Linear(2, 1), likelihood=Gaussian(std=0.05), lr=0.002, seed=0)
    callbacks = [SamplingSchedule(burn_in_epochs=20, every_n_epochs=1), BayesianModelAverage()]
    quiet_trainer(max_epochs=25, callbacks=callbacks).fit(module, datamodule=data)
    assert 0.5 < module.evaluations["val"].bma["rmse"] < 5, "the noise is 1, in the table's units"


def test_a_table_of_classes_and_one_without_standardisation() -> None:
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
    classes = prepared(TableDataModule(x, y, val_fraction=0.2, test_fraction=0.2))
    assert (classes.num_classes, classes.target_std) == (2, None)
    assert [split.targets.sum().item() for split in classes.splits] == [6, 2, 2], "the same shares in each class"
    plain = prepared(TableDataModule(x, x[:, 0], standardise=False, val_fraction=0, test_fraction=0))
    assert plain.splits[0].inputs.tolist() == x.tolist()
    assert plain.target_std is None


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros(3), np.zeros(3), r"x should have shape \(n, columns\), got \(3,\)"),
        (np.zeros((3, 1)), np.zeros(4), "x has 3 rows and y has 4 targets"),
        (np.full((3, 1), np.nan), np.zeros(3), "x has 3 values that are NaN or infinite in column 0: fill them in"),
        (np.zeros((2, 1)), np.zeros((2, 2, 2)), r"y should have shape \(n,\) or \(n, targets\), got \(2, 2, 2\)"),
        (np.zeros((2, 1)), np.array([-1, 1]), "y has the label -1, and labels count from 0: pass y.astype"),
    ],
)
def test_wrong_tables_are_named(x: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TableDataModule(x, y)


def test_numpy_arrays_and_float64_inputs() -> None:
    x, y = (part.numpy() for part in blobs().tensors)
    with pytest.raises(TypeError, match=r"tensors must be torch tensors, got a ndarray: use torch\.as_tensor"):
        TensorBatches(x, y)
    data = DatasetDataModule(TensorDataset(torch.tensor(x).double(), torch.tensor(y)), batch_size=24)
    trainer = quiet_trainer(max_steps=1, callbacks=[SamplingSchedule(every_n_steps=1)])
    with pytest.raises(TypeError, match=r"inputs are float64 and the network's parameters float32: convert .* \.float"):
        trainer.fit(classifier(), datamodule=data)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DigitsDataModule(batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: DigitsDataModule(val_fraction=1.0), r"val_fraction must be in \[0, 1\), got 1.0"),
        (lambda: DigitsDataModule(val_fraction=0.5, test_fraction=0.5), "val_fraction \\+ test_fraction"),
        (lambda: UCIRegressionDataModule("boston"), "name must be one of boston-housing, .*, got 'boston'"),
        (lambda: UCIRegressionDataModule("yacht", split=20), "split must be between 0 and 19, got 20"),
        (lambda: UCIClassificationDataModule("iris"), "name must be one of australian, .*, got 'iris'"),
        (lambda: MNISTDataModule(val_size=60_000), "val_size must be between 0 and 59999, got 60000"),
        (lambda: DatasetDataModule(Stream([(torch.zeros(2), torch.tensor(0))] * 8)), "no length: give num_data"),
        (lambda: DatasetDataModule(TensorDataset(torch.zeros(3)), num_data=4), "num_data=4 contradicts .* there are 3"),
        (lambda: TensorBatches(torch.zeros(3), torch.zeros(4)), r"lengths \[3, 4\]"),
    ],
)
def test_mistakes_say_what_is_wrong(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_missing_files_and_early_questions(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"the table 'yacht' is not at .*uci_regression/yacht.npz: put the file"
    ):
        prepared(UCIRegressionDataModule("yacht", tmp_path))
    with pytest.raises(RuntimeError, match="no data before setup"):
        _ = DigitsDataModule().num_data
