"""Chains over processes: one rank, or a group of data-parallel ranks, per chain; their checkpoints."""

import atexit
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_sgmcmc.chains.joined import Column, JoinedRows, column
from lightning_sgmcmc.chains.layout import (
    ChainLayout,
    begin_replicas,
    mean_over_ranks,
    naming_the_network,
    new_group,
    share_in_group,
)
from lightning_sgmcmc.chains.samples import PARTS, PosteriorSample
from lightning_sgmcmc.chains.starts import keys_of
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.samplers import Sampler
from lightning_sgmcmc.seeding import derive_seed

DDPStrategy = pl.strategies.DDPStrategy
StrategyRegistry = pl.strategies.StrategyRegistry
TrainerFn = pl.trainer.states.TrainerFn


def join_sampler(own: dict[str, Any], parts: Sequence[dict[str, Any]], chains_each: int) -> dict[str, Any]:
    """Return a process's sampler state with the controls and noise of all chains, from those of each process in their
    order; its tensors are joined as they are written (`columns_of`)."""
    groups = [
        {name: _join_control([g[name] for g in same], chains_each) for name in same[0]}
        for same in zip(*(part["param_groups"] for part in parts), strict=True)
    ]
    noise = [part["sampler"]["noise"] for part in parts]
    sampler = dict(own["sampler"]) | {
        "num_chains": chains_each * len(parts),
        "noise": dict(noise[0]) | {"generators": [g for one in noise for g in one["generators"]]},
    }
    return dict(own) | {"param_groups": groups, "sampler": sampler}


def columns_of(
    state: dict[str, Any], path: tuple[Any, ...], chains_each: int, shapes: Sequence[torch.Size]
) -> list[Column]:
    """Return the columns of a sampler's state, which is at `path`, with the parameters' shapes."""
    own_axis, found = state["sampler"]["per_chain_state"], []
    for key, own in state["state"].items():
        for name, value in own.items():
            if isinstance(value, Tensor):
                # A value without the parameter's shape is one number per chain.
                per_chain = name in own_axis or value.shape != shapes[key]
                found.append(column((*path, "state", key, name), value, per_chain or chains_each > 1))
    return found


def split_sampler(whole: dict[str, Any], layout: ChainLayout, shapes: Sequence[torch.Size]) -> dict[str, Any]:
    """Return a process's part of what `join_sampler` returned; `shapes` are those of its parameters."""
    if "sampler" not in whole:
        return whole
    if whole["sampler"]["num_chains"] != layout.total_chains:
        raise ValueError(
            f"the checkpoint has {whole['sampler']['num_chains']} chains, this run has {layout.total_chains}: use "
            "the same number (processes x num_chains / ranks_per_chain)"
        )
    own_axis = whole["sampler"]["per_chain_state"]
    state = {}
    for key, own in whole["state"].items():
        state[key] = dict(own)
        for name, value in own.items():
            if isinstance(value, Tensor):
                plain = layout.num_chains == 1 and name not in own_axis and value.shape[1:] == shapes[key]
                state[key][name] = _split(value, layout) if plain else layout.own(value)
    groups = [{name: _split_control(v, layout) for name, v in g.items()} for g in whole["param_groups"]]
    noise = dict(whole["sampler"]["noise"])
    if noise["generators"]:
        noise["generators"] = [noise["generators"][chain] for chain in layout.chains]
    sampler = dict(whole["sampler"]) | {"num_chains": layout.num_chains, "noise": noise}
    return dict(whole) | {"state": state, "param_groups": groups, "sampler": sampler}


def _split(tensor: Tensor, layout: ChainLayout) -> Tensor:
    if tensor.dim() == 0 or len(tensor) != layout.total_chains:
        raise ValueError(
            f"the checkpoint holds a tensor of shape {tuple(tensor.shape)}, and this run has {layout.total_chains} "
            "chains, which should be its first axis: use as many chains as the checkpoint has"
        )
    return layout.own_stored(tensor)


def _join_control(values: Sequence[Any], chains_each: int) -> Any:
    """Return one number if all chains share it, else one per chain."""
    first = values[0]
    if not isinstance(first, float | Tensor):
        return first
    if not any(isinstance(value, Tensor) for value in values) and all(value == first for value in values):
        return first
    each = [torch.as_tensor(value).detach().cpu().reshape(-1).expand(chains_each) for value in values]
    return torch.cat(each)


def _split_control(value: Any, layout: ChainLayout) -> Any:
    if not isinstance(value, Tensor) or value.numel() != layout.total_chains:
        return value
    own = layout.own(value)
    return own.item() if layout.num_chains == 1 else own


# -- packing -----------------------------------------------------------------------------------------------------------


class SampleRows:
    """The form of a run's samples, which all have it: which tensors they hold, and where each lies in a row."""

    def __init__(self, sample: PosteriorSample) -> None:
        self._places: list[tuple[str, str, torch.dtype, torch.Size, slice]] = []
        sizes: dict[torch.dtype, int] = {}
        for part in PARTS:
            for name, tensor in getattr(sample, part).items():
                start = sizes.get(tensor.dtype, 0)
                sizes[tensor.dtype] = start + tensor.numel()
                place = slice(start, start + tensor.numel())
                self._places.append((part, name, tensor.dtype, tensor.shape, place))
        self.dtypes = tuple(sizes)
        self._shared = sample.shared

    def pack(self, samples: Sequence[PosteriorSample], device: torch.device) -> list[Tensor]:
        """Return the samples' tensors, one tensor (S, P) on a device for each of `dtypes`."""
        packed = []
        for dtype in self.dtypes:
            names = [(part, name) for part, name, own, *_ in self._places if own == dtype]
            flat = [getattr(sample, part)[name].reshape(-1).to(device) for sample in samples for part, name in names]
            packed.append(torch.cat(flat).view(len(samples), -1))
        return packed

    def unpack(self, rows: Sequence[Tensor], numbers: Sequence[PosteriorSample]) -> Iterator[PosteriorSample]:
        """Yield samples with these numbers and the tensors that `pack` was given, which each of them owns."""
        for index, sample in enumerate(numbers):
            row = {dtype: tensor[index].clone() for dtype, tensor in zip(self.dtypes, rows, strict=True)}
            held: dict[str, Any] = {part: {} for part in PARTS}
            for part, name, dtype, shape, place in self._places:
                held[part][name] = row[dtype][place].view(shape)
            yield replace(sample, **held, shared=self._shared)


# -- strategy ----------------------------------------------------------------------------------------------------------


LARGEST_GATHER = 2**30
"""Bytes of samples that a process receives at once."""


class ChainStrategy(DDPStrategy):
    """Spreads chains over processes: each process, or each group of processes, runs chains of its own.

    With W processes, `ranks_per_chain=g` and a module with `num_chains=C` the run has W/g·C chains. Process r holds
    chains C·⌊r/g⌋ and following. A chain's parameters, noise and data order depend only on the seed and the chain's
    index, so chains are the same in every layout. Chains exchange only what callbacks communicate, their samples, and
    whether to stop, every few batches. Within a group the training data are divided, gradients are averaged
    as in DDP, and all ranks draw the same noise.

    Every process passes every chain's samples to its callbacks; evaluations are divided among all processes. A
    checkpoint holds all chains in one file, in a form that does not depend on the layout: 4 processes with one chain
    each can continue from one process with 4 chains, and vice versa. `Trainer(strategy="chains")` uses one rank per
    chain.

    Args:
        ranks_per_chain: g, data-parallel ranks that share a chain; it divides the number of processes.
        options: keyword arguments of `DDPStrategy`.

    Raises:
        ValueError: if ranks_per_chain is below 1; at setup, if it does not divide the number of processes.

    Example::

        module = BayesianModule(net, Categorical(), lr=0.1)
        trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=ChainStrategy(ranks_per_chain=2))
    """

    strategy_name = "chains"

    def __init__(self, ranks_per_chain: int = 1, **options: Any) -> None:
        check_count("ranks_per_chain", ranks_per_chain, optional=False)
        super().__init__(**options)
        self.ranks_per_chain = ranks_per_chain
        self.group: Any = None
        """The ranks that share this process's chains, None for all."""
        self._across: Any = None
        """The ranks with this process's index in their groups, one per group, None for all."""
        self._across_host: Any = None
        """The same ranks, for tensors in host memory."""
        self._has_groups = False
        self._columns: list[Column] = []
        """The tensors of the checkpoint that is being made of which this process has its own chains."""

    # -- ranks --------------------------------------------------------------------------------------------------------

    @property
    def num_groups(self) -> int:
        """Number of rank groups; each has its own chains."""
        return self.world_size // self.ranks_per_chain

    @property
    def group_index(self) -> int:
        """Index of this process's group."""
        return self.global_rank // self.ranks_per_chain

    @property
    def rank_in_group(self) -> int:
        """Index of this process in its group."""
        return self.global_rank % self.ranks_per_chain

    def chain_layout(self, num_chains: int) -> ChainLayout:
        """Return which chains this process holds, with `num_chains` of them in each process."""
        return ChainLayout(
            first_chain=self.group_index * num_chains,
            num_chains=num_chains,
            total_chains=self.num_groups * num_chains,
            ranks_per_chain=self.ranks_per_chain,
            rank_in_chain=self.rank_in_group,
            strategy=self,
        )

    def setup_distributed(self) -> None:
        with naming_the_network():
            super().setup_distributed()
        size = self.ranks_per_chain
        if self.world_size % size:
            raise ValueError(
                f"ranks_per_chain={size} does not divide the {self.world_size} processes: set devices x num_nodes to a "
                f"multiple of {size}"
            )
        if self._has_groups:
            return
        self._has_groups = True
        on_host = self._process_group_backend == "gloo"
        if size == 1:  # the ranks of all groups are all ranks
            self._across_host = None if on_host else new_group(None, self._timeout, backend="gloo")
        elif size < self.world_size:
            self._make_groups(on_host)
        atexit.register(_leave)

    def _make_groups(self, on_host: bool) -> None:
        """Make the groups of ranks, in whose creation every process takes part."""
        size = self.ranks_per_chain
        for chain in range(self.num_groups):
            group = new_group(range(chain * size, (chain + 1) * size), self._timeout)
            if chain == self.group_index:
                self.group = group
        for place in range(size):
            ranks = range(place, self.world_size, size)
            across = new_group(ranks, self._timeout)
            host = across if on_host else new_group(ranks, self._timeout, backend="gloo")
            if place == self.rank_in_group:
                self._across, self._across_host = across, host

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """In a fit, a chain's ranks share its data, and each chain sees all data in its own order. Outside a fit there
        are only samples, and all processes share the data."""
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        if trainer is not None and trainer.state.fn != TrainerFn.FITTING:
            return super().distributed_sampler_kwargs
        seed = derive_seed(torch.initial_seed(), "loader", self.group_index) % 2**32 if self.group_index else 0
        return {"num_replicas": self.ranks_per_chain, "rank": self.rank_in_group, "seed": seed}

    # -- the model ----------------------------------------------------------------------------------------------------

    def _setup_model(self, model: Any) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        # In a stream of its own, as a graph of the backward pass needs (torch's notes on CUDA, "Usage with DDP").
        with torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext():
            return DistributedDataParallel(model, device_ids=device_ids, process_group=self.group, **self._ddp_kwargs)

    def configure_ddp(self) -> None:
        if self.ranks_per_chain == 1:
            return  # no gradients are exchanged
        if self._ddp_comm_hook is not None:  # a hook of the wrapper
            super().configure_ddp()
        else:
            assert self.lightning_module is not None
            begin_replicas(self.lightning_module, self.group)

    def setup(self, trainer: pl.Trainer) -> None:
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True pools the statistics of all processes, and each chain has its own: leave it out"
            )
        if trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
            return
        # DDP would broadcast the first process's parameters to all.
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()

    def teardown(self) -> None:
        super().teardown()
        if self.world_size == 1:  # processes forked later would use this group
            self.group = self._across = self._across_host = None
            self._has_groups = False
            _leave()

    # -- exchange -----------------------------------------------------------------------------------------------------

    def mean_in_group(self, tensor: Tensor) -> Tensor:
        """Return the mean over the ranks that share this process's chains."""
        return mean_over_ranks(tensor, self.root_device, self.ranks_per_chain, self.group)

    def gather_groups(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all groups, in the order of their chains."""
        group = self._across if tensor.device.type == self.root_device.type else self._across_host
        everyone = torch.empty(self.num_groups * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        dist.all_gather_into_tensor(everyone, tensor.reshape(-1), group=group)
        return list(everyone.view(self.num_groups, *tensor.shape))

    def share_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of the first process."""
        for tensor in tensors:
            moved = tensor.detach().to(self.root_device)
            dist.broadcast(moved, 0)
            tensor.detach().copy_(moved)

    def share_samples(self, samples: Iterable[PosteriorSample], with_tensors: bool = True) -> Iterator[PosteriorSample]:
        """Yield the samples of all chains, in their order, on every process; each group has as many, at least one.

        They travel as rows: one collective operation for each dtype and one for their numbers; large ones group by
        group, so that no process holds all of them at once; or, of other groups, their numbers alone.
        """
        own, is_first = list(samples), self.rank_in_group == 0
        no_tensors: dict[str, Any] = {part: {} for part in (*PARTS, "shared")}
        numbers: list[Any] = [None] * self.num_groups
        dist.all_gather_object(numbers, [replace(sample, **no_tensors) for sample in own], self._across_host)
        if not with_tensors:
            for group, of_group in enumerate(numbers):
                yield from own if group == self.group_index else of_group
            return
        form, device = SampleRows(own[0]), self.root_device
        rows = form.pack(own, device)
        if self.ranks_per_chain > 1:  # statistics of a layer may differ between ranks until the next batch
            share_in_group(rows, self.group)
        size = sum(tensor.nbytes for tensor in rows) * self.num_groups
        gathered = [self.gather_groups(tensor) for tensor in rows] if size <= LARGEST_GATHER else None
        for group in range(self.num_groups):
            if gathered is not None:
                of_group = [everyone[group] for everyone in gathered]
            else:
                of_group = [tensor if group == self.group_index else torch.empty_like(tensor) for tensor in rows]
                for tensor in of_group:
                    dist.broadcast(tensor, group * self.ranks_per_chain)
            yield from own if is_first and group == self.group_index else form.unpack(of_group, numbers[group])

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _shared_keys(self) -> set[str]:
        """Return the keys of a state dict with what all chains share."""
        chains = getattr(self.lightning_module, "chains", None)
        return set() if chains is None else keys_of(chains.model, chains.sharing.names)

    def _layout(self) -> ChainLayout:
        return self.chain_layout(getattr(self.lightning_module, "num_chains", 1))

    def gather_plain(self, value: Any) -> list[Any] | None:
        """Return every group's plain value on the first process, None on the others."""
        if self.rank_in_group > 0:
            return None
        found = [None] * self.num_groups if self.group_index == 0 else None
        dist.gather_object(value, found, dst=0, group=self._across_host)
        return found

    def collect(self, tree: Any) -> list[Any] | None:
        """Return every group's tree of tensors and plain values on the first process, None on the others."""
        _check_processes()
        leaves, structure = pytree.tree_flatten(tree)
        tensors = [leaf.detach().cpu().contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
        first = self.rank_in_group == 0 and self.group_index == 0
        if self.rank_in_group > 0:
            return None
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        plain = self.gather_plain((rest, structure))
        columns: list[list[Tensor]] = []
        for tensor in tensors:
            into = [torch.empty_like(tensor) for _ in range(self.num_groups)] if first else None
            dist.gather(tensor, into, dst=0, group=self._across_host)
            columns.append(into or [])
        if not first:
            return None
        assert plain is not None
        trees = []
        for index, (values, shape) in enumerate(plain):
            own = iter([column[index] for column in columns])
            is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
            whole = [next(own) if t else value for t, value in zip(is_tensor, values, strict=True)]
            trees.append(pytree.tree_unflatten(whole, shape))
        return trees

    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        layout, self._columns = self._layout(), []
        if layout.is_spread:
            _check_processes()
            shared, has_axis = self._shared_keys(), layout.num_chains > 1
            own = {key: t for key, t in state.items() if isinstance(t, Tensor) and key not in shared}
            self._columns = [column(("state_dict", key), tensor, has_axis) for key, tensor in own.items()]
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = super().optimizer_state(optimizer)
        layout = self._layout()
        if not layout.is_spread or "sampler" not in state:
            return state
        index = next(i for i, own in enumerate(self.optimizers) if own is getattr(optimizer, "optimizer", optimizer))
        path = ("optimizer_states", index)
        self._columns += columns_of(state, path, layout.num_chains, _shapes(optimizer))
        everyone = self.collect({name: state[name] for name in ("param_groups", "sampler")})
        return state if everyone is None else join_sampler(state, everyone, layout.num_chains)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint of all chains: each process adds its own, so the first one holds no others'."""
        columns, self._columns = self._columns, []
        if not columns:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self.rank_in_group:
            return
        ranks = range(0, self.world_size, self.ranks_per_chain)
        joined = JoinedRows(columns, self._across_host, self.group_index, ranks)
        io: Any = self.checkpoint_io  # that of a run writes joined rows, see `joins`
        if self.group_index:
            joined.serve()
            return
        whole = joined.take(checkpoint)
        if storage_options is None and hasattr(io, "joins") and io.joins(filepath):
            io.save_checkpoint(whole, filepath, joined=joined)
        else:
            joined.fill()
            io.save_checkpoint(whole, filepath, storage_options=storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        layout = self._layout()
        if layout.is_spread:
            state, shared = checkpoint["state_dict"], self._shared_keys()
            own = {key: _split(tensor, layout) for key, tensor in state.items() if key not in shared}
            checkpoint = dict(checkpoint) | {"state_dict": {**state, **own}}
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        layout = self._layout()
        if layout.is_spread and all(isinstance(optimizer, Sampler) for optimizer in self.optimizers):
            saved = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
            states = [split_sampler(state, layout, _shapes(optimizer)) for optimizer, state in saved]
            # The checkpoint's tensors are parts of its file, which may be deleted.
            states = pytree.tree_map_only(Tensor, torch.clone, states)
            checkpoint = dict(checkpoint) | {"optimizer_states": states}
        super().load_optimizer_state_dict(checkpoint)


def _check_processes() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "the chains' processes have ended, and this one holds only the first one's chains, so it cannot save all "
            "of them: use a ModelCheckpoint, which saves during the fit"
        )


def _shapes(optimizer: Any) -> list[torch.Size]:
    return [p.shape for group in optimizer.param_groups for p in group["params"]]


def _leave() -> None:
    """Leave the process group at exit: otherwise a process occasionally aborts."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


for _name, _start in (("chains", "popen"), ("chains_fork", "fork"), ("chains_spawn", "spawn")):
    StrategyRegistry.register(
        _name,
        ChainStrategy,
        description=f"One rank per chain, with start_method '{_start}'",
        start_method=_start,
    )
