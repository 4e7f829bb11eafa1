"""Stage `forms`: the network alone, forward and backward of four chains in a CUDA graph; which form is fastest."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from tests.benchmarks.gpu.setting import Say, Setting

CASES = (
    "vmap",
    "vmap, benchmark",
    "unrolled, benchmark",
    "unrolled, channels_last, benchmark",
    "vmap, channels_last, benchmark",
    "one network, benchmark",
    "one network, channels_last, benchmark",
    "unrolled",
)
"""In the order of their weight: the last ones are left out where time runs short."""
CHAINS = 4
WARM_UP = 5


def run(setting: Setting, case: str, say: Say) -> None:
    """Record each form's milliseconds a pass, and those after which the host has issued it."""
    for form in CASES[::3][:2] if setting.tiny else CASES:
        try:
            say(form, **measured(setting, form))
        except Exception as error:
            say(form, error=f"{type(error).__name__}: {str(error)[:400]}")


def measured(setting: Setting, form: str) -> dict[str, float]:
    """Return the milliseconds of a forward and backward pass in a form, and the seconds of its compilation."""
    torch._dynamo.reset()
    torch.backends.cudnn.benchmark = "benchmark" in form
    layout = torch.channels_last if "channels_last" in form else torch.contiguous_format
    chains = 1 if "one network" in form else CHAINS
    networks = [setting.network().to(setting.device, memory_format=layout) for _ in range(chains)]
    x = torch.rand(chains, setting.batch, 3, setting.side, setting.side, device=setting.device)
    y = torch.randint(10, (chains, setting.batch), device=setting.device)
    states, loss = (_vmapped if "vmap" in form else _unrolled)(networks, layout)
    tensors = [tensor for state in states for part in state for tensor in part.values()]
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    options: dict[str, Any] = {"backend": "eager"} if setting.tiny else {"mode": "reduce-overhead"}
    compiled = torch.compile(loss, dynamic=False, **options)

    def step() -> None:
        if not setting.tiny:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(setting.device, torch.bfloat16):
            total = compiled(states, x, y)
        torch.autograd.grad(total, leaves)

    began = time.perf_counter()
    for _ in range(1 if setting.tiny else WARM_UP):
        step()
    setting.wait()
    compilation = time.perf_counter() - began
    count = 1 if setting.tiny else 100
    began = time.perf_counter()
    for _ in range(count):
        step()
    host = time.perf_counter() - began
    setting.wait()
    whole = time.perf_counter() - began
    return {"wall_ms": whole / count * 1e3, "host_ms": host / count * 1e3, "compilation_s": compilation}


States = list[tuple[dict[str, Tensor], dict[str, Tensor]]]
Loss = Callable[[States, Tensor, Tensor], Tensor]


def _vmapped(networks: list[nn.Module], layout: torch.memory_format) -> tuple[States, Loss]:
    def loss(states: States, x: Tensor, y: Tensor) -> Tensor:
        if layout is torch.channels_last:
            x = x.flatten(0, 1).contiguous(memory_format=layout).unflatten(0, x.shape[:2])

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(functional_call(networks[0], (parameters, buffers), (x,)), y)

        result: Tensor = torch.vmap(one)(*states[0], x, y).sum()
        return result

    return [stack_module_state(networks)], loss


def _unrolled(networks: list[nn.Module], layout: torch.memory_format) -> tuple[States, Loss]:
    def loss(states: States, x: Tensor, y: Tensor) -> Tensor:
        each = [
            nn.functional.cross_entropy(functional_call(network, state, (own.contiguous(memory_format=layout),)), t)
            for network, state, own, t in zip(networks, states, x, y, strict=True)
        ]
        return torch.stack(each).sum()

    return [(dict(n.named_parameters()), dict(n.named_buffers())) for n in networks], loss
