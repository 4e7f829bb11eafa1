"""A network's class that a notebook's cell or an edited file defines anew between the fit and the load."""

import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sgmcmc import BayesianModule, Categorical, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.posterior.classes import code_of
from tests.support.problems import loaders
from tests.support.trainers import quiet_trainer

CELL = '''
import torch
from torch import nn

class Net(nn.Module):
    """A network."""

    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.body, self.head = nn.Linear(2, width), nn.Linear(width, 2)
        self.act = nn.Tanh()

    def forward(self, x, slope=1.0):
        return self.head(self._hidden(x) * slope)

    def _hidden(self, x):
        """Return the hidden layer."""
        return self.act(self.body(x))

    def unused(self):
        return 3
'''
CHANGES = {
    "nothing": ("", "", False),
    "a comment": ("return 3", "return 3  # as before", False),
    "what it says": ("Return the hidden", "Compute the hidden", False),
    "layout": ("self.body, self.head = nn", "self.body,  self.head = nn", False),
    "another method": ("return 3", "return 4", False),
    "a further method": ("def unused", "def further(self):\n        pass\n\n    def unused", False),
    "a layer": ("nn.Tanh()", "nn.ReLU()", True),
    "an operation": ("return self.act(self.body(x))", "return self.act(self.body(x)).relu()", True),
    "a default": ("slope=1.0", "slope=2.0", True),
    "a number": ("x) * slope", "x) * 2.0 * slope", True),
}


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("cell_of_a_notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(CELL, vars(module))
    return module


def fit(folder: Path, module: BayesianModule) -> None:
    callbacks = [SamplingSchedule(every_n_steps=4), SampleCollector(folder)]
    quiet_trainer(max_epochs=1, callbacks=callbacks).fit(module, *loaders())


@pytest.mark.parametrize("change", CHANGES)
def test_a_class_that_computes_something_else_is_named(change: str, tmp_path: Path, cell: Any) -> None:
    """Its tensors have the same names and shapes, so nothing else tells."""
    fit(tmp_path / "s", BayesianModule(cell.Net(), Categorical()))
    before = cell.Net
    old, new, is_named = CHANGES[change]
    exec(CELL.replace(old, new), vars(cell))
    given = [{"net": cell.Net()}, {"model": BayesianModule(cell.Net(), Categorical())}]
    for options in ({}, *given, {"net": before()}):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Posterior.load(tmp_path / "s", **options)
        texts = [str(warning.message) for warning in said if "has changed since" in str(warning.message)]
        assert len(texts) == (is_named and not isinstance(options.get("net"), before)), (options, texts)


def test_code_stays_as_it_is_while_it_runs(cell: Any) -> None:
    """Python rewrites the instructions of functions that run often."""
    before, net = code_of(cell.Net), cell.Net()
    for _ in range(300):
        net(torch.zeros(1, 2))
    assert code_of(cell.Net) == before
    assert before.startswith(f"{sys.version_info[0]}.{sys.version_info[1]} ")
    assert code_of(torch.nn.Linear) == code_of(BayesianModule) == ""
