"""Ũ/N of several chains: one after another or all at once, compiled or not."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_sgmcmc.batches.loader import ChainBatches, most_tokens, padded_alike
from lightning_sgmcmc.chains.compiled_step import CompiledSteps
from lightning_sgmcmc.chains.densities import Densities, vmap_refusal, weighed
from lightning_sgmcmc.chains.execution import (
    are_large,
    cloned,
    convolutions_of,
    evaluation_mode,
    homes_of,
    state_of,
    unrolled_is_faster,
)
from lightning_sgmcmc.chains.listed_steps import ListedSteps
from lightning_sgmcmc.chains.row_steps import Clip
from lightning_sgmcmc.chains.stacked import StackedChains
from lightning_sgmcmc.chains.state import StepEnergy
from lightning_sgmcmc.chains.traced import NotTraceableError, TracedEnergies, check_alike, check_gradient
from lightning_sgmcmc.chains.weights import FirstBatches, at_first_chain, check_batch
from lightning_sgmcmc.compiling import Compile, compiled_if_possible, is_compiled
from lightning_sgmcmc.model import EnergyModel, check_shape
from lightning_sgmcmc.namespace import rank_zero_info
from lightning_sgmcmc.priors.state import is_prior_state, prior_state, sampled_columns, without_held
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.samplers.rows import FlatParameters
from lightning_sgmcmc.tensors import exact

Execution = Literal["auto", "loop", "vmap", "unrolled"]


@contextmanager
def targets_explained(model: EnergyModel, chains: StackedChains | None, batch: Any) -> Iterator[None]:
    """Within the context, a label out of range raises the likelihood's ValueError in place of torch's error."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        with suppress(IndexError, RuntimeError):  # the device may be lost, or the network itself has failed
            check_batch(model, chains, batch)
        raise error


class ChainEnergies:
    """Computes Ũ/N of each chain, with gradients where the optimizer expects them.

        Ũ/N = -c·Σ_{i in batch} log p(y_i|x_i,θ) - log p(θ)/N,   c = 1/n or as `DataWeights` has it

    "loop" computes one chain after another, bit for bit as each alone; "vmap" all at once, equal up to rounding;
    "unrolled" one after another inside one function, which can be compiled as one. "auto" is "vmap" or, where graphs
    are replayed and it is faster, "unrolled".

    Args:
        chains: its stacked tensors; None for a single unstacked chain.
        flat: the sampled parameters as rows, of which the energies then are a function, but for "loop" (`RowEnergies`).
        traces: whether `traced` is used, which computes the gradient with the energies.
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
        traces: bool = False,
    ) -> None:
        self.num_data = num_data
        self._model = model
        self._chains = chains
        self._of_prior = dict(trainable) | prior_state(model)
        """What the prior is a function of: the model's own tensors by name."""
        self._vmapped = execution in ("auto", "vmap") and chains is not None
        self._densities = Densities(model)
        on_cuda = model.device.type == "cuda"
        compiler = None
        if is_compiled(compiled, model.device) and not (compiled == "auto" and model._compiled_net):
            name, mode = f"the network of {type(model).__name__}", "reduce-overhead" if on_cuda else None
            compiler = partial(compiled_if_possible, name, needed=compiled != "auto", dynamic=False, mode=mode)
        self.replays = compiler is not None and on_cuda
        """Whether compiled code is replayed as CUDA graphs."""
        self._kept: dict[Tensor, Tensor] = {}
        self._rows: RowEnergies | None = None
        if flat is not None and (execution != "loop" or chains is None):
            unrolled = None if execution == "auto" else execution == "unrolled"
            self._rows = RowEnergies(model, self._densities, chains, flat, num_data, compiler, unrolled, traces)
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
    def are_rows(self) -> bool:
        """Whether the energies are a function of the parameters as rows."""
        return self._rows is not None

    def convolutions(self, apart: bool) -> int:
        """Return how many convolutions traced steps have, once a batch was computed; see `compiled_steps`."""
        return 0 if self._rows is None else self._rows.convolutions(apart)

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

    def traced(
        self, batch: Any, keeps_each: bool, weigh: Callable[[], float | None], checks: bool = False
    ) -> tuple[StepEnergy, Tensor]:
        """Return the energies of a batch and the gradient of their sum, shape (C, P), by traced operations.

        Args:
            checks: whether to compare the energies with those of the function that was traced, as at first batches.

        Raises:
            NotTraceableError: if the function is more than tensor operations, or does not give the same again.
        """
        assert self._rows is not None
        batch = self._usable(batch)
        looks = self.first_batches is not None and self.first_batches.takes(batch)
        factor = weigh()
        self._rows.check_gradient(batch, factor)
        gradient, *found = self._rows.with_gradient(batch, factor, checks or looks)
        return self._step_of_rows(found, keeps_each, looks, factor), gradient

    @torch.no_grad()
    def plain(self, batch: Any, factor: float | None) -> Tensor:
        """Look at a batch, if it is one of a fit's first; return Ũ/N and log p(θ), shape (2, C), without a trace."""
        assert self._rows is not None
        batch = self._usable(batch)
        if self.first_batches is not None:
            self.first_batches.takes(batch)
        self._rows.check_gradient(batch, factor)
        return self._rows(batch, factor)[1]

    @property
    def is_looking(self) -> bool:
        """Whether some of the coming batches are looked at."""
        return self.first_batches is not None and self.first_batches.is_looking

    def compiled_steps(self, sampler: Sampler, clip: Clip, apart: bool, most: int, compiles: bool) -> CompiledSteps:
        """Return what makes steps of these energies, so many at once, by compiled functions or, on a GPU, by graphs.

        Args:
            sampler: its state is in the rows.
            clip: changes the gradients that it takes.
            apart: whether chains make these steps one after another.
        """
        assert self._rows is not None
        return CompiledSteps(*self._rows.of_steps(sampler, clip), most=most, compiles=compiles, apart=apart)

    def listed_steps(self, sampler: Sampler, clip: Clip, apart: bool) -> ListedSteps:
        """Return what makes steps of these energies as lists of operations, as `compiled_steps`."""
        assert self._rows is not None
        return ListedSteps(*self._rows.of_steps(sampler, clip), apart=apart)

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
        self, rows: "RowEnergies", batch: Any, keeps_each: bool, looks: bool, factor: float | None
    ) -> StepEnergy:
        try:
            found = rows(batch, factor)
        except RuntimeError as error:
            raise vmap_refusal(error, self._model) from error
        return self._step_of_rows(found, keeps_each, looks, factor)

    def _step_of_rows(self, found: Sequence[Tensor], keeps_each: bool, looks: bool, factor: float | None) -> StepEnergy:
        """Return the energies of a batch from what `RowEnergies` returns."""
        loss, (potential, log_prior), each = found
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
        copies = self.first_batches is not None and self.first_batches.change_inputs
        log_likelihoods, log_priors = [], []
        for chain, tensors in enumerate(chains.unbound() if through_stack else chains.slices):
            if seed_chain is not None:
                seed_chain(chain)
            with chains.swapped(tensors):
                of_prior: Mapping[str, Tensor] = chains.of_prior[chain]
                if through_stack:
                    present = dict(zip(chains.names, tensors, strict=True))
                    of_prior = {name: present[name] for name in of_prior}
                own = batch[chain] if own_batches else cloned(batch) if copies else batch
                log_likelihoods.append(self._of_network(tensors, own))
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
        compiled: Callable[..., Tensor] = compiler(function, varies=1)
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
        """Allocate zero gradients, where they come from a CUDA graph, which overwrites its outputs at each replay."""
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


# -- rows --------------------------------------------------------------------------------------------------------------


class RowEnergies:
    """Computes Ũ/N of all chains at once, with the gradient in `FlatParameters.gradients`.

    With a compiler, network and prior are one compiled function, which CUDA replays as a graph.

    Args:
        chains: its stacked tensors; None for a single unstacked chain.
        unrolled: whether the chains are written out one by one instead of `torch.vmap`; None is what is faster: of
            convolutions by their first batch, where they are traced or graphs are replayed, and `torch.vmap`
            elsewhere, unless vmap cannot run a layer (an LSTM).
        traces: whether `with_gradient` is used.
    """

    def __init__(
        self,
        model: EnergyModel,
        densities: "Densities",
        chains: StackedChains | None,
        flat: FlatParameters,
        num_data: int,
        compiler: Callable[..., Any] | None,
        unrolled: bool | None = False,
        traces: bool = False,
    ) -> None:
        self._model = model
        self._chains = chains
        self._flat = flat
        self._num_data = num_data
        place = {id(p): i for i, p in enumerate(flat.parameters)}
        named = state_of(model) if chains is None else dict(zip(chains.names, chains.stacked, strict=True))
        columns = sorted((place[id(t)], name) for name, t in named.items() if id(t) in place)
        self._names = [name for _, name in columns]
        """The sampled parameters, in the order of the columns."""
        self._others = {name: tensor for name, tensor in named.items() if id(tensor) not in place}
        """Frozen parameters, buffers and the prior's tensors."""
        self._densities = densities
        sampled = dict(zip(self._names, flat.parameters, strict=True))
        self._held = self._densities.held
        self._columns = sampled_columns(self._with_axis(sampled), self._held, 1)
        """The stretches of columns that are sampled, if a row of some parameter is held."""
        # On a CPU the sum over tensors stays as it is, bit for bit.
        self._of_rows = None
        if not self._densities.has_own_prior and (compiler is not None or traces or flat.values.device.type != "cpu"):
            everything = self._with_axis(sampled | _of_prior(self._others))
            self._of_rows = model.prior.of_rows(without_held(everything, self._held, 1))
        self._replays = compiler is not None and flat.values.device.type == "cuda"
        self._inverse = torch.full((), 1 / num_data, dtype=flat.values.dtype, device=flat.values.device)
        self._factor = torch.ones_like(self._inverse)
        self._compiled = self._compile(compiler) if compiler is not None else None
        self._may_unroll = unrolled is None and chains is not None
        self._convolutions = sum(isinstance(part, nn.modules.conv._ConvNd) for part in model.modules())
        # By the first batch, where either form may be the faster one.
        depends = self._may_unroll and (self._replays or (traces and self._convolutions > 0))
        self._unrolled = None if depends else bool(unrolled)
        self._traced = TracedEnergies(self._energies, model) if traces else None
        self._gradient_is_checked = False

    def convolutions(self, apart: bool) -> int:
        """Return how many convolutions the operations of a step have, of one chain or of all."""
        copies = 1 if self._chains is None or apart or not self._unrolled else self._chains.num_chains
        return self._convolutions * copies

    def follow(self, num_data: int) -> None:
        """Take another N, for data that grow."""
        self._num_data = num_data
        self._inverse.fill_(1 / num_data)

    def of_steps(self, sampler: Sampler, clip: Clip) -> tuple[Any, ...]:
        """Return what `RowSteps` is made of."""
        return self._energies, self._of_data, self._model, self._others, self._flat, sampler, self._inverse, clip

    def with_gradient(self, batch: Any, factor: float | None, checks: bool) -> tuple[Tensor, ...]:
        """Return the gradient of the energies' sum, shape (C, P), and what a call returns; see `ChainEnergies.traced`.

        A factor and the batch's form are among what is traced.
        """
        assert self._traced is not None
        batch, axis = self._with_its_axis(batch)
        weight = None if factor is None else self._factor.fill_(factor)
        found = self._traced(self._flat.values, self._others, batch, axis, self._inverse, weight)
        if checks:
            with torch.no_grad():
                again = self._energies(self._flat.values, self._others, batch, axis, self._inverse, weight)
            check_alike(found[2], again[1])
        return found

    def check_gradient(self, batch: Any, factor: float | None) -> None:
        """Raise once, before the first step, if the traced gradient is not autograd's."""
        if self._gradient_is_checked:
            return
        self._gradient_is_checked = True
        batch, axis = self._with_its_axis(batch)
        weight = None if factor is None else self._factor.fill_(factor)
        others = {name: tensor.clone() for name, tensor in self._others.items()}  # which a forward pass may change
        given = others, batch, axis, self._inverse, weight
        try:
            check_gradient(self._energies, self._flat.values, *given)
        except NotTraceableError:
            if not self._may_unroll or self._unrolled:
                raise
            self._unrolled = True  # what torch.vmap cannot run
            check_gradient(self._energies, self._flat.values, *given)

    def __call__(self, batch: Any, factor: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of Ũ/N over the chains with its graph, shape (); Ũ/N and log p(θ), shape (2, C); and
        log p(y|x,θ) of each datum, shape (C, n). The next replay of a graph overwrites the first and the last."""
        batch, axis = self._with_its_axis(batch)
        if not self._may_unroll:
            return self._found(batch, axis, factor)
        self._may_unroll = False
        try:
            return self._found(batch, axis, factor)
        except RuntimeError as error:
            if "vmap" not in str(error) and "atching rule" not in str(error):
                raise
            rank_zero_info(f"torch.vmap cannot run the network ({str(error).splitlines()[0]}): chains run one by one.")
            self._unrolled = True
            return self._found(batch, axis, factor)

    def _with_its_axis(self, batch: Any) -> tuple[Any, int | None]:
        """Return one batch for all chains, and its axis of chains, if each has its own; the first chooses the form."""
        first = batch[0] if isinstance(batch, ChainBatches) else batch
        if self._unrolled is None:
            self._unrolled = self._is_faster_unrolled(first)
        if not isinstance(batch, ChainBatches):
            return batch, None
        return (first, None) if self._chains is None else (batch.stacked(), 0)

    def _found(self, batch: Any, axis: int | None, factor: float | None) -> tuple[Tensor, Tensor, Tensor]:
        if self._compiled is None:
            return self._energies(self._flat.leaf, self._others, batch, axis, 1 / self._num_data, factor)
        weight = None if factor is None else self._factor.fill_(factor)
        loss, numbers, each = self._compiled(self._flat.leaf, self._others, batch, axis, self._inverse, weight)
        return loss, numbers.clone(), each

    def _energies(
        self,
        leaf: Tensor,
        others: Mapping[str, Tensor],
        batch: Any,
        batch_axis: int | None,
        inverse: Tensor | float,
        factor: Tensor | float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        named = dict(zip(self._names, self._flat.split(leaf), strict=True))
        each = self._log_likelihoods(named, others, batch, batch_axis)
        check_shape(each, chains=True)
        log_prior, mean = self._log_prior(leaf, named, others), weighed(each, factor)
        if isinstance(inverse, Tensor):
            potential = torch.addcmul(mean, log_prior, inverse).neg()
        else:
            potential = torch.add(mean, log_prior, alpha=inverse).neg()
        return potential.sum(), torch.stack([potential.detach(), log_prior.detach()]), each.detach()

    def _log_likelihoods(
        self, named: dict[str, Tensor], others: Mapping[str, Tensor], batch: Any, batch_axis: int | None
    ) -> Tensor:
        """Return log p(y|x,θ) of each datum, shape (C, n)."""
        # Dictionaries are joined by ** and not by |, which torch 2.6 cannot compile.
        if self._chains is None:
            return self._densities.log_likelihood({**named, **others}, batch)[None]
        count = len(next(iter(named.values())))
        if not self._unrolled and count == self._chains.num_chains:
            return self._densities.log_likelihoods({**named, **others}, batch, batch_axis)
        chains = range(count)  # some of the chains' rows, or all
        own = [cloned(batch) if batch_axis is None else pytree.tree_map(operator.itemgetter(c), batch) for c in chains]
        columns: dict[str, Any] = {**{name: tensor.unbind(0) for name, tensor in named.items()}, **others}
        states = [{name: column[c] for name, column in columns.items()} for c in chains]
        return torch.stack([self._densities.log_likelihood(states[c], own[c]) for c in chains])

    def _of_data(
        self, leaf: Tensor, others: Mapping[str, Tensor], batch: Any, batch_axis: int | None, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the data's part of the loss in evaluation mode, shape (), and of -Ũ/N, shape (C,), float64."""
        with evaluation_mode(self._model):
            named = dict(zip(self._names, self._flat.split(leaf), strict=True))
            each = self._log_likelihoods(named, others, batch, batch_axis)
        return -weighed(each, weights).sum(), weighed(exact(each.detach()), weights)

    def _log_prior(self, leaf: Tensor, named: dict[str, Tensor], others: Mapping[str, Tensor]) -> Tensor:
        everything = {**named, **others}
        if self._densities.has_own_prior and self._chains is None:
            return torch.stack([self._densities.log_prior(everything)])
        state = self._with_axis(_of_prior(others))
        if self._of_rows is not None:
            rows = torch.cat([leaf[:, part] for part in self._columns], 1) if self._held else leaf
            return self._of_rows(rows, state)
        entries = without_held({**self._with_axis(named), **state}, self._held, 1)
        return self._densities.log_priors(everything, entries)

    def _with_axis(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with a leading axis of chains."""
        return {name: tensor[None] if self._chains is None else tensor for name, tensor in tensors.items()}

    def _is_faster_unrolled(self, batch: Any) -> bool:
        """Return whether written out chains are faster, from the first chain's convolutions on its batch."""
        assert self._chains is not None
        model, device = self._model, self._flat.values.device
        with at_first_chain(model, self._chains, batch) as first, convolutions_of(model) as convolutions:
            model.log_likelihood(first)
        if device.type == "cpu":
            return not convolutions or are_large(convolutions)
        faster = unrolled_is_faster(convolutions, self._chains.num_chains, device)
        if faster:
            rank_zero_info("The chains' convolutions are faster one by one on this GPU, so they are not grouped.")
        return faster

    def _compile(self, compiler: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        compiled: Callable[..., tuple[Tensor, Tensor, Tensor]] = compiler(self._energies, varies=2)
        if not self._replays:
            return compiled
        for tensor in (self._flat.leaf, self._inverse, self._factor, *self._others.values()):
            torch._dynamo.mark_static_address(tensor)

        def replayed(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
            # A CUDA graph writes its outputs and buffers to the same memory at every step.
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*arguments)

        return replayed


def _of_prior(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if is_prior_state(name)}
