"""Which parameters of a trained network are sampled: those of its last layer, of its adapters, or all."""

from typing import Any

import torch
from torch import nn

from lightning_sgmcmc.batches.inputs import arguments_of_network, called, is_hugging_face
from lightning_sgmcmc.chains.execution import evaluation_mode, homes_of
from lightning_sgmcmc.pretrained.weights import required

HEADS = ("classifier", "fc", "head", "heads", "score", "lm_head", "qa_outputs", "out_proj")
"""Names that torchvision and transformers give to the part with the last layer."""
LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Bilinear)
TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
}
"""peft's names of tasks by the ends of a model's class, by which it also trains a new head."""


def last_layer(network: nn.Module, example: Any = None) -> str:
    """Return the name of a network's last linear layer.

    Args:
        network: the network.
        example: inputs with which the network is called, to see which linear layer comes last; without them it is the
            last in a part with a usual name ("fc", "classifier", …), or else the last that was defined.

    Raises:
        ValueError: if there is none, or if it shares its weight with another layer.
    """
    linear: dict[str, nn.Module] = {
        name: part for name, part in network.named_modules() if isinstance(part, LINEAR) and name
    }
    found = _last_called(network, linear, example) if example is not None else _last_defined(network, linear)
    if found is None:
        raise ValueError(
            f"{type(network).__name__} has no linear layer to sample: pass the names of the parameters, "
            "what=['*.fc.*'], or what='all'"
        )
    for name, homes in homes_of(network).items():
        shared = [home for home, _ in homes]
        if len(homes) > 1 and any(home is linear[found]._parameters for home in shared):
            raise ValueError(
                f"the last layer '{found}' shares its weight with another layer ('{name}'), which would be sampled "
                "too: use what='lora', or a network without shared weights (tie_word_embeddings=False)"
            )
    return found


def _last_defined(network: nn.Module, linear: dict[str, nn.Module]) -> str | None:
    names = list(linear)
    dense = [name for name in names if isinstance(linear[name], nn.Linear)]
    beginning = _wrapping(network)
    for head in HEADS:
        own = [n for n in names if n == f"{beginning}{head}" or n.startswith(f"{beginning}{head}.")]
        if own:
            return next((n for n in reversed(own) if n in dense), own[-1])
    return next(reversed(dense or names), None)


def _wrapping(network: nn.Module) -> str:
    """Return the beginning of the names of a network's parts that its wrappers add, each of one part."""
    name = ""
    while len(parts := dict(network.named_children())) == 1 and not isinstance(network, nn.Sequential):
        ((key, network),) = parts.items()
        if isinstance(network, LINEAR):
            break
        name += f"{key}."
    return name


def _last_called(network: nn.Module, linear: dict[str, nn.Module], example: Any) -> str | None:
    order: list[str] = []
    handles = [part.register_forward_hook(lambda *_, n=name: order.append(n)) for name, part in linear.items()]
    try:
        with torch.no_grad(), evaluation_mode(network):
            called(network, example, arguments_of_network(network))
    finally:
        for handle in handles:
            handle.remove()
    return order[-1] if order else None


def with_adapters(network: nn.Module, config: Any) -> nn.Module:
    """Return a network with LoRA's adapters, itself if it has adapters.

    Args:
        network: a model of peft, or a network that gets adapters, in place.
        config: peft's `LoraConfig`; None takes its default for models of transformers.

    Raises:
        ImportError: if peft is missing.
        ValueError: if the network needs a config.
    """
    if type(network).__module__.startswith("peft."):
        if config is not None:
            raise ValueError("network has adapters already: pass it with what='lora', without another LoraConfig")
        return network
    peft = required("peft")
    if config is None:
        if not is_hugging_face(network):
            raise ValueError(
                f"what='lora' does not know which layers of {type(network).__name__} to adapt: pass "
                "what=LoraConfig(r=8, target_modules=[…])"
            )
        task = next((task for end, task in TASKS.items() if type(network).__name__.endswith(end)), None)
        config = peft.LoraConfig(r=8, lora_alpha=16, task_type=task, fan_in_fan_out=_stores_transposed(network))
    adapted: nn.Module = peft.get_peft_model(network, config)
    return adapted


def _stores_transposed(network: nn.Module) -> bool:
    """Return whether the layers that peft adapts by default are GPT-2's, with transposed weights."""
    return getattr(getattr(network, "config", None), "model_type", None) == "gpt2"
