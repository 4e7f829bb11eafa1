"""Arrays of any strides, byte order and type are numbers, or refused in a sentence: at predict, in tables, in dicts."""

from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Gaussian, Posterior
from lightning_sgmcmc.callbacks import SamplingSchedule
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.datamodules import TableDataModule
from lightning_sgmcmc.posterior.store import MemoryStore
from tests.support.trainers import quiet_trainer

BASE = np.arange(12.0).reshape(6, 2)

FORMS: dict[str, Any] = {
    "rows from behind": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "columns from behind": lambda a: np.fliplr(np.ascontiguousarray(np.fliplr(a))),
    "Fortran": np.asfortranarray,
    "every second row": lambda a: np.repeat(a, 2, 0)[::2],
    "big-endian": lambda a: a.astype(">f8"),
    "big-endian integers": lambda a: a.astype(">i2"),
    "float16": lambda a: a.astype(np.float16),
    "long double": lambda a: a.astype(np.longdouble),
    "uint16": lambda a: a.astype(np.uint16),
    "uint32": lambda a: a.astype(np.uint32),
    "uint64": lambda a: a.astype(np.uint64),
    "read-only": lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
    "field of a record": lambda a: np.rec.fromarrays([a[:, 0], a[:, 1]], names="a,b").view("f8").reshape(6, 2),
    "objects": lambda a: a.astype(int).astype(object),
    "a subclass": lambda a: np.ma.masked_array(a),
    "frame": lambda a: pandas.DataFrame(a, columns=["a", "b"]),
    "frame of two types": lambda a: pandas.DataFrame({"a": a[:, 0].astype(np.int8), "b": a[:, 1]}),
    "frame from behind": lambda a: pandas.DataFrame(a[:, ::-1], columns=["b", "a"])[["a", "b"]],
    "frame of nullables": lambda a: pandas.DataFrame(a, columns=["a", "b"]).astype({"a": "Int64", "b": "Float64"}),
    "frame of pyarrow": lambda a: pandas.DataFrame(a, columns=["a", "b"]).astype("double[pyarrow]"),
}


class Sum(nn.Module):
    """The sum of the columns of a named input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


def posterior() -> Posterior:
    module, store = BayesianModule(Sum(), Gaussian()), MemoryStore()
    parts = {"net.layer.weight": torch.ones(1, 2)}, {"likelihood.log_std": torch.zeros(())}
    store.append(PosteriorSample(1, 0, 0, 0.0, 0.0, *parts))
    return Posterior(store, module)


WHOLE = [form for form in FORMS if "int" in form or form == "objects"]


@pytest.mark.parametrize("form", FORMS)
def test_predictions_and_tables_of(form: str) -> None:
    given, found = FORMS[form](BASE.copy()), posterior()
    data = TableDataModule(given, BASE[:, 0] + 0.5, standardise=False, val_fraction=0, test_fraction=0)
    data.setup("fit")
    assert data.splits[0].inputs.tolist() == BASE.tolist()
    for x in (given, {"x": given}, [given, given]):
        if form in WHOLE:  # they may be what an embedding needs
            with pytest.raises(TypeError, match=r"and the network's parameters float32: convert the data by \.float"):
                found.predict(x)
        else:
            assert found.predict(x).mean[:6, 0].tolist() == BASE.sum(1).tolist()


@pytest.mark.parametrize("kind", ["u1", "i1", "<i8", ">i4", "u2", "?"])
def test_numbers_of_any_type_in_a_table_that_is_known(kind: str) -> None:
    """The run's inputs were numbers of a table, so whole numbers are numbers too."""
    own, x = posterior(), (np.arange(12) % 2).reshape(6, 2)
    own.store.columns = type(own.columns)(inputs=TableDataModule(BASE, BASE[:, 0] + 0.5).input_columns)
    assert own.predict(x.astype(kind)).mean[:, 0].tolist() == x.sum(1).tolist()
    frame = pandas.DataFrame({"a": x[:, 0].astype(bool), "b": x[:, 1]})
    with pytest.warns(UserWarning, match="the training data had no names of columns"):
        assert own.predict(frame).mean[:, 0].tolist() == x.sum(1).tolist()
    assert own.predict(torch.tensor(x)).mean[:, 0].tolist() == x.sum(1).tolist()


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (BASE.astype(complex), TypeError, "x has values of type complex128, which are no numbers"),
        (BASE.astype(str), TypeError, "which are no numbers: encode them"),
        (BASE.astype("datetime64[s]"), TypeError, r"x has values of type datetime64\[s\], which are no numbers"),
        (np.array([[None, 1.0]]), TypeError, "x has values of type object, which are no numbers"),
        (np.ma.masked_greater(BASE, 3), ValueError, "x has masked values, which are no numbers"),
        (np.full((2, 2), 2**63, np.uint64), TypeError, r"x has integers of 2\*\*63 and more"),
        (pandas.DataFrame({"a": ["1", "2"], "b": [1, 2]}), TypeError, "x has the column 'a' of .* is not numeric"),
        (pandas.DataFrame({"a": [1, 2], "b": [1j, 2]}), TypeError, "x has the column 'b' of complex128"),
    ],
)
def test_what_is_no_numbers_is_refused(x: Any, error: type[Exception], message: str) -> None:
    for attempt in (
        lambda: posterior().predict(x),
        lambda: posterior().predict({"x": x}),
        lambda: TableDataModule(x, np.arange(len(x)) + 0.5),
    ):
        with pytest.raises(error, match=message):
            attempt()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float16, torch.float64, torch.int16])
def test_inputs_of_another_dtype_than_the_network_are_named(dtype: torch.dtype) -> None:
    x = torch.ones(8, 2).to(dtype)
    loader = DataLoader(TensorDataset(x, torch.ones(8, 1)), 4)
    module = BayesianModule(nn.Linear(2, 1), Gaussian(), lr=0.01)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"inputs are {name} and the network's parameters float32: convert"):
        quiet_trainer(max_steps=1, callbacks=[SamplingSchedule(every_n_steps=1)]).fit(module, loader)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_images_of_bytes_are_named(precision: Any) -> None:
    loader = DataLoader(TensorDataset(torch.ones(8, 1, 2, 2).byte(), torch.ones(8, 1)), 4)
    module = BayesianModule(nn.Sequential(nn.Conv2d(1, 1, 2), nn.Flatten()), Gaussian(), lr=0.01)
    trainer = quiet_trainer(max_steps=1, precision=precision, callbacks=[SamplingSchedule(every_n_steps=1)])
    with pytest.raises(TypeError, match="inputs are uint8 and the network's parameters float32: convert"):
        trainer.fit(module, loader)


def test_ids_are_not_blamed_for_a_fault_of_mixed_precision() -> None:
    """Torch's fast path of a masked encoder is one in evaluation mode, with "expected scalar type Float but found
    BFloat16"."""

    class Encoder(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            raise RuntimeError("expected scalar type Float but found BFloat16")

    loader = DataLoader(TensorDataset(torch.ones(8, 2).long(), torch.ones(8, 1)), 4)
    module = BayesianModule(Encoder(2, 1), Gaussian(), lr=0.01)
    with pytest.raises(RuntimeError, match=r"^expected scalar type"):
        quiet_trainer(max_steps=1, callbacks=[SamplingSchedule(every_n_steps=1)]).fit(module, loader)


def test_targets_without_an_axis_have_a_plan(recwarn: pytest.WarningsRecorder) -> None:
    loader = DataLoader(TensorDataset(torch.randn(20, 2), torch.randn(20)), 10)
    module = BayesianModule(nn.Linear(2, 1), Gaussian(), lr=0.01)
    quiet_trainer(max_steps=2, callbacks=[SamplingSchedule(every_n_steps=1)]).fit(module, loader)
    assert not [str(w.message) for w in recwarn if "has no plan" in str(w.message)]
