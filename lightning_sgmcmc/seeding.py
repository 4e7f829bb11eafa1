"""Independent random streams that are functions of a run's seed and of names."""

import hashlib
import random

import numpy as np
import torch


def derive_seed(seed: int, *names: int | str) -> int:
    """Return a seed in [0, 2^63) that depends on `seed` and on every one of `names`, and on nothing else.

    Args:
        seed: the run's seed.
        names: what the stream is for, e.g. `("noise", chain)`.

    The value is the same on every machine, rank and version of Python, so that a chain's stream does not depend on
    where the chain runs.
    """
    text = "/".join(str(part) for part in (seed, *names))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def reseed(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's default generator of the CPU, and of `device`.

    Some microseconds: `torch.manual_seed` seeds every device there is and takes a hundred.
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
    """Seed the default generators of torch (CPU), NumPy and Python's `random`, for data sets that draw from them."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (augmentations of data sets draw from this generator)
    random.seed(seed)
