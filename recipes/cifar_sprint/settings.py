"""The settings of the recipe."""

from dataclasses import dataclass

from lightning_sgmcmc.checks import check_within
from lightning_sgmcmc.compiling import Compile

RATE = 3e13
"""Floating-point operations per second that a GPU is assumed to sustain, for predicted times alone."""
SYNTHETIC, CIFAR = "synthetic", "CIFAR-10"


@dataclass(frozen=True)
class Settings:
    """The settings of `cifar_sprint.yaml`.

    Attributes:
        data: "CIFAR-10" or "synthetic".
        num_data, num_test, strength: numbers of synthetic images, and their patterns' standard deviation.
        chains: numbers C of stacked chains, and of an ensemble's networks.
        epochs: the budget as passes over the training images by all chains of a fit together, so each of C chains has
            epochs/C; None if `seconds` is the budget.
        seconds: the budget as training time of each fit, from the speed of its first steps.
        lengths: shares of the budget; an ensemble and a single network are trained for each, in a fit of its own.
        cycles, exploration, samples: M, share of a cycle without noise, and samples of a chain in each cycle.
        burn_in: share of the draws so far, the oldest ones, that an average leaves out.
        batch: images per batch.
        lr, friction, temperature, prior_std: of the sampler, and of the Gaussian prior of all weights.
        filters, patch: number and side of the whitening filters.
        widths, groups, scale: see `SprintNetwork`.
        augment: crop and mirror training images (crop and erase synthetic ones).
        seeds: number of repeats.
        compile: whether to compile the network, see `BayesianModule`.
        precision: of the trainer.
        folder: images to use instead.
        outside_folder: images of unknown classes to use instead of SVHN.
        size: height and width of the folders' images.
        limit: number of images that are read of each part of a folder; None reads all.
    """

    data: str
    num_data: int
    num_test: int
    strength: float
    chains: tuple[int, ...]
    epochs: int | None
    seconds: float | None
    lengths: tuple[float, ...]
    cycles: int
    exploration: float
    samples: int
    burn_in: float
    batch: int
    lr: float
    friction: float
    temperature: float
    prior_std: float
    filters: int
    patch: int
    widths: tuple[int, ...]
    groups: int
    scale: float
    augment: bool
    seeds: int
    compile: Compile
    precision: str
    folder: str | None = None
    outside_folder: str | None = None
    size: int = 32
    limit: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.seconds is None):
            raise ValueError(
                f"the budget is epochs or seconds, got epochs={self.epochs} and seconds={self.seconds}: set one of "
                "them, and the other to null"
            )
        check_within("burn_in", self.burn_in, "[0, 1)")
        if not self.lengths or any(not 0 < length <= 1 for length in self.lengths) or max(self.lengths) < 1:
            raise ValueError(f"lengths must be in (0, 1], one of them 1, got {self.lengths}")

    @property
    def work(self) -> float:
        """Floating-point operations of all fits."""
        fits = self.seeds * (len(self.chains) * (2 + sum(self.lengths)) + sum(self.lengths))
        return fits * (RATE * self.seconds if self.seconds is not None else self._operations)

    @property
    def _operations(self) -> float:
        """Those of one budget in epochs: a gradient takes three times as many as an output."""
        import torch

        from lightning_sgmcmc.recipes.cifar_sprint.network import SprintNetwork
        from lightning_sgmcmc.recipes.shared.costs import forward_flops
        from lightning_sgmcmc.recipes.shared.synthetic_images import SIDE

        side = SIDE if self.data == SYNTHETIC else self.size

        def network() -> SprintNetwork:
            filters = torch.empty(self.filters, 3, self.patch, self.patch)
            return SprintNetwork(10, filters, self.widths, self.groups, self.scale)

        return 3.0 * forward_flops(network, (3, side, side)) * self.num_data * (self.epochs or 0)
