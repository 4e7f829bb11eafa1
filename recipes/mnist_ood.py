"""Predictive entropy on notMNIST of MNIST networks, for cyclical samplers and baselines (cSG-MCMC, Figure 4).

A three-layer perceptron on all of MNIST by eight methods: SGD and momentum SGD, their Snapshot ensembles, and SGLD and
SGHMC with one cycle and with several. All follow the cosine step size of the paper's eq. (2), with noise in the last
part of each cycle, and all take the same number of samples. The paper states the temperature 1 and the authors' program
uses 1/N, so the samplers run at both. The paper gives a figure and no numbers: its order, from few to many predictions
of low entropy, is cSGHMC and cSGLD, Snapshot, SGHMC and SGLD, SGDM and SGD. Ours is the same at temperature 1 (with two
repeats, the gap between Snapshot and cyclical samplers is about as large as its error). At 1/N the noise has no effect:
cyclical samplers equal Snapshot, and those with one cycle equal their optimizers.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_sgmcmc.figures.canvas import COLOURS, canvas, save_figure
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.trainers import quiet_trainer, resumed_fit, silence_lightning

if TYPE_CHECKING:
    from lightning_sgmcmc.datamodules import MNISTDataModule, NotMNISTDataModule

NUM_DATA = 60_000
HIDDEN = 200
BATCH = 100
PRIOR_STD = (NUM_DATA * 5e-4) ** -0.5  # the program's weight decay 5e-4 of the mean loss
LR = {"SGLD": 0.5, "SGHMC": 0.05}
FRICTION = 0.1
CYCLES = 4
EXPLORATION = 0.8
SAMPLES = 12
EPOCHS = {"quick": 16, "full": 200}
REPEATS = {"quick": 2, "full": 10}
LOW_ENTROPY = 0.5  # nats

TEMPERATURES = {"T=1": 1.0, "T=1/N": 1 / NUM_DATA}
FILES = {"T=1": "posterior", "T=1/N": "cold"}


class Method(NamedTuple):
    """A row of the table: which sampler, how many cycles, samples in each, and the temperature."""

    name: str
    sampler: str
    cycles: int
    samples_per_cycle: int
    temperature: float


def methods() -> list[Method]:
    """Return all methods."""
    found = []
    for sampler, plain in (("SGLD", "SGD"), ("SGHMC", "SGDM")):
        found.append(Method(plain, sampler, 1, 1, 0.0))
        found.append(Method(f"Snapshot-{plain}", sampler, CYCLES, 1, 0.0))
        for text, temperature in TEMPERATURES.items():
            found.append(Method(f"{sampler} {text}", sampler, 1, SAMPLES, temperature))
            found.append(Method(f"c{sampler} {text}", sampler, CYCLES, SAMPLES // CYCLES, temperature))
    return found


def run(options: Options) -> list[Row]:
    """Run all methods with all seeds, draw the distribution functions, return the table."""
    seeds, names = options.seeds(REPEATS[options.scale]), options.chosen(method.name for method in methods())
    chosen = [method for method in methods() if method.name in names]
    require(*data_of(options))
    jobs = list(itertools.product(chosen, seeds))
    outcomes = run_jobs(one, jobs, options)
    rows, entropies = [], {}
    for method in chosen:
        results = [outcomes[method, seed] for seed in seeds]
        entropies[method.name] = [entropy for _, entropy in results]
        for metric in results[0][0]:
            rows.append(mean_row(method.name, metric, [metrics[metric] for metrics, _ in results]))
    for text, file in FILES.items():
        shown = [m.name for m in chosen if m.name.endswith(f" {text}") or m.temperature == 0]
        save_figure(picture(entropies, shown, text), options.out / f"entropy_{file}.png")
    return rows


def data_of(options: Options) -> "tuple[MNISTDataModule, NotMNISTDataModule]":
    """Return MNIST and notMNIST."""
    from lightning_sgmcmc.datamodules import MNISTDataModule, NotMNISTDataModule

    known = MNISTDataModule(options.data_root, batch_size=BATCH, val_size=0, flatten=True)
    return known, NotMNISTDataModule(options.data_root, batch_size=1000, flatten=True)


def one(method: Method, seed: int, options: Options) -> tuple[dict[str, float], np.ndarray[Any, Any]]:
    """Train and test one network; return its figures, and the entropies of the predictions on notMNIST."""
    import pytorch_lightning as pl
    import torch
    from torchvision.ops import MLP

    from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior, samplers
    from lightning_sgmcmc.callbacks import BayesianModelAverage, CyclicalSchedule, SampleCollector
    from lightning_sgmcmc.diagnostics.metrics import predictive_entropy

    data, unknown = data_of(options)
    torch.set_num_threads(1)
    silence_lightning()
    pl.seed_everything(seed, verbose=False)
    sampler = functools.partial(samplers.SGHMC, friction=FRICTION) if method.sampler == "SGHMC" else samplers.SGLD
    module = BayesianModule(
        net=MLP(28 * 28, [HIDDEN, HIDDEN, 10], inplace=False),
        likelihood=Categorical(),
        prior=GaussianPrior(PRIOR_STD),
        sampler=sampler,
        lr=LR[method.sampler],
        temperature=method.temperature,
    )
    average = BayesianModelAverage(ood={"notmnist": unknown})
    # One cycle is as long as all cycles together, so its noise is on for as long as theirs.
    schedule = CyclicalSchedule(method.cycles, EXPLORATION, method.samples_per_cycle)
    trainer = quiet_trainer(
        accelerator="cpu",
        max_epochs=EPOCHS[options.scale],
        callbacks=[schedule, SampleCollector(in_memory=True), average],
    )
    resumed_fit(trainer, module, data)
    trainer.test(module, datamodule=data, verbose=False)
    evaluation = module.evaluations["test"]
    entropy = predictive_entropy(evaluation.ood["notmnist"].terms["probabilities"]).numpy()
    names = ("accuracy", "nll", "ece", "ood_notmnist_auroc", "ood_notmnist_entropy")
    metrics = {name: evaluation.bma[name] for name in names}
    return metrics | {f"share_below_{LOW_ENTROPY}": float((entropy < LOW_ENTROPY).mean())}, entropy


def picture(entropies: dict[str, list[np.ndarray[Any, Any]]], names: Iterable[str], temperature: str) -> Any:
    """Draw the empirical distribution functions of the entropy on notMNIST, with all repeats pooled."""
    figure, (axes,) = canvas(height=3.8)
    for name in names:
        values = np.sort(np.concatenate(entropies[name]))
        colour = COLOURS[("SGD", "Snapshot-SGD", "SGLD", "cSGLD").index(_family(name))]
        momentum = "SGDM" in name or "SGHMC" in name
        axes.plot(
            values,
            np.arange(1, len(values) + 1) / len(values),
            color=colour,
            linestyle="-" if momentum else "--",
            linewidth=1.3,
            label=name,
        )
    axes.set_xlim(0, np.log(10))
    axes.set_ylim(0, 1)
    axes.set_xlabel("entropy of the predictive distribution on notMNIST (nats)")
    axes.set_ylabel("share of images with a lower entropy")
    axes.set_title(f"samplers at {temperature}", fontsize=9)
    axes.legend(fontsize=8, loc="lower right")
    return figure


def _family(name: str) -> str:
    return name.split()[0].replace("SGDM", "SGD").replace("SGHMC", "SGLD")
