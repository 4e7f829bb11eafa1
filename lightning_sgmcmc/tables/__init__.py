"""What users hand over as numbers: arrays and frames, and what their columns are.

Read: `arrays.py` (any array as a tensor), `columns.py` (names, categories and scaling, which a store keeps).
"""

from lightning_sgmcmc.tables.arrays import as_tensor, is_frame
from lightning_sgmcmc.tables.columns import Columns, InputColumns, TargetScaling

__all__ = ["Columns", "InputColumns", "TargetScaling", "as_tensor", "is_frame"]
