"""Decisions that need joint or epistemic uncertainty, as tasks: what to label, what to eat, what to answer.

Each task fits a row of `ROWS` within a budget of gradients, and returns its figures with the processor seconds of
training. Settings are those of recipe `equal_cost`, by kind of target. With few labels these fail, so `ADAM`,
`LABELLING` and `EATING` have others: the best on seeds 900 and 901 of up to ten tried for each row, whose cost is not
counted. AutoSampling has its defaults. Rows that validate take a fifth of the labels for it, where labels are what is
paid.
"""

import functools
import math
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adam

from lightning_sgmcmc import BayesianModule, GaussianPrior, Posterior, UnderdampedLangevin
from lightning_sgmcmc.callbacks import (
    AutoSampling,
    DeepEnsemble,
    MCDropout,
    SampleCollector,
    SamplingSchedule,
    WarmStart,
)
from lightning_sgmcmc.datamodules import DatasetDataModule, MushroomDataModule, Split
from lightning_sgmcmc.likelihoods import Categorical, Gaussian
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.posterior.guarantees import Score, uncertainty_of
from lightning_sgmcmc.recipes.equal_cost.methods import METHODS, Fit
from lightning_sgmcmc.recipes.equal_cost.problems import Problem
from lightning_sgmcmc.recipes.equal_cost.settings import Settings
from lightning_sgmcmc.recipes.shared.network_truth import data_of, scores
from lightning_sgmcmc.recipes.shared.small_networks import NETWORKS
from lightning_sgmcmc.seeding import derive_seed
from tests.benchmarks.small_networks import QUIET

Figures = dict[str, float]
METHOD_OF = {"one network": "sgd", "ensemble": "ensemble", "MC dropout": "mc_dropout", "temperature 1": "posterior"}
"""The rows of recipe `equal_cost`."""
AUTO: dict[str, dict[str, Any]] = {"auto": {}, "both": {"objective": "both"}}
"""The rows of AutoSampling, which validate, with its arguments."""
SINGLE, ENSEMBLE, HOT = "one network", "ensemble", "temperature 1"
ROWS = (SINGLE, ENSEMBLE, "MC dropout", "auto", "both", HOT)


class Given(Problem):
    """Data that a task has chosen, with a budget of steps.

    Args:
        parts: training, validation and test data.
        classes: K; None in regression.
        setting: `hidden`, `batch` and `steps`.
        seed: of everything.
    """

    def __init__(self, parts: tuple[Split, Split, Split], classes: int | None, setting: Any, seed: int) -> None:
        batch = min(setting["batch"], len(parts[0].targets))
        super().__init__("given", setting | {"source": "given", "batch": batch}, ".", seed)
        self.kind = "regression" if classes is None else "classification"
        self.num_classes = classes
        self.parts = parts

    def load(self) -> tuple[Split, Split, Split]:
        return self.parts

    @property
    def steps(self) -> int:
        return int(self.setting["steps"])


def fit_of(row: str, problem: Problem, settings: Settings) -> Fit:
    """Return what is fitted for a row."""
    if row in AUTO:
        module = BayesianModule(net=problem.net(), likelihood=problem.likelihood())
        return Fit(module, [AutoSampling(**AUTO[row])], problem.steps, validates=True)
    method = METHOD_OF[row]
    own = problem.setting.get("own", {}).get(method, {})
    return METHODS[method](problem, settings.methods[method][problem.kind] | own)


def fitted(row: str, problem: Problem, settings: Settings) -> tuple[Posterior, float]:
    """Fit, and return the samples and the processor seconds."""
    problem.setup("fit")
    pl.seed_everything(derive_seed(problem.seed, row) % 2**31, verbose=False)
    fit = fit_of(row, problem, settings)
    return trained(fit.module, fit.callbacks, fit.steps, problem, fit.validates)


def trained(
    module: BayesianModule, callbacks: list[Any], steps: int, data: Any, validates: bool
) -> tuple[Posterior, float]:
    """Fit a module, and return the samples and the processor seconds."""
    collector = SampleCollector(in_memory=True)
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        callbacks=[*callbacks, collector],
        num_sanity_val_steps=0,
        limit_val_batches=None if validates else 0,
        check_val_every_n_epoch=10**6,
        **QUIET,
    )
    begun = time.process_time()
    trainer.fit(module, datamodule=data)
    assert isinstance(collector.posterior, Posterior)
    return collector.posterior, time.process_time() - begun


def paid(row: str, x: Tensor, y: Tensor, test: Split) -> tuple[Split, Split, Split]:
    """Return the parts for labels that are paid: a row that validates does so on every fifth."""
    rows = torch.arange(len(y))
    held = (rows % 5 == 4) if row in AUTO else torch.zeros(len(y), dtype=torch.bool)
    return Split(x[~held], y[~held]), Split(x[held], y[held]), test


# -- what to label next -----------------------------------------------------------------------------------------------

FIRST, BATCH, ROUNDS, POOL, SEEN = 20, 10, 5, 2_000, 300
"""Labels at the start, labels of a round, rounds, inputs of the pool, and those among which a round chooses."""
ADAM = {"optimizer": "adamw", "lr": 0.003}
LABELLING = {"batch": 20, "steps": 1_000, "hidden": [64, 64]}
PRIOR_STD = {"digits": 1.0, "mnist": 0.3}
"""At temperature 1."""


def label(data: str, row: str, seed: int, settings: Settings, root: Path) -> Figures:
    """Return the mean error over the rounds after the first fit, with BatchBALD and with random labels."""
    base = Problem(data, settings.sets[data], root, seed)
    base.setup("fit")
    pool, test = base.splits[0], base.splits[2]
    x, y, found, seconds = pool.inputs[:POOL], pool.targets[:POOL], {}, []
    own = {"sgd": ADAM, "ensemble": ADAM, "mc_dropout": ADAM | {"dropout": 0.25}}
    setting = LABELLING | {"own": own | {"posterior": {"prior_std": PRIOR_STD[data]}}}
    test = Split(test.inputs[:2_000], test.targets[:2_000])
    for way in ("random",) if row == SINGLE else ("BatchBALD", "random"):
        generator = torch.Generator().manual_seed(derive_seed(seed, "labels"))
        labelled, errors = torch.randperm(len(y), generator=generator)[:FIRST].tolist(), []
        for turn in range(ROUNDS + 1):
            problem = Given(paid(row, x[labelled], y[labelled], test), base.num_classes, setting, seed)
            posterior, taken = fitted(row, problem, settings)
            predicted = posterior.predict(test.inputs).probabilities.argmax(1)
            errors.append(float((predicted != test.targets).float().mean()))
            seconds.append(taken)
            order = torch.randperm(len(y), generator=generator).tolist()
            known = set(labelled)
            few = torch.tensor([i for i in order if i not in known][:SEEN])
            if turn == ROUNDS:
                break
            asked = posterior if posterior.novelty is None else posterior.novelty
            picked = asked.acquire(x[few], BATCH).indices if way == "BatchBALD" else torch.arange(BATCH)
            labelled += few[picked].tolist()
        found[f"mean error, {way}"] = 100 * float(np.mean(errors[1:]))
    return found | {"seconds": float(np.mean(seconds))}


# -- what to eat ------------------------------------------------------------------------------------------------------

PULLS, GROWTH, VISITS = 20, 1.25, 1_500
"""Mushrooms eaten or left at random first, growth of their number between two fits, and mushrooms that count."""
EATING = {"batch": 50, "steps": 600, "hidden": [50, 50], "own": {"posterior": {"lr": 3e-4, "prior_std": 1.0}}}
GAIN, LOSS, UNIT = 5.0, -35.0, 20.0
"""Rewards of an edible and a bad mushroom, and the unit in which the network predicts them."""


def eat(row: str, seed: int, settings: Settings, root: Path) -> Figures:
    """Return the cumulative regret of Thompson sampling on Mushroom; one network is greedy.

    An edible mushroom yields 5, a poisonous one -35 or 5 with even odds, and leaving 0, which the agent knows.
    """
    inputs, edible = MushroomDataModule(root).table()
    own = torch.Generator().manual_seed(derive_seed(seed, "mushrooms"))
    order = torch.randint(len(inputs), (PULLS + VISITS,), generator=own)
    lucky = torch.rand(len(order), generator=own) < 0.5
    reward = torch.where(edible[order] | lucky, GAIN, LOSS) / UNIT
    gain = torch.where(edible[order], GAIN, (GAIN + LOSS) / 2)
    eaten = torch.zeros(len(order), dtype=torch.bool)
    eaten[:PULLS:2] = True
    begin, regret, seconds = PULLS, 0.0, []
    while begin < len(order):
        end = min(math.ceil(begin * GROWTH), len(order))
        x, y = inputs[order[:begin]][eaten[:begin]], reward[:begin][eaten[:begin], None]
        problem = Given(paid(row, x, y, Split(x, y)), None, EATING, seed)
        posterior, taken = fitted(row, problem, settings)
        each = posterior.predict(inputs[order[begin:end]], return_samples=True).sample_means[..., 0]
        drawn = torch.multinomial(posterior.weights.double(), end - begin, replacement=True, generator=own)
        means = each[drawn, torch.arange(end - begin)]
        eaten[begin:end] = means > 0
        best = gain[begin:end].clamp(min=0)
        regret += float((best - gain[begin:end] * eaten[begin:end]).sum())
        seconds.append(taken)
        begin = end
    return {"regret": regret, "seconds": float(np.mean(seconds))}


# -- what to answer ---------------------------------------------------------------------------------------------------

RISKS, KNOWN_SHARE, MOVED = {"mnist": 0.02, "covertype": 0.15}, 0.8, 2
"""Promised risks of the answers, the share of known inputs that is answered otherwise, and pixels of a shift."""
HELD_DIGITS = 8
"""The digits from which on no network is trained."""


class Asked(NamedTuple):
    """A problem, and inputs of classes that it does not know."""

    problem: Problem
    strangers: Tensor


def asked(data: str, seed: int, settings: Settings, root: Path) -> Asked:
    """Return a problem with held-out classes: two digits, or two types of cover."""
    base = Problem(data, settings.sets[data], root, seed)
    base.setup("fit")
    if data != "mnist":
        return Asked(base, base.unknown)
    places = [one.targets < HELD_DIGITS for one in base.splits]
    known = [Split(one.inputs[i], one.targets[i]) for one, i in zip(base.splits, places, strict=True)]
    setting = settings.sets[data] | {"steps": base.steps}
    strangers = base.splits[2].inputs[~places[2]]
    return Asked(Given((known[0], known[1], known[2]), HELD_DIGITS, setting, seed), strangers)


def answer(data: str, row: str, seed: int, settings: Settings, root: Path) -> Figures:
    """Return shares answered and their errors, where a threshold is set on known data and the inputs change."""
    problem, strangers = asked(data, seed, settings, root)
    posterior, seconds = fitted(row, problem, settings)
    x, y = problem.splits[2].inputs, problem.splits[2].targets
    (x_set, y_set), (x_new, y_new) = (x[::2], y[::2]), (x[1::2], y[1::2])
    risk = RISKS[data]
    rule = posterior.selective([(x_set, y_set)], risk=risk)
    found = {f"known answered at risk {risk}": 100 * float(rule.accepts(posterior.predict(x_new)).float().mean())}
    scores: tuple[Score, ...] = ("max_probability",) if row == SINGLE else ("max_probability", "mutual_information")
    before, after = posterior.predict(x_set), posterior.predict(strangers)
    for score in scores:
        threshold = uncertainty_of(before, score, ()).quantile(KNOWN_SHARE)
        share = (uncertainty_of(after, score, ()) < threshold).float().mean()
        found[f"unknown classes answered, {score.replace('_', ' ')}"] = 100 * float(share)
    if data == "mnist":
        moved = x_new.reshape(-1, 28, 28).roll((MOVED, MOVED), (1, 2)).flatten(1)
        prediction = posterior.predict(moved)
        accepted, wrong = rule.accepts(prediction), prediction.probabilities.argmax(1) != y_new
        found["error of the answers to moved images"] = 100 * float(wrong[accepted].float().mean())
    return found | {"seconds": seconds}


# -- what the posterior is --------------------------------------------------------------------------------------------

STEPS = {"smallest": (1_700, 0.003), "classification": (800, 0.05), "regression": (1_700, 0.001)}
"""Full gradients of each of four chains, and the step size at temperature 1, those of recipe `contour_pays`."""
CHAINS, MEMBERS, WARM_STEPS, HELD = 4, 10, 200, 100


def tanh_network(name: str, dropout: float) -> nn.Sequential:
    """Return a network of `NETWORKS`, with dropout before the last layer if there is some."""
    sizes, layers = NETWORKS[name].sizes, []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    last = [nn.Dropout(dropout), layers[-2]] if dropout else [layers[-2]]
    return nn.Sequential(*layers[:-2], *last)


def know(name: str, row: str, seed: int, settings: Settings, root: Path) -> Figures:
    """Return the distance of the predicted functions to the posterior's of a small network, whose prior is N(0, 1).

    The ensemble is of ten maxima of this posterior. Rows of AutoSampling choose their prior, by 100 new data.
    """
    (steps, lr), data, network = STEPS[name], data_of(name, seed), NETWORKS[name]
    total, tensors = CHAINS * steps, torch.utils.data.TensorDataset
    module = functools.partial(
        BayesianModule,
        tanh_network(name, 0.0 if row != "MC dropout" else 0.05 if network.noise_std else 0.1),
        Categorical() if network.noise_std is None else Gaussian(network.noise_std),
        GaussianPrior(1.0),
        seed=seed,
    )
    torch.manual_seed(seed)
    optimized = functools.partial(DeepEnsemble, optimizer=Adam, warm_up=0.03)
    if row == HOT:
        baoab = functools.partial(UnderdampedLangevin, friction=2.0, integrator="baoab")
        burn_in = (steps - WARM_STEPS) // 4
        schedule = SamplingSchedule(burn_in_steps=burn_in, every_n_steps=max(1, (steps - WARM_STEPS - burn_in) // 100))
        callbacks: list[Any] = [WarmStart(lr=0.01, steps=WARM_STEPS), schedule]
        fit = Fit(module(sampler=baoab, lr=lr, num_chains=CHAINS), callbacks, steps)
    elif row in AUTO:
        fit = Fit(module(), [AutoSampling(**AUTO[row])], total, validates=True)
    elif row == ENSEMBLE:
        fit = Fit(module(lr=0.01, num_chains=MEMBERS), [optimized()], total // MEMBERS)
    else:
        dropout = [MCDropout(100)] if row == "MC dropout" else []
        fit = Fit(module(lr=0.01), [optimized(), *dropout], total)
    x, y, held = data.x, data.y, slice(HELD)
    given = DatasetDataModule(tensors(x, y), val=tensors(data.test_x[held], data.test_y[held]), batch_size=len(x))
    posterior, seconds = trained(fit.module, fit.callbacks, fit.steps, given, fit.validates)
    return {"distance to the posterior": scores(name, posterior, data)["distance"], "seconds": seconds}


# -- all --------------------------------------------------------------------------------------------------------------

Task = Callable[[str, int, Settings, Path], Figures]
OF_NUMBERS = tuple(row for row in ROWS if row != "both")


def tasks() -> dict[str, tuple[tuple[str, ...], Task]]:
    """Return each task's rows, and its function of row, seed, settings and root."""
    found: dict[str, tuple[tuple[str, ...], Task]] = {
        f"labels of {data}": (ROWS, functools.partial(label, data)) for data in PRIOR_STD
    }
    found["mushrooms"] = (OF_NUMBERS, eat)
    found |= {f"answers on {data}": (ROWS, functools.partial(answer, data)) for data in RISKS}
    for name, network in NETWORKS.items():
        rows = ROWS if network.noise_std is None else OF_NUMBERS
        found[f"network {'-'.join(map(str, network.sizes))}"] = (rows, functools.partial(know, name))
    return found
