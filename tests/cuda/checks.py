"""What the stand-in itself must do, as functions that assert: run in its own process by `cases.py`."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.cuda.stand_in import DeviceMismatch, NoFloat64, StandIn
from tests.cuda.tensor import CudaTensor

SHAPES = ((3, 2), (4,), ())


def _raises(kind: type[Exception], function: Callable[[], Any], says: str = "") -> None:
    with pytest.raises(kind, match=says):
        function()


def _flat(chains: int = 2) -> tuple[Tensor, list[nn.Parameter]]:
    """Return a buffer (C, P) on the device and parameters that are views of it."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    flat = torch.arange(chains * sum(sizes), dtype=torch.float32, device="cuda").view(chains, -1)
    pieces = flat.split(sizes, 1)
    views = [piece.unflatten(1, shape) if shape else piece[:, 0] for piece, shape in zip(pieces, SHAPES, strict=True)]
    return flat, [nn.Parameter(view) for view in views]


def numbers_are_true_and_the_device_is_cuda(device: StandIn) -> None:
    x = torch.ones(3, device="cuda")
    y = torch.tensor([1.0, 2.0, 3.0], device="cuda")
    assert isinstance(x, CudaTensor)
    assert x.is_cuda
    assert x.device == torch.device("cuda", 0)
    assert (x + y).cpu().tolist() == [2.0, 3.0, 4.0]
    assert torch.arange(3).cuda().device.type == "cuda"
    assert not (x + y).cpu().is_cuda
    assert torch.is_tensor(x)
    assert isinstance(nn.Parameter(x), nn.Parameter)


def mixed_devices_raise(device: StandIn) -> None:
    x = torch.ones(3, device="cuda")
    _raises(DeviceMismatch, lambda: x + torch.ones(3), "same device")
    _raises(DeviceMismatch, lambda: torch._foreach_add_([x], [torch.ones(3)]), "same device")
    _raises(DeviceMismatch, lambda: x.normal_(generator=torch.Generator()), "generator")
    assert (x + torch.tensor(1.0)).cpu().tolist() == [2.0] * 3  # a number on the host is an argument of the kernel
    x.normal_(generator=torch.Generator("cuda").manual_seed(3))


def views_alias_their_base(device: StandIn) -> None:
    flat, parameters = _flat()
    first, second, scalar = parameters
    assert flat.data_ptr() == first.data_ptr() == first.untyped_storage().data_ptr()
    assert second.storage_offset() == 6
    assert second.data_ptr() == flat[:, 6:].data_ptr()
    assert first.stride() == (11, 2, 1)
    with torch.no_grad():
        flat.add_(100.0)
        assert first[0].cpu().flatten().tolist() == [100.0 + i for i in range(6)]
        second.zero_()
        scalar.copy_(torch.tensor([7.0, 8.0], device="cuda"))
        first[1].copy_(torch.ones(3, 2))
        flat.as_strided((2,), (11,), 0).fill_(-1.0)
    assert flat[:, 6:10].cpu().abs().sum() == 0
    assert flat[:, 10].cpu().tolist() == [7.0, 8.0]
    assert flat[1].cpu().tolist() == [-1.0, *[1.0] * 5, *[0.0] * 4, 8.0]
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.0)
    assert flat.cpu().abs().sum() == 0


def gradients_alias_a_flat_buffer(device: StandIn) -> None:
    flat, parameters = _flat()
    gradient = torch.zeros_like(flat)
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel() // 2
        parameter.grad = gradient[:, start:stop].view(parameter.shape)
        start = stop
    seen: list[int] = []
    parameters[0].register_hook(lambda g: g * 2)
    parameters[1].register_post_accumulate_grad_hook(lambda p: seen.append(p.numel()))
    sum((i + 1) * p.sum() for i, p in enumerate(parameters)).backward()
    assert gradient[0].cpu().tolist() == [2.0] * 6 + [2.0] * 4 + [3.0]
    assert seen == [8]
    gradient.zero_()
    assert all(p.grad is not None and p.grad.cpu().abs().sum() == 0 for p in parameters)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradient + 0 * x


def a_flat_leaf_has_the_gradient_of_its_views(device: StandIn) -> None:
    flat, _ = _flat()
    leaf = flat.requires_grad_()
    pieces = leaf.split([6, 4, 1], 1)
    loss = _Double.apply(pieces[0].unflatten(1, (3, 2))).sum() + pieces[1].square().sum()
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad[0].cpu().tolist() == [2.0] * 6 + [2.0 * i for i in range(6, 10)] + [0.0]
    vmapped = torch.vmap(torch.func.grad(lambda row: row.square().sum()))(flat.detach())
    assert torch.equal(vmapped.cpu(), 2 * flat.detach().cpu())


def modules_move_and_keep_their_parameters(device: StandIn) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    before = [p.detach().clone() for p in net.parameters()]
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    net.to("cuda")
    assert all(isinstance(p, nn.Parameter) and p.is_cuda for p in net.parameters())
    assert [id(p) for p in sgd.param_groups[0]["params"]] == [id(p) for p in net.parameters()]
    net(torch.ones(4, 2, device="cuda")).square().sum().backward()
    sgd.step()
    assert any(not torch.equal(p.detach().cpu(), b) for p, b in zip(net.parameters(), before, strict=True))
    state = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
    net.load_state_dict(state)


def optimizers_step_on_views(device: StandIn) -> None:
    flat, parameters = _flat()
    start = flat.cpu().clone()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.5, momentum=0.9).step()
    assert torch.equal(flat.cpu(), start - 0.5)


def optimizers_and_clipping_take_lists(device: StandIn) -> None:
    parameters = [nn.Parameter(torch.ones(3, device="cuda")) for _ in range(20)]
    adam = torch.optim.AdamW(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        device.record.clear()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
    assert device.record.launches.total() < 20
    device.record.clear()


def launches_are_counted(device: StandIn) -> None:
    record = device.record
    flat, parameters = _flat()
    alike = [torch.zeros(3, device="cuda") for _ in range(5)]

    def count(function: Callable[[], Any]) -> int:
        record.clear()
        with torch.no_grad():
            function()
        return record.launches.total()

    assert count(lambda: torch._foreach_add_(alike, alike)) == 1
    assert count(lambda: torch._foreach_add_(parameters, 1.0)) == 3  # strided, so one a tensor
    assert count(lambda: flat.square().sum(1)) == 2
    assert count(lambda: flat[:, :3].t().reshape(-1)) == 1  # a copy
    assert count(lambda: flat.view(-1)[3:]) == 0
    assert count(lambda: torch.stack(alike)) == 1
    assert count(lambda: flat.isfinite().all()) == 5  # |x| ≠ ∞, x = x, and, all
    record.clear()


def waits_are_counted(device: StandIn) -> None:
    record = device.record
    x = torch.ones(4, device="cuda")
    pinned = torch.empty(4, pin_memory=True)

    def count(function: Callable[[], Any]) -> tuple[int, int]:
        record.clear()
        function()
        return record.waits.total(), record.blocking.total()

    assert pinned.is_pinned()
    assert not torch.empty(4).is_pinned()
    assert torch.ones(2).pin_memory().is_pinned()
    assert count(lambda: x.sum().item()) == (1, 0)
    assert count(lambda: bool(x.any())) == (1, 0)
    assert count(x.cpu) == (1, 1)
    assert count(lambda: pinned.copy_(x, non_blocking=True)) == (0, 0)
    assert count(lambda: pinned.copy_(x)) == (1, 1)
    assert count(lambda: torch.ones(4).to("cuda")) == (1, 1)
    assert count(lambda: torch.ones(4).to("cuda", non_blocking=True)) == (0, 0)
    assert count(lambda: pinned.to("cuda", non_blocking=True)) == (0, 0)
    assert count(lambda: torch.tensor([1.0], device="cuda"))[0] == 1
    assert count(lambda: x[x > 0])[0] == 1
    assert count(torch.cuda.synchronize) == (1, 0)
    record.clear()


def float64_is_refused_where_there_is_none(device: StandIn) -> None:
    """By any operation, and by copies that convert, whichever side does it."""
    x, host = torch.ones(3, device="cuda"), torch.zeros(3, dtype=torch.float64)
    with mock.patch.object(device, "_float64", False):
        _raises(NoFloat64, x.double, "no float64, at")
        _raises(NoFloat64, lambda: x.sum(dtype=torch.float64))
        _raises(NoFloat64, lambda: torch.zeros(3, dtype=torch.float64, device="cuda"))
        _raises(NoFloat64, lambda: host.to("cuda"))
        _raises(NoFloat64, lambda: x.to("cpu", torch.float64))
        _raises(NoFloat64, lambda: host.copy_(x))
        assert host.to("cuda", torch.float32).cpu().tolist() == [0.0] * 3
        assert x.cpu().double().sum() == 3
    assert x.double().cpu().sum() == 3


def an_event_is_reached_two_steps_later(device: StandIn) -> None:
    event = torch.cuda.Event()
    event.record()
    device.record.clear()
    assert not event.query()
    event.synchronize()
    assert device.record.waits.total() == 1
    device.record.clear()
    assert event.query()
    event.synchronize()
    assert device.record.waits.total() == 0


def graphs_are_replayed_and_their_memory_written_over(device: StandIn) -> None:
    weight = nn.Parameter(torch.ones(3, device="cuda"))
    torch._dynamo.mark_static_address(weight)
    x = torch.full((3,), 2.0, device="cuda")
    step = torch.compile(lambda w, x: ((w * x).exp() - 1).sum(), mode="reduce-overhead")
    device.record.clear()
    loss = step(weight, x)
    loss.backward()
    assert device.record.graphs.total() == 2
    assert device.record.launches.total() == 3  # the input x; the loss's gradient is filled and is an input too
    assert torch.allclose(weight.grad.cpu(), 2 * torch.tensor(2.0).exp())  # type: ignore[union-attr]
    torch.compiler.cudagraph_mark_step_begin()
    step(weight, x)
    assert loss.isnan().item()
    first = step(weight, x)
    torch.compiler.cudagraph_mark_step_begin()
    step(weight, x)
    _raises(RuntimeError, first.backward, "overwritten")
    device.record.clear()


def kernels_of_a_compiled_update_are_counted(device: StandIn) -> None:
    flat, gradient = torch.ones(2, 50, device="cuda"), torch.ones(2, 50, device="cuda")

    def update(flat: Tensor, gradient: Tensor, lr: Tensor) -> None:
        flat.sub_(gradient.mul(lr).square_().add_(1.0))

    device.record.clear()
    torch.compile(update)(flat, gradient, torch.tensor(0.5))
    assert device.record.launches.total() == 1
    assert not device.record.graphs
    assert torch.equal(flat.cpu(), torch.full((2, 50), -0.25))
    torch.compile(update, mode="reduce-overhead")(flat, gradient, torch.tensor(0.5))
    assert not device.record.graphs, "a graph that changes an input without a fixed address is not replayed"
    for tensor in (flat, gradient):
        torch._dynamo.mark_static_address(tensor)
    device.record.clear()
    torch.compile(update, mode="reduce-overhead")(flat, gradient, torch.tensor(0.5))
    assert device.record.graphs.total() == 1
    assert device.record.launches.total() == 0
    device.record.clear()


def autocast_lowers_products_only(device: StandIn) -> None:
    x = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        assert (x @ x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32
        assert (x @ x).log_softmax(1).dtype == torch.float32


def the_device_has_a_default_generator(device: StandIn) -> None:
    state = torch.get_rng_state()
    torch.cuda.default_generators[0].manual_seed(3)
    first = torch.rand(4, device="cuda")
    assert torch.equal(torch.get_rng_state(), state)
    torch.cuda.default_generators[0].manual_seed(3)
    assert torch.equal(torch.empty(4, device="cuda").uniform_().cpu(), first.cpu())
    with torch.random.fork_rng([first.device]):
        inside = torch.rand(4, device="cuda").cpu()
    assert torch.equal(torch.rand(4, device="cuda").cpu(), inside)


CHECKS = {
    check.__name__: check
    for check in (
        numbers_are_true_and_the_device_is_cuda,
        mixed_devices_raise,
        the_device_has_a_default_generator,
        views_alias_their_base,
        gradients_alias_a_flat_buffer,
        a_flat_leaf_has_the_gradient_of_its_views,
        modules_move_and_keep_their_parameters,
        optimizers_step_on_views,
        optimizers_and_clipping_take_lists,
        launches_are_counted,
        waits_are_counted,
        float64_is_refused_where_there_is_none,
        an_event_is_reached_two_steps_later,
        graphs_are_replayed_and_their_memory_written_over,
        kernels_of_a_compiled_update_are_counted,
        autocast_lowers_products_only,
    )
}
