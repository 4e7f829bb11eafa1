"""Where the repository and the data sets lie."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = str(REPOSITORY / "recipes" / "digits_csghmc.yaml")
"""The main job of README."""
DATA_ROOT = Path(os.environ.get("SGMCMC_DATA_ROOT", REPOSITORY.parent / "shared" / "data"))
"""Folder of the data sets; tests that need them are skipped where it is missing."""
