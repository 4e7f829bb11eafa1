"""C3: ResNet-18 on CIFAR by cyclical SG-MCMC, its optimizers and Snapshot ensembles (cSG-MCMC, Tables 2 and 3)."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from recipes.jobs import hush, run_jobs
from recipes.results import Options, Row, mean_row

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
    """What differs between the data sets, and between quick and full.

    Attributes:
        data: "CIFAR-10", "CIFAR-100" or "synthetic".
        num_data: N.
        epochs: epochs of the run.
        batch: images in a batch.
        exploration: β.
        friction: η of SGHMC, one less the momentum.
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
    def prior_std(self) -> float:
        """Of the Gaussian prior that is the program's weight decay 5e-4 of the mean loss."""
        return float((self.num_data * WEIGHT_DECAY) ** -0.5)


FULL = (
    Setting("CIFAR-10", 50_000, 200, 64, 0.8, 0.9, 3),
    Setting("CIFAR-100", 50_000, 200, 64, 0.94, 0.9, 3),
)
QUICK = (Setting("synthetic", 1000, 28, 50, 0.8, 0.1, 3),)


class Method(NamedTuple):
    """A row of the table.

    Attributes:
        name: what the paper calls it.
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
    """What a run has to say.

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
    from lightning_sgmcmc.figures_ensembles import growth_figure

    rows: list[Row] = []
    for place, setting in enumerate(FULL if options.full else QUICK):
        longest_first = sorted(METHODS, key=lambda method: -method.chains)
        jobs = [(method, seed) for method in longest_first for seed in range(setting.seeds)]
        outcomes: dict[Any, Outcome] = run_jobs(one, jobs, options, setting)
        curves = {}
        for method in METHODS:
            results = [outcomes[method, seed] for seed in range(setting.seeds)]
            paper = method.paper[place] if setting in FULL else None
            rows += [
                mean_row(method.name, f"{setting.data}: test error %, average", [r.errors[-1] for r in results], paper),
                mean_row(method.name, f"{setting.data}: test error %, one sample", [r.single for r in results]),
                mean_row(method.name, f"{setting.data}: NLL, average", [r.nll for r in results]),
            ]
            curves[method.name] = [
                sum(at_one) / len(at_one) for at_one in zip(*(r.errors for r in results), strict=True)
            ]
        figure = growth_figure(curves, f"test error of the average (%), {setting.data}")
        figure.savefig(options.out / f"errors_{setting.data.lower()}.png", dpi=120)
    return rows


def module_of(method: Method, setting: Setting, options: Options) -> "BayesianModule":
    """Return the network with its sampler."""
    import functools

    from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior, samplers
    from recipes.resnet import resnet, resnet18

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
    """Return the callbacks of a method: schedule, samples, average; of some the pictures."""
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
    from recipes.synthetic_images import SyntheticImages

    if setting.data == "synthetic":
        return SyntheticImages(setting.batch, options.seed)
    cifar = CIFAR10DataModule if setting.data == "CIFAR-10" else CIFAR100DataModule
    return cifar(options.data_root, setting.batch, val_size=0, augment=True, device_resident=True)


def one(method: Method, seed: int, setting: Setting, options: Options) -> Outcome:
    """Train and test one network, or one stack of chains."""
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import CSVLogger

    hush(options)
    pl.seed_everything(options.seed + seed, verbose=False)
    pictured = method.name in PICTURED and seed == 0
    callbacks = callbacks_of(method, setting)
    folder = f"{method.name.replace('×', '_')}_{setting.data.lower()}"
    trainer = pl.Trainer(
        accelerator="auto" if options.full else "cpu",
        devices=1,
        precision="bf16-mixed" if options.full else None,
        max_epochs=setting.epochs,
        callbacks=callbacks if pictured else callbacks[:3],
        logger=CSVLogger(options.out, name=folder, version="") if pictured else False,
        enable_checkpointing=False,
        enable_progress_bar=options.full,
        enable_model_summary=False,
    )
    module, data = module_of(method, setting, options), datamodule(setting, options)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    evaluation = module.evaluations["test"]
    return Outcome(
        errors=[100 * (1 - metrics["accuracy"]) for metrics in evaluation.running],
        single=100 * (1 - evaluation.single["accuracy"]),
        nll=evaluation.bma["nll"],
        cycles=[int(member["cycle"]) for member in evaluation.members],
    )
