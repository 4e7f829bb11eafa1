"""A module and the states of its samples: tensors by name, calls with them, locks, copies; CUDA graphs and forms."""

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from lightning_sgmcmc.expansion import collapsed, expansions_of, plain_type
from lightning_sgmcmc.namespace import pl, rank_zero_warn
from lightning_sgmcmc.priors.state import is_prior_state
from lightning_sgmcmc.seeding import derive_seed, unchanged_torch_generators

MASK_SEED = "dropout_seed"
"""Name of the buffer of a sample that holds the seed of its masks, an integer; the network has no such buffer."""
WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
MASKED = (nn.Dropout, *WHOLE_CHANNELS)
"""The layers that get masks."""


def dropout_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers with p > 0 that get masks, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, MASKED) and layer.p > 0}


def mask(seed: int, name: str, shape: tuple[int, ...], p: float, whole_channels: bool = False) -> Tensor:
    """Return a layer's mask for inputs of a shape, 1/(1-p) with probability 1-p, else 0, shape (1, …), on the CPU."""
    own = (1, *shape[1:2], *[1] * (len(shape) - 2)) if whole_channels else (1, *shape[1:])
    generator = torch.Generator().manual_seed(derive_seed(seed, "mask", name))
    kept = torch.rand(own, generator=generator) >= p
    return kept.float() / (1 - p) if p < 1 else torch.zeros(own)


@contextmanager
def masked(module: nn.Module, seed: int) -> Iterator[None]:
    """Within the context, every dropout layer multiplies its input by the mask of this seed."""

    def multiply(name: str, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        own = mask(seed, name, tuple(output.shape), layer.p, isinstance(layer, WHOLE_CHANNELS))
        return inputs[0] * own.to(output)

    layers = dropout_layers(module).items()
    hooks = [layer.register_forward_hook(partial(multiply, name)) for name, layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# -- stateless ---------------------------------------------------------------------------------------------------------


Home = tuple[dict[str, Any], str]
"""Where a module keeps a tensor: the dictionary and the key."""


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name, the parameters first."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def homes_of(module: nn.Module) -> dict[str, list[Home]]:
    """Return where a module keeps each tensor of `state_of`, by name; a tensor that layers share has several places."""
    names: dict[int, str] = {}
    homes: dict[str, list[Home]] = {}
    for kind in ("_parameters", "_buffers"):
        for prefix, part in module.named_modules():
            home: dict[str, Any] = getattr(part, kind)
            for key, tensor in home.items():
                if tensor is not None:
                    name = names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                    homes.setdefault(name, []).append((home, key))
    return homes


def network_state(module: nn.Module) -> dict[str, Tensor]:
    """Return what samples have: `state_of` without the prior's tensors, and with the products of expanded weights."""
    named = collapsed(dict(module.named_parameters()), module) | dict(module.named_buffers())
    return {name: tensor for name, tensor in named.items() if not is_prior_state(name)}


@contextmanager
def restored(homes: Iterable[Sequence[Home]]) -> Iterator[None]:
    """Put the tensors that are in some places of a module now back there at the end."""
    before = [(home, key, home[key]) for places in homes for home, key in places]
    try:
        yield
    finally:
        for home, key, tensor in before:
            home[key] = tensor


def put(homes: Sequence[Home], tensor: Tensor) -> None:
    """Put a tensor into all of its places in a module."""
    for home, key in homes:
        home[key] = tensor


class UnfinishedBufferError(ValueError):
    """A buffer has its shape only after a forward pass."""


class StatelessCall(nn.Module):
    """Calls `function(module, *args)` with a sample's tensors; the module's own ones are unchanged."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._function = function
        with in_turn(module):
            self._slots = _slots_of(module)
            self._slots |= {expansion.name: [f"module.{expansion.slot}"] for expansion in expansions_of(module)}
            self._places = [
                (part, key, f"{prefix}.{key}".lstrip("."))
                for prefix, part in module.named_modules()
                for key in part._buffers
            ]

    def forward(self, *args: Any) -> Any:
        passed = [part._buffers[key] for part, key, _ in self._places]
        shapes = [None if tensor is None else tensor.shape for tensor in passed]
        result = self._function(self.module, *args)
        for (part, key, name), tensor, shape in zip(self._places, passed, shapes, strict=True):
            present = part._buffers[key]
            # A layer that replaces its buffer, `self.count = self.count + 1`, has written no tensor that was passed.
            if not part.training or present is None or (present is tensor and present.shape == shape):
                continue
            if tensor is None or present.shape != shape:
                part._buffers[key] = tensor
                raise UnfinishedBufferError(
                    f"a forward pass gives the buffer '{name}' another shape, {tuple(present.shape)} for "
                    f"{shape if shape is None else tuple(shape)}, and all samples need the same: call the "
                    "network with the largest inputs that it will get, net(x), before the fit and before loading, or "
                    "make the buffer so in __init__"
                )
            tensor.detach().copy_(present.detach())
        return result

    def call(self, state: Mapping[str, Tensor], *args: Any) -> Any:
        """Call the function with the tensors of `state`, by the module's names, and the masks of its seed, if any."""
        own = {
            slot: tensor
            for name, tensor in state.items()
            if name != MASK_SEED
            for slot in self._slots.get(name) or [f"module.{name}"]
        }
        if MASK_SEED not in state:
            return functional_call(self, own, args, tie_weights=False)
        with masked(self.module, int(state[MASK_SEED])):
            return functional_call(self, own, args, tie_weights=False)


def _slots_of(module: nn.Module) -> dict[str, list[str]]:
    """Return by each tensor's name all names that it has; a layer in several places counts once.

    With these functional_call need not look for them, and puts a layer's own tensors back, which it loses if a layer
    has several names.
    """
    slots: dict[int, list[str]] = {}
    for kind in ("_parameters", "_buffers"):
        for prefix, part in module.named_modules():
            for key, tensor in getattr(part, kind).items():
                if tensor is not None:
                    slots.setdefault(id(tensor), []).append(f"{prefix}.{key}" if prefix else key)
    return {name: [f"module.{slot}" for slot in names] for names in slots.values() for name in names}


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set a module to evaluation mode; restore each submodule's mode at the end."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        module.train(modes[0][1])  # for what a user's train(mode) sets besides
        for part, training in modes:
            part.training = training


_LOCKS: "WeakKeyDictionary[nn.Module, threading.RLock]" = WeakKeyDictionary()
"""A lock for each layer; those of one network mostly have one."""
_LOCKS_LOCK = threading.Lock()
_FITTED: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()
"""The thread of the present fit of each layer with tensors."""


class _Used:
    """What networks may have run with in this process."""

    several_threads = False


def _forget_other_threads() -> None:
    """In a forked process only the thread that forked exists: nobody would release the locks of the others, and OpenMP
    waits for its own for ever if it had some."""
    global _LOCKS, _LOCKS_LOCK
    _LOCKS, _LOCKS_LOCK = WeakKeyDictionary(), threading.Lock()
    if _Used.several_threads:
        torch.set_num_threads(1)  # as a loader does in its workers
    for layer, thread in list(_FITTED.items()):
        if thread != threading.get_ident():
            del _FITTED[layer]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


@contextmanager
def in_turn(module: nn.Module) -> Iterator[None]:
    """Let one thread at a time put tensors into a module or look which it has; so too modules that share a layer."""
    with _LOCKS_LOCK:
        parts = list(module.modules())
        locks = {id(lock): lock for part in parts if (lock := _LOCKS.get(part)) is not None}
        locks = locks or {0: threading.RLock()}
        for part in parts:
            _LOCKS.setdefault(part, next(iter(locks.values())))
    with ExitStack() as held:
        for _, lock in sorted(locks.items()):  # in one order, so that no two threads wait for each other
            held.enter_context(lock)
        yield


@contextmanager
def borrowed(module: nn.Module) -> Iterator[None]:
    """Let one thread at a time put samples into a module, in evaluation mode: all that predict share its network."""
    with in_turn(module):
        _Used.several_threads = _Used.several_threads or torch.get_num_threads() > 1
        thread = threading.get_ident()
        if _FITTED and any(_FITTED.get(part, thread) != thread for part in module.modules()):
            raise RuntimeError(
                f"{type(module).__name__} is being fitted in another thread, and its network is in use: predict with a "
                "posterior that has its own, Posterior.load(folder), or after the fit"
            )
        with evaluation_mode(module):
            yield


def begin_fit(module: nn.Module) -> None:
    """Keep other threads from putting samples into a module until `end_fit`."""
    thread = threading.get_ident()
    with borrowed(module), _LOCKS_LOCK:
        is_second = any(other != thread for other in _FITTED.values())
        _FITTED.update((part, thread) for part in module.modules() if part._parameters or part._buffers)
    if is_second:
        rank_zero_warn(
            "Two fits run in threads of one program and draw from the same default generators, so neither repeats by "
            "its seed: fit in processes, or one after the other."
        )


def end_fit(module: nn.Module) -> None:
    """Allow it again."""
    with _LOCKS_LOCK:
        for part in module.modules():
            _FITTED.pop(part, None)


@contextmanager
def undisturbed_generators(module: pl.LightningModule) -> Iterator[None]:
    """Restore torch's default generators, of the CPU and the module's device, at the end."""
    with unchanged_torch_generators([module.device]):
        yield


# -- parameters that are reached by another way ------------------------------------------------------------------------


def fault_of_parameter(parameter: nn.Parameter, passed: Container[int], names: Mapping[int, str]) -> str | None:
    """Return what is wrong with a network that computes with a parameter, if that was not passed; None for nothing.
    Warn if it is not registered.

    Args:
        passed: the ids of the tensors that were.
        names: of the parameters that these replace, by their ids.
    """
    if id(parameter) in passed:
        return None
    if id(parameter) in names:
        return (
            f"the network reaches '{names[id(parameter)]}' by another way than its name, such as a list, a lambda or "
            "functools.partial, where no chain and no sample can put its own: use the attribute in forward "
            "(self.layer.weight), or keep it in an nn.ParameterList"
        )
    rank_zero_warn(
        f"The network uses a parameter of shape {tuple(parameter.shape)} that is not registered, as of a layer in a "
        "plain list: it is not sampled, and samples do not have it. Keep layers in an nn.ModuleList, and parameters in "
        "an nn.ParameterList; if it is to stay as it is, call requires_grad_(False)."
    )
    return None


# -- copies ------------------------------------------------------------------------------------------------------------


def cloned(values: Any) -> Any:
    """Return a tree of values with copies of its tensors."""
    return pytree.tree_map_only(Tensor, Tensor.clone, values)


def same_numbers(one: Any, other: Any) -> bool:
    """Return whether the tensors of two trees have the same numbers; a NaN is another one."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor) and a.layout == torch.strided)


# -- graphs ------------------------------------------------------------------------------------------------------------


class _Held:
    """Contexts in which graphs are kept, and whether some wait to be freed."""

    contexts = 0
    waiting = False


def free_graphs() -> None:
    """Free the memory of CUDA graphs after a fit that replayed them, which torch does with all compiled code."""
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


# -- forms -------------------------------------------------------------------------------------------------------------

# Which form of one function of all chains is faster: `torch.vmap`, or the chains written out one by one.
#
# `torch.vmap` makes one grouped convolution of the chains' convolutions, for which cuDNN may have no fast kernel, and
# one batched product of their matrices, which is fast. So only convolutions are measured. On a CPU a grouped one takes
# about 1.5 times as long as the chains' own, and saves their calls; there the choice depends on sizes alone, since a
# run repeats.

Seconds = Callable[[Callable[[], Any]], float]
MOST_CHAINS = 8
"""Written out for more chains, a deep network takes too long to compile."""
REPEATS = 5
LARGE = 8_000_000
"""Multiplications of a convolution of one chain's batch from which each chain's own is faster on a CPU."""
_KNOWN: dict[tuple[Any, ...], bool] = {}


class Convolution(NamedTuple):
    """What a convolution's time depends on."""

    function: Callable[..., Tensor]
    input: tuple[int, ...]
    output: tuple[int, ...]
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

    def note(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x = inputs[0]
        lower = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if lower else x.dtype
        options = layer.stride, layer.padding, layer.dilation
        shapes = tuple(x.shape), tuple(output.shape), tuple(layer.weight.shape)
        found.append(Convolution(functions[plain_type(layer)], *shapes, options, layer.groups, dtype))

    handles = [part.register_forward_hook(note) for part in model.modules() if plain_type(part) in functions]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def are_large(convolutions: Sequence[Convolution]) -> bool:
    """Return whether a network's mean convolution is so large that a grouped one of all chains is slower on a CPU."""
    each = [math.prod(own.output) * math.prod(own.weight[1:]) for own in convolutions]
    return sum(each) > LARGE * len(each)


def unrolled_is_faster(
    convolutions: Sequence[Convolution], chains: int, device: torch.device, seconds: Seconds | None = None
) -> bool:
    """Return whether each chain's own convolutions take less time than grouped ones, as measured once in a process."""
    if not convolutions or chains > MOST_CHAINS:
        return False
    key = (*sorted(map(repr, convolutions)), chains, str(device))
    if key not in _KNOWN:
        total = {True: 0.0, False: 0.0}
        measure = kernel_seconds if seconds is None else seconds
        for convolution, count in Counter(convolutions).items():
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
