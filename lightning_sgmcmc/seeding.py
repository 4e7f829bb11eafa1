"""Independent random streams that are functions of a run's seed and of names."""

import hashlib


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
