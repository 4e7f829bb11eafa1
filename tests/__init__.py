"""Tests, run as `pytest`. All their processes keep bytecode, and so begin three times faster."""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
