"""Independent random streams, each a function of the run's seed and of names."""

import hashlib
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

WITHOUT_GENERATOR = ("cpu", "meta")
"""Types of devices without a default generator beside the CPU's."""


def device_text(device: torch.device) -> str:
    """Return what decides a device's random numbers, which differ by the number of a GPU's multiprocessors."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} with {found.multi_processor_count} multiprocessors"


def derive_seed(seed: int, *names: int | str) -> int:
    """Return a seed in [0, 2^63), a function of `seed` and all `names`, the same on every machine and rank.

    >>> derive_seed(0, "noise", 1)
    6545564728581758268
    >>> derive_seed(0, "noise", 2) != derive_seed(0, "noise", 1)
    True
    """
    text = "/".join(str(part) for part in (seed, *names))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def fit_seed(seed: int, fit: int) -> int:
    """Return the seed of a module's fit: the run's for its first one, and another one for each later fit."""
    return derive_seed(seed, "fit", fit) if fit else seed


def reseed(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's default generators of the CPU and of `device` alone: `torch.manual_seed` takes 30 times as long."""
    torch.default_generator.manual_seed(seed)
    if device is None or device.type in WITHOUT_GENERATOR:
        return
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    if generators:
        generators[module.current_device() if device.index is None else device.index].manual_seed(seed)
    else:
        module.manual_seed(seed)


def reseed_everything(seed: int) -> None:
    """Seed the default generators of torch (CPU), NumPy and Python's `random`, from which data sets may draw."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (augmentations of data sets draw from this generator)
    random.seed(seed)


class TorchStates(AbstractContextManager[None]):
    """Where torch's default generators are now; they are there again at a context's end."""

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._cpu = torch.default_generator.get_state()
        own = {device for device in devices if device.type not in WITHOUT_GENERATOR}
        self._states = {device: torch.get_device_module(device).get_rng_state(*_place(device)) for device in own}

    def restore(self) -> None:
        """Set the generators back to these states."""
        torch.default_generator.set_state(self._cpu)
        for device, state in self._states.items():
            torch.get_device_module(device).set_rng_state(state, *_place(device))

    def __exit__(self, *error: object) -> None:
        self.restore()


def _place(device: torch.device) -> tuple[torch.device, ...]:
    """Return what names a device to its module's functions; Apple's have one device and take no argument."""
    return () if device.type == "mps" else (device,)


class GeneratorStates(TorchStates):
    """Where torch's, NumPy's and Python's default generators are, from which data sets and networks may draw."""

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        super().__init__(devices)
        self._numpy, self._python = np.random.get_state(), random.getstate()  # noqa: NPY002 (data sets may draw from it)

    def restore(self) -> None:
        super().restore()
        np.random.set_state(self._numpy)  # noqa: NPY002
        random.setstate(self._python)


def unchanged_torch_generators(devices: Sequence[torch.device]) -> AbstractContextManager[None]:
    """Restore torch's default generators, as they are now, at a context's end; see `TorchStates`."""
    return TorchStates(devices)


def unchanged_generators(devices: Sequence[torch.device]) -> AbstractContextManager[None]:
    """Restore the default generators, as they are now, at a context's end; see `GeneratorStates`."""
    return GeneratorStates(devices)


class OwnDraws(TorchDispatchMode):
    """Within the context, this thread's operations draw from generators of this object, seeded like the default ones by
    `reseed`.

    torch's distributions take no generator, and the default ones belong to all threads of a program.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        places = {"cpu": torch.device("cpu")}
        places |= {} if device.type in WITHOUT_GENERATOR else {device.type: device}
        self._generators = {name: torch.Generator(place).manual_seed(seed) for name, place in places.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "generator" or value is not None}
        taking = _taking_generator(func)
        if taking is None or any(isinstance(one, torch.Generator) for one in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        devices = [leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        device = torch.device(devices[0] if devices else kwargs.get("device") or "cpu")
        own = self._generators.get(device.type)
        return func(*args, **kwargs) if own is None else taking(*args, **kwargs, generator=own)


@cache
def _taking_generator(operation: Any) -> Any:
    """Return the form of a drawing operation that takes a generator; None if it has none, or does not draw."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return None
    forms = [operation, *(getattr(operation.overloadpacket, name) for name in operation.overloadpacket.overloads())]
    named = [{argument.name for argument in form._schema.arguments} for form in forms]
    return next((form for form, names in zip(forms, named, strict=True) if names == named[0] | {"generator"}), None)
