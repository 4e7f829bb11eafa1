"""Typed mistakes in Python get the sentence that the command line gives."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sgmcmc import SGHMC, SGLD, AdamSGLD, BayesianModule, Categorical, GaussianPrior, StudentTPrior
from lightning_sgmcmc.callbacks import AutoSampling, ChainHealth, CyclicalSchedule, SampleCollector, SamplingSchedule
from lightning_sgmcmc.checks import similar
from lightning_sgmcmc.datamodules import DigitsDataModule, TableDataModule


class Own(BayesianModule):
    def __init__(self, width: int = 4, **options: Any) -> None:
        super().__init__(likelihood=Categorical(), **options)
        self.net = nn.Linear(2, width)


class Narrow(BayesianModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__(likelihood=Categorical())


def weights() -> list[torch.Tensor]:
    return [torch.zeros(2, requires_grad=True)]


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "learning_rate": (
        lambda: BayesianModule(learning_rate=0.1),
        "BayesianModule has no argument 'learning_rate'.*'lr'",
    ),
    "through a subclass": (lambda: Own(learning_rate=0.1), "BayesianModule has no argument 'learning_rate'.*'lr'"),
    "of a subclass": (lambda: Narrow(widht=3), "Narrow has no argument 'widht'.*'width'"),
    "weight_decay": (lambda: BayesianModule(weight_decay=0.1), "no argument 'weight_decay'.*'prior'"),
    "optimizer": (lambda: BayesianModule(optimizer=SGLD), "no argument 'optimizer'.*'sampler'"),
    "chains": (lambda: BayesianModule(chains=2), "no argument 'chains'.*'num_chains'"),
    "loss": (lambda: BayesianModule(loss=Categorical()), "no argument 'loss'.*'likelihood'"),
    "burn_in": (lambda: SamplingSchedule(burn_in=3), "SamplingSchedule has no argument 'burn_in'.*'burn_in_steps'"),
    "burn_in of cycles": (lambda: CyclicalSchedule(burn_in=0.3), "no argument 'burn_in'.*'exploration'"),
    "learning_rate of a schedule": (lambda: AutoSampling(learning_rate=1), "no argument 'learning_rate'.*'lr'"),
    "a letter": (lambda: AutoSampling(num_draw=3), "no argument 'num_draw'.*'num_draws'"),
    "path": (lambda: SampleCollector(path="x"), "SampleCollector has no argument 'path'.*'dirpath'"),
    "a diagnosis": (lambda: ChainHealth(every_n_step=3), "no argument 'every_n_step'.*'every_n_steps'"),
    "a sampler": (lambda: SGLD(weights(), learning_rate=0.1), "SGLD has no argument 'learning_rate'.*'lr'"),
    "a partial": (
        lambda: BayesianModule(sampler=functools.partial(SGHMC, frictoin=0.1)),
        "SGHMC has no argument 'frictoin'.*'friction'",
    ),
    "a partial, in other words": (
        lambda: BayesianModule(sampler=functools.partial(SGHMC, momentum=0.9)),
        "SGHMC has no argument 'momentum'.*'friction'",
    ),
    "a partial of a preconditioned one": (
        lambda: BayesianModule(sampler=functools.partial(AdamSGLD, beta=0.9)),
        "AdamSGLD has no argument 'beta'",
    ),
    "a prior": (lambda: GaussianPrior(sigma=0.1), "GaussianPrior has no argument 'sigma'.*'std'"),
    "another prior": (lambda: StudentTPrior(scal=0.1), "StudentTPrior has no argument 'scal'.*'scale'"),
    "a likelihood": (lambda: Categorical(ignore=-100), "Categorical has no argument 'ignore'"),
    "data": (lambda: DigitsDataModule(batchsize=3), "DigitsDataModule has no argument 'batchsize'.*'batch_size'"),
    "a table": (lambda: TableDataModule(targets="y"), "TableDataModule has no argument 'targets'.*'target'"),
    "nothing is similar": (lambda: SampleCollector(zzz=1), "SampleCollector has no argument 'zzz'$"),
    "an object of a sampler": (
        lambda: BayesianModule(sampler=SGLD(weights(), num_data=3)),
        "sampler=SGLD.*pass the class, sampler=SGLD",
    ),
}


@pytest.mark.parametrize(("mistake", "sentence"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistyped_argument_says_what_it_could_mean(mistake: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        mistake()


def test_a_sampler_of_parameters_says_that_a_module_takes_the_class() -> None:
    with pytest.raises(ValueError, match=r"needs num_data.*pass.*num_data=.*sampler=SGHMC"):
        BayesianModule(sampler=SGHMC(weights()))


def test_the_command_line_knows_the_same_words() -> None:
    assert similar("learning_rate", ["lr", "net"]) == "; did you mean 'lr'?"
    assert similar("hiden", ["hidden"]) == "; did you mean 'hidden'?"
    assert similar("weight_decay", ["lr"]) == ""


@pytest.mark.parametrize("prior", [0.1, 2])
def test_a_number_is_the_priors_standard_deviation(prior: float) -> None:
    made, expected = BayesianModule(prior=prior).prior, GaussianPrior(std=prior)
    parameters = {"w": torch.full((3,), 0.3)}
    assert made.log_prob(parameters) == expected.log_prob(parameters)


@pytest.mark.parametrize(
    ("prior", "kind"), [(True, TypeError), ("0.1", TypeError), (-0.1, ValueError), (0, ValueError)]
)
def test_other_numbers_are_refused(prior: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"prior|std"):
        BayesianModule(prior=prior)
