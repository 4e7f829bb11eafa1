"""ResNet-18 on CIFAR by cyclical SG-MCMC, its optimizers and Snapshot ensembles (cSG-MCMC, Tables 2 and 3).

`full` is the paper's setting, for a GPU: 200 epochs of all training images, cropped and flipped, batch 64, lr₀ = 0.5 of
the mean loss, M = 4 cycles with β = 0.8 (CIFAR-10) or 0.94 (CIFAR-100), 3 samples in each; samplers without cycles
follow one cosine, with noise and 20 samples in its last quarter. Test errors are of the uniform average of
probabilities. `quick` (7 minutes of one core, so about 4 on two) is the same table on 1,000 synthetic images of 16×16
pixels, a residual network of 19,000 weights and 28 epochs.

Where paper and program differ: the paper states the temperature 1; the program uses τ = 1/N, which produced the paper's
table, and so do the rows here. Two more rows are at τ = 1. The program's SGHMC has the momentum 0.1 (friction 0.9).
SGDM and Snapshot-SGDM, which the program lacks, have the same here. β is the paper's (the program: 0.9; 0.94 for cSGLD
on CIFAR-100). Samples are spread evenly over the sampling stage; the program takes the ends of the last three epochs.
Its mistake in the last step of two cycles, a step size of 0.5, is not reproduced.

Measured (quick, 3 seeds of the network on the same images, standard errors; test error % of the average): SGD 24.7 ±
2.1, SGDM 26.1 ± 2.1, SGLD 24.7 ± 2.1, SGHMC 25.8 ± 2.2; Snapshot-SGD 22.6 ± 1.3, Snapshot-SGDM 23.1 ± 1.7, cSGLD 22.9 ±
1.4, cSGHMC 23.4 ± 2.1; at τ = 1 cSGLD 25.1 ± 0.9, cSGHMC 23.9 ± 1.5; four chains of cSGHMC 15.5 ± 0.3. Four chains are
best by far, and cycles are better than none by about 2 points, both as in the paper; the latter difference is at most
one standard error. The paper's cyclical samplers beat Snapshot ensembles by 0.1 to 0.3 points. Here they are 0.3 worse,
well within the errors: at 1/N the noise has almost no effect, and at τ = 1, which is much noise for N = 1,000, a single
sample is 5 points worse. The gap between one chain and four is wider than the paper's (0.3 and 1.3). On the segments
between samples of two cycles the error falls evenly, without the paper's spike: seven epochs do not take a chain out of
its basin. Between two chains it rises to 90 %. The multidimensional scaling does show one group for each cycle.
Momentum 0.9 at this lr₀ is better here (one seed: 16.1 for cSGHMC), also without a spike. `full` has not been run: no
GPU was available.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import prepare_run, quiet_trainer, resumed_fit

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from lightning_sgmcmc import BayesianModule


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
        data: "CIFAR-10", "CIFAR-100" or "synthetic".
        num_data: N.
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
        """What jobs call it."""
        return self.data

    @property
    def prior_std(self) -> float:
        """Standard deviation of the Gaussian prior that equals the program's weight decay 5e-4 of the mean loss."""
        return float((self.num_data * WEIGHT_DECAY) ** -0.5)


@dataclass(frozen=True)
class Settings:
    """The settings of all data sets."""

    sets: tuple[Setting, ...]


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
    from lightning_sgmcmc.figures.evaluation import growth_figure

    rows: list[Row] = []
    settings = read_settings(Settings, options).sets
    require(*(datamodule(setting, options) for setting in settings))
    names = options.chosen(method.name for method in METHODS)
    methods = [method for method in METHODS if method.name in names]
    longest_first = sorted(methods, key=lambda method: -method.chains)
    jobs = [(m, seed, data) for data in settings for m in longest_first for seed in options.repeated(data.seeds)]
    outcomes: dict[Any, Outcome] = run_jobs(one, jobs, options, in_turn=options.full)
    for place, setting in enumerate(settings):
        curves = {}
        for method in methods:
            results = [outcomes[method, seed, setting] for seed in options.repeated(setting.seeds)]
            paper = method.paper[place] if options.full else None
            rows += [
                mean_row(method.name, f"{setting.data}: test error %, average", [r.errors[-1] for r in results], paper),
                mean_row(method.name, f"{setting.data}: test error %, one sample", [r.single for r in results]),
                mean_row(method.name, f"{setting.data}: NLL, average", [r.nll for r in results]),
            ]
            curves[method.name] = [
                sum(at_one) / len(at_one) for at_one in zip(*(r.errors for r in results), strict=True)
            ]
        figure = growth_figure(curves, f"test error of the average (%), {setting.data}")
        save_figure(figure, options.out / f"errors_{setting.data.lower()}.png")
    return rows


def module_of(method: Method, setting: Setting, options: Options) -> "BayesianModule":
    """Return the network with its sampler."""
    import functools

    from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior, samplers
    from lightning_sgmcmc.recipes.shared.resnet import resnet, resnet18

    networks: dict[str, Any] = {
        "CIFAR-10": lambda: resnet18(10),
        "CIFAR-100": lambda: resnet18(100),
        "synthetic": lambda: resnet(1, 8, 10),
    }
    momentum = functools.partial(samplers.SGHMC, friction=setting.friction)
    return BayesianModule(
        net=networks[setting.data](),
        likelihood=Categorical(),
        prior=GaussianPrior(setting.prior_std),
        sampler=momentum if method.sampler == "SGHMC" else samplers.SGLD,
        lr=LR,
        temperature=1.0 if method.temperature is None else method.temperature / setting.num_data,
        num_data=setting.num_data,
        num_chains=method.chains,
        compile=options.full,
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


def datamodule(setting: Setting, options: Options) -> Any:
    """Return CIFAR with crops and flips, all of it for training; or synthetic images."""
    from lightning_sgmcmc.datamodules import CIFAR10DataModule, CIFAR100DataModule
    from lightning_sgmcmc.recipes.shared.synthetic_images import SyntheticImages

    if setting.data == "synthetic":
        return SyntheticImages(setting.batch, options.seed)
    cifar = CIFAR10DataModule if setting.data == "CIFAR-10" else CIFAR100DataModule
    return cifar(options.data_root, setting.batch, val_size=0, augment=True, device_resident=True)


def one(method: Method, seed: int, setting: Setting, options: Options) -> Outcome:
    """Train and test one network, or one stack of chains."""
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import CSVLogger

    prepare_run(options)
    pl.seed_everything(options.seed + seed, verbose=False)
    pictured = method.name in PICTURED and seed == 0
    callbacks = callbacks_of(method, setting)
    folder = f"{method.name.replace('×', '_')}_{setting.data.lower()}"
    trainer = quiet_trainer(
        accelerator=options.accelerator(),
        devices=1,
        precision="bf16-mixed" if options.full else None,
        max_epochs=setting.epochs,
        callbacks=callbacks if pictured else callbacks[:3],
        logger=CSVLogger(options.out, name=folder, version="") if pictured else False,
        enable_progress_bar=options.full,
    )
    module, data = module_of(method, setting, options), datamodule(setting, options)
    resumed_fit(trainer, module, data)
    trainer.test(module, datamodule=data, verbose=False)
    evaluation = module.evaluations["test"]
    return Outcome(
        errors=[100 * (1 - metrics["accuracy"]) for metrics in evaluation.running],
        single=100 * (1 - evaluation.single["accuracy"]),
        nll=evaluation.bma["nll"],
        cycles=[int(member["cycle"]) for member in evaluation.members],
    )
