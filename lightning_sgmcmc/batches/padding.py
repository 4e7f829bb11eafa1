"""Padded sequences of several chains, brought to one length."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""Label of a token that does not count, as in torch's cross entropy and in transformers."""
VALUES = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "labels": IGNORED}
"""What padding has in the entries of a tokenizer's batch, beside "input_ids"."""


def padded_alike(batches: Sequence[Any], pad: int) -> list[Any]:
    """Return the chains' batches of tokens with the length of the longest, if they have an attention mask.

    A collate function pads a batch to its own longest text, so the lengths differ between chains. Masked tokens have no
    effect. Batches without a mask, or with entries other than a tokenizer's, are returned as they are.

    Args:
        batches: dicts with "attention_mask", or pairs of one and a target.
        pad: the token that pads "input_ids".
    """
    inputs = [batch[0] if isinstance(batch, list | tuple) and batch else batch for batch in batches]
    if not all(isinstance(own, Mapping) and isinstance(own.get("attention_mask"), Tensor) for own in inputs):
        return list(batches)
    lengths = [own["attention_mask"].shape[-1] for own in inputs]
    if len(set(lengths)) == 1:
        return list(batches)
    values = VALUES | {"input_ids": pad}
    found: list[Any] = []
    for batch, own, length in zip(batches, inputs, lengths, strict=True):
        longer = max(lengths) - length
        padded = {
            name: F.pad(tensor, (0, longer), value=values[name])
            if longer and name in values and isinstance(tensor, Tensor) and tensor.shape[1:] == (length,)
            else tensor
            for name, tensor in own.items()
        }
        found.append(padded if own is batch else (padded, *batch[1:]))
    return found
