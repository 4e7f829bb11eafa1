"""The cores of a machine."""

import os


def usable_cores() -> int:
    """Return the number of cores that this process may use, ≥ 1."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
