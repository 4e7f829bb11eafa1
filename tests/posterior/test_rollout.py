"""Rollouts: one trajectory a sample, of linear dynamics in closed form, in the data's units."""

from pathlib import Path

import pandas
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule
from lightning_sgmcmc.tables import TargetScaling
from tests.support.trainers import quiet_trainer

MATRICES = [torch.tensor([[0.9, s], [-s, 0.9]]) for s in (0.0, 0.1, 0.3)]
START = torch.tensor([[1.0, 0.0], [0.0, -2.0]])


def linear(noise: float = 0.5) -> Posterior:
    return Posterior.from_states(nn.Linear(2, 2, bias=False), [{"weight": a} for a in MATRICES], Gaussian(noise))


def test_every_sample_follows_its_own_dynamics() -> None:
    """x_t = A_s^t·x_0, which the average's prediction, fed back, is not."""
    paths = linear().rollout(START, 7)
    assert paths.shape == (3, 7, 2, 2)
    for path, matrix in zip(paths, MATRICES, strict=True):
        for t in range(7):
            torch.testing.assert_close(path[t], START @ torch.linalg.matrix_power(matrix.T, t + 1))
    fed_back = START
    for _ in range(7):
        fed_back = linear().predict(fed_back).mean
    assert not torch.allclose(fed_back, paths[:, -1].mean(0), atol=0.01)


def test_noise_has_the_variance_of_the_recursion_and_the_callers_seed() -> None:
    """Each number has the variance σ²·Σ_t 0.9^(2t) after A = 0.9·1; of 8,000 numbers, within five standard errors."""
    posterior, many = linear(), START[:1].expand(4000, 2)
    state = torch.random.get_rng_state()
    paths = posterior.rollout(many, 5, noise=True, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(paths, posterior.rollout(many, 5, noise=True, seed=3))
    assert not torch.equal(paths, posterior.rollout(many, 5, noise=True, seed=4))
    expected = 0.25 * sum(0.81**t for t in range(5))
    assert float(paths[0, -1].var(0).mean()) == pytest.approx(expected, rel=5 * (2 / 8000) ** 0.5)
    errors = [paths[0, 0] - paths[0, 0].mean(0), paths[1, 0] - paths[1, 0].mean(0)]
    assert abs(float((errors[0] * errors[1]).mean())) < 5 * 0.25 / 8000**0.5, "the samples' noises are not one"


def test_lags_by_a_step_of_the_users() -> None:
    posterior = Posterior.from_states(nn.Linear(2, 1, bias=False), [{"weight": torch.ones(1, 2)}], Gaussian())
    paths = posterior.rollout(torch.ones(1, 2), 6, lambda x, y: torch.cat([x[:, 1:], y], 1))
    assert paths[0, :, 0, 0].tolist() == [2, 3, 5, 8, 13, 21], "Fibonacci's"


def test_states_are_in_the_datas_units(tmp_path: Path) -> None:
    """A fit whose datamodule standardises inputs and targets, read in another process."""
    generator = torch.Generator().manual_seed(0)
    x = 50 + 10 * torch.randn(200, 1, generator=generator)
    table = pandas.DataFrame({"now": x[:, 0].numpy(), "next": (20 + 0.5 * x[:, 0]).numpy()})
    data = TableDataModule(table, target="next")
    module = BayesianModule(nn.Linear(1, 1), Gaussian(0.3), lr=0.05)
    callbacks = [SamplingSchedule(burn_in_steps=20, every_n_steps=5), SampleCollector(tmp_path / "samples")]
    pl.seed_everything(0, verbose=False)
    quiet_trainer(max_epochs=30, callbacks=callbacks).fit(module, datamodule=data)
    posterior = Posterior.load(tmp_path / "samples")
    frame = pandas.DataFrame({"now": [60.0, 30.0]})
    first = torch.stack([network(posterior.inputs(frame)) for network in posterior.networks()]).detach()
    scaling = posterior.store.scaling
    assert scaling is not None
    paths = posterior.rollout(frame, 3)
    torch.testing.assert_close(paths[:, 0], first * scaling.std[0] + scaling.mean[0], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(posterior.rollout(torch.tensor([[60.0], [30.0]]), 3), paths)
    truth = torch.tensor([[60.0, 50.0, 45.0], [30.0, 35.0, 37.5]])
    errors = paths.mean(0)[..., 0].T - torch.cat([truth[:, 1:], (20 + 0.5 * truth[:, 2:])], 1)
    assert float(errors.abs().max()) < 2, "twenty plus a half, three times"


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 2)])
def test_channels_have_units_of_their_own(shape: tuple[int, ...]) -> None:
    """Whatever the width of the field is."""
    net = nn.Conv2d(2, 2, 1)
    posterior = Posterior.from_states(net, [nn.Conv2d(2, 2, 1) for _ in range(2)], Gaussian())
    posterior.store.scaling = TargetScaling((15.0, 500.0), (8.0, 50.0), (), (2, 1, 1))
    x = torch.randn(5, *shape)
    paths = posterior.rollout(x, 1)
    torch.testing.assert_close(paths[:, 0], posterior.predict(x, return_samples=True).sample_means)


def test_what_cannot_be_fed_back_is_refused() -> None:
    posterior = Posterior.from_states(nn.Linear(2, 1), [nn.Linear(2, 1)], Gaussian())
    with pytest.raises(ValueError, match=r"shape \(2, 1\), and inputs have \(2, 2\).*step"):
        posterior.rollout(START, 3)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        posterior.rollout(START, 0)
    classes = Posterior.from_states(nn.Linear(2, 2), [nn.Linear(2, 2)], Categorical())
    with pytest.raises(TypeError, match="Categorical has no distribution of numbers"):
        classes.rollout(START, 1)
    wrong: list[Tensor] = [START]
    with pytest.raises(TypeError, match="got a list"):
        posterior.rollout(wrong, 1)
