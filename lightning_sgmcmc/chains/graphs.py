"""CUDA graphs, whose memory torch keeps until the compiled code is dropped."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Held:
    """Contexts in which graphs are kept, and whether some wait to be freed."""

    contexts = 0
    waiting = False


def free_graphs() -> None:
    """Free the memory of CUDA graphs after a fit that replayed them.

    Torch frees it with all compiled code of the process, which is compiled again at its next call: the activations of
    all chains are worth more than the seconds.
    """
    if _Held.contexts:
        _Held.waiting = True
        return
    _Held.waiting = False
    torch.compiler.reset()


@contextmanager
def graphs_kept() -> Iterator[None]:
    """Keep graphs and compiled code between fits of one network, which use the same memory; free them at the end."""
    _Held.contexts += 1
    try:
        yield
    finally:
        _Held.contexts -= 1
        if _Held.waiting:
            free_graphs()
