"""Runs that Lightning's own tools would end, or tune, before a sample is drawn."""

import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sgmcmc import BayesianModule, Categorical
from lightning_sgmcmc.callbacks import BayesianModelAverage, CyclicalSchedule, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.fit.safeguards import samples_drawn
from tests.support.problems import blobs, classifier, loaders
from tests.support.trainers import quiet_trainer

LATER = "ignore:EarlyStopping may end the run"


@pytest.mark.filterwarnings(LATER)
@pytest.mark.parametrize("on_epoch_end", [True, False])
def test_early_stopping_waits_for_samples(on_epoch_end: bool, tmp_path: Any) -> None:
    """Two cycles of five epochs with the samples in the last three of each: eight checks without a new sample."""
    stopping = EarlyStopping("val/bma_nll", patience=3, check_on_train_epoch_end=on_epoch_end, min_delta=-1.0)
    best = ModelCheckpoint(tmp_path, monitor="val/bma_nll", filename="{epoch}")
    trainer = quiet_trainer(
        max_epochs=10,
        callbacks=[CyclicalSchedule(2, 0.5, 2), BayesianModelAverage(), stopping, best],
        enable_checkpointing=True,
    )
    trainer.fit(classifier(), *loaders())
    assert (trainer.current_epoch, samples_drawn(trainer)) == (10, 4)
    assert (stopping.wait_count, stopping.stopped_epoch) == (0, 0)
    assert best.best_model_score is not None
    assert best.best_model_score.isfinite()
    assert "_should_skip_check" not in vars(stopping), "the callback is given back as it was"


@pytest.mark.filterwarnings(LATER)
def test_early_stopping_still_stops() -> None:
    """Samples in every epoch after the first, and an improvement of 10 nats that no sample brings."""
    stopping = EarlyStopping("val/bma_nll", patience=2, min_delta=10.0)
    schedule = SamplingSchedule(burn_in_steps=4, every_n_steps=4)
    trainer = quiet_trainer(max_epochs=10, callbacks=[schedule, BayesianModelAverage(), stopping])
    trainer.fit(classifier(), *loaders())
    # Epoch 0 has no sample, the check of epoch 1 sets the first score, those of epochs 2 and 3 use up the patience.
    assert (stopping.stopped_epoch, samples_drawn(trainer)) == (3, 3)


@pytest.mark.parametrize("monitor", ["val/nll", "val/bma_nll"])
def test_early_stopping_by_the_chains_present_states_is_warned_of(monitor: str) -> None:
    schedule, stopping = SamplingSchedule(every_n_epochs=1), EarlyStopping(monitor, patience=9)
    trainer = quiet_trainer(max_epochs=2, callbacks=[schedule, BayesianModelAverage(), stopping])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(classifier(), *loaders())
    found = [str(warning.message) for warning in caught if "EarlyStopping" in str(warning.message)]
    assert found == ([] if monitor == "val/bma_nll" else [found[0]])
    assert all("'val/nll'" in text and "omit it, or let it monitor 'val/bma_nll'" in text for text in found)


def said(**options: Any) -> tuple[pl.Trainer, list[str]]:
    """Return the trainer of a fit, and its warnings about samples."""
    trainer = quiet_trainer(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(classifier(), *loaders())
    return trainer, [str(w.message) for w in caught if "posterior sample" in str(w.message)]


def test_a_fit_that_ends_without_a_sample_says_so() -> None:
    stopping = EarlyStopping("val/nll", patience=1, min_delta=10.0)
    trainer, messages = said(max_epochs=9, callbacks=[CyclicalSchedule(1, 0.5, 2), stopping])
    assert samples_drawn(trainer) == 0
    assert messages == [
        "The fit ended without a posterior sample: EarlyStopping(monitor='val/nll') ended it after step 8, and "
        "CyclicalSchedule draws the first one after step 27; let the run last longer, or set a smaller "
        "max_epochs or a shorter burn-in."
    ]
    _, messages = said(max_epochs=10, max_time={"milliseconds": 1}, callbacks=[SamplingSchedule(every_n_epochs=5)])
    assert len(messages) == 1
    assert "the Timer (max_time) ended it after step" in messages[0]
    assert "SamplingSchedule draws the first one after step 20" in messages[0]
    _, messages = said(max_epochs=1)
    assert messages == [
        "This fit draws no posterior samples: it has no schedule; add a CyclicalSchedule or a SamplingSchedule to the "
        "trainer's callbacks."
    ]
    trainer, messages = said(max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=2)])
    assert (samples_drawn(trainer), messages) == (2, [])


def test_a_fit_whose_steps_were_all_skipped_says_so() -> None:
    class Broken(BayesianModule):
        def log_likelihood(self, batch: Any) -> Tensor:
            return super().log_likelihood(batch) * torch.nan

    module = Broken(net=torch.nn.Linear(2, 2), likelihood=Categorical(), nonfinite_energy="skip")
    trainer = quiet_trainer(max_epochs=2, callbacks=[SamplingSchedule(every_n_steps=4)])
    with pytest.warns(UserWarning, match="without a posterior sample: 8 of 8 steps were skipped, since their energy"):
        trainer.fit(module, loaders()[0])


@pytest.mark.parametrize(
    ("search", "message"),
    [("lr_find", r"lightning_sgmcmc\.tune\.propose_lr\(module"), ("scale_batch_size", "pass batch_size to the data")],
)
def test_lightnings_searches_are_refused(search: str, message: str) -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=1)])
    with pytest.raises(ValueError, match=message):
        getattr(Tuner(trainer), search)(classifier(lr=0.1), datamodule=DatasetDataModule(blobs()))


def test_each_of_two_validation_loaders_has_its_own_metrics() -> None:
    train, first = loaders()
    second = DataLoader(blobs(40, 5), 24)
    monitor = "val/bma_nll/dataloader_idx_1"
    seen: list[float] = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append(float(trainer.callback_metrics[monitor]))

    callbacks = [CyclicalSchedule(1, 0.5, 2), SampleCollector(in_memory=True), BayesianModelAverage(), Watch()]
    module = classifier()
    both = quiet_trainer(max_epochs=4, callbacks=callbacks)
    both.fit(module, train, [first, second])
    metrics = {name: float(value) for name, value in both.callback_metrics.items()}
    assert [value != value for value in seen] == [True, True, False, False], "NaN until the first sample"
    assert all(value == value for value in metrics.values())
    assert not [name for name in metrics if "bma" in name and "dataloader_idx" not in name]
    for index, loader in enumerate((first, second)):
        alone = quiet_trainer(callbacks=[BayesianModelAverage()]).validate(module, loader, verbose=False)[0]
        for name in ("val/bma_nll", "val/bma_accuracy", "val/single_nll"):
            assert metrics[f"{name}/dataloader_idx_{index}"] == pytest.approx(alone[name], rel=1e-6)
