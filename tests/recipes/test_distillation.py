"""The recipe distillation with small settings, where MNIST is at hand."""

import os
from pathlib import Path

import pytest
import torch

from lightning_sgmcmc.recipes import distillation
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings

ROOT = Path(os.environ.get("SGMCMC_DATA_ROOT", "no data here"))


def test_half_of_a_batch_is_perturbed() -> None:
    torch.manual_seed(0)
    images = list(torch.rand(20, 784))
    batch = distillation.perturbed(images)
    assert torch.equal(batch[:10], torch.stack(images[:10]))
    assert bool((batch[10:] != torch.stack(images[10:])).any(1).all())


@pytest.mark.skipif(not (ROOT / "mnist").exists(), reason="needs MNIST and notMNIST under SGMCMC_DATA_ROOT")
@pytest.mark.slow
def test_the_whole_recipe_for_one_seed(tmp_path: Path) -> None:
    options = Options(tmp_path, ROOT, changed={"images": "1000", "epochs": "16", "student_epochs": "10"})
    found = distillation.one(0, read_settings(distillation.Settings, options), options)
    methods = {method for method, _ in found}
    assert len(methods) == 4
    average = next(method for method in methods if method.startswith("average"))
    assert found["student", "nll"] < found["one sample", "nll"]
    assert found["student", "MB"] < found[average, "MB"] / 10
