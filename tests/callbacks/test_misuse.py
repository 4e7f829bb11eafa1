"""What callbacks and BayesianModule refuse, when they do, and in which words."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    Annealing,
    BayesianModule,
    Categorical,
    GaussianPrior,
    PolynomialDecay,
)
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    CyclicalSchedule,
    SampleCollector,
    SamplingSchedule,
)
from tests.support.problems import Stream
from tests.support.small_run import BATCH, COUNT, data, every_step, fit, loader, module

pytestmark = pytest.mark.filterwarnings("ignore:.*has no validation data to evaluate")


def test_the_run_that_the_others_are_mistakes_of(tmp_path: Path) -> None:
    """None of the refusals below is due to the set-up that they share."""
    model = module()
    fit(model, CyclicalSchedule(2, 0.5, 1), SampleCollector(tmp_path / "s"), BayesianModelAverage(), val=loader())
    assert model.posterior is not None
    assert len(model.posterior) == 2


# -- construction of the module ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature must be a finite number and not negative, got -1.0"),
        ({"temperature": math.nan}, ValueError, "temperature must be a finite number .* got nan"),
        ({"temperature": math.inf}, ValueError, "temperature must be a finite number .* got inf"),
        ({"lr": -0.1}, ValueError, "lr must be a finite number and not negative, got -0.1"),
        ({"lr": math.inf}, ValueError, "lr must be a finite number .* got inf"),
        ({"num_data": 0}, ValueError, "num_data must be at least 1, got 0"),
        ({"num_data": -3}, ValueError, "num_data must be at least 1, got -3"),
        ({"num_chains": 0}, ValueError, "num_chains must be at least 1, got 0"),
        ({"net": nn.Linear}, TypeError, r"net=Linear is a class: pass an instance, net=Linear\(…\)"),
        ({"net": lambda x: x}, TypeError, "net should be a Module, got a function"),
        ({"likelihood": Categorical}, TypeError, r"likelihood=Categorical is a class: pass an instance"),
        ({"likelihood": "categorical"}, TypeError, "likelihood should be a Likelihood, got a str"),
        ({"prior": GaussianPrior}, TypeError, r"prior=GaussianPrior is a class: pass an instance"),
        ({"prior": "narrow"}, TypeError, "prior should be a Prior, got a str"),
        ({"sampler": torch.optim.SGD}, TypeError, "sampler=SGD adds no noise: use one of lightning_sgmcmc.samplers"),
        (
            {"sampler": functools.partial(torch.optim.Adam, betas=(0.9, 0.99))},
            TypeError,
            "sampler=Adam adds no noise: use one of lightning_sgmcmc.samplers",
        ),
        (
            {"sampler": SGLD([nn.Parameter(torch.zeros(1))], num_data=1)},
            TypeError,
            "its parameters already, and a module passes its own: pass the class, sampler=SGLD, or",
        ),
        ({"sampler": "SGHMC"}, TypeError, "returns a sampler for parameters, got a str object: pass the class"),
        (
            {"sampler": functools.partial(SGHMC, weight_decay=1e-4)},
            ValueError,
            r"weight decay is a Gaussian prior.*omit weight_decay, and pass prior=GaussianPrior\(std=…\)",
        ),
    ],
)
def test_module_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        module(**options)


# -- construction of the callbacks ------------------------------------------------------------------------------------

SCHEDULE_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({}, "pass exactly one of every_n_steps and every_n_epochs"),
    ({"every_n_steps": 1, "every_n_epochs": 1}, "pass exactly one of every_n_steps and every_n_epochs"),
    (
        {"every_n_steps": 1, "burn_in_steps": 1, "burn_in_epochs": 1},
        "pass one of burn_in_steps and burn_in_epochs, not",
    ),
    (
        {"every_n_steps": 1, "lr_decay": PolynomialDecay(1.0), "lr_annealing": Annealing()},
        "pass one of lr_decay and lr_annealing, not both",
    ),
    ({"every_n_steps": 0}, "every_n_steps must be at least 1, got 0"),
    ({"every_n_epochs": 0}, "every_n_epochs must be at least 1, got 0"),
    ({"every_n_steps": 1, "burn_in_steps": -1}, "burn_in_steps must be at least 0, got -1"),
    ({"every_n_steps": 1, "burn_in_epochs": -2}, "burn_in_epochs must be at least 0, got -2"),
    ({"every_n_steps": 1, "temperature": -0.5}, "temperature must be a finite number and not negative, got -0.5"),
    ({"every_n_steps": 1, "temperature": math.nan}, "temperature must be a finite number and not negative, got nan"),
    (
        {"every_n_steps": 1, "burn_in_temperature": -0.5},
        "burn_in_temperature must be a finite number and not negative, got -0.5",
    ),
]


@pytest.mark.parametrize(("options", "message"), SCHEDULE_MISTAKES)
def test_sampling_schedule_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingSchedule(**options)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (CyclicalSchedule, {"num_cycles": 0}, "num_cycles must be at least 1, got 0"),
        (CyclicalSchedule, {"exploration": 1.0}, r"exploration must be in \[0, 1\), got 1.0"),
        (CyclicalSchedule, {"exploration": -0.1}, r"exploration must be in \[0, 1\), got -0.1"),
        (CyclicalSchedule, {"exploration": math.nan}, r"exploration must be in \[0, 1\), got nan"),
        (CyclicalSchedule, {"samples_per_cycle": 0}, "samples_per_cycle must be at least 1, got 0"),
        (CyclicalSchedule, {"temperature": -1.0}, "temperature must be a finite number and not negative, got -1.0"),
        (CyclicalSchedule, {"temperature": math.nan}, "temperature must be a finite number and not negative, got nan"),
        (SampleCollector, {"every_n_samples": 0}, "every_n_samples must be at least 1, got 0"),
        (SampleCollector, {"max_samples": 0}, "max_samples must be at least 1, got 0"),
        (
            SampleCollector,
            {"dirpath": "samples", "in_memory": True},
            "in_memory=True writes no files, so dirpath='samples' has no effect: pass only one",
        ),
        (BayesianModelAverage, {"cycle_weights": "arithmetic"}, "must be 'uniform' or 'harmonic', got 'arithmetic'"),
    ],
)
def test_callback_arguments(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**options)


@pytest.mark.parametrize(
    "make", [lambda t: CyclicalSchedule(temperature=t), lambda t: SamplingSchedule(every_n_steps=1, temperature=t)]
)
def test_an_infinite_temperature_of_a_schedule(make: Any) -> None:
    with pytest.raises(ValueError, match="temperature"):
        make(math.inf)


# -- what does not go together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [(CyclicalSchedule, every_step), (every_step, CyclicalSchedule), (every_step, every_step)],
)
def test_two_schedules_are_refused(first: Any, second: Any) -> None:
    a, b = first(), second()
    names = sorted((type(a).__name__, type(b).__name__))
    with pytest.raises(ValueError, match=f"one schedule, got {' and '.join(names)}: remove one"):
        fit(module(), a, b)


@pytest.mark.parametrize("make", [SampleCollector, BayesianModelAverage])
def test_samples_need_a_schedule(make: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"{make.__name__} would never see a sample: add a CyclicalSchedule or a Sampl"
    ):
        fit(module(), make(), val=loader())
    assert not list(tmp_path.rglob("manifest*")), "refused before anything was written"


@pytest.mark.parametrize(
    "make", [CyclicalSchedule, lambda: SamplingSchedule(every_n_steps=1, lr_annealing=Annealing())]
)
def test_two_masters_of_the_step_size(make: Any) -> None:
    class Scheduled(BayesianModule):
        def configure_optimizers(self) -> Any:
            sampler = super().configure_optimizers()
            return [sampler], [torch.optim.lr_scheduler.StepLR(sampler, 1)]

    model = Scheduled(net=nn.Linear(2, 2), likelihood=Categorical())
    schedule = make()
    with pytest.raises(
        ValueError, match=f"both {type(schedule).__name__} and the StepLR set the step size: remove one"
    ):
        fit(model, schedule, max_epochs=20)


def test_a_schedule_that_leaves_the_step_size_alone_goes_with_torchs() -> None:
    class Scheduled(BayesianModule):
        def configure_optimizers(self) -> Any:
            sampler = super().configure_optimizers()
            return [sampler], [torch.optim.lr_scheduler.StepLR(sampler, 1, 0.5)]

    model = Scheduled(net=nn.Linear(2, 2), likelihood=Categorical(), lr=0.1)
    fit(model, every_step())
    assert model.sampler.param_groups[0]["lr"] == pytest.approx(0.025)


# -- runs that are too short or have no end ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        (
            CyclicalSchedule(num_cycles=4, samples_per_cycle=1),
            {},
            "cycle 1 of 4 has 0 sampling steps for samples_per_cycle=1: 6 steps in all make cycles of 2, and exp",
        ),
        (CyclicalSchedule(2, 0.9, 3), {}, "has . sampling steps for samples_per_cycle=3: 6 steps .* train longer"),
        (CyclicalSchedule(9, 0.0, 1), {}, "cycle 7 of 9 has 0 sampling steps .* 6 steps in all"),
        (
            CyclicalSchedule(2, 0.5, 1),
            {"max_epochs": -1},
            "CyclicalSchedule needs a run with an end: set the trainer's max_steps, or max_epochs",
        ),
        (
            SamplingSchedule(burn_in_steps=5, every_n_steps=2),
            {},
            "no sample would be drawn: the run has 6 steps, the first sample comes after 5 of burn-in and 2 more",
        ),
        (
            SamplingSchedule(burn_in_epochs=2, every_n_epochs=1),
            {},
            "no sample would be drawn: the run has 6 steps, the first sample comes after 6 of burn-in and 3 more",
        ),
    ],
)
def test_runs_without_room_for_samples(schedule: Any, options: dict[str, Any], message: str) -> None:
    model = module()
    with pytest.raises(ValueError, match=message):
        fit(model, schedule, **options)
    assert model.sampler.step_count == 0, "refused before the first step"


def test_the_last_sample_may_be_the_last_step() -> None:
    fit(module(), SamplingSchedule(burn_in_steps=4, every_n_steps=2), SampleCollector(in_memory=True))


@pytest.mark.parametrize(
    "options",
    [
        {"every_n_epochs": 1},
        {"every_n_steps": 1, "burn_in_epochs": 1},
        {"every_n_steps": 1, "lr_annealing": Annealing()},
        {"every_n_steps": 1, "temperature_annealing": Annealing()},
    ],
)
def test_epochs_without_a_length(options: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match="loader has no length, so epochs cannot be counted in steps: pass steps instead"
    ):
        fit(module(num_data=COUNT), SamplingSchedule(**options), train=DataLoader(Stream(data()), BATCH))
