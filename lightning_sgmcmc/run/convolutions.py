"""cuDNN's search for the fastest convolutions, during a fit whose batches have one shape."""

from typing import Any

import torch

from lightning_sgmcmc.batches.loader import ResumableLoader


class FastConvolutions:
    """Turns on `torch.backends.cudnn.benchmark` for a fit, and restores it.

    cuDNN then times its algorithms for each shape that it meets, and keeps the fastest. `Trainer(benchmark=True)` does
    so in every run; `Trainer(deterministic=True)` forbids it.
    """

    def __init__(self) -> None:
        self._before: bool | None = None

    def begin(self, device: torch.device, loader: Any) -> None:
        """Turn the search on where it pays.

        Args:
            device: the run's.
            loader: of the training data.
        """
        if pays(device, loader):
            self._before = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = True

    def end(self) -> None:
        """Restore the setting."""
        if self._before is not None:
            torch.backends.cudnn.benchmark, self._before = self._before, None


def pays(device: torch.device, loader: Any) -> bool:
    """Return whether the search is worth its time: on CUDA, for data of one shape, unless the run is deterministic."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return False
    return isinstance(loader, ResumableLoader) and hasattr(loader.dataset, "whole_batch")
