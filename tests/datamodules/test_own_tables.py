"""A user's own data: arrays, frames of pandas, data sets of Hugging Face."""

import logging
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule, TableDataModule
from lightning_sgmcmc.estimators import BayesianRegressor
from tests.support.trainers import quiet_trainer

COUNT = 20


def frame() -> pandas.DataFrame:
    values = np.random.default_rng(0).normal(size=(COUNT, 3))
    return pandas.DataFrame(values, columns=["a", "price", "b"])


def prepared(*args: Any, **options: Any) -> TableDataModule:
    data = TableDataModule(*args, **options)
    data.setup("fit")
    return data


def test_a_frame_and_its_arrays_are_one_table(caplog: pytest.LogCaptureFixture) -> None:
    table = frame()
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        named = prepared(table, target="price")
    assert "converts x from float64 and y from float64 to float32, in which networks compute" in caplog.text
    plain = prepared(table[["a", "b"]].to_numpy(), table["price"].to_numpy())
    for one, same in zip(named.splits, plain.splits, strict=True):
        assert torch.equal(one.inputs, same.inputs)
        assert torch.equal(one.targets, same.targets)
        assert one.inputs.dtype == one.targets.dtype == torch.float32
    assert named.columns == ("a", "b")
    shuffled = table[["b", "price", "a"]]
    assert torch.equal(named.inputs(shuffled), plain.inputs(table[["a", "b"]].to_numpy())), "columns by name"
    with pytest.raises(ValueError, match="x has no column 'b', which the training data have"):
        named.inputs(table[["a"]])
    with pytest.raises(ValueError, match="x has 3 columns, and the training data have 2"):
        plain.inputs(table)


def test_a_column_that_numbers_the_rows_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """As the index of a file that pandas wrote; rows in another order, or of a measurement, are not numbered."""
    frame = pandas.DataFrame({"Unnamed: 0": range(5, 35), "size": np.linspace(0, 1, 30), "y": np.ones(30)})
    frame["shuffled"] = np.random.default_rng(0).permutation(30)
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        TableDataModule(frame, target="y", task="regression")
    (said,) = [message for message in caplog.messages if "numbers the rows" in message]
    assert "column 'Unnamed: 0'" in said


@pytest.mark.parametrize("task", ["classes", None])
def test_labels_that_begin_at_one_leave_out_a_class(task: Any, caplog: pytest.LogCaptureFixture) -> None:
    x, labels = np.zeros((40, 2)), np.arange(40) % 4
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        assert TableDataModule(x, labels, task=task).num_classes == 4
        assert not [message for message in caplog.messages if "no row" in message]
        assert TableDataModule(x, labels + 1, task=task).num_classes == 5
    (said,) = [message for message in caplog.messages if "no row" in message]
    assert "labels up to 4, hence 5 classes, and no row of 0. If there are 4 classes" in said


def test_dates_are_named_with_what_to_do() -> None:
    frame = pandas.DataFrame({"when": pandas.date_range("2020-01-01", periods=30), "y": 1.0})
    with pytest.raises(TypeError, match=r"column 'when' of dates, .* or test on the last rows by time='when'"):
        TableDataModule(frame, target="y", task="regression")
    TableDataModule(frame.assign(size=range(0, 60, 2)), target="y", task="regression", time="when")


def test_arrays_that_must_not_be_written_give_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    """Those of pandas 3 are like that, and torch warns of them."""
    x, y = np.arange(COUNT * 2.0).reshape(COUNT, 2), np.arange(COUNT) % 2
    x.flags.writeable = y.flags.writeable = False
    prepared(x, y)
    assert not recwarn


def test_splits_of_the_users_own() -> None:
    rows = [np.arange(5), [7], torch.arange(10, 14)]
    x = torch.arange(COUNT)[:, None].double()
    data = prepared(x, torch.arange(COUNT) % 2, standardise=False, splits=rows)
    assert [part.inputs[:, 0].tolist() for part in data.splits] == [[0, 1, 2, 3, 4], [7], [10, 11, 12, 13]]
    assert data.num_data == 5
    masks = [np.arange(COUNT) < 3, np.zeros(COUNT, bool), np.arange(COUNT) == 9]
    assert [len(part.targets) for part in prepared(x, x[:, 0], splits=masks).splits] == [3, 0, 1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "cost"}, ValueError, "x has no column 'cost': it has 'a', 'price', 'b'"),
        ({"y": "price"}, TypeError, "y='price' is a text: pass target='price'"),
        (
            {"x": "table.csv", "target": "price"},
            FileNotFoundError,
            "table.csv",
        ),
        ({"y": frame()["price"].iloc[::-1]}, ValueError, "y has the rows of x in another order"),
        ({}, TypeError, "y is missing: pass the targets, or target="),
        ({"y": np.zeros(COUNT), "target": "a"}, TypeError, "got y as well: pass either"),
        ({"x": np.zeros((COUNT, 2)), "target": "a"}, TypeError, "names a column of a pandas frame, got x of ndarray"),
        ({"x": frame().assign(a="red"), "target": "b"}, TypeError, "x has the column 'a' of .*not numeric: encode it"),
        ({"y": ["red"] * COUNT}, ValueError, "y has 1 different names in 20 rows"),
        (
            {"y": ["red"] * COUNT, "task": "regression"},
            TypeError,
            r"y has values of type <U3.*no numbers: encode them \(pandas.factorize",
        ),
        (
            {"target": "a", "splits": [[0], [1]]},
            ValueError,
            "splits must be the row numbers .* got 2 parts of 1, 1 rows",
        ),
        ({"target": "a", "splits": [[0, 1], [1], []]}, ValueError, "splits have a row twice"),
        ({"target": "a", "splits": [[0], [99], []]}, ValueError, "row numbers from 0 to 19, got 0 to 99"),
    ],
)
def test_tables_that_are_none(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TableDataModule(**({"x": frame()} | options))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).mean(1)


def test_data_sets_of_hugging_face() -> None:
    """Rows of a `datasets.Dataset` are a run's data as they come; both formats give the same draws."""
    ids = torch.randint(10, (COUNT, 4), generator=torch.Generator().manual_seed(0))
    rows = {"ids": ids.tolist(), "label": (ids[:, 0] > 4).long().tolist(), "text": ["a text"] * COUNT}
    lists = datasets.Dataset.from_dict(rows)
    found = []
    for table in (lists, lists.with_format("torch")):
        data = DatasetDataModule(table, test=table, batch_size=5)
        torch.manual_seed(0)
        options: dict[str, Any] = {"num_chains": 2, "chain_start": "same", "chain_execution": "vmap"}
        module = BayesianModule(Bag(), Categorical(), lr=0.1, seed=0, **options)
        callbacks = [SamplingSchedule(every_n_steps=4), SampleCollector(in_memory=True)]
        quiet_trainer(max_steps=4, callbacks=callbacks).fit(module, data)
        assert module.posterior is not None
        predicted = module.posterior.predict(data.test_dataloader()).probabilities
        assert torch.allclose(predicted, module.posterior.predict({"ids": ids}).probabilities, atol=1e-6)
        found.append(predicted)
    assert torch.equal(*found)


def test_rows_of_different_lengths() -> None:
    data = DatasetDataModule(datasets.Dataset.from_dict({"ids": [[1, 2], [3]], "label": [0, 1]}), batch_size=2)
    with pytest.raises(ValueError, match=r"'ids' of sizes 1 to 2: pad them .*collate_fn=DataCollatorWithPadding"):
        next(iter(data.train_dataloader()))
    with pytest.raises(TypeError, match=r"train holds the data sets 'train': pass one, train=data\['train'\]"):
        DatasetDataModule(datasets.DatasetDict({"train": data.train}))  # type: ignore[arg-type]


def test_a_csv_file_is_the_frame_that_pandas_reads(tmp_path: Path) -> None:
    """Texts are categories, the target's are classes, and gaps are marked, as of the frame with these types."""
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {"dose": generator.normal(size=60), "sex": ["f", "m"] * 30, "well": ["yes", "no", "no"] * 20}
    )
    frame.loc[:5, "dose"] = np.nan
    frame.to_csv(tmp_path / "patients.csv", index=False)
    frame = pandas.read_csv(tmp_path / "patients.csv")  # before version 3 the last digit may differ
    found = TableDataModule(tmp_path / "patients.csv", target="well")
    same = TableDataModule(frame.astype({"sex": "category"}), target="well")
    for data in (found, same):
        data.setup("fit")
    assert found.classes == same.classes == ("no", "yes")
    assert found.input_columns == same.input_columns
    assert torch.equal(found.splits[0].inputs, same.splits[0].inputs)
    frame.assign(name=[f"p{row}" for row in range(60)]).to_csv(tmp_path / "named.csv", index=False)
    with pytest.raises(ValueError, match="x has another category in each row of column 'name': leave it out"):
        TableDataModule(tmp_path / "named.csv", target="well")
    TableDataModule(tmp_path / "named.csv", target="well", group="name")


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.full(COUNT, 5.0), "the targets are 5 in all training rows"),
        (np.where(np.arange(COUNT) % 2, 1e-6, np.nan), "the targets are 1e-06 in all training rows"),
        (pandas.DataFrame({"u": np.arange(COUNT) / 3, "v": [2.5] * COUNT}), "the targets of 'v' are 2.5 in all"),
        (frame()["a"], None),
    ],
    ids=["equal", "some observed", "one of two", "various"],
)
def test_targets_without_a_spread_are_told(y: Any, message: str | None) -> None:
    """They cannot be standardised: predictions then have a spread of 1 in the data's unit, whatever that is."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared(frame()[["price", "b"]], y, task="regression")
    assert [message in str(one.message) for one in caught] == ([] if message is None else [True])


def test_an_estimator_tells_targets_without_a_spread() -> None:
    model = BayesianRegressor(max_epochs=8, num_samples=2, num_chains=1, hidden=(4,), random_state=0)
    with pytest.warns(UserWarning, match="the targets are 3 in all training rows"):
        model.fit(frame(), np.full(COUNT, 3.0))


def test_a_tensor_in_the_units_of_the_data_is_told() -> None:
    """A tensor is what the network receives, so one in the data's units predicts something else, whatever has it."""
    areas = frame() * [1.0, 30.0, 0.1] + [0.0, 655.0, 0.1]
    data = TableDataModule(areas, frame()["a"] > 0, test_fraction=0, task="classes")
    trainer = quiet_trainer(callbacks=[SamplingSchedule(every_n_steps=1), SampleCollector(in_memory=True)], max_steps=3)
    module = BayesianModule(nn.Linear(3, 2), Categorical(), lr=0.01, seed=0)
    trainer.fit(module, datamodule=data)
    posterior, raw = module.posterior, torch.tensor(areas.to_numpy(), dtype=torch.float32)
    labels = torch.zeros(COUNT, dtype=torch.long)
    told = r"in the data's units: column 'price' has 65\d on average\. Pass posterior\.inputs\(x\)"
    for call in (
        lambda: posterior.predict(raw),
        lambda: posterior.predict(torch.utils.data.DataLoader(raw, 8)),
        lambda: posterior.acquire(raw, 2),
        lambda: posterior.detect(posterior.inputs(areas), raw),
        lambda: posterior.evaluate([(raw, labels)]),
        lambda: posterior.calibrate([(raw, labels)]),
    ):
        with pytest.warns(UserWarning, match=told):
            call()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        posterior.predict(torch.utils.data.DataLoader(raw, 8))
    assert len(caught) == 1, "and not by each batch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (areas, posterior.inputs(areas), 50 * posterior.inputs(areas), raw.new_zeros(1, 3)):
            posterior.predict(x)


@pytest.mark.parametrize(("unit", "offset"), [(50.0, 1000.0), (1e-4, 0.0), (1e-4, 7.0), (1e6, 0.0)])
def test_targets_of_a_tensor_in_the_units_of_the_data_are_told(unit: float, offset: float) -> None:
    columns = ["price", "b"]
    y = frame()["a"] * unit + offset
    data = prepared(frame()[columns], y, test_fraction=0)
    trainer = quiet_trainer(callbacks=[SamplingSchedule(every_n_steps=1), SampleCollector(in_memory=True)], max_steps=3)
    module = BayesianModule(nn.Linear(2, 1), Gaussian(), lr=0.01, seed=0)
    trainer.fit(module, datamodule=data)
    posterior = module.posterior
    x, raw = posterior.inputs(frame()[columns]), torch.tensor(y.to_numpy())[:, None]
    for call in (
        lambda: posterior.evaluate([(x, raw)]),
        lambda: posterior.calibrate([(x, raw)]),
        lambda: posterior.conformal([(x, raw)]),
        lambda: posterior.log_likelihood([(x, raw)]),
    ):
        with pytest.warns(UserWarning, match=r"in the data's units, \S+ on average: pass a pandas series"):
            call()
    scaling = posterior.columns.targets
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.evaluate([(x, ((raw - scaling.shift) / scaling.factor).float())])
        posterior.conformal([(frame()[columns], y)])
