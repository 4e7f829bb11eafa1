"""Every evaluation of a run in the trainer's precision, and predictions in the samples' own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lightning_sgmcmc import SGLD, ContourRules, Posterior, ResumableLoader
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    ControlVariates,
    PosteriorDashboard,
    SampleCollector,
    SamplingSchedule,
)
from tests.support.problems import blobs, classifier, loaders
from tests.support.trainers import quiet_trainer

EVALUATIONS: dict[str, Any] = {
    "averages": lambda: [
        BayesianModelAverage(cycle_weights="harmonic", ood=DataLoader(blobs(40, 5), 24)),
        PosteriorDashboard(figures=["segments"]),
        ChainHealth(warn=False),
    ],
    "energies": lambda: [
        ControlVariates(every_n_epochs=1, energy=True),
        ContourGradient(ContourRules(zeta=0.75), num_bins=10, first_edge=0.0, width=50.0),
    ],
}


@pytest.mark.filterwarnings("error:.*could not draw")
@pytest.mark.filterwarnings("ignore:.*(end bin|posterior is flattened|all energies).*")
@pytest.mark.parametrize(
    ("kind", "precision", "chains"),
    [
        ("averages", "64-true", 2),
        ("energies", "64-true", 2),
        pytest.param("averages", "bf16-mixed", 2, marks=pytest.mark.slow),
        pytest.param("averages", "64-true", 1, marks=pytest.mark.slow),
        pytest.param("energies", "bf16-mixed", 2, marks=pytest.mark.slow),
        pytest.param("energies", "64-true", 1, marks=pytest.mark.slow),
    ],
)
def test_evaluations_run_in_the_trainers_precision(kind: str, precision: Any, chains: int, tmp_path: Path) -> None:
    module = classifier(sampler=SGLD, num_chains=chains)
    trainer = quiet_trainer(
        precision=precision,
        max_epochs=2,
        callbacks=[SamplingSchedule(every_n_steps=4), SampleCollector(tmp_path / "s"), *EVALUATIONS[kind]()],
    )
    trainer.fit(module, ResumableLoader(blobs(), 24), loaders()[1])
    expected = torch.float64 if precision == "64-true" else torch.float32
    posterior = Posterior.load(tmp_path / "s", model=classifier())
    assert {p.dtype for sample in posterior for p in sample.parameters.values()} == {expected}
    x = np.random.default_rng(0).normal(size=(5, 2))
    alike = [posterior.predict(inputs) for inputs in (x, torch.tensor(x), torch.tensor(x, dtype=expected))]
    for prediction in alike:
        assert prediction.probabilities.dtype == expected
        torch.testing.assert_close(prediction.probabilities, alike[-1].probabilities, rtol=0, atol=0)


def test_a_float64_evaluation_is_the_float64_average() -> None:
    """The streamed metrics equal those of `predict` on the same samples to float64's rounding."""
    module = classifier()
    callbacks = [SamplingSchedule(every_n_steps=4), SampleCollector(in_memory=True), BayesianModelAverage()]
    train, val = loaders()
    quiet_trainer(precision="64-true", max_epochs=2, callbacks=callbacks).fit(module, train, val)
    x, y = (torch.cat(parts) for parts in zip(*val, strict=True))
    assert module.posterior is not None
    probabilities = module.posterior.predict(x).probabilities
    nll = -probabilities[torch.arange(len(y)), y].log().mean().item()
    assert module.evaluations["val"].bma["nll"] == pytest.approx(nll, rel=1e-12)


def test_evaluations_pass_batches_through_the_users_hooks() -> None:
    """A datamodule that reads other units: its hook before the transfer divides the inputs by 100."""

    class OtherUnits(pl.LightningDataModule):
        num_data = 96

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] / 100, batch[1]

        def train_dataloader(self) -> Any:
            return DataLoader([(100 * x, y) for x, y in blobs()], 24)

        def val_dataloader(self) -> Any:
            return DataLoader([(100 * x, y) for x, y in blobs(64, 1)], 24)

    module = classifier()
    callbacks = [SamplingSchedule(every_n_steps=8), SampleCollector(in_memory=True), BayesianModelAverage()]
    quiet_trainer(max_epochs=2, callbacks=callbacks).fit(module, datamodule=OtherUnits())
    x, y = blobs(64, 1).tensors
    assert module.posterior is not None
    probabilities = module.posterior.predict(x).probabilities
    accuracy = (probabilities.argmax(1) == y).float().mean().item()
    nll = -probabilities[torch.arange(len(y)), y].log().mean().item()
    assert module.evaluations["val"].bma["accuracy"] == pytest.approx(accuracy)
    assert module.evaluations["val"].bma["nll"] == pytest.approx(nll, rel=1e-5)


@pytest.mark.parametrize("chains", [1, 2])
def test_a_run_in_double_precision_resumes_bit_for_bit(chains: int, tmp_path: Path) -> None:
    """A checkpoint's weights are loaded in float64: in a float32 parameter they would be rounded."""

    def run(steps: int, path: Path | None = None) -> Any:
        module = classifier(sampler=SGLD, num_chains=chains, seed=0)
        callbacks = [SamplingSchedule(every_n_steps=4), SampleCollector(in_memory=True)]
        trainer = quiet_trainer(precision="64-true", max_steps=steps, callbacks=callbacks)
        trainer.fit(module, ResumableLoader(blobs(), 24), ckpt_path=path)
        return trainer, module

    _, whole = run(16)
    trainer, _ = run(8)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    _, resumed = run(16, tmp_path / "x.ckpt")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
