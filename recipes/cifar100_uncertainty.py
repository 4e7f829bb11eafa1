"""Networks on CIFAR-100 and their uncertainty on SVHN: interacting contour chains and other samplers (ICSGLD, Table 1).

`full` is the paper's setting, for a GPU, with ResNet-20, ResNet-32, ResNet-56 and WRN-16-8: all training images,
cropped, flipped and erased in part, batch 256; four stacked chains (P4) of 500 epochs, or one (T4) of 2,000; lr = 0.1
of the mean loss (ε = 2e-6), momentum 0.9, weight decay 25 of the full energy, τ = 3e-4. ICSGHMC and reSGHMC divide lr
by five at epochs 250 and 375, by torch's MultiStepLR that `configure_optimizers` returns with the sampler, and draw a
sample an epoch of the last 100; cycSGHMC has 10 cosine cycles and M-SGD (τ = 0) one, both with a constant lr and noise
in the last 15 %. cycSWAG has the same cycles at τ = 0 and draws ten networks from the Gaussian of each. Contour: ζ =
3·10⁶, m = 200, Δu = 200 from 20,400 nats (ResNet-56: from 10,400), ω = 0.003, κ within ±5, from epoch 376 on, by
energies with a control variate that is updated every 2 epochs from 374 on (as in the program; in the paper, over the
last 100). For WRN-16-8, as in the program, Δu = 60 from 120 nats, and ICSGHMC's lr follows a cosine to epoch 400, from
which on it is constant and noise is added. Weights are π(J), as in the program, for the reason that `cifar_csghmc`
gives. The networks are the program's (see `shared/resnet.py`): its ResNet-56 has blocks of three convolutions. The
number of seeds is not stated in the paper; there are logs of four to six.

`quick` is the same on 1,000 synthetic images of 16×16 pixels, with a small network, 18 epochs (72) and images of
unknown patterns for SVHN. `--set folder=DIR` takes the images of DIR/train/<class>/ and DIR/test/<class>/, and
`--set outside_folder=DIR` all images in a folder instead of SVHN; without it and without SVHN's files a quick run
has no figures out of distribution.

The Brier score is the program's: the mean over images and classes of p². The paper's accuracy and NLL are of averaged
logits; the table has them next to those of averaged probabilities. Other differences: each chain has its own mini-
batches (the program: shared ones) and SVHN is normalised as CIFAR-100 is, by the latter's statistics (the program: by
CIFAR-10's, both). κ uses the bin of its own batch, not of the previous one, and a sample's weight the energy of its own
step. Swaps are random, by the data's energy against a bias of 4,000 nats for the coldest pair, 1,333 and 444 for the
others, and are tried every 16 steps throughout; in the program a swap is certain beyond 4,000, once an epoch, from
epoch 400 on. The program's samples are the coldest slot's, as here. cycSGHMC's noise begins at 85 % of a cycle, as in
the paper (the program: 94 %). cycSWAG's BatchNorm statistics are estimated for each drawn network; the program trains
it for an epoch instead, and the paper does not state the rank (here 20).

Measured (quick, 3 seeds of the network on the same images, standard errors):

    method       accuracy %    NLL (of 1,000)   the two, logits averaged   Brier ×1000   AUROC   accuracy %, one network
    cycSGHMC×T4  91.7 ± 0.3    332 ± 5          91.6 ± 0.4   263 ± 4       39.6 ± 0.4    0.852   85.9 ± 0.1
    cycSWAG×T4   91.4 ± 0.3    333 ± 2          91.3 ± 0.2   262 ± 3       40.3 ± 0.2    0.846   85.6 ± 0.2
    M-SGD×P4     85.7 ± 0.4    481 ± 1          85.9 ± 0.5   442 ± 3       36.7 ± 0.3    0.813   81.9 ± 0.2
    reSGHMC×P4   82.0 ± 1.2    576 ± 30         82.3 ± 1.2   564 ± 30      37.7 ± 0.2    0.778   80.4 ± 0.8
    ICSGHMC×P4   84.8 ± 0.7    523 ± 12         84.6 ± 0.4   483 ± 15      35.5 ± 0.3    0.802   80.2 ± 0.1

ICSGHMC's Brier score is lowest, as in the paper; its accuracy is not highest, and M-SGD×P4, an ensemble of four at the
same cost, separates images of unknown patterns as well. With so little training, the one chain that trains four times
as long gains most, reSGHMC averages few networks (four samples), and noise costs accuracy: in earlier runs of 24 epochs
ICSGHMC had 85.9 ± 0.4 with τ = 0.03 and 88.8 ± 0.2 with 0.003, and one run of the same chains without contour 85.6 at τ
= 0.03 and 89.6 at τ = 0. The contour itself, 100 steps of four chains, made no measurable difference on these images,
and neighbouring slots swapped in a quarter of reSGHMC's attempts. ICSGHMC's 16 samples have an effective number of 12.9
± 0.1. `full` has not been run: no GPU was available.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_sgmcmc.callbacks import PosteriorDashboard
from lightning_sgmcmc.compiling import Compile
from lightning_sgmcmc.diagnostics.scores import predictive_entropy
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.figures.evaluation import entropy_figure
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.shared import resnet
from lightning_sgmcmc.recipes.shared.averages import logit_average
from lightning_sgmcmc.recipes.shared.costs import forward_flops
from lightning_sgmcmc.recipes.shared.figures import growth_figure
from lightning_sgmcmc.recipes.shared.image_sets import photographs, unknown_images
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.synthetic_images import SIDE, SyntheticImages
from lightning_sgmcmc.recipes.shared.trainers import prepare_run, quiet_trainer, resumed_fit
from lightning_sgmcmc.recipes.shared.uncertainty_methods import (
    CHAINS,
    METHODS,
    NETWORKS,
    OOD,
    callbacks_of,
    module_of,
)

CSVLogger = pl.loggers.CSVLogger

PICTURED = ("reSGHMC×P4", "ICSGHMC×P4")
CLASSES = {"synthetic": 10, "CIFAR-100": 100}


@dataclass(frozen=True)
class Settings:
    """The settings of the recipe.

    Attributes:
        data: "CIFAR-100" or "synthetic".
        networks: names of networks, see `uncertainty_methods.NETWORKS`.
        num_data: N; of a folder it is the number of its images.
        num_test: test images, likewise.
        epochs: epochs of each of four parallel chains; the single chain of T4 has four times as many.
        batch: images per batch.
        temperature: τ.
        samples: samples of each chain of M-SGD, and of a cycle of cycSGHMC; the others draw one in every epoch of the
            last fifth.
        swag: rank of cycSWAG's covariance, and networks drawn after each cycle.
        zeta, step_size: ζ and ω of the contour.
        attempts: steps between attempts to swap.
        seeds: number of runs.
        compile: whether to compile the networks, see `BayesianModule`.
        precision: of the trainer.
        folder: images to use instead.
        outside_folder: out-of-distribution images to use instead of SVHN.
        size: height and width of the folders' images.
        limit: number of images that are read of each part of a folder; None reads all.
    """

    data: str
    networks: tuple[str, ...]
    num_data: int
    num_test: int
    epochs: int
    batch: int
    temperature: float
    samples: tuple[int, int]
    swag: tuple[int, int]
    zeta: float
    step_size: float
    attempts: int
    seeds: int
    compile: Compile
    precision: str
    folder: str | None = None
    outside_folder: str | None = None
    size: int = 32
    limit: int | None = None

    @property
    def work(self) -> float:
        """Gradient evaluations times the networks' floating-point operations, over all methods and runs."""
        side = SIDE if self.data == "synthetic" else 32
        networks = [functools.partial(resnet.NETWORKS[name], 10) for name in self.networks]
        flops = sum(forward_flops(network, (3, side, side)) for network in networks)
        return float(len(METHODS) * self.seeds * CHAINS * self.epochs * self.num_data * flops)


def run(options: Options) -> list[Row]:
    """Run all methods with all networks and seeds, draw the pictures, return the table."""
    setting = with_sizes(read_settings(Settings, options), options)
    unknown = [name for name in setting.networks if name not in NETWORKS]
    if unknown:
        raise ValueError(f"networks must be some of {', '.join(NETWORKS)}, got {', '.join(unknown)}")
    methods, seeds = options.chosen(METHODS), options.repeated(setting.seeds)
    jobs = [(name, method, seed) for name in setting.networks for method in methods for seed in seeds]
    outcomes = run_jobs(one, jobs, options, setting, in_turn=options.full)
    rows: list[Row] = []
    for name in setting.networks:
        found = {method: [outcomes[name, method, seed] for seed in seeds] for method in methods}
        draw(name, found, options)
        for method, results in found.items():
            rows += rows_of(name, method, results, with_paper=setting.folder is None)
    return rows


def with_sizes(setting: Settings, options: Options) -> Settings:
    """Return the settings with the numbers of the data that are there; missing ones end the recipe here."""
    if setting.folder is not None:
        setting = replace(setting, data=setting.folder)
    known, unknown = datamodules(setting, options)
    require(known, *([] if unknown is None else [unknown]))
    return replace(setting, num_data=known.num_data, num_test=len(known.splits[2].targets))


def rows_of(network: str, method: str, results: Sequence[dict[str, Any]], with_paper: bool) -> list[Row]:
    """Return the figures of a method with a network."""
    of_paper: dict[str, float] = {}
    if with_paper and NETWORKS[network].paper:
        accuracy, nll, brier = NETWORKS[network].paper[METHODS.index(method)]
        of_paper = {
            "accuracy %": accuracy,
            "NLL, sum over the test set": nll,
            "accuracy %, logits averaged": accuracy,
            "NLL, sum over the test set, logits averaged": nll,
            "Brier score ×1000, out of distribution": brier,
        }
    return [
        mean_row(
            method, f"{network}: {metric}", [result["metrics"][metric] for result in results], of_paper.get(metric)
        )
        for metric in results[0]["metrics"]
    ]


def draw(network: str, found: dict[str, list[dict[str, Any]]], options: Options) -> None:
    """Draw accuracy and NLL against the number of samples, and the entropies out of distribution."""
    entropies = {method: [v for result in results for v in result["entropy"]] for method, results in found.items()}
    for name, title in (
        ("accuracy", "test accuracy of the average"),
        ("nll", "test NLL of the average (nats per image)"),
    ):
        curves = {}
        for method, results in found.items():
            series = [[metrics[name] for metrics in result["running"]] for result in results]
            curves[method] = [sum(values) / len(values) for values in zip(*series, strict=True)]
        save_figure(growth_figure(curves, f"{network}: {title}"), options.out / f"{name}_{network}.png")
    if all(entropies.values()):
        figure = entropy_figure(entropies, 100 if options.full else 10)
        save_figure(figure, options.out / f"entropy_ood_{network}.png")


def datamodules(setting: Settings, options: Options) -> tuple[Any, Any]:
    """Return the images, and those of other classes: CIFAR-100 and SVHN, synthetic images, or folders.

    For a folder at quick size there may be no images of other classes: then None.
    """
    known: Any
    if setting.data == "synthetic":
        sizes = (setting.num_data, 0, setting.num_test)
        known = SyntheticImages(setting.batch, options.seed, sizes=sizes, augment=True)
    else:
        kwargs: dict[str, Any] = {"erasing": 0.5, "size": setting.size, "limit": setting.limit}
        known = photographs(setting.data, options, setting.batch, **kwargs)
    if setting.data == "synthetic" and setting.outside_folder is None:
        return known, SyntheticImages(1000, options.seed, sizes=(1, 0, setting.num_test), unknown=True)
    return known, unknown_images(options, setting.outside_folder, setting.size, setting.limit)


def one(network: str, method: str, seed: int, setting: Settings, options: Options) -> dict[str, Any]:
    """Train and test the chains of a method.

    Returns:
        `metrics`, by their names in the table; `running`, the average's metrics after each sample; `entropy`, of the
        predictions on the out-of-distribution images, in nats.
    """
    prepare_run(options)
    pl.seed_everything(options.seed + seed, verbose=False)
    data, unknown = datamodules(setting, options)
    data.setup("fit")
    callbacks = callbacks_of(method, NETWORKS[network], setting, unknown)
    pictured = method in PICTURED and seed == 0
    if pictured:
        callbacks.append(PosteriorDashboard("end", figures=("schedule", "energy", "weights", "geometry", "contour")))
    folder = f"{method.replace('×', '_')}_{network}"
    trainer = quiet_trainer(
        accelerator=options.accelerator(),
        devices=1,
        precision=setting.precision,
        max_epochs=setting.epochs * (CHAINS if method.endswith("T4") else 1),
        log_every_n_steps=10,
        callbacks=callbacks,
        logger=CSVLogger(options.out, name=folder, version="") if pictured else False,
        enable_progress_bar=options.full,
    )
    module = module_of(method, NETWORKS[network], resnet.NETWORKS[network](data.num_classes), setting)
    resumed_fit(trainer, module, data)
    trainer.test(module, datamodule=data, verbose=False)
    evaluation = module.evaluations["test"]
    by_logits = logit_average(module, data.test_dataloader(), trainer.strategy.root_device)
    entropy = [] if unknown is None else predictive_entropy(evaluation.ood[OOD].terms["probabilities"]).tolist()
    return {"metrics": metrics_of(evaluation, by_logits, setting), "running": evaluation.running, "entropy": entropy}


def metrics_of(evaluation: Any, by_logits: dict[str, float], setting: Settings) -> dict[str, float]:
    """Return the figures of a run, by their names in the table."""
    bma = evaluation.bma
    metrics = {
        "accuracy %": 100 * bma["accuracy"],
        "NLL, sum over the test set": setting.num_test * bma["nll"],
        "accuracy %, logits averaged": 100 * by_logits["accuracy"],
        "NLL, sum over the test set, logits averaged": setting.num_test * by_logits["nll"],
    }
    if f"ood_{OOD}_brier" in bma:
        metrics["Brier score ×1000, out of distribution"] = 1000 * bma[f"ood_{OOD}_brier"]
        metrics["AUROC, out of distribution"] = bma[f"ood_{OOD}_auroc"]
    metrics["accuracy %, one network"] = 100 * evaluation.single["accuracy"]
    metrics["effective number of samples"] = (evaluation.weight_efficiency or 1.0) * len(evaluation.members)
    return metrics
