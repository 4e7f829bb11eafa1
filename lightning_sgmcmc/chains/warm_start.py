"""A warm start's optimizers and early stopping, one for each chain."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.execution import state_of
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.factories import chosen_options, name_of
from lightning_sgmcmc.schedules import Patience


class ChainOptimizers:
    """A torch optimizer for each chain of this process, over its slices of the stacked parameters, as alone."""

    def __init__(
        self, parameters: Iterable[Tensor], num_chains: int, make: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        self._parameters = list(parameters)
        self._own: list[list[Tensor]] = [self._parameters]
        if num_chains > 1:
            self._own = [[nn.Parameter(p.detach()[c]) for p in self._parameters] for c in range(num_chains)]
        self._optimizers = [make(own) for own in self._own]
        self._lrs = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]

    def step(self, chains: Iterable[int], lr_factor: float = 1.0) -> None:
        """Update chains with the gradients that the parameters hold."""
        for chain in chains:
            optimizer, own = self._optimizers[chain], self._own[chain]
            if len(self._own) > 1:
                for piece, whole in zip(own, self._parameters, strict=True):
                    piece.grad = None if whole.grad is None else whole.grad[chain]
            for group, lr in zip(optimizer.param_groups, self._lrs[chain], strict=True):
                group["lr"] = lr * lr_factor
            optimizer.step()
            if len(self._own) > 1:
                optimizer.zero_grad()

    def state_dict(self, chain: int) -> dict[str, Any]:
        return self._optimizers[chain].state_dict()

    def load_state_dict(self, chain: int, state: dict[str, Any]) -> None:
        self._optimizers[chain].load_state_dict(state)


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
