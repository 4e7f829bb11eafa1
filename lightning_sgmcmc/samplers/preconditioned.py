"""What samplers with a preconditioner share."""

import torch
from torch import Tensor

from lightning_sgmcmc.samplers.base import Sampler


class PreconditionedSampler(Sampler):
    """Base of the samplers whose preconditioner is computed in each step."""

    def _kept(self, params: list[Tensor]) -> list[Tensor]:
        """Return scratch tensors in the parameters' shapes, reused at every step and not part of the state."""
        scratch: dict[Tensor, Tensor] = self.__dict__.setdefault("_scratch", {})
        for p in params:
            if p not in scratch:
                scratch[p] = torch.empty_like(p)
        return [scratch[p] for p in params]
