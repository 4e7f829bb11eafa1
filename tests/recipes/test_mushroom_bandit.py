"""The mushroom bandit on small settings; its figures are the recipe's affair."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sgmcmc.datamodules import StreamDataModule
from lightning_sgmcmc.datamodules.uci import ATTRIBUTES
from lightning_sgmcmc.recipes import mushroom_bandit as bandit
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings

FULL = read_settings(bandit.Settings, Options(Path(), Path(), full=True))
TINY = bandit.Settings(
    first=40, capacity=60, batch=16, observations=10, steps=4, rounds=8, repeats=1, faster=(2.0, 10.0)
)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """A table of 40 mushrooms, edible where the first attribute is x."""
    lines = [",".join(("edible", *ATTRIBUTES))]
    for row in range(40):
        edible = row % 2 == 0
        others = ["abc"[(row // (place + 1)) % 3] for place in range(len(ATTRIBUTES) - 1)]
        lines.append(",".join(["e" if edible else "p", "x" if edible else "y", *others]))
    (tmp_path / "mushroom").mkdir()
    (tmp_path / "mushroom" / "mushroom.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return Options(tmp_path / "out", tmp_path)


def test_all_agents_play_the_same_first_round_and_all_is_reported(options: Options) -> None:
    options.out.mkdir()
    outcomes = {name: [bandit.one(name, 0, TINY, options)] for name in bandit.AGENTS}
    for (outcome,) in outcomes.values():
        assert outcome.regret.shape == outcome.energy.shape == outcome.multiplier.shape == (8,)
        assert bool((outcome.regret.diff() >= 0).all())
        assert outcome.regret[-1] <= 8 * 10 * 15
    first = {name: float(runs[0].regret[0]) for name, runs in outcomes.items()}
    assert first["pSGLD x P4"] == first["pICSGLD x P4"] == first["ConstSGD x P4"]
    rows = bandit.report(outcomes, options)
    assert {row.method for row in rows} >= set(bandit.AGENTS)
    assert (options.out / "regret.png").exists()


def test_expected_regret_is_that_of_the_rules() -> None:
    """Eating a poisonous mushroom costs (35 - 5)/2 = 15 in the mean, leaving an edible one 5."""
    edible = torch.tensor([True, True, False, False])
    assert bandit.expected_regret(torch.tensor([1, 1, 0, 0]), edible) == 0
    assert bandit.expected_regret(torch.tensor([1, 0, 0, 0]), edible) == 5
    assert bandit.expected_regret(torch.tensor([1, 1, 0, 1]), edible) == 15


def test_rewards_are_those_of_the_rules(options: Options) -> None:
    inputs, edible = bandit.MushroomDataModule(options.data_root).table()
    player = bandit.Player(
        bandit.AGENTS["pSGLD x P4"],
        FULL,
        inputs,
        edible,
        seed=0,
    )
    stream = StreamDataModule(16, 4)
    player.begin(stream)
    x, outcome = stream.training_data().tensors
    action, reward = outcome.T
    is_edible = x[:, 0] == 1
    assert set(reward[action == 0].tolist()) == {0.0}
    assert set(reward[(action == 1) & is_edible].tolist()) == {5.0}
    poisoned = reward[(action == 1) & ~is_edible]
    assert set(poisoned.tolist()) == {5.0, -35.0}
    lucky = float((poisoned == 5).float().mean())
    assert abs(lucky - 0.5) < 5 * 0.5 / len(poisoned) ** 0.5, "a false alarm has probability 6e-7"


def test_full_has_the_papers_settings() -> None:
    """A step of pSGLD in the program's units equals the recipe's: ε, λ and the buffer's 4096 data at the end."""
    setting = FULL
    assert (setting.first, setting.capacity, setting.batch, setting.observations) == (1024, 4096, 512, 20)
    assert (setting.steps, setting.rounds, setting.repeats, setting.faster) == (16, 2000, 5, (1.0, 1.0))
    agent = bandit.AGENTS["pICSGLD x P4"]
    gradient = torch.tensor(0.3, dtype=torch.float64)  # of the mean squared error
    of_sum = 4096 * gradient
    square = 0.7 * (of_sum / 512).square()
    theirs = 3e-7 * of_sum / (1e-3 + square.sqrt())
    ours = bandit.step_size(agent, setting) * gradient / (1e-3 * 512 / 4096 + (0.7 * gradient.square()).sqrt())
    assert float(ours) == pytest.approx(float(theirs))
    contour: Any = bandit.contour(agent, 0)
    assert (contour.rules.zeta, contour.range.num_bins, contour.range.width) == (20, 100, 10)
    assert contour.step_size.at(1) == contour.step_size.at(10_000) == 0.03
    assert contour.interacting
    shapes = [tuple(p.shape) for p in bandit.network(117, 0.5).parameters() if p.dim() > 1]
    assert shapes == [(100, 117), (100, 100), (2, 100)]
