"""Samplers, priors, likelihoods and plans made with wrong arguments: what the user does | the sentence that follows."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    SGNHT,
    Annealing,
    Gaussian,
    GaussianPrior,
    LaplacePrior,
    PolynomialDecay,
    StudentTPrior,
    UnderdampedLangevin,
    pSGLD,
)
from tests.support.small_run import module

P = [nn.Parameter(torch.zeros(2))]
Mistake = tuple[Callable[[], Any], type[Exception], str]


def made(cls: Any, *arguments: Any, **options: Any) -> Callable[[], Any]:
    """Return a call that types would forbid."""
    return functools.partial(cls, *arguments, **options)


def sampler(cls: Any, **options: Any) -> Callable[[], Any]:
    return functools.partial(cls, P, **({"num_data": 9} | options))


def within(sampler: Any, **options: Any) -> Callable[[], Any]:
    """Return a call that makes a module with a partial of a sampler."""
    return lambda: module(sampler=functools.partial(sampler, **options))


SAMPLERS: list[Mistake] = [
    (sampler(SGLD, num_data=24.5), TypeError, "num_data must be a whole number, got 24.5 of type float"),
    (sampler(SGLD, num_data=True), TypeError, "num_data must be a whole number, got True of type bool"),
    (sampler(SGLD, num_data="24"), TypeError, "num_data must be a whole number, got '24' of type str"),
    (sampler(SGLD, num_data=-1), ValueError, "num_data must be at least 1, got -1"),
    (sampler(SGLD, lr="0.1"), TypeError, "lr must be a number, got '0.1' of type str"),
    (sampler(SGLD, lr=True), TypeError, "lr must be a number, got True of type bool"),
    (sampler(SGLD, lr=None), TypeError, "lr must be a number, got None of type NoneType"),
    (sampler(SGLD, lr=math.nan), ValueError, "lr must be a finite number and not negative, got nan"),
    (sampler(SGLD, temperature="1"), TypeError, "temperature must be a number, got '1' of type str"),
    (sampler(SGLD, temperature=None), TypeError, "temperature must be a number, got None of type NoneType"),
    (sampler(SGLD, seed=-1), ValueError, "seed must be at least 0, got -1"),
    (sampler(SGLD, seed=1.5), TypeError, "seed must be a whole number, got 1.5 of type float"),
    (sampler(SGLD, num_chains=1.0), TypeError, "num_chains must be a whole number, got 1.0 of type float"),
    (sampler(SGLD, num_chains="1"), TypeError, "num_chains must be a whole number, got '1' of type str"),
    (sampler(SGLD, first_chain=-1), ValueError, "first_chain must be at least 0, got -1"),
    (sampler(SGLD, noise_ahead="no"), TypeError, "noise_ahead must be True or False, got 'no' of type str"),
    (sampler(SGHMC, friction="0.1"), TypeError, "friction must be a number, got '0.1' of type str"),
    (sampler(SGHMC, friction=True), TypeError, "friction must be a number, got True of type bool"),
    (sampler(SGHMC, friction=0.0), ValueError, r"friction must be in (0, 1], got 0.0"),
    (sampler(SGHMC, momentum=0.9), TypeError, "has no argument 'momentum'"),
    (sampler(SGNHT, friction=math.nan), ValueError, "friction must be in (0, 1], got nan"),
    (sampler(SGNHT, thermal_inertia=-1.0), ValueError, "thermal_inertia must be a finite number and not negative"),
    (sampler(SGNHT, thermal_inertia=math.inf), ValueError, "thermal_inertia must be a finite number"),
    (sampler(pSGLD, alpha="0.9"), TypeError, "alpha must be a number, got '0.9' of type str"),
    (sampler(pSGLD, eps=math.nan), ValueError, "eps must be a finite number and not negative, got nan"),
    (sampler(UnderdampedLangevin, friction=math.nan), ValueError, "friction must be a finite number and not negative"),
]

SET_TWICE: list[Mistake] = [
    (
        within(SGLD, temperature=0.5),
        ValueError,
        "sampler=partial(SGLD, temperature=0.5) has no effect, since the",
    ),
    (
        within(SGLD, num_data=100),
        ValueError,
        "sampler=partial(SGLD, num_data=100) has no effect, since the",
    ),
    (within(SGLD, lr=0.5), ValueError, "since the module sets lr: pass lr=… to the module instead"),
    (within(SGHMC, seed=3), ValueError, "since the module sets seed: pass seed=… to the module instead"),
    (within(SGHMC, num_chains=2), ValueError, "since the module sets num_chains: pass num_chains=… to the module"),
    (within(SGHMC, first_chain=2), ValueError, "since the module sets first_chain: pass seed=… to the module"),
    (within(SGHMC, friction=0.1, temperature=1.0), ValueError, "sampler=partial(SGHMC, temperature=1.0) has no effect"),
]

PRIORS: list[Mistake] = [
    (made(GaussianPrior, "1"), TypeError, "the prior's std must be a number or 'fan_in', got '1' of type str for '*'"),
    (
        made(GaussianPrior, None),
        TypeError,
        "the prior's std must be a number or 'fan_in', got None of type NoneType for '*'",
    ),
    (made(GaussianPrior, True), TypeError, "the prior's std must be a number or 'fan_in', got True of type bool"),
    (
        made(GaussianPrior, [1.0, 2.0]),
        TypeError,
        "the prior's std must be a number or 'fan_in', got [1.0, 2.0] of type list",
    ),
    (made(GaussianPrior, torch.ones(2)), TypeError, "std must be one number for each pattern, got 2 numbers for '*'"),
    (made(GaussianPrior, {}), ValueError, "the prior's std has no patterns: pass one number, or numbers by pattern"),
    (
        made(GaussianPrior, {"a": "1"}),
        TypeError,
        "the prior's std must be a number or 'fan_in', got '1' of type str for 'a'",
    ),
    (
        made(GaussianPrior, {0: 1.0}),
        TypeError,
        "the prior's std has the pattern 0: patterns are texts such as",
    ),
    (made(LaplacePrior, {}), ValueError, "the prior's scale has no patterns"),
    (made(StudentTPrior, df="3"), TypeError, "the prior's df must be a number, got '3' of type str"),
    (made(StudentTPrior, df=None), TypeError, "the prior's df must be a number, got None of type NoneType"),
    (made(StudentTPrior, scale={"*": -1}), ValueError, "the prior's scale must be a positive number, got -1 for '*'"),
    (made(Gaussian, "1"), TypeError, "std must be a number, got '1' of type str"),
    (made(Gaussian, True), TypeError, "std must be a number, got True of type bool"),
    (made(Gaussian, learned="no"), TypeError, "learned must be True or False, got 'no' of type str"),
]

PLANS: list[Mistake] = [
    (made(PolynomialDecay, "1"), TypeError, "a must be a number, got '1' of type str"),
    (made(PolynomialDecay, math.inf), ValueError, "a must be a finite number and not negative, got inf"),
    (made(PolynomialDecay, 1.0, b=math.inf), ValueError, "b must be in [0, inf), got inf"),
    (made(PolynomialDecay, 1.0, gamma=-1.0), ValueError, "gamma must be in [0, inf), got -1.0"),
    (made(Annealing, "2"), TypeError, "divisor must be a number, got '2' of type str"),
    (made(Annealing, math.inf), ValueError, "divisor must be in [1, inf), got inf"),
    (made(Annealing, 2.0, start_epoch=1.5), TypeError, "start_epoch must be a whole number, got 1.5 of type float"),
]

MODULES: list[Mistake] = [
    (lambda: module(shared_batch="yes"), TypeError, "shared_batch must be True or False, got 'yes' of type str"),
    (lambda: module(compile="no"), TypeError, "compile must be True, False or 'auto', got 'no' of type str"),
    (lambda: module(num_chains=None), TypeError, "num_chains must be a whole number, got None of type NoneType"),
    (lambda: module(lr=torch.tensor(0.1)), TypeError, "lr must be a number, got tensor(0.1000) of type Tensor"),
    (lambda: module(lr=[0.1, -1.0]), ValueError, "lr must be a finite number and not negative, got -1.0"),
    (lambda: module(temperature=[]), ValueError, "temperature has no values: pass one for each chain"),
    (lambda: module(chain_start="random"), ValueError, "chain_start must be 'own' or 'same', got 'random'"),
    (
        lambda: module(chain_execution="gpu"),
        ValueError,
        "chain_execution must be 'auto' or 'loop' or 'vmap' or 'unrolled', got",
    ),
    (lambda: module(net=[nn.Linear(2, 2)]), TypeError, "net should be a Module, got a list"),
    (
        lambda: module(likelihood=nn.CrossEntropyLoss()),
        TypeError,
        "likelihood=CrossEntropyLoss(…) is a loss, and a posterior needs a density of each example",
    ),
]


@pytest.mark.parametrize(("make", "error", "sentence"), [*SAMPLERS, *SET_TWICE, *PRIORS, *PLANS, *MODULES])
def test_construction(make: Callable[[], Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value), "one sentence"


def test_arguments_that_the_module_leaves_to_the_sampler() -> None:
    module(sampler=functools.partial(SGHMC, friction=0.5, noise_estimate=0.1))
    module(sampler=functools.partial(SGLD, lr=0.5), lr=None)
