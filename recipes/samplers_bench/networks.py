"""The samplers on small networks whose truth is known, by `Trainer.fit` with mini-batches of a quarter of the data."""

import logging
import math
from typing import Any

import torch

from lightning_sgmcmc.batches import ResumableLoader
from lightning_sgmcmc.callbacks import MetropolisTest, SampleCollector, SamplingSchedule, WarmStart
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.recipes.samplers_bench.chains import best_of
from lightning_sgmcmc.recipes.samplers_bench.methods import METHODS
from lightning_sgmcmc.recipes.samplers_bench.settings import Settings
from lightning_sgmcmc.recipes.shared.network_scores import data_of, scores
from lightning_sgmcmc.recipes.shared.small_networks import NETWORKS
from lightning_sgmcmc.recipes.shared.trainers import quiet_trainer, silence_lightning
from lightning_sgmcmc.run.guard import NonFiniteEnergyError

STIFFNESS = {"smallest": 2_500.0, "classification": 110.0, "regression": 280_000.0}
"""Largest curvature of U at an optimized network, rounded: the scale of the step sizes that are tried."""
CHAINS = 4
BATCHES = 4
"""Batches of the data."""
DIVERGED = {"distance": 10.0, "nll": 10.0}
"""What chains count with if they diverge."""


def best_fits(name: str, method: str, settings: Settings, seed: int) -> tuple[float, list[dict[str, float]]]:
    """Return a method's best step size on a network, over the largest stable one, and its fits at that.

    The step size is chosen by the distance to the truth of fits with the seed after those of the repeats.
    """
    factor = best_of(
        settings.network_factors, lambda one: fit(name, method, one, settings, seed + settings.repeats)["distance"]
    )
    return factor, [fit(name, method, factor, settings, seed + repeat) for repeat in range(settings.repeats)]


def fit(name: str, method: str, factor: float, settings: Settings, seed: int) -> dict[str, float]:
    """Return "distance" and "nll" of four chains on a network."""
    silence_lightning()
    logging.getLogger("lightning_sgmcmc").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    data, known = data_of(name, seed), METHODS[method]
    lr = known.step_size(factor, STIFFNESS[name], len(data.x))
    # A trajectory is an epoch, and its test costs as much data again.
    length = BATCHES if known.tested else 1
    steps = max(2, settings.steps // (2 * length)) * length if known.tested else settings.steps
    warm_start = settings.warm_start // length * length
    burn_in = int(settings.burn_in * steps) // length * length
    every = max(1, (steps - burn_in) // settings.draws // length) * length
    collector = SampleCollector(in_memory=True)
    callbacks: list[Any] = [
        WarmStart(lr=0.01, steps=warm_start),
        SamplingSchedule(burn_in_steps=burn_in, every_n_steps=every),
        *([MetropolisTest()] if known.tested else []),
        collector,
    ]
    sampler: Any = known.build(lr, burn_in)
    module = NETWORKS[name].module(sampler=sampler, lr=lr, num_chains=CHAINS, chain_execution="vmap", seed=seed)
    loader = ResumableLoader(
        TensorBatches(data.x, data.y), batch_size=len(data.x) // BATCHES, seed=seed, drop_last=known.tested
    )
    trainer = quiet_trainer(
        max_steps=steps + warm_start,
        accelerator="cpu",
        callbacks=callbacks,
        enable_checkpointing=False,
    )
    try:
        trainer.fit(module, loader)
    except NonFiniteEnergyError:
        return DIVERGED
    if collector.posterior is None:
        return DIVERGED
    found = scores(name, collector.posterior, data)
    return found if all(map(math.isfinite, found.values())) else DIVERGED
