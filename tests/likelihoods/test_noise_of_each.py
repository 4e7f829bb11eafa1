"""A noise for each of several targets: densities, guesses and fits are those of the targets one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Gaussian, LogNormal, NegativeBinomial, Posterior, StudentT, Weibull
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule
from lightning_sgmcmc.estimators import BayesianRegressor
from tests.support.trainers import quiet_trainer

EACH = [0.3, 1.0, 2.5]
MADE: dict[str, tuple[Any, Any]] = {
    "Gaussian": (Gaussian, lambda y: y),
    "StudentT": (lambda each, learned=False: StudentT(3.0, each, learned), lambda y: y),
    "LogNormal": (LogNormal, torch.exp),
    "Weibull": (Weibull, torch.exp),
    "NegativeBinomial": (NegativeBinomial, lambda y: y.exp().round()),
}


def numbers(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.mark.parametrize("name", MADE)
def test_each_target_has_the_density_and_the_mean_of_one_alone(name: str) -> None:
    make, suited = MADE[name]
    output, y = numbers(40, 3)
    target, together = suited(y), make(EACH)
    alone = [make(value) for value in EACH]
    columns = [(own, output[:, [d]], target[:, [d]]) for d, own in enumerate(alone)]
    density = torch.stack([own.log_prob(*column) for own, *column in columns]).sum(0)
    torch.testing.assert_close(together.log_prob(output, target), density)
    for term, found in {**together.terms(output), **together.target_terms(output, target)}.items():
        expected = [{**own.terms(o), **own.target_terms(o, t)}[term] for own, o, t in columns]
        torch.testing.assert_close(found, torch.cat(expected, 1))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_a_guess_has_the_nll_of_the_guesses_of_each(name: str, learned: bool) -> None:
    make, suited = MADE[name]
    target = suited(numbers(400, 3)[1])
    alone = sum(make(value, learned).chance_nll(target[:, [d]]) for d, value in enumerate(EACH))
    assert make(EACH, learned).chance_nll(target) == pytest.approx(alone, rel=1e-6)


def test_channels_of_fields() -> None:
    output, target = numbers(5, 2, 4, 3)
    likelihood = Gaussian([[[0.5]], [[2.0]]])
    alone = [Gaussian(std).log_prob(output[:, [c]], target[:, [c]]) for c, std in enumerate((0.5, 2.0))]
    torch.testing.assert_close(likelihood.log_prob(output, target), alone[0] + alone[1])
    with pytest.raises(ValueError, match=r"std has shape \(2,\).*\(2, 4, 3\).*\(2, 1, 1\) for channels"):
        Gaussian([0.5, 2.0]).log_prob(output, target)


@pytest.mark.parametrize("name", MADE)
def test_numbers_that_are_not_the_targets_are_refused(name: str) -> None:
    make, suited = MADE[name]
    wide, y = numbers(4, 2)
    with pytest.raises(ValueError, match=r"shape \(3,\), and a target has shape \(2,\): pass one number"):
        make(EACH).log_prob(wide, suited(y))
    for output in (wide[:, :1], wide[:, 0]):  # would broadcast
        with pytest.raises(ValueError, match="shape"):
            make(EACH).log_prob(output, suited(numbers(4, 3)[1]))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([], ValueError, "std is empty"),
        ([1.0, -1.0], ValueError, r"std must be in \(0, inf\), got -1.0"),
        ([1.0, float("nan")], ValueError, "std must be in"),
        (["a", "b"], TypeError, "a list with one for each target, got"),
        ([[1.0], [1.0, 2.0]], TypeError, "a list with one for each target, got"),
        ("0.5", TypeError, "std"),
    ],
)
def test_wrong_numbers_are_named(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Gaussian(given)


@pytest.mark.parametrize("value", [np.array([0.5, 2.0]), torch.tensor([0.5, 2.0]), (0.5, 2.0)])
def test_arrays_and_tensors_are_lists(value: Any) -> None:
    assert Gaussian(value).std == [0.5, 2.0]
    assert repr(Gaussian(value)) == "Gaussian(std=[0.5, 2.0], learned=False)"


def data(count: int = 600) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.RandomState(0)
    x = drawn.randn(count, 4)
    return x, x[:, :2] + np.array([0.1, 1.0]) * drawn.randn(count, 2)


def test_a_regressor_finds_the_noise_of_each_target() -> None:
    """Targets of noises 0.1 and 1: 90 % intervals have 80 to 96 % of 1,000 new rows of each.

    Four seeds had 84 to 90 % of each. With one noise for both it was 100 % of the first and 67 to 74 % of the second.
    """
    x, y = data(1400)
    model = BayesianRegressor(random_state=0).fit(x[:400], y[:400])
    low, high = model.predict_interval(x[400:]).transpose(1, 0, 2)
    inside = ((low < y[400:]) & (y[400:] < high)).mean(0)
    assert (inside > 0.8).all()
    assert (inside < 0.96).all()


@pytest.mark.parametrize(("chains", "options"), [(1, {}), (3, {}), (3, {"chain_execution": "loop"})])
def test_a_store_keeps_the_noise_of_each(tmp_path: Path, chains: int, options: dict[str, Any]) -> None:
    x, y = data(60)
    table = TableDataModule(x, y, batch_size=20, task="regression")
    module = BayesianModule(nn.Linear(4, 2), Gaussian([0.2, 0.8], learned=True), lr=1e-3, num_chains=chains, **options)
    schedule = SamplingSchedule(every_n_epochs=2)
    quiet_trainer(max_epochs=4, callbacks=[schedule, SampleCollector(tmp_path)]).fit(module, datamodule=table)
    posterior = Posterior.load(tmp_path)
    states = [sample.parameters["likelihood.log_std"] for sample in posterior.store]
    assert all(state.shape == (2,) for state in states)
    assert torch.stack(states).exp().mean(0).tolist() == pytest.approx([0.2, 0.8], rel=0.5)
    assert module.posterior is not None
    found, expected = (p.predict(table.splits[1].inputs).std for p in (posterior, module.posterior))
    torch.testing.assert_close(found, expected)
