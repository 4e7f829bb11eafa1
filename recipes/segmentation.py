"""Segmentation of synthetic shapes by a small U-Net: methods at the same number of gradient evaluations.

Images of 24×24 noisy pixels show discs, squares and triangles on a background; the pixels at their borders have no
label (`ignore_index`). An example is an image, whose log-likelihood is the sum over its pixels, so at temperature 1 its
576 dependent pixels count like 576 data. Every method of `equal_cost` in the table makes the gradient evaluations
of one network in the given number of epochs, over all its chains. The test has 200 images, and 200 with rings, a shape
of no class: the AUROC says how well each pixel's entropy and mutual information separate a ring's pixels from the rest
of their image.

Measured (full, 8 seeds, standard errors up to 0.035 in the NLL of one chain, 0.018 in the others' and 0.02 in the IoU):

    method                 NLL a pixel   ECE     IoU     AUROC of rings by entropy
    ensemble               0.205         0.043   0.704   0.928
    4 chains               0.264         0.026   0.540   0.919
    MC dropout             0.294         0.041   0.741   0.844
    posterior, one chain   0.339         0.047   0.612   0.910
    cyclical SGHMC, cold   0.342         0.047   0.611   0.912
    one network            0.379         0.052   0.743   0.843

The ensemble has the lowest NLL and the best AUROC, one network the best IoU. Samples separate the rings nearly as well
as the ensemble, and their IoU is far lower: the prior and the temperature of a posterior whose likelihood counts each
pixel were not tuned. In a fifth of this length (quick, 2 seeds) one network has 0.235 ± 0.010, one chain 0.261 ± 0.009,
and the ensemble, with a quarter of the gradients each, 0.325 ± 0.006.

Quick is 2 seeds of 36 epochs, full 8 of 180.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import kept_samples, quiet_trainer, resumed_fit, silence_lightning

if TYPE_CHECKING:
    from torch import Tensor, nn

SIDE = 24
PIXELS = SIDE * SIDE
IGNORED = -100
RING = 4
"""Label of the shape that no training image has."""
NOISE = 0.35


@dataclass(frozen=True)
class Settings:
    """The settings of `segmentation.yaml`.

    Attributes:
        seeds: number of repeats.
        epochs: of one network; every method makes as many gradient evaluations.
        sizes: training, validation and test images.
        methods: of each row the function of `equal_cost.methods`, "by", and its setting. Since the loss of an image is
            a sum over its pixels, "lr" of a sampler is divided by their number.
    """

    seeds: int
    epochs: int
    sizes: tuple[int, int, int]
    methods: dict[str, dict[str, Any]]

    @property
    def work(self) -> float:
        """The gradient evaluations of all fits."""
        return float(self.seeds * self.epochs * self.sizes[0] * len(self.methods))


def run(options: Options) -> list[Row]:
    """Run every method with every seed, and return the table."""
    settings = read_settings(Settings, options)
    seeds, methods = options.seeds(settings.seeds), options.chosen(settings.methods)
    jobs = [(method, seed) for seed in seeds for method in methods]
    outcomes = run_jobs(one, jobs, options, settings)
    return [
        mean_row(method, metric, [outcomes[method, seed][metric] for seed in seeds])
        for method in methods
        for metric in outcomes[method, seeds[0]]
    ]


def one(method: str, seed: int, settings: Settings, options: Options) -> dict[str, float]:
    """Fit one method with one seed; return its figures."""
    from lightning_sgmcmc.namespace import pl
    from lightning_sgmcmc.recipes.equal_cost.methods import METHODS as FUNCTIONS

    silence_lightning()
    problem = shapes(seed, settings)
    problem.setup("fit")
    pl.seed_everything(seed, verbose=False)
    setting = dict(settings.methods[method])
    if "prior_std" in setting:
        setting["lr"] /= PIXELS
    fit = FUNCTIONS[setting.pop("by")](problem, setting)
    trainer = quiet_trainer(
        accelerator="cpu",
        max_steps=fit.steps,
        callbacks=[*fit.callbacks, kept_samples()],
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    start = time.perf_counter()
    resumed_fit(trainer, fit.module, problem)
    seconds = time.perf_counter() - start
    assert fit.module.posterior is not None
    found = scores(fit.module.posterior, problem)
    evaluations = fit.module.chains.counters.gradient_evaluations * fit.module.num_chains
    return found | {"gradient evaluations": float(evaluations), "seconds": seconds}


def scores(posterior: Any, problem: Any) -> dict[str, float]:
    """Return the test images' metrics, and the AUROC of the pixels of rings."""
    import torch
    from torchmetrics.functional.classification import binary_auroc

    test = problem.splits[2]
    probabilities = posterior.predict(test.inputs).probabilities
    likelihood = posterior.model.likelihood
    density = torch.zeros(len(test.targets))
    terms = {"dense_probabilities": probabilities}
    metrics = likelihood.metrics(terms, density, test.targets, 1.0)
    found = {name: float(metrics[name]) for name in ("accuracy", "iou", "pixel_nll", "ece")}
    inputs, labels = problem.rings
    prediction, counts = posterior.predict(inputs), labels != IGNORED
    is_ring = (labels[counts] == RING).long()
    for name in ("entropy", "mutual_information"):
        values = getattr(prediction, name)[counts].float()
        found[f"AUROC of rings by {name.replace('_', ' ')}"] = float(binary_auroc(values / (1 + values), is_ring))
    return found


# -- data and network -------------------------------------------------------------------------------------------------


def shapes(seed: int, settings: Settings) -> Any:
    """Return the problem: images of shapes, a likelihood of pixels, and a U-Net."""
    import torch

    from lightning_sgmcmc import PixelCategorical
    from lightning_sgmcmc.datamodules import Split
    from lightning_sgmcmc.recipes.equal_cost.problems import Problem
    from lightning_sgmcmc.seeding import derive_seed

    class Shapes(Problem):
        def load(self) -> tuple[Split, Split, Split]:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "shapes"))
            first, second, third = (Split(*draw(count, 3, generator)) for count in settings.sizes)
            self.num_classes = 4
            self.rings = draw(settings.sizes[2], 4, generator)
            return first, second, third

        def likelihood(self) -> Any:
            return PixelCategorical(IGNORED)

        def net(self, dropout: float = 0.0) -> Any:
            return u_net(1, 4, 8, dropout)

    setting = {"source": "shapes", "batch": 10, "epochs": settings.epochs, "sizes": list(settings.sizes)}
    return Shapes("shapes", setting, ".", seed)


def draw(count: int, kinds: int, generator: Any) -> "tuple[Tensor, Tensor]":
    """Return images (n, 1, 24, 24) and labels (n, 24, 24) with up to three shapes each, the last kind among them."""
    import torch
    from torch.nn import functional as F

    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    labels = torch.zeros(count, SIDE, SIDE, dtype=torch.int64)
    images = torch.zeros(count, SIDE, SIDE)
    for place in range(3):
        y, x = 6 + (SIDE - 12) * torch.rand(2, count, 1, 1, generator=generator)
        size = 5 + 3 * torch.rand(count, 1, 1, generator=generator)
        kind = torch.randint(1, 4, (count, 1, 1), generator=generator)
        if place == 2:
            seen = torch.rand(count, 1, 1, generator=generator) < 0.5
            kind = torch.where(seen, kind, 0) if kinds == 3 else torch.full_like(kind, RING)
        up, right = (rows - y) / size, (columns - x) / size
        radius = (up.square() + right.square()).sqrt()
        inside = {
            1: radius < 1,
            2: torch.maximum(up.abs(), right.abs()) < 0.85,
            3: (up.abs() < 1) & (right.abs() < (1 + up) / 2),
            RING: (radius < 1.15) & (radius > 0.45),
        }
        brightness = 0.7 + 0.6 * torch.rand(count, 1, 1, generator=generator)
        for name, mask in inside.items():
            own = mask & (kind == name)
            labels, images = torch.where(own, name, labels), torch.where(own, brightness, images)
    float_labels = labels[:, None].float()
    largest, least = F.max_pool2d(float_labels, 3, 1, 1), -F.max_pool2d(-float_labels, 3, 1, 1)
    labels[(largest != least)[:, 0]] = IGNORED  # at borders
    noisy = images + NOISE * torch.randn(images.shape, generator=generator)
    return noisy[:, None], labels


def u_net(inputs: int, outputs: int, width: int, dropout: float = 0.0) -> "nn.Module":
    """Return a U-Net with two levels: widths w, 2w, 4w, convolutions of 3×3 with group norm and ReLU."""
    import torch
    from torch import nn

    def block(before: int, after: int) -> nn.Module:
        layers = [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU())

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = block(inputs, width), block(width, 2 * width)
            self.bottom = nn.Sequential(block(2 * width, 4 * width), nn.Dropout(dropout))
            self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
            self.up_first = nn.ConvTranspose2d(2 * width, width, 2, 2)
            self.join_second, self.join_first = block(4 * width, 2 * width), block(2 * width, width)
            self.head = nn.Sequential(nn.Dropout(dropout), nn.Conv2d(width, outputs, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.first(x)
            second = self.second(nn.functional.max_pool2d(first, 2))
            bottom = self.bottom(nn.functional.max_pool2d(second, 2))
            joined = self.join_second(torch.cat([self.up_second(bottom), second], 1))
            head: torch.Tensor = self.head(self.join_first(torch.cat([self.up_first(joined), first], 1)))
            return head

    return UNet()
