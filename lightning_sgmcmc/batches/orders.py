"""The orders of the data: batch indices as a function of seed, chain, epoch and position."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.seeding import derive_seed

LARGEST_DRAWN = 10**6
"""Data whose permutation is drawn as a whole; of more, it is computed at the places that are wanted."""
WINDOW = 2**14
"""Places that an order computes at once then."""
ROUNDS = 6
"""Of the network; four are pseudorandom already (Luby & Rackoff 1988)."""


class Permutation:
    """A random permutation of N numbers as a function of a seed; a part of it costs time and memory of its own length.

    Up to `LARGEST_DRAWN` it is torch's `randperm`. Above, a place x = b·l + r, with a·b ≥ N and a, b ≈ √N, goes through
    the rounds of a keyed Feistel network

        l ← (l + F_k(r)) mod a,   r ← (r + F_k'(l)) mod b,

    each of them a bijection, and through all of them again until it is below N (cycle walking).

    Source: Black & Rogaway 2002 (ciphers with arbitrary finite domains); F is SplitMix64's (Steele, Lea & Flood 2014).
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._drawn: Tensor | None = None
        if count <= LARGEST_DRAWN:
            self._drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
            return
        rows = math.isqrt(count - 1) + 1
        self._sides = np.uint64(rows), np.uint64(-(-count // rows))
        self._keys = [np.uint64(derive_seed(seed, number)) for number in range(ROUNDS)]

    def __getitem__(self, places: Sequence[int]) -> Tensor:
        """Return the numbers at places ≥ 0, int64; from N on they come again."""
        if isinstance(places, range):
            if self._drawn is not None and places.stop <= self._count:
                is_all = len(places) == self._count
                return self._drawn if is_all else self._drawn[places.start : places.stop : places.step]
            chosen = torch.arange(places.start, places.stop, places.step)
        else:
            chosen = torch.tensor(places)
        chosen %= self._count
        if self._drawn is not None:
            return self._drawn[chosen]
        found = self._mapped(chosen.numpy().astype(np.uint64))
        while len(outside := np.flatnonzero(found >= self._count)):
            found[outside] = self._mapped(found[outside])
        return torch.from_numpy(found.astype(np.int64))

    def _mapped(self, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        rows, columns = self._sides
        left, right = np.divmod(places, columns)
        for own, other in zip(self._keys[::2], self._keys[1::2], strict=True):
            left = _shifted(left, right, own, rows)
            right = _shifted(right, left, other, columns)
        return left * columns + right


def _shifted(
    values: npt.NDArray[np.uint64], by: npt.NDArray[np.uint64], key: np.uint64, modulus: np.uint64
) -> npt.NDArray[np.uint64]:
    """Return (values + F(by)) mod a modulus, where F has 63 bits."""
    mixed = by * np.uint64(0x9E3779B97F4A7C15)
    mixed += key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    mixed >>= np.uint64(1)
    mixed += values
    mixed -= mixed // modulus * modulus  # NumPy's % takes three times as long
    return mixed


class OrderSpec(NamedTuple):
    """What an order of the data is made from, whatever its kind.

    Attributes:
        num_data: N.
        batch_size: data in a batch of one replica.
        seed: the run's seed.
        chain: global index of the chain.
        drop_last: leave out the last batch of an epoch where it is short.
        num_replicas: number of replicas that share the data.
        rank: index of this replica.
    """

    num_data: int
    batch_size: int
    seed: int
    chain: int = 0
    drop_last: bool = False
    num_replicas: int = 1
    rank: int = 0


class BatchOrder:
    """The indices of every mini-batch of an endless stream of epochs.

    Each epoch is a new permutation of the N data, a function of (seed, chain, epoch). Above 10⁶ data it is computed
    where it is wanted, so the time and the memory of a batch do not grow with N. With several replicas (data-parallel
    ranks of one chain) each takes every `num_replicas`-th datum of it; where they do not divide N, some data of the
    epoch's beginning are taken again, so that all replicas have as many.

    Args:
        spec: the data, the batches, the seed, the chain and its replicas.

    >>> order = BatchOrder(OrderSpec(num_data=5, batch_size=2, seed=0))
    >>> [order.indices(batch).tolist() for batch in range(order.batches_per_epoch)]
    [[1, 2], [0, 4], [3]]
    """

    repeats: ClassVar[bool] = False
    """Whether an epoch's batches come again in others, so that the batches of each step must do so too."""

    def __init__(self, spec: OrderSpec) -> None:
        self.spec = spec
        self.batches_per_epoch = batches_per_epoch(spec.num_data, spec.batch_size, spec.drop_last, spec.num_replicas)
        self._share = math.ceil(spec.num_data / spec.num_replicas)
        """Places of this replica in an epoch."""
        self._window = self._share if spec.num_data <= LARGEST_DRAWN else WINDOW
        self._epoch, self._first = -1, 0
        self._order = torch.empty(0, dtype=torch.int64)
        """The data at the places from `_first` on of an epoch."""

    def indices(self, batch: int) -> Tensor:
        """Return the indices of a batch of the stream, counted from 0 over all epochs."""
        epoch, position = divmod(batch, self.batches_per_epoch)
        size = self.spec.batch_size
        return self._taken(epoch, position * size, min((position + 1) * size, self._share))

    def several(self, first: int, count: int) -> tuple[Tensor, list[int]]:
        """Return the indices of successive batches of the stream, one after the other, and the batches' sizes."""
        epoch, position = divmod(first, self.batches_per_epoch)
        size, stop = self.spec.batch_size, position + count
        if type(self).indices is not BatchOrder.indices or stop > self.batches_per_epoch:
            parts = [self.indices(batch) for batch in range(first, first + count)]
            return torch.cat(parts), [part.shape[0] for part in parts]
        last = min(stop * size, self._share)
        return self._taken(epoch, position * size, last), [size] * (count - 1) + [last - (stop - 1) * size]

    def _taken(self, epoch: int, first: int, stop: int) -> Tensor:
        """Return the data at the places from `first` to `stop` of this replica in an epoch."""
        if epoch != self._epoch or first < self._first or stop > self._first + self._order.shape[0]:
            begin = first // self._window * self._window
            end = min(max(begin + self._window, stop), self._share)
            self._order = self._permuted(epoch, begin, end)
            self._epoch, self._first = epoch, begin
        is_all = stop - first == self._order.shape[0]
        return self._order if is_all else self._order[first - self._first : stop - self._first]

    def _permuted(self, epoch: int, first: int, stop: int) -> Tensor:
        """Compute what `_taken` returns."""
        spec = self.spec
        permutation = Permutation(spec.num_data, derive_seed(spec.seed, "data order", spec.chain, epoch))
        ranks, rank = spec.num_replicas, spec.rank
        return permutation[range(first * ranks + rank, (stop - 1) * ranks + rank + 1, ranks)]


MakeOrder = Callable[[OrderSpec], BatchOrder]
"""Makes a chain's order of the data: a class such as `BatchOrder`, or `functools.partial` of one."""


def check_order(order: Any) -> None:
    """Raise unless an order of the data can be made."""
    if not callable(order):
        raise TypeError(f"order must be a function that makes an order of the data, got {order!r}: pass BatchOrder")


def batches_per_epoch(num_data: int, batch_size: int, drop_last: bool = False, num_replicas: int = 1) -> int:
    """Return the mini-batches that each replica makes of an epoch."""
    share = math.ceil(num_data / num_replicas)
    return share // batch_size if drop_last else math.ceil(share / batch_size)


def check_all_data_are_taken(spec: OrderSpec, batches: int) -> None:
    """Raise if an order that draws its batches once leaves out data."""
    left_out = spec.num_data - batches * spec.batch_size * spec.num_replicas
    if spec.drop_last and left_out > 0:
        raise ValueError(
            f"drop_last=True would leave out the same {left_out} of {spec.num_data} data for the whole run, since the "
            "data are split only once: pass drop_last=False"
        )


# -- repeated ----------------------------------------------------------------------------------------------------------


class RepeatedOrder(BatchOrder):
    """Base of the orders with sweeps over S mini-batches that come again; replaces `BatchOrder`.

    An epoch is a sweep over all data, in S = `batches_per_epoch` batches of sizes that differ by one at most (with
    `drop_last`, of `batch_size` each), since a short batch that stays would give its data a larger weight. Accumulated
    batches of a step must be the same in every sweep: A must divide S and the batches of the trainer's epoch.
    """

    repeats: ClassVar[bool] = True

    def indices(self, batch: int) -> Tensor:
        draw, place = self._place(*divmod(batch, self.batches_per_epoch))
        used = self.batches_per_epoch * self.spec.batch_size if self.spec.drop_last else self._share
        size, longer = divmod(used, self.batches_per_epoch)
        first = place * size + min(place, longer)
        return self._taken(draw, first, first + size + (place < longer))

    def _place(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the number of the permutation, and of the batch in it, at a position of an epoch."""
        raise NotImplementedError


class CyclicOrder(RepeatedOrder):
    """The indices of mini-batches in a fixed cyclic order: one permutation of the data for the whole run.

    The chain's permutation is that of `BatchOrder`'s first epoch, a function of (seed, chain), and every epoch goes
    through the same batches in the same order. The errors of their gradients have no randomness then: they add nothing
    to the variance at a position of the epoch, and displace the mean there by an offset of order lr that averages out
    over an epoch to the next order. Use it as `ResumableLoader(data, batch_size, order=CyclicOrder)`,
    `DatasetDataModule(…, order=CyclicOrder)`, or assign it to a datamodule's `order`.

    Average over draws from all positions of an epoch: draws at the end of every epoch have that position's offset.

    Args:
        spec: see `RepeatedOrder`; `drop_last` must leave out nothing, since that would be left out for the whole run.

    Raises:
        ValueError: if drop_last leaves out data.

    >>> order = CyclicOrder(OrderSpec(num_data=5, batch_size=2, seed=0))
    >>> [order.indices(batch).tolist() for batch in range(6)]
    [[1, 2], [0, 4], [3], [1, 2], [0, 4], [3]]
    """

    def __init__(self, spec: OrderSpec) -> None:
        super().__init__(spec)
        check_all_data_are_taken(spec, self.batches_per_epoch)

    def _place(self, epoch: int, position: int) -> tuple[int, int]:
        return 0, position


class SymmetricOrder(RepeatedOrder):
    """The indices of mini-batches in symmetric sweeps: forwards, then the same batches backwards (SMS).

    The epochs 2k and 2k+1 are a pair: the first goes through the S batches of a new permutation of the data, the second
    through the same batches from the last to the first. So a pair is a palindrome of 2·S batches whatever S, the batch
    at its turn is taken twice in succession, and every datum comes once an epoch. A step that is itself symmetric, as
    UBU, then composes to a symmetric method over a pair.

    Use it as `ResumableLoader(data, batch_size, order=SymmetricOrder)`, `DatasetDataModule(…, order=SymmetricOrder)`,
    or assign it to a datamodule's `order`. A run should end with a whole pair, an even number of epochs.

    Args:
        spec: see `RepeatedOrder`.

    Source: Paulin, Whalley, Chada & Leimkuhler 2025 (Sampling from Bayesian neural network posteriors with symmetric
    minibatch splitting Langevin dynamics), SMS-UBU.

    >>> order = SymmetricOrder(OrderSpec(num_data=5, batch_size=2, seed=0))
    >>> [order.indices(batch).tolist() for batch in range(6)]
    [[1, 2], [0, 4], [3], [3], [0, 4], [1, 2]]
    """

    def _place(self, epoch: int, position: int) -> tuple[int, int]:
        pair, is_back = divmod(epoch, 2)
        return pair, self.batches_per_epoch - 1 - position if is_back else position


# -- clustered ---------------------------------------------------------------------------------------------------------


class ClusteredOrder(BatchOrder):
    """The indices of mini-batches that are stratified by clusters; replaces `BatchOrder`.

    A batch of n data holds n·N_c/N of the N_c data of cluster c, rounded down or up at random. Every datum has the
    same chance n/N to be in it, so the plain mean over the batch is unbiased (the clusters' weights are all one), and
    its variance is what is left within the clusters:

        Var = Σ_c (N_c/N)²·(1 - n_c/N_c)·S_c²/n_c

    where S_c² (divisor N_c - 1) is the variance within cluster c and n_c = n·N_c/N is whole; roundings add some.

    Each epoch is laid out by (seed, chain, epoch): the data of each cluster are permuted, the clusters laid one
    after the other in a random order, the data of the short last batch taken out of that row at even distances from a
    random start, and the others dealt to the full batches in turn. So batches are as long as `BatchOrder`'s, each datum
    comes once an epoch, and `drop_last` leaves out a stratified part of the data. More clusters than data in a batch
    are no error: then each batch lacks some cluster, another one each time.

    Replicas share out batches of `num_replicas·batch_size` data made in this way, and each one's share is stratified
    too; where they do not divide N, up to `num_replicas` - 1 data, any with the same chance, are taken twice (and
    n_c may be off by one more).

    Args:
        spec: the data, the batches, the seed, the chain and its replicas.
        clusters: number of each datum's cluster, whole numbers of shape (N,); as `cluster_data` gives them.

    A loader makes its order itself: pass it `order=functools.partial(ClusteredOrder, clusters=…)`.

    Raises:
        ValueError: if `clusters` is not a whole number for each datum.

    Source: Fu & Zhang 2017 (CPSG-MCMC), whose batches hold fixed numbers of each cluster with weights; here the numbers
    are proportional.

    Example::

        clusters = cluster_data(data.tensors[0], 3, seed=0)
        loader = ResumableLoader(data, batch_size=8, order=partial(ClusteredOrder, clusters=clusters))
    """

    def __init__(self, spec: OrderSpec, *, clusters: Tensor) -> None:
        if clusters.shape != (spec.num_data,):
            raise ValueError(
                f"clusters must have one number for each of the {spec.num_data} training data, got the shape "
                f"{tuple(clusters.shape)}"
            )
        if clusters.is_floating_point() or clusters.is_complex():
            raise ValueError(f"clusters must be whole numbers, got {clusters.dtype}")
        super().__init__(spec)
        self._window = self._share
        names, self._clusters = torch.unique(clusters.cpu(), return_inverse=True)
        self._num_clusters = len(names)

    def _permuted(self, epoch: int, first: int, stop: int) -> Tensor:
        spec = self.spec
        generator = torch.Generator().manual_seed(derive_seed(spec.seed, "data order", spec.chain, epoch))
        row = self._row(generator)
        size = spec.batch_size * spec.num_replicas
        full, rest = divmod(len(row), size)
        last = _evenly_spaced(len(row), rest, generator)
        dealt = torch.ones(len(row), dtype=torch.bool)
        dealt[last] = False
        batches = row[dealt].view(size, full).t()[torch.randperm(full, generator=generator)]
        order = torch.cat([batches.flatten(), row[last]])
        # A cluster's odd datum must not always fall to the same replica.
        shift = int(torch.randint(spec.num_replicas, (), generator=generator))
        return order[(spec.rank + shift) % spec.num_replicas :: spec.num_replicas][first:stop]

    def _row(self, generator: torch.Generator) -> Tensor:
        """Return the data's indices, cluster by cluster, with some of them twice if the replicas need it."""
        num_data = self.spec.num_data
        permuted = torch.randperm(num_data, generator=generator)
        places = torch.randperm(self._num_clusters, generator=generator)
        row = permuted[places[self._clusters[permuted]].argsort(stable=True)]
        missing = -num_data % self.spec.num_replicas
        if not missing:
            return row
        copies = torch.full_like(row, 1 + missing // num_data)
        copies[_evenly_spaced(num_data, missing % num_data, generator)] += 1
        return row.repeat_interleave(copies)


def _evenly_spaced(count: int, number: int, generator: torch.Generator) -> Tensor:
    """Return `number` of `count` places at even distances from a random start: each place with the same chance."""
    if number == 0:
        return torch.empty(0, dtype=torch.int64)
    start = int(torch.randint(count, (), generator=generator))
    return (torch.arange(number) * count + start) // number


def cluster_data(inputs: Tensor, num_clusters: int, seed: int) -> Tensor:
    """Return each datum's cluster by k-means: batches stratified by it have less noise.

    K-means makes Σ_i ‖x_i - m_c(i)‖², the variance of the inputs within the clusters, small. As far as an example's
    gradient is a smooth function of its input, so is the variance of gradients within them, which is all that a
    stratified batch keeps. The clusters are fixed for the whole run.

    Args:
        inputs: shape (N, …), flattened here; columns count as they are scaled.
        num_clusters: K, at most N; clusters that end empty have no number in the result.
        seed: of the start of k-means.

    Returns:
        numbers in [0, K), shape (N,), int64, on the CPU.

    Raises:
        ValueError: if K is below 1 or above N.

    Source: Fu & Zhang 2017 (CPSG-MCMC); mini-batch k-means of Sculley 2010, as scikit-learn has it.
    """
    check_count("num_clusters", num_clusters)
    if num_clusters > len(inputs):
        raise ValueError(f"num_clusters must be at most the number of data {len(inputs)}, got {num_clusters}")
    from sklearn.cluster import MiniBatchKMeans

    rows = inputs.detach().flatten(1).float().cpu().numpy()
    random_state = derive_seed(seed, "clusters") % 2**32  # scikit-learn takes 32 bits
    means: Any = MiniBatchKMeans(num_clusters, random_state=random_state, batch_size=4096, n_init=3)
    return torch.from_numpy(means.fit_predict(rows)).long()
