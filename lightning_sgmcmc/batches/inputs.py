"""What of a batch a network receives, how it is passed to `forward`, what its output is."""

import copy
import inspect
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_sgmcmc.tables.arrays import as_frame, as_tensor, is_table
from lightning_sgmcmc.tables.columns import InputColumns

TARGETS = ("labels", "label", "target", "y")
"""Entries of a dict batch that may hold its target."""
ABOUT_DTYPES = ("dtype", "scalar type", "Long", "Int", "Byte", "Char", "Short", "Bool", "Half", "Double", "type (")
"""Parts of torch's messages on tensors of unequal dtypes."""
OF_INTEGERS = re.compile(r"\b(u?int\d*|long|short|byte|char|bool)\b", re.IGNORECASE)
"""What those on integers name."""


class Features(NamedTuple):
    """Inputs of a part of a network, shape (n, …), which its other layers have computed before."""

    values: Tensor


class Arguments(NamedTuple):
    """What a network's `forward` accepts.

    Attributes:
        required: number of positional arguments without a default.
        most: number of positional arguments, without flags (those whose default is another value than None).
        names: the arguments that can be passed by name; None if any can.
        needed: the names of those without a default.
        hugging_face: whether it is that of a model of transformers.
        shifts_labels: whether the model takes a token's label as the target of the token before.
        decodes: whether the model decodes from its target.
        takes_dict: whether one argument is all that it needs, and nothing says that this is a tensor.
    """

    required: int
    most: float
    names: frozenset[str] | None
    needed: tuple[str, ...]
    hugging_face: bool = False
    shifts_labels: bool = False
    decodes: bool = False
    takes_dict: bool = False


def arguments_of(forward: Callable[..., Any], hugging_face: bool = False) -> Arguments:
    """Return what a `forward` accepts, without transformers' `**kwargs`, which are for layers."""
    parameters = inspect.signature(forward).parameters.values()
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters) and not hugging_face
    names = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = tuple([p.name for p in names if p.default is p.empty])  # before torch 2.9 a set does not compile
    alone = [p for p in parameters if p.default is p.empty]
    takes_dict = len(alone) == 1 and alone[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and not hugging_face
    return Arguments(
        required=sum(p.default is p.empty for p in by_place),
        most=float("inf") if variadic else sum(p.default is p.empty or p.default is None for p in by_place),
        # A network that gets labels computes a loss of its own, which nothing uses.
        names=None if any_name else frozenset(p.name for p in names) - ({"labels"} - set(needed)),
        needed=needed,
        hugging_face=hugging_face,
        takes_dict=takes_dict and alone[0].annotation not in (Tensor, "Tensor", "torch.Tensor"),
    )


def arguments_of_network(network: nn.Module) -> Arguments:
    """Return what a network accepts; the wrappers of torch.compile and peft are looked through."""
    network = innermost(network)
    if not is_hugging_face(network):
        first = network
        while type(first).forward is nn.Sequential.forward and len(cast(nn.Sequential, first)):
            first = cast(nn.Sequential, first)[0]
        return arguments_of(network.forward)._replace(takes_dict=arguments_of(first.forward).takes_dict)
    found = arguments_of(network.forward, hugging_face=True)
    decodes = hasattr(network, "prepare_decoder_input_ids_from_labels")
    return found._replace(shifts_labels=shifts_labels(network), decodes=decodes)


def innermost(network: nn.Module) -> nn.Module:
    """Return the network within the wrappers of torch.compile and peft."""
    network = getattr(network, "_orig_mod", network)
    return cast(Any, network).get_base_model() if type(network).__module__.startswith("peft.") else network


def is_hugging_face(network: Any) -> bool:
    """Return whether a network is a model of transformers, or derived from one."""
    return any(cls.__module__ == "transformers.modeling_utils" for cls in type(network).__mro__)


def target_name(batch: Mapping[str, Any], arguments: Arguments) -> str | None:
    """Return the entry of a dict batch that holds its target, if any; what `forward` cannot do without is an input."""
    found = [name for name in TARGETS if name in batch and name not in arguments.needed]
    if len(found) > 1:
        raise ValueError(
            f"a dict batch has {' and '.join(map(repr, found))}, each of which could be its target: leave all but one "
            "out of it (in the data set or collate_fn), or override inputs_and_target(batch) of the module"
        )
    return found[0] if found else None


def parted(
    batch: Mapping[str, Any], arguments: Arguments, network: nn.Module | None, owner: str
) -> tuple[dict[str, Any], Any]:
    """Return the inputs and the target of a dict batch."""
    name = target_name(batch, arguments)
    if name is None:
        raise TypeError(
            f"a dict batch needs its target as {', '.join(map(repr, TARGETS))}, and this one has "
            f"{', '.join(map(repr, batch))}: rename one, or override inputs_and_target(batch) of {owner}"
        )
    inputs = {key: value for key, value in batch.items() if key != name}
    if arguments.decodes and network is not None:
        inputs = with_decoder_inputs(innermost(network), inputs, batch[name])
    return inputs, batch[name]


def is_object(batch: Any) -> bool:
    """Return whether a batch is an object of a class of its own that moves to a device, such as a batch of graphs."""
    return callable(getattr(batch, "to", None)) and not isinstance(batch, Tensor | Mapping | list | tuple | nn.Module)


def _is_dataclass_object(x: Any) -> bool:
    """Return whether x is an object of a dataclass, and not the class itself."""
    return is_dataclass(x) and not isinstance(x, type)


def are_inputs(x: Any) -> bool:
    """Return whether x is an array, a tensor, a frame or a number, of which nothing is to be taken apart."""
    return isinstance(x, Tensor | np.ndarray | int | float | str) or is_table(x)


def parted_object(batch: Any, arguments: Arguments) -> tuple[Any, Any]:
    """Return the inputs and the target (None without one) of a batch whose entries are an object's attributes: the
    object itself if `forward` takes one argument that is none of them, else those that `forward` accepts."""
    names = (*TARGETS, *(arguments.names or ()), *arguments.needed)
    found = {name: value for name in names if (value := getattr(batch, name, None)) is not None}
    target = target_name(found, arguments)
    inputs = {name: value for name, value in found.items() if name != target}
    if is_whole(inputs, arguments) or not arguments.needed:
        return batch, found.get(target)
    return accepted(inputs, arguments), found.get(target)


def leaves_of(batch: Any) -> list[Any]:
    """Return the leaves of a batch, also of objects in it that are dicts on request, as torch_geometric's are."""
    leaves = pytree.tree_leaves(plain(batch))
    opened = [leaf.to_dict() if is_object(leaf) and hasattr(leaf, "to_dict") else leaf for leaf in leaves]
    opened = [dict(vars(leaf)) if _is_dataclass_object(leaf) else leaf for leaf in opened]
    return pytree.tree_leaves(opened)


def digest(batch: Any) -> int:
    """Return a number that tells batches apart."""
    found = 0
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor):
            content = leaf.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        else:
            content = repr(leaf).encode()
        found = zlib.crc32(content, found)
    return found


def accepted(inputs: Mapping[str, Any], arguments: Arguments) -> dict[str, Any]:
    """Return the entries that `forward` accepts, by name or all in its one argument; TypeError if it needs another."""
    used = {name: value for name, value in inputs.items() if arguments.names is None or name in arguments.names}
    lacking = [name for name in arguments.needed if name not in inputs]
    if not lacking:
        return used
    if is_whole(inputs, arguments):
        return dict(inputs)
    raise TypeError(
        f"the network's forward needs {', '.join(map(repr, sorted(lacking)))}, and a dict batch has "
        f"{', '.join(map(repr, inputs)) or 'nothing'} besides its target: name the entries as forward does, or "
        "override inputs_and_target(batch)"
    )


def is_whole(inputs: Mapping[str, Any], arguments: Arguments) -> bool:
    """Return whether a dict is itself the one argument of `forward`: it needs one, and no entry has its name."""
    return arguments.takes_dict and all(name not in inputs for name in arguments.needed)


def called(module: Callable[..., Any], inputs: Any, arguments: Arguments) -> Any:
    """Call a module with inputs: a dict by name or as its one argument, a tuple or list by position if it fits."""
    if is_object(inputs):
        inputs = parted_object(inputs, arguments)[0]
    if isinstance(inputs, Mapping):
        used = accepted(inputs, arguments)
        if is_whole(inputs, arguments):
            return module(used)
        if not arguments.hugging_face or torch.compiler.is_compiling():
            return module(**used)
        with _no_branches():
            return module(**used)
    if isinstance(inputs, (list, tuple)) and arguments.required <= len(inputs) <= arguments.most:
        return module(*inputs)
    return module(inputs)


@contextmanager
def _no_branches() -> Iterator[None]:
    """Within `torch.vmap`, which refuses to look at values, let a model of transformers use its mask unseen."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    if torch._C._functorch.peek_interpreter_stack() is None or not hasattr(masks, "is_tracing"):
        yield
        return
    before = masks.is_tracing
    masks.is_tracing = lambda tensor=None: True
    try:
        yield
    finally:
        masks.is_tracing = before


def trimmed(batch: Any, arguments: Arguments) -> tuple[Any, list[str]]:
    """Return a batch without what `forward` does not accept of its dict, such as texts, and the names of that."""
    is_pair = type(batch) in (list, tuple) and len(batch) == 2
    inputs = batch[0] if is_pair else batch
    if not isinstance(inputs, Mapping):
        return batch, []
    target = None if is_pair else target_name(inputs, arguments)
    kept = accepted(inputs, arguments) | ({} if target is None else {target: inputs[target]})
    unused = [name for name in inputs if name not in kept]
    used = (kept, batch[1]) if is_pair else kept
    return (used if unused else batch), unused


def unwrapped(output: Any) -> Any:
    """Return the logits of an output object, "out" of torchvision's networks for segmentation, or the output itself."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is not None:
        return logits
    if isinstance(output, Mapping):
        if any(cls.__module__.startswith("transformers.") for cls in type(output).__mro__):
            raise TypeError(
                f"the network returned a {type(output).__name__} with {', '.join(output)}, which has no logits: use a "
                "model with a head (…ForSequenceClassification), or override output_of(inputs)"
            )
        if isinstance(output.get("out"), Tensor):
            return output["out"]
    return output


def plain(batch: Any) -> Any:
    """Return a batch whose mapping, such as transformers' BatchEncoding, is a dict, which torch can take apart."""
    return dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch


def check_dtype(model: nn.Module, inputs: Any, error: RuntimeError) -> None:
    """Raise an error that names the dtypes if the network failed on inputs of another one than its parameters."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if dtype is None:
        return
    found = {leaf.dtype for leaf in pytree.tree_leaves(plain(inputs)) if isinstance(leaf, Tensor)} - {dtype}
    if torch.float64 not in found and not any(word in str(error) for word in ABOUT_DTYPES):
        return
    if "BFloat16" in str(error) and not OF_INTEGERS.search(str(error)):  # of mixed precision, and not of ids
        found = {kind for kind in found if kind.is_floating_point}
    names = [str(kind).removeprefix("torch.") for kind in sorted(found, key=str)]
    if found:
        raise TypeError(
            f"the batch's inputs are {' and '.join(names)} and the network's parameters "
            f"{str(dtype).removeprefix('torch.')}: convert the data by .float()"
            + (" (NumPy's numbers are float64), or use Trainer(precision='64-true')" if "float64" in names else "")
        ) from error


# -- inputs without targets -------------------------------------------------------------------------------------------


def batches_in(x: Any, arguments: Arguments) -> Iterable[Any]:
    """Return the batches of inputs in an argument of `predict`: one, or those of an iterable."""
    if isinstance(x, Tensor | np.ndarray | Mapping) or is_table(x) or is_object(x):
        return [x]
    if type(x).__module__.startswith(("polars.", "pyarrow.")):
        raise TypeError(f"x is a {type(x).__name__} of {type(x).__module__.split('.')[0]}: pass x.to_pandas()")
    if isinstance(x, tuple):
        nested = len(x) == 2 and isinstance(x[0], list | tuple | Mapping)
        if nested or (len(x) > 1 and len(x) == arguments.required):
            return [x]
        raise TypeError(
            f"x is a tuple of {len(x)}, which could be a batch (x, y) or several batches: pass the inputs alone, "
            "predict(x), several by their names in forward, predict({'name': …}), or a list of batches"
        )
    if not isinstance(x, Iterable):  # a data set has single examples, each of which would be read as a batch
        raise TypeError(
            f"x is a {type(x).__name__}: pass a tensor, an array, a frame, a dict, or batches, as of a DataLoader of it"
        )
    found: Iterable[Any] = x
    return found


def check_batches(batches: Any) -> None:
    """Raise TypeError unless there are several batches, as of a loader."""
    is_one = hasattr(batches, "shape") or isinstance(batches, tuple) or is_object(batches)
    if is_one or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches should be an iterable of batches, got a {type(batches).__name__}: pass a DataLoader, a list of "
            "batches, [x], or use predict(x) for one array or batch"
        )


def inputs_of(batch: Any, arguments: Arguments) -> Any:
    """Return the inputs of a batch: inputs alone, a dict, a pair (x, y), or a tuple of all that `forward` needs."""
    if isinstance(batch, Mapping):
        target = target_name(batch, arguments)
        return {name: value for name, value in batch.items() if name != target}
    if is_object(batch):
        return parted_object(batch, arguments)[0]
    if not isinstance(batch, list | tuple):
        return batch
    if len(batch) > 1 and len(batch) == arguments.required and not isinstance(batch[0], list | tuple | Mapping):
        return tuple(batch)
    return plain(batch[0])


def has_doubtful_target(batch: Any, arguments: Arguments) -> bool:
    """Return whether the second part of a pair, which is taken as the target, could be an input of `forward`."""
    pair = isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[0], Tensor | np.ndarray)
    return pair and arguments.required < 2 <= arguments.most < float("inf")


def as_tensors(inputs: Any, device: torch.device, dtype: torch.dtype, columns: InputColumns | None = None) -> Any:
    """Return inputs on a device: arrays and frames as tensors, floats in a dtype, since NumPy's are float64."""

    def convert(leaf: Any) -> Any:
        leaf = leaf if columns is None else columns.received(leaf)
        if is_object(leaf):
            return leaf.to(device)
        if _is_dataclass_object(leaf):
            own = copy.copy(leaf)
            for name, value in vars(leaf).items():
                object.__setattr__(own, name, as_tensors(value, device, dtype))  # a frozen one too
            return own
        if not isinstance(leaf, Tensor | np.ndarray | np.generic) and not is_table(leaf):
            return leaf
        tensor = as_tensor("x", leaf if not is_table(leaf) else as_frame(leaf))
        return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

    return pytree.tree_map(convert, plain(inputs))


# -- language ----------------------------------------------------------------------------------------------------------


IDS, MASK, LABELS, DECODER = "input_ids", "attention_mask", "labels", "decoder_input_ids"


def shifts_labels(network: nn.Module) -> bool:
    """Return whether a model of transformers takes a token's label as the target of the token before."""
    code = getattr(inspect.unwrap(type(network).forward), "__code__", None)
    if code is None:
        return False
    # Causal language models shift by `ForCausalLMLoss`, also transformers' default, or by code of their own.
    by_loss = "loss_function" in code.co_names and getattr(network, "loss_type", "") in (None, "ForCausalLM")
    return by_loss or any(name.startswith("shift") for name in code.co_varnames)


def next_tokens(labels: Tensor, mask: Tensor | None, ignored: int) -> Tensor:
    """Return each position's target, shape (n, T): the next token's label; `ignored` as last and where that is masked.

    >>> next_tokens(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[1, 1, 1, 0]]), -100)
    tensor([[   6,    7, -100, -100]])
    """
    found = labels.long()
    if mask is not None and mask.shape == labels.shape:
        found = found.masked_fill(mask == 0, ignored)
    return torch.cat([found[:, 1:], torch.full_like(found[:, :1], ignored)], 1)


def with_decoder_inputs(network: Any, inputs: Mapping[str, Any], labels: Any) -> dict[str, Any]:
    """Return an encoder-decoder's inputs with what its decoder reads: the target, each token one place later."""
    if DECODER in inputs or "decoder_inputs_embeds" in inputs:
        return dict(inputs)
    if labels is None:
        raise ValueError(
            f"{type(network).__name__} decodes a text of its own, and the batch has no {DECODER!r}: add it, or the "
            f"target as {LABELS!r}"
        )
    return {**inputs, DECODER: network.prepare_decoder_input_ids_from_labels(labels=labels)}


def fault_of_tokens(inputs: Any, labels: Any, ignored: int, are_shifted: bool) -> str | None:
    """Return what is wrong with the targets of a token likelihood, None if nothing is to be seen."""
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
