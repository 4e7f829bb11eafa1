"""The recipe on entropies out of distribution: its settings, and that a stacked repeat is a fit of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sgmcmc.recipes import mnist_ood
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Return the options of a tiny run on random images in the form of MNIST and notMNIST."""
    rng = np.random.default_rng(0)
    root = tmp_path / "data"
    for name in ("mnist", "notmnist"):
        (root / name).mkdir(parents=True)

    def images(count: int) -> Any:
        return rng.integers(0, 256, (count, 28, 28)).astype(np.uint8), (np.arange(count) % 10).astype(np.uint8)

    (x_train, y_train), (x_test, y_test), (x, y) = images(200), images(50), images(40)
    np.savez(root / "mnist" / "mnist.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    np.savez(root / "notmnist" / "notmnist_test.npz", x=x, y=y)
    changed = {"epochs": 4, "cycles": 2, "samples": 4, "batch": 20, "repeats": 3}
    return Options(tmp_path, root, executor="here", changed=changed)


def test_a_stacked_repeat_is_a_fit_of_its_own(options: Options) -> None:
    """On a CPU the first chain is bit for bit the fit alone; each other one has its own start, batches and noise."""
    setting = read_settings(mnist_ood.Settings, options)
    method = next(m for m in mnist_ood.methods(setting) if m.name == "cSGHMC T=1")
    [(alone, entropies)] = mnist_ood.one(method, 0, 1, setting, options)
    stacked = mnist_ood.one(method, 0, 3, setting, options)
    assert stacked[0][0] == alone
    assert np.array_equal(stacked[0][1], entropies)
    assert len({metrics["nll"] for metrics, _ in stacked}) == 3


@pytest.mark.by_default("True")
@pytest.mark.parametrize("stacked", [False, True])
def test_the_table(options: Options, stacked: bool) -> None:
    """Both forms have a value for each repeat; the number of gradients is the same."""
    methods = ("Snapshot-SGD", "SGHMC T=1")
    chosen = replace(options, methods=methods, changed={**options.changed, "stacked": stacked})
    rows = mnist_ood.run(chosen)
    assert {row.method for row in rows} == set(methods)
    assert all(len(row.values) == 3 for row in rows)
    assert (options.out / "entropy_posterior.png").exists()
    jobs = list((options.out / "jobs").glob("*.pickle"))
    assert len(jobs) == (2 if stacked else 6)


def test_settings() -> None:
    quick, full = (read_settings(mnist_ood.Settings, Options(Path(), Path(), full=full)) for full in (False, True))
    names = [method.name for method in mnist_ood.methods(full)]
    assert len(names) == 12
    assert full.work == 12 * 10 * 200 * 60_000
    assert full.work / quick.work > 50
    cyclical = next(m for m in mnist_ood.methods(full) if m.name == "cSGHMC T=1")
    module = mnist_ood.module_of(cyclical, 10)
    assert (module.num_chains, cyclical.cycles, cyclical.samples_per_cycle) == (10, 4, 3)
    assert sum(p.numel() for p in mnist_ood.module_of(cyclical, 1).parameters()) == 199_210
    assert full.stacked
