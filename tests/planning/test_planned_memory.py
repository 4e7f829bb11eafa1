"""The memory of a plan against the bytes of all tensors that a run really holds."""

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from lightning_sgmcmc import (
    AMAGOLD,
    MCLMC,
    SGHMC,
    SGLD,
    AdamSGLD,
    BayesianModule,
    Gaussian,
    ScaleAdaptedSGHMC,
    UnderdampedLangevin,
    pMCLMC,
    pSGHMC,
    pSGLD,
)
from lightning_sgmcmc.callbacks import (
    EWSG,
    SWAG,
    ControlVariates,
    CovarianceFriction,
    MetropolisTest,
    SamplingSchedule,
    VarianceReducedEnergy,
)
from lightning_sgmcmc.samplers import noise
from tests.support.trainers import quiet_trainer

STEPS = 40
SMALL = 200_000
"""Bytes of tensors that grow neither with the parameters nor with what is kept of them: batches, energies, numbers."""


def held() -> int:
    """Return the bytes of all tensors of this process that are alive, each memory once."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors()}
    return sum(storages.values())


def _tensors() -> list[Tensor]:
    # Those of a compiler, `torch.func` or a sparse layout, left by other tests, have no memory that can be asked for.
    found = [
        t
        for t in gc.get_objects()
        if type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not is_functorch_wrapped_tensor(t)
    ]
    return found + [t.grad for t in found if t.is_leaf and t.grad is not None]


class Measure(pl.Callback):
    """The bytes held at the end of a step."""

    bytes = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == STEPS:
            self.bytes = held()


UNDERDAMPED = functools.partial(UnderdampedLangevin, friction=5.0)
CASES: dict[str, tuple[Any, Callable[[], list[Any]]]] = {
    **{
        kind.__name__: (kind, list) for kind in (SGLD, SGHMC, MCLMC, pSGLD, pSGHMC, AdamSGLD, ScaleAdaptedSGHMC, pMCLMC)
    },
    "UBU": (functools.partial(UNDERDAMPED, integrator="ubu"), list),
    "SWAG": (SGHMC, lambda: [SWAG(rank=4, num_draws=1, collection=0.5, every_n_steps=1)]),
    "SWAG of few iterates": (SGHMC, lambda: [SWAG(rank=20, num_draws=1, collection=0.5, every_n_steps=5)]),
    "VarianceReducedEnergy": (SGHMC, lambda: [VarianceReducedEnergy()]),
    "ControlVariates": (SGHMC, lambda: [ControlVariates()]),
    "CovarianceFriction": (UNDERDAMPED, lambda: [CovarianceFriction()]),
    "CovarianceFriction, seldom": (UNDERDAMPED, lambda: [CovarianceFriction(every_n_epochs=3)]),
    "CovarianceFriction, matrix": (UNDERDAMPED, lambda: [CovarianceFriction(form="matrix")]),
    "EWSG": (SGHMC, lambda: [EWSG(3)]),
    "MetropolisTest": (functools.partial(AMAGOLD, friction=5.0), lambda: [MetropolisTest(4)]),
}


@pytest.mark.by_default("1-SGHMC", "1-pSGHMC")
@pytest.mark.parametrize("name", ["SGLD", "SGHMC", "pSGLD", "pSGHMC", "AdamSGLD", "ScaleAdaptedSGHMC", "pMCLMC", "UBU"])
@pytest.mark.parametrize("chains", [1, 3])
def test_planned_memory_of_noise_in_blocks(chains: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large network's noise and scratch are blocks; here 120,000 parameters count as one."""
    monkeypatch.setattr(noise, "WHOLE", 100_000)
    monkeypatch.setattr(noise, "ON_CPU", 6_000)
    test_planned_memory_is_that_of_the_tensors_held(name, chains)


@pytest.mark.by_default(
    "pSGHMC-3", "SWAG-1", "iterates-3", "VarianceReducedEnergy-1", "Friction-3", "seldom-1", "matrix-3"
)
@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_planned_memory_is_that_of_the_tensors_held(name: str, chains: int) -> None:
    sampler, callbacks = CASES[name]
    inputs, outputs = (20, 24) if "matrix" in name else (300, 400)
    x, y = torch.randn(32, inputs), torch.randn(32, outputs)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
    gc.collect()
    gc.freeze()  # what other tests left alive is not looked through three times
    before = held()
    net = nn.Linear(inputs, outputs, bias=False)
    module = BayesianModule(
        net=net, likelihood=Gaussian(10.0), sampler=sampler, lr=1e-4, num_chains=chains, seed=1, shared_batch=True
    )
    own, measure = callbacks(), Measure()
    if not any(isinstance(callback, SWAG) for callback in own):
        own.append(SamplingSchedule(burn_in_steps=8, every_n_steps=32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(max_steps=STEPS, callbacks=[*own, measure]).fit(module, loader)
    assert module.plan is not None
    assert module.plan.memory_bytes == pytest.approx(measure.bytes - before, rel=0.04, abs=SMALL)
