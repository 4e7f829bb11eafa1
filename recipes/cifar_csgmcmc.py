"""ResNet-18 on CIFAR by cyclical SG-MCMC, its optimizers and Snapshot ensembles (cSG-MCMC, Tables 2 and 3).

`full` is the paper's setting, for a GPU: 200 epochs of all training images, cropped and flipped, batch 64, lr₀ = 0.5 of
the mean loss, M = 4 cycles with β = 0.8 (CIFAR-10) or 0.94 (CIFAR-100), 3 samples in each; samplers without cycles
follow one cosine, with noise and 20 samples in its last quarter. Test errors are of the uniform average of
probabilities. `quick` (3 minutes on two cores) is the same table on 1,000 synthetic images of 16×16
pixels, a residual network of 19,000 weights and 20 epochs. `--set folder=DIR` takes the images of DIR/train/<class>/
and DIR/test/<class>/ instead, at the first entry's settings, and N is their number.

Where paper and program differ: the paper states the temperature 1; the program uses τ = 1/N, which produced the paper's
table, and so do the rows here. Two more rows are at τ = 1. The program's SGHMC has the momentum 0.1 (friction 0.9).
SGDM and Snapshot-SGDM, which the program lacks, have the same here. β is the paper's (the program: 0.9; 0.94 for cSGLD
on CIFAR-100). Samples are spread evenly over the sampling stage; the program takes the ends of the last three epochs.
Its mistake in the last step of two cycles, a step size of 0.5, is not reproduced.

Measured (quick, 3 seeds of the network on the same images, standard errors; test error % of the average): SGD 27.0 ±
2.3, SGDM 25.9 ± 1.2, SGLD 27.0 ± 2.2, SGHMC 26.0 ± 1.1; Snapshot-SGD 25.4 ± 2.7, Snapshot-SGDM 24.7 ± 2.1, cSGLD 25.2 ±
2.5, cSGHMC 24.1 ± 1.4; at τ = 1 cSGLD 26.1 ± 2.0, cSGHMC 25.3 ± 1.2; four chains of cSGHMC 17.0 ± 0.7, at four times
the cost. Cycles are better than none by 1 to 2 points, as in the paper (cSGLD - SGLD -1.9 ± 0.5, cSGHMC - SGHMC -1.9 ±
0.8). The paper's cyclical samplers beat Snapshot ensembles by 0.1 to 0.3 points. Here they are better by 0.2 ± 0.3 and
0.6 ± 0.9 (in an earlier run of 28 epochs worse by as much): at 1/N the noise has almost no effect, and at τ = 1, which
is much noise for N = 1,000, a single sample is 3 points worse. The gap between one chain and four is wider than the
paper's (0.3 and 1.3). On the segments between samples of two cycles the error falls evenly, without the paper's spike:
so few epochs do not take a chain out of its basin. Between two chains it rises to 90 %. The multidimensional scaling
does show one group for each cycle. Momentum 0.9 at this lr₀ is better here (one seed of 28 epochs: 16.1 for cSGHMC),
also without a spike. `full` has not been run: no GPU was available.
"""

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_sgmcmc.compiling import Compile
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.recipes.shared.costs import forward_flops
from lightning_sgmcmc.recipes.shared.image_sets import CIFAR, photographs
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.synthetic_images import SIDE, SyntheticImages
from lightning_sgmcmc.recipes.shared.trainers import prepare_run, quiet_trainer, resumed_fit

if TYPE_CHECKING:
    from torch import nn

    from lightning_sgmcmc import BayesianModule
    from lightning_sgmcmc.namespace import pl


WEIGHT_DECAY = 5e-4
LR = 0.5
CYCLES = 4
NOISE_AT_THE_END = 0.25
"""Share of the run in which samplers without cycles have noise: 50 of 200 epochs."""
PICTURED = ("SGHMC", "cSGHMC", "4×cSGHMC")


@dataclass(frozen=True)
class Setting:
    """Settings that differ between the data sets, and between quick and full.

    Attributes:
        data: "CIFAR-10", "CIFAR-100", "synthetic" or a folder.
        num_data: N; of a folder it is the number of its images.
        epochs: epochs of the run.
        batch: images per batch.
        exploration: β.
        friction: η of SGHMC, one minus the momentum.
        seeds: runs.
    """

    data: str
    num_data: int
    epochs: int
    batch: int
    exploration: float
    friction: float
    seeds: int

    @property
    def name(self) -> str:
        """What jobs and rows call it."""
        return Path(self.data).name

    @property
    def prior_std(self) -> float:
        """Standard deviation of the Gaussian prior that equals the program's weight decay 5e-4 of the mean loss."""
        return float((self.num_data * WEIGHT_DECAY) ** -0.5)


@dataclass(frozen=True)
class Settings:
    """The settings of all data sets, and what they have in common.

    Attributes:
        sets: one entry for each data set.
        compile: whether to compile the network, see `BayesianModule`.
        precision: of the trainer.
        folder: images to use instead, with the settings of the first entry.
        size: height and width of a folder's images.
        limit: number of training images that are read of a folder; None reads all.
    """

    sets: tuple[Setting, ...]
    compile: Compile
    precision: str
    folder: str | None = None
    size: int = 32
    limit: int | None = None

    @property
    def work(self) -> float:
        """Gradient evaluations times the network's floating-point operations, over all methods and runs."""
        chains = sum(method.chains for method in METHODS)
        total = 0.0
        for setting in self.sets:
            side = SIDE if setting.data == "synthetic" else 32
            flops = forward_flops(functools.partial(network_of, setting.data, 10), (3, side, side))
            total += chains * setting.seeds * setting.epochs * setting.num_data * flops
        return total


class Method(NamedTuple):
    """A row of the table.

    Attributes:
        name: the paper's name.
        sampler: "SGLD" or "SGHMC", at temperature 0 their optimizers.
        cycles: M.
        samples: drawn in each cycle.
        temperature: τ in units of 1/N: 0, 1 (the authors' program) or N, written as None (the posterior).
        chains: stacked chains of one run.
        paper: test error in % on CIFAR-10 and CIFAR-100.
    """

    name: str
    sampler: str
    cycles: int
    samples: int
    temperature: float | None
    chains: int = 1
    paper: tuple[float, float] | tuple[None, None] = (None, None)


METHODS = (
    Method("SGD", "SGLD", 1, 1, 0, paper=(5.29, 23.61)),
    Method("SGDM", "SGHMC", 1, 1, 0, paper=(5.17, 22.98)),
    Method("Snapshot-SGD", "SGLD", CYCLES, 1, 0, paper=(4.46, 20.83)),
    Method("Snapshot-SGDM", "SGHMC", CYCLES, 1, 0, paper=(4.39, 20.81)),
    Method("SGLD", "SGLD", 1, 20, 1, paper=(5.20, 23.23)),
    Method("cSGLD", "SGLD", CYCLES, 3, 1, paper=(4.29, 20.55)),
    Method("SGHMC", "SGHMC", 1, 20, 1, paper=(4.93, 22.60)),
    Method("cSGHMC", "SGHMC", CYCLES, 3, 1, paper=(4.27, 20.50)),
    Method("cSGLD, τ=1", "SGLD", CYCLES, 3, None),
    Method("cSGHMC, τ=1", "SGHMC", CYCLES, 3, None),
    Method("4×cSGHMC", "SGHMC", CYCLES, 3, 1, 4, paper=(3.95, 19.19)),
)


@dataclass
class Outcome:
    """The results of a run.

    Attributes:
        errors: test error in % of the average of the first 1, 2, … samples.
        single: test error in % of a sample, the mean over samples.
        nll: mean negative log likelihood of the average on the test data.
        cycles: each sample's cycle.
    """

    errors: list[float]
    single: float
    nll: float
    cycles: list[int] = field(default_factory=list)


def run(options: Options) -> list[Row]:
    """Run all methods with all seeds, draw the pictures, return the table."""
    from lightning_sgmcmc.recipes.shared.figures import growth_figure

    rows: list[Row] = []
    settings = read_settings(Settings, options)
    sets = chosen_sets(settings, options)
    names = options.chosen(method.name for method in METHODS)
    methods = [method for method in METHODS if method.name in names]
    longest_first = sorted(methods, key=lambda method: -method.chains)
    jobs = [(m, seed, data) for data in sets for m in longest_first for seed in options.repeated(data.seeds)]
    outcomes: dict[Any, Outcome] = run_jobs(one, jobs, options, settings, in_turn=options.full)
    for place, setting in enumerate(sets):
        curves = {}
        for method in methods:
            results = [outcomes[method, seed, setting] for seed in options.repeated(setting.seeds)]
            paper = method.paper[place] if setting.data in CIFAR else None
            rows += [
                mean_row(method.name, f"{setting.name}: test error %, average", [r.errors[-1] for r in results], paper),
                mean_row(method.name, f"{setting.name}: test error %, one sample", [r.single for r in results]),
                mean_row(method.name, f"{setting.name}: NLL, average", [r.nll for r in results]),
            ]
            curves[method.name] = [
                sum(at_one) / len(at_one) for at_one in zip(*(r.errors for r in results), strict=True)
            ]
        figure = growth_figure(curves, f"test error of the average (%), {setting.name}")
        save_figure(figure, options.out / f"errors_{setting.name.lower()}.png")
    return rows


def chosen_sets(settings: Settings, options: Options) -> tuple[Setting, ...]:
    """Return the data sets to run, whose data are there; of a folder with its number of images."""
    sets = settings.sets if settings.folder is None else (replace(settings.sets[0], data=settings.folder),)
    data = [datamodule(setting, settings, options) for setting in sets]
    require(*data)
    return sets if settings.folder is None else (replace(sets[0], num_data=data[0].num_data),)


def network_of(data: str, classes: int) -> "nn.Module":
    """Return ResNet-18, or for quick settings a small network."""
    from lightning_sgmcmc.recipes.shared.resnet import resnet, resnet18

    return resnet18(classes) if data in CIFAR else resnet(1, 8, classes)


def module_of(method: Method, setting: Setting, settings: Settings, net: "nn.Module") -> "BayesianModule":
    """Return the network with its sampler."""
    from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior, samplers

    momentum = functools.partial(samplers.SGHMC, friction=setting.friction)
    return BayesianModule(
        net=net,
        likelihood=Categorical(),
        prior=GaussianPrior(setting.prior_std),
        sampler=momentum if method.sampler == "SGHMC" else samplers.SGLD,
        lr=LR,
        temperature=1.0 if method.temperature is None else method.temperature / setting.num_data,
        num_data=setting.num_data,
        num_chains=method.chains,
        compile=settings.compile,
    )


def callbacks_of(method: Method, setting: Setting) -> "list[pl.Callback]":
    """Return the callbacks of a method: schedule, samples, average, and for some methods pictures."""
    from lightning_sgmcmc.callbacks import BayesianModelAverage, CyclicalSchedule, PosteriorDashboard, SampleCollector

    exploration = setting.exploration if method.cycles > 1 else 1 - NOISE_AT_THE_END
    callbacks: list[pl.Callback] = [
        CyclicalSchedule(method.cycles, exploration, method.samples),
        SampleCollector(in_memory=True),
        BayesianModelAverage(),
    ]
    if method.name in PICTURED:
        figures = ("schedule", "geometry", "running", "segments")
        callbacks.append(PosteriorDashboard("end", figures=figures, segment_pairs=6, segment_batches=1000))
    return callbacks


def datamodule(setting: Setting, settings: Settings, options: Options) -> Any:
    """Return CIFAR or a folder's images with crops and flips, all of them for training; or synthetic images."""
    if setting.data == "synthetic":
        return SyntheticImages(setting.batch, options.seed)
    return photographs(setting.data, options, setting.batch, size=settings.size, limit=settings.limit)


def one(method: Method, seed: int, setting: Setting, settings: Settings, options: Options) -> Outcome:
    """Train and test one network, or one stack of chains."""
    from lightning_sgmcmc.namespace import pl

    prepare_run(options)
    pl.seed_everything(options.seed + seed, verbose=False)
    pictured = method.name in PICTURED and seed == 0
    callbacks = callbacks_of(method, setting)
    folder = f"{method.name.replace('×', '_')}_{setting.name.lower()}"
    trainer = quiet_trainer(
        accelerator=options.accelerator(),
        devices=1,
        precision=settings.precision,
        max_epochs=setting.epochs,
        callbacks=callbacks if pictured else callbacks[:3],
        logger=pl.loggers.CSVLogger(options.out, name=folder, version="") if pictured else False,
        enable_progress_bar=options.full,
    )
    data = datamodule(setting, settings, options)
    data.setup("fit")
    net = network_of("CIFAR-10" if options.full else "synthetic", data.num_classes)
    module = module_of(method, setting, settings, net)
    resumed_fit(trainer, module, data)
    trainer.test(module, datamodule=data, verbose=False)
    evaluation = module.evaluations["test"]
    return Outcome(
        errors=[100 * (1 - metrics["accuracy"]) for metrics in evaluation.running],
        single=100 * (1 - evaluation.single["accuracy"]),
        nll=evaluation.bma["nll"],
        cycles=[int(member["cycle"]) for member in evaluation.members],
    )
