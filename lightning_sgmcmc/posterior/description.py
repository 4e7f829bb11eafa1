"""A network as plain data, so that a sample store can be opened later without the program that wrote it.

`describe` converts a module to nested dictionaries of names and numbers, if possible; `build` rebuilds the module from
them. Nothing is pickled: a description contains importable class names and constructor arguments.
"""

import functools
import importlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_sgmcmc.chains.stateless import state_of


class NotDescribableError(ValueError):
    """Raised if a module cannot be converted to plain data."""


def describe(value: Any) -> Any:
    """Return plain data (numbers, strings, lists, dictionaries) from which `build` makes an equal value.

    A module is described by its class and its constructor arguments: the recorded ones (`recorded_arguments`), else the
    attributes with the same names, as in torch's own layers.

    Raises:
        NotDescribableError: if the value, or a part of it, cannot be described.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: describe(item) for key, item in value.items()}}
    if isinstance(value, nn.Module):
        return _describe_module(value)
    raise NotDescribableError(f"a {type(value).__name__} cannot be described as plain data")


def build(description: Any) -> Any:
    """Rebuild the value from its description.

    Raises:
        NotDescribableError: if a named class cannot be imported, or is not a torch module.
    """
    if isinstance(description, list):
        return [build(item) for item in description]
    if not isinstance(description, dict):
        return description
    if "dict" in description:
        return {key: build(item) for key, item in description["dict"].items()}
    cls = _import(description["class"])
    if "children" in description:
        return cls(OrderedDict((name, build(child)) for name, child in description["children"]))
    return cls(**{name: build(argument) for name, argument in description["arguments"].items()})


def warn_of_other_network(description: Any, model: nn.Module) -> None:
    """Warn if a model's description differs from that of the samples' network, though all tensors have equal shapes.

    Args:
        description: a store's, or None.
        model: the model that the user has passed.
    """
    try:
        found = first_difference(description, describe(model)) if description is not None else None
    except NotDescribableError:
        return
    if found is not None:
        rank_zero_warn(
            f"The model differs from the network of the samples: {found}. Its tensors have the same shapes, but its "
            "predictions are not those of the samples' network: pass a model like the trained one."
        )


def first_difference(theirs: Any, ours: Any, where: str = "model") -> str | None:
    """Return where two descriptions differ first, in words, or None.

    Args:
        theirs: the description of the samples' network.
        ours: the description of the model.
        where: the name of this part.
    """
    if isinstance(theirs, dict) and isinstance(ours, dict) and "class" in theirs and "class" in ours:
        names = [str(part["class"]).rpartition(":")[2].rpartition(".")[2] for part in (theirs, ours)]
        if names[0] != names[1]:
            return f"{where} is {names[0]} in the samples and {names[1]} in the model"
        parts = [dict(part.get("children", ())) | part.get("arguments", {}) for part in (theirs, ours)]
        children = (first_difference(parts[0][n], parts[1][n], f"{where}.{n}") for n in parts[0] if n in parts[1])
        return next((found for found in children if found is not None), None)
    if theirs != ours:
        return f"{where} is {theirs!r} in the samples and {ours!r} in the model"
    return None


def _describe_module(module: nn.Module) -> dict[str, Any]:
    if _plain_type(module) is nn.Sequential:
        description: dict[str, Any] = {
            "class": "torch.nn.modules.container:Sequential",
            "children": [[name, describe(child)] for name, child in module._modules.items()],
        }
    else:
        description = {"class": _path_of(type(module)), "arguments": _arguments_of(module)}
        _check_rebuilds(module, description)
    return description


def _arguments_of(module: nn.Module) -> dict[str, Any]:
    recorded = getattr(module, "recorded_arguments", None)
    if recorded is not None:
        return {name: describe(value) for name, value in recorded().items()}
    arguments: dict[str, Any] = {}
    if type(module).__init__ is nn.Module.__init__ or type(module) is nn.Identity:
        return arguments
    for parameter in inspect.signature(type(module)).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise NotDescribableError(f"{type(module).__name__} takes variadic positional arguments")
        if parameter.name not in module.__dict__ and parameter.name not in module._parameters | module._modules:
            if parameter.name not in ("device", "dtype"):
                raise NotDescribableError(f"{type(module).__name__} does not store its argument '{parameter.name}'")
            continue
        value = getattr(module, parameter.name)
        if isinstance(value, nn.Parameter) or (value is None and parameter.default is True):
            value = value is not None  # such as the `bias` of a linear layer
        arguments[parameter.name] = describe(value)
    return arguments


def _check_rebuilds(module: nn.Module, description: dict[str, Any]) -> None:
    try:
        with torch.device("meta"):  # uses neither memory nor random numbers
            twin = build(description)
    except Exception as error:
        raise NotDescribableError(f"{type(module).__name__} cannot be rebuilt from its arguments: {error}") from error
    if _outline(module) != _outline(twin):
        raise NotDescribableError(f"{type(module).__name__} rebuilt from its arguments is a different network")


def _outline(module: nn.Module) -> list[Any]:
    """Return the names, shapes and types of a network's tensors; a shared parameter is named once."""
    tensors = [(name, tensor.shape) for name, tensor in state_of(module).items()]
    return [*tensors, *((name, _plain_type(m)) for name, m in module.named_modules(remove_duplicate=False))]


def _plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the module's type, or Sequential for subclasses that differ only in their constructor."""
    return nn.Sequential if type(module).forward is nn.Sequential.forward else type(module)


def _path_of(cls: type) -> str:
    if "<locals>" in cls.__qualname__:
        raise NotDescribableError(f"{cls.__qualname__} is defined inside a function")
    return f"{cls.__module__}:{cls.__qualname__}"


def _import(path: str) -> type[nn.Module]:
    module_name, _, qualified_name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in qualified_name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise NotDescribableError(f"cannot import {path}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise NotDescribableError(f"{path} is not a torch module")
    return found


def record_arguments(cls: type[nn.Module]) -> None:
    """Make `cls.__init__` store the arguments of the outermost constructor call in `_arguments`."""
    init = cls.__init__

    @functools.wraps(init)
    def recording_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if "_arguments" not in vars(self):
            # nn.Module accepts no attributes before its constructor has run.
            object.__setattr__(self, "_arguments", _named_arguments(init, self, *args, **kwargs))
        init(self, *args, **kwargs)

    cls.__init__ = recording_init  # type: ignore[method-assign]


def _named_arguments(init: Callable[..., None], *args: Any, **kwargs: Any) -> dict[str, Any]:
    signature = inspect.signature(init)
    named: dict[str, Any] = {}
    for name, value in list(signature.bind(*args, **kwargs).arguments.items())[1:]:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named
