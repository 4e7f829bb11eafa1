"""What a fit does with the state of a prior: centres are taken from each chain's start, and scales are drawn."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.model import of_prior
from lightning_sgmcmc.namespace import rank_zero_warn
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.priors.gaussian import CENTER
from lightning_sgmcmc.priors.hierarchical import VARIANCE
from lightning_sgmcmc.priors.state import prior_state
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tensors import exact

COLLAPSED = 0.01
"""v below which a scale is far from what its hyperprior expects: a tenth of the standard deviation."""
NO_BETTER = 0.05
"""Share of the first mean negative log likelihood by which a fit that learns has become better."""


def take_centers(chains: Chains) -> None:
    """Set the centres of a prior that is centred on each chain's start, unless a checkpoint or an earlier fit did."""
    centers = {name: tensor for name, tensor in prior_state(chains.model).items() if name.startswith(CENTER)}
    tensors = {name: tensor for name, tensor in centers.items() if bool(tensor.isnan().any())}
    if not tensors:
        return
    parameters = of_prior(chains.model, chains.stacked is not None)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(parameters[name.removeprefix(CENTER)])


class PriorScales:
    """Draws the scales of a hierarchical prior after every n-th update, as functions of (seed, chain, step)."""

    def __init__(self, prior: HierarchicalPrior, chains: Chains, sampler: Sampler) -> None:
        self._prior = prior
        self._chains = chains
        self._sampler = sampler
        self._last = 0
        """Updates at the last draw; a step that was skipped is none."""
        self._first_nll: Tensor | None = None
        self._warned = False
        self._hook = sampler.register_step_post_hook(self.after_update)

    def release(self) -> None:
        """Stop drawing, at the end of a fit."""
        self._hook.remove()

    # -- draws --------------------------------------------------------------------------------------------------------

    @property
    def distance(self) -> float:
        """The number of coming updates up to the next after which scales are drawn; infinite if a callback sets them.

        It is 0 where a callback decides on each draw by the energy of its step.
        """
        claims, every = self._chains.claims, self._prior.every_n_steps
        if claims.get("draw scales") is not None:
            return math.inf
        return 0 if claims.get("accept scales") is not None else every - self._sampler.step_count % every

    def after_update(self, *_: Any) -> None:
        """Draw the scales if it is time to."""
        if self._first_nll is None:
            self._first_nll = self._nll()
        step = self._sampler.step_count
        is_due = step % self._prior.every_n_steps == 0 and step != self._last
        if is_due and self._chains.claims.get("draw scales") is None:  # else a callback sets the scales
            self._last = step
            with torch.no_grad():
                self._draw(step)

    def _draw(self, step: int) -> None:
        """Draw all factors of every chain from their conditional, given the chain's parameters."""
        chains, prior = self._chains, self._prior
        several = chains.stacked is not None
        variance = prior_state(chains.model)[VARIANCE]
        squares, noise = self._squares(), self._noise(step)
        drawn = prior.mode(squares) * noise.to(squares, non_blocking=True)
        drawn = drawn.to(variance.dtype) if several else drawn[0].to(variance.dtype)
        accept = chains.claims.get("accept scales")
        if accept is not None:
            of_chain = squares if several else squares[0]
            change = prior.log_density_of(variance, of_chain) - prior.log_density_of(drawn, of_chain)
            chances = torch.from_numpy(
                np.array([self._generator(step, c, "accept").random() for c in chains.layout.chains])
            )
            accepted = chances.to(squares, non_blocking=True).log() < accept(change.reshape(-1))
            drawn = torch.where(accepted[:, None] if several else accepted, drawn, variance)
        variance.copy_(drawn)

    def _squares(self) -> Tensor:
        """Return S of each chain and group, shape (C, G)."""
        chains, prior = self._chains, self._prior
        if chains.stacked is not None and chains.execution != "loop":
            return prior.squares(of_prior(chains.model, chains=True), chains=True)
        each = []  # one after another, with the rounding of each chain alone
        for index in range(chains.num_chains):
            with chains.at(index):
                each.append(prior.squares(of_prior(chains.model)))
        return torch.stack(each)

    def _noise(self, step: int) -> Tensor:
        control = self._sampler.param_groups[0]["temperature"]
        temperatures = control.reshape(-1).tolist() if isinstance(control, Tensor) else [float(control)]
        own = self._chains.layout.chains
        temperatures = temperatures * len(own) if len(temperatures) == 1 else temperatures
        drawn = [self._prior.noise(t, self._generator(step, chain)) for t, chain in zip(temperatures, own, strict=True)]
        return torch.stack(drawn)

    def _generator(self, step: int, chain: int, purpose: str = "draw") -> np.random.Generator:
        return np.random.default_rng(derive_seed(self._sampler.seed, "prior scales", purpose, chain, step))

    # -- collapse -----------------------------------------------------------------------------------------------------

    def _nll(self) -> Tensor:
        """Return the last mini-batch's mean negative log likelihood of each chain, shape (C,)."""
        observed = self._chains.observed
        return (observed.mean_potential + observed.log_prior / observed.num_data).reshape(-1)

    def check(self) -> None:
        """Warn once if a chain's scales have collapsed and its predictions are as at the fit's first step or worse."""
        if self._warned or self._first_nll is None or self.distance == math.inf:
            return
        variance = prior_state(self._chains.model)[VARIANCE]
        lowest, group = exact(variance).reshape(self._chains.num_chains, -1).min(1)
        now, first = exact(self._nll()), exact(self._first_nll)
        odd = (lowest < COLLAPSED) & (now > first - NO_BETTER * first.abs())
        if not bool(odd.any()):
            return
        self._warned = True
        index = int(odd.byte().argmax())
        names = [self._prior.group_of(name) for name in self._chains.trainable]
        name = list(dict.fromkeys(names))[int(group[index])]
        rank_zero_warn(
            f"The prior's scales have collapsed: that of '{name}' is {lowest[index].sqrt():.2g} times the expected one "
            f"in chain {self._chains.layout.chains[index]}, whose mean NLL, {now[index]:.3g}, is no better than at the "
            f"fit's first step, {first[index]:.3g}: pass a larger nu (now {self._prior.nu:g}; 1 holds the scales near "
            "std), or a larger std."
        )
