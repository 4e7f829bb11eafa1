"""Tables whose rows are split by groups and by time."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from lightning_sgmcmc.datamodules import TableDataModule

GENERATOR = np.random.default_rng(0)


def frame() -> pd.DataFrame:
    """300 rows of 40 patients on 100 days, with a number that identifies the row."""
    found = pd.DataFrame({"row": np.arange(300.0), "dose": GENERATOR.normal(size=300)})
    found["patient"] = [f"p{number}" for number in GENERATOR.integers(40, size=300)]
    found["day"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(GENERATOR.integers(100, size=300), unit="D")
    found["y"] = GENERATOR.normal(size=300)
    return found


def parts(table: pd.DataFrame, **arguments: Any) -> list[pd.DataFrame]:
    """Return the rows of the training, validation and test part."""
    data = TableDataModule(table, target="y", standardise=False, **arguments)
    data.setup("fit")
    assert data.columns == tuple(name for name in table.columns if name not in ("y", *arguments.values()))
    return [table.iloc[split.inputs[:, 0].long().numpy()] for split in data.splits]


def test_a_group_is_in_one_part() -> None:
    table = frame().drop(columns=["day"])
    found = parts(table, group="patient")
    assert sum(map(len, found)) == 300
    groups = [set(part["patient"]) for part in found]
    assert groups[0] & groups[1] == groups[0] & groups[2] == groups[1] & groups[2] == set()
    assert [len(group) for group in groups] == [32, 4, 4]
    data = TableDataModule(table, target="y", group="patient")
    data.setup("fit")
    assert data.inputs(table).shape == (300, 2)  # new data may have the column
    assert not found[1].equals(parts(table, group="patient", seed=1)[1])


def test_later_rows_are_for_testing() -> None:
    table = frame().drop(columns=["patient"])
    train, val, test = parts(table, time="day", val_fraction=0.2, test_fraction=0.1)
    assert train["day"].max() < val["day"].min()
    assert val["day"].max() < test["day"].min()
    assert len(train) + len(val) + len(test) == 300
    # Rows of one day are together, of which there are three.
    assert [len(train), len(val), len(test)] == pytest.approx([210, 60, 30], abs=8)


def test_values_beside_the_table() -> None:
    x, y = torch.randn(50, 2), torch.randn(50)
    with pytest.raises(TypeError, match=r"time has texts, such as '1/2/24', .* pass dates, as by pandas.to_datetime"):
        TableDataModule(x, y, time=[f"{day % 12 + 1}/2/24" for day in range(50)])
    data = TableDataModule(x, y, time=torch.arange(50).flip(0), val_fraction=0.0, test_fraction=0.2)
    data.setup("fit")
    assert len(data.splits[2].inputs) == 10
    scaled = (x - x[10:].mean(0)) / x[10:].std(0, correction=0)  # the first ten rows are the last in time
    torch.testing.assert_close(data.splits[2].inputs, scaled[:10])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"group": "nobody"}, ValueError, "group.*'patient'"),
        ({"group": "patient", "time": "row"}, ValueError, "group, time and splits"),
        ({"group": [1, 2]}, ValueError, "300 rows"),
        ({"time": [np.nan] + [1.0] * 299}, ValueError, "1 rows without a value"),
        ({"time": "when"}, ValueError, "time.*'patient'"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TableDataModule(frame().drop(columns=["day"]), target="y", **arguments)


def test_too_few_groups() -> None:
    with pytest.raises(ValueError, match="group has 2 different values"):
        TableDataModule(torch.randn(20, 2), torch.randn(20), group=[0, 1] * 10)
