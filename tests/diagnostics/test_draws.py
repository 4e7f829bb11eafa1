"""ArviZ's diagnostics, as it computes them alone and with Numba."""

import math
import warnings

import arviz
import numpy as np
import pytest
import torch

from lightning_sgmcmc.diagnostics.draws import chain_diagnostics
from lightning_sgmcmc.singular.estimate import chain_mean


def test_numbers_are_the_same_where_numba_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Numba, ArviZ returns an array of one number, which newer NumPy takes for no number."""
    draws = np.random.default_rng(0).normal(size=(2, 60))
    alone = chain_diagnostics(draws), chain_mean(torch.from_numpy(draws))
    monkeypatch.setattr(arviz.Numba, "numba_flag", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        together = chain_diagnostics(draws), chain_mean(torch.from_numpy(draws))
    assert math.isclose(alone[1].error, together[1].error)
    assert np.allclose(
        [alone[0].rhat, alone[0].ess_bulk, alone[0].ess_tail],
        [together[0].rhat, together[0].ess_bulk, together[0].ess_tail],
    )
