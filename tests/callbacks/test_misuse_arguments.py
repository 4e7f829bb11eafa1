"""Callbacks and their parts made with wrong arguments: what the user does | the sentence that the user sees."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightning_sgmcmc import SGHMC, ChainStrategy, ContourRules, DecayingStepSize, EnergyPartition, Patience
from lightning_sgmcmc.callbacks import (
    EWSG,
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    ControlVariates,
    CovarianceFriction,
    CyclicalSchedule,
    DeepEnsemble,
    PosteriorDashboard,
    ReplicaExchange,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
    VarianceReducedEnergy,
    WarmStart,
)
from tests.support.small_run import data, loader

Made = Callable[..., Any]
EVERY: Made = functools.partial(SamplingSchedule, every_n_steps=1)
CONTOUR: Made = functools.partial(ContourGradient, rules=ContourRules(), first_edge=0.0, width=1.0)
LADDER: Made = functools.partial(ReplicaExchange, [1.0, 2.0])
Mistake = tuple[Made, dict[str, Any], type[Exception], str]

SCHEDULES: list[Mistake] = [
    (CyclicalSchedule, {"num_cycles": None}, TypeError, "num_cycles must be a whole number, got None"),
    (CyclicalSchedule, {"num_cycles": True}, TypeError, "num_cycles must be a whole number, got True of type bool"),
    (CyclicalSchedule, {"samples_per_cycle": None}, TypeError, "samples_per_cycle must be a whole number, got None"),
    (CyclicalSchedule, {"exploration": "0.5"}, TypeError, "exploration must be a number, got '0.5' of type str"),
    (CyclicalSchedule, {"exploration": None}, TypeError, "exploration must be a number, got None of type NoneType"),
    (CyclicalSchedule, {"temperature": "1"}, TypeError, "temperature must be a number, got '1' of type str"),
    (CyclicalSchedule, {"temperature": math.inf}, ValueError, "temperature must be a finite number"),
    (EVERY, {"temperature": "1"}, TypeError, "temperature must be a number, got '1' of type str"),
    (EVERY, {"burn_in_temperature": math.inf}, ValueError, "burn_in_temperature must be a finite number"),
    (EVERY, {"burn_in_steps": True}, TypeError, "burn_in_steps must be a whole number, got True of type bool"),
    (EVERY, {"lr_decay": 0.5}, TypeError, "lr_decay must be an object of class PolynomialDecay, got 0.5"),
    (EVERY, {"lr_annealing": 0.5}, TypeError, "lr_annealing must be an object of class Annealing, got 0.5"),
    (EVERY, {"temperature_annealing": 1.01}, TypeError, "temperature_annealing must be an object of class Annealing"),
]

WARM: Made = functools.partial(WarmStart, steps=5)
WARM_STARTS: list[Mistake] = [
    (WarmStart, {}, ValueError, "pass exactly one of steps and epochs, the length of the warm start"),
    (WARM, {"epochs": 2}, ValueError, "pass exactly one of steps and epochs"),
    (WarmStart, {"steps": 0}, ValueError, "steps must be at least 1, got 0"),
    (WARM, {"lr": 0.0}, ValueError, "lr must be positive, got 0.0"),
    (WARM, {"early_stopping": 5}, TypeError, "early_stopping must be an object of class Patience, got 5"),
    (WARM, {"lr_schedule": "step"}, ValueError, "lr_schedule must be 'constant' or 'cosine', got 'step'"),
    (WARM, {"optimizer": "AdamW"}, TypeError, "optimizer must be a class of torch.optim or a partial of one, got 'A"),
    (WARM, {"optimizer": torch.optim.LBFGS}, TypeError, "optimizer=LBFGS needs a closure that computes the loss sev"),
    (WARM, {"optimizer": SGHMC}, TypeError, "optimizer=SGHMC is a sampler, which the module has already: pass a c"),
    (WARM, {"optimizer": functools.partial(torch.optim.SGD, lr=1)}, ValueError, "lr=…) has no effect, since Warm"),
    (
        DeepEnsemble,
        {"optimizer": lambda p, lr: SGD(p, lr, weight_decay=0.5)},
        ValueError,
        "is not read: pass a par",
    ),
    (WARM, {"optimizer": functools.partial(torch.optim.SGD, weight_decay=0.1)}, ValueError, "weight decay is a Gau"),
    (WARM, {"optimizer": functools.partial(torch.optim.SGD, beta=1)}, TypeError, "optimizer=SGD cannot be made from p"),
    (Patience, {"validations": 0}, ValueError, "validations must be at least 1, got 0"),
    (Patience, {"min_improvement": -1.0}, ValueError, r"min_improvement must be in [0, inf), got -1.0"),
]

SAMPLES: list[Mistake] = [
    (SampleCollector, {"dirpath": ""}, ValueError, "dirpath='' is the working folder, and samples need a folder of"),
    (SampleCollector, {"dirpath": "."}, ValueError, "dirpath='.' is the working folder"),
    (SampleCollector, {"dirpath": "  "}, ValueError, "dirpath='  ' is the working folder"),
    (SampleCollector, {"in_memory": "yes"}, TypeError, "in_memory must be True or False, got 'yes' of type str"),
    (SampleCollector, {"max_samples": True}, TypeError, "max_samples must be a whole number, got True of type bool"),
    (SampleCollector, {"every_n_samples": 0.5}, TypeError, "every_n_samples must be a whole number, got 0.5"),
    (BayesianModelAverage, {"cycle_weights": None}, ValueError, "cycle_weights must be 'uniform' or 'harmonic', got N"),
    (BayesianModelAverage, {"importance_weights": "Final"}, ValueError, "must be 'sample' or 'final', got 'Final'"),
    (BayesianModelAverage, {"ood": "notmnist"}, TypeError, "should be a datamodule or a DataLoader, got a str"),
    (BayesianModelAverage, {"ood": data()}, TypeError, "should be a datamodule or a DataLoader, got a TensorDataset"),
    (BayesianModelAverage, {"ood": {"": loader()}}, ValueError, "have the name '', which becomes part of the metrics'"),
    (BayesianModelAverage, {"ood": {"a/b": loader()}}, ValueError, "have the name 'a/b', which becomes part of"),
    (BayesianModelAverage, {"ood": {1: loader()}}, ValueError, "have the name 1, which becomes part of the metrics'"),
    (PosteriorDashboard, {"every": "step"}, ValueError, "every must be 'sample' or 'cycle' or 'end', got 'step'"),
    (PosteriorDashboard, {"every_n_samples": 5}, ValueError, "every_n_samples=5 applies to every='sample', got every="),
    (PosteriorDashboard, {"figures": "energy"}, ValueError, "figures should be a list of names, got 'energy'"),
    (PosteriorDashboard, {"figures": 5}, ValueError, "figures should be a list of names, got 5"),
    (PosteriorDashboard, {"figures": ["Energy"]}, ValueError, "figures has an unknown name, 'Energy': choose from"),
    (PosteriorDashboard, {"segment_points": 1}, ValueError, "segment_points must be at least 2, got 1"),
    (ChainHealth, {"every_n_steps": 2.5}, TypeError, "every_n_steps must be a whole number, got 2.5 of type float"),
    (ChainHealth, {"every_n_steps": "2"}, TypeError, "every_n_steps must be a whole number, got '2' of type str"),
    (ChainHealth, {"tolerance": "0.1"}, TypeError, "tolerance must be a number, got '0.1' of type str"),
    (ChainHealth, {"tolerance": math.inf}, ValueError, "tolerance must be a finite number and not negative, got inf"),
    (ChainHealth, {"false_alarm_rate": 1}, ValueError, "false_alarm_rate must be in (0, 1), got 1"),
    (ChainHealth, {"warm_up": -1}, ValueError, "warm_up must be in [0, 1), got -1"),
    (ChainHealth, {"warn": "no"}, TypeError, "warn must be True or False, got 'no' of type str"),
    (RunSummary, {"name": ""}, ValueError, "name must be a text for results.json, got ''"),
    (RunSummary, {"name": None}, ValueError, "name must be a text for results.json, got None"),
]

CONTOURS: list[Mistake] = [
    (ContourRules, {"weight_exponent": "1"}, TypeError, "weight_exponent must be a number, got '1' of type str"),
    (ContourRules, {"min_multiplier": "1"}, TypeError, "min_multiplier must be a number, got '1' of type str"),
    (ContourRules, {"min_multiplier": 2.0}, ValueError, "min_multiplier must be in (-inf, 1], got 2.0"),
    (ContourRules, {"max_multiplier": 0.5}, ValueError, "max_multiplier must be in [1, inf), got 0.5"),
    (ContourRules, {"flat_last_bin": "no"}, TypeError, "flat_last_bin must be True or False, got 'no' of type str"),
    (ContourRules, {"scheme": "Original"}, ValueError, "scheme must be 'scalable' or 'original' or 'high-order', got"),
    (DecayingStepSize, {"numerator": "1"}, TypeError, "numerator must be a number, got '1' of type str"),
    (DecayingStepSize, {"exponent": 2}, ValueError, "exponent must be in [0, 1], got 2"),
    (DecayingStepSize, {"maximum": 2}, ValueError, "maximum must be in (0, 1], got 2"),
    (EnergyPartition, {"first_edge": "0", "width": 1.0, "num_bins": 9}, TypeError, "first_edge must be a number, got"),
    (EnergyPartition, {"first_edge": math.nan, "width": 1.0, "num_bins": 9}, ValueError, "first_edge must be in (-inf"),
    (EnergyPartition, {"first_edge": 0.0, "width": 0.0, "num_bins": 9}, ValueError, "width must be positive, got 0.0"),
    (ContourGradient, {"rules": 0.75}, TypeError, "rules must be an object of class ContourRules, got 0.75"),
    (ContourGradient, {"rules": None}, ValueError, "rules=None: pass ContourRules(zeta=…), or auto=True"),
    (CONTOUR, {"step_size": 0.1}, TypeError, "step_size must be an object of class DecayingStepSize, got 0.1"),
    (CONTOUR, {"interacting": "yes"}, TypeError, "interacting must be True or False, got 'yes' of type str"),
    (CONTOUR, {"include_prior": 1}, TypeError, "include_prior must be True or False, got 1 of type int"),
    (CONTOUR, {"exchange_every": 5}, ValueError, "exchange_every=5 needs interacting chains: pass interacting=True"),
    (CONTOUR, {"exchange_every": None}, TypeError, "exchange_every must be a whole number, got None"),
    (CONTOUR, {"sample_energy": "Full"}, ValueError, "sample_energy must be 'own' or 'step' or 'full', got 'Full'"),
]

GRADIENTS: list[Mistake] = [
    (EWSG, {"num_proposals": None}, TypeError, "num_proposals must be a whole number, got None of type NoneType"),
    (EWSG, {"num_proposals": True}, TypeError, "num_proposals must be a whole number, got True of type bool"),
    (EWSG, {"guess": "none"}, ValueError, "guess must be 'unchanged' or 'stopped' or 'zero' or 'one', got 'none'"),
    (ControlVariates, {"energy": "yes"}, TypeError, "energy must be True or False, got 'yes' of type str"),
    (ControlVariates, {"start_epoch": 0.5}, TypeError, "start_epoch must be a whole number, got 0.5 of type float"),
    (VarianceReducedEnergy, {"every_n_epochs": 0}, ValueError, "every_n_epochs must be at least 1, got 0"),
    (CovarianceFriction, {"form": "full"}, ValueError, "form must be 'diagonal' or 'matrix', got 'full'"),
    (ReplicaExchange, {"temperatures": 4}, TypeError, "temperatures must be a list with one number for each slot, got"),
    (ReplicaExchange, {"temperatures": "12"}, TypeError, "temperatures must be a list with one number for each slot"),
    (LADDER, {"lrs": "12"}, TypeError, "lrs must be a list with one number for each slot, got '12'"),
    (LADDER, {"smoothing": "1"}, TypeError, "smoothing must be a number, got '1' of type str"),
    (LADDER, {"correction": math.inf}, ValueError, "correction must be in [1, inf), got inf"),
    (LADDER, {"include_prior": "no"}, TypeError, "include_prior must be True or False, got 'no' of type str"),
    (ChainStrategy, {"ranks_per_chain": 1.5}, TypeError, "ranks_per_chain must be a whole number, got 1.5"),
    (ChainStrategy, {"ranks_per_chain": 0}, ValueError, "ranks_per_chain must be at least 1, got 0"),
]


@pytest.mark.parametrize(
    ("make", "options", "error", "sentence"), [*SCHEDULES, *WARM_STARTS, *SAMPLES, *CONTOURS, *GRADIENTS]
)
def test_construction(make: Made, options: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        make(**options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value), "one sentence"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: EWSG(0), "EWSG has no effect: num_proposals=0 leaves it one batch to choose from; pass 1 or more."),
        (lambda: CONTOUR(rules=ContourRules(zeta=0.0)), "ContourGradient has no effect: ContourRules.zeta=0. leaves"),
    ],
)
def test_callbacks_without_effect(make: Made, sentence: str) -> None:
    with pytest.warns(UserWarning, match=sentence):
        make()
