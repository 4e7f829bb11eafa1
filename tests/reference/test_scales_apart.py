"""Parameters whose scales differ by many powers of ten: a reference names one that does not move; tables show means."""

import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Gaussian, GaussianPrior, Posterior, reference


class Decay(nn.Module):
    """An amplitude near a million and a rate near a millionth."""

    def __init__(self, amplitude: float) -> None:
        super().__init__()
        self.amplitude = nn.Parameter(torch.tensor(amplitude))
        self.rate = nn.Parameter(torch.tensor(1e-6))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.rate, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.amplitude * torch.exp(-self.rate * x)


def test_the_reference_names_a_parameter_that_does_not_move() -> None:
    """Its draws had R-hat 1.00 and 1,000 effective ones, and the amplitude a standard deviation of 0."""
    x = torch.linspace(0, 1e6, 20)[:, None]
    y = 1e6 * torch.exp(-2e-6 * x)
    prior = GaussianPrior({"*.amplitude": 1e6, "*.rate": 5e-6})
    module = BayesianModule(Decay(8e5), Gaussian(std=1e4), prior, chain_execution="vmap", chain_start="same")
    truth = reference.sample(module, (x, y), chains=2, warmup=10, draws=10, max_depth=3, seed=0)
    assert "'net.amplitude' did not move in any chain" in truth.report.warnings[0]
    x = torch.linspace(0, 1, 20)[:, None]
    module = BayesianModule(nn.Linear(1, 1), Gaussian(std=1.0), chain_execution="vmap")
    truth = reference.sample(module, (x, x), chains=2, warmup=20, draws=10, seed=0)
    assert not any("did not move" in text for text in truth.report.warnings)


def test_a_mean_is_shown_to_a_part_of_its_standard_deviation() -> None:
    """A mean of 1,000,000.4 with a standard deviation of 0.35 was shown as 1e+06."""
    networks = [nn.Linear(1, 1) for _ in range(8)]
    for i, network in enumerate(networks):
        nn.init.constant_(network.bias, 1_000_000 + i / 8)
        nn.init.constant_(network.weight, 0.25 + i)
    posterior = Posterior.from_states(nn.Linear(1, 1), networks, Gaussian())
    shown = {row.split()[0].rpartition(".")[2]: row.split() for row in str(posterior.summary()).splitlines()[1:]}
    assert shown["bias"][2] == "1000000.44"
    assert shown["weight"][2] == "3.75"
