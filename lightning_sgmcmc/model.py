"""EnergyModel: the network, likelihood and prior that define a potential energy, for one chain."""

import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc.checks import names_other_lightning
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.planning import RunPlan
from lightning_sgmcmc.priors import GaussianPrior, Prior
from lightning_sgmcmc.priors.state import begin_prior_state, prior_state, with_own_state
from lightning_sgmcmc.samplers import Sampler

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


SET_BY_MODULE = ("lr", "temperature", "num_data", "num_chains", "seed", "first_chain")
"""Arguments that a `BayesianModule` passes to its sampler."""


class EnergyModel(pl.LightningModule):
    """The part of a `BayesianModule` that a user defines: forward, likelihood, prior, score.

        U(θ) = -Σ_i log p(y_i|x_i,θ) - log p(θ)

    Its methods concern one network; chains, samplers and runs are handled elsewhere.

    Args:
        net: the network; omit it in a subclass that defines `forward`.
        likelihood: p(y | output); omit it in a subclass that defines `log_likelihood`.
        prior: log p(θ) over all trainable parameters; None is a standard Gaussian.

    Raises:
        TypeError: if a part is a class instead of an object, or has the wrong type.
    """

    def __init__(self, net: nn.Module | None, likelihood: Likelihood | None, prior: Prior | None) -> None:
        super().__init__()
        self.plan: RunPlan | None = None
        """What the fit reaches and costs by its settings, once it begins; None without a schedule."""
        if names_other_lightning(type(self).__module__):
            warnings.warn(
                "lightning's Trainer does not accept this module (`model` must be a `LightningModule`), since "
                "lightning.pytorch and pytorch_lightning are two packages: write `import pytorch_lightning as pl` "
                "instead of `import lightning as L`, and use pl.Trainer",
                stacklevel=4,
            )
        check_part("net", net, nn.Module)
        check_part("likelihood", likelihood, Likelihood)
        check_part("prior", prior, Prior)
        self._compiled_net: list[nn.Module] = []
        """The network's torch.compile wrapper, if any; in a list, so that it is not registered as a submodule."""
        if net is not None:
            # A compiled network is compiled in training only, so samples have the plain parameter names.
            self.net = getattr(net, "_orig_mod", net)
            if self.net is not net:
                self._compiled_net = [net]
        self.likelihood = likelihood
        self.prior = prior if prior is not None else GaussianPrior()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's output for its inputs, for one chain; override it with arguments of your own."""
        if "net" not in self._modules:
            raise NotImplementedError(f"{type(self).__name__} needs a network: pass net=… or define forward")
        net = self._compiled_net[0] if self._compiled_net and self.training else self.net
        return net(*args, **kwargs)

    def output_and_target(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the network's output for a batch and its target; override it if batches are not pairs (x, y)."""
        if not (isinstance(batch, list | tuple) and len(batch) == 2):
            raise TypeError(
                f"a batch should be a pair (x, y), got {type(batch).__name__}: for other batches, override "
                f"output_and_target(batch) of {type(self).__name__}"
            )
        x, y = batch
        try:
            return self(x), y
        except RuntimeError as error:
            check_dtype(self, x, error)
            raise

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
        return self.prior.log_prob(named_trainable(self) | prior_state(self))

    def score(self, batch: Any) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Return the quantities that an evaluation averages over samples.

        Returns:
            log p(y|x,θ) for each datum (n,), the likelihood's terms (see `Likelihood`), and the targets (no terms and
            None if the module defines log_likelihood and has no likelihood).
        """
        if self.likelihood is None:
            return self.log_likelihood(batch), {}, None
        output, target = self.output_and_target(batch)
        terms = self.likelihood.terms(output) | self.likelihood.target_terms(output, target)
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

    # -- about the model ----------------------------------------------------------------------------------------------

    def recorded_arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that rebuild the network: all except those used only in training."""
        return {name: value for name, value in self._arguments.items() if name not in ONLY_FOR_TRAINING}

    _arguments: dict[str, Any]
    """The constructor arguments, see `lightning_sgmcmc.posterior.description.record_arguments`."""


def overrides(model: EnergyModel, method: str) -> bool:
    """Return whether a model's class overrides a method of `EnergyModel`."""
    return getattr(type(model), method) is not getattr(EnergyModel, method)


def named_trainable(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that require gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_model(model: EnergyModel) -> None:
    """Raise unless network and likelihood are complete.

    Raises:
        ValueError: for manual optimization, or a missing likelihood or network.
    """
    name = type(model).__name__
    check_layers(model)
    if not model.automatic_optimization:
        raise ValueError(
            f"{name} samples by automatic optimization: leave automatic_optimization at True, and put "
            "the update into a sampler"
        )
    if model.likelihood is None and not overrides(model, "log_likelihood"):
        raise ValueError(f"{name} needs a likelihood: pass likelihood=… or define log_likelihood(batch)")
    overridden = any(overrides(model, method) for method in ("forward", "log_likelihood", "output_and_target"))
    if "net" not in model._modules and not overridden:
        raise ValueError(f"{name} needs a network: pass net=… or define forward")
    last, likelihood = _last_layer(getattr(model, "net", None)), model.likelihood
    if likelihood is not None and isinstance(last, likelihood.applies_itself):
        raise ValueError(
            f"net ends in {type(last).__name__}, which {type(likelihood).__name__} applies itself: it needs logits, so "
            "remove that layer"
        )


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
    """Raise if a subclass replaces one of `OWN_STEPS`; a method that calls the base class's own is accepted.

    Raises:
        TypeError: with the class, the method, and the remedy.
    """
    for name, remedy in OWN_STEPS.items():
        owner = next(cls for cls in type(model).__mro__ if name in vars(cls))
        code = getattr(inspect.unwrap(getattr(owner, name)), "__code__", None)
        if issubclass(base, owner) or code is None or name in code.co_names:
            continue
        raise TypeError(
            f"{owner.__name__} defines {name}, and {base.__name__} has its own, without which nothing is sampled "
            f"({remedy}): remove {name} from {owner.__name__}, or call super().{name} in it"
        )


def check_layers(model: nn.Module) -> None:
    """Raise if a lazy layer is still uninitialized."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ValueError(
                f"'{name}' has no shape yet, since its layer is lazy: pass one batch through "
                f"{type(model).__name__} first"
            )


def check_dtype(model: nn.Module, inputs: Any, error: RuntimeError) -> None:
    """Raise an error that names the dtypes if the network failed on float64 inputs, as NumPy makes them.

    Raises:
        TypeError: if the inputs are float64 and the parameters are not.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if isinstance(inputs, Tensor) and inputs.dtype == torch.float64 and dtype not in (None, torch.float64):
        raise TypeError(
            f"the batch's inputs are float64 and the network's parameters {str(dtype).removeprefix('torch.')}: convert "
            "the data by .float() (NumPy's numbers are float64), or use Trainer(precision='64-true')"
        ) from error


def check_shape(log_likelihood: Tensor, chains: bool = False) -> None:
    """Raise unless a log-likelihood has one number per datum.

    Args:
        log_likelihood: shape (n,), or (C, n) with `chains`.
        chains: whether it has a leading chain axis.

    Raises:
        ValueError: if not; the message gives the shape.
    """
    if log_likelihood.dim() != (2 if chains else 1):
        shape = tuple(log_likelihood.shape[1:] if chains else log_likelihood.shape)
        raise ValueError(
            f"log_likelihood(batch) must return one number per datum, shape (n,), got {shape}: the batch's size is "
            "read from it"
        )


def check_part(name: str, value: Any, kind: type) -> None:
    """Raise unless `value` is None or an instance of `kind`; the class itself is refused too."""
    if value is None or isinstance(value, kind):
        return
    if isinstance(value, type):
        raise TypeError(f"{name}={value.__name__} is a class: pass an instance, {name}={value.__name__}(…)")
    raise TypeError(f"{name} should be a {kind.__name__}, got a {type(value).__name__}")


def check_sampler(sampler: Any, lr: Any = None) -> None:
    """Raise unless `sampler` is a sampler factory that leaves the module's own arguments to the module.

    Args:
        sampler: the argument of `BayesianModule`.
        lr: the module's lr; with None the factory may set its own.

    Raises:
        TypeError: if it is no factory of samplers.
        ValueError: if it sets an argument that the module sets, or a weight decay, which would count the prior twice.
    """
    made = sampler.func if isinstance(sampler, functools.partial) else sampler
    if not callable(made):
        raise TypeError(
            "sampler should be a class or function that returns a sampler for parameters, got a "
            f"{type(made).__name__} object: pass the class, with its arguments in functools.partial"
        )
    if isinstance(made, type) and not issubclass(made, Sampler):
        raise TypeError(
            f"sampler={made.__name__} adds no noise: use one of lightning_sgmcmc.samplers (at temperature 0 they "
            "equal torch's optimizers)"
        )
    if isinstance(sampler, functools.partial) and "weight_decay" in sampler.keywords:
        raise ValueError(
            "weight decay is a Gaussian prior, which the potential energy already contains: omit weight_decay, "
            "and pass prior=GaussianPrior(std=…) with std² = 1/(N·weight_decay)"
        )
    for name, value in _set_twice(sampler, lr).items():
        raise ValueError(
            f"sampler=partial({name_of(sampler)}, {name}={value!r}) has no effect, since the module sets {name}: pass "
            f"{'seed' if name == 'first_chain' else name}=… to the module instead"
        )


def _set_twice(sampler: Any, lr: Any) -> dict[str, Any]:
    """Return the keyword arguments of a partial that the module overrides."""
    chosen = chosen_options(sampler, Sampler)
    return {n: v for n, v in chosen.items() if n in SET_BY_MODULE and (n != "lr" or lr is not None)}


def chosen_options(factory: Any, base: type | None = None) -> dict[str, Any]:
    """Return the keyword arguments that a user has chosen in a partial; {} for other factories.

    Args:
        factory: a class, a function, or a partial of one.
        base: a class whose constructor's defaults the made class shares.
    """
    if not isinstance(factory, functools.partial):
        return {}
    if isinstance(factory.func, type):
        return dict(factory.keywords)
    # The command line's partial holds all arguments, those that the user left out by their defaults.
    cls = next((part for part in factory.args if isinstance(part, type)), None)
    signatures = [inspect.signature(kind).parameters for kind in (cls, base) if kind is not None]
    defaults = {n: p.default for parameters in reversed(signatures) for n, p in parameters.items()}
    return {n: v for n, v in factory.keywords.items() if n not in defaults or v != defaults[n]}


def name_of(factory: Any) -> str:
    """Return the name of a class or function, unwrapping a `functools.partial`."""
    if isinstance(factory, functools.partial):
        # The command line's partial calls a parser helper that takes the class as an argument.
        factory = next((part for part in factory.args if isinstance(part, type)), factory.func)
    return getattr(factory, "__name__", type(factory).__name__)
