"""The mean potentials of all chains of a process on one mini-batch: chain after chain, or all at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_sgmcmc.batches.per_chain import ChainBatches
from lightning_sgmcmc.chains.stacked import StackedChains
from lightning_sgmcmc.chains.starts import layer_at_fault
from lightning_sgmcmc.chains.stateless import StatelessCall, evaluation_mode

if TYPE_CHECKING:
    from lightning_sgmcmc.module import BayesianModule


ChainExecution: TypeAlias = Literal["auto", "loop", "vmap"]


class ChainEnergies:
    """Computes Ũ/N of each chain.

    * "loop": one chain after the other, with its slices in the module's places. Bit for bit what each chain alone
      computes.
    * "vmap": all chains in one call, by `torch.vmap` over the stacked tensors. Equal to rounding.

    Args:
        module: the module.
        chains: its stacked tensors; None where it holds one plain chain (then only worth its while compiled).
        execution: "loop" or "vmap".
        compiled: whether the network's part goes through `torch.compile`.
    """

    def __init__(
        self, module: "BayesianModule", chains: StackedChains | None, execution: ChainExecution, compiled: bool
    ) -> None:
        self._module = module
        self._chains = chains
        self._vmapped = execution == "vmap" and chains is not None
        self._own_prior = type(module).log_prior is not _base(module).log_prior
        self._call = StatelessCall(module, lambda m, batch: m.log_likelihood(batch))
        self._compiled = compiled
        self._replays = compiled and module.device.type == "cuda"
        self._kept: dict[Tensor, Tensor] = {}
        self._network = self._compile() if compiled else None
        self._looked = False
        self.through_stack = False
        """Whether gradients reach the stacked parameters by the graph itself, as a data-parallel wrapper needs it."""

    @property
    def collects(self) -> bool:
        """Whether the slices hold the gradients after a backward pass."""
        return self._chains is not None and not self._vmapped and not self.through_stack

    def __call__(self, batch: Any, through_stack: bool | None = None) -> Tensor:
        """Return Ũ/N of each chain, shape (C,), or () for a plain chain; note log p(θ) in the module's chain state.

        Args:
            batch: a `ChainBatches`, or one batch for all chains.
            through_stack: as the attribute, for this call.

        Raises:
            ValueError: if the batch has another number of chains, or `log_likelihood` returns another shape than (n,).
        """
        if isinstance(batch, ChainBatches) and (self._chains is None or len(batch) != self._chains.num_chains):
            raise ValueError(f"the batch is of {len(batch)} chains, the module of {self._module.num_chains}")
        if (self._vmapped or self._compiled) and not self._looked:
            self._look_at_targets(batch)
        state = self._module.__dict__["chain_state"]
        if self._chains is None or self._vmapped:
            if self._chains is None:
                each, log_prior = self._of_network(None, batch), self._module.log_prior()
            else:
                each, log_prior = self._all_at_once(batch)
            mean = each.mean(-1)
            state.batch_size = each.shape[-1]
            if state.keeps_each:
                state.log_likelihood = each.detach()
        else:
            through_stack = self.through_stack if through_stack is None else through_stack
            rows, log_prior = self._one_by_one(self._chains, batch, through_stack)
            mean = torch.stack([row.mean() for row in rows])
            state.batch_size = len(rows[0])
            if state.keeps_each:
                state.log_likelihood = torch.stack(rows).detach()
        state.log_prior = log_prior.detach()
        return torch.add(mean, log_prior, alpha=1 / self._module._known_num_data()).neg()

    # -- one chain after the other ------------------------------------------------------------------------------------

    def _one_by_one(self, chains: StackedChains, batch: Any, through_stack: bool) -> tuple[list[Tensor], Tensor]:
        each = chains.unbound() if through_stack else chains.slices
        own_batches = isinstance(batch, ChainBatches)
        log_likelihoods, log_priors = [], []
        cached, begin_chain = self._module.__dict__["_trainable"], self._module.__dict__["chain_state"].begin_chain
        try:
            for chain, tensors in enumerate(each):
                if begin_chain is not None:
                    begin_chain(chain)
                with chains.swapped(tensors):
                    trainable: Mapping[str, Tensor] = chains.trainable(chain)
                    if through_stack:
                        present = dict(zip(chains.names, tensors, strict=True))
                        trainable = {name: present[name] for name in trainable}
                    self._module.__dict__["_trainable"] = trainable
                    log_likelihoods.append(self._of_network(tensors, batch[chain] if own_batches else batch))
                    log_priors.append(self._module.log_prior())
        finally:
            self._module.__dict__["_trainable"] = cached
        return log_likelihoods, torch.stack(log_priors)

    def _of_network(self, tensors: Sequence[Tensor] | None, batch: Any) -> Tensor:
        """Return log p(y|x,θ) of each datum, shape (n,), of the chain whose tensors are in the module's places."""
        if self._network is None:
            log_likelihood = self._module.log_likelihood(batch)
        else:
            log_likelihood = self._network(self._named(tensors), batch)
        check_shape(log_likelihood)
        return log_likelihood

    def _named(self, tensors: Sequence[Tensor] | None) -> dict[str, Tensor]:
        if tensors is None or self._chains is None:
            return dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        return dict(zip(self._chains.names, tensors, strict=True))

    # -- all at once --------------------------------------------------------------------------------------------------

    def _all_at_once(self, batch: Any) -> tuple[Tensor, Tensor]:
        assert self._chains is not None
        chains, module = self._chains, self._module
        named = dict(zip(chains.names, chains.stacked, strict=True))
        own = isinstance(batch, ChainBatches)
        network = self._network if self._network is not None else self._vmap_of_network
        try:
            log_likelihood = network(named, batch.stacked() if own else batch, 0 if own else None)
        except RuntimeError as error:
            raise self._refusal(error) from error
        check_shape(log_likelihood, chains=True)
        if not self._own_prior:
            trainable = {name: named[name] for name in module.__dict__["_trainable"]}
            return log_likelihood, module.prior.log_prob_of_chains(trainable)
        prior = StatelessCall(module, lambda m: m.log_prior())
        return log_likelihood, torch.vmap(prior.call)(named)

    def _vmap_of_network(self, named: dict[str, Tensor], batch: Any, batch_axis: int | None) -> Tensor:
        over_chains = torch.vmap(self._call.call, in_dims=(0, batch_axis), randomness="different")
        result: Tensor = over_chains(named, batch)
        return result

    def _refusal(self, error: RuntimeError) -> Exception:
        layer = layer_at_fault(error, self._module) or "a layer"
        if "out of memory" in str(error):
            return error
        return RuntimeError(
            f"{layer} cannot be run for all chains at once by torch.vmap ({str(error).splitlines()[0]}): pass "
            "chain_execution='loop', which runs one chain after the other"
        )

    # -- torch.compile ------------------------------------------------------------------------------------------------

    def _compile(self) -> Callable[..., Tensor]:
        function = self._vmap_of_network if self._vmapped else self._call.call
        compiled = torch.compile(function, dynamic=False, mode="reduce-overhead" if self._replays else None)
        if not self._replays:
            return compiled  # type: ignore[no-any-return]

        def replayed(named: dict[str, Tensor], *rest: Any) -> Tensor:
            # A CUDA graph writes its outputs and its buffers to the same places at every step.
            torch.compiler.cudagraph_mark_step_begin()
            for tensor in named.values():
                if not hasattr(tensor, "_dynamo_static_input_type"):
                    torch._dynamo.mark_static_address(tensor)
            result: Tensor = compiled(named, *rest).clone()
            return result

        return replayed

    def keep_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Give parameters gradients of zero in memory of their own, if their gradients come from a CUDA graph.

        Its outputs are overwritten when it is replayed, for the next micro-batch already.
        """
        if not self._replays:
            return
        for parameter in parameters:
            if parameter.requires_grad:
                kept = self._kept.get(parameter)
                self._kept[parameter] = parameter.grad = torch.zeros_like(parameter) if kept is None else kept.zero_()

    def _look_at_targets(self, batch: Any) -> None:
        """Check the first targets outside of vmap and compiled code, in which numbers cannot be looked at."""
        self._looked = True
        module, chains = self._module, self._chains
        module.__dict__["_looks_at_targets"] = False
        if module.likelihood is None or type(module).log_likelihood is not _base(module).log_likelihood:
            return
        first = batch[0] if isinstance(batch, ChainBatches) else batch
        devices = [module.device] if module.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices), evaluation_mode(module):
            with chains.at(0) if chains is not None else nullcontext():
                output, target = module.output_and_target(first)
            module.likelihood.check_target(output, target)


def check_shape(log_likelihood: Tensor, chains: bool = False) -> None:
    """Refuse a log-likelihood that is not one number per datum.

    Raises:
        ValueError: saying what shape it has.
    """
    if log_likelihood.dim() != (2 if chains else 1):
        shape = tuple(log_likelihood.shape[1:] if chains else log_likelihood.shape)
        raise ValueError(
            f"log_likelihood(batch) must return one number per datum, shape (n,), got {shape}: the batch's size is "
            "read from it"
        )


def _base(module: "BayesianModule") -> "type[BayesianModule]":
    from lightning_sgmcmc.module import BayesianModule

    return BayesianModule
