"""ResNet-20 on CIFAR-100 and its uncertainty on SVHN: interacting contour chains and other samplers (ICSGLD, Table 1).

`full` is the paper's setting, for a GPU: all training images, cropped, flipped and erased in part, batch 256; four
stacked chains (P4) of 500 epochs, or one (T4) of 2,000; lr = 0.1 of the mean loss (ε = 2e-6), momentum 0.9, weight
decay 25 of the full energy, τ = 3e-4. ICSGHMC and reSGHMC divide lr by five at epochs 250 and 375, by torch's
MultiStepLR that `configure_optimizers` returns with the sampler, and draw a sample an epoch of the last 100; cycSGHMC
has 10 cosine cycles and M-SGD (τ = 0) one, both with a constant lr and noise in the last 15 %. Contour: ζ = 3·10⁶, m =
200, Δu = 200 from 20,400 nats, ω = 0.003, κ within ±5, from epoch 376 on, by energies with a control variate that is
updated every 2 epochs from 374 on (as in the program; in the paper, over the last 100). Weights are π(J), as in the
program, for the reason that `cifar_csghmc` gives. `quick` (6 minutes of one core) is the same on 1,000 synthetic images
of 16×16 pixels, with a small network, 24 epochs (96) and images of unknown patterns for SVHN.

The Brier score is the program's: the mean over images and classes of p². The paper's accuracy and NLL are of averaged
logits; the table has them next to those of averaged probabilities. Other differences: each chain has its own
mini-batches (the program: shared ones) and SVHN is normalised as CIFAR-100 is, by the latter's statistics (the program:
by CIFAR-10's, both). κ uses the bin of its own batch, not of the previous one, and a sample's weight the energy of its
own step. Swaps are random, by the data's energy against a bias of 4,000 nats for the coldest pair, 1,333 and 444 for
the others, and are tried every 16 steps throughout; in the program a swap is certain beyond 4,000, once an epoch, from
epoch 400 on. The program's samples are the coldest slot's, as here. cycSGHMC's noise begins at 85 % of a cycle, as in
the paper (the program: 94 %). cycSWAG×T4 is left out.

Measured (quick, 3 seeds of the network on the same images, standard errors):

    method       accuracy %   NLL (of 1,000)   the two, logits averaged   Brier ×1000   accuracy %, one network
    cycSGHMC×T4  92.3 ± 0.2   278 ± 4          92.4 ± 0.3   225 ± 5       42.7 ± 0.3    88.4 ± 0.3
    M-SGD×P4     89.4 ± 0.4   368 ± 4          89.5 ± 0.3   334 ± 4       39.6 ± 0.1    85.9 ± 0.3
    reSGHMC×P4   86.0 ± 0.6   442 ± 21         86.0 ± 0.5   428 ± 17      41.6 ± 2.0    84.4 ± 1.1
    ICSGHMC×P4   88.5 ± 0.6   396 ± 11         88.4 ± 0.4   361 ± 10      38.3 ± 0.6    84.7 ± 0.4

The Brier scores have the paper's order, with ICSGHMC lowest; the accuracies do not. With so little training, the one
chain that trains four times as long gains most, reSGHMC averages few networks (five samples), and noise costs accuracy:
with τ = 0.03 instead of 0.003 ICSGHMC has 85.9 ± 0.4, and one run of the same chains without contour has 85.6 at τ =
0.03 and 89.6 at τ = 0. The contour itself, 100 steps of four chains, makes no measurable difference on these images.
ICSGHMC's 20 samples have an effective number of 15.4 ± 1.4; neighbouring slots swap in a quarter of reSGHMC's attempts.
`full` has not been run: no GPU was available.
"""

import functools
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger
from torch.optim.lr_scheduler import MultiStepLR

from lightning_sgmcmc import BayesianModule, Categorical, ContourRules, DecayingStepSize, GaussianPrior
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ContourGradient,
    CyclicalSchedule,
    PosteriorDashboard,
    ReplicaExchange,
    SampleCollector,
    SamplingSchedule,
    VarianceReducedEnergy,
)
from lightning_sgmcmc.callbacks.schedule import StepControls
from lightning_sgmcmc.datamodules import CIFAR100DataModule, SVHNDataModule
from lightning_sgmcmc.diagnostics.metrics import predictive_entropy
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.figures.evaluation import entropy_figure, growth_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.logit_average import logit_average
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.resnet import resnet
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.synthetic_images import SyntheticImages
from lightning_sgmcmc.recipes.shared.trainers import prepare_run, quiet_trainer, resumed_fit
from lightning_sgmcmc.samplers import SGHMC
from lightning_sgmcmc.schedules import cyclical_lr_factor

METHODS = ("cycSGHMC×T4", "M-SGD×P4", "reSGHMC×P4", "ICSGHMC×P4")
PAPER = {
    20: ((75.41, 8437, 2.91), (76.01, 8175, 2.58), (76.15, 8196, 2.73), (76.34, 8076, 2.54)),
    32: ((77.93, 7658, 3.29), (78.41, 7501, 2.77), (78.57, 7454, 3.04), (78.72, 7406, 2.76)),
}
CHAINS = 4
CYCLES = 10
FLAT_END = 0.15
LR = 0.1
FRICTION = 0.1
WEIGHT_DECAY = 5e-4
LADDER = (1.0, 3.0, 9.0, 27.0)
CLAMP = 5.0
PICTURED = ("reSGHMC×P4", "ICSGHMC×P4")
OOD = "ood"


@dataclass(frozen=True)
class Settings:
    """Settings that differ between quick and full.

    Attributes:
        data: "CIFAR-100" or "synthetic".
        depth: depth of the residual network.
        num_data: N.
        num_test: test images.
        epochs: epochs of each of four parallel chains; the single chain of T4 has four times as many.
        batch: images per batch.
        temperature: τ.
        samples: samples of each chain of M-SGD, and of a cycle of cycSGHMC; the others draw one in every epoch of the
            last fifth.
        first_edge, width, zeta, step_size: u_1, Δu, ζ and ω of the contour; m is 200.
        swap_barrier: nats by which a hot chain's energy should be lower for the coldest pair to swap.
        attempts: steps between attempts to swap.
        seeds: number of runs.
    """

    data: str
    depth: int
    num_data: int
    num_test: int
    epochs: int
    batch: int
    temperature: float
    samples: tuple[int, int]
    first_edge: float
    width: float
    zeta: float
    step_size: float
    swap_barrier: float
    attempts: int
    seeds: int

    @property
    def prior_std(self) -> float:
        """Standard deviation of the prior that equals a weight decay 5e-4 of the mean loss, 25 of the full energy."""
        return float((self.num_data * WEIGHT_DECAY) ** -0.5)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch."""
        return -(-self.num_data // self.batch)

    @property
    def contour_epoch(self) -> int:
        """First epoch, from 0, with a contour: 376 of 500."""
        return self.epochs * 3 // 4 + 1

    @property
    def milestones(self) -> list[int]:
        """Epochs at which step sizes fall to a fifth: 250 and 375 of 500."""
        return [self.epochs // 2, self.epochs * 3 // 4]


def run(options: Options) -> list[Row]:
    """Run all methods with all seeds, draw the pictures, return the table."""
    setting = read_settings(Settings, options)
    methods, seeds = options.chosen(METHODS), options.repeated(setting.seeds)
    jobs = [(method, seed) for method in methods for seed in seeds]
    require(*datamodules(setting, options))
    outcomes = run_jobs(one, jobs, options, setting, in_turn=options.full)
    rows: list[Row] = []
    curves: dict[str, dict[str, list[float]]] = {"accuracy": {}, "nll": {}}
    entropies: dict[str, list[float]] = {}
    for method in methods:
        results = [outcomes[method, seed] for seed in seeds]
        index = list(METHODS).index(method)
        accuracy, nll, brier = PAPER[setting.depth][index] if setting.depth in PAPER else (None, None, None)
        of_paper = {
            "accuracy %": accuracy,
            "NLL, sum over the test set": nll,
            "accuracy %, logits averaged": accuracy,
            "NLL, sum over the test set, logits averaged": nll,
            "Brier score ×1000, out of distribution": brier,
        }
        for metric in results[0]["metrics"]:
            values = [result["metrics"][metric] for result in results]
            rows.append(mean_row(method, metric, values, of_paper.get(metric)))
        for name, by_method in curves.items():
            series = [[metrics[name] for metrics in result["running"]] for result in results]
            by_method[method] = [sum(values) / len(values) for values in zip(*series, strict=True)]
        entropies[method] = [value for result in results for value in result["entropy"]]
    save_figure(growth_figure(curves["accuracy"], "test accuracy of the average"), options.out / "accuracy.png")
    save_figure(growth_figure(curves["nll"], "test NLL of the average (nats per image)"), options.out / "nll.png")
    save_figure(entropy_figure(entropies, 100 if options.full else 10), options.out / "entropy_ood.png")
    return rows


def module_of(method: str, setting: Settings, options: Options) -> BayesianModule:
    """Return the network, or the stack of chains, with its sampler and its step sizes."""

    class SteppedModule(BayesianModule):
        """Divides the step size by five at the milestones, with a scheduler of torch."""

        def configure_optimizers(self) -> Any:
            sampler = super().configure_optimizers()
            return {"optimizer": sampler, "lr_scheduler": MultiStepLR(sampler, setting.milestones, gamma=0.2)}

    quick = setting.data == "synthetic"
    stepped = method in ("reSGHMC×P4", "ICSGHMC×P4")
    return (SteppedModule if stepped else BayesianModule)(
        net=resnet((setting.depth - 2) // 6, 8 if quick else 16, 10 if quick else 100),
        likelihood=Categorical(),
        prior=GaussianPrior(setting.prior_std),
        sampler=functools.partial(SGHMC, friction=FRICTION),
        lr=LR,
        temperature=0.0 if method == "M-SGD×P4" else setting.temperature,
        num_data=setting.num_data,
        num_chains=1 if method.endswith("T4") else CHAINS,
        compile=options.full,
    )


class FlatEndedCycles(CyclicalSchedule):
    """Cycles of a cosine step size that stays constant in the sampling stage."""

    def controls(self, step: int) -> StepControls:
        controls, plan = super().controls(step), self.laid_out
        start = round(self.exploration * plan.period) + 1
        flat = cyclical_lr_factor(start, plan.period)
        return controls if plan.is_exploration(step) else controls._replace(lr_factor=flat)


def callbacks_of(method: str, setting: Settings, unknown: Any) -> list[pl.Callback]:
    """Return the callbacks of a method: schedule, samples, average, and its own.

    Args:
        method: its name.
        setting: quick or full.
        unknown: datamodule of the out-of-distribution images.
    """
    schedule: pl.Callback
    if method == "cycSGHMC×T4":
        schedule = FlatEndedCycles(CYCLES, 1 - FLAT_END, setting.samples[1])
    elif method == "M-SGD×P4":
        schedule = FlatEndedCycles(1, 1 - FLAT_END, setting.samples[0])
    else:
        schedule = SamplingSchedule(burn_in_epochs=setting.epochs * 4 // 5, every_n_epochs=1)
    callbacks: list[pl.Callback] = [schedule, SampleCollector(in_memory=True), BayesianModelAverage(ood={OOD: unknown})]
    if method in ("reSGHMC×P4", "ICSGHMC×P4"):
        callbacks.append(VarianceReducedEnergy(setting.contour_epoch - 2, every_n_epochs=2))
    if method == "reSGHMC×P4":
        callbacks.append(replica_exchange(setting))
    if method == "ICSGHMC×P4":
        callbacks.append(interacting_contour(setting))
    return callbacks


def replica_exchange(setting: Settings) -> ReplicaExchange:
    """Return reSGHMC's callback, with the bias of the coldest pair as a variance of the energies' noise."""
    coldness = (1 - 1 / LADDER[1]) / setting.temperature  # δ of the coldest pair
    variance = setting.swap_barrier / coldness
    return ReplicaExchange(LADDER, every_n_steps=setting.attempts, noise_variance=variance, include_prior=False)


def interacting_contour(setting: Settings) -> ContourGradient:
    """Return ICSGHMC's callback."""
    rules = ContourRules(
        zeta=setting.zeta,
        weighting="bin",
        weight_exponent=1 / setting.zeta,
        min_multiplier=-CLAMP,
        max_multiplier=CLAMP,
    )
    return ContourGradient(
        rules,
        num_bins=200,
        first_edge=setting.first_edge,
        width=setting.width,
        step_size=DecayingStepSize(setting.step_size, 0.0, 0.0),
        include_prior=False,
        warm_up_steps=setting.contour_epoch * setting.steps_per_epoch,
        interacting=True,
    )


def datamodules(setting: Settings, options: Options) -> tuple[Any, Any]:
    """Return CIFAR-100 and SVHN in CIFAR's normalisation; or synthetic images, and those of other classes."""
    if setting.data == "synthetic":
        sizes = (setting.num_data, 0, setting.num_test)
        unknown = SyntheticImages(1000, options.seed, sizes=(1, 0, setting.num_test), unknown=True)
        return SyntheticImages(setting.batch, options.seed, sizes=sizes, augment=True), unknown
    known = CIFAR100DataModule(
        options.data_root, setting.batch, val_size=0, augment=True, random_erasing=0.5, device_resident=True
    )

    class SVHNAsKnown(SVHNDataModule):
        def transform(self) -> Any:
            return known.transform()

    return known, SVHNAsKnown(options.data_root, 1000, val_size=0, device_resident=True)


def one(method: str, seed: int, setting: Settings, options: Options) -> dict[str, Any]:
    """Train and test the chains of a method.

    Returns:
        `metrics`, by their names in the table; `running`, the average's metrics after each sample; `entropy`, of the
        predictions on the out-of-distribution images, in nats.
    """
    prepare_run(options)
    pl.seed_everything(options.seed + seed, verbose=False)
    data, unknown = datamodules(setting, options)
    callbacks = callbacks_of(method, setting, unknown)
    pictured = method in PICTURED and seed == 0
    if pictured:
        callbacks.append(PosteriorDashboard("end", figures=("schedule", "energy", "weights", "geometry", "contour")))
    trainer = quiet_trainer(
        accelerator=options.accelerator(),
        devices=1,
        precision="bf16-mixed" if options.full else None,
        max_epochs=setting.epochs * (CHAINS if method.endswith("T4") else 1),
        log_every_n_steps=10,
        callbacks=callbacks,
        logger=CSVLogger(options.out, name=method.replace("×", "_"), version="") if pictured else False,
        enable_progress_bar=options.full,
    )
    module = module_of(method, setting, options)
    resumed_fit(trainer, module, data)
    trainer.test(module, datamodule=data, verbose=False)
    evaluation = module.evaluations["test"]
    bma = evaluation.bma
    by_logits = logit_average(module, data.test_dataloader(), trainer.strategy.root_device)
    metrics = {
        "accuracy %": 100 * bma["accuracy"],
        "NLL, sum over the test set": setting.num_test * bma["nll"],
        "accuracy %, logits averaged": 100 * by_logits["accuracy"],
        "NLL, sum over the test set, logits averaged": setting.num_test * by_logits["nll"],
        "Brier score ×1000, out of distribution": 1000 * bma[f"ood_{OOD}_brier"],
        "AUROC, out of distribution": bma[f"ood_{OOD}_auroc"],
        "accuracy %, one network": 100 * evaluation.single["accuracy"],
        "effective number of samples": (evaluation.weight_efficiency or 1.0) * len(evaluation.members),
    }
    entropy = predictive_entropy(evaluation.ood[OOD].terms["probabilities"]).tolist()
    return {"metrics": metrics, "running": evaluation.running, "entropy": entropy}
