"""The recipe segmentation with small settings: its data, its network, and each method at the same cost."""

from pathlib import Path

import pytest
import torch

from lightning_sgmcmc.recipes import segmentation
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings


def test_the_shapes_are_where_the_labels_say() -> None:
    images, labels = segmentation.draw(200, 3, torch.Generator().manual_seed(0))
    assert images.shape == (200, 1, segmentation.SIDE, segmentation.SIDE)
    assert set(labels.unique().tolist()) == {segmentation.IGNORED, 0, 1, 2, 3}
    background, shapes = images[:, 0][labels == 0], images[:, 0][labels > 0]
    assert abs(float(background.mean())) < 0.01
    assert float(background.std()) == pytest.approx(segmentation.NOISE, rel=0.02)
    assert float(shapes.mean()) == pytest.approx(1.0, abs=0.05)
    _, with_rings = segmentation.draw(200, 4, torch.Generator().manual_seed(0))
    assert float((with_rings == segmentation.RING).flatten(1).any(1).double().mean()) > 0.95


def test_methods_have_the_same_cost(tmp_path: Path) -> None:
    options = Options(tmp_path, tmp_path, changed={"sizes": "[40, 20, 6]", "epochs": "4"})
    settings = read_settings(segmentation.Settings, options)
    found = {name: segmentation.one(name, 0, settings, options) for name in ("one network", "ensemble")}
    assert found["one network"]["gradient evaluations"] == found["ensemble"]["gradient evaluations"] == 4 * 40
    for scores in found.values():
        assert 0 < scores["iou"] < scores["accuracy"] <= 1
        assert scores["pixel_nll"] > 0
    assert found["one network"]["AUROC of rings by mutual information"] == 0.5, "one network has none"
    problem = segmentation.shapes(0, settings)
    network = problem.net()
    assert network(torch.zeros(2, 1, 24, 24)).shape == (2, 4, 24, 24)
