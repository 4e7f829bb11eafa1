"""Networks of timm in a store: a name of its registry and numbers, from which another program builds them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sgmcmc import Categorical, Posterior
from lightning_sgmcmc.posterior.classes import NotDescribableError
from lightning_sgmcmc.posterior.description import build, describe

timm = pytest.importorskip("timm")


def with_own_head() -> nn.Module:
    network: Any = timm.create_model("resnet10t")
    network.fc = nn.Sequential(nn.Dropout(0.1), nn.Linear(512, 3))
    return network


NETWORKS = {
    "as it comes": lambda: timm.create_model("resnet10t"),
    "classes": lambda: timm.create_model("resnet10t", num_classes=5),
    "grey": lambda: timm.create_model("resnet10t", num_classes=5, in_chans=1),
    "a head of one's own": with_own_head,
    "transformer": lambda: timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=32),
    "dropout": lambda: timm.create_model("mobilenetv3_small_050", num_classes=4, drop_rate=0.3),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_rebuilt_from_its_name_and_numbers(name: str) -> None:
    network = NETWORKS[name]()
    description = json.loads(json.dumps(describe(network)))
    assert description["class"].startswith("timm.models:")
    assert not [value for value in description["arguments"].values() if isinstance(value, str)]
    again = build(description)
    again.load_state_dict(network.state_dict())
    x = torch.randn(2, 1 if name == "grey" else 3, 32, 32)
    torch.testing.assert_close(again.eval()(x), network.eval()(x))


def test_samples_are_loaded_without_the_network(tmp_path: Path) -> None:
    networks = [timm.create_model("resnet10t", num_classes=5) for _ in range(2)]
    posterior = Posterior.from_states(timm.create_model("resnet10t", num_classes=5), networks, Categorical())
    posterior.save(tmp_path / "samples")
    x = torch.randn(3, 3, 32, 32)
    found = Posterior.load(tmp_path / "samples").predict(x).probabilities
    torch.testing.assert_close(found, posterior.predict(x).probabilities)


@pytest.mark.parametrize(
    "change",
    [
        {"class": "timm.models:hf-hub:someone/network"},
        {"class": "timm.models:local-dir:/tmp"},
        {"class": "timm.models:create_model"},
        {"arguments": {"pretrained": True}},
        {"arguments": {"checkpoint_path": "weights.pt"}},
        {"arguments": {"num_classes": "hf-hub:someone/network"}},
        {"arguments": {"num_classes": 10**9}},
    ],
)
def test_no_text_reaches_timm_but_a_name_of_its_registry(change: Any) -> None:
    description = describe(timm.create_model("resnet10t")) | change
    with pytest.raises(NotDescribableError):
        build(description)
