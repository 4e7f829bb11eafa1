"""Tensors that are given, as a state dict or in a file: a prior's centre, and the weights of a network."""

import warnings
import zlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_sgmcmc.priors.state import without_row
from lightning_sgmcmc.tensors import first_not_finite

PREFIXES = ("", "net.")
"""Beginnings of a module's parameter names that a centre may leave out: a network's own names begin after "net."."""


COPIES = ("state_dict_ema", "ema_state_dict", "ema", "model_ema", "ema_model", "averaged_state_dict")
"""Names of a second copy of the weights in a checkpoint."""
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What torch.compile, activation checkpointing and FSDP put into the names of parameters."""


class GivenCenter:
    """The tensors on which a prior is centred, by the names of the parameters: from a state dict, or the path of a
    checkpoint of Lightning's, a state dict by `torch.save`, or a safetensors file, such as a sample's."""

    def __init__(self, source: Any) -> None:
        named = _read(Path(source)) if isinstance(source, str | Path) else source
        if not isinstance(named, Mapping) or not all(isinstance(value, Tensor) for value in named.values()):
            raise TypeError(
                "the prior's center must be 'start', a state dict (tensors by parameter name) or the path of a file "
                f"with one, got {_shown(source)}"
            )
        if not named:
            raise ValueError(f"the prior's center has no tensors: {_shown(source)} is empty")
        self._tensors = {
            unwrapped(name): tensor.detach().to("cpu", copy=True)
            for name, tensor in named.items()
            if tensor.is_floating_point()
        }
        self._beginning: str | None = None
        """What stands before all names, such as "model.", where they are not a module's or a network's."""
        for name, tensor in self._tensors.items():
            if not tensor.isfinite().all():
                raise ValueError(f"the prior's center has NaN or infinite numbers in '{name}': pass a sound state")

    def tensor_for(self, name: str, shape: torch.Size, held: int | None = None) -> Tensor:
        """Return the centre of a parameter; `held` is the row that the shape lacks, and the result too, if any."""
        known = [unwrapped(name.removeprefix(prefix)) for prefix in PREFIXES if name.startswith(prefix)]
        found = next((self._tensors[own] for own in known if own in self._tensors), None)
        if found is None and len(known) > 1:
            found = self._within_part(known[-1], shape if held is None else None)
        if found is None:
            raise ValueError(
                f"the prior's center has no tensor for the parameter '{name}' (it has "
                f"{', '.join(list(self._tensors)[:4])}, …): add it, or name the parameters with a centre, "
                "centered=[pattern, …]; the others have centre 0"
            )
        if held is not None:
            shape = torch.Size([shape[0] + 1, *shape[1:]])
        if found.shape != shape:
            stacked = " (stacked chains? pass those of one chain)" if found.shape[1:] == shape else ""
            raise ValueError(
                f"the prior's center has shape {tuple(found.shape)} for '{name}', and the parameter has "
                f"{tuple(shape)}{stacked}: pass a tensor of its shape, or leave the parameter out of centered=[…]"
            )
        return found if held is None else without_row(found, held)

    def _within_part(self, name: str, shape: torch.Size | None) -> Tensor | None:
        """Return the tensor of a network's parameter whose name begins with that of a part, the same for all."""
        if self._beginning is None:
            fitting = [n for n, t in self._tensors.items() if n.endswith(f".{name}") and shape in (None, t.shape)]
            self._beginning = fitting[0].removesuffix(name) if len(fitting) == 1 else None
        return None if self._beginning is None else self._tensors.get(f"{self._beginning}{name}")

    def __repr__(self) -> str:
        # Of the content and not of the path: a run resumes from a moved file, and not with another centre.
        checksum = 0
        for name, tensor in sorted(self._tensors.items()):
            checksum = zlib.crc32(name.encode(), checksum)
            checksum = zlib.crc32(tensor.double().contiguous().numpy().tobytes(), checksum)
        return f"<{len(self._tensors)} tensors, crc32 {checksum:08x}>"


def is_centered(name: str, patterns: tuple[str, ...] | None) -> bool:
    """Return whether a parameter has a centre; with None for the patterns all have."""
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(
            f"the prior's center={str(path)!r} is no file: pass the path of a checkpoint or safetensors file"
        )
    content = read_tensors(path, f"the prior's center={str(path)!r}")
    if not isinstance(content, Mapping):
        return content
    if any(name.startswith("parameter.") for name in content):  # the file of a posterior sample
        return {n.removeprefix("parameter."): t for n, t in content.items() if n.startswith("parameter.")}
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}


def read_tensors(path: Path, what: str) -> Any:
    """Return the state dict in a file of tensors, or whatever plain data it holds instead."""
    try:
        safe = path.suffix == ".safetensors"
        content: Any = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:100]
        raise ValueError(f"{what} cannot be read ({reason}): pass another file") from error
    except Exception as error:  # pickle's own, among them that of objects which are not data
        raise ValueError(
            f"{what} holds more than tensors and plain data, which is not read: save network.state_dict() alone, or "
            "pass torch.load(path, weights_only=False)['state_dict'] in its place if you trust the file"
        ) from error
    try:
        return weights_in(content)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from error


def weights_in(content: Any) -> Any:
    """Return the state dict in a training loop's checkpoint, whatever it is called there, or else the content itself.

    >>> sorted(weights_in({"epoch": 3, "model_state_dict": {"weight": torch.zeros(2)}}))
    ['weight']
    """
    if not isinstance(content, Mapping):
        return content
    found = [name for name, part in content.items() if _is_state(part) and not str(name).endswith("_extra_state")]
    main = content.get("state_dict")
    if isinstance(main, Mapping):
        # Lightning's averages of weights are the main ones; another copy, such as an exponential average, may be meant.
        found = [n for n in found if n in ("state_dict", *COPIES) and not content[n].keys().isdisjoint(main)]
        if len(found) < 2:
            return main
    if len(found) > 1:
        raise ValueError(
            f"holds weights {len(found)} times, as {', '.join(map(repr, found))}: pass one of them, "
            f"torch.load(path)[{found[0]!r}]"
        )
    return content[found[0]] if found else content


def weights_of(
    network: nn.Module, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str
) -> dict[str, Any]:
    """Return the tensors of a network in a state dict, by the network's names, which may begin there with those of a
    part ("model.") or have those of torch's wrappers in them.

    Args:
        network: the network.
        own: its tensors by name, one name for each, without the buffers that it makes itself.
        tensors: the state dict.
        what: names it in messages.
    """
    given = {unwrapped(name): tensor for name, tensor in tensors.items()}
    names = {name: [unwrapped(name)] for name in own}
    of_id = {id(tensor): name for name, tensor in own.items()}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) in of_id and unwrapped(name) not in names[of_id[id(tensor)]]:
            names[of_id[id(tensor)]].append(unwrapped(name))  # of a tensor that layers share
    needed = [name for name, tensor in own.items() if tensor.dim() or tensor.is_floating_point()]  # counts may lack
    prefix = _prefix_of(given, {name: own[name] for name in needed}, names, what, network)
    found: dict[str, Tensor] = {}
    for name, tensor in own.items():
        there = [prefix + one for one in names[name] if prefix + one in given]
        if not there:
            continue
        found[name] = given[there[0]].detach()
        other = next((one for one in there if not _are_equal(given[one], given[there[0]])), None)
        if other is not None:
            raise ValueError(
                f"{what} has other values as {there[0]!r} than as {other!r}, which are one tensor in this "
                f"{type(network).__name__}: pass a network whose layers share what those of the trained one shared"
            )
        if found[name].shape != tensor.shape:
            raise ValueError(
                f"{what} has {there[0]!r} of shape {tuple(found[name].shape)}, and the network's is "
                f"{tuple(tensor.shape)}: give the network the same layers, and replace its head afterwards"
            )
    bad = first_not_finite(found.items())
    if bad is not None:
        raise ValueError(f"{what} holds NaN or infinite numbers in {bad!r}: pass other weights")
    _warn_of_others(network, given, prefix, {prefix + one for own_names in names.values() for one in own_names}, what)
    return found


def unwrapped(name: str) -> str:
    """Return a parameter's name without those of torch.compile, activation checkpointing and FSDP.

    >>> unwrapped("model._orig_mod.0.weight")
    'model.0.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _prefix_of(
    given: Mapping[str, Tensor], needed: Mapping[str, Tensor], names: Mapping[str, list[str]], what: str, net: nn.Module
) -> str:
    """Return what stands before the network's names in a state: "", or the name of a part, such as "model."."""
    firsts = names[next(iter(needed))]
    prefixes = [n.removesuffix(one) for n in given for one in firsts if n == one or n.endswith(f".{one}")]
    prefixes = list(dict.fromkeys(prefixes))

    def at(prefix: str, name: str) -> Tensor | None:
        return next((given[prefix + one] for one in names[name] if prefix + one in given), None)

    named = [p for p in prefixes if all(at(p, name) is not None for name in needed)]
    shapes = {name: tensor.shape for name, tensor in needed.items()}
    fitting = [p for p in named if all(getattr(at(p, n), "shape", None) == shape for n, shape in shapes.items())]
    fitting = fitting or named[:1]
    if fitting and all(_are_equal(at(p, n), at(fitting[0], n)) for p in fitting[1:] for n in needed):
        return fitting[0]
    if fitting:
        raise ValueError(
            f"{what} holds the network {len(fitting)} times, under {', '.join(map(repr, fitting))}: pass the state "
            f"dict of one of them, {{name: t for name, t in state.items() if name.startswith({fitting[-1]!r})}}"
        )
    likely = max(prefixes, key=lambda p: sum(at(p, name) is not None for name in needed), default="")
    missing = next(name for name in needed if at(likely, name) is None)
    raise ValueError(
        f"{what} has no {likely + names[missing][0]!r} (it has {', '.join(list(given)[:4])}, …): pass the weights of a "
        f"network like this {type(net).__name__}, or load a part of them before, network.load_state_dict(state, "
        "strict=False)"
    )


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _warn_of_others(network: nn.Module, given: Mapping[str, Tensor], prefix: str, known: set[str], what: str) -> None:
    """Warn of weights beside the network's, as of one with more layers."""
    known = known | {prefix + unwrapped(name) for name, _ in network.named_buffers()}
    left = [n for n, t in given.items() if n.startswith(prefix) and n not in known and t.is_floating_point()]
    if left:
        some = ", ".join(left[:3]) + (", …" if len(left) > 3 else "")
        warnings.warn(
            f"{what} has {len(left)} tensors that this {type(network).__name__} has not ({some}), which are left out: "
            "check that it is the network that was trained.",
            stacklevel=2,
        )


def _is_state(part: Any) -> bool:
    """Return whether something is a mapping of named tensors, which no optimizer's or schedule's state is."""
    named = isinstance(part, Mapping) and bool(part)
    return named and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in part.items())


def _shown(source: Any) -> str:
    if not isinstance(source, Mapping):
        return repr(source) if isinstance(source, str | int | float) else f"a {type(source).__name__}"
    odd = next((f"{name!r}: {type(v).__name__}" for name, v in source.items() if not isinstance(v, Tensor)), "")
    return f"a mapping with {odd}" if odd else "the mapping"
