"""The settings of the recipe."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The settings of `samplers_bench.yaml`.

    Attributes:
        repeats: runs of each sampler on each problem, at the step size that another seed has chosen.
        chains: chains of a run on densities and regressions, computed at once.
        gradients: gradient evaluations of each of these chains.
        burn_in: share of the steps before the first draw.
        noise: standard deviation of the noise of gradients, over the root mean square of the target's gradient.
        batch: batch size of the regressions.
        noises: kinds of the gradients' noise on densities.
        networks: those that are sampled.
        steps: of each of four chains on a network, behind the warm start.
        warm_start: steps of Adam on a network.
        draws: of each chain on a network.
        network_factors: step sizes on networks, over the largest stable one.
        factors: step sizes elsewhere, over the largest stable one of the full gradient.
    """

    repeats: int
    chains: int
    gradients: int
    burn_in: float
    noise: float
    batch: int
    noises: tuple[str, ...]
    networks: tuple[str, ...]
    steps: int
    warm_start: int
    draws: int
    network_factors: tuple[float, ...]
    factors: tuple[float, ...]

    @property
    def work(self) -> float:
        """The steps of all runs; a step of a network takes as long as about twenty others."""
        runs = self.repeats + 4  # about four choose the step size
        problems = 4 * len(self.noises) + 2
        return float(runs * (problems * self.gradients + 20 * len(self.networks) * (self.steps + self.warm_start)))
