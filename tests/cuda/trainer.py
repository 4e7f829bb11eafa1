"""What makes a `pytorch_lightning.Trainer` train on the stand-in."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import Accelerator
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import SingleDeviceStrategy

from tests.cuda.tensor import CUDA


class StandInAccelerator(Accelerator):
    """An accelerator that is there."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [CUDA]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "cuda"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


class StandInStrategy(SingleDeviceStrategy):
    """One device; the module stays there after a fit, since a graph may hold its parameters."""

    def teardown(self) -> None: ...


def stand_in_trainer(precision: str = "bf16-mixed", **options: Any) -> pl.Trainer:
    """Return a trainer on the stand-in.

    Args:
        precision: "bf16-mixed" or "32-true".
        options: the trainer's other arguments.
    """
    plugin = MixedPrecision("bf16-mixed", "cuda") if precision == "bf16-mixed" else None
    strategy = StandInStrategy(CUDA, accelerator=StandInAccelerator(), precision_plugin=plugin)
    return pl.Trainer(strategy=strategy, **options)
