"""What a network costs: the unit of the recipes' predicted times."""

from collections.abc import Callable
from typing import Any


def forward_flops(network: Callable[[], Any], shape: tuple[int, ...]) -> int:
    """Return the floating-point operations of a network's output for one input; a gradient takes about three times as
    many.

    Args:
        network: makes it; nothing is computed.
        shape: of an input.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        made = network()
        with FlopCounterMode(display=False) as counter:
            made(torch.zeros(1, *shape))
    return int(counter.get_total_flops())
