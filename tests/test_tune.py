"""`propose_lr` against the exact law of the conjugate model, and the command."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sgmcmc.cli.commands import main
from lightning_sgmcmc.samplers import SGHMC, SGLD
from lightning_sgmcmc.tune import propose_lr
from tests.support.paths import RECIPE
from tests.support.problems import ConjugateRegression
from tests.support.trainers import quiet_trainer

PROBLEM = ConjugateRegression()
propose = functools.partial(propose_lr, make_trainer=quiet_trainer)


def largest_step(law: Any, tolerance: float = 0.2) -> float:
    """The largest step up to which the exact stationary covariance is within the tolerance of the posterior's."""
    precision = np.linalg.inv(PROBLEM.covariance)
    steps = np.geomspace(1e-4, 0.15, 300)
    within = [np.trace(precision @ law(step)) / 3 < 1 + tolerance for step in steps]
    return float(steps[within.index(False) - 1])


@pytest.mark.parametrize(
    ("sampler", "lr", "law"),
    [
        pytest.param(SGLD, 0.1, lambda h: PROBLEM.sgld_covariance(h, 50), id="SGLD-from-above"),
        pytest.param(SGHMC, 0.002, lambda h: PROBLEM.sghmc_covariance(h, 50, 0.1), id="SGHMC-from-below"),
    ],
)
def test_the_proposal_is_near_the_largest_right_step(sampler: Any, lr: float, law: Any) -> None:
    """Within a factor of two: √2 is the search's resolution, the rest the noise of 300 steps."""
    module = PROBLEM.module(sampler=sampler, lr=lr, seed=0)
    before = module.net.weight.detach().clone()
    proposal = propose(module, PROBLEM.loader(50), steps=300, burn_in_steps=50)
    assert proposal.lr is not None
    assert 0.5 < proposal.lr / largest_step(law) < 1.5
    assert proposal.is_bounded
    steps = [probe.lr for probe in proposal.probes]
    assert steps == sorted(steps)
    assert all(probe.healthy == (probe.lr <= proposal.lr) for probe in proposal.probes)
    # the module is what it was, and fits
    assert torch.equal(module.net.weight, before)
    assert (module.lr, module.posterior, module.health, module.evaluations) == (lr, None, None, {})


def test_nothing_healthy_and_nothing_unhealthy() -> None:
    module = PROBLEM.module(sampler=SGHMC, lr=5.0, seed=0)
    none = propose(module, PROBLEM.loader(50), steps=100, burn_in_steps=0, max_probes=2)
    assert none.lr is None
    assert [probe.healthy for probe in none.probes] == [False, False]
    module = PROBLEM.module(sampler=SGHMC, lr=1e-4, seed=0)
    unbounded = propose(module, PROBLEM.loader(50), steps=100, burn_in_steps=0, max_probes=2)
    assert unbounded.lr == pytest.approx(2e-4)
    assert not unbounded.is_bounded


def test_mistakes() -> None:
    loader = PROBLEM.loader(50)
    with pytest.raises(ValueError, match="steps must be at least 100, got 5"):
        propose(PROBLEM.module(), loader, steps=5)
    with pytest.raises(ValueError, match="temperature 0"):
        propose(PROBLEM.module(temperature=0.0), loader)
    with pytest.raises(TypeError, match="BayesianModule, got Linear"):
        propose(torch.nn.Linear(1, 1), loader)  # type: ignore[arg-type]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["tune", "--config", RECIPE, "--steps=100", "--burn_in_steps=100", "--max_probes=2"])
    printed = capsys.readouterr().out
    assert "--model.init_args.lr=" in printed
    (file,) = Path("runs/digits_csghmc").glob("*/tune.json")
    result = json.loads(file.read_text())
    assert result["setting"] == pytest.approx(result["lr"] / result["sampling_lr_factor"])
    assert result["sampling_lr_factor"] == pytest.approx((np.cos(0.7 * np.pi) + 1) / 2)
    assert len(result["probes"]) == 2
    assert [path.name for path in Path.cwd().iterdir()] == ["runs"], "probes leave nothing behind"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["tune", "--help"])
    assert "burn_in_steps" in capsys.readouterr().out
