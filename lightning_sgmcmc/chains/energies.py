"""Energies of several chains: computed one after another or all at once, compiled or not."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sgmcmc.batches.loader import ChainBatches, most_tokens, padded_alike
from lightning_sgmcmc.chains.density import Densities, vmap_refusal
from lightning_sgmcmc.chains.execution import homes_of
from lightning_sgmcmc.chains.row_energies import RowEnergies, weighed
from lightning_sgmcmc.chains.stacked import StackedChains
from lightning_sgmcmc.chains.state import StepEnergy
from lightning_sgmcmc.chains.weights import FirstBatches
from lightning_sgmcmc.compiling import Compile, compiled_if_possible, is_compiled
from lightning_sgmcmc.model import EnergyModel, check_shape
from lightning_sgmcmc.priors.held import without_held
from lightning_sgmcmc.priors.state import prior_state
from lightning_sgmcmc.samplers.rows import FlatParameters

Execution = Literal["auto", "loop", "vmap", "unrolled"]


class ChainEnergies:
    """Computes Ũ/N of each chain, with gradients where the optimizer expects them.

        Ũ/N = -c·Σ_{i in batch} log p(y_i|x_i,θ) - log p(θ)/N,   c = 1/n or as `DataWeights` has it

    "loop" computes one chain after another, bit for bit as each alone; "vmap" all at once, equal up to rounding;
    "unrolled" one after another inside one function, which can be compiled as one. "auto" is "vmap" or, where graphs
    are replayed and it is faster, "unrolled".

    Args:
        chains: its stacked tensors; None for a single unstacked chain.
        flat: the sampled parameters as rows, of which the energies then are a function, but for "loop" (`RowEnergies`).
    """

    def __init__(
        self,
        model: EnergyModel,
        chains: StackedChains | None,
        execution: Execution,
        compiled: Compile,
        num_data: int,
        trainable: Mapping[str, Tensor],
        flat: FlatParameters | None = None,
    ) -> None:
        self.num_data = num_data
        self._model = model
        self._chains = chains
        self._of_prior = dict(trainable) | prior_state(model)
        """What the prior is a function of: the model's own tensors by name."""
        self._vmapped = execution in ("auto", "vmap") and chains is not None
        self._densities = Densities(model)
        compiler = None
        if is_compiled(compiled, model.device) and not (compiled == "auto" and model._compiled_net):
            name = f"the network of {type(model).__name__}"
            compiler = partial(compiled_if_possible, name, needed=compiled != "auto")
        self.replays = compiler is not None and model.device.type == "cuda"
        """Whether compiled code is replayed as CUDA graphs."""
        self._kept: dict[Tensor, Tensor] = {}
        self._rows: RowEnergies | None = None
        if flat is not None and (execution != "loop" or chains is None):
            unrolled = None if execution == "auto" else execution == "unrolled"
            self._rows = RowEnergies(model, chains, flat, num_data, compiler, unrolled)
        model.accepted_arguments  # noqa: B018  # found now, since a compiler cannot read signatures
        config = getattr(getattr(model, "net", None), "config", None)
        self._pad = int(getattr(config, "pad_token_id", None) or 0)
        self._most_tokens = most_tokens(config) if compiler is not None else None
        self._network = self._compile(compiler) if compiler is not None and self._rows is None else None
        self._homes = homes_of(model) if self._network is not None and chains is None else {}
        self.first_batches: FirstBatches | None = None
        """Checks a fit's first batches; None outside a fit."""
        self.through_stack = False
        """Whether gradients reach the stacked parameters through the graph, as a data-parallel wrapper requires."""

    def follow(self, num_data: int) -> None:
        """Take another N, for data that grow."""
        self.num_data = num_data
        if self._rows is not None:
            self._rows.follow(num_data)

    @property
    def collects(self) -> bool:
        """Whether the slices hold the gradients after a backward pass."""
        return self._chains is not None and not self._vmapped and not self.through_stack and self._rows is None

    def __call__(
        self,
        batch: Any,
        through_stack: bool | None = None,
        seed_chain: Callable[[int], None] | None = None,
        keeps_each: bool = False,
        weigh: Callable[[], float | None] | None = None,
    ) -> StepEnergy:
        """Return the energies of a batch, and log p(y|x,θ) of each datum if `keeps_each`.

        `weigh` returns c, or None for 1/n; it is called after a first batch was checked.
        """
        chains = self._chains
        if isinstance(batch, ChainBatches) and (chains is None or len(batch) != chains.num_chains):
            own = 1 if chains is None else chains.num_chains
            raise ValueError(f"the batch has {len(batch)} chains, the module {own}: make one batch for each chain")
        batch = self._usable(batch)
        looks = self.first_batches is not None and self.first_batches.takes(batch)
        factor = None if weigh is None else weigh()
        through_stack = self.through_stack if through_stack is None else through_stack
        if self._rows is not None and not through_stack:
            return self._of_rows(self._rows, batch, keeps_each, looks, factor)
        if self.replays:
            # A CUDA graph writes its outputs and buffers to the same memory at every step. Once a step: a mark between
            # chains would give up the memory in which the backward pass of the chains before expects its inputs.
            torch.compiler.cudagraph_mark_step_begin()
        if chains is None:
            each, log_prior = self._of_network(None, batch), self._densities.present_log_prior(self._of_prior)
            # A compiled network's mean over the last axis and a plain one's over all differ in rounding.
            mean = each.mean() if self._network is None and factor is None else weighed(each, factor)
            size = each.shape[-1]
        elif self._vmapped:
            each, log_prior = self._all_at_once(chains, batch)
            mean, size = weighed(each, factor), each.shape[-1]
        else:
            rows, log_prior = self._one_by_one(chains, batch, through_stack, seed_chain)
            means = [row.mean() if factor is None else weighed(row, factor) for row in rows]
            mean, size = torch.stack(means), len(rows[0])
            each = torch.stack(rows) if keeps_each or looks or factor is not None else mean
        if looks and self.first_batches is not None:
            self.first_batches.after(each)
        potential = torch.add(mean, log_prior, alpha=1 / self.num_data).neg()
        kept = each.detach() if keeps_each else None
        return StepEnergy(potential, log_prior.detach(), kept, size, excess=_excess(each, factor))

    def _usable(self, batch: Any) -> Any:
        """Return a batch of what the network takes, of one length for all chains that are computed at once."""
        if not isinstance(batch, ChainBatches):
            used = self._model.used_of(batch)
            return used if self._most_tokens is None else padded_alike([used], self._pad, self._most_tokens)[0]
        used = [self._model.used_of(own) for own in batch]
        if self._vmapped or self._rows is not None or self._most_tokens is not None:
            used = padded_alike(used, self._pad, self._most_tokens)
        return batch if all(new is old for new, old in zip(used, batch, strict=True)) else ChainBatches(used)

    def _of_rows(
        self, rows: RowEnergies, batch: Any, keeps_each: bool, looks: bool, factor: float | None
    ) -> StepEnergy:
        try:
            loss, (potential, log_prior), each = rows(batch, factor)
        except RuntimeError as error:
            raise vmap_refusal(error, self._model) from error
        if looks and self.first_batches is not None:
            self.first_batches.after(each)
        size, excess = each.shape[-1], _excess(each, factor)
        if self._chains is None:
            potential, log_prior, each = potential[0], log_prior[0], each[0]
        return StepEnergy(potential, log_prior, each.clone() if keeps_each else None, size, loss, excess)

    # -- one chain after another --------------------------------------------------------------------------------------

    def _one_by_one(
        self, chains: StackedChains, batch: Any, through_stack: bool, seed_chain: Callable[[int], None] | None
    ) -> tuple[list[Tensor], Tensor]:
        own_batches = isinstance(batch, ChainBatches)
        log_likelihoods, log_priors = [], []
        for chain, tensors in enumerate(chains.unbound() if through_stack else chains.slices):
            if seed_chain is not None:
                seed_chain(chain)
            with chains.swapped(tensors):
                of_prior: Mapping[str, Tensor] = chains.of_prior(chain)
                if through_stack:
                    present = dict(zip(chains.names, tensors, strict=True))
                    of_prior = {name: present[name] for name in of_prior}
                log_likelihoods.append(self._of_network(tensors, batch[chain] if own_batches else batch))
                log_priors.append(self._densities.present_log_prior(of_prior))
        return log_likelihoods, torch.stack(log_priors)

    def _of_network(self, tensors: Sequence[Tensor] | None, batch: Any) -> Tensor:
        """Return log p(y|x,θ) for each datum, shape (n,), of the chain whose tensors the model holds."""
        if self._network is None:
            log_likelihood = self._model.log_likelihood(batch)
        else:
            log_likelihood = self._network(self._named(tensors), batch)
        check_shape(log_likelihood)
        return log_likelihood

    def _named(self, tensors: Sequence[Tensor] | None) -> dict[str, Tensor]:
        if tensors is None or self._chains is None:  # collecting them by name is slow
            return {name: home[key] for name, ((home, key), *_) in self._homes.items() if home[key] is not None}
        return dict(zip(self._chains.names, tensors, strict=True))

    # -- all at once --------------------------------------------------------------------------------------------------

    def _all_at_once(self, chains: StackedChains, batch: Any) -> tuple[Tensor, Tensor]:
        named = dict(zip(chains.names, chains.stacked, strict=True))
        own = isinstance(batch, ChainBatches)
        network = self._network if self._network is not None else self._densities.log_likelihoods
        try:
            log_likelihood = network(named, batch.stacked() if own else batch, 0 if own else None)
        except RuntimeError as error:
            raise vmap_refusal(error, self._model) from error
        check_shape(log_likelihood, chains=True)
        entries = without_held({name: named[name] for name in self._of_prior}, self._densities.held, 1)
        return log_likelihood, self._densities.log_priors(named, entries)

    # -- torch.compile ------------------------------------------------------------------------------------------------

    def _compile(self, compiler: Callable[..., Any]) -> Callable[..., Tensor]:
        function = self._densities.log_likelihoods if self._vmapped else self._densities.log_likelihood
        mode = "reduce-overhead" if self.replays else None
        compiled: Callable[..., Tensor] = compiler(function, varies=1, dynamic=False, mode=mode)
        if not self.replays:
            return compiled

        def replayed(named: dict[str, Tensor], *rest: Any) -> Tensor:
            for tensor in named.values():
                if not hasattr(tensor, "_dynamo_static_input_type"):
                    torch._dynamo.mark_static_address(tensor)
            result: Tensor = compiled(named, *rest).clone()
            return result

        return replayed

    def keep_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Allocate zero gradients for parameters whose gradients come from a CUDA graph, which overwrites its outputs
        at each replay, so already at the next micro-batch."""
        if not self.replays:
            return
        for parameter in parameters:
            if parameter.requires_grad:
                kept = self._kept.get(parameter)
                self._kept[parameter] = parameter.grad = torch.zeros_like(parameter) if kept is None else kept.zero_()


def _excess(each: Tensor, factor: float | None) -> Tensor | None:
    """Return by how much a loss with a factor is below that with the mean, summed over chains."""
    if factor is None:
        return None
    each = each.detach()
    return (weighed(each, factor) - weighed(each, None)).sum()


def each_log_likelihood(model: EnergyModel, num_chains: int, batch: Any) -> Tensor:
    """Return log p(y|x,θ) of each datum of a batch at every chain's state, shape (C, n)."""
    each = []
    for chain in range(num_chains):
        with model.at_chain(chain):
            each.append(model.log_likelihood(batch))
    return torch.stack(each)
