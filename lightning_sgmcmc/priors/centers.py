"""Centres of a prior: tensors that are given, as a state dict or in a file."""

import zlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lightning_sgmcmc.priors.state import without_row

PREFIXES = ("", "net.")
"""Beginnings of a module's parameter names that a centre may leave out: a network's own names begin after "net."."""


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
            name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items() if tensor.is_floating_point()
        }
        for name, tensor in self._tensors.items():
            if not tensor.isfinite().all():
                raise ValueError(f"the prior's center has NaN or infinite numbers in '{name}': pass a sound state")

    def tensor_for(self, name: str, shape: torch.Size, held: int | None = None) -> Tensor:
        """Return the centre of a parameter; `held` is the row that the shape lacks, and the result too, if any."""
        known = [name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)]
        found = next((self._tensors[own] for own in known if own in self._tensors), None)
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
    if isinstance(content.get("state_dict"), Mapping):
        return content["state_dict"]
    found = [name for name, part in content.items() if _is_state(part) and not str(name).endswith("_extra_state")]
    if len(found) > 1:
        raise ValueError(
            f"holds weights {len(found)} times, as {', '.join(map(repr, found))}: pass one of them, "
            f"torch.load(path)[{found[0]!r}]"
        )
    return content[found[0]] if found else content


def _is_state(part: Any) -> bool:
    """Return whether something is a mapping of named tensors, which no optimizer's or schedule's state is."""
    named = isinstance(part, Mapping) and bool(part)
    return named and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in part.items())


def _shown(source: Any) -> str:
    if not isinstance(source, Mapping):
        return repr(source) if isinstance(source, str | int | float) else f"a {type(source).__name__}"
    odd = next((f"{name!r}: {type(v).__name__}" for name, v in source.items() if not isinstance(v, Tensor)), "")
    return f"a mapping with {odd}" if odd else "the mapping"
