"""Targets that are fields (n, C, H, W) and sequences (n, T, D): a datum's density is the sum over its numbers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    SGLD,
    BayesianModule,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    MixtureOfGaussians,
    NegativeBinomial,
    Poisson,
    Posterior,
    RegressionPrediction,
    StudentT,
)
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.tables import TargetScaling
from tests.support.trainers import quiet_trainer

DATA, CHANNELS, HEIGHT, WIDTH = 17, 2, 4, 3
FIELD = (CHANNELS, HEIGHT, WIDTH)


def softplus(raw: Any) -> Any:
    return 1e-3 + torch.nn.functional.softplus(raw).numpy() / math.log(2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- densities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [FIELD, (5, 2), (1,), (2, 3, 2, 2)], ids=["field", "sequence", "number", "volume"])
def test_the_density_of_a_datum_is_scipys_sum_over_its_numbers(shape: tuple[int, ...]) -> None:
    output, y = random(6, *shape), random(6, *shape, seed=1)
    counts = y.exp().round()
    rate = output.exp().numpy()
    expected = {
        Gaussian(0.7): stats.norm.logpdf(y, output, 0.7),
        StudentT(3.0, 0.7): stats.t.logpdf(y, 3.0, output, 0.7),
        Poisson(): stats.poisson.logpmf(counts, rate),
        NegativeBinomial(2.0): stats.nbinom.logpmf(counts, 2.0, 2.0 / (2.0 + rate)),
    }
    for likelihood, each in expected.items():
        target = counts if isinstance(likelihood, Poisson | NegativeBinomial) else y
        found = likelihood.log_prob(output, target)
        assert found.shape == (6,)
        torch.testing.assert_close(found, torch.tensor(each).flatten(1).sum(1), rtol=1e-5, atol=1e-5)
        assert likelihood.terms(output)["mean"].shape == target.shape


@pytest.mark.parametrize("axis", [1, -1])
def test_means_and_scales_lie_along_the_named_axis(axis: int) -> None:
    y = random(6, *FIELD)
    loc, raw = random(6, *FIELD, seed=1), random(6, *FIELD, seed=2)
    found = HeteroscedasticGaussian(axis=axis).log_prob(torch.cat([loc, raw], axis), y)
    expected = torch.tensor(stats.norm.logpdf(y, loc, softplus(raw)))
    torch.testing.assert_close(found, expected.flatten(1).sum(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", [1, -1])
def test_a_field_of_mixtures_has_a_mixture_at_each_place(axis: int) -> None:
    likelihood, y = MixtureOfGaussians(2, axis=axis), random(6, *FIELD)
    parts = [random(6, *FIELD, seed=seed) for seed in range(1, 7)]  # two of each of a, m and b
    output = torch.stack(parts, -1)  # (n, C, H, W, 6)
    place = axis % 4
    output = output.movedim(-1, place + 1).flatten(place, place + 1)
    weights = torch.stack(parts[:2]).softmax(0).numpy()
    density = sum(weights[j] * stats.norm.pdf(y, parts[2 + j], softplus(parts[4 + j])) for j in range(2))
    expected = torch.tensor(density).log().flatten(1).sum(1)
    torch.testing.assert_close(likelihood.log_prob(output, y), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussian(), MixtureOfGaussians(2)])
def test_the_wrong_axis_is_refused_with_the_remedy(likelihood: Likelihood) -> None:
    with pytest.raises(ValueError, match="axis=-1"):
        likelihood.log_prob(random(6, 5, 12), random(6, 5, 2))
    with pytest.raises(ValueError, match="axis=0"):
        type(likelihood)(2, axis=0)


def test_gradients_and_chains_at_once() -> None:
    output, y = random(3, 4, 2, 2).requires_grad_(), random(3, 2, 2, 2, seed=1)
    y[0, 0, 0, 0] = math.nan
    for likelihood in (HeteroscedasticGaussian(), MixtureOfGaussians(2, axis=-1)):
        o = output if isinstance(likelihood, HeteroscedasticGaussian) else random(3, 2, 2, 12).requires_grad_()
        assert torch.autograd.gradcheck(likelihood.log_prob, (o, y))
        stacked = torch.stack([o.detach(), o.detach() + 1])
        each = torch.stack([likelihood.log_prob(one, y) for one in stacked])
        torch.testing.assert_close(torch.vmap(likelihood.log_prob, in_dims=(0, None))(stacked, y), each)


# -- from fit to prediction -------------------------------------------------------------------------------------------


class Fields(pl.LightningDataModule):
    """Two channels in units of their own, which the inputs determine up to noise; one number is not observed."""

    def __init__(self, per_channel: bool = True, flat: bool = False) -> None:
        super().__init__()
        self.x = random(DATA, 3, HEIGHT, WIDTH).float()
        self.y = torch.stack([5 + 2 * self.x[:, 0], 100 + 30 * self.x[:, 1]], 1) + random(DATA, *FIELD, seed=1).float()
        self.y[2, 1, 0, 0] = math.nan
        known = self.y.nan_to_num(0)
        axes = (0, 2, 3) if per_channel else (0, 1, 2, 3)
        self.target_mean, self.target_std = known.mean(axes, True)[0], known.std(axes, keepdim=True)[0]
        self.z = (self.y - self.target_mean) / self.target_std
        if flat:
            self.target_mean, self.target_std = self.target_mean.flatten(), self.target_std.flatten()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.x, self.z), 5, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.x, self.z), 5)


def fitted(data: Fields, likelihood: Likelihood, outputs: int, folder: Path | None = None) -> BayesianModule:
    torch.manual_seed(0)
    module = BayesianModule(nn.Conv2d(3, outputs, 1), likelihood, sampler=SGLD, lr=1e-4, num_chains=2)
    collector = SampleCollector(in_memory=True) if folder is None else SampleCollector(folder)
    callbacks = [SamplingSchedule(burn_in_steps=10, every_n_steps=5), collector, BayesianModelAverage(scores=True)]
    quiet_trainer(max_steps=30, callbacks=callbacks).fit(module, datamodule=data)
    return module


@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        (lambda: Gaussian(0.5, learned=True), 2),
        (HeteroscedasticGaussian, 4),
        (StudentT, 2),
        (lambda: MixtureOfGaussians(2), 12),
    ],
    ids=["gaussian", "heteroscedastic", "student", "mixture"],
)
def test_predictions_have_the_targets_shape_and_the_channels_units(
    likelihood: Any, outputs: int, tmp_path: Path
) -> None:
    data = Fields()
    module = fitted(data, likelihood(), outputs, tmp_path / "s")
    posterior = Posterior.load(tmp_path / "s")
    found, own = posterior.predict(data.x), posterior.standardised().predict(data.x)
    assert isinstance(found, RegressionPrediction)
    assert found.mean.shape == found.std.shape == found.quantile(0.3).shape == (DATA, *FIELD)
    for name in ("std", "epistemic_std", "aleatoric"):
        torch.testing.assert_close(getattr(found, name), getattr(own, name) * data.target_std, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.mean, own.mean * data.target_std + data.target_mean)
    torch.testing.assert_close(found.cdf(data.y), own.cdf(data.z), rtol=1e-4, atol=1e-4, equal_nan=True)
    draws = found.sample(4000)
    assert draws.shape == (4000, DATA, *FIELD)
    assert ((draws.mean(0) - found.mean) / found.std).abs().max() < 5 / math.sqrt(4000)
    # The evaluation's metrics are those of the prediction, by hand.
    metrics, known = module.evaluations["val"].bma, ~data.y.isnan()
    errors = (found.mean - data.y)[known]
    assert metrics["rmse"] == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-3)
    for channel in range(CHANNELS):
        each = (found.mean - data.y)[:, channel]
        assert metrics[f"rmse_{channel}"] == pytest.approx(float(each.square().nanmean().sqrt()), rel=1e-3)
    low, high = found.interval(0.9)
    inside = ((low <= data.y) & (data.y <= high))[known].double().mean()
    assert metrics["coverage_90"] == pytest.approx(float(inside), abs=2 / int(known.sum()))
    complete = found.log_prob(data.y)[known.flatten(1).all(1)]
    assert complete.shape == (DATA - 1,)
    assert -metrics["nll"] == pytest.approx(float((complete.sum() + _of_third(found, data)) / DATA), rel=1e-3)


def _of_third(prediction: RegressionPrediction, data: Fields) -> float:
    """Return the log density of the datum that lacks a number, from that of its other numbers."""
    mixture: Any = prediction._kept
    law, z = mixture.components, (data.y.double() - data.target_mean) / data.target_std
    each = law.log_prob(z[None])[:, 2] - data.target_std.double().log()
    return float((each.flatten(1).nansum(1) + mixture.weights.log()).logsumexp(0))


def test_calibration_intervals_and_ensembles_of_fields() -> None:
    data = Fields()
    module = fitted(data, Gaussian(0.5), 2)
    loader, known = data.val_dataloader(), ~data.y.isnan()
    calibrated = module.posterior.calibrate(loader).predict(data.x)
    z = ((data.y - calibrated.mean) / calibrated.std)[known]
    assert float(z.square().mean()) == pytest.approx(1, rel=1e-3)
    conformal = module.posterior.conformal(loader, level=0.8)
    assert conformal.threshold.shape == FIELD
    inside = conformal.predict(data.x).contains(data.y).double()
    assert inside.mean(0).min() >= 0.8 - 1 / DATA
    mean, std = module.posterior.ensemble()(data.x)
    prediction = module.posterior.predict(data.x)
    torch.testing.assert_close(mean, prediction.mean)
    torch.testing.assert_close(std, prediction.std)


def test_a_field_of_counts_is_predicted_as_counts() -> None:
    x = random(DATA, 3, HEIGHT, WIDTH).float()
    y = torch.poisson(x[:, :1].exp(), generator=torch.Generator().manual_seed(0)).long()
    module = BayesianModule(nn.Conv2d(3, 1, 1), Poisson(), sampler=SGLD, lr=1e-4)
    schedule, loader = SamplingSchedule(burn_in_steps=4, every_n_steps=2), DataLoader(TensorDataset(x, y), 5)
    callbacks = [schedule, SampleCollector(in_memory=True), BayesianModelAverage()]
    quiet_trainer(max_steps=12, callbacks=callbacks).fit(module, loader, loader)
    prediction = module.posterior.predict(x)
    assert prediction.mean.shape == y.shape
    assert torch.equal(prediction.quantile(0.7), prediction.quantile(0.7).round())
    metrics = module.evaluations["val"].bma
    assert metrics["nll"] == pytest.approx(-float(prediction.log_prob(y).mean()), rel=1e-4)
    assert metrics["rmse"] == pytest.approx(float((prediction.mean - y).square().mean().sqrt()), rel=1e-4)


def test_a_scaling_by_channel_must_broadcast() -> None:
    """One of shape (C,) could be of the last axis: it is refused in the first step, with the shape to pass."""
    with pytest.raises(ValueError, match=r"target_std .*shape \(2,\).*\(2, 1, 1\) for channels"):
        fitted(Fields(flat=True), Gaussian(0.5), 2)
    module = fitted(Fields(per_channel=False, flat=True), Gaussian(0.5), 2)  # one number is one of all
    assert set(module.evaluations["val"].bma) >= {"rmse", "nll"}
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        module.posterior.predict(random(2, 3, HEIGHT, WIDTH).float()).rescaled(0.0, torch.ones(2, 3))


def test_scalings_of_another_shape_are_others() -> None:
    one = TargetScaling((0.0, 1.0), (1.0, 2.0), shape=(2, 1, 1))
    assert one.factor.shape == one.shift.shape == (2, 1, 1)  # type: ignore[union-attr]
    assert (one.axis, one.labels) == (-3, ("0", "1"))
    with pytest.raises(ValueError, match="2 numbers"):
        TargetScaling((0.0, 1.0), (1.0, 2.0), shape=(3, 1, 1))


# -- what N is --------------------------------------------------------------------------------------------------------


def test_the_posterior_counts_every_place_of_every_sequence() -> None:
    """A linear regression at each place of a sequence: the draws are those of the closed form, from mini-batches."""
    x, noise = random(24, 9, 2), 3.0
    y = 0.5 * x[..., :1] - x[..., 1:] + noise * random(24, 9, 1, seed=1)
    options: dict[str, Any] = {"sampler": SGLD, "lr": 0.08, "num_chains": 40, "chain_execution": "vmap"}
    module = BayesianModule(nn.Linear(2, 1, bias=False), Gaussian(noise), **options)
    callbacks = [SamplingSchedule(burn_in_steps=60, every_n_steps=20), SampleCollector(in_memory=True)]
    trainer = quiet_trainer(max_steps=220, callbacks=callbacks)
    trainer.fit(module, DataLoader(TensorDataset(x.float(), y.float()), 12, shuffle=True))
    draws = torch.stack([sample.parameters["net.weight"] for sample in module.posterior]).double().flatten(1)
    rows = x.reshape(-1, 2)
    covariance = (rows.T @ rows / noise**2 + torch.eye(2, dtype=torch.float64)).inverse()
    mean, std = covariance @ rows.T @ y.reshape(-1) / noise**2, covariance.diagonal().sqrt()
    error = std / math.sqrt(len(draws) / 4)  # draws of a chain are correlated
    assert ((draws.mean(0) - mean).abs() / error).max() < 4.5
    torch.testing.assert_close(draws.std(0), std, rtol=0.25, atol=0)


# -- maps -------------------------------------------------------------------------------------------------------------


def test_maps_show_the_numbers_that_were_predicted() -> None:
    data = Fields()
    module = fitted(data, Gaussian(0.5), 2)
    found, third = module.posterior.predict(data.x[2:3]), data.y[2:3]
    figure = module.posterior.plot_map(data.x[2:3], third)
    maps: list[Any] = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert len(maps) == 5 * CHANNELS
    for channel in range(CHANNELS):
        mean, own, total, seen, error = (
            torch.as_tensor(one.filled(math.nan)).float() for one in maps[5 * channel :][:5]
        )
        torch.testing.assert_close(mean, found.mean[0, channel])
        torch.testing.assert_close(own, found.epistemic_std[0, channel])
        torch.testing.assert_close(total, found.std[0, channel])
        torch.testing.assert_close(seen, third[0, channel], equal_nan=True)
        torch.testing.assert_close(error, (third - found.mean)[0, channel], equal_nan=True)
    assert len([axes for axes in module.posterior.plot_map(data.x[2:3]).axes if axes.images]) == 3 * CHANNELS
    with pytest.raises(ValueError, match="one field"):
        module.posterior.plot_map(data.x)
    with pytest.raises(ValueError, match="shape of the predictions"):
        module.posterior.plot_map(data.x[:1], data.y)
