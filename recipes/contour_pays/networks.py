"""The methods on networks: fits by `Trainer.fit`, and their figures."""

import functools
import logging
from typing import Any

import torch
from torch import nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, GaussianPrior, UnderdampedLangevin
from lightning_sgmcmc.batches import ResumableLoader
from lightning_sgmcmc.callbacks import (
    ContourGradient,
    CyclicalSchedule,
    ReplicaExchange,
    SampleCollector,
    SamplingSchedule,
    WarmStart,
)
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.recipes.contour_pays.settings import Settings
from lightning_sgmcmc.recipes.shared.network_truth import data_of, scores
from lightning_sgmcmc.recipes.shared.small_networks import NETWORKS
from lightning_sgmcmc.recipes.shared.trainers import quiet_trainer, silence_lightning

EXPLORED = 0.5
"""Share of a cycle without draws."""


def fit(name: str, method: str, settings: Settings, seed: int) -> dict[str, float]:
    """Return the figures of a method on a problem."""
    silence_lightning()
    logging.getLogger("lightning_sgmcmc").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    setting, data = settings.networks[name], data_of(name, seed)
    callbacks: list[Any] = []
    steps = setting.steps + setting.warm_start
    if method == "cyclical":
        callbacks.append(CyclicalSchedule(settings.cycles, EXPLORED, settings.draws // settings.cycles))
    else:
        burn_in = setting.steps // 4
        draws = settings.draws * (
            len(settings.ladder) if method == "replica exchange" else 1
        )  # of its four slots one is drawn
        every = max(1, (setting.steps - burn_in) // draws)
        callbacks += [
            WarmStart(lr=0.01 if name != "digits" else 0.003, steps=setting.warm_start),
            SamplingSchedule(burn_in_steps=burn_in, every_n_steps=every),
        ]
    if method.startswith("contour"):
        callbacks.append(ContourGradient(auto=True, interacting=True))
    elif method == "replica exchange":
        callbacks.append(ReplicaExchange(settings.ladder))
    collector = SampleCollector(in_memory=True)
    module = module_of(name, method, settings, seed)
    loader = ResumableLoader(TensorBatches(data.x, data.y), batch_size=setting.batch or len(data.x), seed=seed)
    quiet_trainer(
        max_steps=steps, accelerator="cpu", callbacks=[*callbacks, collector], enable_checkpointing=False
    ).fit(module, loader)
    assert collector.posterior is not None
    figures = scores(name, collector.posterior, data)
    if module.contour is not None:
        use = module.contour.use()
        figures |= {"spread": use.spread, "efficiency": use.efficiency or 0.0, "promised": use.promised or 0.0}
    return figures


def module_of(name: str, method: str, settings: Settings, seed: int) -> BayesianModule:
    """Return the module: on small networks BAOAB with the full gradient, on Digits SGHMC with mini-batches."""
    lr = settings.networks[name].lr * (2 if method == "cyclical" else 1)  # its mean over a cycle is half the largest
    options: dict[str, Any] = {"lr": lr, "num_chains": len(settings.ladder), "chain_execution": "vmap", "seed": seed}
    sampler: Any
    if name != "digits":
        sampler = functools.partial(UnderdampedLangevin, friction=2.0, integrator="baoab")
        return NETWORKS[name].module(sampler=sampler, **options)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    sampler = functools.partial(SGHMC, friction=0.1)
    return BayesianModule(net=net, likelihood=Categorical(), prior=GaussianPrior(0.3), sampler=sampler, **options)
