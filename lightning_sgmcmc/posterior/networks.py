"""Samples as plain networks, and their average as one network."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_sgmcmc.batches.inputs import arguments_of_network, called, unwrapped
from lightning_sgmcmc.chains.execution import MASK_SEED, borrowed, homes_of, network_state, state_of
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.expansion import expanded_layers, expansions_of, make_plain
from lightning_sgmcmc.files import check_regular, local_path
from lightning_sgmcmc.likelihoods import Likelihood
from lightning_sgmcmc.model import EnergyModel, overrides
from lightning_sgmcmc.posterior.calibration import Calibration
from lightning_sgmcmc.posterior.predictive import check_sample
from lightning_sgmcmc.posterior.store import MemoryStore, SampleStore
from lightning_sgmcmc.predictions import ON_REQUEST, Members, Prediction, RegressionPrediction
from lightning_sgmcmc.priors.centers import read_tensors, weights_in, weights_of
from lightning_sgmcmc.tables import TargetScaling
from lightning_sgmcmc.tensors import copied, exact

RUN_PARTS = (
    *("chains", "posterior", "evaluations", "health", "contour", "plan", "sampler_factory", "prior"),
    "other_weights",
)
"""Attributes of a module that belong to its run and not to its network."""


class ForwardNetwork(nn.Module):
    """The layers of a module that defines `forward` or `output_of` itself, with these methods, without Lightning."""

    def __init__(self, model: EnergyModel) -> None:
        super().__init__()
        self._class: Any = type(model)
        self.stands_for: int | None = id(model)
        self._compiled_net: list[nn.Module] = []
        self.accepted_arguments = model.accepted_arguments
        lightning = vars(EnergyModel(None, None, None))
        for name, value in vars(model).items():
            if name not in lightning and name not in RUN_PARTS and not name.startswith("_"):
                setattr(self, name, value)
        for kind in ("_parameters", "_buffers", "_modules"):
            own = {name: part for name, part in getattr(model, kind).items() if name not in ("likelihood", "prior")}
            getattr(self, kind).update(own)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ForwardNetwork":
        made = ForwardNetwork.__new__(ForwardNetwork)
        memo[id(self)] = made
        if self.stands_for is not None:  # functions that name the model's self have the copy there
            memo[self.stands_for] = made
        vars(made).update(copy.deepcopy(vars(self), memo), stands_for=None)
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._class.forward(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            method = getattr(vars(self).get("_class"), name, None)
            if method is None or not callable(method):
                raise
            return method.__get__(self)


def plain_networks(
    store: SampleStore, model: EnergyModel, with_hooks: bool = False
) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Yield each sample's network and likelihood, in evaluation mode; see `Posterior.networks`."""
    device = next(model.parameters()).device
    shared: dict[str, Tensor] = {}
    own_methods = overrides(model, "forward") or (with_hooks and overrides(model, "output_of"))
    for sample in store:
        if MASK_SEED in sample.buffers:
            raise ValueError(
                "these samples are dropout masks (MCDropout), and a plain network has none: use predict, or samples of "
                "another callback"
            )
        with borrowed(model):
            check_sample(sample, model)
            with model.at_chain(0):
                own = {name: tensor.to(device) for name, tensor in sample.own_state.items()}
                common = {name: tensor.to(device) for name, tensor in sample.shared.items() if name not in shared}
                network = ForwardNetwork(model) if own_methods or "net" not in model._modules else model.net
                made = _with_tensors(model, network, own, common, shared)
        yield made


def _with_tensors(
    model: EnergyModel,
    network: nn.Module,
    own_state: Mapping[str, Tensor],
    common: Mapping[str, Tensor],
    shared: dict[str, Tensor],
) -> tuple[nn.Module, nn.Module | None]:
    """Return copies of a model's network and likelihood with the tensors of a sample."""
    own = state_of(model)
    # No tensor is copied with the modules: each is replaced below. What a forward pass left in them has a graph.
    left = [leaf for part in network.modules() for leaf in pytree.tree_leaves(vars(part)) if isinstance(leaf, Tensor)]
    memo = {id(leaf): leaf.detach() for leaf in left if not leaf.is_leaf} | {id(t): t for t in own.values()}
    parts: list[Any] = copied([network, model.likelihood], memo)
    names = {id(tensor): name for name, tensor in own.items()}
    weights = {id(own[expansion.factors[0]]): expansion.name for expansion in expansions_of(model)}
    made: dict[str, Tensor] = {}
    for part in parts:
        if part is None:
            continue
        part.eval()
        for layer in expanded_layers(part):
            factor = layer.parametrizations.weight.original0
            make_plain(layer)
            names[id(layer.weight)] = weights[id(factor)]
        for homes in homes_of(part).values():
            for home, key in homes:
                old = home[key]
                name = names.get(id(old))
                if name is None:
                    continue
                copies = made if name in own_state else shared
                if name not in copies:
                    tensor = own_state.get(name, common.get(name, old)).detach().clone()
                    is_parameter = isinstance(old, nn.Parameter)
                    copies[name] = nn.Parameter(tensor, old.requires_grad) if is_parameter else tensor
                home[key] = copies[name]
    return parts[0], parts[1]


class _Member(nn.Module):
    """A sample's network and likelihood; returns the tensors whose averages describe the predictive."""

    def __init__(self, net: nn.Module, likelihood: Any) -> None:
        super().__init__()
        self.net = net
        self.likelihood = likelihood
        self._arguments = None if isinstance(net, ForwardNetwork) else arguments_of_network(net)

    def forward(self, inputs: Any) -> dict[str, Tensor]:
        net: Any = self.net
        if self._arguments is None:
            output = net.output_of(inputs)
        else:
            output = unwrapped(net(inputs) if isinstance(inputs, Tensor) else called(net, inputs, self._arguments))
        terms: dict[str, Tensor] = self.likelihood.terms(output)
        return terms


class Ensemble(nn.Module):
    """The average of a posterior's samples as one plain network, which needs neither samples nor Lightning.

        p(y|x) = Σ_j w_j·p(y|x, θ_j)

    Its forward returns parts of the `Prediction` that `Posterior.predict` returns, equal up to rounding: for classes
    the probabilities, for numbers the mean and the standard deviation. It always is in evaluation mode, and its
    parameters require no gradients.

    Args:
        members: each sample's network and likelihood.
        weights: their weights, positive, summing to 1.
        calibration: applied to the average, or None.
        scaling: of the targets, or None.
        outputs: names of the parts; None for the kind's own.

    Example::

        program = torch.export.export(posterior.ensemble(), (x,), strict=False)
        # torch.onnx.export(…, dynamo=True) takes both
    """

    def __init__(
        self,
        members: Sequence[tuple[nn.Module, nn.Module]],
        weights: Sequence[float],
        calibration: Calibration | None = None,
        scaling: TargetScaling | None = None,
        outputs: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(_Member(*member) for member in members)
        self.weights = [float(weight) for weight in weights]
        self.calibration = calibration
        self.scaling = scaling
        self.outputs = None if outputs is None else tuple(outputs)
        self.requires_grad_(False)
        super().train(False)

    def train(self, mode: bool = True) -> "Ensemble":
        """Return the network; it stays in evaluation mode, since its statistics and layers are those of samples."""
        return self

    def forward(self, x: Any = None, *others: Any, **named: Any) -> Tensor | tuple[Tensor, ...]:
        """Return the averaged predictive for inputs.

        Args:
            x: the input, a tensor or a dict.
            others: further inputs by position.
            named: inputs by name, of which one may be x.

        Returns:
            class probabilities (n, K), or the mean and standard deviation, each (n, D); with `outputs`, these parts.
        """
        # A network's own input may be named x.
        inputs = ({} if x is None else {"x": x}) | named if named else (x, *others) if others else x
        terms: dict[str, Tensor] = {}
        likelihood: Any = self.members[0].likelihood
        each: list[Tensor] = []
        for weight, member in zip(self.weights, self.members, strict=True):
            own = member(inputs)
            each += [own[likelihood.per_sample_term]] if self.calibration is not None else []
            for name, term in own.items():
                terms[name] = terms[name] + weight * term if name in terms else weight * term
        prediction: Prediction = likelihood.prediction(terms, None)
        if self.calibration is not None:
            if "probabilities" in prediction.parts:
                prediction.with_kept(Members(torch.stack(each), torch.as_tensor(self.weights)))
            prediction = self.calibration.applied(prediction)
        if self.scaling is not None:
            prediction = prediction.rescaled(self.scaling.shift, self.scaling.factor, self.scaling.is_far)
        chosen = [getattr(prediction, name) for name in self.outputs or outputs_of(prediction)]
        return chosen[0] if len(chosen) == 1 else tuple(chosen)


def outputs_of(prediction: Prediction) -> tuple[str, ...]:
    """Return the parts of a prediction that an `Ensemble` returns by default."""
    if "probabilities" in prediction.parts:
        return ("probabilities",)
    if isinstance(prediction, RegressionPrediction):
        return ("mean", "std")
    return tuple(name for name in prediction.parts if not name.startswith(ON_REQUEST))


# -- networks from elsewhere -------------------------------------------------------------------------------------------


ENDINGS = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
"""How the names of files with weights end."""
State = Mapping[str, Tensor] | nn.Module | str | Path


def samples_of_states(states: Iterable[State] | str | Path, model: EnergyModel) -> MemoryStore:
    """Return networks that were trained elsewhere as samples of a model, one of each chain; see
    `Posterior.from_states`."""
    given: Sequence[State] = _files_in(states) if isinstance(states, str | Path) else list(states)
    if not given:
        raise ValueError("states is empty: pass at least one state dict, module or file with weights")
    names, parameters = network_state(model), {name for name, _ in model.named_parameters()}
    kept = parameters | set(model.state_dict())  # not the buffers that a network makes itself
    own = {name.removeprefix("net."): name for name in names if name.startswith("net.") and name in kept}
    store = MemoryStore()
    for chain, state in enumerate(given):
        place = str(state) if isinstance(state, str | Path) else f"states[{chain}]"
        tensors = _tensors_of(state, place)
        tensors = weights_of(model.net, {short: names[name] for short, name in own.items()}, tensors, place)
        # As `load_state_dict` does: files often have 16 bits, in which the network was not to compute.
        found = {own[short]: t.to(names[own[short]].dtype, copy=True) for short, t in tensors.items()}
        found |= {name: tensor.detach().clone() for name, tensor in names.items() if name not in found}
        sampled = {name: tensor for name, tensor in found.items() if name in parameters}
        others = {name: tensor for name, tensor in found.items() if name not in parameters}
        store.append(PosteriorSample(0, 0, chain, math.nan, 0.0, sampled, others))
    return store


def mean_likelihood(likelihood: Likelihood, samples: Iterable[PosteriorSample], weights: Tensor) -> Likelihood:
    """Return a copy of a likelihood whose parameters are the weighted means over samples."""
    found = copy.deepcopy(likelihood)
    for name, parameter in found.named_parameters():
        each = torch.stack([exact(sample.state[f"likelihood.{name}"]) for sample in samples])
        parameter.data.copy_(torch.tensordot(weights.cpu(), each, 1))
    return found


def _files_in(folder: str | Path) -> list[Path]:
    """Return the files with weights in a folder, in the order of their names, or the file itself."""
    path = local_path(folder, "states", "copy the files to one first")
    if path.is_file():
        return [path]
    files = sorted(file for file in path.glob("*") if file.suffix in ENDINGS)
    if not files:
        fault = f"has no file that ends with {', '.join(ENDINGS)}" if path.exists() else "does not exist"
        raise FileNotFoundError(f"states={str(folder)!r} {fault}")
    return files


def _tensors_of(state: State, place: str) -> dict[str, Tensor]:
    """Return the tensors of a state dict, a module, a file of either, or a checkpoint of Lightning."""
    content: Any = state.state_dict() if isinstance(state, nn.Module) else state
    if isinstance(state, str | Path):
        path = local_path(state, "states", "copy the file to one first")
        if path.is_dir():
            (path, *others) = _files_in(path)
            if others:
                raise ValueError(f"{place} has {len(others) + 1} files of weights: pass one file for each network")
        check_regular(path.resolve())
        try:
            content = read_tensors(path, "the file")
        except ValueError as error:
            raise ValueError(f"{place} cannot be read as weights: {error}") from error
    if not isinstance(content, Mapping):
        raise TypeError(f"{place} should be a state dict, a module or a file of one, got a {type(content).__name__}")
    try:
        content = weights_in(content)
    except ValueError as error:
        raise ValueError(f"{place} {error}") from error
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
