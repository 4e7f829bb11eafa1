"""The recipe of LoRA on text, with a tiny network and few texts; its figures are the recipe's affair."""

from pathlib import Path

import pytest
import torch

from lightning_sgmcmc.recipes import lora_text
from lightning_sgmcmc.recipes.lora_text import networks, texts
from lightning_sgmcmc.recipes.lora_text.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings

SETTINGS = read_settings(Settings, Options(Path(), Path()))


def test_texts_of_packages() -> None:
    """Rows are different paragraphs with their package's label, and no word of a test file is in both parts."""
    train, test = texts.data_of(("torchmetrics", "rich"), 6, 4, SETTINGS)
    assert train.columns["labels"].bincount().tolist() == [6, 6]
    assert test.columns["labels"].bincount().tolist() == [4, 4]
    ids = torch.cat([train.columns["input_ids"], test.columns["input_ids"]])
    assert len(ids.unique(dim=0)) == len(ids)
    assert bool((train.columns["attention_mask"] == (train.columns["input_ids"] > 0)).all())


def test_the_network_is_as_large_as_it_says() -> None:
    with torch.device("meta"):
        net = networks.network(SETTINGS)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(22.5e6, rel=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_whole_recipe(tmp_path: Path) -> None:
    sizes = {"trunk": 20, "train": 10, "test": 10, "trunk_steps": 3, "steps": 8, "samples": 2, "rounds": 1, "timed": 2}
    changed = {name: str(value) for name, value in ({"vocabulary": 500, "width": 24, "layers": 2} | sizes).items()}
    options = Options(tmp_path, Path(), executor="here", changed=changed)
    rows = {(row.method, row.metric): row.value for row in lora_text.run(options)}
    assert all(value > 0 for value in rows.values())
    assert {method for method, metric in rows if metric == "test NLL"} == {
        "AdamW, one network",
        "AdamW, the average of four",
        "SGHMC, four chains",
    }
