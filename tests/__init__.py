"""Tests, run as `pytest`. All their processes keep bytecode, and so begin three times faster.

Compilation starts no helper process, which would import torch again.
"""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
sys.dont_write_bytecode = False

if os.environ.get("SGMCMC_LIGHTNING") == "lightning":  # tests that import pytorch_lightning get the other package
    from lightning_sgmcmc.namespace import accept_both_names

    accept_both_names()
