"""Batches that the user's hooks change, as on_after_batch_transfer normalises them: what a posterior reads of a loader
is what the trainer reads."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, FeatureDataModule, Posterior, bayesianize
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.singular import sample_losses
from tests.support.trainers import quiet_trainer

torch.manual_seed(0)
X = torch.randn(60, 2, 6, 6)
RAW, Y = 255 * X + 100, (X.mean((1, 2, 3)) > 0).long()
VALIDATION = (RAW[30:], Y[30:])


def normalised(batch: Any) -> Any:
    return [(batch[0] - 100) / 255, *batch[1:]]


class OnDevice(BayesianModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn(()), *batch[1:]] if self.training else normalised(batch)


class AsksItsTrainer(BayesianModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn(()), *batch[1:]] if self.trainer.training else normalised(batch)


class Images(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(RAW[:30], Y[:30]), 10, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*VALIDATION), 7)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return normalised(batch)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))


def fitted(module: BayesianModule, data: Any) -> tuple[Posterior, dict[str, Any]]:
    callbacks = [SamplingSchedule(3, every_n_steps=3), SampleCollector(in_memory=True), BayesianModelAverage()]
    trainer = quiet_trainer(callbacks=callbacks, max_steps=12)
    trainer.fit(module, data, None if isinstance(data, Images) else Images().val_dataloader())
    assert module.posterior is not None
    module.train()  # as it is after a fit
    return module.posterior, trainer.callback_metrics


@pytest.mark.parametrize("owner", [OnDevice, AsksItsTrainer, Images])
def test_a_posterior_reads_what_the_trainer_reads(owner: type) -> None:
    """In the fit too, where samples are evaluated between training steps."""
    torch.manual_seed(0)
    images = Images()
    cls = BayesianModule if owner is Images else owner
    module, data = cls(network(), Categorical(), lr=0.01), images if owner is Images else images.train_dataloader()
    validation = images if owner is Images else images.val_dataloader()
    posterior, logged = fitted(module, data)
    if owner is AsksItsTrainer:
        posterior.model = AsksItsTrainer(network(), Categorical())  # as in another program, where it has none
    received = [(X[30:], Y[30:])]
    nll = posterior.evaluate(received).bma["nll"]
    assert nll == pytest.approx(float(logged["val/bma_nll"]), rel=1e-5)
    calibrated, expected = posterior.calibrate(validation), posterior.calibrate(received)
    assert calibrated.calibration is not None
    assert expected.calibration is not None
    assert calibrated.calibration.value == pytest.approx(expected.calibration.value, rel=1e-4)
    found = calibrated.evaluate(validation)
    assert found.bma["nll"] == pytest.approx(nll, rel=1e-5)
    assert found.calibrated["nll"] == pytest.approx(expected.evaluate(received).calibrated["nll"], rel=1e-4)
    for what in ("conformal", "joint_nll"):
        one, other = getattr(posterior, what)(validation), getattr(posterior, what)(received)
        name = "threshold" if what == "conformal" else "marginal_nll"
        assert float(getattr(one, name)) == pytest.approx(float(getattr(other, name)), rel=1e-4)


def test_predictions_of_a_loader_and_of_what_the_network_receives() -> None:
    torch.manual_seed(0)
    images = Images()
    posterior, _ = fitted(OnDevice(network(), Categorical(), lr=0.01), images.train_dataloader())
    expected = posterior.predict(X[30:]).probabilities

    def check(probabilities: Tensor) -> None:
        torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=1e-5)

    check(posterior.predict(images.val_dataloader()).probabilities)
    check(torch.cat([one.probabilities for one in posterior.predict_batches(images.val_dataloader())]))
    trainer = quiet_trainer()
    check(torch.cat([one.probabilities for one in trainer.predict(posterior.model, images.val_dataloader())]))
    moved = [normalised(batch) for batch in images.val_dataloader()]
    check(posterior.predict(moved).probabilities)
    ours, theirs = posterior.update_batch_norm(images.val_dataloader()), posterior.update_batch_norm(moved)
    torch.testing.assert_close(ours[0].buffers["net.1.running_mean"], theirs[0].buffers["net.1.running_mean"])
    known = [posterior.detect(one, X[:30]).known["energy"] for one in (images.val_dataloader(), X[30:])]
    torch.testing.assert_close(*known, rtol=1e-4, atol=1e-5)
    losses = [sample_losses(posterior, data) for data in (images.val_dataloader(), moved)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    posterior.model.eval()  # else the hook makes a student's inputs as those of a fit, which here have no normalisation
    learned = []
    for data in (images.val_dataloader(), moved):
        torch.manual_seed(0)
        student = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
        learned.append(posterior.distill(student, data, epochs=60, accelerator="cpu").predict(X[30:]).probabilities)
        assert (learned[-1] - expected).abs().mean() < 0.1
    torch.testing.assert_close(*learned, rtol=1e-3, atol=1e-4)


def test_hooks_of_a_module_are_not_for_its_features() -> None:
    module = bayesianize(network(), "last_layer", Categorical())
    module.on_after_batch_transfer = lambda batch, index: normalised(batch)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"on_after_batch_transfer .* would get features"):
        FeatureDataModule(module, Images().train_dataloader())
