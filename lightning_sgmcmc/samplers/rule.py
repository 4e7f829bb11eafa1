"""The base of a sampler's update rule: its contract, the law of its step, and helpers to write it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sgmcmc.checks import names_arguments
from lightning_sgmcmc.samplers.flat import FlatGroup, FlatParameters
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.tensors import Control, as_rows, for_each_tensor

SPLIT_BY_THREADS = 32768
"""Size from which torch's threads share the sum of a tensor, in another order than several sums."""


class UpdateRule(Optimizer):
    """What a subclass of `Sampler` defines, `update` and `law`, and what it may use for it."""

    num_data: int | None
    num_chains: int

    momentum_buffer: ClassVar[str | None] = None
    """Name of the state tensor that holds a parameter's momentum; None for rules without momentum."""

    elementwise: ClassVar[bool] = False
    """Whether `update` treats each coordinate by itself, so that one tensor (C, d) may replace a group's tensors. It
    counts for the class that defines `update`; a subclass with a rule of its own sets it itself."""

    has_cold_limit: ClassVar[bool] = True
    """Whether the rule has a limit at temperature 0, an optimizer; a rule without one makes no step there."""

    _takes_rows: ClassVar[bool] = False
    """Whether the class is elementwise, and its `update` is not of a subclass that leaves this unsaid."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owners = [next(base for base in cls.__mro__ if name in vars(base)) for name in ("elementwise", "update")]
        cls._takes_rows = cls.elementwise and issubclass(*owners)
        names_arguments(cls)

    flat: "FlatParameters | None" = None
    """The parameters as rows of one tensor, during a fit with several chains or on a GPU."""

    held: Mapping[int, int] = {}
    """The row of a parameter that is not sampled, by the parameter's place among all groups'."""

    per_chain_state: ClassVar[tuple[str, ...]] = ()
    """Names of the state tensors with one number for each chain, shape (C,)."""

    @property
    def draws(self) -> int:
        """Number of standard normal tensors that a step with noise takes for each parameter."""
        return 1

    @staticmethod
    def is_noisy(group: dict[str, Any]) -> bool:
        """Return whether steps of a parameter group have noise: whether its temperature is not the number 0."""
        temperature = group["temperature"]
        return isinstance(temperature, Tensor) or temperature != 0

    def update(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: list[Tensor] | None
    ) -> None:
        """Update `params` in place by one step. This is the contract of a rule: `step` calls it, and so may a loop.

        A rule reads the controls (`CONTROLS`) and its own options from `group`, keeps what it carries from step to step
        in `self.state[p]`, and never reads a tensor's values back, since the host would wait for the device.

        Args:
            group: a parameter group, or a dictionary with its entries.
            params: the group's parameters that have a gradient, any subset of the group's; or all of them as one tensor
                of shape (C, d), if the rule is `elementwise`.
            grads: gradient of the mean potential Ũ/N for each of them, of the same shape; not changed.
            noise: a standard normal tensor for each of them, of the same shape, which the rule may overwrite; with
                `draws` > 1 as many lists of them, one after the other; None for a step without noise.
        """
        raise NotImplementedError

    # -- the law of a step, for diagnostics, EWSG and replica exchange ------------------------------------------------

    def plain_law(self, group: dict[str, Any]) -> StepLaw | None:
        """Return `law` for a rule without a preconditioner, whose steps are so in the parameters' own coordinates.

        Args:
            group: as for `law`.
        """
        return self.law(group)

    def law(self, group: dict[str, Any]) -> StepLaw | None:
        """Return the law of the group's next step; None for a rule whose steps are not of that form.

        Where there is a `preconditioner` G it is the law in its metric, with the gradient √G⊙g.

        Args:
            group: a parameter group with the controls of the step, or a dictionary with its entries.
        """
        return None

    def langevin_law(self, group: dict[str, Any]) -> StepLaw:
        """Return the law of θ ← θ - lr·κ·g + √(2·lr·τ/N)·ξ, in the metric of the `preconditioner` where there is one.

        It is SGLD's law, and what diagnostics assume of a rule whose `law` is None.
        """
        force = group["lr"] * group["gradient_multiplier"]
        return StepLaw(0.0, force, self._noise_variance(group), None, self._noise_factor(group))

    def momenta(self, group: dict[str, Any]) -> list[Tensor] | None:
        """Return the momenta m of `law` before a step with noise; None for rules without momentum.

        They are the state's own tensors, zero at first and converted if need be, so writing to them changes the state.
        """
        return None if self.momentum_buffer is None else self._buffers(group["params"], self.momentum_buffer)

    def preconditioner(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the metric G of steps such as -lr·G⊙g + √(2·lr·τ·G/N)⊙ξ, None where G = 1."""
        return None

    def stored_momenta(self, group: dict[str, Any]) -> list[Tensor | None]:
        """Return each parameter's momentum as the state holds it, None where the state holds none."""
        name = self.momentum_buffer
        return [self.state[p].get(name) if p in self.state else None for p in group["params"]]

    def rescale_momenta(self, group: dict[str, Any], factor: Control) -> None:
        """Multiply the momenta of a group's parameters by a number, or by a factor for each chain, shape (C,).

        Momenta that a step without noise left have no temperature and stay as they are.
        """
        held = [momentum for momentum in self.stored_momenta(group) if momentum is not None]
        if held:
            self._scale(held, factor)

    def sampled_numel(self, parameter: Tensor) -> int:
        """Return the number of a parameter's coordinates in one chain, without its held row."""
        shape = parameter.shape[1:] if self.num_chains > 1 else parameter.shape
        held = self.held and self.held.get(self._place_of(parameter)) is not None
        return shape.numel() - (shape[1:].numel() if held else 0)

    def _place_of(self, parameter: Tensor) -> int:
        places = (p is parameter for group in self.param_groups for p in group["params"])
        return next((place for place, found in enumerate(places) if found), -1)

    def _coordinates(self, params: Sequence[Tensor]) -> int:
        """Return the number d of a chain's sampled coordinates.

        Args:
            params: parameters of a group, or all of them as one tensor.
        """
        flat = self._flat_group(params)
        if not self.held:
            return sum(p.numel() for p in params) // self.num_chains
        return sum(map(self.sampled_numel, params if flat is None else flat.parameters))

    # -- helpers for the update rules ---------------------------------------------------------------------------------

    def _buffers(self, params: Sequence[Tensor], name: str) -> list[Tensor]:
        """Return the state tensors `name`, one in the shape of each parameter, zero at first."""
        flat = self._flat_group(params)
        if flat is not None:
            return [flat.buffer(self.state, name)]
        buffers = []
        for p in params:
            state = self.state[p]
            if name not in state:
                state[name] = torch.zeros_like(p)
            buffers.append(state[name])
        return buffers

    def _flat_group(self, params: Sequence[Tensor]) -> FlatGroup | None:
        """Return the group of which `params` are all parameters as one tensor; None for ordinary parameters."""
        return None if self.flat is None else self.flat.group_of(params)

    def _is_fused(self, params: Sequence[Tensor]) -> bool:
        """Return whether `params` are rows whose step is to be one compiled function."""
        return self.flat is not None and self.flat.fused and self._flat_group(params) is not None

    def _each(self, params: Sequence[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """Return views of `tensors`, shaped as `params`, with one for each parameter."""
        flat = self._flat_group(params)
        return tensors if flat is None else flat.pieces(tensors[0])

    def _add(self, targets: list[Tensor], sources: list[Tensor], factor: Control) -> None:
        """Add factor·sources to targets in place; the factor is one number, or one for each chain."""
        if isinstance(factor, Tensor):
            torch._foreach_addcmul_(targets, sources, for_each_tensor(factor, targets))
        else:
            torch._foreach_add_(targets, sources, alpha=factor)

    def _scale(self, targets: list[Tensor], factor: Control) -> None:
        """Multiply targets by factor in place; the factor is one number, or one for each chain."""
        if isinstance(factor, Tensor):
            torch._foreach_mul_(targets, for_each_tensor(factor, targets))
        else:
            torch._foreach_mul_(targets, factor)

    def _inner(self, params: Sequence[Tensor], first: list[Tensor], second: list[Tensor]) -> Tensor:
        """Return the inner product over all coordinates of each chain, shape (C,)."""
        products = list(torch._foreach_mul(first, second))
        if products[0].device.type == "cpu":  # in the order of the sums of a chain alone
            products = self._each(params, products)
        # The sum of a row is that of the row alone; the sum of a column depends on how many there are.
        return torch.stack([self._sums(as_rows(product, self.num_chains)) for product in products], 1).sum(1)

    @staticmethod
    def _sums(rows: Tensor) -> Tensor:
        """Return the sum of each row, shape (C,), on a CPU bit for bit that of the row alone."""
        splits_rows = rows.device.type == "cpu" and rows.shape[1] >= SPLIT_BY_THREADS and torch.get_num_threads() > 1
        return torch.stack([row.sum() for row in rows]) if splits_rows else rows.sum(1)

    def _noise_variance(self, group: dict[str, Any], friction: Control = 1) -> Control:
        """Return 2·friction·lr·τ/N; 0 where the temperature is the number 0."""
        if not self.is_noisy(group):
            return 0.0
        return 2 * friction * group["lr"] * group["temperature"] / self.num_data

    def _thermal_variance(self, group: dict[str, Any]) -> Control:
        """Return lr·τ/N; 0 where the temperature is the number 0."""
        return group["lr"] * group["temperature"] / self.num_data if self.is_noisy(group) else 0.0

    def _noise_factor(self, group: dict[str, Any]) -> Control:
        """Return lr·N/(2·τ); infinite where the temperature is the number 0."""
        return group["lr"] * self.num_data / (2 * group["temperature"]) if self.is_noisy(group) else math.inf
