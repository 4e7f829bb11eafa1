"""A network as plain data, so that a sample store can be opened later without the program that wrote it.

Nothing is pickled: a description contains importable class names and constructor arguments.
"""

import functools
import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from lightning_sgmcmc.chains.execution import in_turn, network_state
from lightning_sgmcmc.checks import check_names
from lightning_sgmcmc.expansion import collapse
from lightning_sgmcmc.files import MASK, is_secret
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.posterior import hugging_face
from lightning_sgmcmc.posterior.classes import NotDescribableError, check_texts, code_of, find_module_class, path_of
from lightning_sgmcmc.posterior.disk import DiskStore
from lightning_sgmcmc.posterior.predictive import check_fits
from lightning_sgmcmc.priors.state import is_prior_state
from lightning_sgmcmc.seeding import OwnDraws

MISSING = "missing"
"""Key of a network that is not described; its value is the reason."""
MOST_PARTS = 200_000
"""Largest number of submodules, parameters and functions of tensors in rebuilding a network; a BERT of 1,000 layers has
150,000."""
ON_PARTS = (register_module_module_registration_hook, register_module_parameter_registration_hook)
MOST_CHAINS = 2**20
"""Largest number of chains of a described model, each of which takes memory when it is rebuilt."""
UNDESCRIBED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of a network without a description, and of a damaged description."""


def describe(value: Any) -> Any:
    """Return plain data (numbers, strings, lists, dictionaries) from which `build` makes an equal value: for a module
    its class and its constructor arguments, the recorded ones or else the attributes of the same names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: describe(item) for key, item in value.items()}}
    if isinstance(value, nn.Module):
        # A network that torch.compile wrapped is described by itself.
        return _describe_module(collapse(getattr(value, "_orig_mod", value)))
    raise NotDescribableError(f"a {type(value).__name__} cannot be described as plain data")


def describe_model(model: nn.Module) -> tuple[Any, str | None]:
    """Return a model's description, without `net` if that alone cannot be described, or else None, and why it needs a
    network from the user (None if it does not)."""
    try:
        return describe(model), None
    except NotDescribableError as error:
        reason = str(error)
    recorded: dict[str, Any] = getattr(model, "recorded_arguments", dict)()
    if not isinstance(recorded.get("net"), nn.Module):
        return None, reason
    try:
        arguments = _described({name: value for name, value in recorded.items() if name != "net"})
        return {"class": path_of(type(model)), "arguments": arguments | {"net": {MISSING: reason}}}, reason
    except NotDescribableError as error:
        return None, str(error)


def description_for_store(model: EnergyModel) -> Any:
    """Return the description of a model's network, of its first chain; warn if it cannot be rebuilt from it."""
    with model.at_chain(0):
        description, reason = describe_model(model)
    if reason is None:
        if '"__main__:' in json.dumps(description):
            argument = "model" if type(model).__module__ == "__main__" else "net"
            rank_zero_warn(
                "The network's class is defined in the running script, so another program can only load the samples "
                f"with Posterior.load(path, {argument}=…): move the class to a module that both programs import."
            )
        try:
            with torch.device("meta"):
                build(description)
        except NotDescribableError as error:
            rank_zero_warn(f"Posterior.load(path) will ask whether you trust the folder of this run's samples: {error}")
        return description
    argument = "model" if description is None else "net"
    rank_zero_warn(
        f"The sample store cannot describe its network: {reason}. Keep the code that makes it, and load the samples "
        f"with Posterior.load(path, {argument}=…); or stop now, and write the network as a class in a module of its "
        "own that stores each constructor argument under the argument's name."
    )
    return description


def build(description: Any, net: nn.Module | None = None, trust: bool = False) -> Any:
    """Rebuild the value from its description, with `net` as the model's argument if one is given; with `trust` any
    module that the description names is imported, which runs its code."""
    hugging_face.import_named(description, trust)  # importing them makes many tensors too
    try:
        if net is not None:
            arguments = description["arguments"] if isinstance(description, dict) else {}
            if "net" not in arguments:
                raise NotDescribableError("the model that sampled has no argument net: pass model=…")
            description = {**description, "arguments": {**arguments, "net": net}}
        with _FewParts():
            return _build(description, trust)
    except NotDescribableError:
        raise
    except Exception as error:  # whatever a constructor raises for arguments that it does not know
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise NotDescribableError(f"the network cannot be rebuilt from its description ({reason})") from error


def _build(description: Any, trust: bool) -> Any:
    if isinstance(description, list):
        return [_build(item, trust) for item in description]
    if not isinstance(description, dict):
        return description
    if "dict" in description:
        return {key: _build(item, trust) for key, item in description["dict"].items()}
    if MISSING in description:
        raise NotDescribableError(str(description[MISSING]))
    if "peft" in description:
        return hugging_face.build_adapted(description, lambda network: _build(network, trust))
    if "config" in description:
        return hugging_face.build_transformer(description, trust)
    if "replaced" in description:
        return hugging_face.build_vision_model(description, lambda part: _build(part, trust))
    cls = find_module_class(description["class"], trust)
    if "children" in description:
        return cls(OrderedDict((name, _build(child, trust)) for name, child in description["children"]))
    arguments = {name: _build(argument, trust) for name, argument in description["arguments"].items()}
    _check_numbers(cls, arguments)
    count = arguments.get("num_chains")
    if isinstance(count, int) and count > MOST_CHAINS:
        raise NotDescribableError(
            f"the store has num_chains={str(count)[:20]}, more than {MOST_CHAINS:,}: pass model=…"
        )
    if not trust:
        check_texts(cls, arguments)
    return cls(**arguments)


def _check_numbers(cls: type[nn.Module], arguments: Mapping[str, Any]) -> None:
    """Raise if an argument is no number where its default is one: many layers notice that only when they are called."""
    is_torchs = cls.__module__.startswith("torch.")
    for name, value in arguments.items():
        parameter = inspect.signature(cls).parameters.get(name)
        # Integers may also be tuples, or text: a convolution's padding.
        numeric = parameter is not None and isinstance(parameter.default, bool | float)
        # Classes other than torch's may take several, such as a temperature for each chain.
        each = value if isinstance(value, list | tuple) and not is_torchs else [value]
        if numeric and not all(isinstance(number, bool | int | float | None) for number in each):
            raise NotDescribableError(f"{cls.__name__} has {name}={str(value)[:80]!r}, which should be a number")


class _FewParts(TorchFunctionMode):
    """Raises once this thread makes more than `MOST_PARTS`, since a damaged description may ask for any number."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._thread = threading.get_ident()
        self._hooks: list[Any] = []

    def __enter__(self) -> "_FewParts":
        self._hooks = [register(self._on_part) for register in ON_PARTS]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._on_part()
        return function(*args, **(kwargs or {}))

    def _on_part(self, *_: Any) -> None:
        self._count += threading.get_ident() == self._thread  # the hooks are called for modules of all threads
        if self._count > MOST_PARTS:
            raise NotDescribableError("the described network has too many parts to be rebuilt")


def description_of(model: EnergyModel | None) -> Any:
    """Return the description of a model with its first chain, or None if it has none."""
    if model is None:
        return None
    try:
        with in_turn(model), model.at_chain(0):
            return describe(model)
    except UNDESCRIBED:
        return None


def warn_of_other_network(description: Any, model: EnergyModel) -> None:
    """Warn if a model's description differs from that of the samples' network, though all tensors have equal shapes."""
    warn_of_changed_code(description, model)
    ours = description_of(model)
    if description is None or ours is None:
        return
    try:
        found = first_difference(description, ours)
    except UNDESCRIBED:
        return  # it is damaged
    if found is not None:
        rank_zero_warn(
            f"The model differs from the network of the samples: {found}. Its tensors have the same shapes, but its "
            "predictions are not those of the samples' network: pass a model like the trained one."
        )


def warn_of_changed_code(description: Any, model: nn.Module) -> None:
    """Warn if a class that a model has of the samples' network was defined anew since the fit, by a cell or an edited
    file."""
    changed: dict[str, None] = {}
    try:
        codes = list(_codes_in(description))
    except RecursionError:
        return  # it is damaged
    for path, code in codes:
        try:
            cls = find_module_class(path)
        except NotDescribableError:
            continue
        present = code_of(cls)
        is_used = any(parametrize.type_before_parametrizations(part) is cls for part in model.modules())
        if (
            is_used and code != present and code.split(" ")[0] == present.split(" ")[0]
        ):  # each version of Python has its own
            changed[path.rpartition(":")[2]] = None
    if changed:
        rank_zero_warn(
            f"The code of {' and '.join(changed)} has changed since the samples were drawn. If it computes something "
            "else, predictions are not those of the samples: define the class as it was, or fit again."
        )


def _codes_in(description: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the code of each described class that has one."""
    if isinstance(description, list):
        for item in description:
            yield from _codes_in(item)
    elif isinstance(description, dict):
        if isinstance(description.get("code"), str) and isinstance(description.get("class"), str):
            yield description["class"], description["code"]
        for item in description.values():
            yield from _codes_in(item)


def first_difference(theirs: Any, ours: Any, where: str = "model", there: str = "samples") -> str | None:
    """Return where the description of a model differs first from that of the samples' network, in words, or None."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and "class" in theirs and "class" in ours:
        names = [str(part["class"]).rpartition(":")[2].rpartition(".")[2] for part in (theirs, ours)]
        if names[0] != names[1]:
            return f"{where} is {names[0]} in the {there} and {names[1]} in the model"
        parts = [dict(part.get("children", ())) | part.get("arguments", {}) for part in (theirs, ours)]
        children = (
            first_difference(parts[0][n], parts[1][n], f"{where}.{n}", there)
            for n in parts[0]
            if n in parts[1] and n != "inplace"
        )
        return next((found for found in children if found is not None), None)
    if theirs != ours:
        return f"{where} is {theirs!r} in the {there} and {ours!r} in the model"
    return None


def _describe_module(module: nn.Module) -> dict[str, Any]:
    if _plain_type(module) is nn.Sequential:
        return {
            "class": "torch.nn.modules.container:Sequential",
            "children": [[name, describe(child)] for name, child in module._modules.items()],
        }
    home = type(module).__module__
    if home.startswith("peft.peft_model"):
        description: dict[str, Any] = hugging_face.describe_adapted(module, describe)
    elif home.startswith(hugging_face.PACKAGE):
        description = hugging_face.describe_transformer(module)
    elif home.startswith(hugging_face.TORCHVISION):
        description = hugging_face.describe_vision_model(module, describe)
    elif home.startswith(hugging_face.TIMM):
        description = hugging_face.describe_timm(module, describe)
    else:
        own = parametrize.type_before_parametrizations(module)
        description = {"class": path_of(own), "arguments": _arguments_of(module)}
        description |= {"code": code} if (code := code_of(own)) else {}
    _check_rebuilds(module, description)
    return description


def _arguments_of(module: nn.Module) -> dict[str, Any]:
    recorded = getattr(module, "recorded_arguments", None)
    if recorded is not None:
        return _described(recorded())
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


def _described(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return described arguments; a secret's text is replaced, since no network depends on it."""
    hidden = {name for name, value in arguments.items() if isinstance(value, str) and is_secret(name)}
    return {name: MASK if name in hidden else describe(value) for name, value in arguments.items()}


def _check_rebuilds(module: nn.Module, description: dict[str, Any]) -> None:
    try:
        with torch.device("meta"):  # uses neither memory nor random numbers
            twin = build(description, trust=True)  # this program has just made it
    except Exception as error:
        raise NotDescribableError(f"{type(module).__name__} cannot be rebuilt from its arguments: {error}") from error
    if _outline(module) != _outline(twin):
        raise NotDescribableError(f"{type(module).__name__} rebuilt from its arguments is a different network")


def _outline(module: nn.Module) -> list[Any]:
    """Return the names, shapes and types of a network's tensors; a shared parameter is named once."""
    tensors = [(name, tensor.shape) for name, tensor in network_state(module).items()]
    parts = [(name, _plain_type(m)) for name, m in module.named_modules(remove_duplicate=False)]
    return [*tensors, *(part for part in parts if not is_prior_state(part[0]))]


def _plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the module's type, or Sequential for subclasses that differ only in their constructor."""
    own: Any = parametrize.type_before_parametrizations(module)  # each parametrized module has a class of its own
    return nn.Sequential if own.forward is nn.Sequential.forward else own


def record_arguments(cls: type[nn.Module]) -> None:
    """Make `cls.__init__` store the arguments of the outermost constructor call in `_arguments`."""
    init = cls.__init__
    signature = inspect.signature(init)
    parameters = signature.parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @functools.wraps(init)
    def recording_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not takes_any:
            check_names(cls.__name__, kwargs, parameters)
        if "_arguments" not in vars(self):
            # nn.Module accepts no attributes before its constructor has run.
            named: dict[str, Any] = {}
            for name, value in list(signature.bind(self, *args, **kwargs).arguments.items())[1:]:
                is_rest = parameters[name].kind is inspect.Parameter.VAR_KEYWORD
                named |= value if is_rest else {name: value}
            object.__setattr__(self, "_arguments", named)
        init(self, *args, **kwargs)

    # Lightning's `load_from_checkpoint` reads the signature without following wrappers.
    recording_init.__signature__ = signature  # type: ignore[attr-defined]
    cls.__init__ = recording_init  # type: ignore[method-assign]


# -- the model of a store ----------------------------------------------------------------------------------------------


def model_of(store: DiskStore, net: nn.Module | None = None, trust: bool = False) -> tuple[EnergyModel | None, str]:
    """Return the model that a store describes, or None and the reason."""
    description = store.model_description
    if description is None:
        if net is not None:
            raise ValueError(
                f"net={type(net).__name__}(…) is not enough: {store.path} does not describe the likelihood; pass "
                "model=BayesianModule(net=…, likelihood=…)"
            )
        return None, "the store has no description of its network"
    try:
        if net is None:
            _check_outline(store, trust)
        with OwnDraws(0, torch.device("cpu")):  # its initial weights are not used
            model = _model(description, net, trust)
    except ValueError as error:
        if net is not None:
            raise ValueError(f"net={type(net).__name__}(…) cannot be used: {error}{store.written_by_newer}") from error
        return None, f"{error}{store.written_by_newer}"
    if net is not None and len(store) > 0 and not store.skips_damaged:
        check_fits(store[0], model)
    warn_of_changed_code(description, model)
    return model, ""


def _check_outline(store: DiskStore, trust: bool) -> None:
    """Raise ValueError unless the described network, of any size if it is damaged, fits a sample; allocate nothing."""
    with torch.device("meta"):
        model = _model(store.model_description, None, trust)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    odd: set[str] = set()
    for index in range(len(store)):
        try:
            common = {name: shape for name, shape in store.shared_shapes().items() if name in expected}
            found = store.shapes(index) | common
        except ValueError:
            continue  # damaged; the next one decides
        if found == expected:
            return
        odd = {name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)}
    if len(store) == 0:
        raise NotDescribableError("the store has no sample to compare its description with")
    raise NotDescribableError(
        f"its description is of another network than its samples: '{min(odd)}' differs"
        if odd
        else "none of its samples can be read"
    )


def _model(description: Any, net: nn.Module | None, trust: bool) -> EnergyModel:
    model = build(description, net, trust)
    if not isinstance(model, EnergyModel):
        raise NotDescribableError(f"the store describes a {type(model).__name__}, which is not a BayesianModule")
    return model
