"""Mini-batches that are held for an exponential time, then switched: the data subsets of the switching diffusion.

Its exact paths for quadratic potentials are in `lightning_sgmcmc.simulation.switching_diffusion`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Sampler as IndexSampler

from lightning_sgmcmc.batches.orders import BatchOrder, OrderSpec, Permutation, check_all_data_are_taken
from lightning_sgmcmc.checks import check_count, check_positive
from lightning_sgmcmc.seeding import derive_seed

CHUNK = 1024
"""Positions whose draws come from one generator; part of what a seed means."""

TimeStep: TypeAlias = "float | Callable[[int], float]"
"""A number, or a function of the step k = 1, 2, …"""


class SwitchingOrder(BatchOrder):
    """Mini-batches as the switching diffusion (SGLDiff) takes them: one is held for a random time, then another drawn.

    The data are split once, by a permutation seeded by (seed, chain), into S = `batches_per_epoch` mini-batches of one
    size, ⌈N/S⌉ ≤ `batch_size`; where S does not divide N, fewer than S data (times the replicas) are in two of them.
    The step k takes the batch i(t_k/η) at the time t_k that the steps before it have advanced, t_1 = 0, where i is the
    Markov chain in continuous time, uniform at first, that jumps from each batch to each other one at rate 1. So a
    batch is held for an exponential time with mean η/(S-1), and the next is uniform among the others.

    The steps' times are exact, whatever η. The generator Q = (1·1ᵀ - S·I)/η has the transition matrix

        exp(Q·dt) = e^{-S·dt/η}·I + (1 - e^{-S·dt/η})·1·1ᵀ/S,

    since 1·1ᵀ/S is a projection: over dt the batch stays with probability e^{-S·dt/η}, else it is redrawn,
    uniformly from ALL S (uniformisation at rate S/η). The state of a step is therefore the last such draw, a function
    of (seed, chain, step): a run continues exactly from a loader's one number, and workers may fetch ahead. Going
    anywhere costs a pass back to the last draw, 1,024 steps at a time. For η far below dt every step takes an
    independent batch (with replacement), so the subsampling error of η shows only where η/(S-1) is above dt.

    Chains have splits and switching times of their own, and so stationary laws of their own. Data-parallel ranks of
    one chain switch together: each holds its share of the batch that is held. An epoch is S steps and no pass over the
    data. Use it as `ResumableLoader(data, batch_size, order=partial(SwitchingOrder, switching_time=…, time_step=…))`,
    or put that partial into `order` of a datamodule.

    Args:
        spec: the data, the batches (of `batch_size` data at most), the seed, the chain and its replicas. `drop_last`
            must leave out nothing, since that would be left out for the whole run.
        switching_time: η > 0, in the diffusion's time, for which the potential is that of all data.
        time_step: the time dt > 0 that a batch of the order advances the diffusion: a number, or a function of the
            step k = 1, 2, … for schedules. SGLD and pSGLD: lr/N; SGHMC and SGNHT: √(lr/N); UnderdampedLangevin: its
            lr. With accumulated gradients (A batches a step) the order counts micro-batches, each of which advances
            1/A of the step's time: a step then takes the mean of the A batches that are held meanwhile.

    Raises:
        ValueError: if η or the time step is not a positive finite number, or drop_last leaves out data.

    Source: Jin, Liu & Latz 2023 (SGLDiff), eq. (1.4).

    Example::

        order = partial(SwitchingOrder, switching_time=0.1, time_step=1e-3)
        loader = ResumableLoader(data, batch_size=8, order=order)
    """

    def __init__(self, spec: OrderSpec, *, switching_time: float, time_step: TimeStep) -> None:
        super().__init__(spec)
        check_positive("switching_time", switching_time)
        if not callable(time_step):
            check_positive("time_step", time_step)
        check_all_data_are_taken(spec, self.batches_per_epoch)
        self.switching_time = switching_time
        self.time_step = time_step
        self._split = Permutation(spec.num_data, derive_seed(spec.seed, "switching split", spec.chain))
        self._chunk = -1
        self._states: list[int] = []

    def indices(self, batch: int) -> Tensor:
        """Return the indices of the batch that is held at a position of the stream, counted from 0."""
        spec = self.spec
        shares = self.batches_per_epoch * spec.num_replicas
        size = math.ceil(spec.num_data / shares)
        first = (self.state(batch) * spec.num_replicas + spec.rank) * size
        return self._split[range(first, first + size)]

    def state(self, batch: int) -> int:
        """Return which of the S mini-batches is held at a position of the stream, counted from 0."""
        chunk, place = divmod(batch, CHUNK)
        if chunk != self._chunk:
            self._chunk, self._states = chunk, self._held(chunk)
        return self._states[place]

    def _held(self, chunk: int) -> list[int]:
        """Return the states of the positions of a chunk."""
        drawn, fresh = self._draws(chunk)
        last = torch.where(drawn, torch.arange(CHUNK), -1).cummax(0).values
        states = fresh[last.clamp(min=0)]
        if not drawn[0]:
            states[last < 0] = self._before(chunk)
        return states.tolist()

    def _before(self, chunk: int) -> int:
        """Return the state that the chunk before one leaves."""
        for earlier in range(chunk - 1, -1, -1):
            drawn, fresh = self._draws(earlier)
            if drawn.any():
                return int(fresh[drawn][-1])
        raise AssertionError("the first position of all is a draw")

    def _draws(self, chunk: int) -> tuple[Tensor, Tensor]:
        """Return at which positions of a chunk the state is redrawn, and its new value, each of shape (CHUNK,)."""
        generator = torch.Generator().manual_seed(derive_seed(self.spec.seed, "switching", self.spec.chain, chunk))
        uniforms = torch.rand(CHUNK, generator=generator, dtype=torch.float64)
        fresh = torch.randint(self.batches_per_epoch, (CHUNK,), generator=generator)
        drawn = uniforms < -torch.expm1(-self._times(chunk) * (self.batches_per_epoch / self.switching_time))
        if chunk == 0:
            drawn[0] = True
        return drawn, fresh

    def _times(self, chunk: int) -> Tensor:
        """Return the time between each position of a chunk and the one before it: that of the step with its number."""
        if not callable(self.time_step):
            return torch.full((CHUNK,), self.time_step, dtype=torch.float64)
        first = chunk * CHUNK
        times = [float(self.time_step(k)) if k else 0.0 for k in range(first, first + CHUNK)]
        for k, time in enumerate(times, first):
            if not (time >= 0 and math.isfinite(time)):
                raise ValueError(f"time_step must be finite and not negative, got {time} at the step {k}")
        return torch.tensor(times, dtype=torch.float64)


class SwitchingBatchSampler(IndexSampler[list[int]]):
    """The batches of a `SwitchingOrder` for a plain `torch.utils.data.DataLoader(data, batch_sampler=…)`.

    Under a trainer prefer the library's datamodules or a `ResumableLoader` with that order: they give each chain an
    order of its own, share batches over ranks, and continue exactly from any step. Lightning saves no batch sampler, so
    a resumed run restarts its batches, at the end of an epoch too, unless a datamodule keeps the sampler and returns
    its `state_dict()` as the datamodule's own; with `num_workers=0` the run then continues exactly, in mid-epoch too
    (workers ask for batches ahead of their use, so the position is not training's). With several data-parallel ranks
    Lightning refuses it, since it cannot put its own sampler into it, unless the trainer has
    `use_distributed_sampler=False`; then each rank's sampler needs its `num_replicas` and `rank`.

    Each iteration yields S batches and continues where the last one stopped.

    Args:
        num_data: N, the length of the data set.
        batch_size: data in a batch, at most.
        switching_time: η, see `SwitchingOrder`.
        time_step: see `SwitchingOrder`.
        seed: seed of split and switching.
        chain: global index of the chain.
        num_replicas: data-parallel ranks that share the data.
        rank: index of this rank.

    Raises:
        ValueError: for numbers out of range, see `SwitchingOrder`.
    """

    def __init__(
        self,
        num_data: int,
        batch_size: int,
        *,
        switching_time: float,
        time_step: TimeStep,
        seed: int = 0,
        chain: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        for name, count in (("num_data", num_data), ("batch_size", batch_size), ("num_replicas", num_replicas)):
            check_count(name, count)
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be between 0 and {num_replicas - 1}, got {rank}")
        spec = OrderSpec(num_data, batch_size, seed, chain, num_replicas=num_replicas, rank=rank)
        self._order = SwitchingOrder(spec, switching_time=switching_time, time_step=time_step)
        self._batches = 0

    @property
    def num_data(self) -> int:
        """N, the length of the data set."""
        return self._order.spec.num_data

    def __len__(self) -> int:
        return self._order.batches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            indices = self._order.indices(self._batches).tolist()
            self._batches += 1
            yield indices

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches returned so far, the seed and the number of mini-batches."""
        return {"batches": self._batches, "seed": self._order.spec.seed, "length": len(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the position that `state_dict` returned.

        Raises:
            ValueError: if there were other batches or another seed.
        """
        own = {"seed": self._order.spec.seed, "length": len(self)}
        for name, value in own.items():
            if state_dict[name] != value:
                raise ValueError(f"the state's {name} is {state_dict[name]}, this sampler's is {value}")
        self._batches = state_dict["batches"]
