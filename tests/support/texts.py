"""Texts whose batches have many lengths, and a network that reads them through an attention mask."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sgmcmc import BayesianModule, Categorical
from tests.support.trainers import quiet_trainer

LENGTHS = (5, 9, 31, 40, 64, 70, 100, 127, 130, 199)
"""Tokens of each batch of an epoch."""


class Config:
    """What a network of Hugging Face says of its inputs."""

    pad_token_id, max_position_embeddings = 0, 200


class Texts(nn.Module):
    """The mean of the embedded tokens that are not masked."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed, self.places = nn.Embedding(10, 4, padding_idx=0), nn.Embedding(200, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + self.places.weight[: input_ids.shape[1]]
        return self.head((hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True))


def batch_of(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 10, (4, length), generator=generator)
    mask = (torch.arange(length) < torch.randint(1, length + 1, (4, 1), generator=generator)).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids[:, 0] % 2}


def fit_texts(
    config: Any, compiled: Any, chains: int = 1, lengths: Sequence[int] = LENGTHS, **options: Any
) -> BayesianModule:
    """Return a module after a fit of one batch of each length.

    Args:
        config: of the network.
        compiled: the module's `compile`.
        chains: their number.
        lengths: of the batches.
        options: the trainer's.
    """
    torch.manual_seed(0)
    own: dict[str, Any] = {
        "num_data": 4 * len(lengths),
        "seed": 0,
        "lr": 0.1,
        "compile": compiled,
        "num_chains": chains,
    }
    module = BayesianModule(Texts(config), Categorical(), **own)
    quiet_trainer(max_epochs=1, **options).fit(module, DataLoader([batch_of(n) for n in lengths], batch_size=None))
    return module
