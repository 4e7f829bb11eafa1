"""Bayesian networks on MNIST by EWSG and other samplers, at equal epochs (EWSG, Tables 2 and 3).

A perceptron 784-100-10 and a convolutional network under a standard normal prior on weights and biases; the figure is
the test error of the average over 100 samples from the second half of a run, which starts at torch's initialisation.
EWSG (M = 1) makes half as many steps, of twice the size, so that all compute the same number of gradients.

What the paper leaves open, and our choices:

* h of the underdamped methods is the time step, and γ the friction, of the equation for the mean potential U/N at
  temperature 1/N: h/√N and γ·√N of the one for U, a step size of h² of the mean potential and a momentum of 1 - hγ.
  With h itself on U (a step size of h²·N = 0.24, a momentum of 0.9998) the noise of mini-batches inflates the variance
  without bound: at h = 2e-3 (and 1e-3) and γ = 0.1 the perceptron is at 90 % error within 5 passes, with pixels in [0,
  1] as with standardised ones. Table 3's h = 10/(b(M+1)) has the same meaning.
* SGLD's h is of U: `lr` = h·N.
* pSGLD preconditions by gradients of the sum. Its G is then 1/N of this library's, whose gradients are of the mean: so
  `lr` = h, and λ = 1e-5/N. (G by the mean's gradients and h of U would be an `lr` of 6.)
* Images are standardised by the training part's mean and deviation. "100 independent samples" are 100 evenly spaced
  states; Table 3 has 10.

"SGHMC, EWSG's step" is not in the paper: it shows how much of EWSG's gain comes from its larger step. CP-SGHMC has
batches stratified by k-means with 10 clusters. They remove 18 % of the mini-batch gradient's variance at the start, 1 %
after one pass of SGD, 0.3 % after six (10,000 images; by the true labels 33, 18 and 7 %).

`full` is the paper's setting (a GPU runs the 10 repeats side by side), which has not been run. `quick` has the first
10,000 images and three repeats. Its perceptron makes 24 passes: 50 times fewer steps, all 12 times as large, so a
quarter of the paper's time of the equation. Its convolutional network is smaller (4 and 8 maps, layers of 40) and makes
8 passes; four cells of b×(M+1) have the paper's step sizes. The posterior of 10,000 data differs from the paper's, and
its errors are larger.

Measured (`quick`, seeds 0 to 2, 480 s of processor time), test errors in %:

| | pSGLD | SGLD | CP-SGHMC | SGHMC, EWSG's step | EWSG | SGHMC |
|---|---|---|---|---|---|---|
| perceptron | 6.83 ± .24 | 6.80 ± .13 | 6.93 ± .10 | 7.18 ± .09 | 7.40 ± .10 | 7.25 ± .12 |
| convolutional network | 18.8 ± .5 | 13.0 ± .7 | 12.3 ± .3 | 7.6 ± .9 | 14.2 ± .6 | 12.1 ± .3 |

This is not the paper's order: EWSG - SGHMC is .15 ± .21 on the perceptron (the paper -.04; -.05 ± .15 in an earlier run
of 40 passes) and +2.2 ± .3 on the other, where 8 passes are too few: twice EWSG's steps of EWSG's size are the best
there. In Table 3 EWSG is a little better than SGHMC where a step has 200 gradients (7.42 ± .20 against 7.78 ± .10; the
paper 1.86 against 1.94), and equal to it where it has 1,000; with 5,000 a run has 48 steps and stays at chance. The
scale of the inputs, which the paper does not state, changes the order: with pixels in [0, 1] and all else equal (an
earlier run of the perceptron with 40 passes and 100 samples) pSGLD has 6.81 ± .07, EWSG 6.86 ± .11, SGHMC 7.04 ± .11,
SGLD 7.40 ± .17, and EWSG - SGHMC is -.19 ± .07.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior, samplers
from lightning_sgmcmc.batches.orders import ClusteredOrder, cluster_data
from lightning_sgmcmc.callbacks import EWSG, SamplingSchedule
from lightning_sgmcmc.datamodules import MNISTDataModule, Split
from lightning_sgmcmc.figures.canvas import save_figure
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.shared.costs import forward_flops
from lightning_sgmcmc.recipes.shared.error_curves import Curve, ErrorCurves, deviation, learning_curves
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import prepare_run, quiet_trainer, resumed_fit

NUM_DATA = 60_000
CLUSTERS = 10
FRICTION = {"MLP": 0.1, "CNN": 1.0}
LAMBDA = 1e-5
UNDERDAMPED = ("SGHMC", "SGHMC, EWSG's step", "CP-SGHMC", "EWSG")
STEPS = {  # of the paper, for MLP and CNN
    "SGLD": (1e-7, 2e-8),
    "pSGLD": (1e-4, 8e-6),
    "SGHMC": (2e-3, 2e-3),
    "SGHMC, EWSG's step": (4e-3, 4e-3),
    "CP-SGHMC": (2e-3, 2e-3),
    "EWSG": (4e-3, 4e-3),
}
PAPER = {
    "SGLD": ((1.976, 0.055), (0.848, 0.060)),
    "pSGLD": ((1.821, 0.061), (0.860, 0.052)),
    "SGHMC": ((1.833, 0.073), (0.778, 0.040)),
    "CP-SGHMC": ((1.835, 0.047), (0.772, 0.055)),
    "EWSG": ((1.793, 0.100), (0.753, 0.035)),
}
PAPER_BATCHES = {  # by b and M+1: EWSG, and SGHMC with batches of b·(M+1)
    (100, 2): (1.86, 1.94),
    (100, 5): (1.83, 1.92),
    (100, 10): (1.80, 1.97),
    (200, 2): (1.90, 1.87),
    (200, 5): (1.87, 1.97),
    (200, 10): (1.80, 2.07),
    (500, 2): (1.79, 1.97),
    (500, 5): (2.01, 2.17),
    (500, 10): (2.36, 2.37),
}


@dataclass(frozen=True)
class Settings:
    """Settings that differ between quick and full.

    Attributes:
        images: N: the first images of MNIST's training images.
        epochs, epochs_cnn: epochs of a run of each network; samples are drawn in the second half.
        coarser: factor of the paper's step sizes, for runs of fewer steps.
        repeats: repeats of each run.
        networks: the networks to run.
        cells: cells (b, M+1) of the table of b×(M+1).
        coarser_table: factor of the table's step sizes.
        samples: samples of a run of Table 2.
        maps, hidden: channels of the convolutions and width of the layers of the convolutional network.
    """

    images: int
    epochs: int
    epochs_cnn: int
    coarser: float
    repeats: int
    networks: tuple[str, ...]
    cells: tuple[tuple[int, int], ...]
    coarser_table: float
    samples: int
    maps: tuple[int, int]
    hidden: int

    def passes(self, network: str) -> int:
        """Return the epochs of a run of a network."""
        return self.epochs if network == "MLP" else self.epochs_cnn

    @property
    def work(self) -> float:
        """Gradient evaluations times the network's floating-point operations, over all runs."""
        shapes = {"MLP": (784,), "CNN": (1, 28, 28)}
        names = [case.network for case in cases(self)]
        flops = {name: forward_flops(functools.partial(network_of, name, self), shapes[name]) for name in set(names)}
        return float(self.repeats * self.images * sum(self.passes(name) * flops[name] for name in names))


class Case(NamedTuple):
    """A run: its network, method, step size, batch b, M+1, and number of samples."""

    network: str
    method: str
    step: float
    batch: int = 100
    candidates: int = 1
    samples: int = 100


def main_cases(setting: Settings) -> list[Case]:
    """Return the runs of Table 2."""
    found = []
    for network, (method, steps) in itertools.product(setting.networks, STEPS.items()):
        step = setting.coarser * steps[("MLP", "CNN").index(network)]
        candidates = 2 if method == "EWSG" else 1
        found.append(Case(network, method, step, candidates=candidates, samples=setting.samples))
    return found


def batch_cases(batch: int, candidates: int, setting: Settings) -> tuple[Case, Case]:
    """Return the runs of a cell of Table 3: EWSG, and SGHMC with the same number of data per step."""
    step = setting.coarser_table * 10 / (batch * candidates)
    ewsg = Case("MLP", "EWSG", step, batch, candidates, samples=10)
    return ewsg, Case("MLP", "SGHMC", step, batch * candidates, samples=10)


def cases(setting: Settings) -> list[Case]:
    """Return all runs of a setting, each once; several cells of Table 3 share one SGHMC run."""
    cells = [batch_cases(*cell, setting) for cell in setting.cells]
    return list(dict.fromkeys([*main_cases(setting), *itertools.chain.from_iterable(cells)]))


class FirstImages(MNISTDataModule):
    """The first training images of MNIST, as many as in the setting, and all test images."""

    def __init__(self, setting: Settings, batch_size: int, options: Options, flatten: bool) -> None:
        super().__init__(options.data_root, batch_size, val_size=0, flatten=flatten, device_resident=True)
        self.images = setting.images

    def load(self) -> tuple[Split, Split, Split]:
        train, none, test = super().load()
        return Split(train.inputs[: self.images], train.targets[: self.images]), none, test


def network_of(name: str, setting: Settings) -> nn.Sequential:
    """Return the paper's network."""
    if name == "MLP":
        return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    (first, second), hidden = setting.maps, setting.hidden
    convolutions: list[nn.Module] = []
    for inputs, outputs in ((1, first), (first, second)):
        convolutions += [nn.Conv2d(inputs, outputs, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(16 * second, hidden), nn.ReLU(), nn.Linear(hidden, hidden)]
    layers += [nn.ReLU(), nn.Linear(hidden, 10)]
    return nn.Sequential(*convolutions, *layers)


def sampler_of(case: Case, setting: Settings) -> tuple[Any, float]:
    """Return the sampler and its `lr`, for step sizes as the paper writes them (see above)."""
    step = case.step
    if case.method == "SGLD":
        return samplers.SGLD, step * NUM_DATA
    if case.method == "pSGLD":
        return functools.partial(samplers.pSGLD, alpha=0.99, eps=LAMBDA / setting.images), step
    root = math.sqrt(setting.images)
    return functools.partial(samplers.UnderdampedLangevin, friction=FRICTION[case.network] * root), step / root


def run(options: Options) -> list[Row]:
    """Run all methods with all seeds, draw the learning curves, return the table."""
    setting = read_settings(Settings, options)
    clusters = clusters_of(setting, options)  # what data are missing is said at once
    on_gpu = options.accelerator() != "cpu" and torch.cuda.is_available()
    # A GPU makes the repeats side by side, as chains.
    seeds = [options.seed] if on_gpu else options.seeds(setting.repeats)
    chains = len(options.repeated(setting.repeats)) if on_gpu else 1
    jobs = list(itertools.product(cases(setting), seeds))
    outcomes = run_jobs(one, jobs, options, chains, clusters, setting, in_turn=on_gpu)
    curves = {case: [curve for seed in seeds for curve in outcomes[case, seed]] for case in cases(setting)}
    return report(curves, setting, options)


def clusters_of(setting: Settings, options: Options) -> Tensor:
    """Return the cluster of each training image."""
    data = FirstImages(setting, 100, options, flatten=True)
    data.prepare_data()
    data.setup("fit")
    return cluster_data(data.transform()(data.splits[0].inputs), CLUSTERS, options.seed)


def callbacks_of(case: Case, setting: Settings) -> list[pl.Callback]:
    """Return the schedule, and the callback that chooses mini-batches."""
    batches = math.ceil(setting.images / case.batch)
    steps = math.ceil(batches / case.candidates) * setting.passes(case.network)
    every = max(1, steps // 2 // case.samples)
    found: list[pl.Callback] = [SamplingSchedule(burn_in_steps=steps - every * case.samples, every_n_steps=every)]
    if case.candidates > 1:
        found.append(EWSG(case.candidates - 1))
    return found


def one(case: Case, seed: int, chains: int, clusters: Tensor, setting: Settings, options: Options) -> list[Curve]:
    """Run one case, with one chain or several."""
    prepare_run(options)
    pl.seed_everything(seed, verbose=False)
    data = FirstImages(setting, case.batch, options, flatten=case.network == "MLP")
    data.setup("fit")
    if case.method == "CP-SGHMC":
        data.order = functools.partial(ClusteredOrder, clusters=clusters)
    sampler, lr = sampler_of(case, setting)
    module = BayesianModule(
        net=network_of(case.network, setting),
        likelihood=Categorical(),
        prior=GaussianPrior(1.0),
        sampler=sampler,
        lr=lr,
        num_chains=chains,
    )
    curves = ErrorCurves(data, setting.passes(case.network) // 2)
    trainer = quiet_trainer(
        accelerator=options.accelerator(),
        max_epochs=setting.passes(case.network),
        callbacks=[*callbacks_of(case, setting), curves],
    )
    resumed_fit(trainer, module, data)
    return curves.curves


def report(curves: dict[Case, list[Curve]], setting: Settings, options: Options) -> list[Row]:
    """Draw the learning curves, return the table."""
    rows = []
    for network in setting.networks:
        own = {case.method: curves[case] for case in main_cases(setting) if case.network == network}
        save_figure(learning_curves(own), options.out / f"learning_curves_{network}.png")
        rows += rows_of(network, own)
    for batch, candidates in setting.cells:
        paper = PAPER_BATCHES.get((batch, candidates), (None, None))
        metric = f"MLP: test error, b = {batch}, M+1 = {candidates}, %"
        for case, figure in zip(batch_cases(batch, candidates, setting), paper, strict=True):
            rows.append(mean_row(case.method, metric, [curve.average[-1][1] for curve in curves[case]], figure))
    return rows


def rows_of(network: str, curves: dict[str, list[Curve]]) -> list[Row]:
    """Return the figures of Table 2, and differences in pairs of equal seeds."""
    rows, final = [], {method: [curve.average[-1][1] for curve in own] for method, own in curves.items()}
    for method, errors in final.items():
        mean, spread = PAPER[method][("MLP", "CNN").index(network)] if method in PAPER else (None, None)
        rows.append(mean_row(method, f"{network}: test error, %", errors, mean))
        if len(errors) > 1:
            rows.append(Row(method, f"{network}: its standard deviation over runs", deviation(errors), None, spread))
        single = [sum(curve.single) / len(curve.single) for curve in curves[method]]
        rows.append(mean_row(method, f"{network}: test error of single samples, %", single))
        rows.append(mean_row(method, f"{network}: epochs", [curve.average[-1][0] for curve in curves[method]]))
    for other in (method for method in final if method != "EWSG"):
        gains = [a - b for a, b in zip(final["EWSG"], final[other], strict=True)]
        place = ("MLP", "CNN").index(network)
        paper = round(PAPER["EWSG"][place][0] - PAPER[other][place][0], 3) if other in PAPER else None
        rows.append(mean_row(f"EWSG - {other}", f"{network}: test error, %", gains, paper))
    return rows
