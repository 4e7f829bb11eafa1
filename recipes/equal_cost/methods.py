"""The methods of the comparison: what each trains within the budget, by the library's public parts."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import AdamW

from lightning_sgmcmc import SGHMC, BayesianModule, FlatPrior, GaussianPrior, pSGLD
from lightning_sgmcmc.callbacks import (
    SWAG,
    AutoSampling,
    CyclicalSchedule,
    DeepEnsemble,
    MCDropout,
    SamplingSchedule,
    WarmStart,
)
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.equal_cost.problems import Problem
from lightning_sgmcmc.recipes.equal_cost.settings import Settings

Setting = Mapping[str, Any]
MOMENTUM = 0.9
WARM_UP = 0.03


@dataclass(frozen=True)
class Fit:
    """What `Trainer.fit` gets.

    Attributes:
        module: the network with likelihood, prior and sampler.
        callbacks: the schedule and others, without a collector.
        steps: optimizer steps.
        validates: whether the method reads the validation data.
    """

    module: BayesianModule
    callbacks: list[pl.Callback]
    steps: int
    validates: bool = False


def optimized(problem: Problem, setting: Setting) -> Fit:
    """Train one network, or several that share the budget (an ensemble), by SGD with momentum or AdamW."""
    chains, is_sgd = setting.get("chains", 1), setting["optimizer"] == "sgd"
    decay, schedule = setting["weight_decay"], functools.partial(DeepEnsemble, warm_up=WARM_UP)
    if not is_sgd:
        schedule = functools.partial(schedule, optimizer=functools.partial(AdamW, weight_decay=decay))
    module = _module(
        problem,
        setting,
        prior=_decay_prior(problem, decay) if is_sgd else FlatPrior(),
        num_chains=chains,
    )
    share = setting.get("length", 1.0) * setting.get("cost", 1) / chains
    return Fit(module, [schedule()], round(share * problem.steps))


def mc_dropout(problem: Problem, setting: Setting) -> Fit:
    """Train one network with dropout, and draw masks."""
    fit = optimized(problem, setting)
    return Fit(fit.module, [*fit.callbacks, MCDropout(setting["draws"])], fit.steps)


def swag(problem: Problem, setting: Setting) -> Fit:
    """Fit a Gaussian to the iterates of SGD or RMSprop, after a warm start if there is one, and draw networks."""
    schedule = SWAG(
        rank=setting["rank"],
        num_draws=setting["draws"],
        collection=setting["collection"],
        lr_factor=setting["lr_factor"],
    )
    sampler = pSGLD if setting["optimizer"] == "rmsprop" else functools.partial(SGHMC, friction=1 - MOMENTUM)
    module = _module(problem, setting, prior=_decay_prior(problem, setting["weight_decay"]), sampler=sampler)
    return Fit(module, [*_warm_start(problem.steps, setting), schedule], problem.steps)


def cyclical(problem: Problem, setting: Setting) -> Fit:
    """Sample by cyclical SGHMC with one chain, or with several that share the budget."""
    chains = setting.get("chains", 1)
    steps = problem.steps // chains
    module = _module(
        problem,
        setting,
        prior=GaussianPrior(setting["prior_std"]),
        temperature=setting["temperature"],
        num_chains=chains,
    )
    schedule = CyclicalSchedule(setting["cycles"], setting["exploration"], setting["samples"])
    return Fit(module, [*_warm_start(steps, setting), schedule], steps)


def posterior(problem: Problem, setting: Setting) -> Fit:
    """Sample at temperature 1 and a constant step size after a warm start and a burn-in."""
    steps = problem.steps
    module = _module(problem, setting, prior=GaussianPrior(setting["prior_std"]))
    burn_in = round(setting["burn_in"] * steps)
    rest = steps - round(setting["warm_up"] * steps) - burn_in
    schedule = SamplingSchedule(burn_in_steps=burn_in, every_n_steps=max(1, rest // setting["samples"]))
    return Fit(module, [*_warm_start(steps, setting), schedule], steps)


def auto(problem: Problem, setting: Setting) -> Fit:
    """Let the library choose everything within the budget, from training and validation data: `--auto`."""
    module = BayesianModule(net=problem.net(), likelihood=problem.likelihood())
    return Fit(module, [AutoSampling(objective=setting["objective"])], problem.steps, validates=True)


METHODS: dict[str, Callable[[Problem, Setting], Fit]] = {
    "sgd": optimized,
    "sgd_tuned": optimized,
    "sgd_grid": optimized,
    "mc_dropout": mc_dropout,
    "mc_dropout_tuned": mc_dropout,
    "swag": swag,
    "swag_tuned": swag,
    "ensemble": optimized,
    "ensemble_2": optimized,
    "ensemble_tuned": optimized,
    "ensemble_4x": optimized,
    "csghmc": cyclical,
    "chains": cyclical,
    "posterior": posterior,
    "auto": auto,
    "auto_ood": auto,
}
OPTIMIZED = ("sgd", "sgd_tuned", "sgd_grid", "ensemble", "ensemble_2", "ensemble_tuned")
CALIBRATED = {name: f"{name}_temperature" for name in OPTIMIZED}
"""Rows that cost no training: the predictions of another row, calibrated on the validation data."""
COMPRESSED = {"auto": "auto_10"}
"""Rows of few samples of another row, which the validation data choose."""
FEW = 10
ROWS = tuple(row for name in METHODS for row in (name, CALIBRATED.get(name), COMPRESSED.get(name)) if row is not None)


def candidates(setting: Setting) -> list[Setting]:
    """Return the settings of a grid that is part of the cost, or the only one."""
    return [{**setting, **own} for own in setting.get("grid", [{}])]


def setting_of(settings: Settings, data: str, method: str) -> Setting:
    """Return a method's setting for a data set: that of its kind of task, or the winner of the grid."""
    own = settings.sets[data]
    if method in settings.tuned:
        source: Setting = settings.tuned[method][own["source"]]
        return source
    kind: Setting = settings.methods[method][Problem(data, own, ".").kind]
    return kind


def _module(problem: Problem, setting: Setting, **options: Any) -> BayesianModule:
    return BayesianModule(
        net=problem.net(setting.get("dropout", 0.0)),
        likelihood=problem.likelihood(),
        lr=setting["lr"],
        **({"sampler": functools.partial(SGHMC, friction=1 - MOMENTUM)} | options),
    )


def _decay_prior(problem: Problem, weight_decay: float) -> GaussianPrior:
    """Return the Gaussian prior that is this weight decay of a mean loss: 1/(N·std²)."""
    return GaussianPrior(1 / math.sqrt(problem.num_data * weight_decay))


def _warm_start(steps: int, setting: Setting) -> list[pl.Callback]:
    """Return AdamW's part of the run, if the setting has one."""
    if "warm_up" not in setting:
        return []
    return [WarmStart(lr=setting["warm_up_lr"], steps=round(setting["warm_up"] * steps), lr_schedule="cosine")]
