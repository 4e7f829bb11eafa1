"""The methods: samplers and baselines as fits of stacked chains of equal cost, and the choice of a step size."""

import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_sgmcmc.callbacks import (
    ContourGradient,
    CyclicalSchedule,
    DeepEnsemble,
    ReplicaExchange,
    SamplingSchedule,
    WarmStart,
)
from lightning_sgmcmc.chains.state import NonFiniteEnergyError
from lightning_sgmcmc.recipes.hmc_fidelity.problems import datamodule, module_of
from lightning_sgmcmc.recipes.hmc_fidelity.scores import FAILED, Scores, scores_of
from lightning_sgmcmc.recipes.hmc_fidelity.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.trainers import kept_samples, prepare_run, quiet_trainer, resumed_fit
from lightning_sgmcmc.samplers import SGHMC, SGLD, Sampler, ScaleAdaptedSGHMC, pMCLMC, pSGLD

FRICTION = 0.1
"""Of the samplers with a momentum: the share that a step takes from it."""
EXPLORED = 0.5
"""Share of a cycle without draws."""


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        sampler: returns the sampler's factory for a step size.
        kind: "sampling", "cyclical", "contour", "exchange" or "optimization".
        expanded: sample the factors of the weights.
        single: one chain of as many steps as the others' chains have together.
    """

    sampler: Callable[[float], Callable[..., Sampler]]
    kind: str = "sampling"
    expanded: bool = False
    single: bool = False


def _sghmc(lr: float) -> Callable[..., Sampler]:
    return functools.partial(SGHMC, friction=FRICTION)


METHODS: dict[str, Method] = {
    "one network": Method(_sghmc, "optimization", single=True),
    "deep ensemble": Method(_sghmc, "optimization"),
    "SGLD": Method(lambda lr: SGLD),
    "SGHMC": Method(_sghmc),
    "cyclical SGHMC": Method(_sghmc, "cyclical"),
    "pSGLD": Method(lambda lr: functools.partial(pSGLD, adapt="burn-in")),
    "Adam-SGHMC": Method(lambda lr: functools.partial(ScaleAdaptedSGHMC, friction=FRICTION)),
    "PX-SGHMC": Method(_sghmc, expanded=True),
    "pSMILE": Method(lambda lr: functools.partial(pMCLMC, friction=FRICTION / lr)),
    "contour SGHMC": Method(_sghmc, "contour"),
    "replica exchange": Method(_sghmc, "exchange"),
}


def callbacks_of(method: Method, settings: Settings) -> list[Any]:
    """Return a method's schedule and what else it needs."""
    if method.kind == "optimization":
        return [DeepEnsemble()]
    if method.kind == "cyclical":
        return [CyclicalSchedule(settings.cycles, EXPLORED, settings.draws // settings.cycles)]
    warm_start = int(settings.warm_start * settings.steps)
    left = settings.steps - warm_start
    burn_in = int(settings.burn_in * left)
    draws = settings.draws * (settings.chains if method.kind == "exchange" else 1)  # only the coldest slot's are kept
    found: list[Any] = [
        WarmStart(lr=settings.warm_lr, steps=warm_start),
        SamplingSchedule(burn_in_steps=burn_in, every_n_steps=max(1, (left - burn_in) // draws)),
    ]
    if method.kind == "contour":
        found.append(ContourGradient(auto=True, interacting=True))
    elif method.kind == "exchange":
        found.append(ReplicaExchange(settings.ladder))
    return found


def fit(name: str, lr: float, seed: int, settings: Settings, options: Options) -> Scores:
    """Return the scores of a method's fit, `FAILED` if it diverges.

    Args:
        name: the method.
        lr: its step size.
        seed: of starts, batches and noise.
        settings, options: the recipe's.
    """
    prepare_run(options)
    logging.getLogger("lightning_sgmcmc").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    method, data = METHODS[name], datamodule(settings, options)
    data.setup("fit")
    chains = 1 if method.single else settings.chains
    module = module_of(settings, method.expanded, sampler=method.sampler(lr), lr=lr, num_chains=chains, seed=seed)
    trainer = quiet_trainer(
        accelerator=options.accelerator(),
        precision=settings.precision,
        max_steps=settings.steps * settings.chains // chains,
        callbacks=[*callbacks_of(method, settings), kept_samples()],
        limit_val_batches=0,
    )
    begun = time.process_time()
    try:
        resumed_fit(trainer, module, data)
    except NonFiniteEnergyError:
        return FAILED
    seconds = time.process_time() - begun
    if module.posterior is None or len(module.posterior) == 0:
        return FAILED
    found = scores_of(module.posterior, data, seconds)
    return found if math.isfinite(found.validation_nll) else FAILED


@dataclass(frozen=True)
class Found:
    """A method's fits.

    Attributes:
        lr: the step size with the least NLL of the validation data.
        fits: the fits at it, one for each seed.
        tried: the fits of the whole ladder with the first seed and the share `trial` of the steps, by step size.
    """

    lr: float
    fits: tuple[Scores, ...]
    tried: dict[float, Scores]


def fits_of(name: str, seed: int, settings: Settings, options: Options) -> Found:
    """Return a method's fits at the step sizes of its ladder, and at the best of them with the other seeds.

    Raises:
        RuntimeError: if the fits of all step sizes diverge.
    """
    short = replace(settings, steps=round(settings.trial * settings.steps))
    tried = {lr: fit(name, lr, seed, short, options) for lr in settings.lr[name]}
    best = min(tried, key=lambda lr: tried[lr].validation_nll)
    if not math.isfinite(tried[best].validation_nll):
        raise RuntimeError(f"{name} diverges at all of {list(tried)}: pass smaller step sizes as lr")
    first = tried[best] if settings.trial == 1 else fit(name, best, seed, settings, options)
    others = [fit(name, best, seed + repeat, settings, options) for repeat in range(1, settings.seeds)]
    return Found(best, (first, *others), {lr: one for lr, one in tried.items() if len(one.probabilities)})
