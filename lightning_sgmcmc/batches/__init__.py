"""Which data a step sees: orders of the data, loaders that resume exactly, batches for each chain."""

from lightning_sgmcmc.batches.clustered import ClusteredOrder, cluster_data
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.batches.order import BatchOrder, OrderSpec
from lightning_sgmcmc.batches.per_chain import ChainBatches
from lightning_sgmcmc.batches.repeated import CyclicOrder, SymmetricOrder
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
