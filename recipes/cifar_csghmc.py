"""ResNet-20 on CIFAR by momentum SGD, SGHMC and contour SGHMC, temperature fixed or annealed (CSGLD, Table 2).

`full` is the paper's setting, for a GPU: all training images, cropped and mirrored, batch 1000, 1,000 epochs, a sample
every 10 epochs after 400, ten repeats; ε = 2e-7 and τ = 0.01 throughout, or (sa…) ε = 2e-6, divided by 1.01 an epoch
after 400, and τ divided by 1.01 an epoch from the start, as in the paper's text; momentum 0.9; the weight decay 25 of
the full energy, a Gaussian prior of standard deviation 1/5; m = 200, Δu = 1000 (CIFAR-10) or 5000 (CIFAR-100), ω =
10/(k^0.75 + 1000), the high-order scheme with ρ = 1, ζ = 10⁶ or 3·10⁶. It runs in bfloat16 mixed precision and, on a
GPU, compiled. `quick` runs the same parts on synthetic images of that shape, with a small residual network, Δu, ζ and
annealing scaled to them. `--set folder=DIR` takes the images of DIR/train/<class>/ and DIR/test/<class>/ instead.

What the paper leaves open: augmentation (here CIFAR's usual one, since the paper's 94 % are out of reach without it),
the first edge (here Δu, as in the later programs), the energy (the data's alone, as in all of the authors' programs),
limits of the multiplier (here ±5, as in the later programs) and the weights. At this ζ, π(J)^ζ is 0 for all samples but
one; the later program weights by π(J), which is `weight_exponent` 1/ζ, and so does this recipe. "best" is the best
accuracy of a sample on the test images, as in the paper; with `held_out` above 0 (as in `quick`) it is the accuracy of
the sample that is best on that share of the training images.

Measured (quick, 26 epochs, 3 seeds; accuracy of the average in %): M-SGD 64 ± 9, SGHMC 61 ± 8, CSGHMC 53 ± 11; annealed
91.9 ± 0.9, 94.1 ± 0.4, 94.3 ± 0.6 (an earlier run of 40 epochs: 85.6 ± 2.5, 83.2 ± 3.3, 81.5 ± 4.5; 98.4 ± 0.1, 98.0 ±
0.5, 98.1 ± 0.5). All parts work together and annealing helps much, as in the paper. These images, which are not
augmented, cannot show the paper's differences within a row of three. `full` has not been run: no GPU was available.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_sgmcmc.compiling import Compile
from lightning_sgmcmc.recipes.shared.costs import forward_flops
from lightning_sgmcmc.recipes.shared.image_sets import photographs
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import prepare_run, quiet_trainer, resumed_fit

if TYPE_CHECKING:
    from torch import nn

    from lightning_sgmcmc.namespace import pl


METHODS = ("M-SGD", "SGHMC", "CSGHMC", "saM-SGD", "saSGHMC", "saCSGHMC")
PAPER = {
    "CIFAR-10": ((90.02, 92.03), (90.01, 91.98), (90.87, 92.85), (93.83, 94.25), (93.80, 94.24), (94.06, 94.33)),
    "CIFAR-100": ((61.41, 67.04), (61.46, 66.43), (63.97, 68.94), (69.18, 71.83), (69.24, 71.98), (70.18, 72.67)),
}
FRICTION = 0.1
TEMPERATURE = 0.01
ANNEALING = 1.01
PRIOR_STD = 0.2
CIFAR_IMAGES, SYNTHETIC_IMAGES = 50_000, 1000


@dataclass(frozen=True)
class Setting:
    """Settings that differ between the data sets, and between quick and full.

    Attributes:
        data: "CIFAR-10", "CIFAR-100", "synthetic" or a folder.
        epochs, every: epochs of the run, and between samples.
        batch: images per batch.
        lr: of fixed and of annealed runs, in units of the mean potential.
        width, zeta: Δu and ζ.
        seeds: runs.
    """

    data: str
    epochs: int
    every: int
    batch: int
    lr: tuple[float, float]
    width: float
    zeta: float
    seeds: int

    @property
    def name(self) -> str:
        """What jobs and rows call it."""
        return Path(self.data).name

    @property
    def divisor(self) -> float:
        """The divisor of ε and τ per epoch: 1.01 in a run of 1,000 epochs, with the same total in a shorter one."""
        return float(ANNEALING ** (1000 / self.epochs))


@dataclass(frozen=True)
class Settings:
    """The settings of all data sets, and what they have in common.

    Attributes:
        sets: one entry for each data set.
        augment: crop and mirror training images.
        held_out: share of the training images on which the best sample is chosen; 0 chooses it on the test images.
        compile: whether to compile the network, see `BayesianModule`.
        precision: of the trainer.
        folder: images to use instead, with the settings of the first entry.
        size: height and width of a folder's images.
        limit: number of training images that are read of a folder; None reads all.
    """

    sets: tuple[Setting, ...]
    augment: bool
    held_out: float
    compile: Compile
    precision: str
    folder: str | None = None
    size: int = 32
    limit: int | None = None

    @property
    def chosen(self) -> tuple[Setting, ...]:
        """The data sets to run."""
        return self.sets if self.folder is None else (replace(self.sets[0], data=self.folder),)

    @property
    def work(self) -> float:
        """Gradient evaluations times the network's floating-point operations."""
        total = 0.0
        for setting in self.sets:
            count = SYNTHETIC_IMAGES if setting.data == "synthetic" else CIFAR_IMAGES
            flops = forward_flops(functools.partial(network_of, setting.data, 10), (3, 32, 32))
            total += len(METHODS) * setting.seeds * setting.epochs * count * flops
        return total


def run(options: Options) -> list[Row]:
    """Run all methods, return the table."""
    rows: list[Row] = []
    settings = read_settings(Settings, options)
    require(*(datamodule(setting, settings, options) for setting in settings.chosen))
    methods = options.chosen(METHODS)
    cases = [(setting, method, options.repeated(setting.seeds)) for setting in settings.chosen for method in methods]
    jobs = [(method, seed, setting) for setting, method, seeds in cases for seed in seeds]
    outcomes = run_jobs(one, jobs, options, settings, in_turn=options.full)
    for setting, method, seeds in cases:
        found = [outcomes[method, seed, setting] for seed in seeds]
        paper = PAPER.get(setting.data, ((None, None),) * len(METHODS))[METHODS.index(method)]
        for place, name in enumerate(("best point estimate", "model average")):
            values = [outcome[place] for outcome in found]
            rows.append(mean_row(method, f"{setting.name}: accuracy %, {name}", values, paper[place]))
        sizes = [outcome[2] for outcome in found]
        rows.append(mean_row(method, f"{setting.name}: effective number of samples", sizes))
    return rows


def network_of(data: str, classes: int) -> "nn.Module":
    """Return ResNet-20, or for quick settings a small network."""
    from lightning_sgmcmc.recipes.shared.resnet import resnet, resnet20

    return resnet20(classes) if data in PAPER else resnet(1, 8, classes)


def callbacks_of(method: str, setting: Setting) -> "list[pl.Callback]":
    """Return the callbacks of a method: schedule, samples, average, and the contour."""
    from lightning_sgmcmc import Annealing, ContourRules, DecayingStepSize
    from lightning_sgmcmc.callbacks import BayesianModelAverage, ContourGradient, SampleCollector, SamplingSchedule

    annealed = method.startswith("sa")
    callbacks: list[pl.Callback] = [
        SamplingSchedule(
            burn_in_epochs=setting.epochs * 2 // 5,
            every_n_epochs=setting.every,
            lr_annealing=Annealing(setting.divisor, setting.epochs * 2 // 5) if annealed else None,
            temperature_annealing=Annealing(setting.divisor) if annealed else None,
        ),
        SampleCollector(in_memory=True),
        BayesianModelAverage(),
    ]
    if "CSGHMC" in method:
        rules = ContourRules(
            zeta=setting.zeta,
            scheme="high-order",
            weighting="bin",
            weight_exponent=1 / setting.zeta,
            min_multiplier=-5.0,
            max_multiplier=5.0,
        )
        callbacks.append(
            ContourGradient(
                rules,
                num_bins=200,
                first_edge=setting.width,
                width=setting.width,
                step_size=DecayingStepSize(10, 0.75, 1000),
                include_prior=False,
            )
        )
    return callbacks


def one(method: str, seed: int, setting: Setting, settings: Settings, options: Options) -> tuple[float, float, float]:
    """Train and test one network; return the accuracies in % of the best sample and of the average, and the ESS."""
    from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior
    from lightning_sgmcmc.namespace import pl
    from lightning_sgmcmc.samplers import SGHMC

    prepare_run(options)
    pl.seed_everything(options.seed + seed, verbose=False)
    data = datamodule(setting, settings, options)
    data.setup("fit")
    kind = "CIFAR-10" if options.full else "synthetic"
    module = BayesianModule(
        net=network_of(kind, data.num_classes),
        likelihood=Categorical(),
        prior=GaussianPrior(PRIOR_STD),
        sampler=functools.partial(SGHMC, friction=FRICTION),
        lr=setting.lr[method.startswith("sa")],
        temperature=0.0 if "M-SGD" in method else TEMPERATURE,
        compile=settings.compile,
    )
    trainer = quiet_trainer(
        accelerator=options.accelerator(),
        precision=settings.precision,
        max_epochs=setting.epochs,
        check_val_every_n_epoch=setting.every,
        callbacks=callbacks_of(method, setting),
        enable_progress_bar=options.full,
    )
    resumed_fit(trainer, module, data)
    held_out = [member["accuracy"] for member in module.evaluations["val"].members] if settings.held_out else []
    trainer.test(module, datamodule=data, verbose=False)
    evaluation = module.evaluations["test"]
    on_test = [member["accuracy"] for member in evaluation.members]
    best = on_test[held_out.index(max(held_out))] if held_out else max(on_test)
    assert module.posterior is not None
    return 100 * best, 100 * evaluation.bma["accuracy"], module.posterior.weight_efficiency * len(module.posterior)


def datamodule(setting: Setting, settings: Settings, options: Options) -> Any:
    """Return CIFAR or a folder's images; or synthetic images: a random pattern for each class, weak in its noise."""
    import torch

    from lightning_sgmcmc.datamodules import ArrayDataModule, Split

    if setting.data != "synthetic":
        return photographs(
            setting.data,
            options,
            setting.batch,
            held_out=settings.held_out,
            augment=settings.augment,
            size=settings.size,
            limit=settings.limit,
        )

    class SyntheticImages(ArrayDataModule):
        num_classes = 10

        def load(self) -> tuple[Split, Split, Split]:
            generator = torch.Generator().manual_seed(options.seed)
            coarse = torch.randn(10, 3, 8, 8, generator=generator)
            patterns = torch.nn.functional.interpolate(coarse, scale_factor=4, mode="bilinear")
            parts = []
            for count in (SYNTHETIC_IMAGES, 500, 1000):
                y = torch.randint(10, (count,), generator=generator)
                noise = torch.randn(count, 3, 32, 32, generator=generator)
                parts.append(Split(0.25 * patterns[y] + noise, y))
            return parts[0], parts[1], parts[2]

    return SyntheticImages(setting.batch)
