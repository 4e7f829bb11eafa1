"""Training data that arrive during the run."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.orders import BatchOrder, MakeOrder, check_order
from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.datamodules.base import TensorBatches, replica_of


class StreamDataModule(pl.LightningDataModule):
    """Training data that arrive during the run: `append` adds them, and they count from the next epoch on.

        U(θ) = -Σ_{i=1..N} log p(y_i|x_i,θ) - log p(θ),    N = min(data appended so far, capacity)

    When an epoch begins, the module reads N again, and energies, prior and noise follow it; momenta adapt within their
    friction time. With a capacity the newest data replace the oldest. The posterior then conditions on the data that
    are held, and N is their number, not the number of all data seen: data that are gone have no weight.

    A trainer reads the number of batches of an epoch once, so it is fixed; an epoch is a round of the stream, for
    instance the steps between two observations. Append from a callback when an epoch begins or after its last batch,
    the same data on all ranks. The data held are part of a checkpoint. In a run that may be resumed, append in
    `on_train_batch_end`, since Lightning omits `on_train_epoch_start` after a checkpoint at an epoch's last batch.
    Other data renew the snapshot of `ControlVariates` and its kind when an epoch begins, and the energies of
    `MetropolisTest`, which refuses data that change within a trajectory.

    Args:
        batch_size: data per batch, at most as many as there are when the fit begins.
        batches_per_epoch: steps of an epoch.
        capacity: the largest N; None keeps all data.
        order: makes the order of the data, such as `CyclicOrder` (see `ResumableLoader`).

    Raises:
        ValueError: if a number is below 1, if the tensors of `append` do not fit together, or if a fit begins with
            fewer data than a batch.

    Example::

        from lightning_sgmcmc.datamodules import StreamDataModule

        data = StreamDataModule(batch_size=512, batches_per_epoch=16, capacity=4096)
        data.append(torch.randn(1024, 3), torch.randn(1024, 1))  # a callback of the trainer appends more
    """

    restores_data = True
    """Whether the data are part of a checkpoint, so that a resumed run has them."""

    def __init__(
        self,
        batch_size: int,
        batches_per_epoch: int,
        capacity: int | None = None,
        order: MakeOrder = BatchOrder,
    ) -> None:
        super().__init__()
        check_count("batch_size", batch_size)
        check_count("batches_per_epoch", batches_per_epoch)
        check_count("capacity", capacity, least=batch_size)
        check_order(order)
        self.batch_size = batch_size
        self.order = order
        self.batches_per_epoch = batches_per_epoch
        self.capacity = capacity
        self._held = TensorBatches(torch.empty(0))

    def append(self, *tensors: Tensor) -> None:
        """Add data: the parts of a batch, x and y for instance, as tensors of one length. A call copies the data held.

        Raises:
            ValueError: if lengths differ, or shapes or dtypes are not those of the data held.
        """
        added = TensorBatches(*(tensor.detach() for tensor in tensors))
        if self.num_data > 0:
            kinds = [[(tuple(t.shape[1:]), t.dtype) for t in data.tensors] for data in (self._held, added)]
            if kinds[0] != kinds[1]:
                raise ValueError(f"the data held have (shape, dtype) {kinds[0]}, got {kinds[1]}: append data alike")
            added = TensorBatches(*(torch.cat(pair) for pair in zip(self._held.tensors, added.tensors, strict=True)))
        self._held.tensors = tuple(tensor[-self.capacity :] if self.capacity else tensor for tensor in added.tensors)

    @property
    def num_data(self) -> int:
        """N, the number of data held."""
        return len(self._held)

    def setup(self, stage: str) -> None:
        """Check that there are data.

        Raises:
            ValueError: if there are fewer than a batch.
        """
        if self.num_data < self.batch_size:
            raise ValueError(
                f"the stream holds {self.num_data} data, fewer than batch_size={self.batch_size}: append more before "
                "the fit, or choose smaller batches"
            )

    def training_data(self) -> TensorBatches:
        """Return the data held, the oldest first."""
        return self._held

    def train_dataloader(self) -> Any:
        return ResumableLoader(
            self._held,
            self.batch_size,
            drop_last=True,
            order=self.order,
            batches_per_epoch=self.batches_per_epoch,
            **replica_of(self),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": list(self._held.tensors)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._held.tensors = tuple(state_dict["tensors"])
