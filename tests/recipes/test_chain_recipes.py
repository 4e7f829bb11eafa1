"""The recipes of interacting chains on small settings; their figures are the recipes' affair."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sgmcmc.recipes import theta_variance, twenty_five_modes
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings

ROOT = Path(os.environ.get("SGMCMC_DATA_ROOT", "no data here"))


@pytest.mark.slow
def test_theta_variance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theta_variance, "BOOTSTRAPS", 200)
    rows = theta_variance.run(Options(tmp_path, ROOT, repeats=6, executor="here", changed={"steps": 300}))
    ratio, low, high, _, expected = (row.value for row in rows[-5:])
    assert 0 < low < ratio < high
    assert rows[-5].paper == pytest.approx(10**-0.4)
    assert expected == pytest.approx((3000**0.6 + 100) / (300**0.6 + 100) / 10)
    assert {row.method for row in rows} == {"ICSGLD×P10", "CSGLD×T10", "ratio of variances"}
    assert (tmp_path / "estimates.png").exists()


def test_the_ratio_of_variances_and_its_interval() -> None:
    """Gaussian estimates whose variances are 1 and 4 in each of three bins: 300 repeats know the ratio to 14 %."""
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 300, 3, generator=generator, dtype=torch.float64)
    ratio = theta_variance.summed_ratio(one, 2 * other, 0)
    assert ratio.low < 0.25 < ratio.high
    assert ratio.low < ratio.value < ratio.high
    # The logarithm of a ratio of two variances of 3·300 numbers has the standard deviation √(4/900) = 0.067.
    assert math.log(ratio.high / ratio.low) == pytest.approx(2 * 1.96 * 0.067, rel=0.2)


@pytest.mark.slow
def test_twenty_five_modes(tmp_path: Path) -> None:
    changed = {"steps": 1000, "burn_in": 100, "pilot_steps": 250, "pilot_burn_in": 50, "marks": 4}
    rows = twenty_five_modes.run(Options(tmp_path, ROOT, repeats=2, executor="here", changed=changed))
    methods = list(dict.fromkeys(row.method for row in rows))
    assert methods[: len(twenty_five_modes.METHODS)] == list(twenty_five_modes.METHODS)
    divergences = {row.method: row.value for row in rows if row.metric.startswith("KL to the truth")}
    assert all(math.isfinite(value) and value > 0 for value in divergences.values())
    assert min(divergences, key=lambda method: divergences[method]) == "500 independent draws"
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {"densities.png", "divergence_steps.png", "divergence_time.png"}


def test_estimates_weigh_what_was_drawn_up_to_a_mark() -> None:
    """Six draws of two chains, three marks: shares of the positive half-plane by hand, and of the last draws alone."""
    x = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [-1.0, -1.0], [1.0, 1.0]])
    weights = torch.tensor([[1.0, 3.0], [1.0, 1.0], [2.0, 2.0], [0.0, 4.0], [1.0, 1.0], [1.0, 0.0]])
    places = torch.stack([x, torch.zeros_like(x)], -1)[:, None]
    draws = twenty_five_modes.Draws(torch.arange(1, 7) / 6, places, weights.log()[:, None], 0.0)

    def right(found: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (weight * (found[:, 0] > 0)).sum()[None] / weight.sum()

    cumulative = twenty_five_modes.estimates(draws, right, 0, 3, moving=False)
    assert torch.cat(cumulative).tolist() == pytest.approx([3 / 6, 3 / 14, 4 / 17])
    last = twenty_five_modes.estimates(draws, right, 0, 3, moving=True)
    assert torch.cat(last).tolist() == pytest.approx([1.0, 0.0, 1.0])


def test_squares_hold_the_modes() -> None:
    squares = twenty_five_modes.Squares(twenty_five_modes.TARGET)
    assert float(squares.truth.sum()) == pytest.approx(1)
    assert squares.found(squares.truth) == 25
    only = squares.masses(torch.tensor([[0.1, -0.2], [2.3, -1.9]]), torch.tensor([0.5, 0.5]))
    assert squares.found(only) == 2


def test_the_reckoned_variance_falls_towards_the_noise() -> None:
    settings = read_settings(twenty_five_modes.Settings, Options(Path(), ROOT))
    variance: Any = twenty_five_modes.variance_of("reSGLD×P5", settings)
    values = [variance(k) for k in (1, 99, 100, 200, 80_000)]
    assert values[0] == values[1] == 30
    assert values[2] == pytest.approx(30 - 3e-3 * (30 - 0.0625))
    assert values == sorted(values, reverse=True)
    assert 0.0625 < values[-1] < 10
    faster: Any = twenty_five_modes.variance_of("reSGLD×P5, ω by estimates", settings)
    lower: Any = twenty_five_modes.variance_of("reSGLD×P5, ω by estimates, from 25", settings)
    assert lower(1) == 25
    assert 0.0625 < lower(80_000) < faster(80_000) < values[-1]
    assert twenty_five_modes.variance_of("reSGLD×P5, true variance", settings) == 0.0625


def test_the_pilot_is_part_of_the_budget() -> None:
    """Each repeat has a π of its own from 300 energies; 400 of 2,000 gradients are the pilot's, and
    the burn-in of five chains follows."""
    changed = {"steps": 400, "burn_in": 20, "pilot_steps": 400, "pilot_burn_in": 100}
    settings = read_settings(twenty_five_modes.Settings, Options(Path(), ROOT, changed=changed))
    state, _ = twenty_five_modes.pilot(3, settings, 0)
    assert state.visits.sum(1).tolist() == [300] * 3
    torch.testing.assert_close(state.log_vector.exp().sum(1), torch.ones(3, dtype=torch.float64))
    assert not torch.equal(state.visits[0], state.visits[1])
    draws = twenty_five_modes.chains("ICSGLD×P5", 3, settings, 0)
    assert draws.places.shape == (30, 3, 5, 2)
    assert float(draws.progress[0]) == pytest.approx((400 + 5 * 30) / 2000)
    assert float(draws.progress[-1]) == pytest.approx(1)


def test_methods_leave_out_what_they_do_not_count() -> None:
    """Of reSGLD all slots but the coldest, of cyclical SGLD the steps from 90 % of the largest lr on."""
    settings = read_settings(twenty_five_modes.Settings, Options(Path(), ROOT, changed={"steps": 2000}))
    exchange: Any = twenty_five_modes.chains("reSGLD×P5, true variance", 3, settings, 0)
    assert (exchange.log_weights.exp().sum(2) == 1).all()
    cyclical: Any = twenty_five_modes.chains("cycSGLD×T5", 2, settings, 0)
    kept = cyclical.log_weights.exp().mean().item()
    # (1 + cos πr)/2 < 0.9 for r > 0.205
    assert kept == pytest.approx(1 - math.acos(0.8) / math.pi, abs=0.02)
