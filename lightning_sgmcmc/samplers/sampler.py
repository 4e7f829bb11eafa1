"""The base class of all samplers: controls, noise, step counter, chain axis.

**The one step-size convention.** A sampler sees the gradient `g` of the mean potential `Ũ/N`, as an ordinary optimizer
sees the gradient of a mean loss, and `lr` multiplies it. A paper's step size ε for the gradient of the full potential U
is `lr = ε·N`: ε = 2e-6 with N = 50,000 data is `lr = 0.1`. The injected noise follows from it: SGLD adds noise of
variance `2·lr·τ/N` at each step, where τ is the temperature (τ = 1 samples the posterior exp(-U)). The one exception is
`UnderdampedLangevin`, whose `lr` is the time step h of its equation.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sgmcmc.checks import check_count, check_flag, names_arguments
from lightning_sgmcmc.samplers.checks import check_group, check_options, check_parameters, checked_state, torch_state
from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.samplers.noise import ChainNoise, NoiseBlocks
from lightning_sgmcmc.samplers.rows import FlatGroup, FlatParameters
from lightning_sgmcmc.tensors import Control, as_rows, for_each_tensor, square_root

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

    takes_blocks: ClassVar[bool] = False
    """Whether `update` uses its noise by `_add` and `along` alone, so that a large one may be drawn in blocks. It
    counts for the class that defines `update`, as `elementwise` does."""

    has_cold_limit: ClassVar[bool] = True
    """Whether the rule has a limit at temperature 0, an optimizer; a rule without one makes no step there."""

    _takes_rows: ClassVar[bool] = False
    """Whether the class is elementwise, and its `update` is not of a subclass that leaves this unsaid."""
    _takes_blocks: ClassVar[bool] = False
    """The same of blocks of noise."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names = "update", "elementwise", "takes_blocks"
        update, *owners = (next(base for base in cls.__mro__ if name in vars(base)) for name in names)
        cls._takes_rows = cls.elementwise and issubclass(owners[0], update)
        cls._takes_blocks = cls.takes_blocks and issubclass(owners[1], update)
        names_arguments(cls)

    flat: "FlatParameters | None" = None
    """The parameters as rows of one tensor, during a fit with several chains or on a GPU."""

    held: Mapping[int, int] = {}
    """The row of a parameter that is not sampled, by the parameter's place among all groups'."""

    cold_momentum_is_over_lr: ClassVar[bool] = False
    """Whether steps without noise keep the momentum over lr, so that a change of lr rescales it."""

    @property
    def copies(self) -> int:
        """Tensors in the parameters' shapes that the rule keeps from step to step."""
        return int(self.momentum_buffer is not None)

    @property
    def counts_steps(self) -> bool:
        """Whether a step depends on the number of steps before it, which the groups hold."""
        return False

    def sets_options(self, group: dict[str, Any]) -> bool:
        """Return whether the next step changes other entries of a group than the last step size and what it counts."""
        return False

    def counted(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the entries of a group that each coming step raises by one."""
        return ()

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
                `draws` > 1 as many lists of them, one after the other; None for a step without noise. Rules that
                `takes_blocks` may get blocks of a large one.
        """
        raise NotImplementedError

    # -- the law of a step, for diagnostics, EWSG and replica exchange ------------------------------------------------

    def plain_law(self, group: dict[str, Any]) -> StepLaw | None:
        """Return `law` for a rule without a preconditioner, whose steps are so in the parameters' own coordinates."""
        return self.law(group)

    def planned_law(self, group: dict[str, Any]) -> StepLaw | None:
        """Return the law by which a plan of the run follows the steps, for controls of any shape; None if it depends on
        the gradients."""
        return self.plain_law(group)

    def plan_note(self) -> str | None:
        """Return a sentence on what `planned_law` leaves out, None for nothing."""
        return None

    def law(self, group: dict[str, Any]) -> StepLaw | None:
        """Return the law of the group's next step; None for a rule whose steps are not of that form.

        Where there is a `preconditioner` G it is the law in its metric, with the gradient √G⊙g.

        Args:
            group: a parameter group with the controls of the step, or a dictionary with its entries.
        """
        return None

    def langevin_law(self, group: dict[str, Any]) -> StepLaw:
        """Return SGLD's law, in the metric of a `preconditioner`; diagnostics assume it of a rule whose `law` is
        None."""
        force = group["lr"] * group["gradient_multiplier"]
        return StepLaw(0.0, force, self._noise_variance(group), None, self._noise_factor(group))

    def momenta(self, group: dict[str, Any]) -> list[Tensor] | None:
        """Return the momenta m of `law` before a step with noise, the state's own tensors, zero at first and converted
        if need be; None for rules without momentum."""
        return None if self.momentum_buffer is None else self._buffers(group["params"], self.momentum_buffer)

    def preconditioner(self, params: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the metric G of steps such as -lr·G⊙g + √(2·lr·τ·G/N)⊙ξ, None where G = 1."""
        return None

    def stored_momenta(self, group: dict[str, Any]) -> list[Tensor | None]:
        """Return each parameter's momentum as the state holds it, None where the state holds none."""
        name = self.momentum_buffer
        return [self.state[p].get(name) if p in self.state else None for p in group["params"]]

    def rescale_momenta(self, group: dict[str, Any], factor: Control) -> None:
        """Multiply the momenta of a group's parameters by a number, or by a factor for each chain, shape (C,), but for
        those that a step without noise left, which have no temperature."""
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
        """Return the number d of a chain's sampled coordinates."""
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

    def _add(self, targets: list[Tensor], sources: "list[Tensor] | NoiseBlocks", factor: Control) -> None:
        """Add factor·sources to targets in place; the factor is one number, or one for each chain."""
        if isinstance(sources, NoiseBlocks):
            for block in sources.along(targets):
                self._add(block.lists[0], block.noise, factor)
        elif isinstance(factor, Tensor):
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


# -- base --------------------------------------------------------------------------------------------------------------


CONTROLS = ("lr", "temperature", "gradient_multiplier")

NO_COLD_LIMIT = (
    "{0} makes no steps at temperature 0: pass a temperature above 0 and a schedule without a cold stage "
    "(`SamplingSchedule`, or `exploration=0`), and optimize before by `WarmStart`"
)


class Guard(Protocol):
    """An object that may forbid an update, asked when the gradient and the energy are known."""

    def allows_update(self) -> bool:
        """Return whether the sampler may make the update."""

    def leave_step(self) -> None:
        """Undo what a step has changed before its update, which an error keeps from being made."""


class StandIn(Protocol):
    """What makes the updates in the place of a sampler's rule, such as a warm start's optimizers."""

    @property
    def takes_rows(self) -> bool:
        """Whether it updates all chains' rows in the coming step, so that several steps can be made at once."""

    def __call__(self) -> None:
        """Update the parameters with the gradients that they hold."""

    def saved(self) -> Any:
        """Return its present state, for `restore`."""

    def restore(self, saved: Any) -> None:
        """Return to a state."""


class Sampler(UpdateRule):
    """Base of the samplers: a torch optimizer that adds Gaussian noise, scaled by the number of data and by τ.

    Every parameter group has three controls, read at each step after the closure has run: `lr`, `temperature` and
    `gradient_multiplier` (κ, which multiplies the fresh gradient and may be negative). Each is a number or a tensor of
    shape () or (C,). If the temperature is the number 0, no noise is drawn at all. A tensor counts as positive whatever
    its values, since reading them would make the host wait for the device.

    Subclasses implement `update`, the rule of one step for one group, and keep a momentum in `momentum_buffer`.

    Args:
        params: parameters or parameter groups; float32 or float64, all on one device. With `num_chains` C > 1 every
            parameter has a leading axis of size C.
        lr: step size for the mean potential (see above), ≥ 0.
        num_data: number of data N that the posterior conditions on; may be None only at temperature 0.
        temperature: τ ≥ 0.
        num_chains: number of chains C stacked in the parameters.
        seed: seed of the injected noise; chain c of the run draws from the stream (seed, c).
        first_chain: global index of the first chain held here.
        noise_ahead: whether to draw the next step's noise in a background thread while the gradient is computed; the
            bits are the same. None does so on a CPU with a spare core, for steps of up to 16 million numbers. A larger
            noise is then drawn in blocks as it is added, which saves a copy of the parameters.

    Raises:
        ValueError: for a negative lr or temperature, a missing or non-positive num_data, parameters in half precision
            or of mixed dtypes, or parameters without the chain axis.
    """

    guard: "Guard | None" = None
    """Asked before every update whether it may be made; None outside a trainer."""

    stand_in: "StandIn | None" = None
    """Makes the update in the place of the rule while it is set; the step counts as one."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        num_data: int | None = None,
        temperature: float = 1.0,
        num_chains: int = 1,
        seed: int = 0,
        first_chain: int = 0,
        noise_ahead: bool | None = None,
    ) -> None:
        for name, value, least in (("num_chains", num_chains, 1), ("seed", seed, 0), ("first_chain", first_chain, 0)):
            check_count(name, value, least, optional=False)
        check_flag("noise_ahead", noise_ahead, optional=True)
        if num_data is None and self._needs_num_data(temperature):
            raise ValueError(
                f"{type(self).__name__} needs num_data, the number of training data, to scale its noise (only a "
                f"temperature of 0 needs none): pass num_data=…, or to a BayesianModule the class, "
                f"sampler={type(self).__name__}"
            )
        check_count("num_data", num_data)
        if not self.has_cold_limit and not isinstance(temperature, Tensor) and temperature == 0:
            raise ValueError(NO_COLD_LIMIT.format(type(self).__name__))
        self.num_data = num_data
        self.num_chains = num_chains
        self.step_count = 0
        """Number of updates made. It is saved in checkpoints and does not count steps that a loss scaler skipped."""
        super().__init__(params, {"lr": lr, "temperature": temperature, "gradient_multiplier": 1.0})
        parameters = [p for group in self.param_groups for p in group["params"]]
        check_parameters(parameters, num_chains)
        self._noise = ChainNoise(parameters, num_chains, seed, first_chain, noise_ahead)

    def _add_defaults(self, **defaults: Any) -> None:
        """Add a subclass's options to every parameter group that does not set them itself."""
        self.defaults.update(defaults)
        for group in self.param_groups:
            if any(name in group for name in defaults):
                check_options(type(self), defaults | group, self.num_data)
            for name, value in defaults.items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; only the constructor may.

        Raises:
            ValueError: after construction, since a chain's space and the order of its noise are fixed.
            TypeError: for an option that the rule does not read.
        """
        if hasattr(self, "_noise"):
            raise ValueError(
                "parameters cannot be added to a running chain: pass all of them to the sampler's constructor"
            )
        check_group(type(self), param_group, self.defaults)
        super().add_param_group(param_group)

    def hold(self, rows: Mapping[Tensor, int]) -> None:
        """Hold a row of some parameters, along the first axis of one chain's tensor, at its value, before the first
        step: it gets no noise, gradient or momentum, and is no coordinate."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.held = {place: rows[p] for place, p in enumerate(parameters) if p in rows}
        self._noise.held = self.held

    def _needs_num_data(self, temperature: Control) -> bool:
        return isinstance(temperature, Tensor) or temperature != 0

    @property
    def noise_bytes(self) -> int:
        """Bytes of the memory in which noise is drawn: `draws` copies of the parameters, or a block of a large one."""
        return self._noise.nbytes(self._takes_blocks)

    def next_noise(self, steps: int, memory: Tensor | None = None) -> Tensor:
        """Return the normal numbers of the coming steps, shape (K, C, `draws` · P); see `ChainNoise.draw_steps`."""
        return self._noise.draw_steps(steps, memory)

    def noise_in_place(self) -> tuple[Tensor, Callable[[], None], list[torch.Generator]]:
        """Return memory for a step's normal numbers, shape (C, `draws` · P), what refills it, and the generators."""
        return self._noise.in_place()

    def noise_states(self, states: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Return the states of the noise's generators; set them before, if some are given."""
        if states is not None:
            self._noise.go_back(states)
        return self._noise.states()

    @property
    def seed(self) -> int:
        """Seed of the injected noise."""
        return self._noise.seed

    def set_control(self, name: str, value: Control) -> None:
        """Set `lr`, `temperature` or `gradient_multiplier` in every parameter group.

        Args:
            name: "lr", "temperature" or "gradient_multiplier".
            value: a number, or a tensor of shape () or (C,) on the parameters' device.

        Raises:
            ValueError: for another name.
        """
        if name not in CONTROLS:
            raise ValueError(f"the controls are {', '.join(CONTROLS)}; got {name!r}")
        for group in self.param_groups:
            group[name] = value

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the sampler.

        Args:
            closure: computes the loss and its gradients; the controls are read after it.

        Returns:
            the closure's loss, None without a closure.

        Raises:
            ValueError: if the temperature has become positive and the sampler has no num_data, or if it is 0 and the
                rule has no limit there.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        if self.guard is not None and not self.guard.allows_update():
            return loss
        if self.held:
            parameters = [p for group in self.param_groups for p in group["params"]]
            for place, row in self.held.items():
                gradient = parameters[place].grad
                if gradient is not None:
                    gradient.select(int(self.num_chains > 1), row).zero_()
        if self.stand_in is not None:
            self.stand_in()
            self.step_count += 1
            return loss
        has_noise = any(self.is_noisy(group) for group in self.param_groups)
        if has_noise:
            if self.num_data is None:
                raise ValueError(f"{type(self).__name__} was built without num_data, so its temperature must stay 0")
            self._noise.begin(self._walks)
        elif not self.has_cold_limit:
            raise ValueError(NO_COLD_LIMIT.format(type(self).__name__))
        if self.flat is not None and self._updates_rows() and self.flat.holds_gradients:
            self._update_rows(self.flat, has_noise)
        else:
            self._update_tensors(has_noise)
        if has_noise:
            self._noise.finish()
            self._noise.draw_ahead()
        self.step_count += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as torch's optimizers do but without entering a profiler at every step."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @property
    def _walks(self) -> bool:
        """Whether a step goes through the parameters in blocks of columns."""
        return self._takes_blocks and self._noise.is_large

    def _update_tensors(self, has_noise: bool) -> None:
        """Update the parameters that have a gradient, tensor by tensor."""
        start = 0
        for group in self.param_groups:
            active = [i for i, p in enumerate(group["params"]) if p.grad is not None]
            if active:
                params = [group["params"][i] for i in active]
                grads = [p.grad.contiguous() if self._walks else p.grad for p in params]
                has_own = has_noise and self.is_noisy(group)
                noise: Any = self._noise.of([start + i for i in active]) if has_own else None
                self.update(group, params, grads, noise)
            start += len(group["params"])

    def _updates_rows(self) -> bool:
        """Return whether a group's parameters may be updated as one tensor."""
        return self._takes_rows

    def _update_rows(self, flat: FlatParameters, has_noise: bool) -> None:
        """Update each group's parameters as one tensor, a row for each chain."""
        start = 0
        for group, part in zip(self.param_groups, flat.groups, strict=True):
            stop = start + len(part.parameters)
            has_own = has_noise and self.is_noisy(group)
            noise: Any = self._noise.of(range(start, stop), as_rows=True) if has_own else None
            self.update(group, [part.values], [part.gradients], noise)
            start = stop

    @torch.no_grad()
    def draw_momenta(self) -> None:
        """Draw all momenta from their stationary law at the present controls, N(0, `law.momentum_variance()`).

        Each chain draws from its own generator. Momenta of a group without noise become zero, the law at τ = 0.
        """
        if has_noise := any(map(self.is_noisy, self.param_groups)):
            self._noise.begin(self._walks)
        start = 0
        for group in self.param_groups:
            stop = start + len(group["params"])
            law = self.law(group) if self.is_noisy(group) else None
            variance = None if law is None else law.momentum_variance()
            momenta = None if variance is None else self.momenta(group)
            if momenta is not None and variance is not None:
                torch._foreach_zero_(momenta)
                noise = self._noise.of(range(start, stop))
                self._add(momenta, noise[: len(momenta)] if isinstance(noise, list) else noise, square_root(variance))
            elif held := [momentum for momentum in self.stored_momenta(group) if momentum is not None]:
                torch._foreach_zero_(held)
            start = stop
        if has_noise:
            self._noise.finish()

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's optimizer state and, under "sampler", the step counter and the noise generators."""
        state = super().state_dict()
        state["sampler"] = {
            "rule": type(self).__name__,
            "num_chains": self.num_chains,
            "per_chain_state": self.per_chain_state,
            "step_count": self.step_count,
            "noise": self._noise.state_dict(self.step_count),
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore from `state_dict()`.

        Raises:
            ValueError: if the state is not a sampler's, belongs to another rule, or has another number of chains or
                other name patterns of its groups.
        """
        saved = checked_state(state_dict, type(self).__name__, self.num_chains, self.param_groups)
        try:
            super().load_state_dict(torch_state(state_dict, self.param_groups))
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0][:150]
            raise ValueError(
                f"the saved state does not fit the sampler's parameters ({reason}): resume from another checkpoint"
            ) from error
        self.step_count = saved["step_count"]
        self._noise.load_state_dict(saved["noise"])

    def __getstate__(self) -> dict[str, Any]:
        noise = self._noise
        own: dict[str, Any] = {"num_data": self.num_data, "num_chains": self.num_chains, "step_count": self.step_count}
        own["held"] = self.held
        made_by = (self.num_chains, noise.seed, noise.first_chain, noise.ahead, noise.draws)
        saved = noise.state_dict(self.step_count)
        saved = saved | {"generators": [state.numpy() for state in saved["generators"]]}  # not memory that ends here
        return super().__getstate__() | own | {"noise": (made_by, saved)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made_by, noise_state = state.pop("noise", (None, None))
        super().__setstate__(state)
        if made_by is not None:  # a copy, not torch's own use of this method in load_state_dict
            self._noise = ChainNoise([p for group in self.param_groups for p in group["params"]], *made_by)
            self._noise.held = self.held
            states = [torch.from_numpy(state) for state in noise_state["generators"]]
            self._noise.load_state_dict(noise_state | {"generators": states})
