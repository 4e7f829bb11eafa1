"""What an observer needs to know of a step: its law, its controls, and how its gradient is clipped."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from lightning_sgmcmc.samplers.law import StepLaw
from lightning_sgmcmc.tensors import Control


class GroupStep(NamedTuple):
    """A step of one parameter group.

    Attributes:
        law: the sampler's law of the step.
        temperature: τ.
        gradient_multiplier: κ.
        num_data: N.
        momenta: momentum of each parameter, None without one.
    """

    law: StepLaw
    temperature: Control
    gradient_multiplier: Control
    num_data: int
    momenta: Sequence[Tensor | None]


class Clipping(NamedTuple):
    """How gradients are clipped after the observation.

    Attributes:
        limit: the largest norm, or the largest absolute value; None or 0 disables clipping.
        by: "norm" or "value".
    """

    limit: float | None = None
    by: Literal["norm", "value"] = "norm"


NO_CLIPPING = Clipping()
