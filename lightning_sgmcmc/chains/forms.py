"""Which form of one function of all chains is faster on a GPU: `torch.vmap`, or the chains written out one by one.

`torch.vmap` makes one grouped convolution of the chains' convolutions, for which cuDNN may have no fast kernel, and one
batched product of their matrices, which is fast. So only a network with convolutions is measured, and only them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sgmcmc.expansion import plain_type

Seconds = Callable[[Callable[[], Any]], float]
MOST_CHAINS = 8
"""Written out for more chains, a deep network takes too long to compile."""
REPEATS = 5
_KNOWN: dict[tuple[Any, ...], bool] = {}


class Convolution(NamedTuple):
    """What a convolution's time depends on."""

    function: Callable[..., Tensor]
    input: tuple[int, ...]
    weight: tuple[int, ...]
    options: tuple[Any, ...]
    groups: int
    dtype: torch.dtype


@contextmanager
def convolutions_of(model: nn.Module) -> Iterator[list[Convolution]]:
    """Record the convolution layers that a model calls inside the context."""
    functions: dict[type[nn.Module], Callable[..., Tensor]] = {
        nn.Conv1d: nn.functional.conv1d,
        nn.Conv2d: nn.functional.conv2d,
        nn.Conv3d: nn.functional.conv3d,
    }
    found: list[Convolution] = []

    def note(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        lower = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if lower else x.dtype
        options = layer.stride, layer.padding, layer.dilation
        shapes = tuple(x.shape), tuple(layer.weight.shape)
        found.append(Convolution(functions[plain_type(layer)], *shapes, options, layer.groups, dtype))

    handles = [part.register_forward_pre_hook(note) for part in model.modules() if plain_type(part) in functions]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def unrolled_is_faster(
    convolutions: Sequence[Convolution], chains: int, device: torch.device, seconds: Seconds | None = None
) -> bool:
    """Return whether convolutions of each chain by itself take less time on a device than grouped ones of all chains.

    It is measured once in a process, forward and backward.

    Args:
        convolutions: of one chain.
        chains: C.
        device: where to measure.
        seconds: measures the time of a call; None takes the kernels' time from torch's profiler.
    """
    if not convolutions or chains > MOST_CHAINS:
        return False
    key = (*sorted(map(repr, convolutions)), chains, str(device))
    if key not in _KNOWN:
        measure = seconds if seconds is not None else kernel_seconds
        total = {True: 0.0, False: 0.0}
        for convolution in set(convolutions):
            count = convolutions.count(convolution)
            for apart in total:
                total[apart] += count * measure(_pass(convolution, chains, device, apart))
        _KNOWN[key] = 0 < total[True] < total[False]
    return _KNOWN[key]


def _pass(convolution: Convolution, chains: int, device: torch.device, apart: bool) -> Callable[[], Any]:
    """Return a forward and backward pass of all chains' convolutions, each apart or all in groups."""
    count, channels, *place = convolution.input
    outputs, inside, *kernel = convolution.weight
    times, widths = (chains, 1) if apart else (1, chains)
    options: dict[str, Any] = {"dtype": convolution.dtype, "device": device, "requires_grad": True}
    inputs = [torch.zeros((count, widths * channels, *place), **options) for _ in range(times)]
    weights = [torch.zeros((widths * outputs, inside, *kernel), **options) for _ in range(times)]

    def run() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            groups = widths * convolution.groups
            result = convolution.function(x, weight, None, *convolution.options, groups)
            torch.autograd.grad(result, (x, weight), torch.ones_like(result))

    return run


def kernel_seconds(call: Callable[[], Any]) -> float:
    """Return the seconds that the device's kernels of a call take, 0 where the profiler sees none."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(REPEATS):
                call()
            torch.cuda.synchronize()
    except (AssertionError, RuntimeError):  # a torch or a machine whose profiler cannot see the device
        return 0.0
    return sum(event.self_device_time_total for event in profiled.key_averages()) / REPEATS / 1e6
