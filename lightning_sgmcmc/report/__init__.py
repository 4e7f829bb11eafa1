"""`sgmcmc report RUN`: one self-contained HTML page of a finished run."""

from lightning_sgmcmc.report.page import write_report
from lightning_sgmcmc.report.run_record import RunError

__all__ = ["RunError", "write_report"]
