"""Missing numbers and categories of a table: encoded by the training rows, and the same in predictions."""

import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch

from lightning_sgmcmc import BayesianModule, Gaussian, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule

NAN = float("nan")


def with_gaps(count: int = 100) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(5, 2, count), "b": rng.normal(size=count)})
    frame["c"] = pd.Series(rng.choice(["x", "y"], count)).where(rng.random(count) < 0.8).astype("category")
    frame.loc[rng.random(count) < 0.2, "a"] = NAN
    return frame


def test_a_missing_number_is_the_mean_and_is_marked() -> None:
    frame = with_gaps()
    table = TableDataModule(frame, frame["b"].to_numpy(), task="regression", val_fraction=0.2)
    table.setup("fit")
    inputs = table.inputs(frame)
    gaps = torch.tensor(frame["a"].isna().tolist())
    assert inputs.shape == (100, 6) == (100, table.num_inputs)  # a, b, x, y, a missing category, a missing number
    assert bool((inputs[gaps, 0] == 0).all())
    assert len(inputs[:, 5].unique()) == 2
    assert bool((inputs[gaps, 5] > 0).all())
    assert bool((inputs[~gaps, 5] < 0).all())
    parts = torch.cat([split.inputs for split in table.splits])
    assert bool(parts.isfinite().all())
    standard = table.splits[0].inputs
    np.testing.assert_allclose(standard.mean(0), 0, atol=1e-5)
    known = standard[standard[:, 5] < 0, 0]
    np.testing.assert_allclose(known.std(correction=0), 1, rtol=1e-5)


def test_a_network_for_the_columns_alone_is_told_the_number_of_inputs(caplog: pytest.LogCaptureFixture) -> None:
    frame = with_gaps()
    with caplog.at_level("INFO", "pytorch_lightning"):
        table = TableDataModule(frame, frame["b"].to_numpy(), task="regression")
    assert "TableDataModule makes 6 inputs (`num_inputs`) of 3 columns." in caplog.messages
    trainer = pl.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[SamplingSchedule(every_n_epochs=1)]
    )
    words = (
        r"a batch has 6 inputs for each example, and the network's first linear layer takes 3: make it nn.Linear\(6, 2"
    )
    with pytest.raises(ValueError, match=words):
        trainer.fit(BayesianModule(torch.nn.Linear(3, 2), Gaussian(), lr=0.01), datamodule=table)


def test_an_array_has_gaps_too_and_other_gaps_are_no_numbers() -> None:
    x = np.random.default_rng(0).normal(size=(50, 3))
    x[:10, 1] = NAN
    table = TableDataModule(x, x[:, 0], task="regression")
    table.setup("fit")
    assert table.inputs([[0.0, NAN, 0.0]]).isfinite().all()
    with pytest.raises(ValueError, match="x has 1 values that are NaN or infinite in column 0: fill them in"):
        table.inputs([[NAN, 0.0, 0.0]])
    with pytest.raises(ValueError, match="x has 2 columns, and the training data have 3"):
        table.inputs([[0.0, 1.0]])


def test_what_cannot_be_filled_is_refused() -> None:
    x = np.random.default_rng(0).normal(size=(50, 2))
    with pytest.raises(ValueError, match="x has 1 values that are NaN or infinite"):
        TableDataModule(np.where(np.arange(100).reshape(50, 2) == 3, np.inf, x), x[:, 0], task="regression")
    x[40:, 1] = NAN
    with pytest.raises(ValueError, match=r"x has missing numbers in column 1: fill them in, or pass standardise=True"):
        TableDataModule(x, x[:, 0], task="regression", standardise=False)
    x[:40, 1], x[40:, 1] = NAN, 0
    table = TableDataModule(x, x[:, 0], task="regression", splits=(range(40), range(40, 50), []))
    with pytest.raises(ValueError, match="x has no number in column 1 of the training rows"):
        table.setup("fit")
    frame = pd.DataFrame({"a": pd.Categorical(["x", "y"] * 25), "b": x[:, 0]})
    table = TableDataModule(frame, x[:, 0], task="regression")
    table.setup("fit")
    with pytest.raises(ValueError, match="a missing category in column 'a', which the training data lack"):
        table.inputs(pd.DataFrame({"a": pd.Categorical([None], categories=["x", "y"]), "b": [0.0]}))


def test_a_store_knows_the_gaps(tmp_path: object) -> None:
    frame = with_gaps()
    table = TableDataModule(frame, frame["b"].to_numpy(), task="regression")
    module = BayesianModule(torch.nn.Linear(6, 1), Gaussian(), lr=0.01, seed=0)
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
    folder = f"{tmp_path}/samples"
    callbacks: list[pl.Callback] = [SamplingSchedule(every_n_epochs=1), SampleCollector(folder)]
    pl.Trainer(max_epochs=3, accelerator="cpu", callbacks=callbacks, **silent).fit(module, datamodule=table)
    assert module.posterior is not None
    posterior = Posterior.load(folder)
    torch.testing.assert_close(posterior.predict(frame).mean, module.posterior.predict(frame).mean)
    assert posterior.predict(frame).mean.isfinite().all()
    other = TableDataModule(frame, frame["b"].to_numpy(), task="regression", like=posterior)
    other.setup("fit")
    torch.testing.assert_close(other.inputs(frame), table.inputs(frame))
    complete = TableDataModule(frame.assign(a=1.0 * frame["b"]), frame["b"].to_numpy(), task="regression")
    complete.setup("fit")
    assert posterior.columns.difference(complete.input_columns and type(posterior.columns)(complete.input_columns))
