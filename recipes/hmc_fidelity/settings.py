"""The settings of the recipe."""

from dataclasses import dataclass

from lightning_sgmcmc.compiling import Compile


@dataclass(frozen=True)
class Truth:
    """How the recipe's own reference is made, see `reference.sample`.

    Attributes:
        chains: of Hamiltonian Monte Carlo, an even number.
        warmup, draws: iterations of each.
        length: mean length of a trajectory.
        max_depth: a trajectory has at most 2^max_depth - 1 gradients.
        data: training data at most, if it is computed; 0 is all of them.
    """

    chains: int
    warmup: int
    draws: int
    length: float
    max_depth: int
    data: int = 0


@dataclass(frozen=True)
class Settings:
    """The settings of `hmc_fidelity.yaml`.

    Attributes:
        data: "digits", "CIFAR-10" or "synthetic" (images of 16 by 16 pixels, for trials).
        sizes: training, validation and test data.
        hidden: width of the hidden layer of the network on digits.
        width: channels of the first stage of ResNet-20-FRN-Swish on images.
        prior_std: of all weights and biases.
        reference: file of the HMC predictive of the test data (see `cifar10_hmc`); None computes one.
        truth: how it is computed.
        seeds: fits of a method at its step size.
        trial: share of the steps of the fits that choose the step size, in (0, 1].
        chains: of a method.
        steps: optimizer steps of each chain, warm start and burn-in included.
        warm_start, warm_lr: share of the steps that are Adam's, at the start of each chain, and its step size.
        burn_in: share of the steps after the warm start that come before the first draw.
        draws: of each chain.
        batch: batch size.
        cycles: of the cyclical schedule.
        ladder: temperatures of replica exchange, one for each chain.
        lr: step sizes to choose from, by method.
        compile, precision: see `BayesianModule` and the trainer.
    """

    data: str
    sizes: tuple[int, int, int]
    hidden: int
    width: int
    prior_std: float
    reference: str | None
    truth: Truth
    seeds: int
    trial: float
    chains: int
    steps: int
    warm_start: float
    warm_lr: float
    burn_in: float
    draws: int
    batch: int
    cycles: int
    ladder: tuple[float, ...]
    lr: dict[str, tuple[float, ...]]
    compile: Compile
    precision: str

    @property
    def train(self) -> int:
        """N: without a file of the reference as many training data as its chains can have."""
        most = self.truth.data if self.reference is None else 0
        return min(self.sizes[0], most) if most else self.sizes[0]

    @property
    def work(self) -> float:
        """The optimizer steps of all fits: one of images on a GPU takes about as long as one of digits on a CPU."""
        fits = sum(self.trial * len(ladder) + self.seeds - (self.trial == 1) for ladder in self.lr.values())
        return float(fits * self.steps)
