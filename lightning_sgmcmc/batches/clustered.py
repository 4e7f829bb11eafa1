"""Stratified mini-batches: every batch holds each cluster of the data in its right proportion (CP-SGHMC)."""

from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.batches.order import BatchOrder, OrderSpec
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.seeding import derive_seed


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
        names, self._clusters = torch.unique(clusters.cpu(), return_inverse=True)
        self._num_clusters = len(names)

    def _permutation(self, epoch: int) -> Tensor:
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
        return order[(spec.rank + shift) % spec.num_replicas :: spec.num_replicas]

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

    K-means makes Σ_i ‖x_i - m_c(i)‖², the variance of the inputs within the clusters, small. As far as a datum's
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
