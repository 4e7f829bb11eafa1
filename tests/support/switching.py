"""Switching orders of the small data set."""

from typing import Any

import torch

from lightning_sgmcmc import SwitchingOrder
from lightning_sgmcmc.batches.orders import OrderSpec
from tests.support.problems import BATCH, NUM_DATA


def order(
    eta: float = 1.0, dt: Any = 0.02, num_data: int = NUM_DATA, batch: int = BATCH, **options: Any
) -> SwitchingOrder:
    return SwitchingOrder(OrderSpec(num_data, batch, 3, **options), switching_time=eta, time_step=dt)


def states(made: SwitchingOrder, count: int) -> torch.Tensor:
    return torch.tensor([made.state(k) for k in range(count)])
