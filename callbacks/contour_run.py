"""The parts of a fit that a contour works with, and its warm-up."""

from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.contour import ChainGroup, Contour, ContourRules, ContourStart, ContourState
from lightning_sgmcmc.module import BayesianModule
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.sampler import Control
from lightning_sgmcmc.tensors import exact, exact_device, sent


@dataclass(frozen=True)
class ContourRun:
    """A fit in progress.

    Attributes:
        trainer, module, sampler, chains: of the fit.
        group: the chains that learn.
        start: where the contour comes from.
        begun: steps of the sampler before this callback.
        on_host: whether a number is cheaper than a tensor, as for one chain on the CPU.
    """

    trainer: pl.Trainer
    module: BayesianModule
    sampler: Sampler
    chains: Chains
    group: ChainGroup
    start: ContourStart
    begun: int
    on_host: bool

    @classmethod
    def of(cls, trainer: pl.Trainer, module: BayesianModule, start: ContourStart, begun: int) -> "ContourRun":
        """Return the run of a trainer and its module."""
        group = ChainGroup.of_layout(module.chains.layout, exact_device(module.device))
        on_host = module.device.type == "cpu" and module.num_chains == 1
        return cls(trainer, module, module.sampler, module.chains, group, start, begun, on_host)

    @property
    def begin(self) -> int:
        """Steps of the sampler before a warm-up of the contour; it follows a warm start."""
        return max(self.begun, self.chains.progress.warm_steps)

    @property
    def first_step(self) -> int:
        """Steps of the sampler before the contour begins."""
        return self.start.first_step(self.begin)

    @property
    def temperature(self) -> Control:
        """τ of the coming step, a number or a tensor where the contour is."""
        temperature: Control = self.sampler.param_groups[0]["temperature"]
        return sent(temperature, self.group.device) if isinstance(temperature, Tensor) else temperature

    @property
    def mean_temperature(self) -> float:
        """The mean of τ over the chains; it waits for the device if τ is a tensor there."""
        return float(exact(torch.as_tensor(self.temperature)).mean())

    @property
    def energy(self) -> Tensor:
        """The energy of the step's data over all ranks, shape (C,), float64."""
        return self.chains.layout.mean_over_data(self.chains.observed.corrected(self.start.include_prior))

    def warm_up(self) -> tuple[Contour, ContourState | None, str] | None:
        """Record the energy of a step of the warm-up; after the last one, return what `ContourStart.decide` does."""
        step, start = self.sampler.step_count, self.start
        if step < self.begin:
            return None
        if start.length is None:  # auto, at the first step at a temperature above 0
            start.open_until(step, self.chains.progress.first_sample, self.group)
        if step >= self.first_step:
            return start.decide(self.mean_temperature)
        if start.is_recording:
            number = step + 1 - self.first_step + (start.length or 0)
            start.record(number, self.energy, self.chains.observed.log_prior)
        return None


def inexact_settings(rules: ContourRules, include_prior: bool, chosen: bool) -> dict[str, float]:
    """Return the settings that make weights approximate, by name; chosen limits of κ act too rarely to count."""
    limits = ("min_multiplier", "max_multiplier") if chosen else ()
    found = {name: value for name, value in rules.regularisation.items() if name not in limits}
    return found | ({} if include_prior else {"include_prior": False})
