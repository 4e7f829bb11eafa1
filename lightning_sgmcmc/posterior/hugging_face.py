"""Models of transformers, peft's LoRA on any network, and torchvision's and timm's models, as plain data.

A store can come from anywhere, so no text of it reaches a loader, and nothing is downloaded.
"""

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_sgmcmc.chains.execution import state_of
from lightning_sgmcmc.plain import parts_in
from lightning_sgmcmc.posterior.classes import TRUST, NotDescribableError, find, path_of

PACKAGE = "transformers.models."
_FAMILIES = """
albert audio_spectrogram_transformer bart beit bert bert_generation big_bird biogpt bit blenderbot blenderbot_small
bloom camembert canine clip codegen cohere convbert convnext convnextv2 ctrl cvt deberta deberta_v2 deit dinov2
distilbert efficientnet electra ernie falcon fnet funnel gemma gemma2 glm gpt2 gpt_bigcode gpt_neo gpt_neox gptj
granite ibert imagegpt layoutlm led levit llama longformer longt5 luke m2m_100 marian mbart megatron_bert mistral
mixtral mobilebert mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 modernbert modernbert_decoder mpnet mpt mt5
nomic_bert nystromformer olmo olmo2 openai opt pegasus persimmon phi phi3 poolformer pvt qwen2 qwen2_moe qwen3 regnet
rembert resnet roberta roberta_prelayernorm roc_bert roformer segformer siglip smollm3 splinter squeezebert stablelm
starcoder2 swiftformer swin swinv2 switch_transformers t5 timesformer umt5 videomae vit vit_mae vit_msn vivit whisper
xglm xlm xlm_roberta xlm_roberta_xl xlnet xmod yolos
"""
FAMILIES = frozenset(_FAMILIES.split())
"""Architectures that a store may name: none of them builds another library's network, or one that a text names."""
MODULE = re.compile(r"transformers\.models\.(\w+)\.(?:modeling|configuration)_\w+:\w+")
MOST_LAYERS = 1_000
"""Largest number of layers in a configuration: the deepest published networks have a few hundred."""
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Implementations of attention that a store may name: others are code that transformers downloads."""
_LEFT_OUT = """
_attn_implementation _attn_implementation_internal _commit_hash _experts_implementation
_experts_implementation_internal _name_or_path attn_implementation auto_map custom_pipelines experts_implementation
quantization_config task_specific_params tokenizer_class
"""
LEFT_OUT = frozenset(_LEFT_OUT.split())
"""Entries of a configuration that name code or files to download, or that no network reads."""
LABELS = ("id2label", "label2id")
"""Entries whose texts are a user's own names."""
SEPARATORS = re.compile(r"[/\\:]")
"""In the name of a file, of a network on a hub, or of a protocol; no setting of a network has one."""
_LORA = """
alpha_pattern bias exclude_modules fan_in_fan_out layers_pattern layers_to_transform lora_alpha lora_bias lora_dropout
modules_to_save r rank_pattern target_modules target_parameters task_type use_dora use_rslora
"""
LORA = frozenset(_LORA.split())
"""Arguments of peft's LoraConfig that change the network; others choose its first values, and may read files."""
REPEATED = re.compile(r"\)[*+{]")
QUANTIFIERS = re.compile(r"[*+{]")
MOST_QUANTIFIERS = 4
"""Repeated groups take exponential time on some names, and k repetitions a name's length to the power k."""
Build = Callable[[Any], Any]


# -- models of transformers -------------------------------------------------------------------------------------------


def describe_transformer(module: Any) -> dict[str, Any]:
    """Return a model's class and configuration."""
    config = module.config
    if not type(config).__module__.startswith(PACKAGE):
        raise NotDescribableError(f"the configuration {type(config).__name__} is not one of transformers'")
    attention = getattr(config, "_attn_implementation", None)
    if attention is not None and attention not in ATTENTION:
        raise NotDescribableError(f"its attention {attention!r} is not part of transformers")
    values = sound_values(json.loads(config.to_json_string(use_diff=False)))
    named = {"class": path_of(type(module)), "config": path_of(type(config))}
    return {**named, "attention": attention, "arguments": {"dict": values}}


def check_family(description: Mapping[str, Any]) -> None:
    """Raise unless a described model is of `FAMILIES`, and so are the models in its configuration."""
    for place in ("class", "config"):
        path = str(description[place])
        named = MODULE.fullmatch(path)
        if path.startswith(PACKAGE) and (named is None or named[1] not in FAMILIES):
            raise NotDescribableError(
                f"{path[:80]} is not among the architectures of transformers that build from numbers alone, as BERT, "
                f"GPT-2, Llama and ViT do: {TRUST}"
            )
    configurations = _mappings(description["arguments"]["dict"], left_out=LABELS)
    for kind in (str(one["model_type"]) for one in configurations if "model_type" in one):
        # "clip_text_model" is a part of "clip", and the folder of "xlm-roberta" is xlm_roberta.
        folder = kind.replace("-", "_").removesuffix("_gpt")
        if not any(folder == family or folder.startswith(f"{family}_") for family in FAMILIES):
            raise NotDescribableError(
                f"its configuration has a network of type {kind[:80]!r}, which is not among the architectures of "
                f"transformers that build from numbers alone: {TRUST}"
            )


def build_transformer(description: Mapping[str, Any], trust: bool = False) -> nn.Module:
    """Return the described model with untrained weights."""
    from transformers import PretrainedConfig, PreTrainedModel

    if not trust:
        check_family(description)
    cls, kind = (find(description[name], packages=(PACKAGE[:-1],)) for name in ("class", "config"))
    for found, base, place in ((cls, PreTrainedModel, "class"), (kind, PretrainedConfig, "config")):
        below = str(description[place]).startswith(PACKAGE)
        if not (below and isinstance(found, type) and issubclass(found, base)):
            raise NotDescribableError(f"{str(description[place])[:80]} is not a {base.__name__} of transformers")
    attention = description["attention"]
    if attention is not None and attention not in ATTENTION:
        raise NotDescribableError(f"the attention {str(attention)[:80]!r} is not part of transformers")
    config = kind.from_dict(sound_values(description["arguments"]["dict"]))
    if attention is not None:
        config._attn_implementation = attention
    network: PreTrainedModel = cls(config)
    network.tie_weights()  # transformers 5.0 leaves it out on the meta device
    return network


def sound_values(values: Any) -> Any:
    """Return a configuration without the entries that name code, files or downloads."""
    if isinstance(values, list):
        return [sound_values(value) for value in values]
    if not isinstance(values, dict):
        return values
    if isinstance(values.get("backbone"), str):
        raise NotDescribableError(f"its backbone {values['backbone'][:80]!r} would be downloaded")
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if name in LABELS:
            kept[name] = value
        elif name not in LEFT_OUT and not name.endswith(("_kwargs", "model_args")) and not _is_location(value):
            if "layer" in name and isinstance(value, int) and value > MOST_LAYERS:
                raise NotDescribableError(
                    f"its configuration has {name}={str(value)[:20]}, more than {MOST_LAYERS:,} layers"
                )
            kept[name] = sound_values(value)
    for name in ("dtype", "torch_dtype"):
        if name in kept and not isinstance(vars(torch).get(str(kept[name])), torch.dtype):
            del kept[name]  # torch imports some of its parts when they are read by name
    return kept | ({"use_pretrained_backbone": False} if "use_pretrained_backbone" in kept else {})


def _is_location(value: Any) -> bool:
    """Return whether a text, or one in a list, could be the name of a file, of a network on a hub, or an address."""
    if isinstance(value, list):
        return any(map(_is_location, value))
    return isinstance(value, str) and SEPARATORS.search(value) is not None


def _mappings(values: Any, left_out: tuple[str, ...] = ()) -> Iterator[Mapping[str, Any]]:
    """Yield all dictionaries in plain data, outer ones first."""
    inner = values if isinstance(values, list) else []
    if isinstance(values, Mapping):
        yield values
        inner = [value for name, value in values.items() if name not in left_out]
    for value in inner:
        yield from _mappings(value, left_out)


# -- LoRA -------------------------------------------------------------------------------------------------------------


def describe_adapted(module: Any, describe: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a LoRA model's adapter and the description of the network below."""
    kinds = [type(config).__name__ for config in module.peft_config.values()]
    if kinds != ["LoraConfig"]:
        raise NotDescribableError(f"its adapters are {', '.join(kinds) or 'none'}, and one LoraConfig is supported")
    ((name, config),) = module.peft_config.items()
    values = json.loads(json.dumps(config.to_dict(), default=_plain))
    arguments = {name: values[name] for name in LORA if values.get(name) is not None}
    # The network below with its own layers instead of the adapted ones; a copy without memory for its tensors.
    memo: dict[int, Any] = {id(tensor): _without_memory(tensor) for tensor in state_of(module).values()}
    below = describe(copy.deepcopy(module, memo).unload())
    return {"peft": "LoraConfig", "adapter": name, "arguments": {"dict": arguments}, "network": below}


def build_adapted(description: Mapping[str, Any], build: Build) -> nn.Module:
    """Return the described network with its adapter, untrained."""
    from peft import LoraConfig, get_peft_model

    arguments = description["arguments"]["dict"]
    if description["peft"] != "LoraConfig" or not arguments.keys() <= LORA:
        raise NotDescribableError(f"only LoRA's arguments {', '.join(sorted(LORA))} are supported")
    keys = [list(value) for value in arguments.values() if isinstance(value, Mapping)]
    for pattern in parts_in([*arguments.values(), *keys], str):
        if REPEATED.search(pattern) or len(QUANTIFIERS.findall(pattern)) > MOST_QUANTIFIERS:
            raise NotDescribableError(f"LoRA's pattern {pattern[:80]!r} may take for ever: name the layers one by one")
    network = build(description["network"])
    return get_peft_model(network, LoraConfig(**arguments), adapter_name=str(description["adapter"]))


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", None)


def _without_memory(tensor: Tensor) -> Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def import_named(description: Any, trust: bool = False) -> None:
    """Import the packages that a description needs, if they are installed."""
    for part in _mappings(description):
        is_timms = str(part.get("class")).startswith(TIMM_NAME)
        package = "peft" if "peft" in part else "timm" if is_timms else "transformers"
        try:
            if package == "peft":
                import peft  # noqa: F401
            elif package == "timm":
                import timm  # noqa: F401
            elif "config" in part and "class" in part:
                if not trust:
                    check_family(part)
                find(part["class"], packages=(PACKAGE[:-1],))
        except ImportError as error:
            raise NotDescribableError(
                f"the network needs {package} ({error}): pip install "
                f"{'timm' if package == 'timm' else 'lightning-sgmcmc[lora]'}"
            ) from error


# -- vision ------------------------------------------------------------------------------------------------------------


TORCHVISION = "torchvision.models."
OPTIONS = ("aux_logits", "aux_loss", "image_size", "num_classes", "transform_input")
"""Arguments of builders that change a network, and that the network stores."""
NO_DOWNLOAD = ("weights", "weights_backbone")


def describe_vision_model(module: nn.Module, describe: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a builder's name, its arguments, and the parts of the network that differ from what it builds."""
    options = {name: vars(module)[name] for name in OPTIONS if name in vars(module)}
    best: tuple[str, dict[str, Any], dict[str, nn.Module]] | None = None
    builders = [builder for builder in _builders() if builder.__module__ == type(module).__module__]
    for builder, arguments in itertools.product(builders, ({}, options)):
        try:
            with torch.device("meta"):
                twin = _build_by(builder, arguments)
        except Exception:
            continue  # another architecture's builder, or an option that it does not take
        changed = _changed(module, twin)
        if "" not in changed and (best is None or len(changed) < len(best[2])):
            best = path_of(builder), arguments, changed
        if not changed:
            break
    if best is None:
        raise NotDescribableError(f"no builder of torchvision makes this {type(module).__name__}")
    path, arguments, changed = best
    return {"class": path, "arguments": arguments, "replaced": {name: describe(part) for name, part in changed.items()}}


def build_vision_model(description: Mapping[str, Any], build: Build) -> nn.Module:
    """Return the described network, untrained."""
    if str(description["class"]).startswith(TIMM_NAME):
        name = str(description["class"]).removeprefix(TIMM_NAME)
        return _with_parts(_build_timm(name, description["arguments"]), description["replaced"], build)
    builder = find(description["class"])
    if not any(builder is known for known in _builders()):
        raise NotDescribableError(f"{description['class']} is not one of torchvision's models")
    return _with_parts(_build_by(builder, description["arguments"]), description["replaced"], build)


def _with_parts(network: nn.Module, parts: Mapping[str, Any], build: Build) -> nn.Module:
    for name, part in parts.items():
        parent, _, last = name.rpartition(".")
        owner = dict(network.named_modules()).get(parent)
        if owner is None or last not in owner._modules:
            raise NotDescribableError(f"{type(network).__name__} has no part {name[:80]!r}")
        owner._modules[last] = build(part)
    return network


def _build_by(builder: Any, arguments: dict[str, Any]) -> nn.Module:
    """Return the builder's network with untrained weights; nothing is downloaded."""
    if not arguments.keys() <= set(OPTIONS):
        raise NotDescribableError(f"{builder.__name__} takes only {', '.join(OPTIONS)}, got {', '.join(arguments)}")
    known = builder.__kwdefaults__ or {}
    network: nn.Module = builder(**{name: None for name in NO_DOWNLOAD if name in known}, **arguments)
    return network


def _builders() -> Iterator[Any]:
    from torchvision.models import get_model_builder, list_models

    return map(get_model_builder, list_models())


TIMM = "timm.models."
TIMM_NAME = "timm.models:"
"""Begins the class of a described network of timm; the name for `timm.create_model` follows."""
NUMBERS = ("drop_path_rate", "drop_rate", "img_size", "in_chans", "num_classes")
"""Numeric arguments of `timm.create_model` that a store may have; no text reaches it but a name of its registry."""
LARGEST_NUMBER = 100_000


def describe_timm(module: nn.Module, describe: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a network's name in timm's registry, its numbers, and the parts that differ from what these build."""
    known = getattr(module, "pretrained_cfg", None) or {}
    name = str(known.get("architecture", "")).partition(".")[0]
    options = _timm_numbers(module)
    best: tuple[dict[str, Any], dict[str, nn.Module]] | None = None
    for count in range(len(options) + 1):
        arguments = dict(list(options.items())[:count])
        try:
            with torch.device("meta"):
                twin = _build_timm(name, arguments)
        except NotDescribableError:
            raise
        except Exception:
            continue  # an option that this network does not take
        changed = _changed(module, twin)
        if "" not in changed and (best is None or len(changed) < len(best[1])):
            best = arguments, changed
        if not changed:
            break
    if best is None:
        raise NotDescribableError(f"timm.create_model({name!r}) with numbers alone makes another network")
    replaced = {part: describe(layer) for part, layer in best[1].items()}
    return {"class": f"{TIMM_NAME}{name}", "arguments": best[0], "replaced": replaced}


def _timm_numbers(module: nn.Module) -> dict[str, Any]:
    """Return the numbers that a network may have been made with, the likeliest first."""
    found: dict[str, Any] = {"num_classes": getattr(module, "num_classes", None)}
    found["in_chans"] = next((m.in_channels for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    found["drop_rate"] = getattr(module, "drop_rate", None)
    rates = [getattr(part, "drop_prob", None) for part in module.modules() if type(part).__name__ == "DropPath"]
    found["drop_path_rate"] = max((rate for rate in rates if isinstance(rate, float)), default=None)
    size = getattr(getattr(module, "patch_embed", None), "img_size", None)
    found["img_size"] = list(size) if isinstance(size, tuple) else size
    return {name: value for name, value in found.items() if value is not None}


def _build_timm(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Return a network of timm's registry with untrained weights; nothing is downloaded."""
    import timm

    # Not the address of a file or of a network on a hub, nor a function that another package has registered.
    is_timms = name.isidentifier() and timm.is_model(name)
    if not is_timms or not timm.model_entrypoint(name).__module__.startswith(TIMM):
        raise NotDescribableError(f"{name[:80]!r} is not a name of timm.list_models()")
    for argument, value in arguments.items():
        numbers = value if isinstance(value, list) and len(value) == 2 else [value]
        sound = all(type(number) in (int, float) and 0 <= number <= LARGEST_NUMBER for number in numbers)
        if argument not in NUMBERS or not sound:
            raise NotDescribableError(
                f"timm's {name} has {str(argument)[:40]}={str(value)[:40]!r}: {', '.join(NUMBERS)} are numbers"
            )
    try:
        network: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    except RuntimeError:  # timm 1.0.3 takes rates of layers out of a tensor, which on the meta device has no numbers
        with _NumbersInMemory():
            network = timm.create_model(name, pretrained=False, **arguments)
    return network


class _NumbersInMemory(TorchFunctionMode):
    """Evenly spaced numbers are in memory when a network is built on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = {"device": "cpu"} if func is torch.linspace else {}
        return func(*args, **{**(kwargs or {}), **own})


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
    plain = {name: v for name, v in vars(module).items() if isinstance(v, bool | int | float | str | tuple)}
    plain.pop("training")
    tensors = {
        name: None if tensor is None else (tensor.shape, tensor.dtype)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    }
    children = [(name, child is None) for name, child in module._modules.items()]
    return type(module), module.extra_repr(), plain, tensors, children
