"""The health of a run: steps observed, temperatures and noise estimated, findings ranked, one verdict.

`callback.py` observes a fit, `assessment.py` and `verdict.py` find and rank, and `report.py` is the result. The public
names are those of `lightning_sgmcmc.diagnostics`, which has to be imported first.
"""

import lightning_sgmcmc.diagnostics  # noqa: F401
from lightning_sgmcmc.health.report import HealthReport

__all__ = ["HealthReport"]
