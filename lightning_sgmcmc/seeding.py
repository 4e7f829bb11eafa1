"""Independent random streams, each a function of the run's seed and of names."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(seed: int, *names: int | str) -> int:
    """Return a seed in [0, 2^63), a function of `seed` and of all `names`.

    Args:
        seed: the run's seed.
        names: the purpose of the stream, e.g. `("noise", chain)`.

    The value is the same on every machine, rank and Python version, so a chain's stream does not depend on where the
    chain runs.

    >>> derive_seed(0, "noise", 1)
    6545564728581758268
    >>> derive_seed(0, "noise", 2) != derive_seed(0, "noise", 1)
    True
    """
    text = "/".join(str(part) for part in (seed, *names))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def reseed(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's default generators of the CPU and of `device`.

    It takes a few microseconds; `torch.manual_seed` seeds every device and takes a hundred.
    """
    torch.default_generator.manual_seed(seed)
    if device is None or device.type == "cpu":
        return
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def reseed_everything(seed: int) -> None:
    """Seed the default generators of torch (CPU), NumPy and Python's `random`, from which data sets may draw."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (augmentations of data sets draw from this generator)
    random.seed(seed)


@contextmanager
def unchanged_generators(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restore the default generators from which data sets and networks may draw: torch's, NumPy's and Python's.

    Args:
        devices: whose generators are restored beside the CPU's; others than CUDA's are skipped.
    """
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002 (data sets may draw from it)
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        random.setstate(of_python)
