"""The examples in docstrings run, and print what they say; tests/docs has those of README.md and of the pages."""

import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

import lightning_sgmcmc
from lightning_sgmcmc import BayesianModule, Categorical, Posterior, callbacks
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from tests.support.small_run import loader
from tests.support.trainers import quiet_trainer


def modules() -> Iterator[ModuleType]:
    """Return the modules of the package, `callbacks` and `datamodules` included."""
    for found in pkgutil.walk_packages(lightning_sgmcmc.__path__, "lightning_sgmcmc."):
        yield importlib.import_module(found.name)
    for folder in ("callbacks", "datamodules"):
        package = importlib.import_module(f"lightning_sgmcmc.{folder}")
        for found in pkgutil.walk_packages(package.__path__, f"lightning_sgmcmc.{folder}."):
            yield importlib.import_module(found.name)


MODULES = list({module.__name__: module for module in modules()}.values())
DOCTESTS = [test for module in MODULES for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.parametrize("test", DOCTESTS, ids=lambda test: test.name)
def test_what_an_example_prints(test: doctest.DocTest) -> None:
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=said.append, clear_globs=False)
    assert runner.failures == 0, "".join(said)


def documented(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Return names and docstrings of a module's classes, their methods, and its functions."""
    for name, thing in vars(module).items():
        if getattr(thing, "__module__", None) != module.__name__ or not (inspect.isclass(thing) or callable(thing)):
            continue
        yield f"{module.__name__}.{name}", thing.__doc__ or ""
        if inspect.isclass(thing):
            for method, function in vars(thing).items():
                yield f"{module.__name__}.{name}.{method}", getattr(function, "__doc__", None) or ""


def blocks(doc: str) -> list[str]:
    """Return the indented blocks behind `Example::`."""
    found = re.findall(r"Example::\n\n((?:    .*\n|\n)+)", inspect.cleandoc(doc) + "\n")
    return [textwrap.dedent(block) for block in found]


EXAMPLES = {name: block for module in MODULES for name, doc in documented(module) for block in blocks(doc)}


@pytest.fixture
def names() -> dict[str, Any]:
    """Return what the examples may take for granted: the public names, a network, data, a posterior."""
    pytest.importorskip("arviz")
    module = BayesianModule(net=torch.nn.Linear(2, 2), likelihood=Categorical(), lr=0.01, seed=1)
    collector = SampleCollector(in_memory=True)
    quiet_trainer(max_steps=8, callbacks=[SamplingSchedule(every_n_steps=1), collector]).fit(module, loader())
    return {
        **{name: getattr(lightning_sgmcmc, name) for name in lightning_sgmcmc.__all__},
        **{name: getattr(callbacks, name) for name in callbacks.__all__},
        **{"pl": pl, "torch": torch, "arviz": importlib.import_module("arviz")},
        **{"posterior": collector.posterior, "x": torch.zeros(3, 2), "Posterior": Posterior},
        **{"net": torch.nn.Linear(2, 2), "data": loader().dataset, "partial": functools.partial},
    }


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.filterwarnings("ignore")
def test_an_example_runs(name: str, names: dict[str, Any]) -> None:
    exec(compile(EXAMPLES[name], name, "exec"), names)


def test_the_examples_are_found() -> None:
    """Else the tests above would pass without one."""
    assert len(DOCTESTS) >= 15
    assert len(EXAMPLES) >= 25
