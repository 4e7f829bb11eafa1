"""The unit of predicted times, and that it grows from a recipe's quick setting to the paper's."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_sgmcmc.recipes import (
    cifar100_uncertainty,
    cifar_csghmc,
    cifar_csgmcmc,
    cifar_sprint,
    mnist_bnn,
    mnist_modes,
    mnist_ood,
)
from lightning_sgmcmc.recipes.shared.costs import forward_flops
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings


def test_operations_by_hand() -> None:
    """A multiplication and an addition for each weight, and for each place of a convolution."""
    assert forward_flops(lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), (3,)) == 2 * (15 + 10)
    assert forward_flops(lambda: nn.Conv2d(3, 4, 3), (3, 10, 10)) == 2 * 64 * 4 * 27


RECIPES = (cifar100_uncertainty, cifar_csghmc, cifar_csgmcmc, cifar_sprint, mnist_bnn, mnist_modes, mnist_ood)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__.rpartition(".")[2])
def test_the_papers_setting_is_more_work(recipe: Any) -> None:
    quick, full = (read_settings(recipe.Settings, Options(Path(), Path(), full=full)).work for full in (False, True))
    assert full > 50 * quick > 0
