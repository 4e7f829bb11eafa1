"""Groups of ranks, which wait as long as the user's strategy says and name the network that they need."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def new_group(ranks: Sequence[int] | None, timeout: timedelta | None, backend: str | None = None) -> Any:
    """Return a group of ranks; all ranks of the run make each group, in the same order.

    Args:
        ranks: theirs; None means all.
        timeout: the strategy's, after which an operation fails that a rank does not join; None is torch's.
        backend: "gloo" for tensors in host memory, None for the run's own.

    Raises:
        RuntimeError: if gloo cannot connect the ranks, naming the variable that says by which network.
    """
    with naming_the_network():
        return dist.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=backend)


@contextmanager
def naming_the_network() -> Iterator[None]:
    """Let an error of gloo's connections name what the user can set.

    gloo connects by the address that the host's own name has, which on many clusters is none of the network between the
    nodes, also where NCCL finds that network.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error).lower()
        if not any(word in said for word in ("gloo", "connect", "interface", "hostname", "resolve")):
            raise
        given = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR")}
        shown = ", ".join(f"{name}={value!r}" if value else f"no {name}" for name, value in given.items())
        raise RuntimeError(
            f"the ranks cannot connect by gloo, which the agreement of ranks needs beside NCCL ({shown}): set "
            "GLOO_SOCKET_IFNAME to the interface that all nodes reach, such as eth0 (`ip -brief address` lists them), "
            f"and MASTER_ADDR to rank 0's address on it; gloo said: {error}"
        ) from error
