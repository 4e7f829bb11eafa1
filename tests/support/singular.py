"""Linear networks at the parameters of least rank, whose learning coefficients are known."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_sgmcmc.singular import LearningCoefficientTruth, deep_linear_learning_coefficient


@dataclass(frozen=True)
class LinearNetworkProblem:
    """A deep linear network (reduced-rank regression, for two layers) whose true product has a lower rank.

    The targets are y = W*·x without noise, so w* is the minimum of the loss exactly. Each true matrix has ones on the
    first r places of its diagonal and zeros elsewhere: the local coefficient has the value of the global one only where
    all matrices have the rank of the product.
    """

    widths: tuple[int, ...]
    rank: int
    num_data: int = 200
    seed: int = 0

    @property
    def truth(self) -> LearningCoefficientTruth:
        return deep_linear_learning_coefficient(self.widths, self.rank)

    @property
    def name(self) -> str:
        return f"{'-'.join(map(str, self.widths))}, rank {self.rank}"

    def network(self) -> nn.Sequential:
        """Return the network at w*."""
        pairs = list(zip(self.widths[:-1], self.widths[1:], strict=True))
        net = nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairs))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
                parameter.diagonal()[: self.rank] = 1
        return net

    def data(self) -> tuple[Tensor, Tensor]:
        """Return inputs with the covariance I, and their targets."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.linalg.qr(torch.randn(self.num_data, self.widths[0], generator=generator, dtype=torch.float64)).Q
        x = (x * self.num_data**0.5).float()
        with torch.no_grad():
            return x, self.network()(x)


REDUCED_RANK = tuple(
    LinearNetworkProblem(widths, rank)
    for widths, rank in (
        ((3, 2, 2), 1),
        ((4, 3, 4), 1),
        ((5, 4, 3), 2),
        ((6, 4, 4), 2),
        ((8, 4, 6), 2),
    )
)
DEEP = tuple(
    LinearNetworkProblem(widths, rank)
    for widths, rank in (
        ((3, 2, 2, 3), 1),
        ((5, 2, 2, 4), 1),
        ((4, 3, 3, 5), 2),
        ((5, 3, 3, 5), 2),
        ((5, 3, 3, 4, 5), 2),
    )
)
"""Five sizes each, of multiplicity 1, whose mean loss has no term of order 1/log(n·β). The deep ones have two widths of
rank + 1: by quadrature their mean is within 0.5 % of λ already at n·β = 10⁴·γ³; others need 10⁶."""
