"""Stage `blocks`: steps of small networks in blocks, captured and compiled, against those of Lightning's loop."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, ContourRules, Gaussian, GaussianPrior
from lightning_sgmcmc.callbacks import EWSG, ContourGradient, ControlVariates, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.fit import block_runs, blocks, single_steps
from tests.benchmarks.gpu.setting import Say, Setting, fit, largest_difference
from tests.benchmarks.small_networks import BATCH, CNN, N, problem

EPOCHS, FEW = 1_000, 5
"""Epochs of timed fits, and of those whose states are compared."""
ACTING: dict[str, Callable[[], pl.Callback]] = {
    "EWSG": partial(EWSG, 1),
    "ControlVariates": ControlVariates,
    "ContourGradient": partial(ContourGradient, ContourRules(zeta=0.75), 100, first_edge=1e3, width=2e2),
}
"""Callbacks in whose fits states are compared."""


class Clock(pl.Callback):
    """Seconds of the second half of a fit's epochs, after the first validation."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._begun = self.seconds = 0.0
        self.steps = 0

    def on_validation_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.steps == 0:
            self._setting.wait()
            self._begun, self.steps = time.perf_counter(), trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._setting.wait()
        self.seconds, self.steps = time.perf_counter() - self._begun, trainer.global_step - self.steps


def run(setting: Setting, case: str, say: Say) -> None:
    """Record the microseconds of a step in each form, and how far its states are from those of Lightning's loop.

    Args:
        setting: the measurement's.
        case: a network and a number of chains, with a comma between.
        say: records.
    """
    name, chains = case.split(", ")
    if name in ACTING:
        right, found = (_fitted(setting, "8-50-1", int(chains), form, FEW, name) for form in ("loop", "captured"))
        say(case, captured_difference=largest_difference(found[0], right[0]), captured_at_once=found[2])
        return
    told: list[str] = []
    for module in (block_runs, blocks, single_steps):
        module.rank_zero_info = told.append
    forms = ("loop", "captured") if setting.tiny or name == CNN else ("loop", "captured", "compiled")
    right = _fitted(setting, name, int(chains), "loop", FEW)[0]
    differences = {form: largest_difference(_fitted(setting, name, int(chains), form, FEW)[0], right) for form in forms}
    setting.turn()
    found: dict[str, Any] = {}
    for form in forms:
        _, clock, counters, seconds = _fitted(setting, name, int(chains), form, 20 if form == "loop" else EPOCHS)
        found |= {f"{form}_us": clock.seconds / max(clock.steps, 1) * 1e6, f"{form}_fit_s": seconds}
        found |= {f"{form}_at_once": counters, f"{form}_difference": differences[form]}
    say(case, **found, told={text: 1 for text in told})


def _fitted(
    setting: Setting, name: str, chains: int, form: str, epochs: int, acting: str = ""
) -> tuple[dict[str, Tensor], Clock, int, float]:
    """Return the state after a fit, its clock, how many of its steps were made at once, and its seconds."""
    net, x, y = problem(name)
    block_runs.FEWEST = 10**9 if form == "loop" else 0
    block_runs.WORTH_CAPTURED = 0 if form == "compiled" else 10**9
    likelihood = Categorical() if y.dtype == torch.int64 else Gaussian(0.1)
    module = BayesianModule(net, likelihood, GaussianPrior(1.0), sampler=SGHMC, lr=1e-3, num_chains=chains, seed=0)
    train, held_out = TensorDataset(x, y), TensorDataset(x[:BATCH], y[:BATCH])
    data = DatasetDataModule(train, held_out, batch_size=BATCH)
    clock = Clock(setting)
    options = {"precision": "32-true", "check_val_every_n_epoch": max(1, epochs // 2)}
    schedule = SamplingSchedule(burn_in_epochs=epochs // 2, every_n_epochs=max(1, epochs // 4))
    begun = time.perf_counter()
    callbacks = [schedule, *([ACTING[acting]()] if acting else [])]
    fit(setting, module, data, epochs * N // BATCH, [*callbacks, clock], **options)
    state = {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
    return state, clock, module.chains.counters.compiled_steps, time.perf_counter() - begun
