"""A training loader whose batches are functions of (seed, chain, epoch, position), so a run can continue anywhere."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder, OrderSpec, batches_per_epoch, check_order
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.namespace import fabric, rank_zero_warn
from lightning_sgmcmc.seeding import derive_seed, fit_seed, reseed, reseed_everything, unchanged_generators

move_data_to_device = fabric.utilities.move_data_to_device


class ChainBatches(list[Any]):
    """A list with a mini-batch for each chain of this process.

    A plain batch instead of such a list is shared by all chains.
    """

    def __init__(self, batches: Iterable[Any], stack: Any = None) -> None:
        super().__init__(batches)
        self._stack = stack

    @classmethod
    def of_stack(cls, stack: Any, num_chains: int) -> "ChainBatches":
        """Return the batches of tensors with a leading chain axis; they are views."""
        leaves, structure = pytree.tree_flatten(stack)
        batches = [pytree.tree_unflatten([leaf[chain] for leaf in leaves], structure) for chain in range(num_chains)]
        return cls(batches, stack)

    def stacked(self) -> Any:
        """Return one batch whose tensors have a leading chain axis.

        Raises:
            ValueError: if the batches have parts that are not tensors, or their shapes differ between chains.
        """
        if self._stack is None:
            self._stack = pytree.tree_map(_stack, *self)
        return self._stack

    def to(self, device: torch.device | str, non_blocking: bool | None = None) -> "ChainBatches":
        """Return the batches on a device; a trainer moves them by this method.

        Tensors move as one stack over the chains, so that a step has one copy for each part of a batch, and the batches
        are views of it. On its way to a CUDA device the stack is in pinned memory, and the copy does not block.

        Args:
            device: the device.
            non_blocking: whether the host does not wait for the copy; None waits on a CPU or MPS device only.
        """
        device = torch.device(device)
        leaves = pytree.tree_leaves(list(self) if self._stack is None else self._stack)
        if all(isinstance(leaf, Tensor) and leaf.device == device for leaf in leaves):
            return self
        if non_blocking is None:
            non_blocking = device.type not in ("cpu", "mps")
        stack = self._stack
        if stack is None:
            columns = list(zip(*(pytree.tree_leaves(batch) for batch in self), strict=False))
            if device.type == "cpu" or not all(map(_are_alike, columns)):
                return ChainBatches(move_data_to_device(list(self), device))
            structure, pinned = pytree.tree_structure(self[0]), device.type == "cuda"
            stack = pytree.tree_unflatten([_stack_in(column, pinned) for column in columns], structure)
        moved = pytree.tree_map(lambda tensor: tensor.to(device, non_blocking=non_blocking), stack)
        return self.of_stack(moved, len(self))


def _stack(*parts: Any) -> Tensor:
    if not all(isinstance(part, Tensor) for part in parts):
        raise ValueError(
            f"a batch with a {type(parts[0]).__name__} in it cannot be stacked over chains: let batches hold tensors "
            "only, or run the chains one after the other by chain_execution='loop'"
        )
    shapes = list(dict.fromkeys(str(tuple(part.shape)) for part in parts))
    if len(shapes) > 1:
        raise ValueError(
            f"the chains' batches have the shapes {', '.join(shapes)}, and chains that are computed at once need one: "
            "pad all batches to one length in collate_fn (padding='max_length'), or pass chain_execution='loop'"
        )
    return torch.stack(parts)


def _are_alike(parts: tuple[Any, ...]) -> bool:
    """Return whether the parts of the chains' batches are plain tensors that one tensor can hold."""
    if not all(type(part) is Tensor and part.layout == torch.strided for part in parts):
        return False
    return len({(part.shape, part.dtype, part.device) for part in parts}) == 1


def _stack_in(parts: tuple[Tensor, ...], pinned: bool) -> Tensor:
    """Return a stack, of tensors in the host's memory in pinned memory if so wanted."""
    first = parts[0]
    if not pinned or first.device.type != "cpu":
        return torch.stack(parts)
    into = torch.empty(len(parts), *first.shape, dtype=first.dtype, pin_memory=True)
    return torch.stack([part.detach() for part in parts], out=into)


# -- loader ------------------------------------------------------------------------------------------------------------


SHUFFLING = RandomSampler | SubsetRandomSampler | WeightedRandomSampler


class ResumableLoader:
    """A training loader whose batches are a function of (seed, chain, epoch, position), with the position as state.

    A checkpoint holds one number, the batches returned so far. A run that continues from the checkpoint gets exactly
    the batches that it would have had, in mid-epoch too, and with any number of workers. Data sets that return whole
    batches (`__getitems__`, as `TensorBatches`) are indexed by whole batches. Before each batch the default generators
    are seeded by (seed, chain, batch), so augmentation that draws from them is repeatable as well: torch's for whole
    batches in this process, torch's, NumPy's and Python's where items are loaded one by one.

    A pass leaves the default generators alone but for one draw of torch's, as of a `DataLoader`.
    Each iteration yields as many batches as an epoch has and continues where the last one stopped. The data set may
    grow or shrink between iterations: each one begins with the present data, in an order of all of them.

    Args:
        dataset: a data set with a length.
        batch_size: data in a batch (of each rank), > 0.
        seed: seed of the order; None takes the run's, which the trainer's module passes, or else torch's initial seed.
        drop_last: leave out the last batch of an epoch where it is short.
        num_workers: processes that load; 0 loads in this one.
        collate_fn: makes a batch of a list of items; None is torch's default. Whole batches are not collated.
        chain: global index of the chain; a run with several chains passes their indices.
        num_replicas: data-parallel ranks that share the data; None asks torch.distributed.
        rank: index of this replica; None asks torch.distributed.
        pin_memory: copy batches of workers into pinned memory.
        order: makes a chain's order of the data from its `OrderSpec`, with batches as many as `BatchOrder` has: that
            class, or a `functools.partial` of another.
        batches_per_epoch: batches of an iteration; None takes as many as hold the data that there are at first, since a
            trainer reads the number once.

    Raises:
        ValueError: if the data set has no length or is empty, batch_size or batches_per_epoch is below 1, num_workers
            is negative, or drop_last leaves no batch.

    Example::

        loader = ResumableLoader(data, batch_size=32, order=CyclicOrder, seed=1)
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        seed: int | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        chain: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        pin_memory: bool = False,
        order: MakeOrder = BatchOrder,
        batches_per_epoch: int | None = None,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                f"{type(dataset).__name__} has no length, so the order of its data cannot be fixed: use a DataLoader"
            )
        if isinstance(dataset, DataLoader | ResumableLoader):
            raise TypeError(
                f"dataset is a {type(dataset).__name__}, which counts batches, not data: pass its dataset "
                "(loader.dataset)"
            )
        check_count("batch_size", batch_size, optional=False)
        check_count("num_workers", num_workers, least=0, optional=False)
        check_count("batches_per_epoch", batches_per_epoch)
        check_count("seed", seed, least=0)
        check_count("chain", chain, least=0, optional=False)
        check_count("num_replicas", num_replicas)
        check_count("rank", rank, least=0)
        check_order(order)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_workers = num_workers
        default = as_is if hasattr(dataset, "whole_batch") else default_collate
        self.collate_fn = default if collate_fn is None else collate_fn
        self.chains: tuple[int, ...] = (chain,)
        """The chains that get a batch of their own each; one gets plain batches, several get `ChainBatches`."""
        self.num_replicas = num_replicas or (torch.distributed.get_world_size() if distributed else 1)
        self.rank = rank if rank is not None else (torch.distributed.get_rank() if distributed else 0)
        if self.rank >= self.num_replicas:
            raise ValueError(f"rank must be below num_replicas={self.num_replicas}, got {self.rank}")
        self.pin_memory = pin_memory
        self.order = order
        self._given_seed = self._seed = seed
        self._belongs_to_run = self._is_restored = False
        least = self._batches_of_data()
        self._length = batches_per_epoch or least
        self._ordered = self.num_data
        """Number of data in the present order."""
        self._orders: list[BatchOrder] = []
        self._batches = 0
        self._skipped = 0
        """Batches of the stream left out, because an order of another number of data begins with a whole pass."""
        self._fetch: Callable[[int], Any] | None = None

    def __len__(self) -> int:
        return self._length

    @property
    def num_data(self) -> int:
        """N, the number of data at present."""
        return len(self.dataset)  # type: ignore[arg-type]  # checked in the constructor

    def _batches_of_data(self) -> int:
        count = batches_per_epoch(self.num_data, self.batch_size, self.drop_last, self.num_replicas)
        if count == 0:
            short = f"batch_size={self.batch_size} with drop_last=True leaves no batch"
            what = short if self.drop_last else "there is no batch"
            raise ValueError(f"{what} of {self.num_data} data on {self.num_replicas} ranks")
        return count

    @property
    def seed(self) -> int:
        """The seed of the order."""
        return self._seed if self._seed is not None else torch.initial_seed()

    def adopt_seed(self, seed: int, fit: int = 0) -> None:
        """Begin a fit's stream, once until `close`, unless the place came from a checkpoint; the order has the fit's
        seed unless the constructor was given one, of which each later fit has another."""
        if not (self._belongs_to_run or self._is_restored):
            self._seed = seed if self._given_seed is None else fit_seed(self._given_seed, fit)
            self.start_at(0)
        self._belongs_to_run = True

    def adopt_chains(self, chains: Sequence[int]) -> None:
        """Return batches of these chains, by their global indices."""
        if tuple(chains) != self.chains:
            self.chains, self._fetch = tuple(chains), None

    @property
    def position(self) -> int:
        """Batches returned so far, over all epochs."""
        return self._batches

    def start_at(self, batch: int) -> None:
        """Continue with this batch of the stream, counted from 0 over all epochs."""
        self._batches = batch
        self._begin_pass()

    def _begin_pass(self) -> None:
        """Let the next batch be the first of a pass over the present data."""
        self._skipped = -self._batches % self._batches_of_data()
        self._ordered, self._fetch = self.num_data, None

    def __iter__(self) -> Iterator[Any]:
        torch.empty((), dtype=torch.int64).random_()  # as a DataLoader's pass begins, so that later runs differ
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        if self.num_data != self._ordered:
            self._begin_pass()
        for _ in range(self._length):
            if self._fetch is None:
                self._fetch = self._begin()
            with nullcontext() if self._belongs_to_run else unchanged_generators(()):
                batch = self._fetch(self._batches + self._skipped)
            self._batches += 1
            yield batch

    @property
    def plain_tensors(self) -> tuple[Tensor, ...] | None:
        """The tensors of whose rows the batches consist; None where more is done to them, or by other processes."""
        if self.num_workers:
            return None
        if type(self.dataset) is TensorDataset and self.collate_fn is default_collate:
            return self.dataset.tensors
        return getattr(self.dataset, "plain_tensors", None) if self.collate_fn is as_is else None

    @property
    def kind_of_batch(self) -> type:
        """The class of a batch of plain tensors: torch's collation makes lists."""
        return list if self.collate_fn is default_collate else tuple

    def take(self, count: int) -> list[tuple[Tensor, list[int]]]:
        """Return the indices of the pass's next batches and their sizes, for each chain, in the place of the batches
        themselves."""
        if self.num_data != self._ordered:
            self._begin_pass()
        if self._fetch is None:
            self._fetch = self._begin()
        first = self._batches + self._skipped
        self._batches += count
        return [order.several(first, count) for order in self._orders]

    def order_of(self, chain: int) -> BatchOrder:
        """Return the order of a chain's batches of the present data, by its global index."""
        return self.order(self.spec_of(chain))

    def spec_of(self, chain: int) -> OrderSpec:
        """Return what the order of a chain's batches is made from."""
        count, seed = self._ordered, self.seed
        return OrderSpec(count, self.batch_size, seed, chain, self.drop_last, self.num_replicas, self.rank)

    def _begin(self) -> Callable[[int], Any]:
        """Return a function that loads the batches from the present position on."""
        self._orders = orders = [self.order_of(chain) for chain in self.chains]
        streams = [f"{chain}/{self.rank}" for chain in self.chains]
        items = _SeededItems(self.dataset, self.collate_fn, self.seed, streams)
        if self.num_workers == 0:
            return lambda batch: items.load_all(batch, [order.indices(batch) for order in orders])
        stream: Any = _stream(orders, self._batches + self._skipped)
        loader = DataLoader(
            items, batch_sampler=stream, num_workers=self.num_workers, collate_fn=as_is, pin_memory=self.pin_memory
        )
        batches = iter(loader)
        if len(orders) == 1:
            return lambda batch: next(batches)
        return lambda batch: ChainBatches(next(batches) for _ in orders)

    def close(self) -> None:
        """Stop the workers; the next pass starts new ones, and belongs to no run."""
        self._fetch = None
        self._belongs_to_run = self._is_restored = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fetch": None}  # a copy in another process has workers of its own

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches returned so far, the seed, the length of an epoch and the place in the order."""
        place = {"num_data": self._ordered, "skipped": self._skipped}
        return {"batches": self._batches, "seed": self.seed, "length": self._length} | place

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the position that `state_dict` returned.

        Raises:
            ValueError: if the epochs have another number of batches now.
        """
        if state_dict["length"] != self._length:
            raise ValueError(
                f"the checkpoint's epochs have {state_dict['length']} batches, this loader's have {self._length}: "
                "continue with the same data, batch_size, drop_last and number of ranks"
            )
        self._batches, self._seed, self._fetch = state_dict["batches"], state_dict["seed"], None
        self._is_restored = True
        self._ordered = state_dict["num_data"]
        self._skipped = state_dict["skipped"]


def _stream(orders: Sequence[BatchOrder], first: int) -> Iterator[list[int]]:
    """Yield for each batch from the first and each chain the batch's number, the chain's place and the indices."""
    for batch in itertools.count(first):
        for place, order in enumerate(orders):
            yield [batch, place, *order.indices(batch).tolist()]


class _SeededItems(Dataset[Any]):
    """Loads whole batches of a data set, seeding the default generators before each."""

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int, streams: Sequence[str]
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._streams = streams
        self._device = getattr(dataset, "device", None)

    def __getitems__(self, numbered: Sequence[int]) -> Any:
        batch, place, *indices = numbered
        return self.load(batch, place, indices)

    def load_all(self, batch: int, indices: Sequence[Tensor]) -> Any:
        """Return a batch of the stream: of the one chain, or of each."""
        if len(indices) == 1:
            return self.load(batch, 0, indices[0])
        if hasattr(self._dataset, "whole_batch") and self._device is not None and self._device.type != "cpu":
            # On an accelerator calls are slow, so one call makes the batches of all chains.
            reseed(derive_seed(self._seed, "augmentation", *self._streams, batch), self._device)
            together = self._dataset.whole_batch(torch.cat(list(indices)))
            chains = len(indices)
            return ChainBatches.of_stack(pytree.tree_map(lambda t: t.unflatten(0, (chains, -1)), together), chains)
        return ChainBatches(self.load(batch, place, own) for place, own in enumerate(indices))

    def load(self, batch: int, place: int, indices: Sequence[int] | Tensor) -> Any:
        """Return a batch of one chain's stream."""
        seed = derive_seed(self._seed, "augmentation", self._streams[place], batch)
        if hasattr(self._dataset, "whole_batch"):
            reseed(seed, self._device)
            return self._dataset.whole_batch(indices)
        reseed_everything(seed)
        indices = indices.tolist() if isinstance(indices, Tensor) else indices
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[index] for index in indices])


def is_shuffled(loader: Any) -> bool:
    """Return whether a loader is known to have another order in every pass."""
    found = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler"))]
    found += [getattr(sampler, "sampler", None) for sampler in found]
    return any(isinstance(one, ResumableLoader | SHUFFLING) for one in found)


def warn_of_order(loader: Any, what: str) -> None:
    """Warn that results of single data come in the order of one pass, if the loader has another one in every pass."""
    if is_shuffled(loader):
        rank_zero_warn(
            f"The loader shuffles, so the {what} are in the order of this one pass: pass a loader in a fixed order "
            "(shuffle=False) to match them with the data, or with those of another model."
        )


def flat_loaders(loaders: Any) -> list[Any]:
    """Return the loaders in a trainer's loader, which may be None or a collection."""
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    return [one for part in loaders for one in flat_loaders(part)] if isinstance(loaders, list | tuple) else [loaders]


def as_is(batch: Any) -> Any:
    """Collate nothing: the data set returns whole batches."""
    return batch


# -- padding -----------------------------------------------------------------------------------------------------------


IGNORED = -100
"""Label of a token that does not count, as in torch's cross entropy and in transformers."""
VALUES = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "labels": IGNORED}
"""What padding has in the entries of a tokenizer's batch, beside "input_ids"."""
SHORTEST = 32
"""The smallest of the few lengths."""


def most_tokens(config: Any) -> int | None:
    """Return how many tokens a network of Hugging Face takes, None if its configuration lacks that or the padding."""
    if getattr(config, "pad_token_id", None) is None:
        return None
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    return next((most for most in found if isinstance(most, int) and most > 0), None)


def common_length(length: int, most: int) -> int:
    """Return the power of two that a length is padded to: at least 32, and at most what the network takes.

    >>> [common_length(length, 512) for length in (5, 33, 300, 512, 600)]
    [32, 64, 512, 512, 600]
    """
    power = 1 << (length - 1).bit_length() if length > 1 else 1
    return max(length, min(max(power, SHORTEST), most))


def padded_alike(batches: Sequence[Any], pad: int, most: int | None = None) -> list[Any]:
    """Return the chains' batches of tokens, if they have an attention mask, with the length of the longest.

    For a compiled network that takes `most` tokens, they get one of a few lengths (`common_length`). Batches with other
    entries of that length than a tokenizer's stay as they are.
    """
    inputs = [batch[0] if isinstance(batch, list | tuple) and batch else batch for batch in batches]
    if not all(isinstance(own, Mapping) and isinstance(own.get("attention_mask"), Tensor) for own in inputs):
        return list(batches)
    lengths = [own["attention_mask"].shape[-1] for own in inputs]
    longest = max(lengths) if most is None else common_length(max(lengths), most)
    if set(lengths) == {longest} or not all(map(_may_be_longer, batches, inputs, lengths)):
        return list(batches)
    values = VALUES | {"input_ids": pad}
    found: list[Any] = []
    for batch, own, length in zip(batches, inputs, lengths, strict=True):
        longer = longest - length
        padded = {
            name: F.pad(tensor, (0, longer), value=values[name])
            if longer and name in values and isinstance(tensor, Tensor) and tensor.shape[1:] == (length,)
            else tensor
            for name, tensor in own.items()
        }
        found.append(padded if own is batch else (padded, *batch[1:]))
    return found


def with_few_lengths(batch: Any, net: Any) -> Any:
    """Return a batch of tokens to evaluate, padded as for a compiled network unless each token has an output."""
    config: Any = getattr(net, "config", None)
    most = most_tokens(config)
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if most is None or (isinstance(labels, Tensor) and labels.dim() > 1):
        return batch
    return padded_alike([batch], config.pad_token_id, most)[0]


def _may_be_longer(batch: Any, own: Mapping[str, Any], length: int) -> bool:
    """Return whether what is known to have a number for each token is all that has so many columns."""
    targets = [] if own is batch else list(batch[1:])
    known = {*VALUES, "input_ids"}
    others = [*targets, *(tensor for name, tensor in own.items() if name not in known)]
    return not any(isinstance(tensor, Tensor) and tensor.shape[1:2] == (length,) for tensor in others)
