"""Orders in which the same batches come again: fixed cyclic, and symmetric sweeps."""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from lightning_sgmcmc.batches.order import BatchOrder, OrderSpec, check_all_data_are_taken


class RepeatedOrder(BatchOrder):
    """Base of the orders with sweeps over S mini-batches that come again; replaces `BatchOrder`.

    A sweep has all data, in S = `batches_per_epoch` batches of sizes that differ by one at most (with `drop_last`, of
    `batch_size` each), since a short batch that stays would give its data a larger weight for the whole run. The sizes
    depend on the position only, so the batches of several chains can be stacked. An epoch is a sweep. Chains have
    permutations of their own, and replicas share a permutation as in `BatchOrder`: where they do not divide N, up to
    `num_replicas` - 1 data are in two batches.

    Accumulated batches of a step must be the same in every sweep, so a run with A of them, or with EWSG's candidates,
    is refused unless A divides S and the batches of the trainer's epoch.

    Args:
        spec: the data, the batches, the seed, the chain and its replicas.
    """

    repeats: ClassVar[bool] = True

    def __init__(self, spec: OrderSpec) -> None:
        super().__init__(spec)
        self._drawn = -1
        self._batches: Sequence[Tensor] = ()

    def indices(self, batch: int) -> Tensor:
        draw, place = self._place(*divmod(batch, self.batches_per_epoch))
        if draw != self._drawn:
            self._drawn, self._batches = draw, self._split(draw)
        return self._batches[place]

    def _place(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the number of the permutation, and of the batch in it, at a position of an epoch."""
        raise NotImplementedError

    def _split(self, draw: int) -> Sequence[Tensor]:
        """Return the batches of a permutation."""
        order = self._permutation(draw)
        if self.spec.drop_last:
            order = order[: self.batches_per_epoch * self.spec.batch_size]
        return order.tensor_split(self.batches_per_epoch)


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
