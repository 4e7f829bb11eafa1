"""Models of transformers, and peft's LoRA on any network, as plain data: their classes and configurations.

A store can come from anywhere: only classes of `transformers.models` are named, from their configuration alone, and
nothing is downloaded.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_sgmcmc.chains.stateless import state_of
from lightning_sgmcmc.posterior.classes import NotDescribableError, find, path_of

PACKAGE = "transformers.models."
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Implementations of attention that a store may name: others are code that transformers downloads."""
LEFT_OUT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_commit_hash",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "custom_pipelines",
        "experts_implementation",
        "quantization_config",
    }
)
"""Entries of a configuration that name code or files to download."""
LORA = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "fan_in_fan_out",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "lora_dropout",
        "modules_to_save",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_dora",
        "use_rslora",
    }
)
"""Arguments of peft's LoraConfig that change the network; others choose its first values, and may read files."""
Build = Callable[[Any], Any]


def is_transformer(module: nn.Module) -> bool:
    """Return whether a network's class is one of transformers' models."""
    return type(module).__module__.startswith(PACKAGE)


def is_adapted(module: nn.Module) -> bool:
    """Return whether a network is a model of peft."""
    return type(module).__module__.startswith("peft.peft_model")


# -- models of transformers -------------------------------------------------------------------------------------------


def describe_transformer(module: Any) -> dict[str, Any]:
    """Return a model's class and configuration.

    Raises:
        NotDescribableError: if its configuration is of another package, or names code to download.
    """
    config = module.config
    if not type(config).__module__.startswith(PACKAGE):
        raise NotDescribableError(f"the configuration {type(config).__name__} is not one of transformers'")
    attention = getattr(config, "_attn_implementation", None)
    if attention is not None and attention not in ATTENTION:
        raise NotDescribableError(f"its attention {attention!r} is not part of transformers")
    values = _sound(json.loads(config.to_json_string(use_diff=False)))
    return {
        "class": path_of(type(module)),
        "config": path_of(type(config)),
        "attention": attention,
        "arguments": {"dict": values},
    }


def build_transformer(description: Mapping[str, Any]) -> nn.Module:
    """Return the described model with untrained weights.

    Raises:
        NotDescribableError: if the named classes are not a model of transformers and its configuration.
    """
    from transformers import PretrainedConfig, PreTrainedModel

    cls, kind = (find(description[name], packages=(PACKAGE[:-1],)) for name in ("class", "config"))
    for found, base, place in ((cls, PreTrainedModel, "class"), (kind, PretrainedConfig, "config")):
        below = str(description[place]).startswith(PACKAGE)
        if not (below and isinstance(found, type) and issubclass(found, base)):
            raise NotDescribableError(f"{str(description[place])[:80]} is not a {base.__name__} of transformers")
    attention = description["attention"]
    if attention is not None and attention not in ATTENTION:
        raise NotDescribableError(f"the attention {str(attention)[:80]!r} is not part of transformers")
    config = kind.from_dict(_sound(description["arguments"]["dict"]))
    if attention is not None:
        config._attn_implementation = attention
    return cls(config)


def _sound(values: Any) -> Any:
    """Return a configuration without the entries that name code or files.

    Raises:
        NotDescribableError: if it names a network to download.
    """
    if isinstance(values, list):
        return [_sound(value) for value in values]
    if not isinstance(values, dict):
        return values
    if isinstance(values.get("backbone"), str):
        raise NotDescribableError(f"its backbone {values['backbone'][:80]!r} would be downloaded")
    kept = {name: _sound(value) for name, value in values.items() if name not in LEFT_OUT}
    return kept | ({"use_pretrained_backbone": False} if "use_pretrained_backbone" in kept else {})


# -- LoRA -------------------------------------------------------------------------------------------------------------


def describe_adapted(module: Any, describe: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a LoRA model's adapter and the description of the network below.

    Args:
        module: a model of peft.
        describe: describes the network below.

    Raises:
        NotDescribableError: if it has several adapters, or another kind than LoRA.
    """
    kinds = [type(config).__name__ for config in module.peft_config.values()]
    if kinds != ["LoraConfig"]:
        raise NotDescribableError(f"its adapters are {', '.join(kinds) or 'none'}, and one LoraConfig is supported")
    ((name, config),) = module.peft_config.items()
    values = json.loads(json.dumps(config.to_dict(), default=_plain))
    # The network below with its own layers instead of the adapted ones; a copy without memory for its tensors.
    memo: dict[int, Any] = {id(tensor): _without_memory(tensor) for tensor in state_of(module).values()}
    below = copy.deepcopy(module, memo).unload()
    return {
        "peft": "LoraConfig",
        "adapter": name,
        "arguments": {"dict": {name: values[name] for name in LORA if values.get(name) is not None}},
        "network": describe(below),
    }


def build_adapted(description: Mapping[str, Any], build: Build) -> nn.Module:
    """Return the described network with its adapter, untrained.

    Args:
        description: what `describe_adapted` returned.
        build: builds the network below.

    Raises:
        NotDescribableError: for another adapter than LoRA, or other arguments than those of `LORA`.
    """
    from peft import LoraConfig, get_peft_model

    arguments = description["arguments"]["dict"]
    if description["peft"] != "LoraConfig" or not arguments.keys() <= LORA:
        raise NotDescribableError(f"only LoRA's arguments {', '.join(sorted(LORA))} are supported")
    network = build(description["network"])
    return get_peft_model(network, LoraConfig(**arguments), adapter_name=str(description["adapter"]))


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", None)


def _without_memory(tensor: Tensor) -> Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def import_named(description: Any) -> None:
    """Import the packages that a description needs, if they are installed.

    Raises:
        NotDescribableError: if one is not.
    """
    for part in _parts(description):
        package = "peft" if "peft" in part else "transformers"
        try:
            if package == "peft":
                import peft  # noqa: F401
            else:
                find(part["class"], packages=(PACKAGE[:-1],))
        except ImportError as error:
            raise NotDescribableError(
                f"the network needs {package} ({error}): pip install lightning-sgmcmc[lora]"
            ) from error


def _parts(description: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(description, list):
        for item in description:
            yield from _parts(item)
    if isinstance(description, Mapping):
        if "peft" in description or ("config" in description and "class" in description):
            yield description
        for item in description.values():
            yield from _parts(item)
