"""Docstrings describe the arguments that exist, and their examples run; tests/docs has those of the pages."""

import copy
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


# -- arguments: all of them where a name is exported; an internal's sentence is enough ---------------------------------


def exported() -> set[str]:
    """Return the classes and functions in an `__all__` of a package."""
    packages = [importlib.import_module(f"lightning_sgmcmc.{name}") for name in ("callbacks", "datamodules")]
    packages += [module for module in MODULES if hasattr(module, "__path__")]
    things = [getattr(package, name) for package in packages for name in package.__all__]
    return {f"{thing.__module__}.{thing.__qualname__}" for thing in things if hasattr(thing, "__qualname__")}


def named_arguments(doc: str) -> set[str] | None:
    """Return the names in a docstring's list of arguments, None without one."""
    found = re.search(r"^Args:\n((?:    .*\n|\n)+)", inspect.cleandoc(doc) + "\n", re.M)
    lines = [] if found is None else re.findall(r"^    (\*{0,2}\w[\w, *]*):", found[1], re.M)
    return None if found is None else {name.strip(" *") for line in lines for name in line.split(",")}


def arguments(thing: Any) -> set[str]:
    """Return the names of a function's or constructor's parameters."""
    return set(inspect.signature(thing).parameters) - {"self"}


def is_read_by_arguments(thing: Any) -> bool:
    """Return whether a thing's parameters are its own, and not fields of a dataclass or a named tuple."""
    return inspect.isfunction(thing) or (inspect.isclass(thing) and "__init__" in vars(thing))


WITH_ARGUMENTS = {
    f"{module.__name__}.{thing.__qualname__}": thing
    for module in MODULES
    for owner in (module, *(c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__))
    for thing in vars(owner).values()
    if getattr(thing, "__module__", None) == module.__name__ and is_read_by_arguments(thing) and thing.__doc__
}


def test_arguments_that_are_described_exist() -> None:
    wrong = [
        f"{name}: {sorted(unknown)}"
        for name, thing in WITH_ARGUMENTS.items()
        if (unknown := (named_arguments(thing.__doc__) or set()) - arguments(thing))
    ]
    assert wrong == []


def test_what_is_exported_describes_all_of_its_arguments() -> None:
    """Those of a base class may be described there."""
    lacking = []
    public = exported()
    for name, thing in WITH_ARGUMENTS.items():
        owner = name.rpartition(".")[0]
        described = named_arguments(thing.__doc__)
        if described is None or not (name in public or (owner in public and not thing.__name__.startswith("_"))):
            continue
        bases = thing.__mro__[1:] if inspect.isclass(thing) else ()
        described = described.union(*(named_arguments(base.__doc__ or "") or () for base in bases))
        if missing := arguments(thing) - described:
            lacking.append(f"{name}: {sorted(missing)}")
    assert lacking == []


def test_what_is_exported_is_described() -> None:
    public = exported()
    assert [name for module in MODULES for name, doc in documented(module) if name in public and not doc] == []


def blocks(doc: str) -> list[str]:
    """Return the indented blocks behind `Example::`."""
    found = re.findall(r"Example::\n\n((?:    .*\n|\n)+)", inspect.cleandoc(doc) + "\n")
    return [textwrap.dedent(block) for block in found]


EXAMPLES = {name: block for module in MODULES for name, doc in documented(module) for block in blocks(doc)}


@functools.cache
def sampled() -> Posterior:
    """Return the posterior that the examples copy."""
    module = BayesianModule(net=torch.nn.Linear(2, 2), likelihood=Categorical(), lr=0.01, seed=1)
    collector = SampleCollector(in_memory=True)
    quiet_trainer(max_steps=8, callbacks=[SamplingSchedule(every_n_steps=1), collector]).fit(module, loader())
    assert collector.posterior is not None
    return collector.posterior


@pytest.fixture
def names() -> dict[str, Any]:
    """Return what the examples may take for granted: the public names, a network, data, a posterior."""
    pytest.importorskip("arviz")
    return {
        **{name: getattr(lightning_sgmcmc, name) for name in lightning_sgmcmc.__all__},
        **{name: getattr(callbacks, name) for name in callbacks.__all__},
        **{"pl": pl, "torch": torch, "arviz": importlib.import_module("arviz")},
        **{"posterior": copy.deepcopy(sampled()), "x": torch.zeros(3, 2), "Posterior": Posterior},
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
