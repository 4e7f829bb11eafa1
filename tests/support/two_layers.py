"""A network of two layers to which subclasses add parts, and its data."""

import torch
from torch import Tensor, nn

GENERATOR = torch.Generator().manual_seed(5)
INPUTS = torch.randn(24, 6, generator=GENERATOR)
TARGETS = INPUTS[:, :2].sin()
LR, STEPS = 0.02, 24


class Net(nn.Module):
    """Two layers; subclasses add parts, and change what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
        self.more()

    def more(self) -> None: ...

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x).tanh()))
