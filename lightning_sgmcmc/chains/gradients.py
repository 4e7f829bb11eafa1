"""Gradients of a process's chains: where they arrive, how they reach the parameters, and their clipping."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sgmcmc.chains.claims import Claims
from lightning_sgmcmc.chains.energies import ChainEnergies, Execution
from lightning_sgmcmc.chains.layers import explained
from lightning_sgmcmc.chains.stacked import StackedChains, clip_each_chain
from lightning_sgmcmc.chains.state import Accumulation, Pulse
from lightning_sgmcmc.compiling import Compile, is_compiled
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.flat import FlatParameters
from lightning_sgmcmc.samplers.fused import clip_rows, compiled


class ChainGradients:
    """The part of `Chains` that concerns gradients.

    They arrive in one of three places: in the parameters themselves; in the slices of stacked chains that are computed
    one after another; or in the rows of one tensor, from which a step over all of a network's tensors costs one
    operation (see `FlatParameters`).
    """

    model: EnergyModel
    num_chains: int
    compiled: Compile
    stacked: StackedChains | None
    trainable: dict[str, Tensor]
    energies: ChainEnergies | None
    accumulation: Accumulation
    claims: Claims
    pulse: Pulse
    flat: FlatParameters | None = None
    """The sampled parameters as rows of one tensor during a fit; None where they are not."""

    @property
    def execution(self) -> Execution:
        """How chains are computed on the model's device; "auto" is all at once in the faster way."""
        raise NotImplementedError

    # -- one tensor of all parameters ---------------------------------------------------------------------------------

    def flatten(self, sampler: Sampler, trainer: pl.Trainer) -> None:
        """Make the sampled parameters views of one tensor, with a row for each chain, where a step gains from it.

        It gains with several chains, and with a compiled network on a GPU. A data-parallel wrapper has buffers of its
        own for gradients.

        Args:
            sampler: theirs, already on their device.
            trainer: the run's.
        """
        self.unflatten(sampler)
        wrapped = isinstance(trainer.strategy.model, nn.parallel.DistributedDataParallel)
        groups = [group["params"] for group in sampler.param_groups]
        fused = self.model.device.type == "cuda" and is_compiled(self.compiled, self.model.device)
        gains = self.stacked is not None or fused
        if gains and not wrapped and FlatParameters.suits([p for group in groups for p in group], self.num_chains):
            self.flat = sampler.flat = FlatParameters(groups, self.num_chains, fused)

    def unflatten(self, sampler: Sampler | None) -> None:
        """Give the sampled parameters memory of their own, at a fit's end."""
        if self.flat is not None:
            self.flat.release()
        self.flat = None
        if sampler is not None:
            sampler.flat = None

    @property
    def _arrive_in_rows(self) -> bool:
        return self.flat is not None and (self.stacked is None or self.execution != "loop")

    def gradients(self) -> list[Tensor]:
        """Return the gradients in as few tensors as hold them, with a leading axis of chains where there are several;
        writing to them changes the gradients."""
        if self.flat is not None and self.flat.holds_gradients:
            return [self.flat.gradients]
        return self._of_parameters()

    def _of_parameters(self) -> list[Tensor]:
        return [p.grad for p in self.trainable.values() if p.grad is not None]

    # -- a step -------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass, and gather its gradients.

        Args:
            loss: the loss.
            args, kwargs: passed to `Tensor.backward`.

        Raises:
            RuntimeError: for a network of several chains that computes activations again.
        """
        if self.accumulation.loss_scale != 1:
            loss = loss * self.accumulation.loss_scale
        with explained(self.num_chains):
            loss.backward(*args, **kwargs)
        self.gather_gradients()

    def gather_gradients(self) -> None:
        """Gather the gradients after a backward pass; correct them once the batch is complete."""
        self.pulse.count += 1
        if self.flat is not None and self._arrive_in_rows:
            self.flat.collect_gradient()
        if not self.accumulation.batch_complete:
            return
        collects = self.energies is not None and self.energies.collects
        if collects:
            self.collect_gradients()
        if self.accumulation.rescaling != 1:
            torch._foreach_mul_(self.gradients(), self.accumulation.rescaling)
        correct = self.claims.get("snapshot gradients")
        if correct is not None:
            correct()
            if collects and self.accumulation.accumulating:
                self.spread_gradients()  # the next batch adds its gradients to these

    def collect_gradients(self) -> None:
        """Copy the slices' gradients to the stacked parameters."""
        if self.stacked is not None and not self._arrive_in_rows:
            self.stacked.collect_gradients(self.flat)

    def spread_gradients(self) -> None:
        """Copy the parameters' gradients to where they arrive, to continue accumulating."""
        if self.flat is not None and self._arrive_in_rows:
            self.flat.adopt_gradients()
        elif self.stacked is not None:
            self.stacked.spread_gradients()

    def clear_gradients(self, sampler: Optimizer) -> None:
        """Clear the gradients.

        Args:
            sampler: of the parameters.
        """
        if self.flat is not None and self._arrive_in_rows:
            self.flat.clear_gradients()
            return
        sampler.zero_grad()
        if self.stacked is not None:
            self.stacked.clear_gradients()
        if self.energies is not None:
            self.energies.keep_gradients(self.trainable.values())

    @property
    def clips_by_chain(self) -> bool:
        """Whether `clip_gradients` clips; Lightning does it for the tensors of one chain."""
        return self.stacked is not None or self._clips_rows

    @property
    def _clips_rows(self) -> bool:
        """Whether gradients are clipped as the rows of one tensor; on a CPU they are clipped tensor by tensor."""
        return self.flat is not None and self.flat.holds_gradients and self.flat.gradients.device.type != "cpu"

    def clip_gradients(self, limit: float) -> None:
        """Scale each chain's gradient down to a norm of at most `limit`.

        On a CPU a chain's norm is that of its tensors' norms, bit for bit as alone.
        """
        if self.flat is not None and self._clips_rows:
            clip = compiled(clip_rows) if self.flat.fused else clip_rows
            clip(self.flat.gradients, limit)
        else:
            clip_each_chain(self._of_parameters(), limit)
