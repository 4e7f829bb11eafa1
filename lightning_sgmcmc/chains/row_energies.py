"""Energies of all chains as one function of their parameters in rows of one tensor, which torch can compile."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_sgmcmc.batches.loader import ChainBatches
from lightning_sgmcmc.chains.density import Densities
from lightning_sgmcmc.chains.execution import evaluation_mode, state_of, undisturbed_generators
from lightning_sgmcmc.chains.stacked import StackedChains
from lightning_sgmcmc.expansion import plain_type
from lightning_sgmcmc.model import EnergyModel, check_shape
from lightning_sgmcmc.priors.held import sampled_columns, without_held
from lightning_sgmcmc.priors.state import is_prior_state
from lightning_sgmcmc.samplers.rows import FlatParameters


class Found(NamedTuple):
    """The energies of a batch; the next replay of a graph overwrites the first and the last.

    They are the sum of Ũ/N over the chains with its graph, shape (); Ũ/N and log p(θ), shape (2, C); and log p(y|x,θ)
    of each datum, shape (C, n).
    """

    loss: Tensor
    numbers: Tensor
    each: Tensor


class RowEnergies:
    """Computes Ũ/N of all chains at once, with the gradient in `FlatParameters.gradients`.

    With a compiler, network and prior are one compiled function; on CUDA it is replayed as a graph, so a step launches
    the forward and the backward graph instead of a kernel for each operation.

    Args:
        chains: its stacked tensors; None for a single unstacked chain.
        unrolled: whether the chains are written out one by one instead of `torch.vmap`; None measures which is faster
            where graphs are replayed, and is `torch.vmap` elsewhere, unless vmap cannot run a layer (an LSTM).
    """

    def __init__(
        self,
        model: EnergyModel,
        chains: StackedChains | None,
        flat: FlatParameters,
        num_data: int,
        compiler: Callable[..., Any] | None,
        unrolled: bool | None = False,
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
        self._densities = Densities(model)
        sampled = dict(zip(self._names, flat.parameters, strict=True))
        self._held = self._densities.held
        self._columns = sampled_columns(self._with_axis(sampled), self._held, 1)
        """The stretches of columns that are sampled, if a row of some parameter is held."""
        # On a CPU the sum over tensors stays as it is, bit for bit.
        self._of_rows = None
        if not self._densities.has_own_prior and (compiler is not None or flat.values.device.type != "cpu"):
            everything = self._with_axis(sampled | _of_prior(self._others))
            self._of_rows = model.prior.of_rows(without_held(everything, self._held, 1))
        self._replays = compiler is not None and flat.values.device.type == "cuda"
        self._inverse = torch.full((), 1 / num_data, dtype=flat.values.dtype, device=flat.values.device)
        self._factor = torch.ones_like(self._inverse)
        self._compiled = self._compile(compiler) if compiler is not None else None
        self._unrolled = unrolled if self._replays and chains is not None else bool(unrolled)
        self._may_unroll = unrolled is None and chains is not None

    def follow(self, num_data: int) -> None:
        """Take another N, for data that grow."""
        self._num_data = num_data
        self._inverse.fill_(1 / num_data)

    def __call__(self, batch: Any, factor: float | None = None) -> Found:
        """Return the energies of a batch; `factor` is as in `weighed`."""
        own = isinstance(batch, ChainBatches)
        if own:
            batch = batch.stacked() if self._chains is not None else batch[0]
        axis = 0 if own and self._chains is not None else None
        if self._unrolled is None:
            self._unrolled = self._measured(batch if axis is None else pytree.tree_map(lambda t: t[0], batch))
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

    def _found(self, batch: Any, axis: int | None, factor: float | None) -> Found:
        if self._compiled is None:
            return Found(*self._energies(self._flat.leaf, self._others, batch, axis, 1 / self._num_data, factor))
        weight = None if factor is None else self._factor.fill_(factor)
        loss, numbers, each = self._compiled(self._flat.leaf, self._others, batch, axis, self._inverse, weight)
        return Found(loss, numbers.clone(), each)

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
        # Dictionaries are joined by ** and not by |, which torch 2.6 cannot compile.
        if self._chains is None:
            each = self._densities.log_likelihood({**named, **others}, batch)[None]
        elif self._unrolled:
            chains = range(self._chains.num_chains)
            own = [batch if batch_axis is None else pytree.tree_map(operator.itemgetter(c), batch) for c in chains]
            columns = {name: tensor.unbind(0) for name, tensor in named.items()}
            states = [_row({**columns, **others}, chain) for chain in chains]
            each = torch.stack([self._densities.log_likelihood(states[c], own[c]) for c in chains])
        else:
            each = self._densities.log_likelihoods({**named, **others}, batch, batch_axis)
        check_shape(each, chains=True)
        log_prior, mean = self._log_prior(leaf, named, others), weighed(each, factor)
        if isinstance(inverse, Tensor):
            potential = torch.addcmul(mean, log_prior, inverse).neg()
        else:
            potential = torch.add(mean, log_prior, alpha=inverse).neg()
        return potential.sum(), torch.stack([potential.detach(), log_prior.detach()]), each.detach()

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

    def _measured(self, batch: Any) -> bool:
        """Return whether written out chains are faster, from the first chain's convolutions on its batch."""
        assert self._chains is not None
        apart = undisturbed_generators(self._model), evaluation_mode(self._model)
        with torch.no_grad(), apart[0], apart[1], self._chains.at(0), convolutions_of(self._model) as convolutions:
            self._model.log_likelihood(batch)
        device = self._flat.values.device
        faster = unrolled_is_faster(convolutions, self._chains.num_chains, device)
        if faster:
            rank_zero_info("The chains' convolutions are faster one by one on this GPU, so they are not grouped.")
        return faster

    def _compile(self, compiler: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        mode = "reduce-overhead" if self._replays else None
        compiled: Callable[..., tuple[Tensor, Tensor, Tensor]] = compiler(
            self._energies, varies=2, dynamic=False, mode=mode
        )
        if not self._replays:
            return compiled
        for tensor in (self._flat.leaf, self._inverse, self._factor, *self._others.values()):
            torch._dynamo.mark_static_address(tensor)

        def replayed(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
            # A CUDA graph writes its outputs and buffers to the same memory at every step.
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*arguments)

        return replayed


def weighed(each: Tensor, factor: Tensor | float | None) -> Tensor:
    """Return the log-likelihood's part of -Ũ/N: the mean of log p(y|x,θ), or the sum times a factor."""
    return each.mean(-1) if factor is None else each.sum(-1) * factor


def _row(tensors: Mapping[str, Any], chain: int) -> dict[str, Tensor]:
    return {name: tensor[chain] for name, tensor in tensors.items()}


def _of_prior(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if is_prior_state(name)}


# -- forms -------------------------------------------------------------------------------------------------------------

# Which form of one function of all chains is faster on a GPU: `torch.vmap`, or the chains written out one by one.
#
# `torch.vmap` makes one grouped convolution of the chains' convolutions, for which cuDNN may have no fast kernel, and
# one batched product of their matrices, which is fast. So only convolutions are measured.

Seconds = Callable[[Callable[[], Any]], float]
MOST_CHAINS = 8
"""Written out for more chains, a deep network takes too long to compile."""
REPEATS = 5
_KNOWN: dict[tuple[Any, ...], bool] = {}


class Convolution(NamedTuple):
    """What a convolution's time depends on."""

    function: Callable[..., Tensor]
    input: tuple[int, ...]
    weight: tuple[int, ...]
    options: tuple[Any, ...]
    groups: int
    dtype: torch.dtype


@contextmanager
def convolutions_of(model: nn.Module) -> Iterator[list[Convolution]]:
    """Record the convolution layers that a model calls inside the context."""
    functions: dict[type[nn.Module], Callable[..., Tensor]] = {
        nn.Conv1d: nn.functional.conv1d,
        nn.Conv2d: nn.functional.conv2d,
        nn.Conv3d: nn.functional.conv3d,
    }
    found: list[Convolution] = []

    def note(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        lower = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if lower else x.dtype
        options = layer.stride, layer.padding, layer.dilation
        shapes = tuple(x.shape), tuple(layer.weight.shape)
        found.append(Convolution(functions[plain_type(layer)], *shapes, options, layer.groups, dtype))

    handles = [part.register_forward_pre_hook(note) for part in model.modules() if plain_type(part) in functions]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def unrolled_is_faster(
    convolutions: Sequence[Convolution], chains: int, device: torch.device, seconds: Seconds | None = None
) -> bool:
    """Return whether convolutions of each chain by itself take less time on a device than grouped ones of all chains,
    as measured once in a process, forward and backward; `seconds` defaults to the kernels' time."""
    if not convolutions or chains > MOST_CHAINS:
        return False
    key = (*sorted(map(repr, convolutions)), chains, str(device))
    if key not in _KNOWN:
        measure = seconds if seconds is not None else kernel_seconds
        total = {True: 0.0, False: 0.0}
        for convolution in set(convolutions):
            count = convolutions.count(convolution)
            for apart in total:
                total[apart] += count * measure(_pass(convolution, chains, device, apart))
        _KNOWN[key] = 0 < total[True] < total[False]
    return _KNOWN[key]


def _pass(convolution: Convolution, chains: int, device: torch.device, apart: bool) -> Callable[[], Any]:
    """Return a forward and backward pass of all chains' convolutions, each apart or all in groups."""
    count, channels, *place = convolution.input
    outputs, inside, *kernel = convolution.weight
    times, widths = (chains, 1) if apart else (1, chains)
    options: dict[str, Any] = {"dtype": convolution.dtype, "device": device, "requires_grad": True}
    inputs = [torch.zeros((count, widths * channels, *place), **options) for _ in range(times)]
    weights = [torch.zeros((widths * outputs, inside, *kernel), **options) for _ in range(times)]

    def run() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            groups = widths * convolution.groups
            result = convolution.function(x, weight, None, *convolution.options, groups)
            torch.autograd.grad(result, (x, weight), torch.ones_like(result))

    return run


def kernel_seconds(call: Callable[[], Any]) -> float:
    """Return the seconds that the device's kernels of a call take, 0 where the profiler sees none."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(REPEATS):
                call()
            torch.cuda.synchronize()
    except (AssertionError, RuntimeError):  # a torch or a machine whose profiler cannot see the device
        return 0.0
    return sum(event.self_device_time_total for event in profiled.key_averages()) / REPEATS / 1e6
