"""Preferences between two items, from one network that scores an item."""

from typing import Any

from torch import Tensor, nn


class PairwiseScore(nn.Module):
    """Scores an item and compares two: the output is score(a) - score(b), the log odds that a is preferred.

        P(a is preferred to b | θ) = sigmoid(score(a) - score(b))

    With the likelihood `Bernoulli` it is Bradley and Terry's model. A batch is ((a, b), y): the items' inputs, first
    axis n each, and y = 1 if a is preferred, else 0; of (winner, loser) pairs all y are 1. Predictions of (a, b) have
    the probabilities (n, 2) that b or a is preferred. A constant added to all scores changes nothing, so only the prior
    fixes it: compare scores, not their level.

    Args:
        net: returns a score for each item, shape (n,) or (n, 1).

    Source: Bradley & Terry 1952.

    >>> import torch
    >>> compare = PairwiseScore(nn.Linear(2, 1, bias=False))
    >>> a, b = torch.randn(3, 2), torch.randn(3, 2)
    >>> torch.equal(compare(a, b), -compare(b, a))
    True
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise TypeError(f"net should be a torch module that scores an item, got a {type(net).__name__}")
        self.net = net

    def forward(self, a: Any, b: Any) -> Tensor:
        """Return score(a) - score(b), the network's shape.

        Args:
            a, b: inputs of the items, as the network takes them.

        Raises:
            ValueError: if the network returns no single score for each item.
        """
        first: Tensor = self.net(a)
        second: Tensor = self.net(b)
        if first.dim() != 1 and first.shape[1:] != (1,):
            raise ValueError(
                f"PairwiseScore needs one score for each item, shape (n,) or (n, 1), and net returned "
                f"{tuple(first.shape)}: change its last layer"
            )
        return first - second
