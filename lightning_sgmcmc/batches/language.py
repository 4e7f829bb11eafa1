"""What models of transformers mean by "labels": language models shift them, encoder-decoders decode from them."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

IDS, MASK, LABELS, DECODER = "input_ids", "attention_mask", "labels", "decoder_input_ids"


def shifts_labels(network: nn.Module) -> bool:
    """Return whether a model of transformers takes the label of a token as the target of the token before.

    Causal language models do by the loss `ForCausalLMLoss`, also transformers' default, or by code of their own.
    """
    code = getattr(inspect.unwrap(type(network).forward), "__code__", None)
    if code is None:
        return False
    by_loss = "loss_function" in code.co_names and getattr(network, "loss_type", "") in (None, "ForCausalLM")
    return by_loss or any(name.startswith("shift") for name in code.co_varnames)


def next_tokens(labels: Tensor, mask: Tensor | None, ignored: int) -> Tensor:
    """Return the target of each position: the label of the next token, none at the last position.

    Args:
        labels: shape (n, T); `ignored` where there is none.
        mask: the attention mask, shape (n, T); what it hides is padding and no target. None hides nothing.
        ignored: the likelihood's `ignore_index`.

    >>> next_tokens(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[1, 1, 1, 0]]), -100)
    tensor([[   6,    7, -100, -100]])
    """
    found = labels.long()
    if mask is not None and mask.shape == labels.shape:
        found = found.masked_fill(mask == 0, ignored)
    return torch.cat([found[:, 1:], torch.full_like(found[:, :1], ignored)], 1)


def with_decoder_inputs(network: Any, inputs: Mapping[str, Any], labels: Any) -> dict[str, Any]:
    """Return the inputs of an encoder-decoder with what its decoder reads: the target, each token one place later.

    Without it some models decode from the encoder's own input, and say nothing.

    Args:
        network: a model with `prepare_decoder_input_ids_from_labels`.
        inputs: of the encoder, by name.
        labels: the target, shape (n, T), None if unknown.

    Raises:
        ValueError: if neither the decoder's inputs nor the target are known.
    """
    if DECODER in inputs or "decoder_inputs_embeds" in inputs:
        return dict(inputs)
    if labels is None:
        raise ValueError(
            f"{type(network).__name__} decodes a text of its own, and the batch has no {DECODER!r}: add it, or the "
            f"target as {LABELS!r}"
        )
    return {**inputs, DECODER: network.prepare_decoder_input_ids_from_labels(labels=labels)}


def fault_of_tokens(inputs: Any, labels: Any, ignored: int, are_shifted: bool) -> str | None:
    """Return what is wrong with the targets of a token likelihood, None if nothing is to be seen.

    Args:
        inputs: of the network, by name or as one tensor of tokens.
        labels: the batch's labels.
        ignored: the likelihood's `ignore_index`.
        are_shifted: whether the model's convention applies, by which the labels are shifted after this.
    """
    ids = inputs.get(IDS) if isinstance(inputs, Mapping) else inputs
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or ids.is_floating_point():
        return None
    if ids.shape != labels.shape or ids.dim() != 2 or ids.shape[1] < 2:
        return None
    counted = labels != ignored
    is_copy = bool((ids == labels)[counted].all()) and bool(counted.any())
    if is_copy and not are_shifted and int(counted.sum()) > 1:
        return (
            "each target is the token at its own place, which the network sees: pass the next tokens as targets, "
            "or to a causal model of transformers a dict with labels=input_ids, which are shifted"
        )
    ahead = counted[:, :-1] & counted[:, 1:]
    if are_shifted and not is_copy and bool((ids[:, 1:] == labels[:, :-1])[ahead].all()) and int(ahead.sum()) > 1:
        return (
            "the labels are the next tokens already, and this model's convention shifts labels once more: pass "
            "labels=input_ids, or a pair (inputs, next tokens)"
        )
    return None
