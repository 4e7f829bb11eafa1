"""Options that make samples inexact, or a sampler useless, say so when a fit begins."""

import logging
import warnings
from typing import Any

import pytest
import torch

from lightning_sgmcmc import SGNHT, ContourRules
from lightning_sgmcmc.callbacks import ContourGradient, ReplicaExchange, SamplingSchedule
from tests.support.problems import ConjugateRegression, Data, Plain
from tests.support.trainers import quiet_trainer


def fit(module: Any, *callbacks: Any, steps: int = 2) -> list[str]:
    """Return the warnings of a short fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(max_steps=steps, callbacks=[SamplingSchedule(every_n_steps=2), *callbacks]).fit(
            module, datamodule=Data()
        )
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperatures": [1.0, 2.0], "sampled_slots": 2}, "draws samples at 1, 2 times the run's temperature"),
        ({"temperatures": [0.5, 2.0]}, "draws samples at 0.5 times the run's temperature"),
        ({"temperatures": [1.0, 2.0]}, None),
    ],
)
def test_samples_of_other_temperatures(options: dict[str, Any], sentence: str | None) -> None:
    found = [text for text in fit(Plain(2), ReplicaExchange(**options)) if "draws samples at" in text]
    assert bool(found) == (sentence is not None)
    assert sentence is None or sentence in found[0]


def test_energies_without_the_prior(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("pytorch_lightning"), "propagate", True)
    caplog.set_level(logging.INFO, "pytorch_lightning")
    rules = ContourRules(0.5)
    fit(Plain(), ContourGradient(rules, 20, first_edge=50.0, width=3.0, include_prior=False))
    assert "regularised (include_prior=False), so its weights are only approximate" in caplog.text
    fit(Plain(2), ReplicaExchange([1.0, 2.0], include_prior=False))
    assert "swaps by energies without the prior, so its samples are only approximate" in caplog.text


@pytest.mark.slow
def test_a_thermostat_that_cannot_adapt() -> None:
    """The remedy that the warning names works: the friction takes up the heat of the batches, and T comes down to τ."""
    problem = ConjugateRegression()

    def temperature(inertia: float, steps: int) -> tuple[float, list[str]]:
        def sampler(*args: Any, **options: Any) -> SGNHT:
            return SGNHT(*args, friction=0.05, thermal_inertia=inertia, **options)

        squares: list[float] = []

        class Kinetic(SamplingSchedule):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
                super().on_train_batch_end(trainer, pl_module, *rest)
                group = pl_module.sampler.param_groups[0]
                state = pl_module.sampler.state[group["params"][0]]
                squares.append(state["momentum_buffer"].square().mean().item() * problem.num_data / group["lr"])

        module = problem.module(sampler=sampler, lr=0.01, seed=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quiet_trainer(max_steps=steps, callbacks=[Kinetic(every_n_steps=100)]).fit(module, problem.loader(20))
        found = torch.tensor(squares[-steps // 2 :]).mean().item()
        return found, [str(warning.message) for warning in caught if "SGNHT" in str(warning.message)]

    hot, said = temperature(100.0, 300)
    assert "pass thermal_inertia=" in said[0]
    remedy = float(said[0].split("thermal_inertia=")[1].split(" ")[0])
    right, nothing = temperature(remedy, 900)
    print(f"T = {hot:.2f} with Q = 100, {right:.2f} with Q = {remedy}")
    assert not nothing
    assert hot > 1.7
    assert right == pytest.approx(1, abs=0.3)
