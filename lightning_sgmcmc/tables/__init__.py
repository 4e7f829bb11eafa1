"""What users hand over as numbers: arrays and frames, and what their columns are.

Read: `arrays.py` (any array as a tensor), `inputs.py` (their names, categories and scaling), `columns.py` (these and
the targets', which a store keeps).
"""

from lightning_sgmcmc.tables.arrays import as_tensor, is_frame
from lightning_sgmcmc.tables.columns import Columns, TargetScaling
from lightning_sgmcmc.tables.inputs import InputColumns

__all__ = ["Columns", "InputColumns", "TargetScaling", "as_tensor", "is_frame"]
