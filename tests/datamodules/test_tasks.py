"""What the targets of a table are is said, or guessed aloud where it is plausible; else the table asks."""

import logging
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

from lightning_sgmcmc import BayesianModule, Bernoulli, Categorical, Gaussian, Poisson, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import AirfoilDataModule, TableDataModule, UCIRegressionDataModule
from lightning_sgmcmc.datamodules.base import random_split
from lightning_sgmcmc.likelihoods import Likelihood
from tests.support.trainers import quiet_trainer

ROWS = 731
X = np.random.default_rng(0).normal(size=(ROWS, 2))
RENTALS = np.random.default_rng(1).integers(22, 8715, ROWS)
EVENTS = np.random.default_rng(2).poisson(3.0, ROWS)
LABELS = np.arange(ROWS) % 3


def table(y: Any, **options: Any) -> TableDataModule:
    data = TableDataModule(X[: len(y)], y, **options)
    data.setup("fit")
    return data


@pytest.mark.parametrize(
    ("y", "task", "sizes", "classes", "is_standardised"),
    [
        (RENTALS, "regression", (585, 73, 73), None, True),
        (RENTALS.astype(np.float32), "regression", (585, 73, 73), None, True),
        (EVENTS, "counts", (585, 73, 73), None, False),
        (EVENTS.astype(float), "counts", (585, 73, 73), None, False),
        (EVENTS, "regression", (585, 73, 73), None, True),
        (LABELS, "classes", (585, 73, 73), 3, False),
        (LABELS.astype(float), "classes", (585, 73, 73), 3, False),
        (LABELS > 0, "classes", (585, 73, 73), 2, False),
        (np.array(["c", "a", "b"])[LABELS], "classes", (585, 73, 73), 3, False),
        (pandas.Series(np.array(["c", "a", "b"])[LABELS]).astype("category"), "classes", (585, 73, 73), 3, False),
        (pandas.Series(LABELS, dtype="Int64"), "classes", (585, 73, 73), 3, False),
        (LABELS.astype(np.uint8), None, (585, 73, 73), 3, False),
        (pandas.Series(LABELS, dtype="Int64"), None, (585, 73, 73), 3, False),
        (X[:, 0], None, (585, 73, 73), None, True),
        (np.stack([RENTALS, EVENTS], 1), "counts", (585, 73, 73), None, False),
        (np.stack([RENTALS, EVENTS], 1), "regression", (585, 73, 73), None, True),
    ],
)
def test_targets_are_what_the_user_says(
    y: Any, task: Any, sizes: tuple[int, ...], classes: int | None, is_standardised: bool
) -> None:
    data = table(y, task=task)
    if classes is None:
        assert tuple(len(part.targets) for part in data.splits) == sizes
    assert sum(len(part.targets) for part in data.splits) == ROWS
    assert all(abs(len(part.targets) - size) <= 3 for part, size in zip(data.splits, sizes, strict=True))
    assert data.num_classes == classes
    targets = torch.cat([part.targets for part in data.splits])
    assert targets.dtype == (torch.float32 if classes is None else torch.int64)
    assert (data.target_std is not None) == is_standardised
    if classes is None:
        numbers = np.asarray(y, dtype=float).reshape(ROWS, -1)
        back = (
            targets.double() * (1 if data.target_std is None else data.target_std) + (data.target_mean or 0.0)
            if (not isinstance(data.target_mean, torch.Tensor))
            else targets.double() * data.target_std + data.target_mean
        )
        assert np.allclose(np.sort(back.numpy(), 0), np.sort(numbers, 0), atol=1e-2)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (RENTALS, r"8,\d\d\d classes would have no row|of \d,\d\d\d classes would have no row: say which"),
        (np.arange(ROWS), "731 different whole numbers in 731 rows, of which the rarest has 1, so they are hardly"),
        (np.r_[LABELS[:-1], 3], "4 different whole numbers in 731 rows, of which the rarest has 1"),
        (LABELS.astype(float), "3 different whole numbers in 731 rows, as floats, which could be classes, counts or"),
        (EVENTS.astype(np.float16), "different whole numbers in 731 rows, as floats"),
        (LABELS * 100, "3 different labels up to 200, so 198 of 201 classes would have no row: say which"),
        (np.stack([LABELS, LABELS], 1), "whole numbers, which could be several classes or numbers of each row"),
        (np.arange(9) % 3, "9 data in 3 classes, each of which is split, leave parts of 9, 0, 0 data"),
        (X[:3, 0], "3 data leave parts of 3, 0, 0 data for the shares 0.8, 0.1, 0.1: pass fractions"),
    ],
)
def test_what_could_be_several_things_asks(y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(y)


@pytest.mark.parametrize(
    ("y", "task", "message"),
    [
        (LABELS, "labels", "task must be .*'censored', got 'labels'"),
        (X[:, 0], "classes", "which is no whole number"),
        (X[:, 0], "counts", "which is no whole number"),
        (LABELS - 1, "counts", "y has the count -1, and counts count from 0"),
        (LABELS - 1, "classes", "y has the label -1, and labels count from 0: pass y.astype"),
        (np.stack([LABELS, LABELS], 1), "classes", r"y of classes should have shape \(n,\)"),
        (np.arange(ROWS) // 2, "classes", "731 data in 366 classes, each of which is split, leave parts of 731, 0, 0"),
        (np.array(["a", None, "b"] * 4, dtype=object), "classes", "y has 4 rows without a class"),
    ],
)
def test_values_that_do_not_have_the_task(y: Any, task: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(y, task=task)


@pytest.mark.parametrize(
    ("y", "likelihood", "options", "message"),
    [
        (
            LABELS,
            Gaussian(),
            {"task": "classes"},
            "Gaussian is a likelihood of numbers, and TableDataModule has classes",
        ),
        (LABELS, Gaussian(), {}, r"\(task='classes', as their values suggest\): pass task='regression' to it, or"),
        (LABELS, Poisson(), {}, "Poisson is a likelihood of counts, and TableDataModule has classes .*task='counts'"),
        (EVENTS, Poisson(), {"task": "regression"}, "Poisson is a likelihood of counts, and .* has numbers"),
        (X[:, 0], Poisson(), {}, "Poisson is a likelihood of counts, and .* has numbers"),
        (EVENTS, Gaussian(), {"task": "counts"}, "Gaussian is a likelihood of numbers, and .* has counts"),
        (LABELS, Categorical(), {"task": "counts"}, "Categorical is a likelihood of classes, and .* has counts"),
        (X[:, 0], Bernoulli(), {}, "Bernoulli is a likelihood of classes, and .* has numbers"),
    ],
)
def test_a_likelihood_of_another_kind_is_refused(y: Any, likelihood: Likelihood, options: Any, message: str) -> None:
    module = BayesianModule(nn.Linear(2, 3 if type(likelihood) is Categorical else 1), likelihood, lr=0.01)
    trainer = quiet_trainer(max_steps=1, callbacks=[SamplingSchedule(every_n_steps=1)])
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, datamodule=TableDataModule(X, y, **options))


@pytest.mark.parametrize("kind", [object, "str", "string", "category"])
def test_a_column_of_names_has_the_classes(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    frame = pandas.DataFrame(X[:90], columns=["a", "b"]).assign(outcome=["well", "ill", "unknown"] * 30)
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        data = TableDataModule(frame.astype({"outcome": kind}), target="outcome")
    assert data.task == "classes"
    assert data.classes == ("ill", "unknown", "well")
    assert "task='classes'" in caplog.text
    with pytest.raises(ValueError, match=r"y has 90 different names in 90 rows.*task='classes'"):
        TableDataModule(frame.assign(outcome=[f"patient {row}" for row in range(90)]), target="outcome")


def test_predictions_have_the_names_of_the_classes(tmp_path: Any) -> None:
    frame = pandas.DataFrame(X[:90], columns=["a", "b"]).assign(outcome=["well", "ill", "unknown"] * 30)
    module = BayesianModule(nn.Linear(2, 3), Categorical(), lr=0.01, seed=0)
    callbacks = [SamplingSchedule(burn_in_epochs=0, every_n_epochs=1), SampleCollector(tmp_path / "samples")]
    quiet_trainer(callbacks=callbacks, max_epochs=2).fit(module, datamodule=TableDataModule(frame, target="outcome"))
    prediction = Posterior.load(tmp_path / "samples").predict(frame[["b", "a"]])
    assert prediction.classes == ("ill", "unknown", "well")
    found = prediction.to("cpu").to_pandas(level=0.8)
    assert set(found["label"]) <= set(prediction.classes)
    likeliest = found[[f"probabilities_{name}" for name in prediction.classes]].to_numpy().argmax(1)
    assert [prediction.classes[place] for place in likeliest] == list(found["label"])
    assert (found["low_ill"] <= found["high_ill"]).all()


def test_a_guess_is_said_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        table(LABELS)
        table(RENTALS.astype(float))
        table(LABELS, task="classes")
    assert caplog.text.count("as 3 classes (task='classes'); pass task='regression' or 'counts' if") == 1
    assert caplog.text.count("whole numbers of y as those of a regression (task='regression')") == 1


@pytest.mark.parametrize(("count", "fractions"), [(3, (0.1,)), (12, (0.01, 0.5)), (2, (0.9,)), (1, (0.5,))])
def test_no_part_is_empty_in_silence(count: int, fractions: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=f"{count} data leave parts of"):
        random_split(count, fractions, seed=0)


def test_the_splits_of_papers_stay(tmp_path: Any) -> None:
    """Datamodules of fixed tables say no task: their likelihoods are the user's choice."""
    for data in (UCIRegressionDataModule("yacht", tmp_path), AirfoilDataModule(tmp_path)):
        assert data.task == ""


def test_targets_with_gaps_are_taken() -> None:
    """Statistics are of the observed values; N is their number of rows."""
    y = np.random.default_rng(0).normal(100.0, 20.0, (90, 2))
    y[::3, 0] = np.nan
    y[::6, 1] = np.nan
    data = TableDataModule(np.zeros((90, 1)), y, task="regression")
    data.setup("fit")
    training = data.training_data().tensors[1].double()
    assert training.nanmean(0).abs().max() < 1e-5
    assert bool(training.isnan().any())
    with pytest.raises(ValueError, match="all NaN"):
        TableDataModule(np.zeros((9, 1)), np.full(9, np.nan), task="regression")
