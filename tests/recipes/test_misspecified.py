"""The recipe `misspecified`: its start, its region, and a short run of each method."""

import math
from pathlib import Path

import pytest
import torch

from lightning_sgmcmc.recipes import misspecified
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings


def test_the_start_is_the_log_normal_s_own() -> None:
    law = torch.distributions.LogNormal(torch.zeros(()).double(), torch.ones(()).double())
    torch.testing.assert_close(misspecified.start(), torch.stack([law.mean, law.stddev.log()]))


def test_the_posterior_has_no_mass_beyond_the_region() -> None:
    assert 0 < misspecified.outside_mass(*misspecified.posterior(0, 100_000, 0)) < 1e-30


def test_every_method_runs_and_is_drawn(tmp_path: Path) -> None:
    """A few iterations; how the passes are counted. What they sample is the samplers' tests' affair."""
    changed = {"iterations": 70, "burn_in": 20, "passes": 11, "lag": 5}
    options = Options(tmp_path, tmp_path, changed=changed)
    settings = read_settings(misspecified.Settings, options)
    chains = {
        method: [misspecified.one(method, k, settings, options) for k in range(2)] for method in misspecified.SERIES
    }
    steps = {method: len(of_method[0].shares) for method, of_method in chains.items()}
    assert (steps["EWSG"], steps["uniform batches"]) == (50, 100)
    assert {method: len(c[0].draws) for method, c in chains.items()} == {m: n - 20 for m, n in steps.items()}
    assert float(chains["EWSG"][0].shares.mean()) == pytest.approx(21.8)
    rows = [row for method in chains for row in misspecified.rows_of(method, chains[method], settings)]
    assert len(rows) == 6 * 10
    assert all(math.isfinite(row.value) for row in rows)
    assert [row.paper for row in rows if row.paper] == [10.9]
    for name, draw in misspecified.PICTURES.items():
        draw(chains, settings).savefig(tmp_path / f"{name}.png")
