"""Small networks of torchvision, transformers and peft, and data for them; nothing is downloaded."""

from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import Dataset

LENGTH = 8


def encoder(dropout: float = 0.0, **options: Any) -> Any:
    """Return a classifier by a BERT of two layers, 32 wide."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **options,
    )
    return BertForSequenceClassification(config)


def lora(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["query", "value"], **options)


def resnet() -> nn.Module:
    torch.manual_seed(0)
    net = torchvision.models.resnet18()
    net.fc = nn.Linear(512, 3)
    return net


class Sentences(Dataset[Any]):
    """Rows of tokens as a tokenizer makes them, beside an entry that no network accepts."""

    def __init__(self, count: int = 32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(1, 20, (count, LENGTH), generator=generator)
        self.mask = (torch.arange(LENGTH) < torch.randint(2, LENGTH, (count, 1), generator=generator)).long()
        self.labels = (self.ids[:, 0] > 9).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        named = {"input_ids": self.ids[i], "attention_mask": self.mask[i], "labels": self.labels[i]}
        return named | {"idx": i}

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.ids, "attention_mask": self.mask}
