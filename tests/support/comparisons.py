"""Comparisons that tests share: of samples, of outcomes, and of draws with an exact law."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_sgmcmc.chains.samples import PosteriorSample
from tests.support.problems import ACCELERATOR, PROBLEM, Array


def assert_same(first: list[PosteriorSample], second: list[PosteriorSample]) -> None:
    """Bit for bit on a CPU; elsewhere up to the order of sums."""
    if ACCELERATOR != "cpu":
        assert [(s.step, s.chain) for s in first] == [(s.step, s.chain) for s in second]
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one.state, other.state, rtol=1e-3, atol=1e-5)
            assert abs(one.energy - other.energy) <= 1e-3 * abs(one.energy)
        return
    assert [(s.step, s.chain, s.energy) for s in first] == [(s.step, s.chain, s.energy) for s in second]
    for one, other in zip(first, second, strict=True):
        assert one.state.keys() == other.state.keys()
        for name, tensor in one.state.items():
            assert torch.equal(tensor, other.state[name]), name


def assert_equal_trees(first: Any, second: Any) -> None:
    one, other = pytree.tree_leaves(first), pytree.tree_leaves(second)
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the places where two outcomes differ."""
    if isinstance(a, Tensor):
        is_alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return [] if is_alike and bool(((a == b) | ((a != a) & (b != b))).all()) else [path]  # a NaN is one in both
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{path} keys"]
        return [d for key in a for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{path} has {len(a)} and {len(b)}"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{i}")]
    return [] if a == b or a != a else [f"{path}: {a} {b}"]


def covariance_with_error(draws: Array, mean: Array, batches: int = 40) -> tuple[Array, Array]:
    """Return the draws' covariance about `mean`, averaged over outputs, and its standard error, (d, d) each."""
    centred = draws - mean
    products = np.einsum("soi,soj->sij", centred, centred) / draws.shape[1]
    return _mean_with_error(products, batches)


def mean_with_error(draws: Array, batches: int = 40) -> tuple[Array, Array]:
    """Return the draws' mean and its standard error by batch means, (D, d) each."""
    return _mean_with_error(draws, batches)


def _mean_with_error(values: Array, batches: int) -> tuple[Array, Array]:
    length = len(values) // batches
    means = values[: length * batches].reshape(batches, length, *values.shape[1:]).mean(1)
    return values.mean(0), means.std(0, ddof=1) / np.sqrt(batches)


def check_law(draws: Array, covariance: Array, slack: float = 0.0) -> None:
    """Hold draws against the exact mean and a covariance; slack is a relative error granted to the covariance."""
    mean, error = mean_with_error(draws)
    assert np.abs((mean - PROBLEM.mean) / error).max() < 6
    found, found_error = covariance_with_error(draws, PROBLEM.mean)
    scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    assert (np.maximum(np.abs(found - covariance) - slack * scale, 0) / found_error).max() < 5
    assert (found_error / scale).max() < 0.05, "the test must be able to see an error of a quarter"
