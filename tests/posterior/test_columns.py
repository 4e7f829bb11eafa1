"""Columns, categories and units of a table are those of the fit, in a new process, for frames in any order.

The network copies one input, or is a known line, and its samples do not move (lr=0), so right values are known.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, RunSummary, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule
from tests.support.trainers import quiet_trainer

COUNT = 200


def frame(count: int = COUNT, seed: int = 0) -> pandas.DataFrame:
    """A table whose premium is 100 + 3·age + 20·(region is north), without noise."""
    rng = np.random.default_rng(seed)
    age, rooms = rng.uniform(20, 80, count), rng.integers(1, 6, count)
    region = rng.choice(["north", "south", "east"], count)
    premium = 100 + 3 * age + 20 * (region == "north")
    table = pandas.DataFrame({"age": age, "rooms": rooms, "garden": rng.random(count) < 0.5, "region": region})
    return table.assign(premium=premium, weight=premium / 1000).astype({"region": "category"})


def line(inputs: int, targets: int = 1) -> nn.Linear:
    return nn.Linear(inputs, targets)


def fitted(data: TableDataModule, path: Path, **options: Any) -> tuple[Posterior, BayesianModule]:
    """Return the posterior of a linear regression that is exact in its data, read again, and the module."""
    data.setup("fit")
    part = data.splits[0]
    net = line(part.inputs.shape[1], part.targets.shape[1])
    design = torch.cat([part.inputs, torch.ones(len(part.inputs), 1)], 1).double()
    solution = (torch.linalg.pinv(design) @ part.targets.double()).T.float()
    net.load_state_dict({"weight": solution[:, :-1], "bias": solution[:, -1]})
    module = BayesianModule(net, Gaussian(0.1), lr=0.0, num_data=data.num_data)
    callbacks: Any = [SamplingSchedule(every_n_steps=1), SampleCollector(path), BayesianModelAverage(), RunSummary()]
    trainer = quiet_trainer(max_steps=2, callbacks=callbacks, default_root_dir=path.parent, **options)
    trainer.fit(module, datamodule=data)
    return Posterior.load(path), module


@pytest.fixture(scope="module")
def insurance(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TableDataModule]:
    path = tmp_path_factory.mktemp("insurance") / "samples"
    data = TableDataModule(frame().drop(columns="weight"), target="premium", batch_size=64)
    fitted(data, path)
    return path, data


def premium_of(table: pandas.DataFrame) -> torch.Tensor:
    return torch.tensor(frame(len(table), 1)["premium"].to_numpy())


FORMS: dict[str, Any] = {
    "in order": lambda t, d: t,
    "another order": lambda t, d: t[["region", "garden", "rooms", "age"]],
    "with the target": lambda t, d: t.assign(premium=0.0),
    "text for categories": lambda t, d: t.astype({"region": str}),
    "nullable numbers": lambda t, d: t.astype({"age": "Float64", "rooms": "Int64", "garden": "boolean"}),
    "small numbers": lambda t, d: t.astype({"rooms": "uint8"}),
    "objects": lambda t, d: t.astype({"rooms": object, "garden": object}),
    "every second row": lambda t, d: pandas.concat([t, t]).sort_index(kind="stable").iloc[::2],
    "a list of frames": lambda t, d: [t.iloc[:7], t.iloc[7:]],
    "the datamodule's": lambda t, d: d.inputs(t),
    "a loader": lambda t, d: DataLoader(TensorDataset(d.inputs(t), torch.zeros(len(t), 1)), 7),
}


@pytest.mark.parametrize("form", FORMS)
def test_frames_are_in_the_datas_units(insurance: tuple[Path, TableDataModule], form: str) -> None:
    path, data = insurance
    table = frame(20, 1).drop(columns=["premium", "weight"])
    found = Posterior.load(path).predict(FORMS[form](table, data)).mean[:, 0].double()
    torch.testing.assert_close(found, premium_of(table), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="age"), "x has no column 'age', which the training data have: add it"),
        (lambda t: t.assign(extra=1), "x has the column 'extra', which the training data lack: drop it"),
        (lambda t: t.assign(region="west"), "x has the category 'west' in column 'region'.*'east', 'north', 'south'"),
        (lambda t: t.to_numpy(), "x is a NumPy array, and the run's inputs were standardised"),
        (lambda t: {"input": t.drop(columns="region").to_numpy(float)}, "x is a NumPy array"),
        (lambda t: [t[["age", "rooms"]].to_numpy()], "x is a NumPy array"),
        (lambda t: t["age"], "x has no column 'rooms'"),
        (lambda t: t.assign(age=np.inf), "x has 20 values that are NaN or infinite in column"),
        (lambda t: t[:0], "x has no inputs to predict"),
        (lambda t: pandas.concat([t, t[["age"]]], axis=1), "x has the column 'age' twice"),
    ],
)
def test_what_the_store_cannot_know_is_refused(
    insurance: tuple[Path, TableDataModule], change: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Posterior.load(insurance[0]).predict(change(frame(20, 1).drop(columns=["premium", "weight"])))


def read(path: str, csv: str) -> dict[str, Any]:
    """Return what a program finds that knows the store and a new file with targets."""
    posterior, table = Posterior.load(path), pandas.read_csv(csv)
    inputs, scaling = posterior.inputs(table), posterior.columns.targets
    assert scaling is not None
    loader = DataLoader(TensorDataset(inputs, scaling.received(table["premium"])), 16)
    trainer = quiet_trainer(callbacks=[SampleCollector(path), BayesianModelAverage(scores=True)])
    (found,) = trainer.test(BayesianModule(line(6), Gaussian(0.1)), dataloaders=loader, verbose=False)
    held = posterior.conformal([(table, table["premium"])], 0.9).predict(table)
    calibration = posterior.calibrate([(table, table["premium"])]).calibration
    assert calibration is not None
    student = posterior.distill(line(6, 3), DataLoader(TensorDataset(inputs), 16), epochs=1)
    others = student.predict(table[table.columns[::-1]]).mean - student.predict(inputs).mean
    return {
        "rmse": found["test/bma_rmse"],
        "crps": found["test/bma_crps"],
        "mean": posterior.ensemble()(inputs)[0][:, 0].tolist(),
        "low": held.low[:, 0].tolist(),  # type: ignore[index]
        "high": held.high[:, 0].tolist(),  # type: ignore[index]
        "factor": calibration.value,
        "student": float(others.abs().max()),
    }


PROGRAM = """
import json, sys
from tests.posterior.test_columns import read
print(json.dumps(read(*sys.argv[1:])))
"""


@pytest.mark.parametrize("process", ["this", pytest.param("another", marks=pytest.mark.slow)])
def test_who_has_the_store_alone_has_the_units(
    insurance: tuple[Path, TableDataModule], tmp_path: Path, process: str
) -> None:
    """`trainer.test` with a loader, ensembles, conformal intervals, calibration and students are in premiums."""
    path, data = insurance
    table = frame(60, 1).drop(columns="weight")
    table["premium"] += 5  # a known error
    table.to_csv(tmp_path / "new.csv", index=False)
    arguments = str(path), str(tmp_path / "new.csv")
    if process == "this":
        found = read(*arguments)
    else:
        command = [sys.executable, "-c", PROGRAM, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
    noise = 0.1 * data.target_std
    assert found["rmse"] == pytest.approx(5, abs=0.02)
    z = 5 / noise
    phi, below = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi), 0.5 * (1 + torch.erf(torch.tensor(z / 2**0.5)).item())
    assert found["crps"] == pytest.approx(noise * (z * (2 * below - 1) + 2 * phi - 1 / np.sqrt(np.pi)), rel=0.01)
    assert found["mean"] == pytest.approx((table["premium"] - 5).tolist(), abs=0.02)
    assert [low + 5 for low in found["low"]] == pytest.approx(found["mean"], abs=0.02)
    assert [high - 5 for high in found["high"]] == pytest.approx(found["mean"], abs=0.02)
    assert found["factor"] == pytest.approx(5 / noise, rel=0.01)
    assert found["student"] == 0


@pytest.mark.parametrize("kind", ["tensor", "list", "array", "tuple"])
def test_several_targets_have_a_unit_each(tmp_path: Path, kind: str) -> None:
    """Errors of 5 and 0.5 in units of 60 and 0.06: bma, per-datum results and predictions, however the scaling is
    given."""
    data = TableDataModule(frame(), target=["premium", "weight"], test_fraction=0.2, batch_size=64)
    data.setup("fit")
    test = data.splits[2]
    off = torch.tensor([5.0, 0.5])
    test.targets += off / data.target_std.float()
    means, stds = data.target_mean, data.target_std
    convert = {"list": list, "array": lambda t: t.numpy(), "tuple": tuple}.get(kind, lambda t: t)
    data.target_mean, data.target_std = convert(means), convert(stds)
    posterior, module = fitted(data, tmp_path / "samples")
    assert set(module.evaluations["val"].bma) >= {"rmse_premium", "rmse_weight"}
    callbacks: Any = [SampleCollector(tmp_path / "samples"), BayesianModelAverage(scores=True), RunSummary()]
    trainer = quiet_trainer(callbacks=callbacks, default_root_dir=tmp_path)
    (found,) = trainer.test(module, datamodule=data, verbose=False)
    assert found["test/bma_rmse_premium"] == pytest.approx(5, rel=1e-2)
    assert found["test/bma_rmse_weight"] == pytest.approx(0.5, rel=1e-2)
    assert found["test/bma_rmse"] == pytest.approx(((25 + 0.25) / 2) ** 0.5, rel=1e-2)
    density = torch.distributions.Normal(0.0, 0.1 * stds).log_prob(off.double()).sum()
    assert found["test/bma_nll"] == pytest.approx(-float(density), rel=1e-2)
    truth = torch.tensor(frame(9, 1)[["premium", "weight"]].to_numpy())
    torch.testing.assert_close(posterior.predict(frame(9, 1)).mean.double(), truth, atol=0.02, rtol=0)


def test_another_datamodules_statistics_are_refused_and_those_of_the_fit_are_taken(
    insurance: tuple[Path, TableDataModule],
) -> None:
    path, data = insurance
    other = frame(90, 3).drop(columns="weight")
    other["premium"] += 7
    posterior = Posterior.load(path)
    own = TableDataModule(other, target="premium", batch_size=64)
    own.setup("fit")
    for attempt in (
        lambda: quiet_trainer(callbacks=[SampleCollector(path), BayesianModelAverage()]).test(
            BayesianModule(line(6), Gaussian(0.1)), datamodule=own
        ),
        lambda: quiet_trainer(callbacks=[SampleCollector(path)]).predict(
            BayesianModule(line(6), Gaussian(0.1)), datamodule=own
        ),
        lambda: posterior.calibrate(own),
        lambda: posterior.conformal(own),
    ):
        with pytest.raises(ValueError, match=r"other data than the samples' fit .*like=posterior"):
            attempt()
    shuffled = other[["premium", "region", "age", "garden", "rooms"]]
    for like in (posterior, data):
        same = TableDataModule(shuffled, target="premium", splits=[[], range(40), range(40, 90)], like=like)
        trainer = quiet_trainer(callbacks=[SampleCollector(path), BayesianModelAverage()])
        (found,) = trainer.test(BayesianModule(line(6), Gaussian(0.1)), datamodule=same, verbose=False)
        assert found["test/bma_rmse"] == pytest.approx(7, abs=0.02)


def test_names_of_classes_are_in_the_store(tmp_path: Path) -> None:
    """Text labels are classes if the task says so, in an order that a later datamodule shares."""
    table = frame().assign(kind=lambda t: np.where(t["age"] > 50, "old", "new"))[["age", "rooms", "kind"]]
    data = TableDataModule(table, target="kind", task="classes", batch_size=64)
    module = BayesianModule(line(2, 2), Categorical(), lr=0.05, seed=0)
    callbacks: Any = [SamplingSchedule(burn_in_steps=60, every_n_steps=20), SampleCollector(tmp_path / "samples")]
    quiet_trainer(max_steps=100, callbacks=callbacks).fit(module, datamodule=data)
    posterior = Posterior.load(tmp_path / "samples")
    assert posterior.columns.classes == data.classes == ("new", "old")
    assert posterior.columns.task == "classes"
    ages = pandas.DataFrame({"rooms": [3, 3], "age": [21.0, 79.0]})
    assert posterior.predict(ages).probabilities.argmax(1).tolist() == [0, 1]
    later = TableDataModule(table[table["kind"] == "old"], target="kind", like=posterior)
    assert later.y.unique().tolist() == [1]
    by_name = posterior.evaluate([(table[["age", "rooms"]], table["kind"])]).bma
    assert by_name == posterior.evaluate([(table[["age", "rooms"]], (table["kind"] == "old").astype(int))]).bma
    assert by_name["accuracy"] > 0.9
    drawn = posterior.plot_reliability(table[["age", "rooms"]], table["kind"]).axes[0].get_title()
    assert (
        drawn
        == posterior.plot_reliability(table[["age", "rooms"]], torch.as_tensor((table["kind"] == "old").to_numpy()))
        .axes[0]
        .get_title()
    )
    with pytest.raises(ValueError, match="y has the rows of x in another order"):
        posterior.plot_reliability(table[["age", "rooms"]], table["kind"].iloc[::-1])
    with pytest.raises(ValueError, match="y has the class 'odd', which the fit's data lack"):
        posterior.evaluate([(table[["age", "rooms"]], table["kind"].replace("old", "odd"))])
    with pytest.raises(ValueError, match="y has the class 'odd', which the fit's data lack"):
        TableDataModule(table.assign(kind="odd"), target="kind", like=posterior)


@pytest.mark.parametrize("names", [(1, 2, 3), (2, 1, 0), (3, 5, 7), ("low", "mid", "high")])
def test_classes_may_have_numbers_as_names(names: tuple[Any, ...], tmp_path: Path) -> None:
    """Stars of reviews, as an ordered category: a series has names, in every order and of part of the classes."""
    places = (frame()["age"] // 27).clip(0, 2).astype(int).to_numpy()
    stars = pandas.Series(pandas.Categorical.from_codes(places, list(names), ordered=True), name="stars")
    table = frame()[["age", "rooms"]].assign(stars=stars.to_numpy())
    table["stars"] = stars.set_axis(table.index)
    data = TableDataModule(table, target="stars", batch_size=64)
    module = BayesianModule(line(2, 3), Categorical(), lr=0.05, seed=0)
    callbacks: Any = [SamplingSchedule(burn_in_steps=60, every_n_steps=20), SampleCollector(tmp_path / "samples")]
    quiet_trainer(max_steps=100, callbacks=callbacks).fit(module, datamodule=data)
    posterior = Posterior.load(tmp_path / "samples")
    assert posterior.columns.classes == names
    x, y = table[["age", "rooms"]], table["stars"]
    predicted = posterior.predict(x).probabilities.argmax(1).numpy()
    of_plain_type = y.astype(type(names[0]))
    for part in (np.arange(len(y)), np.flatnonzero(places == 1), np.flatnonzero(places < 2)):
        expected = float((predicted == places)[part].mean())
        for labels in (y, of_plain_type):
            found = posterior.evaluate([(x.iloc[part], labels.iloc[part])])
            assert found.bma["accuracy"] == pytest.approx(expected)
            assert found.target is not None
            assert found.target.tolist() == places[part].tolist()
            later = TableDataModule(table.assign(stars=labels).iloc[part], target="stars", like=posterior)
            assert later.y.tolist() == places[part].tolist()
    sets = posterior.conformal([(x, y)], 0.9).predict(x)
    assert torch.equal(sets.contains(y), sets.contains(torch.as_tensor(places)))
    if isinstance(names[0], int):
        for call in (sets.contains, lambda y: posterior.evaluate([(x, y)])):
            with pytest.raises(ValueError, match="may be names or places: pass a pandas series"):
                call(of_plain_type.to_numpy())


def test_a_header_may_say_nothing_of_inputs(insurance: tuple[Path, TableDataModule]) -> None:
    """A store may have the targets' scaling alone: columns by place, and arrays as they are."""
    path, _ = insurance
    table = frame(5, 1).drop(columns=["premium", "weight"])
    posterior = Posterior.load(path)
    inputs = posterior.inputs(table)
    posterior.store.columns = type(posterior.columns)(targets=posterior.columns.targets)
    found = posterior.predict(inputs.numpy()).mean[:, 0].double()
    torch.testing.assert_close(found, premium_of(table), atol=0.01, rtol=0)
    with pytest.raises(RuntimeError, match="the store has no columns of the inputs"):
        posterior.inputs(table)


def test_predictions_keep_the_rows_and_the_targets_names(
    insurance: tuple[Path, TableDataModule], tmp_path: Path
) -> None:
    """A prediction joins the rows that it is of, by their index. With rows numbered anew it joined others."""
    posterior = Posterior.load(insurance[0])
    new = frame(40, seed=1)
    shuffled = new.drop(columns=["premium", "weight"]).sample(frac=1, random_state=0)
    found = posterior.predict(shuffled).to_pandas(level=0.9)
    assert found.index.equals(shuffled.index)
    assert (found["mean"] - new["premium"]).abs().max() < 0.1  # pandas aligns by the index
    (batch,) = posterior.predict_batches([shuffled])
    assert batch.to_pandas().index.equals(shuffled.index)
    assert posterior.predict(posterior.inputs(shuffled)).to_pandas().index.tolist() == list(range(40))
    with pytest.raises(
        TypeError, match=r"a batch has 50.0 in place of a tensor: pass .* posterior.inputs\(x\) of rows"
    ):
        posterior.predict([[50.0, 3.0], [60.0, 2.0]])
    with pytest.raises(TypeError, match=r"x is a Table of pyarrow: pass x.to_pandas\(\)"):
        posterior.predict(pyarrow.Table.from_pandas(shuffled))
    with pytest.raises(TypeError, match="batches should be an iterable of batches, got a DataFrame"):
        posterior.predict_batches(shuffled)
    with pytest.raises(ValueError, match="x has 40 values that are NaN or infinite in column 'age': fill them in"):
        posterior.predict(shuffled.assign(age=np.nan))
    both = TableDataModule(frame(), target=["premium", "weight"], task="regression", batch_size=64)
    two = fitted(both, tmp_path / "samples")[0].predict(shuffled).to_pandas()
    assert (two["mean_weight"] - new["weight"]).abs().max() < 1e-4
    assert [name for name in two if name.endswith("premium")] == [
        f"{part}_premium" for part in ("mean", "std", "epistemic_std", "aleatoric_std")
    ]
