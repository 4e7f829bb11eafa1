"""Padded sequences brought to one length: those of several chains, and those of all steps to a few lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""Label of a token that does not count, as in torch's cross entropy and in transformers."""
VALUES = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "labels": IGNORED}
"""What padding has in the entries of a tokenizer's batch, beside "input_ids"."""
SHORTEST = 32
"""The smallest of the few lengths."""


def most_tokens(config: Any) -> int | None:
    """Return how many tokens a network of Hugging Face takes, None if its configuration does not say how and to what
    its inputs may be padded."""
    if getattr(config, "pad_token_id", None) is None:
        return None
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    return next((most for most in found if isinstance(most, int) and most > 0), None)


def common_length(length: int, most: int) -> int:
    """Return the power of two that a length is padded to: at least 32, and at most what the network takes.

    >>> [common_length(length, 512) for length in (5, 33, 300, 512, 600)]
    [32, 64, 512, 512, 600]
    """
    power = 1 << (length - 1).bit_length() if length > 1 else 1
    return max(length, min(max(power, SHORTEST), most))


def padded_alike(batches: Sequence[Any], pad: int, most: int | None = None) -> list[Any]:
    """Return the chains' batches of tokens with the length of the longest, if they have an attention mask.

    A collate function pads a batch to its own longest text, so the lengths differ between chains, and between steps.
    Masked tokens have no effect. Batches without a mask, or with other entries of that length than a tokenizer's, are
    returned as they are.

    Args:
        batches: dicts with "attention_mask", or pairs of one and a target.
        pad: the token that pads "input_ids".
        most: pads to one of a few lengths (`common_length`), for a compiled network that takes at most so many tokens;
            None pads to the longest.
    """
    inputs = [batch[0] if isinstance(batch, list | tuple) and batch else batch for batch in batches]
    if not all(isinstance(own, Mapping) and isinstance(own.get("attention_mask"), Tensor) for own in inputs):
        return list(batches)
    lengths = [own["attention_mask"].shape[-1] for own in inputs]
    longest = max(lengths) if most is None else common_length(max(lengths), most)
    if set(lengths) == {longest} or not all(map(_may_be_longer, batches, inputs, lengths)):
        return list(batches)
    values = VALUES | {"input_ids": pad}
    found: list[Any] = []
    for batch, own, length in zip(batches, inputs, lengths, strict=True):
        longer = longest - length
        padded = {
            name: F.pad(tensor, (0, longer), value=values[name])
            if longer and name in values and isinstance(tensor, Tensor) and tensor.shape[1:] == (length,)
            else tensor
            for name, tensor in own.items()
        }
        found.append(padded if own is batch else (padded, *batch[1:]))
    return found


def with_few_lengths(batch: Any, net: Any) -> Any:
    """Return a batch to evaluate as a compiled network takes it: one without an output for each token is padded.

    Args:
        batch: a dict with "attention_mask", or a pair of one and a target; others are returned as they are.
        net: the network.
    """
    config: Any = getattr(net, "config", None)
    most = most_tokens(config)
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if most is None or (isinstance(labels, Tensor) and labels.dim() > 1):
        return batch
    return padded_alike([batch], config.pad_token_id, most)[0]


def _may_be_longer(batch: Any, own: Mapping[str, Any], length: int) -> bool:
    """Return whether what is known to have a number for each token is all that has so many columns."""
    targets = [] if own is batch else list(batch[1:])
    known = {*VALUES, "input_ids"}
    others = [*targets, *(tensor for name, tensor in own.items() if name not in known)]
    return not any(isinstance(tensor, Tensor) and tensor.shape[1:2] == (length,) for tensor in others)
