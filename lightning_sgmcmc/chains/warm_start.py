"""Torch's optimizers in the place of a sampler, and early stopping, of each chain."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.execution import state_of
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.factories import chosen_options, name_of
from lightning_sgmcmc.samplers.rows import FlatParameters
from lightning_sgmcmc.schedules import Patience

OF_EACH_NUMBER = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
)
"""Optimizers that update a number by its own gradients alone, so that all chains' parameters can be one tensor."""
OF_STEPS = ("step", "eta", "mu", "mu_product")
"""Their states that follow from the number of steps."""


class ChainOptimizers:
    """Torch's optimizers of the chains of this process, which make the updates in the place of a sampler's rule.

    Each chain is updated as alone: by an optimizer over its slices of the stacked parameters, or, while all chains go
    on, by one over the rows of all, if that updates each number by itself.

    Args:
        sampler: that of the run.
        make: makes an optimizer of parameters.
        controls: returns the chains that go on, and the factor of lr.
    """

    def __init__(
        self,
        sampler: Sampler,
        make: Callable[[list[Tensor]], Optimizer],
        controls: Callable[[], tuple[Sequence[int], float]],
    ) -> None:
        self._sampler, self._make, self._controls = sampler, make, controls
        self._parameters = [p for group in sampler.param_groups for p in group["params"]]
        self._own: list[list[Tensor]] = [self._parameters]
        if sampler.num_chains > 1:
            self._own = [[nn.Parameter(p.detach()[c]) for p in self._parameters] for c in range(sampler.num_chains)]
        self._optimizers = [make(own) for own in self._own]
        groups = self._optimizers[0].param_groups
        self._lrs = [group["lr"] for group in groups]
        self._may_join = type(self._optimizers[0]) in OF_EACH_NUMBER and len(groups) == 1
        self._rows: tuple[Optimizer, FlatParameters, Tensor] | None = None
        """The optimizer of all chains' rows, which it has the state of, and these."""

    def __call__(self) -> None:
        """Update the chains with the gradients that the parameters hold."""
        going, factor = self._controls()
        self._choose(len(going) == len(self._own))
        if self._rows is not None:
            optimizer, flat, rows = self._rows
            rows.grad = flat.gradients
            self._step(optimizer, factor)
            return
        for chain in going:
            optimizer, own = self._optimizers[chain], self._own[chain]
            if len(self._own) > 1:
                for piece, whole in zip(own, self._parameters, strict=True):
                    piece.grad = None if whole.grad is None else whole.grad[chain]
            self._step(optimizer, factor)
            if len(self._own) > 1:
                optimizer.zero_grad()

    @property
    def takes_rows(self) -> bool:
        """Whether the coming step is one of all chains' rows."""
        return self._may_join and len(self._controls()[0]) == len(self._own)

    def _step(self, optimizer: Optimizer, factor: float) -> None:
        for group, lr in zip(optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr * factor
        optimizer.step()

    # -- all chains as rows, or each alone ----------------------------------------------------------------------------

    def _choose(self, all_go: bool) -> None:
        """Let all chains be one tensor in the coming step, or each be alone."""
        flat = self._sampler.flat
        if flat is None or not (all_go and self._may_join and flat.holds_gradients):
            self._part()
        elif self._rows is None or self._rows[1] is not flat:
            self._part()
            states = [optimizer.state_dict()["state"] for optimizer in self._optimizers]
            counts = {repr([_counts(held) for held in state.values()]) for state in states}
            self._may_join = len(counts) == 1 and len(states[0]) in (0, len(self._parameters))
            if self._may_join:
                rows = flat.values.detach()
                optimizer = self._make([rows])
                if states[0]:
                    optimizer.state[rows] = self._joined(states)
                self._rows = optimizer, flat, rows

    def _joined(self, states: Sequence[dict[int, dict[str, Any]]]) -> dict[str, Any]:
        """Return the state of all chains' rows, of those of each chain's parameters by their places."""
        joined: dict[str, Any] = _counts(states[0][0])
        for name in states[0][0].keys() - joined.keys():
            joined[name] = torch.stack(
                [torch.cat([state[t][name].flatten() for t in sorted(state)]) for state in states]
            )
        return joined

    def _part(self) -> None:
        """Give the state of the rows back to each chain's optimizer."""
        if self._rows is not None:
            states = [self.state_dict(chain) for chain in range(len(self._own))]
            self._rows = None
            for optimizer, state in zip(self._optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self, chain: int) -> dict[str, Any]:
        """Return the state of a chain's optimizer."""
        own = self._optimizers[chain].state_dict()
        if self._rows is None:
            return own
        optimizer, flat, rows = self._rows
        held = optimizer.state[rows]
        state: dict[int, dict[str, Any]] = {
            place: _counts(held) for place in range(len(self._parameters) if held else 0)
        }
        for name in held.keys() - _counts(held).keys():
            for place, piece in enumerate(flat.split(held[name])):
                state[place][name] = (piece[chain] if len(self._own) > 1 else piece).clone()
        return own | {"state": state}

    def saved(self) -> Any:
        """Return copies of the present states."""
        self._choose(self.takes_rows)
        if self._rows is None:
            return copy.deepcopy([optimizer.state_dict() for optimizer in self._optimizers])
        optimizer, _, rows = self._rows
        return {n: t.clone() if isinstance(t, Tensor) else t for n, t in optimizer.state[rows].items()}

    def restore(self, saved: Any) -> None:
        """Return to states that `saved` returned."""
        if isinstance(saved, dict) and self._rows is not None:
            self._rows[0].state[self._rows[2]] = saved
            return
        self._rows = None
        for optimizer, state in zip(self._optimizers, saved, strict=True):
            optimizer.load_state_dict(state)

    def load_state_dict(self, chain: int, state: dict[str, Any]) -> None:
        """Take over the state of a chain's optimizer."""
        self._part()
        self._optimizers[chain].load_state_dict(state)


def _counts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of what a parameter's state has that is not of each number."""
    fixed = {name: value for name, value in state.items() if name in OF_STEPS or not isinstance(value, Tensor)}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in fixed.items()}


def make_optimizer(
    factory: Callable[..., Optimizer], parameters: list[Tensor], lr: float, weight_decay: float = 0.0
) -> Optimizer:
    """Return an optimizer with this weight decay, by default none, since the prior is in the loss."""
    optimizer = factory(parameters, lr=lr)
    for group in optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = weight_decay
    return optimizer


DEFAULT_LR = 1e-3
"""The default lr of AdamW, which the command line's partial holds."""


def chosen_decay(factory: Any) -> float:
    """Return the weight decay that a user has chosen in a partial of an optimizer, else 0."""
    decay = float(chosen_options(factory).get("weight_decay", 0.0))
    # The command line's partial also holds the default optimizer's options, AdamW's decay of 0.01 among them.
    by_default = decay == 0.01 and not isinstance(getattr(factory, "func", type), type)
    return 0.0 if by_default else decay


def _hides_decay(factory: Any) -> bool:
    """Return whether a function of the user's makes an optimizer with another weight decay than its class has."""
    if not isinstance(factory, FunctionType):
        return False
    try:
        made = factory([nn.Parameter(torch.zeros(1))], lr=1e-3)
    except TypeError:
        return False  # reported where the optimizer is made
    usual = inspect.signature(type(made)).parameters.get("weight_decay")
    decays = {group.get("weight_decay", 0.0) for group in getattr(made, "param_groups", [])}
    return bool(decays - {0.0, getattr(usual, "default", 0.0)})


def check_optimizer(factory: Any, lr_of: str = "WarmStart(lr=…)", decays: bool = False) -> None:
    """Raise unless a factory makes optimizers that step without a closure."""
    name = name_of(factory)
    if not callable(factory):
        raise TypeError(f"optimizer must be a class of torch.optim or a partial of one, got {factory!r}")
    made = getattr(factory, "func", factory)
    if isinstance(made, type) and issubclass(made, Sampler):
        raise TypeError(f"optimizer={name} is a sampler, which the module has already: pass a class of torch.optim")
    if chosen_decay(factory) and not decays:
        raise ValueError(
            "weight decay is a Gaussian prior, which the loss already contains: omit weight_decay of the optimizer, "
            "and pass prior=GaussianPrior(std=…) to the module"
        )
    if chosen_options(factory).get("lr", DEFAULT_LR) != DEFAULT_LR:
        raise ValueError(
            f"optimizer=partial({name}, lr=…) has no effect, since {lr_of.split('(')[0]} sets lr: pass {lr_of}"
        )
    if _hides_decay(factory):
        raise ValueError(
            f"optimizer={name} is a function with a weight decay of its own, which is not read: pass a partial of the "
            "optimizer, functools.partial(AdamW, weight_decay=0.05)"
        )
    probe = nn.Parameter(torch.zeros(2, 2))
    probe.grad = torch.ones(2, 2)
    try:
        optimizer = make_optimizer(factory, [probe], 1e-3)
    except TypeError as error:
        raise TypeError(
            f"optimizer={name} cannot be made from parameters and lr ({error}): pass a class of torch.optim, or a "
            "functools.partial with its other arguments"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={name} makes a {type(optimizer).__name__}: pass a class of torch.optim")
    try:
        optimizer.step()
    except TypeError as error:
        raise TypeError(
            f"optimizer={name} needs a closure that computes the loss several times in a step ({error}): pass AdamW, "
            "SGD, or another optimizer whose step needs none"
        ) from error


@dataclass
class Watch:
    """Early stopping of one chain: its lowest validation loss in nats per example, its step, the validations since."""

    best_loss: float | None = None
    best_step: int = 0
    waited: int = 0
    stopped_at: int | None = None

    def see(self, loss: float, step: int, patience: Patience) -> bool:
        """Record a validation; return whether its state is the best so far. The first one is."""
        best = self.best_loss
        improved = best is None or math.isnan(best) or loss < best - patience.min_improvement
        if improved:
            self.best_loss, self.best_step, self.waited = loss, step, 0
        else:
            self.waited += 1
            if self.waited >= patience.validations:
                self.stopped_at = step
        return improved

    def __str__(self) -> str:
        return "none" if self.best_loss is None else f"{self.best_loss:.4g} (step {self.best_step})"


class BestStates:
    """The best validated state of each chain of this process."""

    def __init__(self, chains: Chains, patience: Patience) -> None:
        self._chains = chains
        self._patience = patience
        self.watches = [Watch() for _ in range(chains.num_chains)]
        self._best: list[dict[str, Tensor]] = [{} for _ in self.watches]

    @property
    def active(self) -> list[int]:
        """Indices of the chains that have not stopped."""
        return [chain for chain, watch in enumerate(self.watches) if watch.stopped_at is None]

    def validated(self, losses: Sequence[float], step: int) -> None:
        """Record a validation's losses after some steps; chains whose patience is over return to their best state."""
        for chain in self.active:
            watch = self.watches[chain]
            if watch.see(losses[chain], step, self._patience):
                self._best[chain] = {name: tensor.detach().clone() for name, tensor in self._state_of(chain).items()}
            elif watch.stopped_at is not None:
                self.restore(chain)

    def restore(self, chain: int) -> None:
        """Set a chain to its best state, if it has been validated."""
        best = self._best[chain]
        with torch.no_grad():
            for name, tensor in self._state_of(chain).items() if best else ():
                tensor.copy_(best[name])

    def _state_of(self, chain: int) -> dict[str, Tensor]:
        """Return a chain's sampled parameters and its buffers, by name."""
        model, trainable = self._chains.model, self._chains.trainable
        parameters = {name for name, _ in model.named_parameters()} | self._chains.sharing.names
        with self._chains.at(chain):
            state = state_of(model)
        return {name: tensor for name, tensor in state.items() if name in trainable or name not in parameters}

    def state_dict(self, chain: int) -> dict[str, Any]:
        return {"best": dict(self._best[chain]), "watch": asdict(self.watches[chain])}

    def load_state_dict(self, chain: int, state: dict[str, Any]) -> None:
        self.watches[chain] = Watch(**state["watch"])
        own = self._state_of(chain)
        self._best[chain] = {name: tensor.to(own[name], copy=True) for name, tensor in state["best"].items()}
