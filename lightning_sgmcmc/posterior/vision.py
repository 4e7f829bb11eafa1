"""torchvision's models as plain data: the function that builds them, and the parts that were replaced since."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_sgmcmc.posterior.classes import NotDescribableError, find, path_of

PACKAGE = "torchvision.models."
OPTIONS = ("aux_logits", "aux_loss", "image_size", "num_classes", "transform_input")
"""Arguments of builders that change a network, and that the network stores."""
NO_DOWNLOAD = {"weights": None, "weights_backbone": None}
Make = Callable[..., nn.Module]


def is_vision_model(module: nn.Module) -> bool:
    """Return whether a network's class is one of torchvision's models."""
    return type(module).__module__.startswith(PACKAGE)


def describe_by_builder(module: nn.Module) -> tuple[str, dict[str, Any], dict[str, nn.Module]]:
    """Return a builder's name, its arguments, and the parts of the network that differ from what it builds.

    Raises:
        NotDescribableError: if no builder of torchvision makes such a network.
    """
    options = {name: vars(module)[name] for name in OPTIONS if name in vars(module)}
    best: tuple[str, dict[str, Any], dict[str, nn.Module]] | None = None
    for builder in _builders():
        if builder.__module__ != type(module).__module__:
            continue
        for arguments in ({}, options):
            try:
                with torch.device("meta"):
                    twin = build_by(builder, arguments)
            except Exception:
                continue  # another architecture's builder, or an option that it does not take
            changed = _changed(module, twin)
            if "" not in changed and (best is None or len(changed) < len(best[2])):
                best = path_of(builder), arguments, changed
            if not changed:
                return path_of(builder), arguments, changed
    if best is None:
        raise NotDescribableError(f"no builder of torchvision makes this {type(module).__name__}")
    return best


def find_builder(path: Any) -> Make:
    """Return torchvision's builder of this name.

    Raises:
        NotDescribableError: if torchvision has no builder of this name.
    """
    found = find(path)
    if not any(found is builder for builder in _builders()):
        raise NotDescribableError(f"{path} is not one of torchvision's models")
    return found


def build_by(builder: Make, arguments: dict[str, Any]) -> nn.Module:
    """Return the builder's network with untrained weights; nothing is downloaded.

    Raises:
        NotDescribableError: for another argument than those of `OPTIONS`.
    """
    if not arguments.keys() <= set(OPTIONS):
        raise NotDescribableError(f"{builder.__name__} takes only {', '.join(OPTIONS)}, got {', '.join(arguments)}")
    known = builder.__kwdefaults__ or {}
    return builder(**{name: value for name, value in NO_DOWNLOAD.items() if name in known}, **arguments)


def replace_part(network: nn.Module, name: str, part: nn.Module) -> None:
    """Replace the submodule of this name.

    Raises:
        NotDescribableError: if the network has none.
    """
    parent, _, last = name.rpartition(".")
    owner = dict(network.named_modules()).get(parent)
    if owner is None or last not in owner._modules:
        raise NotDescribableError(f"{type(network).__name__} has no part {name[:80]!r}")
    owner._modules[last] = part


def _builders() -> Iterator[Any]:
    from torchvision.models import get_model_builder, list_models

    return map(get_model_builder, list_models())


def _changed(module: nn.Module, twin: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Return the smallest parts of a module that differ from its twin's, by name; "" is the module itself."""
    if _facts(module) != _facts(twin):
        return {name: module}
    changed: dict[str, nn.Module] = {}
    for key, child in module._modules.items():
        other = twin._modules[key]
        if child is not None and other is not None:
            changed |= _changed(child, other, f"{name}.{key}" if name else key)
    return changed


def _facts(module: nn.Module) -> tuple[Any, ...]:
    """Return what distinguishes a layer from others, without its children and its tensors' values."""
    plain = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | tuple) and name != "training"
    }
    tensors = {
        name: None if tensor is None else (tensor.shape, tensor.dtype)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    }
    children = [(name, child is None) for name, child in module._modules.items()]
    return type(module), module.extra_repr(), plain, tensors, children
