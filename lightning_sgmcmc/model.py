"""EnergyModel: the network, likelihood and prior that define a potential energy, for one chain."""

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CodeType, MethodType
from typing import Any

from torch import Tensor, nn

from lightning_sgmcmc.batches.inputs import (
    LABELS,
    MASK,
    TARGETS,
    Arguments,
    Features,
    arguments_of,
    arguments_of_network,
    called,
    check_dtype,
    is_object,
    next_tokens,
    parted,
    parted_object,
    plain,
    trimmed,
    unwrapped,
)
from lightning_sgmcmc.likelihoods import Likelihood, TokenCategorical
from lightning_sgmcmc.namespace import OTHER, PACKAGES, names_other_lightning, pl, rank_zero_info, way_out
from lightning_sgmcmc.priors import GaussianPrior, Prior
from lightning_sgmcmc.priors.state import begin_prior_state, held_rows, prior_state, with_own_state, without_held

ONLY_FOR_TRAINING = {
    "prior",
    "sampler",
    "num_chains",
    "seed",
    "nonfinite_energy",
    "chain_start",
    "shared_batch",
    "chain_execution",
    "compile",
    "max_skipped_in_a_row",
    "sampled",
    "frozen_dropout",
}
"""Constructor arguments that a store does not need to rebuild the network."""


class EnergyModel(pl.LightningModule):
    """The part of a `BayesianModule` that a user defines: forward, likelihood, prior, score, for one network.

    U(θ) = -Σ_i log p(y_i|x_i,θ) - log p(θ)
    """

    def __init__(
        self, net: nn.Module | None, likelihood: Likelihood | None, prior: Prior | float | None = None
    ) -> None:
        super().__init__()
        if names_other_lightning(type(self).__module__):
            warnings.warn(
                f"{PACKAGES[OTHER]}'s Trainer does not accept this module (`model` must be a `LightningModule`): "
                f"{way_out()}",
                stacklevel=4,
            )
        check_part("net", net, nn.Module)
        check_no_loss(likelihood)
        check_part("likelihood", likelihood, Likelihood)
        own = GaussianPrior(std=prior) if isinstance(prior, int | float) and not isinstance(prior, bool) else prior
        check_part("prior", own, Prior)
        self._accepted: Arguments | None = None
        self._said_unused = False
        self.features_into: str | None = None
        """The name of the part that `Features` are inputs of; the rest of the network has computed them."""
        self._compiled_net: list[nn.Module] = []
        """The network's torch.compile wrapper, if any; in a list, so that it is not registered as a submodule."""
        if net is not None:
            # A compiled network is compiled in training only, so samples have the plain parameter names.
            self.net = getattr(net, "_orig_mod", net)
            if self.net is not net:
                self._compiled_net = [net]
        self.likelihood = likelihood
        self.prior = own if isinstance(own, Prior) else GaussianPrior()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's output for its inputs, for one chain; override it with arguments of your own."""
        if "net" not in self._modules:
            raise NotImplementedError(f"{type(self).__name__} needs a network: pass net=… or define forward")
        net = self._compiled_net[0] if self._compiled_net and self.training else self.net
        return net(*args, **kwargs)

    def inputs_and_target(self, batch: Any) -> tuple[Any, Any]:
        """Return the inputs and the target of a batch; override it for batches of another form.

        A batch is a pair (x, y), or a dict with its target as "labels", "label", "target" or "y", whose other entries
        are the inputs. The inputs are a tensor, a tuple or list of tensors, or a dict. An encoder-decoder of
        transformers gets its decoder's inputs from the target, as in its own training. Of an object with `.to(device)`,
        such as torch_geometric's batch of graphs, the attributes count as a dict's entries; a `forward` of one argument
        gets it whole.
        """
        if isinstance(batch, Mapping):
            return parted(batch, self.accepted_arguments, self._modules.get("net"), type(self).__name__)
        if is_object(batch):
            inputs, target = parted_object(batch, self.accepted_arguments)
            if target is None:
                raise TypeError(
                    f"a batch of class {type(batch).__name__} needs its target as {', '.join(TARGETS)}: set it, yield "
                    f"pairs (batch, y), or override inputs_and_target(batch) of {type(self).__name__}"
                )
            return inputs, target
        if not (isinstance(batch, (list, tuple)) and len(batch) == 2):  # torch 2.6 cannot compile `list | tuple`
            raise TypeError(
                f"a batch should be a pair (x, y), got {_kind(batch)}: nest several inputs, ((a, b), y), or override "
                f"inputs_and_target(batch) of {type(self).__name__}"
            )
        return plain(batch[0]), batch[1]

    def output_of(self, inputs: Any) -> Any:
        """Return the network's output for inputs, as the likelihood receives it; override it for another call.

        A tensor is passed to `forward` as it is, several tensors as positional arguments where it takes so many. A dict
        is passed by name, without the entries that it does not accept, or whole if `forward` takes one argument and no
        entry has its name. Of a model's output object the logits are returned.
        """
        if isinstance(inputs, Tensor):
            return unwrapped(self(inputs))
        if isinstance(inputs, Features) and self.features_into is not None:
            return self.get_submodule(self.features_into)(inputs.values)
        return unwrapped(called(self, inputs, self.accepted_arguments))

    def output_and_target(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the output and the target of a batch, for a causal language model's "labels" the next tokens.

        Raises:
            TypeError: if a network returns several tensors to a likelihood of this library.
        """
        inputs, target = self.inputs_and_target(batch)
        likelihood = self.likelihood
        if isinstance(likelihood, TokenCategorical) and self.takes_next_tokens(batch):
            target = next_tokens(target, inputs.get(MASK), likelihood.ignore_index)
        try:
            output = self.output_of(inputs)
        except RuntimeError as error:
            check_dtype(self, inputs, error)
            raise
        takes_tensors = type(likelihood).__module__.startswith(Likelihood.__module__.removesuffix(".base"))
        if takes_tensors and isinstance(output, (tuple, list, Mapping)):
            raise TypeError(
                f"the network returned a {type(output).__name__} of {len(output)}, and {type(likelihood).__name__} "
                "takes one tensor: return it alone, in training mode too, or override output_of(inputs)"
            )
        if takes_tensors and not isinstance(target, Tensor):
            raise TypeError(
                f"the target of a batch is a {_kind(target)}, and {type(likelihood).__name__} takes one tensor: let "
                f"the data set yield it alone, or override inputs_and_target(batch) of {type(self).__name__}; several "
                "targets of different kinds need a log_likelihood(batch) that adds their log densities"
            )
        return output, target

    def takes_next_tokens(self, batch: Any) -> bool:
        """Return whether the labels of a batch are shifted: those that the network itself would shift."""
        named = isinstance(batch, Mapping) and LABELS in batch and not overrides(self, "inputs_and_target")
        return named and isinstance(self.likelihood, TokenCategorical) and self.accepted_arguments.shifts_labels

    def used_of(self, batch: Any) -> Any:
        """Return a batch without what `output_of` would leave out, and log it, once; with own hooks all is used."""
        if any(overrides(self, method) for method in ("log_likelihood", *HOOKS)):
            return batch
        used, unused = trimmed(batch, self.accepted_arguments)
        if unused and not self._said_unused:
            self._said_unused = True
            names = ", ".join(map(repr, unused))
            rank_zero_info(f"The network's forward does not accept {names} of the batches, so it is not passed.")
        return used

    @property
    def accepted_arguments(self) -> Arguments:
        """What the network's `forward` accepts."""
        if self._accepted is None:
            own = overrides(self, "forward") or "net" not in self._modules
            # Not the object's own attribute, where a data-parallel wrapper puts another method.
            self._accepted = (
                arguments_of(MethodType(type(self).forward, self)) if own else arguments_of_network(self.net)
            )
        return self._accepted

    def log_likelihood(self, batch: Any) -> Tensor:
        """Return log p(y|x,θ) for each datum of a batch, shape (n,), for one chain."""
        if self.likelihood is None:
            raise NotImplementedError(
                f"{type(self).__name__} needs a likelihood: pass likelihood=… or define log_likelihood(batch)"
            )
        output, target = self.output_and_target(batch)
        return self.likelihood.log_prob(output, target)

    def predictive_terms(self, inputs: Any) -> dict[str, Tensor]:
        """Return what predictions average over samples; define it beside your own `log_likelihood`.

        Tensors by name, first axis n: `probabilities` (n, …, K) make a `ClassPrediction`, `mean` and `variance` (n, D)
        a `RegressionPrediction`, and others a `Prediction` with their averages.
        """
        remedy = "pass likelihood=… or define predictive_terms(x)"
        raise RuntimeError(f"{type(self).__name__} has no likelihood object to define a predictive: {remedy}")

    def log_prior(self) -> Tensor:
        """Return log p(θ) of the trainable parameters, shape (), for one chain."""
        return self.prior.log_prob(of_prior(self))

    def score(self, batch: Any) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Return log p(y|x,θ) of each datum (n,), and the likelihood's terms and targets (None if it has none)."""
        if self.likelihood is None or not self.likelihood.has_predictive():
            return self.log_likelihood(batch), {}, None
        output, target = self.output_and_target(batch)
        # torch 2.6 cannot compile `|` of dicts.
        terms = {**self.likelihood.terms(output), **self.likelihood.target_terms(output, target)}
        if not overrides(self, "log_likelihood"):
            return self.likelihood.log_prob(output, target), terms, target
        return self.log_likelihood(batch), terms, target

    @contextmanager
    def at_chain(self, chain: int) -> Iterator[None]:
        """Select one chain; here a no-op, since there is a single network."""
        yield

    def configure_model(self) -> None:
        """Register the tensors that the prior has for each chain, once."""
        begin_prior_state(self, self.prior)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Restore from `state_dict()`, also of a module with another prior."""
        return super().load_state_dict(with_own_state(self, self.prior, state_dict), strict=strict, assign=assign)

    def recorded_arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild the network: all except those used only in training."""
        own = {"net": self._modules.get("net"), "likelihood": self.likelihood}
        given = vars(self).get("_arguments", own)  # only subclasses record theirs
        return {name: value for name, value in given.items() if name not in ONLY_FOR_TRAINING}

    _arguments: dict[str, Any]
    """The constructor arguments, see `lightning_sgmcmc.posterior.description.record_arguments`."""


HOOKS = ("inputs_and_target", "output_of", "output_and_target")
"""The methods that take a batch apart."""


def overrides(model: EnergyModel, method: str) -> bool:
    """Return whether a model's class overrides a method of `EnergyModel`."""
    return getattr(type(model), method) is not getattr(EnergyModel, method)


def named_trainable(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that require gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def scale_of_fresh_weights(module: nn.Module) -> float:
    """Return the standard deviation, 1/√(3·fan-in), of the weights that torch draws for linear layers and convolutions,
    over all tensors of a model that have two axes or more; 0 without any."""
    axes = int(getattr(getattr(module, "chains", None), "stacked", None) is not None)  # that of chains
    each = [p.shape[axes:] for p in named_trainable(module).values() if p.dim() - axes > 1]
    return math.sqrt(sum(shape[0] for shape in each) / (3 * sum(shape.numel() for shape in each))) if each else 0.0


def of_prior(model: nn.Module, chains: bool = False) -> Mapping[str, Tensor]:
    """Return what the prior is a function of, by name: sampled entries (of all `chains` together), and its tensors."""
    return without_held(named_trainable(model) | prior_state(model), held_rows(model), int(chains))


def check_model(model: EnergyModel) -> None:
    """Raise unless network and likelihood are complete."""
    name = type(model).__name__
    check_layers(model)
    if not model.automatic_optimization:
        raise ValueError(
            f"{name} samples by automatic optimization: leave automatic_optimization at True, and put "
            "the update into a sampler"
        )
    if model.likelihood is None and not overrides(model, "log_likelihood"):
        raise ValueError(f"{name} needs a likelihood: pass likelihood=… or define log_likelihood(batch)")
    overridden = any(overrides(model, method) for method in ("forward", "log_likelihood", *HOOKS))
    if "net" not in model._modules and not overridden:
        raise ValueError(f"{name} needs a network: pass net=… or define forward")
    last, likelihood = _last_layer(getattr(model, "net", None)), model.likelihood
    if likelihood is not None and isinstance(last, likelihood.applies_itself):
        raise ValueError(
            f"net ends in {type(last).__name__}, which {type(likelihood).__name__} applies itself: it needs logits, so "
            "remove that layer"
        )


def _kind(batch: Any) -> str:
    return f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, list | tuple) else type(batch).__name__


def _last_layer(network: Any) -> Any:
    """Return the last layer of a sequential network, else the network."""
    while isinstance(network, nn.Sequential) and len(network) > 0:
        network = network[-1]
    return network


OWN_STEPS = {
    "training_step": "the loss is Ũ/N, computed from forward and likelihood=…, or from log_likelihood(batch)",
    "backward": "gradients are gathered for each chain",
    "configure_optimizers": "the sampler updates the parameters: pass sampler=… and lr=…",
    "optimizer_step": "the sampler updates the parameters: pass sampler=… and lr=…",
    "optimizer_zero_grad": "gradients are cleared for each chain",
    "configure_gradient_clipping": "gradients are clipped for each chain: pass gradient_clip_val to the trainer",
    "configure_callbacks": "it adds the callbacks that every run needs: pass your own to the trainer",
    "configure_model": "it stacks the chains: define layers in __init__",
}
"""The methods with which a module samples, and what to do instead of overriding them."""


def check_methods(model: nn.Module, base: type) -> None:
    """Raise if a subclass or an object replaces one of `OWN_STEPS` with code that does not call it."""
    found: list[str] = []
    for name, remedy in OWN_STEPS.items():
        if name in vars(model) and not _calls_replaced(vars(model)[name], name, getattr(type(model), name)):
            hint = "; LightningCLI sets it for --optimizer: pass --model.sampler and --model.lr in its place"
            raise TypeError(
                f"{name} was set on an object of {type(model).__name__}, whose own is then not called, so nothing is "
                f"sampled ({remedy}): do not set it, or call the object's own in it"
                f"{hint if name == 'configure_optimizers' else ''}"
            )
        owner = next(cls for cls in type(model).__mro__ if name in vars(cls))
        code = getattr(inspect.unwrap(getattr(owner, name)), "__code__", None)
        if issubclass(base, owner) or code is None or _names(code, name, type(model)):
            continue
        found.append(
            f"{owner.__name__} defines {name}, and {base.__name__} has its own, without which nothing is sampled "
            f"({remedy}): remove {name} from {owner.__name__}, or call super().{name} in it"
        )
    if found:
        raise TypeError(". ".join(found))


def _names(code: CodeType, name: str, cls: type) -> bool:
    """Return whether code names a class's method; `backward` is also a tensor's, so it must come with a class."""
    classes = {"super", *(one.__name__ for one in cls.__mro__)}
    return name in code.co_names and (name != "backward" or not classes.isdisjoint(code.co_names))


def _calls_replaced(value: Any, name: str, replaced: Any) -> bool:
    """Return whether a value that was set on an object, in place of a method, may call that method."""
    held: list[Any] = []
    while isinstance(value, partial | MethodType):
        if isinstance(value, partial):
            held += [*value.args, *value.keywords.values()]
        value = value.func if isinstance(value, partial) else value.__func__
    code = getattr(value, "__code__", None)
    if value is replaced or code is None or _names(code, name, type(replaced)):
        return True
    held += [cell.cell_contents for cell in value.__closure__ or ()]
    held += [value.__globals__.get(one) for one in code.co_names]
    held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return any(isinstance(one, MethodType) and one.__func__ is replaced for one in held)


def check_layers(model: nn.Module) -> None:
    """Raise if a lazy layer is still uninitialized."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(
                f"'{name}' has no shape yet, since its layer is lazy: call the network with the inputs of one batch, "
                "net(x), before the fit"
            )


def check_shape(log_likelihood: Tensor, chains: bool = False) -> None:
    """Raise unless a log-likelihood has one number per example, shape (n,), or (C, n) with `chains`."""
    if log_likelihood.dim() != (2 if chains else 1):
        shape = tuple(log_likelihood.shape[1:] if chains else log_likelihood.shape)
        raise ValueError(
            f"log_likelihood(batch) must return one number per example, shape (n,), got {shape}: the batch's size is "
            "read from it"
        )


DENSITIES: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "Categorical()",
    nn.NLLLoss: "Categorical(), without the network's log_softmax",
    nn.BCEWithLogitsLoss: "Bernoulli(), or MultiLabelBernoulli() for several labels",
    nn.BCELoss: "Bernoulli(), without the network's sigmoid",
    nn.MSELoss: "Gaussian(learned=True)",
    nn.GaussianNLLLoss: "HeteroscedasticGaussian()",
    nn.PoissonNLLLoss: "Poisson()",
}
"""The likelihoods whose densities torch's losses have."""


def check_no_loss(likelihood: Any) -> None:
    """Raise if a likelihood is one of torch's losses, with the density that it has."""
    if not isinstance(likelihood, nn.modules.loss._Loss):
        return
    weighted = any(getattr(likelihood, name, None) is not None for name in ("weight", "pos_weight"))
    density = DENSITIES.get(type(likelihood), "… of docs/howto/targets.md")
    raise TypeError(
        f"likelihood={type(likelihood).__name__}(…) is a loss, and a posterior needs a density of each example: pass "
        f"likelihood={density}{'; weights have none (docs/howto/decisions.md)' if weighted else ''}"
    )


def check_part(name: str, value: Any, kind: type) -> None:
    """Raise unless `value` is None or an instance of `kind`; the class itself raises an error too."""
    if value is None or isinstance(value, kind):
        return
    if isinstance(value, type):
        raise TypeError(f"{name}={value.__name__} is a class: pass an instance, {name}={value.__name__}(…)")
    raise TypeError(f"{name} should be a {kind.__name__}, got a {type(value).__name__}")
