"""What plans predict against what fits measure: `python -m tests.benchmarks.plan_accuracy --out DIR`.

Each setting is a fit of a small network. The plan predicts the configurational temperature that `ChainHealth` measures,
and the relaxation times of the stage of sampling, which the correlation of the weights at its ends measures. Writes
plan_accuracy.md, .json and .png.
"""

import argparse
import functools
import json
import math
import statistics
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    SGNHT,
    BayesianModule,
    Categorical,
    Gaussian,
    GaussianPrior,
    UnderdampedLangevin,
)
from lightning_sgmcmc.batches import ResumableLoader
from lightning_sgmcmc.callbacks import ChainHealth, CyclicalSchedule, SamplerCallback, SamplingSchedule
from lightning_sgmcmc.chains.state import Stage
from lightning_sgmcmc.datamodules import TensorBatches

SAMPLERS: dict[str, Any] = {
    "SGLD": SGLD,
    "SGHMC": functools.partial(SGHMC, friction=0.1),
    "SGHMC .03": functools.partial(SGHMC, friction=0.03),
    "Euler": functools.partial(UnderdampedLangevin, friction=20.0),
    "BAOAB": functools.partial(UnderdampedLangevin, friction=20.0, integrator="baoab"),
    "SGNHT": functools.partial(SGNHT, friction=0.1),
}
FRICTIONS = {"SGLD": 1.0, "SGHMC": 0.1, "SGHMC .03": 0.03, "SGNHT": 0.1}
BATCH = 100


@dataclass(frozen=True)
class Setting:
    """A fit: `length` relaxation times of the prior's directions in all, in `steps` steps, if `lr` is None."""

    sampler: str
    data: str
    num_data: int
    prior_std: float
    schedule: str
    steps: int
    lr: float
    temperature: float = 1.0


def data(kind: str, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "digits":
        x, y = load_digits(return_X_y=True)
        order = torch.randperm(len(x), generator=generator)[:count]
        return torch.tensor(x / 16).float()[order], torch.tensor(y).long()[order]
    x = torch.randn(count, 8, generator=generator)
    teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for p in teacher.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[-1]))
        y = teacher(x) + torch.randn(count, 1, generator=generator)
    return x, y


def network(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if kind == "digits":
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), Categorical()
    return nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1)), Gaussian(std=1.0)


def schedule(name: str, steps: int) -> pl.Callback:
    if name == "cyclical":
        return CyclicalSchedule(num_cycles=4, exploration=0.7, samples_per_cycle=1)
    if name == "cold start":
        burn = steps // 4
        return SamplingSchedule(burn_in_steps=burn, every_n_steps=(steps - burn) // 4, burn_in_temperature=0.0)
    return SamplingSchedule(burn_in_steps=steps // 4, every_n_steps=(steps - steps // 4) // 4)


class Ends(SamplerCallback):
    """Keeps the weights when the last stage of sampling begins and ends."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self._was_sampling = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        sampling = pl_module.chains.progress.stage is Stage.SAMPLING
        if sampling and not self._was_sampling:
            self.first = weights(pl_module)
        self._was_sampling = sampling


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in module.parameters()])


def run(setting: Setting) -> dict[str, Any]:
    """Fit, and return the predicted and the measured numbers."""
    x, y = data(setting.data, setting.num_data)
    net, likelihood = network(setting.data)
    module = BayesianModule(
        net=net,
        likelihood=likelihood,
        prior=GaussianPrior(setting.prior_std),
        sampler=SAMPLERS[setting.sampler],
        lr=setting.lr,
        temperature=setting.temperature,
        num_data=setting.num_data,
        seed=0,
    )
    loader = ResumableLoader(TensorBatches(x, y), batch_size=BATCH)
    ends = Ends()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=setting.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[schedule(setting.schedule, setting.steps), ChainHealth(every_n_steps=2, warn=False), ends],
    )
    begun = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader)
    plan, health = module.plan, module.health
    assert plan is not None
    assert health is not None
    assert health.total is not None
    assert ends.first is not None
    last = weights(module)
    ratio = float(last @ ends.first / (ends.first @ ends.first))
    return {
        **asdict(setting),
        "predicted": plan.configurational_temperature,
        "measured": health.total.configurational,
        "interval": health.total.configurational_interval,
        "kinetic": health.total.kinetic,
        "noise": max(health.gradient_noise_share.values()),
        "predicted_relaxation": plan.sampling_relaxation_times,
        "measured_relaxation": -math.log(ratio) if ratio > 0 else None,
        "kind": None if plan.kind is None else plan.kind.value,
        "seconds": time.monotonic() - begun,
    }


CASES = (
    ("digits", 1000, 1.0, "cyclical", 0.05),
    ("teacher", 400, 0.1, "cold start", 0.5),
    ("digits", 1600, 0.3, "constant", 0.3),
    ("teacher", 400, 0.3, "constant", 1.0),
    ("digits", 400, 0.1, "cold start", 2.0),
    ("digits", 800, 0.05, "constant", 3.0),
    ("teacher", 1600, 1.0, "cyclical", 0.02),
)
"""Data, N, prior std, schedule, and the relaxation times of the prior's directions in a stage of sampling."""


def lr_for(sampler: str, num_data: int, std: float, schedule: str, relaxation: float, steps: int) -> float:
    """Return the step size that covers some relaxation times of the prior's directions in a stage of sampling."""
    stage = steps / 4 * 0.0212 / 0.3 * 0.3 if schedule == "cyclical" else 0.75 * steps
    each = relaxation / stage
    if sampler in FRICTIONS:
        return each * FRICTIONS[sampler] * num_data * std**2
    return each * 20.0 * std**2


def settings() -> list[Setting]:
    found = []
    for number, sampler in enumerate(SAMPLERS):
        for place, (kind, count, std, name, relaxation) in enumerate(CASES):
            length = relaxation * (0.6, 1.0, 1.6)[(number + place) % 3]
            found.append(
                Setting(sampler, kind, count, std, name, 2000, lr_for(sampler, count, std, name, length, 2000))
            )
    return found


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    import logging

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.ERROR)
    results = []
    for s in settings():
        try:
            r = run(s)
        except Exception as error:
            print("FAILED", s, str(error)[:100])
            continue
        results.append(r)
        f = lambda v: "-" if v is None else f"{v:.3g}"
        print(
            s.sampler,
            s.data,
            s.num_data,
            s.prior_std,
            s.schedule,
            f(s.lr),
            "| T",
            f(r["predicted"]),
            f(r["measured"]),
            "rel",
            f(r["predicted_relaxation"]),
            f(r["measured_relaxation"]),
            "noise",
            f(r["noise"]),
            "kin",
            f(r["kinetic"]),
            f"{r['seconds']:.1f}s",
            flush=True,
        )
    json.dump(results, open("/tmp/h_plan_acc.json", "w"))
