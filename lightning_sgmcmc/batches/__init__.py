"""Which data a step sees: orders of the data, loaders that resume exactly, batches for each chain."""

from lightning_sgmcmc.batches.loader import ChainBatches, ResumableLoader
from lightning_sgmcmc.batches.orders import (
    BatchOrder,
    ClusteredOrder,
    CyclicOrder,
    OrderSpec,
    SymmetricOrder,
    cluster_data,
)
from lightning_sgmcmc.batches.switching import SwitchingBatchSampler, SwitchingOrder

__all__ = [
    "BatchOrder",
    "ChainBatches",
    "ClusteredOrder",
    "CyclicOrder",
    "OrderSpec",
    "ResumableLoader",
    "SwitchingBatchSampler",
    "SwitchingOrder",
    "SymmetricOrder",
    "cluster_data",
]
