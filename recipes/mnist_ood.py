"""Predictive entropy on notMNIST of MNIST networks, for cyclical samplers and baselines (cSG-MCMC, Figure 4).

A three-layer perceptron on all of MNIST by eight methods: SGD and momentum SGD, their Snapshot ensembles, and SGLD and
SGHMC with one cycle and with several. All follow the cosine step size of the paper's eq. (2), with noise in the last
part of each cycle, and all take the same number of samples. The paper states the temperature 1 and the authors' program
uses 1/N, so the samplers run at both. It states nothing else on this experiment: the width of 200, step sizes and
batches are ours, weight decay, M and (in `full`) the 200 epochs those of its CIFAR runs.

The repeats of a method are the chains of one fit (`stacked`), each with its own start, batches and noise. On a CPU the
chains are computed one after another, so the first one is bit for bit the fit alone. Three chains of four epochs took
39 s of processor time and 81 s in all on a busy machine, three fits 48 s and 109 s (cSGHMC, one thread).

The paper gives a figure and no numbers: its order, from few to many predictions of low entropy, is cSGHMC and cSGLD,
Snapshot, SGHMC and SGLD, SGDM and SGD.

Measured (quick, 6 epochs, 3 repeats, 376 s of processor time): share of notMNIST images with an entropy below 0.5 nats,
SGD 0.58, SGLD 0.56, Snapshot-SGD 0.36, cSGLD 0.36; SGDM 0.59, SGHMC 0.57, Snapshot-SGDM 0.37, cSGHMC 0.37 (at
temperature 1). Methods of one repeat have the same start and batches, so differences are more precise than these
shares, whose standard errors are 0.01 to 0.07. Cycles without noise lower the share by 0.21 ± 0.03 (SGD) and 0.21 ±
0.02 (SGDM), noise without cycles by 0.020 ± 0.003 and 0.019 ± 0.004, both as in the paper. Noise in cycles lowers it by
0.001 ± 0.014 and 0.000 ± 0.020: the paper's gap between Snapshot and cyclical samplers does not show. An earlier run,
with other random numbers, had 0.20, 0.03 and 0.005 ± 0.009; one with 16 epochs and two repeats had a gap about as large
as its error. At 1/N the noise has no effect: SGLD and SGHMC with one cycle equal their optimizers to 0.002, cSGLD and
cSGHMC Snapshot to 0.006. Snapshots cost accuracy: 98.0 and 98.2 % against 98.2 and 98.4 % of one network, whose one
cycle is four times as long.
"""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_sgmcmc.figures.canvas import COLOURS, canvas, save_figure
from lightning_sgmcmc.recipes.shared.averages import chain_probabilities
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import prepare_run, quiet_trainer, resumed_fit

if TYPE_CHECKING:
    from lightning_sgmcmc import BayesianModule
    from lightning_sgmcmc.datamodules import MNISTDataModule, NotMNISTDataModule

NUM_DATA = 60_000
HIDDEN = 200
PRIOR_STD = (NUM_DATA * 5e-4) ** -0.5  # the program's weight decay 5e-4 of the mean loss
LR = {"SGLD": 0.5, "SGHMC": 0.05}
FRICTION = 0.1
LOW_ENTROPY = 0.5  # nats

TEMPERATURES = {"T=1": 1.0, "T=1/N": 1 / NUM_DATA}
FILES = {"T=1": "posterior", "T=1/N": "cold"}

Outcome = list[tuple[dict[str, float], "np.ndarray[Any, Any]"]]
"""For each repeat of a job its figures, and the entropies of the predictions on notMNIST."""


@dataclass(frozen=True)
class Settings:
    """The settings of the recipe.

    Attributes:
        epochs: epochs of a run.
        batch: images per batch.
        cycles: M of the cyclical methods.
        exploration: share of a cycle without noise.
        samples: of a run.
        repeats: networks of each method.
        stacked: make all repeats of a method as the chains of one fit, each with its own start, batches and noise,
            instead of a fit each.
    """

    epochs: int
    batch: int
    cycles: int
    exploration: float
    samples: int
    repeats: int
    stacked: bool

    @property
    def work(self) -> float:
        """Gradient evaluations of all runs."""
        return float(len(methods(self)) * self.repeats * self.epochs * NUM_DATA)


class Method(NamedTuple):
    """A row of the table: which sampler, how many cycles, samples in each, and the temperature."""

    name: str
    sampler: str
    cycles: int
    samples_per_cycle: int
    temperature: float


def methods(setting: Settings) -> list[Method]:
    """Return all methods."""
    found = []
    for sampler, plain in (("SGLD", "SGD"), ("SGHMC", "SGDM")):
        found.append(Method(plain, sampler, 1, 1, 0.0))
        found.append(Method(f"Snapshot-{plain}", sampler, setting.cycles, 1, 0.0))
        for text, temperature in TEMPERATURES.items():
            found.append(Method(f"{sampler} {text}", sampler, 1, setting.samples, temperature))
            per_cycle = setting.samples // setting.cycles
            found.append(Method(f"c{sampler} {text}", sampler, setting.cycles, per_cycle, temperature))
    return found


def run(options: Options) -> list[Row]:
    """Run all methods with all seeds, draw the distribution functions, return the table."""
    setting = read_settings(Settings, options)
    names = options.chosen(method.name for method in methods(setting))
    chosen = [method for method in methods(setting) if method.name in names]
    require(*data_of(setting, options))
    seeds = [options.seed] if setting.stacked else options.seeds(setting.repeats)
    chains = len(options.repeated(setting.repeats)) if setting.stacked else 1
    outcomes = run_jobs(one, list(itertools.product(chosen, seeds)), options, chains, setting)
    rows, entropies = [], {}
    for method in chosen:
        results = [repeat for seed in seeds for repeat in outcomes[method, seed]]
        entropies[method.name] = [entropy for _, entropy in results]
        for metric in results[0][0]:
            rows.append(mean_row(method.name, metric, [metrics[metric] for metrics, _ in results]))
    for text, file in FILES.items():
        shown = [m.name for m in chosen if m.name.endswith(f" {text}") or m.temperature == 0]
        save_figure(picture(entropies, shown, text), options.out / f"entropy_{file}.png")
    return rows


def data_of(setting: Settings, options: Options) -> "tuple[MNISTDataModule, NotMNISTDataModule]":
    """Return MNIST and notMNIST."""
    from lightning_sgmcmc.datamodules import MNISTDataModule, NotMNISTDataModule

    known = MNISTDataModule(options.data_root, batch_size=setting.batch, val_size=0, flatten=True)
    return known, NotMNISTDataModule(options.data_root, batch_size=1000, flatten=True)


def module_of(method: Method, chains: int) -> "BayesianModule":
    """Return the network, or the stack of chains, with its sampler."""
    from torchvision.ops import MLP

    from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior, samplers

    momentum = functools.partial(samplers.SGHMC, friction=FRICTION)
    return BayesianModule(
        net=MLP(28 * 28, [HIDDEN, HIDDEN, 10], inplace=False),
        likelihood=Categorical(),
        prior=GaussianPrior(PRIOR_STD),
        sampler=momentum if method.sampler == "SGHMC" else samplers.SGLD,
        lr=LR[method.sampler],
        temperature=method.temperature,
        num_chains=chains,
    )


def one(method: Method, seed: int, chains: int, setting: Settings, options: Options) -> Outcome:
    """Train and test one network, or a stack of them; return what each repeat found."""
    from lightning_sgmcmc.callbacks import CyclicalSchedule, SampleCollector
    from lightning_sgmcmc.namespace import pl

    prepare_run(options)
    pl.seed_everything(seed, verbose=False)
    data, unknown = data_of(setting, options)
    module = module_of(method, chains)
    # One cycle is as long as all cycles together, so its noise is on for as long as theirs.
    schedule = CyclicalSchedule(method.cycles, setting.exploration, method.samples_per_cycle)
    trainer = quiet_trainer(
        accelerator=options.accelerator(),
        devices=1,
        max_epochs=setting.epochs,
        callbacks=[schedule, SampleCollector(in_memory=True)],
    )
    resumed_fit(trainer, module, data)
    unknown.setup("test")
    unknown.normalise_as(data)
    return evaluated(module, data, unknown, trainer.strategy.root_device)


def evaluated(module: "BayesianModule", data: Any, unknown: Any, device: Any) -> Outcome:
    """Test each chain's average on MNIST and on notMNIST."""
    from lightning_sgmcmc.diagnostics.scores import (
        classification_metrics,
        out_of_distribution_metrics,
        predictive_entropy,
    )

    known, target = chain_probabilities(module, data.test_dataloader(), device)
    outside, _ = chain_probabilities(module, unknown.test_dataloader(), device)
    found: Outcome = []
    for of_known, of_unknown in zip(known, outside, strict=True):
        own = classification_metrics(of_known, target)
        apart = out_of_distribution_metrics(of_known, of_unknown)
        entropy = predictive_entropy(of_unknown).numpy()
        metrics = {name: float(own[name]) for name in ("accuracy", "nll", "ece")}
        metrics |= {f"ood_notmnist_{name}": float(apart[name]) for name in ("auroc", "entropy")}
        found.append((metrics | {f"share_below_{LOW_ENTROPY}": float((entropy < LOW_ENTROPY).mean())}, entropy))
    return found


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
