"""Which samples a thinned posterior keeps."""

from collections.abc import Sequence

from lightning_sgmcmc.checks import check_count


def thinned(chains: Sequence[int], every: int | None, count: int | None) -> list[int]:
    """Return the indices of the kept samples, in their order; see `Posterior.thin`.

    Args:
        chains: the chain of each sample, in the order of drawing.
        every: keep each chain's newest sample and every so many-th before it.
        count: keep so many in all, the same share of each chain, evenly spaced.

    Raises:
        ValueError: unless exactly one of both is given, and for a count larger than the number of samples.

    >>> thinned([0, 1, 0, 1, 0, 1], every=2, count=None)
    [0, 1, 4, 5]
    >>> thinned([0, 1, 0, 1, 0, 1], every=None, count=2)
    [4, 5]
    """
    if (every is None) == (count is None):
        raise ValueError(f"thin needs either every=… or count=…, got every={every} and count={count}")
    check_count("every", every)
    check_count("count", count)
    places: dict[int, list[int]] = {}
    for index, chain in enumerate(chains):
        places.setdefault(chain, []).append(index)
    if every is not None:
        return sorted(index for own in places.values() for index in own[::-1][::every])
    assert count is not None
    if count > len(chains):
        raise ValueError(f"count={count} is more than the {len(chains)} samples: pass at most {len(chains)}")
    kept: list[int] = []
    for own, share in zip(places.values(), _shares([len(own) for own in places.values()], count), strict=True):
        kept += [own[len(own) - 1 - j * len(own) // share] for j in range(share)]
    return sorted(kept)


def _shares(lengths: Sequence[int], count: int) -> list[int]:
    """Return whole numbers proportional to lengths that sum to count, by the largest remainders."""
    total = sum(lengths)
    shares = [count * length // total for length in lengths]
    by_remainder = sorted(range(len(lengths)), key=lambda i: -(count * lengths[i] % total))
    for i in by_remainder[: count - sum(shares)]:
        shares[i] += 1
    return shares
