"""The weights of a trained network, from a checkpoint or a folder of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_sgmcmc.files import check_regular


def load_weights(network: nn.Module, source: "Mapping[str, Any] | str | Path") -> None:
    """Copy the weights of a checkpoint into a network.

    A Lightning checkpoint names them after the module's attribute ("model.fc.weight"); such a common beginning of the
    names is left out.

    Args:
        network: the network, changed in place.
        source: a state dict, or the path of one: a Lightning checkpoint, a file by `torch.save`, or a safetensors file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it holds no state dict, or that of another network.
    """
    what = "checkpoint" if isinstance(source, Mapping) else f"checkpoint={str(source)!r}"
    state = _tensors(source, what)
    names = list(dict(network.named_parameters()))
    if not names:
        raise ValueError(f"{type(network).__name__} has no parameters, so {what} cannot be loaded into it")
    beginnings = sorted({key[: -len(names[0])] for key in state if key.endswith(names[0])}, key=len)
    beginning = next((b for b in beginnings if all(b + name in state for name in names)), None)
    if beginning is None:
        missing = next(name for name in names if (beginnings[0] if beginnings else "") + name not in state)
        raise ValueError(
            f"{what} has no '{missing}' (it has {', '.join(list(state)[:4])}, …): pass the checkpoint of a network "
            f"like this {type(network).__name__}"
        )
    own = {key.removeprefix(beginning): tensor for key, tensor in state.items() if key.startswith(beginning)}
    known = network.state_dict()
    for name, tensor in own.items():
        if name in known and known[name].shape != tensor.shape:
            raise ValueError(
                f"{what} has '{name}' of shape {tuple(tensor.shape)}, and the network's is {tuple(known[name].shape)}: "
                "give the network the same layers, and replace its head afterwards"
            )
    network.load_state_dict({name: tensor for name, tensor in own.items() if name in known}, strict=False)


def _tensors(source: "Mapping[str, Any] | str | Path", what: str) -> dict[str, Tensor]:
    content: Any = source
    if not isinstance(source, Mapping):
        path = Path(source).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"{what} does not exist: pass the path of a checkpoint or state dict")
        check_regular(path)
        try:
            safe = path.suffix == ".safetensors"
            content = load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
        except (SafetensorError, OSError, EOFError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{what} cannot be read ({str(error).splitlines()[0][:100]}): pass another file"
            ) from error
        except Exception as error:  # pickle's own, among them that of objects which are not data
            raise ValueError(
                f"{what} holds more than tensors and plain data, which is not read: save network.state_dict() alone"
            ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    found = {str(n): t for n, t in content.items() if isinstance(t, Tensor)} if isinstance(content, Mapping) else {}
    if not found:
        raise ValueError(f"{what} holds no state dict, that is tensors by name: pass one, or a file with one")
    return found


def network_in(folder: Path) -> nn.Module:
    """Return the model of transformers in a folder that its `save_pretrained` wrote.

    Raises:
        ValueError: if the path is no such folder.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"network={str(folder)!r} is no folder of a transformers model, and weights alone do not describe a "
            "network: pass the network, and checkpoint=… for its weights"
        )
    transformers = required("transformers")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    name = next(iter(config.architectures or ["AutoModel"]))
    network: nn.Module = getattr(transformers, name).from_pretrained(folder, local_files_only=True)
    return network


def required(package: str) -> Any:
    """Return an optional package.

    Raises:
        ImportError: if it is not installed, with what to install.
    """
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"this needs {package}: pip install lightning-sgmcmc[lora]") from error
