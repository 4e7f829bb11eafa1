"""Samples' parameters in 16 bits: as they are, or as their differences to a base."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.checks import check_choice

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Narrow:
    """How a store keeps float32 parameters: rounded to 16 bits, after the base is subtracted; float32 again on reading.

        stored = round(θ - base),   read = stored + base

    Buffers, such as running statistics, and scales of a prior are kept as they are.
    """

    dtype: str
    base: Mapping[str, Tensor] = field(default_factory=dict)

    def check(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise unless the parameters of a network are float32."""
        for name, parameter in parameters.items():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                raise ValueError(
                    f"dtype='{self.dtype}' rounds float32 parameters, and '{name}' is {parameter.dtype}: leave dtype "
                    "out, or sample a float32 network"
                )

    def narrowed(self, sample: PosteriorSample) -> PosteriorSample:
        """Return a sample as it is stored."""
        self.check(sample.parameters)
        return replace(sample, parameters={name: self._narrow(name, p) for name, p in sample.parameters.items()})

    def _narrow(self, name: str, parameter: Tensor) -> Tensor:
        if not parameter.is_floating_point():
            return parameter
        difference = parameter - self.base[name].to(parameter.device) if name in self.base else parameter
        found = difference.to(DTYPES[self.dtype])
        if bool((found.isinf() & parameter.isfinite()).any()):
            raise ValueError(f"'{name}' has numbers above the largest {self.dtype}: pass dtype='bfloat16'")
        return found

    def widened(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return stored parameters as float32."""
        kind, found = DTYPES[self.dtype], dict(parameters)
        for name, tensor in parameters.items():
            if tensor.dtype != kind:
                continue
            found[name] = tensor.float()
            if name in self.base:
                base = self.base[name]
                if base.shape != tensor.shape or base.dtype != torch.float32:
                    raise ValueError(
                        f"the samples' base has '{name}' of shape {tuple(base.shape)} and {base.dtype}, and a sample "
                        f"of {tuple(tensor.shape)}: restore base.safetensors"
                    )
                found[name] += base
        return found


def narrow_dtype(dtype: Any) -> str | None:
    """Return the name of a narrow type, given by its name or as torch has it; None for None and float32."""
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name in (None, "float32"):
        return None
    check_choice("dtype", name, ("float32", *DTYPES))
    return name
