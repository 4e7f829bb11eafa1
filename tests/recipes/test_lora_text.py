"""The recipe of LoRA on text, with a tiny network and few texts; its figures are the recipe's affair."""

from pathlib import Path

import pytest
import torch

from lightning_sgmcmc.recipes import lora_text
from lightning_sgmcmc.recipes.shared.options import Options


def test_texts_of_packages() -> None:
    """Rows are different paragraphs with their package's label, and no word of a test file is in both parts."""
    train, test = lora_text.data_of(("torchmetrics", "rich"), 6, 4, lora_text.SETTINGS["quick"])
    assert train.columns["labels"].bincount().tolist() == [6, 6]
    assert test.columns["labels"].bincount().tolist() == [4, 4]
    ids = torch.cat([train.columns["input_ids"], test.columns["input_ids"]])
    assert len(ids.unique(dim=0)) == len(ids)
    assert bool((train.columns["attention_mask"] == (train.columns["input_ids"] > 0)).all())


def test_the_network_is_as_large_as_it_says() -> None:
    with torch.device("meta"):
        net = lora_text.network(lora_text.SETTINGS["quick"])
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(22.5e6, rel=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_whole_recipe(tmp_path: Path) -> None:
    sizes = {"trunk": 20, "train": 10, "test": 10, "trunk_steps": 3, "steps": 8, "samples": 2, "rounds": 1, "timed": 2}
    setting = lora_text.Setting(vocabulary=500, width=24, layers=2, **sizes)
    rows = {(row.method, row.metric): row.value for row in lora_text.run(Options(tmp_path, Path()), setting)}
    assert all(value > 0 for value in rows.values())
    assert {method for method, metric in rows if metric == "test NLL"} == {
        "AdamW, one network",
        "AdamW, the average of four",
        "SGHMC, four chains",
    }
