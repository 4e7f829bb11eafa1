"""One epoch of Bayesian logistic regression on Covertype: SGLD, pSGLD, SGHMC, EWSG and FlyMC (EWSG, Table 1).

Cover type 2 against the rest, 80/20, prior N(0, 10·I), batches of 50, the paper's steps h: SGHMC 1e-3, EWSG 3e-3 (both
underdamped with γ = 50), SGLD 2e-5, pSGLD and FlyMC 5e-3. (The paper's formula writes the prior as 5‖θ‖², which is N(0,
0.1·I); its text says covariance 10·I, or ‖θ‖²/20, which we use.) A repeat is 100 independent chains; their last states
after one pass make one predictive average. All start at θ = 0; the paper does not state the start. The budget is exact:
one gradient of each datum, so EWSG with M = 1 makes half the steps.

The paper does not state how it scales the columns, and its steps depend on it: Euler's scheme is stable where h times
the largest curvature is below γ. With standardised numbers the curvature is 32,476 (`laplace`; all 54 columns, 74
thousand rows), so h = 1e-3 is stable and 3e-3 is not. There is a table for each of `column_scales`. In the first all
columns are multiplied by 0.6 (`full`: 0.268, for the same curvature of six times as many rows), where all published
steps are stable. The scale was chosen after the second table, with standardised columns, had been seen, as a round
number at which h = 3e-3 is stable; no other scale was tried here.

`quick` has the data folder's 92,962 rows, so one pass is 1,488 batches where the paper's has 9,297; `full` takes all
581,012, which scikit-learn downloads. "Converged" are full-gradient chains on the same rows, in coordinates where the
posterior is nearly a standard normal, started from its Laplace approximation: the limit for all methods. FlyMC starts
at the mode, at which its bound is tuned, resamples 50 lights in each of as many steps as a pass has batches, and is
exact; finding the mode is not counted. Times are of 100 chains without a trainer, relative to SGLD's, measured in turn
in one process.

Measured (`quick`, 10 repeats, seed 0), columns times 0.6: log likelihood of SGLD -0.5162, SGHMC -0.5162, EWSG -0.5149,
pSGLD -0.556, FlyMC -0.5094, converged -0.5094. EWSG is ahead of SGHMC by 0.00125 ± 0.00007 and of SGLD by 0.00128 ±
0.00008; the paper has 0.002. Its accuracies are 75.28 (SGLD), 75.27 (SGHMC) and 75.31 (EWSG), ours 75.29 ± 0.01, 75.29
± 0.02 and 75.45 ± 0.03. The level of the log likelihood is not the paper's (-0.525), pSGLD is further behind, and FlyMC
is ahead of EWSG. EWSG's lead is its larger step: at h = 3e-3 SGHMC has -0.5126, ahead of EWSG by 0.0024 ± 0.0002,
because EWSG makes half as many steps and its rule prefers larger gradients.

Standardised columns: SGLD -0.5123, SGHMC -0.5127, EWSG -0.5291 (h = 1e-3: -0.5150), pSGLD -0.547, FlyMC -0.5094, so
EWSG is behind SGHMC by 0.0163 ± 0.0005. At these steps mini-batch noise is hundreds of times the injected noise, as the
chains' distance from FlyMC's shows. Times: pSGLD 1.4 to 1.7, SGHMC 1.1, EWSG 1.0 to 1.2, FlyMC 70 to 95 (the paper has
1.40, 1.02, 1.22, 94); the machine was busy.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.datamodules import CovertypeDataModule
from lightning_sgmcmc.datamodules.base import Split
from lightning_sgmcmc.figures.canvas import canvas, legend_above, save_figure
from lightning_sgmcmc.recipes.shared.figures import INTERVAL, draw_band
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.logistic import laplace_approximation
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.samplers import SGLD, UnderdampedLangevin, pSGLD
from lightning_sgmcmc.simulation import (
    ExponentialGradient,
    FullGradient,
    GradientEstimator,
    LogisticBound,
    UniformGradient,
)
from lightning_sgmcmc.simulation.finite_sums import FiniteSum, LogisticRegressionSum
from lightning_sgmcmc.simulation.firefly import firefly
from lightning_sgmcmc.simulation.subsampled_chains import sample_sum


@dataclass(frozen=True)
class Settings:
    """The settings of `covertype_logistic.yaml`.

    Attributes:
        full_table: all 581,012 rows instead of those of the data folder.
        repeats: of each method with batches.
        firefly_chains: chains of FlyMC.
        column_scales: a table for each; the columns, with numbers standardised, are multiplied by it.
        chains: of a repeat.
        batch: batch size, and lights that FlyMC resamples.
    """

    full_table: bool
    repeats: int
    firefly_chains: int
    column_scales: tuple[float, ...]
    chains: int
    batch: int

    @property
    def work(self) -> float:
        """The gradients of all methods with batches."""
        rows = 581_012 if self.full_table else 92_962
        return float(rows * self.chains * self.repeats * len(METHODS) * len(self.column_scales))


PRIOR_VARIANCE = 10.0
FIREFLY_STEP = 5e-3
MARKS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
UNDERDAMPED = partial(UnderdampedLangevin, friction=50.0)
METHODS: dict[str, tuple[Any, Callable[[int], GradientEstimator], float]] = {
    "SGLD": (SGLD, UniformGradient, 2e-5),
    "pSGLD": (pSGLD, UniformGradient, 5e-3),
    "SGHMC": (UNDERDAMPED, UniformGradient, 1e-3),
    "EWSG": (UNDERDAMPED, ExponentialGradient, 3e-3),
    "EWSG, h = 1e-3": (UNDERDAMPED, ExponentialGradient, 1e-3),
    "SGHMC, h = 3e-3": (UNDERDAMPED, UniformGradient, 3e-3),
}
PAPER = {
    "SGLD": (75.283, -0.525, 1.0),
    "pSGLD": (75.126, -0.526, 1.40),
    "SGHMC": (75.268, -0.525, 1.02),
    "EWSG": (75.306, -0.523, 1.22),
    "FlyMC": (75.199, -0.523, 94.4),
}
NONE = (None, None, None)
PAIRS = (("EWSG", "SGHMC"), ("EWSG", "SGLD"), ("EWSG", "SGHMC, h = 3e-3"))
CONVERGED, FIREFLY = "converged, full gradient", "FlyMC"
CONVERGED_STEP, CONVERGED_STEPS = 0.05, 200


class Whitened(FiniteSum):
    """A posterior in the coordinates φ of θ = θ* + L·φ, for full gradients only."""

    def __init__(self, target: FiniteSum, centre: Tensor, factor: Tensor) -> None:
        self.target, self.centre, self.factor = target, centre, factor
        self.dimension, self.num_data = target.dimension, target.num_data

    def place(self, x: Tensor) -> Tensor:
        """Return θ."""
        return self.centre + x @ self.factor.T

    def gradient(self, x: Tensor) -> Tensor:
        return self.target.gradient(self.place(x)) @ self.factor

    def energy(self, x: Tensor) -> Tensor:
        return self.target.energy(self.place(x))

    def batch_gradients(self, x: Tensor, indices: Tensor) -> Tensor:
        return self.target.batch_gradients(self.place(x), indices) @ self.factor


def laplace(target: LogisticRegressionSum) -> tuple[Tensor, Tensor]:
    """Return the mode, by Newton's method, and L with LLᵀ the inverse Hessian there, in float64."""
    exact = target.to(dtype=torch.float64)
    return laplace_approximation(exact.inputs, exact.prior_variance, exact.gradient)


def predictions(places: Tensor, inputs: Tensor) -> Tensor:
    """Return the predictive average's probability of label 1, shape (n,), over places of shape (C, d)."""
    return torch.stack([(inputs @ part.T).sigmoid().double().mean(1) for part in places.split(50)]).mean(0)


def scores(chance: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the accuracy in % and the mean log likelihood of labels under probabilities of label 1."""
    accuracy = 100 * float(((chance > 0.5) == (labels == 1)).double().mean())
    safe = chance.clamp(1e-12, 1 - 1e-12)
    return accuracy, float(torch.where(labels == 1, safe.log(), (1 - safe).log()).mean())


def one_pass(target: LogisticRegressionSum, method: str, settings: Settings, seed: int) -> tuple[Tensor, float]:
    """Return a method's chains at the marks, shape (S, C, d), and the time of the pass in seconds."""
    sampler, gradient, lr = METHODS[method]
    start = time.perf_counter()
    run = sample_sum(
        target,
        sampler,
        gradient(settings.batch),
        lr=lr,
        num_passes=1.0,
        num_chains=settings.chains,
        initial=torch.zeros(target.dimension),
        at_passes=MARKS,
        seed=seed,
    )
    return run.positions, time.perf_counter() - start


def converged(target: LogisticRegressionSum, chains: int, seed: int) -> Tensor:
    """Return the last states of full-gradient chains, shape (C, d)."""
    centre, factor = (part.float() for part in laplace(target))
    white = Whitened(target, centre, factor)
    run = sample_sum(
        white, SGLD, FullGradient(), lr=CONVERGED_STEP, num_steps=CONVERGED_STEPS, num_chains=chains, seed=seed
    )
    return white.place(run.last)


def fireflies(target: LogisticRegressionSum, settings: Settings, seed: int) -> tuple[list[Tensor], float, float]:
    """Return each chain's last state (1, d), the time of 100 chains, and the epochs of one."""
    exact = target.to(dtype=torch.float64)
    mode, _ = laplace(target)
    bound = LogisticBound.tuned(exact.inputs, exact.labels, PRIOR_VARIANCE**0.5, mode)
    steps, chains = -(-target.num_data // settings.batch), settings.firefly_chains
    ends, passes, start = [], 0.0, time.perf_counter()
    for chain in range(chains):
        run = firefly(bound, mode, steps, resampled=settings.batch, step_size=FIREFLY_STEP, seed=seed + chain)
        ends.append(run.draws[-1:].float())
        passes += float(run.evaluations.sum()) / target.num_data / chains
    return ends, (time.perf_counter() - start) * settings.chains / chains, passes


@cache
def load(root: Path, full: bool, scale: float) -> tuple[LogisticRegressionSum, Split]:
    """Return the posterior of the training part and the test part, with all columns times a scale."""
    data = CovertypeDataModule(root, full=full, test_fraction=0.2)
    require(data)
    train, _, test = data.splits
    return LogisticRegressionSum(scale * train.inputs, train.targets, PRIOR_VARIANCE), Split(
        scale * test.inputs, test.targets
    )


def one(
    method: str, scale: float, repeat: int, settings: Settings, options: Options
) -> tuple[list[Tensor], float, float]:
    """Return a run's test probabilities at the marks or its end, its seconds, and its epochs."""
    target, test = load(options.data_root, settings.full_table, scale)
    if method == CONVERGED:
        return [predictions(converged(target, settings.chains, options.seed), test.inputs)], 0.0, 0.0
    if method == FIREFLY:
        ends, seconds, passes = fireflies(target, settings, options.seed)
        return [predictions(torch.cat(ends), test.inputs)], seconds, passes
    places, seconds = one_pass(target, method, settings, options.seed + repeat)
    return [predictions(at, test.inputs) for at in places], seconds, 1.0


def run(options: Options) -> list[Row]:
    """Run all methods at all scales, draw the learning curves, return the tables."""
    settings = read_settings(Settings, options)
    repeats, chosen = options.repeated(settings.repeats), options.chosen((*METHODS, FIREFLY))
    jobs = []
    for scale in settings.column_scales:
        alone = [CONVERGED, *(method for method in chosen if method == FIREFLY)]
        jobs += [(method, scale, 0) for method in alone]
        jobs += [(method, scale, repeat) for repeat in repeats for method in chosen if method in METHODS]
    load(options.data_root, settings.full_table, settings.column_scales[0])
    found = run_jobs(one, jobs, options, settings, in_turn=True)  # times are compared
    rows = []
    for index, scale in enumerate(settings.column_scales):
        _, test = load(options.data_root, settings.full_table, scale)
        own = {(method, repeat): outcome for (method, at, repeat), outcome in found.items() if at == scale}
        rows += _table(own, test.targets, f"columns × {scale:g}: ")
        curves = {method: _levels(own, method, test.targets) for method in chosen if method in METHODS}
        name = "log_likelihood.png" if index == 0 else f"log_likelihood_{scale:g}.png"
        level = scores(own[CONVERGED, 0][0][0], test.targets)[1]
        _picture({method: levels.tolist() for method, levels in curves.items()}, level, options.out / name)
    return rows


Outcomes = dict[tuple[str, int], tuple[list[Tensor], float, float]]


def _levels(found: Outcomes, method: str, labels: Tensor) -> Tensor:
    """Return the log likelihood of each repeat at the marks, shape (R, S)."""
    own = [chances for (name, _), (chances, _, _) in found.items() if name == method]
    return torch.tensor([[scores(chance, labels)[1] for chance in chances] for chances in own], dtype=torch.float64)


def _table(found: Outcomes, labels: Tensor, label: str) -> list[Row]:
    """Return the rows of a scale: all methods, differences by repeat, times."""
    truth, methods = found[CONVERGED, 0][0][0], list(dict.fromkeys(method for method, _ in found))
    seconds = {m: [time for (name, _), (_, time, _) in found.items() if name == m] for m in methods}
    rows = []
    for method in methods:
        own = [chances[-1] for (name, _), (chances, _, _) in found.items() if name == method]
        rows += _rows(label, method, own, truth, labels)
        paper = PAPER.get(method, NONE)[2]
        if method == FIREFLY and "SGLD" in methods:
            mean = sum(seconds["SGLD"]) / len(seconds["SGLD"])
            rows.append(Row(label + method, "time over SGLD's", seconds[method][0] / mean, None, paper))
        elif method in METHODS and "SGLD" in methods:
            ratio = [time / first for time, first in zip(seconds[method], seconds["SGLD"], strict=True)]
            rows.append(mean_row(label + method, "time over SGLD's", ratio, paper))
        if method == FIREFLY:
            rows.append(Row(label + method, "epochs", found[method, 0][2]))
    for better, worse in PAIRS:
        if better in methods and worse in methods:
            gains = _levels(found, better, labels)[:, -1] - _levels(found, worse, labels)[:, -1]
            paper = None
            if worse in PAPER:
                paper = round(PAPER[better][1] - PAPER[worse][1], 4)
            rows.append(mean_row(f"{label}{better} - {worse}", "log likelihood", gains.tolist(), paper))
    return rows


def _rows(label: str, method: str, chances: Sequence[Tensor], truth: Tensor, labels: Tensor) -> list[Row]:
    accuracy, level = zip(*(scores(chance, labels) for chance in chances), strict=True)
    paper = PAPER.get(method, NONE)
    rows = [
        mean_row(label + method, "accuracy %", accuracy, paper[0]),
        mean_row(label + method, "log likelihood", level, paper[1]),
    ]
    if chances[0] is not truth:
        errors = [float((chance - truth).abs().mean()) for chance in chances]
        rows.append(mean_row(label + method, "mean |probability - converged|", errors))
    return rows


def _picture(curves: dict[str, list[list[float]]], level: float, path: Path) -> None:
    figure, (axes,) = canvas(height=3.6)
    for index, (method, repeats) in enumerate(curves.items()):
        draw_band(axes, MARKS, repeats, index, method)
    axes.axhline(level, color="black", linestyle=":", linewidth=1, label="converged")
    axes.set_xlabel("epochs")
    axes.set_ylabel(f"test log likelihood (nats)\n{INTERVAL}")
    legend_above(axes, columns=4)
    save_figure(figure, path)
