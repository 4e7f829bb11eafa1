"""A trained network as a `BayesianModule`: the chains start at its weights, and the prior is centred there."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_sgmcmc.batches.inputs import arguments_of_network, called, is_hugging_face
from lightning_sgmcmc.chains.execution import evaluation_mode, homes_of
from lightning_sgmcmc.chains.starts import freeze
from lightning_sgmcmc.checks import check_choice
from lightning_sgmcmc.files import check_regular
from lightning_sgmcmc.likelihoods import Categorical, Likelihood
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.namespace import rank_zero_info
from lightning_sgmcmc.priors import GaussianPrior, Prior
from lightning_sgmcmc.priors.centers import read_tensors, weights_in, weights_of

What = Literal["last_layer", "lora", "all"]
GAINS = {"lora": 1.0, "all": 0.1}
"""Width of the default prior, in units of the scale of fresh weights, 1/√fan_in."""

NOISE_STD = 3.0
"""Of the prior of the likelihood's own parameters, such as log σ, as in `AutoSampling`."""


def bayesianize(
    network: "nn.Module | str | Path",
    what: Any = "last_layer",
    likelihood: Likelihood | None = None,
    prior: Prior | float | None = None,
    checkpoint: "Mapping[str, Any] | str | Path | None" = None,
    example: Any = None,
    chain_start: 'Literal["own", "same"] | Sequence[Any]' = "same",
    **options: Any,
) -> BayesianModule:
    """Return a trained network as a module whose chains start at its weights.

        log p(θ) = log N(θ; θ₀, std²),   θ₀ the sampled weights as they are given, the others fixed

    The prior is centred at the network's weights, since they come from other data. If they come from the data of the
    fit, that would count these twice: pass `prior=GaussianPrior()`, whose centre is 0. All chains start at the weights,
    because drawn starts would lose them, so agreement of the chains (R̂) says less at first.

    Args:
        network: a network of torch, torchvision, transformers or peft, or a trained LightningModule with a `forward`;
            or a folder of transformers' `save_pretrained`. It is changed in place.
        what: which weights to sample: "last_layer" (which one, is logged), "lora" (peft's adapters and what peft trains
            beside them; a model of transformers gets new ones), "all"; a `LoraConfig` of peft for new adapters, or name
            patterns (`["fc.*", "layer4.*"]`).
        likelihood: p(y | output); None is `Categorical()`.
        prior: the prior, or the standard deviation of one that is centred at the weights. None centres one with 1 for
            the last layer, also of all, and for patterns; with 1/√fan_in for adapters, and with a tenth of it for the
            other layers of all. `AutoSampling` replaces that of all by one scale, which it chooses. The likelihood's
            own parameters, such as a learned log σ, are centred at their start with 3, unless a `Prior` is passed.
        checkpoint: weights to load into the network first: a state dict, or the path of a Lightning checkpoint, of a
            file by `torch.save` or of a safetensors file. All of the network's tensors have to be there, once, with
            their shapes; names may begin with those of a part or a wrapper ("model.", "module.").
        example: inputs of the network, to find the last layer by a call.
        chain_start: "same", or as for `BayesianModule`.
        options: further arguments of `BayesianModule`: `lr`, `sampler`, `num_chains`, `temperature`, ….

    Raises:
        ValueError: for another `what`, a checkpoint of another network, a network that `device_map` has spread over
            devices, quantized weights to sample, or if nothing is found to sample.
        TypeError: if the network is none.
        ImportError: if peft is missing.

    Example::

        net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))  # or resnet18(…)
        module = bayesianize(net, "last_layer", Categorical(), lr=0.1, num_chains=4)
        callbacks = [SamplingSchedule(every_n_epochs=1, burn_in_epochs=2), SampleCollector()]
        trainer = pl.Trainer(max_epochs=10, callbacks=callbacks)  # and trainer.fit(module, datamodule)

    Source: Li et al. 2018 (Explicit inductive bias for transfer learning, the penalty of the distance to the start);
    Yang et al. 2024 (Bayesian low-rank adaptation, a posterior of LoRA's weights).
    """
    if isinstance(network, str | Path):
        network = network_in(Path(network))
    if not isinstance(network, nn.Module):
        raise TypeError(f"network should be a torch module, got a {type(network).__name__}: pass the trained network")
    if isinstance(network, BayesianModule):
        raise TypeError("network is a BayesianModule already: pass the network in it, module.net")
    _check_in_one_place(network)
    if checkpoint is not None:
        load_weights(network, checkpoint)
    network, kind = _chosen(network, what, example)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ValueError(f"what={what!r} leaves {type(network).__name__} no weight to sample: pass name patterns")
    config: Any = getattr(network, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = False  # a cache of earlier tokens serves the generation of text only
    likelihood = likelihood if likelihood is not None else Categorical()
    if prior is None:
        prior = _default_prior(network, kind, likelihood, example)
    elif not isinstance(prior, Prior):
        prior = GaussianPrior({**_scales_of(likelihood), "*": prior}, center="start")
    module = BayesianModule(network, likelihood, prior, chain_start=chain_start, **options)
    _say(network, kind)
    return module


def _check_in_one_place(network: nn.Module) -> None:
    """Raise if parts of a network are on different devices, or are moved there by accelerate."""
    places = {str(place) for place in (getattr(network, "hf_device_map", None) or {}).values()}
    devices = {str(parameter.device) for parameter in network.parameters()}
    if len(places) > 1 or places & {"disk"} or len(devices) > 1:
        raise ValueError(
            f"network has parts on {', '.join(sorted(places if len(places) > 1 else devices | places))}, as device_map "
            "places them: load it without device_map, and the trainer moves it"
        )


def _chosen(network: nn.Module, what: Any, example: Any) -> tuple[nn.Module, str]:
    """Return the network with the sampled weights marked by requires_grad, and the kind of the choice."""
    if type(what).__name__ == "LoraConfig":
        return with_adapters(network, what), "lora"
    if isinstance(what, str):
        check_choice("what", what, ("last_layer", "lora", "all"))
        if what == "lora":
            network = with_adapters(network, None)
        elif what == "last_layer":
            freeze(network, [f"{last_layer(network, example)}.*"], "what")
        else:
            if getattr(network, "is_quantized", False):
                raise ValueError("what='all' would sample quantized weights, which are integers: use what='lora'")
            freeze(network, ["*"], "what")
        return network, what
    if not isinstance(what, Sequence) or not all(isinstance(pattern, str) for pattern in what) or not what:
        raise TypeError(f"what must be 'last_layer', 'lora', 'all', a LoraConfig or name patterns, got {what!r}")
    freeze(network, what, "what")
    return network, "patterns"


def _scales_of(likelihood: Likelihood) -> dict[str, Any]:
    """Return the scales of a likelihood's own parameters: a noise scale or cut point is no weight."""
    return {"likelihood.*": NOISE_STD} if list(likelihood.parameters()) else {}


def _default_prior(network: nn.Module, kind: str, likelihood: Likelihood, example: Any) -> Prior:
    scales = _scales_of(likelihood)
    if kind == "all":
        with suppress(ValueError):  # there is none, or it shares its weights
            scales[f"net.{last_layer(network, example)}.*"] = 1.0  # often it is new, and has to learn
    gain = GAINS.get(kind)
    prior = GaussianPrior({**scales, "*": 1.0 if gain is None else "fan_in"}, gain=gain or 1.0, center="start")
    prior.is_default = kind == "all"
    return prior


def _say(network: nn.Module, kind: str) -> None:
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    total, sampled = sum(p.numel() for p in network.parameters()), sum(p.numel() for p in named.values())
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in named))
    where = f"'{layers[0]}'" if len(layers) == 1 else f"{len(layers)} layers, '{layers[0]}' to '{layers[-1]}'"
    shared = sum(len(homes) > 1 for name, homes in homes_of(network).items() if name in named)
    tied = f" ({shared} of them in several layers)" if shared else ""
    rank_zero_info(f"Sampled: {sampled:,} of {total:,} weights{tied}, in {where}; the others are fixed.")


# -- the sampled parameters: of the last layer, of adapters, or all ---------------------------------------------------


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
    """Return the name of the linear layer that comes last in a call with the example; without one, of the last in a
    part with a usual name ("fc", "classifier", …), or else of the last that was defined."""
    linear: dict[str, nn.Module] = {
        name: part for name, part in network.named_modules() if isinstance(part, LINEAR) and name
    }
    of_timm: Any = getattr(network, "get_classifier", None) if type(network).__module__.startswith("timm.") else None
    heads = of_timm() if of_timm is not None else None
    if isinstance(heads, tuple):  # of distillation
        names = [name for name, part in network.named_modules() if any(part is head for head in heads)]
        raise ValueError(
            f"{type(network).__name__} has {len(names)} last layers, whose outputs it averages: pass "
            f"what={[f'{name}.*' for name in names]}"
        )
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
    """Return a network with LoRA's adapters, added in place, by default with peft's for models of transformers."""
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
        of_gpt2 = getattr(getattr(network, "config", None), "model_type", None) == "gpt2"  # its weights are transposed
        config = peft.LoraConfig(r=8, lora_alpha=16, task_type=task, fan_in_fan_out=of_gpt2)
    try:
        adapted: nn.Module = peft.get_peft_model(network, config)
    except ValueError as error:
        if config.target_modules or "target_modules" not in str(error):
            raise
        ends = Counter(name.rpartition(".")[2] for name, part in network.named_modules() if isinstance(part, nn.Linear))
        of_blocks = [name for name, count in ends.items() if count > 1] or list(ends)
        task = getattr(config.task_type, "value", config.task_type)
        raise ValueError(
            f"peft does not know which layers of {type(network).__name__} to adapt: pass "
            f"what=LoraConfig(r=8, task_type={task!r}, target_modules={of_blocks}), "
            "or some of these names"
        ) from error
    return adapted


# -- weights from a checkpoint or a folder of transformers ------------------------------------------------------------


def load_weights(network: nn.Module, source: "Mapping[str, Any] | str | Path") -> None:
    """Copy the weights of a checkpoint into a network.

    A Lightning checkpoint names them after the module's attribute ("model.fc.weight"); such a common beginning of the
    names is left out.
    """
    what = "checkpoint" if isinstance(source, Mapping) else f"checkpoint={str(source)!r}"
    kept = network.state_dict()
    own = {n: t for n, t in (*network.named_parameters(), *network.named_buffers()) if n in kept}
    if not own:
        raise ValueError(f"{type(network).__name__} has no parameters, so {what} cannot be loaded into it")
    with torch.no_grad():
        for name, tensor in weights_of(network, own, _tensors(source, what), what).items():
            own[name].copy_(tensor)


def _tensors(source: "Mapping[str, Any] | str | Path", what: str) -> dict[str, Tensor]:
    content: Any = source
    if not isinstance(source, Mapping):
        path = Path(source).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"{what} does not exist: pass the path of a checkpoint or state dict")
        check_regular(path)
        content = read_tensors(path, what)
    else:
        try:
            content = weights_in(source)
        except ValueError as error:
            raise ValueError(f"{what} {error}") from error
    found = {str(n): t for n, t in content.items() if isinstance(t, Tensor)} if isinstance(content, Mapping) else {}
    if not found:
        raise ValueError(f"{what} holds no state dict, that is tensors by name: pass one, or a file with one")
    return found


def network_in(folder: Path) -> nn.Module:
    """Return the model of transformers in a folder that its `save_pretrained` wrote."""
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
    """Return an optional package."""
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"this needs {package}: pip install lightning-sgmcmc[lora]") from error
