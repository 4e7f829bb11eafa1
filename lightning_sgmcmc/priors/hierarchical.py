"""A Gaussian prior whose scales are unknown: inverse-gamma hyperpriors, drawn by Gibbs."""

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_choice, check_count, check_positive
from lightning_sgmcmc.priors.base import STATE, Prior, RowDensity, check_patterns, own_parameters
from lightning_sgmcmc.priors.gaussian import Center, Distances, GaussianPrior, Std
from lightning_sgmcmc.tensors import as_rows, sent, square_norms, widest

Groups: TypeAlias = "Literal['tensor', 'layer', 'all'] | Sequence[str]"

VARIANCE = f"{STATE}.variance"

NEVER = 2**62
"""Steps between draws of scales that something else sets."""


def wide_enough(std: float, num_data: int | None, decay: float, most: float) -> float:
    """Return a standard deviation σ, or for few data a larger one, up to `most`, whose weight decay of the mean loss,
    1/(N·σ²), is `decay`: with more of it few data do not move the weights away from 0."""
    return std if num_data is None else max(std, min(most, float(f"{(decay * num_data) ** -0.5:.3g}")))


class HierarchicalPrior(Prior):
    """Gaussians with unknown scales, which are drawn by Gibbs: each group g of parameters has its own factor v_g.

        θ_j | v_g ~ N(c_j, v_g·std_j²),   v_g ~ InvGamma(ν·d/2, ν·d/2),   d coordinates in the group

    For a group with one std that is a variance σ² = v·std² ~ InvGamma(ν·d/2, ν·d/2·std²): the hyperprior counts as much
    as ν times the group's own coordinates, so the scale cannot collapse. The group's marginal prior is a multivariate
    Student-t with ν·d degrees of freedom. The chain's state is (θ, log v), and its energy includes -log p(θ|v) with its
    constant and -log p(log v).

    Every n steps each chain draws v from its conditional under exp(-U/τ), given S = Σ_j (θ_j - c_j)²/std_j²:

        v ~ InvGamma((ν+1)·d/(2τ), (ν·d + S)/(2τ)),   at τ = 0 its mode in log v, (ν·d + S)/((ν+1)·d)

    so exploration stages of a cyclical schedule adapt the scales without noise. At τ = 1 it is the usual conditional
    posterior. Under a `ContourGradient` a draw is a proposal, accepted by the ratio of the flattened densities; with
    `ReplicaExchange` each chain draws at its slot's temperature. Draws depend on (seed, chain, step) alone. A sample's
    `scales` are the standard deviations √v·std of its parameters.

    Args:
        groups: "tensor" gives each parameter tensor a factor, "layer" those of each layer, "all" one to all; or a list
            of name patterns, a factor for each (the first that matches applies).
        nu: ν > 0, weight of the hyperprior relative to the parameters. Below about 0.1 the scales of a network collapse
            to 0, and its predictions to chance.
        std: the scale that the hyperprior expects, as in `GaussianPrior`: a number, "fan_in", or either by pattern.
        every_n_steps: n, steps between draws.
        gain: of "fan_in", see `GaussianPrior`.
        center: c, see `GaussianPrior`.
        centered: see `GaussianPrior`.

    Raises:
        ValueError: if an argument is out of range; when a fit begins, if a pattern does not suit the parameters.
        TypeError: if an argument has the wrong type.

    Source: Chen et al. 2014 (Stochastic Gradient Hamiltonian Monte Carlo, section 4.2 and appendix: Gibbs draws of
    weight decays under Gamma hyperpriors); Neal 1996 (section 2.1: hyperparameters by group).

    Example::

        module = BayesianModule(net, Categorical(), HierarchicalPrior(std="fan_in"), lr=0.1)
    """

    def __init__(
        self,
        groups: Groups = "tensor",
        nu: float = 1.0,
        std: Std = 0.3,
        every_n_steps: int = 20,
        gain: float = math.sqrt(2),
        center: Center = None,
        centered: Sequence[str] | None = None,
    ) -> None:
        if isinstance(groups, str):
            check_choice("the prior's groups", groups, ("tensor", "layer", "all"))
        elif not (isinstance(groups, Sequence) and groups and all(isinstance(one, str) for one in groups)):
            raise TypeError(
                "the prior's groups must be 'tensor', 'layer', 'all' or a list of name patterns such as "
                f"['*.bias', '*'], got {groups!r}"
            )
        check_positive("the prior's nu", nu)
        check_count("the prior's every_n_steps", every_n_steps, optional=False)
        self.groups = groups if isinstance(groups, str) else tuple(groups)
        self.nu = float(nu)
        self.every_n_steps = every_n_steps
        self.given = GaussianPrior(std, gain, center, centered)
        """The prior at v = 1, the scales that the hyperprior expects."""
        self._known: tuple[Any, ...] = ()
        self._index = torch.empty(0, dtype=torch.long)
        """Group of each tensor."""
        self._counts = torch.empty(0)
        """d of each group, float64."""
        self._sizes: tuple[float, ...] = ()
        """The same in the host's memory."""
        self._precisions = torch.empty(0)
        """1/std² of each tensor."""
        self._constant = 0.0

    # -- the groups ---------------------------------------------------------------------------------------------------

    def group_of(self, parameter_name: str) -> str:
        """Return the name of a parameter's group: a tensor, a layer, "*" or a pattern.

        Raises:
            ValueError: if no pattern matches.
        """
        if isinstance(self.groups, str):
            layer = parameter_name.rpartition(".")[0] or parameter_name
            return {"tensor": parameter_name, "layer": layer, "all": "*"}[self.groups]
        found = next((pattern for pattern in self.groups if fnmatchcase(parameter_name, pattern)), None)
        if found is None:
            raise ValueError(
                f"the prior's groups have no pattern for the parameter '{parameter_name}': add one, or '*' for the rest"
            )
        return found

    def scale_of(self, parameter_name: str, shape: Sequence[int] | None = None) -> float:
        """Return the scale that the hyperprior expects; see `GaussianPrior.scale_of`."""
        return self.given.scale_of(parameter_name, shape)

    def check_names(self, names: Collection[str]) -> None:
        self.given.check_names(names)
        if not isinstance(self.groups, str):
            check_patterns("the prior's groups", self.groups, names)

    def initial_state(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return v = 1 for each group, shape (G,), and the centre if it is "start"."""
        groups = dict.fromkeys(map(self.group_of, parameters))
        ones = next(iter(parameters.values())).detach().new_ones(len(groups))
        return {"variance": ones} | self.given.initial_state(parameters)

    def _parts(self, parameters: Mapping[str, Tensor], chains: bool = False) -> tuple[Distances, Tensor]:
        """Return the parameters with their centres, and v, shape (G,) or (C, G)."""
        distances = self.given.distances(parameters, chains)
        first = distances.tensors[0]
        known = (chains, *parameters, *(tensor.shape for tensor in distances.tensors), first.dtype, first.device)
        if known != self._known:
            names = list(own_parameters(parameters))
            groups = list(dict.fromkeys(map(self.group_of, names)))
            shapes = [tensor.shape[1:] if chains else tensor.shape for tensor in distances.tensors]
            index = torch.tensor([groups.index(self.group_of(name)) for name in names])
            sizes = torch.tensor([shape.numel() for shape in shapes], dtype=torch.float64)
            counts = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, index, sizes)
            stds = torch.tensor(list(map(self.scale_of, names, shapes)), dtype=torch.float64)
            weight = counts * self.nu / 2
            self._constant = -float((sizes * (stds * math.sqrt(2 * math.pi)).log()).sum())
            self._constant += float((weight * weight.log() - weight.lgamma()).sum())
            self._index, self._counts = index.to(first.device), sent(counts, first.device)
            self._sizes = tuple(counts.tolist())
            self._precisions = (1 / stds**2).to(first)
            self._known = known
        variance = parameters.get(VARIANCE)
        if variance is None:
            variance = self._precisions.new_ones((len(first), len(self._counts)) if chains else len(self._counts))
        if variance.shape[-1] != len(self._counts):
            raise ValueError(
                f"the prior has {len(self._counts)} groups of parameters, and this module's chains began with "
                f"{variance.shape[-1]}: create a new module to change the groups or what is trained"
            )
        return distances, variance

    # -- the density --------------------------------------------------------------------------------------------------

    def log_prob(self, parameters: Mapping[str, Tensor]) -> Tensor:
        distances, variance = self._parts(parameters)
        precisions = self._precisions / variance[self._index]
        rest = log_density_of_scales(variance, torch.zeros_like(variance), self._counts, self.nu).sum()
        quadratic: Tensor = _Quadratic.apply(precisions, distances, *distances.tensors)
        return quadratic + (rest + self._constant).to(quadratic.dtype)

    def log_prob_of_chains(self, parameters: Mapping[str, Tensor]) -> Tensor:
        distances, variance = self._parts(parameters, chains=True)
        squares = [as_rows(difference, len(difference)).square().sum(1) for difference in distances.differences()]
        precisions = self._precisions / variance[:, self._index]
        rest = log_density_of_scales(variance, torch.zeros_like(variance), self._counts, self.nu).sum(1)
        quadratic = (torch.stack(squares, 1) * precisions).sum(1).mul(-0.5)
        return quadratic + (rest + self._constant).to(quadratic.dtype)

    def of_rows(self, parameters: Mapping[str, Tensor]) -> RowDensity:
        _, variance = self._parts(parameters, chains=True)
        differences = self.given.differences_of_rows(parameters)
        own = own_parameters(parameters)
        sizes = torch.tensor([tensor[0].numel() for tensor in own.values()])
        tensor_of, device = torch.arange(len(sizes)).repeat_interleave(sizes), variance.device
        group_of = self._index[tensor_of.to(device)]
        precisions = self._precisions[tensor_of.to(device)]
        counts, nu, constant, ones = self._counts, self.nu, self._constant, torch.ones_like(variance)

        def log_prob(rows: Tensor, state: Mapping[str, Tensor]) -> Tensor:
            v = state.get(VARIANCE, ones)
            rest = log_density_of_scales(v, torch.zeros_like(v), counts, nu).sum(1) + constant
            squares = differences(rows, state).square() * precisions * v.reciprocal()[:, group_of]
            return squares.sum(1).mul(-0.5) + rest.to(rows.dtype)

        return log_prob

    def log_marginal(self, parameters: Mapping[str, Tensor], chains: bool = False) -> Tensor:
        """Return log p(θ) with the scales integrated out, shape (), or (C,) of chains, float64.

            log p(θ) = Σ_g [log Γ((ν+1)·d/2) - (ν+1)·d/2·log((ν·d + S)/2)] + constant

        that is a multivariate Student-t for each group.

        Args:
            parameters: as for `log_prob`, or for `log_prob_of_chains` with `chains`.
            chains: whether they have a leading axis of chains.
        """
        squares = self.squares(parameters, chains)
        shape = (self.nu + 1) * self._counts / 2
        rest = shape.lgamma() - shape * ((self.nu * self._counts + squares) / 2).log()
        return rest.sum(-1) + self._constant

    def scales(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the present standard deviation of each parameter tensor of a chain, each of shape ().

        Args:
            parameters: as for `log_prob`.
        """
        _, variance = self._parts(parameters)
        stds = (variance[self._index] / self._precisions).sqrt()
        return {name: std.clone() for name, std in zip(own_parameters(parameters), stds.unbind(), strict=True)}

    # -- Gibbs --------------------------------------------------------------------------------------------------------

    def squares(self, parameters: Mapping[str, Tensor], chains: bool = False) -> Tensor:
        """Return S = Σ_j (θ_j - c_j)²/std_j² of each group, float64, shape (G,), or (C, G) of chains.

        Args:
            parameters: as for `log_prob`, or for `log_prob_of_chains` with `chains`.
            chains: whether they have a leading axis of chains.
        """
        distances, _ = self._parts(parameters, chains)
        differences = distances.differences()
        each = widest(square_norms(differences, len(differences[0]) if chains else 1))
        each = each.reshape(len(differences), -1) * widest(self._precisions)[:, None]
        sums = each.new_zeros(len(self._counts), each.shape[1]).index_add_(0, self._index, each)
        return sums.T if chains else sums[:, 0]

    def mode(self, squares: Tensor) -> Tensor:
        """Return the mode of the conditional in log v, (ν·d + S)/((ν+1)·d), of the result of `squares`."""
        return (self.nu * self._counts + squares) / ((self.nu + 1) * self._counts)

    def noise(self, temperature: float, generator: np.random.Generator) -> Tensor:
        """Return a draw of v over the conditional's mode, shape (G,), float64, in host memory, without waiting for the
        device; at temperature 0 all are 1.

        Args:
            temperature: τ of the chain.
            generator: of the chain and step.
        """
        if temperature == 0:
            return torch.ones(len(self._sizes), dtype=torch.float64)
        shape = (self.nu + 1) * np.array(self._sizes) / (2 * temperature)
        return torch.from_numpy(shape / generator.standard_gamma(shape))

    def log_density_of(self, variance: Tensor, squares: Tensor) -> Tensor:
        """Return log p(θ|v) + log p(log v) up to a constant, for one or each chain, from the result of `squares`."""
        return log_density_of_scales(variance, squares, self._counts, self.nu).sum(-1)

    def __repr__(self) -> str:
        groups = self.groups if isinstance(self.groups, str) else list(self.groups)
        inner = repr(self.given).partition("(")[2]
        every = "" if self.every_n_steps == NEVER else f"every_n_steps={self.every_n_steps}, "
        return f"HierarchicalPrior(groups={groups!r}, nu={self.nu:g}, {every}{inner}"


def log_density_of_scales(variance: Tensor, squares: Tensor, counts: Tensor, nu: float) -> Tensor:
    """Return -(ν+1)·d/2·log v - (ν·d + S)/(2v), the part of log p(θ|v) + log p(log v) that depends on v, by group, for
    v and S of shape (…, G) and d of shape (G,)."""
    v = widest(variance)
    return -((nu + 1) / 2 * counts * v.log() + (nu * counts + squares) / (2 * v))


class _Quadratic(torch.autograd.Function):
    """-Σ_k w_k·‖θ_k - c_k‖²/2 in a few calls for all tensors, with weights that are a tensor on the device."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, distances: Distances, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *tensors)
        ctx.distances = distances._replace(tensors=())
        norms = torch.stack(torch._foreach_norm(distances.differences()))
        return torch.dot(norms.square(), weights).mul_(-0.5)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad,), (weights, *tensors) = grad_outputs, ctx.saved_tensors
        differences = ctx.distances._replace(tensors=tuple(tensors)).differences()
        factors = (weights * -grad).unbind()
        if torch.is_grad_enabled():  # a second derivative is asked for
            return (None, None, *(t * factor for t, factor in zip(differences, factors, strict=True)))
        return (None, None, *torch._foreach_mul(differences, factors))
