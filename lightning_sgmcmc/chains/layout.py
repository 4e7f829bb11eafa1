"""Which chains a process holds, which ranks share their data, and the seeds of a run."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.modules.batchnorm import _NormBase

from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.seeding import derive_seed, fit_seed

DDPStrategy = pl.strategies.DDPStrategy
_MultiProcessingLauncher = pl.strategies.launchers.multiprocessing._MultiProcessingLauncher
TrainerFn = pl.trainer.states.TrainerFn


def dist_is_used() -> bool:
    """Return whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclass(frozen=True)
class ChainLayout:
    """How the chains of a run are laid out over processes.

    Attributes:
        first_chain: global index of this process's first chain.
        num_chains: C, chains in this process.
        total_chains: chains of the run.
        ranks_per_chain: data-parallel ranks that share each chain.
        rank_in_chain: index of this process among them.
        strategy: the trainer's, None without one.
    """

    first_chain: int = 0
    num_chains: int = 1
    total_chains: int = 1
    ranks_per_chain: int = 1
    rank_in_chain: int = 0
    strategy: Any = None

    @property
    def chains(self) -> range:
        """Global indices of this process's chains."""
        return range(self.first_chain, self.first_chain + self.num_chains)

    @property
    def group(self) -> Any:
        """The group of the ranks that share this process's chains, None for all ranks."""
        return getattr(self.strategy, "group", None)

    @property
    def is_spread(self) -> bool:
        """Whether other processes hold other chains."""
        return self.total_chains > self.num_chains

    def stream(self, chain: int) -> str:
        """Return the name of the random stream of a chain's rank (dropout, augmentation), the same wherever the chain
        runs."""
        return f"{chain}/{self.rank_in_chain}" if self.rank_in_chain else f"{chain}"

    def mean_over_data(self, tensor: Tensor) -> Tensor:
        """Return the mean over the ranks that share a chain's data."""
        if self.ranks_per_chain == 1:
            return tensor
        if self.is_spread:
            reduced: Tensor = self.strategy.mean_in_group(tensor)
        elif dist.is_initialized():
            reduced = mean_over_ranks(tensor, self.strategy.root_device, self.ranks_per_chain)
        else:
            reduced = self.strategy.reduce(tensor, reduce_op="mean")
        return reduced

    def gather(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return the values of all chains of the run, in their order, from this process's, along the chain axis."""
        if not self.is_spread:
            return tensor
        return torch.cat(self.strategy.gather_groups(tensor), dim)

    def own(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return this process's part of the result of `gather`."""
        return tensor.narrow(dim, self.first_chain, self.num_chains) if self.is_spread else tensor

    def gather_stored(self, tensor: Tensor) -> Tensor:
        """Return a tensor of all chains along a leading axis, from each process's stored one, which has a chain axis
        only if the process holds several chains."""
        return self.gather(tensor if self.num_chains > 1 else tensor[None])

    def own_stored(self, tensor: Tensor) -> Tensor:
        """Return this process's part of the result of `gather_stored`, in its stored form."""
        own = self.own(tensor)
        return own if self.num_chains > 1 else own[0]

    def collect(self, own: list[Any]) -> list[Any]:
        """Return an object of plain values and tensors, of one structure, for each chain of the run, for a checkpoint.

        All processes call it; other processes than the first, which writes the checkpoint, may return their own.
        """
        groups = self.strategy.collect(own) if self.is_spread else None
        return own if groups is None else [one for group in groups for one in group]

    def gather_unreduced(self, tensor: Tensor) -> Tensor:
        """Return each rank's unreduced value of a stored tensor (see `gather_stored`), for `own_unreduced`.

        Values are exact, except that groups of ranks with chains of their own keep only each group's mean.
        """
        if self.is_spread:
            return self.gather_stored(self.mean_over_data(tensor))[None]
        if self.ranks_per_chain == 1:
            return tensor[None]
        everyone: Tensor = self.strategy.all_gather(tensor)
        return everyone

    def own_unreduced(self, tensor: Tensor) -> Tensor:
        """Return this process's part of the result of `gather_unreduced`."""
        if self.is_spread or len(tensor) != self.ranks_per_chain:
            tensor = tensor.mean(0)
            return self.own_stored(tensor) if self.is_spread else tensor
        return tensor[self.rank_in_chain]


def mean_over_ranks(tensor: Tensor, device: torch.device, ranks: int, group: Any = None) -> Tensor:
    """Return the mean over a group's ranks, None for all; a strategy's own `reduce` also waits for all at a barrier."""
    total = tensor.to(device, copy=True)
    dist.all_reduce(total, group=group)
    return (total / ranks).to(tensor.device)


def layout_of(trainer: pl.Trainer | None, num_chains: int) -> ChainLayout:
    """Return how a trainer's strategy lays out the chains, C in each process; one process without a trainer."""
    if trainer is None:
        return ChainLayout(num_chains=num_chains, total_chains=num_chains)
    strategy = trainer.strategy
    if hasattr(strategy, "chain_layout"):
        layout: ChainLayout = strategy.chain_layout(num_chains)
        return layout
    return ChainLayout(0, num_chains, num_chains, trainer.world_size, trainer.global_rank, strategy)


# -- replicas ----------------------------------------------------------------------------------------------------------

# Ranks that share their chains average the gradients themselves, by one reduction of all rows. A wrapper of torch would
# take the gradients into buckets of its own, so the rows, and what is fused over them, would be lost.

BUCKET = 2**28
"""Bytes of parameters that are sent at once."""


def leave_out_wrapper(strategy: Any) -> None:
    """Make Lightning's own `ddp` train a module with chains without a wrapper, unless it has hooks for one."""
    hooks = ("_ddp_comm_hook", "_ddp_comm_state", "_ddp_comm_wrapper", "_model_averaging_period")
    if type(strategy) is DDPStrategy and not any(getattr(strategy, name, None) for name in hooks):
        vars(strategy)["configure_ddp"] = partial(_configure_ddp, strategy)


def _configure_ddp(strategy: Any) -> None:
    if not hasattr(strategy.lightning_module, "chains"):  # a later fit of the trainer may be of another module
        DDPStrategy.configure_ddp(strategy)
        return
    begin_replicas(strategy.lightning_module)


def begin_replicas(module: nn.Module, group: Any = None) -> None:
    """Give all ranks of a group, None for all, the parameters and buffers of its first one."""
    group = dist.distributed_c10d._get_default_group() if group is None else group
    parameters = [p.detach() for p in module.parameters()]
    _verify_param_shape_across_processes(group, parameters)
    share_in_group([*parameters, *(b.detach() for b in module.buffers())], group)


def share_in_group(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Replace tensors by those of a group's first rank, None for all, by few messages."""
    if tensors:
        group = dist.distributed_c10d._get_default_group() if group is None else group
        with torch.no_grad():
            dist._broadcast_coalesced(group, list(tensors), BUCKET, 0)


def buffers_of_steps(module: nn.Module) -> list[str]:
    """Return the names of the buffers that a step may read: all but the statistics of torch's own normalisation layers,
    which only evaluations read."""
    named = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _NormBase)]
    plain = [(name, layer) for name, layer in named if type(layer).__module__.startswith("torch.")]
    statistics = {f"{name}.{key}" for name, layer in plain for key in layer._buffers}
    return [name for name, _ in module.named_buffers() if name not in statistics]


def average_over_ranks(tensors: Sequence[Tensor], ranks: int, group: Any = None) -> None:
    """Replace tensors by their means over a group's ranks, None for all, by one reduction for each dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        own = [tensor for tensor in tensors if tensor.dtype == dtype]
        whole = own[0] if len(own) == 1 and own[0].is_contiguous() else torch.cat([t.reshape(-1) for t in own])
        whole.mul_(1 / ranks)  # before the sum, as torch's wrapper does
        dist.all_reduce(whole, group=group)
        if whole is not own[0]:
            pieces = whole.split([tensor.numel() for tensor in own])
            torch._foreach_copy_(own, [piece.view(t.shape) for piece, t in zip(pieces, own, strict=True)])


# -- seeds -------------------------------------------------------------------------------------------------------------


class ProcessRuns:
    """The runs of a process that were given no seed, so that each takes one of its own from `seed_everything`'s.

    The first takes the seed itself, a later one a function of it and of the place where torch's default generator is
    when it begins. So a loop's runs differ, and after `seed_everything` the same code repeats its runs, as in plain
    Lightning.
    """

    def __init__(self) -> None:
        self._made: list[tuple[int, str, bool]] = []
        """The seed and the place of each earlier run, and whether it left the generator there."""
        self._begun: tuple[int, str] | None = None

    def seed(self, place: str, launched: bool) -> int:
        """Return the seed of the run that begins now; a random one without `seed_everything`."""
        given = os.environ.get("PL_GLOBAL_SEED")
        if not given:
            self._begun = None
            return int.from_bytes(os.urandom(4), "little")
        seed = stated_seed(given)
        self._begun = (seed, place)
        if launched:
            return derive_seed(seed, "run", place)
        places = [where for own, where, _ in self._made if own == seed]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # Lightning seeds such processes anew at each fit, so their places are alike: they count.
            return derive_seed(seed, "run", "number", len(places)) if places else seed
        earlier = self._made.count((seed, place, True))
        if not earlier and (not places or places[0] == place):
            return seed
        return derive_seed(seed, "run", place, earlier)

    def count(self) -> None:
        """Count the run that took the last seed, once it has made a step."""
        if self._begun is None:
            return
        (seed, place), self._begun = self._begun, None
        self._made.append((seed, place, present_place() == place))


RUNS = ProcessRuns()
"""This process's."""


def present_place() -> str:
    """Return where torch's default generator is, as a short text."""
    return hashlib.blake2b(torch.default_generator.get_state().numpy().tobytes(), digest_size=8).hexdigest()


class FitSeeds:
    """The seed of a module's run, and of the present one of its fits: each fit draws anew, and continues the chains.

    `given` is the module's argument; None takes `seed_everything`'s (see `ProcessRuns`), or a random one.
    """

    def __init__(self, given: int | None) -> None:
        self.given = given
        self.run = given
        """The run's seed, which the module's first fit takes; None before."""
        self.fits = 0
        """The module's earlier fits, those that made a step."""
        self.loads = 0
        """States that the module has loaded."""
        self.place: str | None = None
        """Where torch's generator was when the fit was called, before Lightning seeds distributed processes."""
        self._has_starts = self._is_known = False
        """Whether chains started by the run's seed, and whether the coming fit's is chosen."""

    @property
    def seed(self) -> int | None:
        """The present fit's; None before the first."""
        return None if self.run is None else fit_seed(self.run, self.fits)

    @property
    def stated(self) -> int | None:
        """The seed that the user has given, to the module or by `seed_everything`; else the run's."""
        text = os.environ.get("PL_GLOBAL_SEED")
        return self.given if self.given is not None else stated_seed(text) if text else self.run

    def begin(self, trainer: pl.Trainer | None, starts: bool) -> None:
        """Choose the coming fit's seed; all ranks do, since they take the first one's."""
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if fitting or starts:
            self._choose(trainer)
        self._is_known = fitting
        self._has_starts = self._has_starts or starts

    def ensure(self, trainer: pl.Trainer | None) -> None:
        """Choose the coming fit's seed unless `begin` did."""
        if not self._is_known:
            self._choose(trainer)
        self._is_known = False

    def _choose(self, trainer: pl.Trainer | None) -> None:
        launched = trainer is not None and isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)
        if launched:  # the module's earlier fits ended in other processes, from which it has loaded their states
            self.fits = max(self.fits, self.loads)
        if self.given is None and (self.run is None or not (self._has_starts or self.fits)):
            seed = RUNS.seed(self.place or present_place(), launched)
            self.run = int(trainer.strategy.broadcast(seed)) if trainer is not None else seed

    def resume(self, seed: int | None, fits: int) -> None:
        """Let the coming fit be a checkpoint's, or the one after it; a seed of None keeps the present one."""
        self.run, self.fits = self.run if seed is None else seed, fits

    def end_fit(self) -> None:
        """Count a fit that has made a step."""
        self.fits += 1
        RUNS.count()


def stated_seed(text: str) -> int:
    """Return the seed in the environment, which `seed_everything` sets."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable PL_GLOBAL_SEED must be a whole number, got {text[:40]!r}: unset it, or call "
            "seed_everything"
        ) from None


# -- groups ------------------------------------------------------------------------------------------------------------


def new_group(ranks: Sequence[int] | None, timeout: timedelta | None, backend: str | None = None) -> Any:
    """Return a group of some ranks, or of all, as all ranks of the run do; "gloo" is for tensors in host memory."""
    with naming_the_network():
        return dist.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=backend)


@contextmanager
def naming_the_network() -> Iterator[None]:
    """Let an error of gloo, which connects by the address of the host's own name, name what the user can set."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).lower()
        if not any(word in said for word in ("gloo", "connect", "interface", "hostname", "resolve")):
            raise
        given = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR")}
        shown = ", ".join(f"{name}={value!r}" if value else f"no {name}" for name, value in given.items())
        raise RuntimeError(
            f"the ranks cannot connect by gloo, which the agreement of ranks needs beside NCCL ({shown}): set "
            "GLOO_SOCKET_IFNAME to the interface that all nodes reach, such as eth0 (`ip -brief address` lists them), "
            f"and MASTER_ADDR to rank 0's address on it; gloo said: {error}"
        ) from error
