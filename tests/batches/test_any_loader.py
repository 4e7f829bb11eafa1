"""A property of any loader: the energies of an epoch are worth all data, as computed by hand."""

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_sgmcmc import ResumableLoader
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.support.rows import (
    energy,
    fit,
    module,
    targets,
)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "count": draw(st.integers(1, 30)),
        "held_out": draw(st.integers(0, 10)),
        "batch_size": draw(st.integers(1, 12)),
        "kind": draw(st.sampled_from(["in order", "shuffle", "subset", "batches", "resumable", "datamodule", "list"])),
        "drop_last": draw(st.booleans()),
        "accumulated": draw(st.integers(1, 4)),
        "chains": draw(st.integers(1, 3)),
        "workers": draw(st.sampled_from([0] * 9 + [1])),
        "dtype": draw(st.sampled_from([torch.float32, torch.float64])),
    }


def loader_of(run: dict[str, Any]) -> tuple[Any, Tensor, bool]:
    """Return a loader, the targets of its rows (those that come in an epoch), and whether its batches are random."""
    count, size, drop, kind = run["count"], run["batch_size"], run["drop_last"], run["kind"]
    drop = drop and count >= size
    y = targets(count).to(run["dtype"])
    rows = TensorDataset(torch.zeros(count, 1, dtype=run["dtype"]), y)
    held_out = TensorDataset(torch.zeros(run["held_out"], 1, dtype=run["dtype"]), y.new_full((run["held_out"], 1), 99))
    both: Dataset[Any] = ConcatDataset([rows, held_out]) if run["held_out"] else rows
    options = {"num_workers": run["workers"]}
    if kind == "in order":
        come = y[: count // size * size] if drop else y
        return DataLoader(rows, size, drop_last=drop, **options), come, False
    if kind == "shuffle":
        return DataLoader(rows, size, shuffle=True, **options), y, True
    if kind == "subset":
        return DataLoader(both, size, sampler=SubsetRandomSampler(range(count)), **options), y, True
    if kind == "batches":
        sampler = BatchSampler(SubsetRandomSampler(range(count)), size, False)
        return DataLoader(both, batch_sampler=sampler, **options), y, True
    if kind == "resumable":
        return ResumableLoader(rows, size), y, True
    if kind == "datamodule":
        return DatasetDataModule(rows, batch_size=size), y, True
    cuts = sorted({0, count // 3, count // 2, count})
    batches = [list(range(a, b)) for a, b in itertools.pairwise(cuts)]
    return DataLoader(rows, batch_sampler=batches, **options), y, False


def check_run(run: dict[str, Any]) -> None:
    data, y, is_random = loader_of(run)
    model = module(num_chains=run["chains"], chain_start="same", shared_batch=True)
    options: dict[str, Any] = {} if run["dtype"] == torch.float64 else {"precision": "32-true"}
    model = model.to(run["dtype"])
    seen = fit(model, data, max_epochs=1, accumulate_grad_batches=run["accumulated"], **options)
    assert model.num_data == run["count"]
    with model.at_chain(0):
        mean = model.net.mean.detach().double()
    prior = energy(mean, y[:0].double())
    wanted = prior + (energy(mean, y.double()) - prior) * run["count"] / len(y)
    found = seen.of_epoch(0, is_random).double()
    rounding = 1e-9 if run["dtype"] == torch.float64 else 1e-4
    torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=rounding, atol=rounding)


PROPERTY = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


@settings(max_examples=15, **PROPERTY)
@given(runs())
@pytest.mark.filterwarnings("ignore")
def test_an_epoch_of_any_loader(run: dict[str, Any]) -> None:
    check_run(run)


@pytest.mark.slow
@settings(max_examples=500, **PROPERTY)
@given(runs())
@pytest.mark.filterwarnings("ignore")
def test_an_epoch_of_five_hundred_loaders(run: dict[str, Any]) -> None:
    check_run(run)
