"""The states of several samples, and a function of a network at each of them: one after another, or all at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sgmcmc.chains.execution import (
    MASK_SEED,
    StatelessCall,
    cloned,
    fault_of_parameter,
    homes_of,
    put,
    restored,
    same_numbers,
    state_of,
)
from lightning_sgmcmc.compiling import compiled_if_possible
from lightning_sgmcmc.expansion import PLAIN, expansions_of

State = Mapping[str, Tensor]
Sample = TypeVar("Sample")
LARGEST_GROUP = 256 * 2**20
"""Bytes of samples that run together."""
MOST = 16
"""States in one vmapped call: memory for the network's activations grows with them."""


def runs_at_once(device: torch.device) -> bool:
    """Return whether several states run at once on a device."""
    # On a CPU vmapped convolutions are 2.5 times as slow (ResNet-20), and a perceptron gains nothing.
    return device.type != "cpu"


def dtype_of(state: State) -> torch.dtype:
    """Return the dtype of a sample's weights, in which its network computes."""
    return next((t.dtype for t in state.values() if t.is_floating_point()), torch.get_default_dtype())


def grouped(samples: Iterable[Sample], state_of: Callable[[Sample], State], most: int) -> Iterator[list[Sample]]:
    """Yield samples in lists that may run together: up to `most`, of one dtype, and at most `LARGEST_GROUP` bytes."""
    group: list[Sample] = []
    room, kind = 0.0, torch.float32
    for sample in samples:
        state = state_of(sample)
        size = sum(tensor.nbytes for tensor in state.values())
        if group and (len(group) == most or size > room or dtype_of(state) != kind):
            yield group
            group = []
        room, kind = (room if group else LARGEST_GROUP) - size, dtype_of(state)
        group.append(sample)
    if group:
        yield group


class States:
    """The states of several samples of one network on one device, parameters and buffers by name."""

    def __init__(self, states: Sequence[State]) -> None:
        self.each: list[State] = list(states)
        """The state of each sample."""
        self._stacked: dict[str, Tensor] | None = None
        self._parts: tuple[int, list[States]] = (0, [])
        self.device = next((tensor.device for tensor in self.each[0].values()), torch.device("cpu"))
        self.have_masks = any(MASK_SEED in state for state in self.each)
        """Whether dropout masks belong to the samples, which differ in more than tensors then."""

    def __len__(self) -> int:
        return len(self.each)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for state in self.each for tensor in state.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, in which the network computes."""
        return dtype_of(self.each[0])

    @property
    def stacked(self) -> dict[str, Tensor]:
        """The states along a leading axis; the single states become views of them."""
        if self._stacked is None:
            each = self.each
            self._stacked = stacked = {name: torch.stack([state[name] for state in each]) for name in each[0]}
            self.each = [{name: tensor[i] for name, tensor in stacked.items()} for i in range(len(each))]
        return self._stacked

    def parts(self, most: int) -> "list[States]":
        """Return the states in parts of at most `most` samples."""
        if len(self) <= most:
            return [self]
        if self._parts[0] != most:
            self._parts = most, []
            for own in (slice(first, first + most) for first in range(0, len(self), most)):
                part = States(self.each[own])
                if self._stacked is not None:  # it is not copied again
                    part._stacked = {name: tensor[own] for name, tensor in self._stacked.items()}
                self._parts[1].append(part)
        return self._parts[1]


NORMS = (nn.functional.batch_norm, nn.functional.instance_norm)


def has_norms(module: nn.Module) -> bool:
    """Return whether a network has layers with running statistics."""
    return any(isinstance(part, nn.modules.batchnorm._NormBase) for part in module.modules())


class WholeNorms(TorchFunctionMode):
    """Norms of inputs in half precision whose weights or statistics are in float32 are computed in float32.

    `torch.vmap` gives the kernels weights of the input's type beside statistics of theirs, which their gradient
    refuses: so it is on CUDA under autocast. Compiled code does not call these kernels.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if func in NORMS and args else None
        if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16):
            others = [other for other in (*args[1:], *kwargs.values()) if isinstance(other, Tensor)]
            if any(other.dtype == torch.float32 for other in others):
                return func(x.float(), *args[1:], **kwargs).to(x.dtype)
        return func(*args, **kwargs)


def norms_for(has_norms: bool) -> AbstractContextManager[Any]:
    """Return the context in which `torch.vmap` can run a network's norms in any precision."""
    return WholeNorms() if has_norms and not torch.compiler.is_compiling() else nullcontext()


class _Reached(TorchDispatchMode):
    """Notes the parameters that operations are made with, and changes none of these."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[int, nn.Parameter] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter) and leaf.requires_grad:
                self.parameters[id(leaf)] = leaf
        return func(*args, **kwargs or {})


class TogetherCall:
    """Calls `function(module, *args)` with the tensors of each of several samples instead of the module's own.

    On a CPU the samples run one after another, each in the module's place, bit for bit as that sample alone. On other
    devices they run at once, by `torch.vmap`, equal up to rounding, unless vmap cannot run the network (its control
    flow depends on data, or it draws random numbers). If memory does not suffice for all, fewer run at once.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], compiled: bool = False) -> None:
        self._module = module
        self._function = function
        self._alone = StatelessCall(module, function)
        self._most = MOST
        self._has_norms = has_norms(module)
        self._is_checked = compiled
        """Whether it is known that the function computes from the states."""
        at_once = self._vmapped
        self._together: Callable[..., Any] | None = (
            compiled_if_possible("the samples' evaluation", at_once, varies=1, dynamic=False) if compiled else at_once
        )
        """Runs all at once; None once it has failed."""

    def __call__(self, states: States, *args: Any) -> Iterator[Any]:
        """Yield the function's results, one for each state; until the last, the module may have other tensors."""
        if states.have_masks or self._together is None or not runs_at_once(states.device):
            return self._one_by_one(states, args)
        return (result for part in states.parts(self._most) for result in self._at_once(part, args))

    def _vmapped(self, stacked: dict[str, Tensor], args: tuple[Any, ...]) -> Any:
        with norms_for(self._has_norms):
            return torch.vmap(self._alone.call, in_dims=(0, *[None] * len(args)))(stacked, *args)

    def _at_once(self, states: States, args: tuple[Any, ...]) -> list[Any]:
        call = self._together
        if call is None:
            return list(self._one_by_one(states, args))
        stacked = states.stacked
        try:
            results = self._checked(partial(call, stacked, args), stacked, self._present())
            return [pytree.tree_map(lambda t, i=i: t[i], results) for i in range(len(states))]
        except Exception as error:
            # Apple's devices say so in words only.
            out_of_memory = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
            if out_of_memory and len(states) == 1:
                raise
        # Outside of the handler, whose error holds all that the failed call has allocated.
        if out_of_memory:
            self._most = (len(states) + 1) // 2
            return [result for part in states.parts(self._most) for result in self._at_once(part, args)]
        found = list(self._one_by_one(states, args))  # raises if the call is at fault, and not vmap
        self._together = None
        return found

    def _present(self) -> State:
        """Return the module's own tensors, if they are needed for a check."""
        return {} if self._is_checked else state_of(self._module)

    def _checked(self, call: Callable[[], Any], state: State, own: State) -> Any:
        """Return a call's result; raise at the first one if it reaches one of the module's own tensors, for which the
        state has another."""
        if self._is_checked:
            return call()
        with _Reached() as reached:
            result = call()
        names = {id(tensor): name for name, tensor in own.items() if name in state}
        passed = {id(tensor) for tensor in (*state.values(), *(own[name] for name in own if name not in state))}
        for parameter in reached.parameters.values():
            if (fault := fault_of_parameter(parameter, passed, names)) is not None:
                raise ValueError(fault)
        self._is_checked = True
        return result

    def _one_by_one(self, states: States, args: tuple[Any, ...]) -> Iterator[Any]:
        places = homes_of(self._module)
        for expansion in expansions_of(self._module):  # expanded layers take their plain weights
            places[expansion.name] = [(expansion.rule._buffers, PLAIN)]
        present = self._present()
        changes = True  # the network may change its inputs in place, as the first state's call tells
        with nullcontext() if states.have_masks else restored(places.values()):
            for index, state in enumerate(states.each):
                own = cloned(args) if changes else args
                if states.have_masks:
                    result = self._alone.call(state, *own)
                else:
                    for name, tensor in state.items():
                        put(places.get(name, ()), tensor)
                    result = self._checked(partial(self._function, self._module, *own), state, present)
                if index == 0:
                    changes = not same_numbers(own, args)
                yield result
