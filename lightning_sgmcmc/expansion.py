"""Parameter expansion: a layer's weight as a product of matrices, which samples and stores hold collapsed.

An expanded layer is one of torch's parametrizations. Its factors are what a chain samples. Elsewhere it is the plain
layer: samples hold the product under the plain layer's name, and a sample's weight takes the product's place.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.tensors import copied

Module = TypeVar("Module", bound=nn.Module)
WEIGHT = "weight"
PLAIN = "plain"
"""Name of the buffer that takes the product's place."""
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def product(inner: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Return P_1…P_c·V·Q_1…Q_d, shape (outputs, inputs, …).

    V is the weight of a linear or convolution layer, whose outputs the P (outputs, outputs) mix, and whose inputs the Q
    (inputs, inputs), at each place of a kernel alike.
    """
    weight = inner.flatten(1)
    for factor in reversed(left):
        weight = factor @ weight
    weight = weight.view(inner.shape)
    for factor in right:
        weight = weight @ factor if inner.dim() == 2 else (factor.mT @ weight.flatten(2)).view(inner.shape)
    return weight


class Product(nn.Module):
    """A parametrization by `product`, with identities as matrices at first."""

    plain: Tensor | None

    def __init__(self, left: int, right: int) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.register_buffer(PLAIN, None, persistent=False)

    def forward(self, inner: Tensor, *factors: Tensor) -> Tensor:
        if self.plain is not None:
            return self.plain
        return product(inner, factors[: self.left], factors[self.left :])

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the factors of a weight: itself and identities."""
        options: Any = {"dtype": weight.dtype, "device": weight.device}
        sizes = [weight.shape[0]] * self.left + [weight.shape[1]] * self.right
        return weight, *(torch.eye(size, **options) for size in sizes)


def expand(network: Module, depth: tuple[int, int] = (1, 1)) -> Module:
    """Write the weights of a network's linear and convolution layers as products of matrices (PX-SGMCMC).

        W = P_1…P_c·V·Q_1…Q_d,   V in the shape of W, the P of its outputs and the Q of its inputs

    The network is the same function at first: V = W, and the P and Q are identities. A chain then walks through the
    factors, which preconditions its steps in W. The prior is one on the factors: with independent Gaussians around 0 of
    variances σ_P², σ_V² and σ_Q² an entry of W (m outputs, n inputs, c = d = 1) has the mean 0 and the variance
    m·n·σ_P²·σ_V²·σ_Q², is uncorrelated with the others, and has heavier tails than a Gaussian. The paper's variances
    are 0.02 of V and 0.5 of the others: `GaussianPrior({"*.original[1-9]*": 0.7, "*": 0.14})`, where `original0` is V.
    The posterior of W is that of this prior, not that of the plain network's.

    Samples, stores and predictions hold W under the plain layer's name, so they have the plain network's size and
    cost, and `Posterior.load` opens them without this function. Checkpoints hold the factors. Biases and the layers of
    other kinds stay as they are (the paper multiplies biases by P too), and so do frozen layers.

    Args:
        network: the network, changed in place, before it becomes a part of a `BayesianModule`.
        depth: c and d, the numbers of matrices on the left and on the right.

    Returns:
        the network.

    Raises:
        ValueError: for a depth of (0, 0), a network without such a layer, one with adapters (LoRA, whose weights are
            products already), a weight that several layers share, or one with another parametrization.

    Example::

        net = expand(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)))
        prior = GaussianPrior({"*.original[1-9]*": 0.7, "*": 0.14})
        module = BayesianModule(net, Categorical(), prior, sampler=SGHMC, lr=0.01)

    Source: Kim et al. 2025 (Parameter expanded stochastic gradient Markov chain Monte Carlo), section 3.
    """
    if not isinstance(depth, tuple | list) or len(depth) != 2:
        raise ValueError(f"depth must be two whole numbers, of matrices on the left and on the right, got {depth!r}")
    for place, number in enumerate(depth):
        check_count(f"depth[{place}]", number, least=0, optional=False)
    if not any(depth):
        raise ValueError("depth=(0, 0) expands nothing: pass at least one matrix, such as (1, 1)")
    if any(hasattr(part, "lora_A") for part in network.modules()):
        raise ValueError("network has LoRA adapters, whose weights are products already: expand a network without them")
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, LAYERS)}
    taken = {name: layer for name, layer in layers.items() if layer.weight.requires_grad}
    if not taken:
        raise ValueError(
            f"{type(network).__name__} has no linear or convolution layer with a weight that requires gradients, so "
            "there is nothing to expand: omit expand"
        )
    _check_weights(network, taken)
    for layer in taken.values():
        parametrize.register_parametrization(layer, WEIGHT, Product(*depth))
    return network


def _check_weights(network: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    uses = [id(p) for _, p in network.named_parameters(remove_duplicate=False)]
    for name, layer in layers.items():
        if parametrize.is_parametrized(layer):
            raise ValueError(f"'{name}' has a parametrization already: expand a network once, and before others")
        weight: Any = layer.weight
        if uses.count(id(weight)) > 1:
            others = [own for own, use in zip(names, uses, strict=True) if use == id(weight)]
            raise ValueError(
                f"{' and '.join(map(repr, others))} are one weight, which an expansion would separate: freeze it, or "
                "give each layer its own"
            )


# -- expanded layers elsewhere ----------------------------------------------------------------------------------------


class Expansion(NamedTuple):
    """An expanded weight: the plain name, the names of V, P_1, …, Q_1, …, their rule, and the buffer in its place."""

    name: str
    factors: tuple[str, ...]
    rule: Product
    slot: str

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the product of factors by name."""
        inner, *factors = (tensors[name] for name in self.factors)
        return product(inner, factors[: self.rule.left], factors[self.rule.left :])


def expansions_of(module: nn.Module) -> list[Expansion]:
    """Return the expanded weights of a module, in the order of its layers."""
    found = []
    for prefix, part in module.named_modules():
        if is_expanded(part):
            rule, layer = _rule(part), f"{prefix}." if prefix else ""
            inside = f"{layer}parametrizations.{WEIGHT}."
            factors = tuple(f"{inside}original{index}" for index in range(1 + rule.left + rule.right))
            found.append(Expansion(f"{layer}{WEIGHT}", factors, rule, f"{inside}0.{PLAIN}"))
    return found


def is_expanded(layer: nn.Module) -> bool:
    """Return whether a layer's weight is a `Product`."""
    own = layer._modules.get("parametrizations")
    if not isinstance(own, nn.ModuleDict) or WEIGHT not in own:  # a prior's centre has a part of this name too
        return False
    rules: Any = own[WEIGHT]
    return isinstance(rules[0], Product)


def _rule(layer: nn.Module) -> Product:
    own: Any = layer._modules["parametrizations"]
    rule: Product = own[WEIGHT][0]
    return rule


def plain_type(layer: nn.Module) -> type[nn.Module]:
    """Return a layer's class without torch's mark of a parametrization, where it is expanded."""
    return type(layer).__bases__[0] if is_expanded(layer) else type(layer)


def collapsed(tensors: Mapping[str, Tensor], module: nn.Module, num_chains: int = 1) -> dict[str, Tensor]:
    """Return tensors by name, of C stacked chains if C > 1, with expanded weights' products in their factors' place."""
    expansions = [expansion for expansion in expansions_of(module) if expansion.factors[0] in tensors]
    if not expansions:
        return dict(tensors)
    inside = {name for expansion in expansions for name in expansion.factors}
    layers = {expansion.name.removesuffix(WEIGHT): expansion for expansion in expansions}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        owner = name.partition("parametrizations.")[0] if name in inside else name.rpartition(".")[0] + "."
        expansion = layers.pop(owner.removeprefix("."), None)
        if expansion is not None:
            own = {factor: tensors[factor] for factor in expansion.factors}
            found[expansion.name] = expansion.of(own) if num_chains == 1 else torch.vmap(expansion.of)(own)
        if name not in inside:
            found[name] = tensor
    return found


def with_factors(tensors: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return a state by name with the factors W, I, …, I instead of each plain weight W that a module has expanded."""
    found = dict(tensors)
    for expansion in expansions_of(module):
        if expansion.name in found:
            factors = expansion.rule.right_inverse(found.pop(expansion.name))
            found |= dict(zip(expansion.factors, factors, strict=True))
    return found


def reset_expanded(layer: Any) -> None:
    """Call an expanded layer's `reset_parameters`: V becomes the fresh weight, the others identities."""
    rule, own = _rule(layer), layer.parametrizations[WEIGHT]
    originals = [getattr(own, f"original{index}") for index in range(1 + rule.left + rule.right)]
    fresh: Tensor = originals[0].detach().clone()
    rule.plain = fresh
    try:
        layer.reset_parameters()
        factors = rule.right_inverse(fresh)
    finally:
        rule.plain = None
    with torch.no_grad():
        for original, factor in zip(originals, factors, strict=True):
            original.copy_(factor)


def collapse(module: Module) -> Module:
    """Return a copy of a module whose expanded layers are plain ones, or the module itself if it has no such layer."""
    if not any(map(is_expanded, module.modules())):
        return module
    found = copied(module)
    for layer in expanded_layers(found):
        make_plain(layer)
    return found


def expanded_layers(module: nn.Module) -> Iterator[Any]:
    """Yield the expanded layers of a module."""
    yield from filter(is_expanded, list(module.modules()))


def make_plain(layer: Any) -> None:
    """Make an expanded layer a plain one in place; copies of it, which share its class, stay as they are."""
    own = layer.parametrizations[WEIGHT]
    weight = nn.Parameter(layer.weight.detach().clone(), own.original0.requires_grad)
    layer.__class__ = plain_type(layer)
    del layer._modules["parametrizations"]
    layer._parameters = {WEIGHT: weight} | {n: p for n, p in layer._parameters.items() if n != WEIGHT}
