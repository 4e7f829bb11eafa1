"""Out-of-distribution evaluation: closed forms of the metrics, and what a run says against direct computations."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, CyclicalSchedule, SampleCollector, SamplingSchedule
from lightning_sgmcmc.callbacks.bayesian_model_average import OOD_METRICS
from lightning_sgmcmc.cli.commands import main
from lightning_sgmcmc.datamodules import ArrayDataModule, NotMNISTDataModule, Split
from lightning_sgmcmc.datamodules.base import standardise
from lightning_sgmcmc.datamodules.images import ImageDataModule
from lightning_sgmcmc.diagnostics.scores import detection_metrics, out_of_distribution_metrics, predictive_entropy
from tests.support.problems import blobs, classifier, loaders
from tests.support.recorders import Dump
from tests.support.trainers import quiet_trainer

PARTS = ("train", "test")


def far_away(count: int = 40, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = 3 * torch.randn(count, 2, generator=generator)
    return DataLoader(TensorDataset(x, torch.zeros(count).long()), 16, **options)


def test_metrics_in_closed_form() -> None:
    certain, uniform = torch.eye(4)[[0, 1, 2]], torch.full((5, 4), 0.25)
    metrics = out_of_distribution_metrics(certain, uniform)
    assert metrics["auroc"] == 1
    assert metrics["entropy"] == pytest.approx(math.log(4))
    assert metrics["brier"] == pytest.approx(1 / 16)
    metrics = out_of_distribution_metrics(uniform, certain)
    assert metrics["auroc"] == 0
    assert metrics["brier"] == pytest.approx(1 / 4)
    assert out_of_distribution_metrics(uniform, uniform)["auroc"] == 0.5, "ties count half"


def test_auroc_is_the_probability_of_the_right_order() -> None:
    generator = torch.Generator().manual_seed(0)
    known, unknown = (torch.randn(n, 3, generator=generator).mul(s).softmax(1) for n, s in ((60, 4), (50, 2)))
    entropies = predictive_entropy(known)[:, None], predictive_entropy(unknown)[None]
    expected = (entropies[1] > entropies[0]).double().mean().item()
    assert float(out_of_distribution_metrics(known, unknown)["auroc"]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("cycle_weights", ["uniform", "harmonic"])
def test_a_run_evaluates_its_average_there_too(tmp_path: Path, cycle_weights: Any) -> None:
    module = classifier()
    logger = pl.loggers.CSVLogger(tmp_path)
    average = BayesianModelAverage(cycle_weights, ood={"far": far_away(), "near": loaders()[1]})
    trainer = quiet_trainer(
        max_epochs=12, logger=logger, callbacks=[CyclicalSchedule(2, 0.5, 3), SampleCollector(tmp_path / "s"), average]
    )
    trainer.fit(module, *loaders())
    evaluation = module.evaluations["val"]
    posterior = Posterior.load(tmp_path / "s")
    inputs = far_away().dataset.tensors[0]  # type: ignore[attr-defined]
    known, unknown = (posterior.predict(x, return_samples=True) for x in (blobs(64, seed=1).tensors[0], inputs))
    if cycle_weights == "uniform":
        expected = out_of_distribution_metrics(known.probabilities, unknown.probabilities)  # type: ignore[arg-type]
        for name, value in expected.items():
            assert evaluation.bma[f"ood_far_{name}"] == pytest.approx(float(value), abs=1e-5)
        information = detection_metrics(known.mutual_information, unknown.mutual_information)["auroc"]
        assert evaluation.bma["ood_far_mutual_information_auroc"] == pytest.approx(float(information), abs=1e-3)
        found = [name.removeprefix("ood_far_") for name in evaluation.bma if name.startswith("ood_far_")]
        assert sorted(found) == sorted(OOD_METRICS)
        torch.testing.assert_close(evaluation.ood["far"].terms["probabilities"], unknown.probabilities)
    brier = unknown.sample_probabilities.square().mean((1, 2))
    assert [m["ood_far_brier"] for m in evaluation.members] == pytest.approx(brier.tolist(), rel=1e-5)
    assert evaluation.bma["ood_near_auroc"] == pytest.approx(0.5, abs=1e-6), "the evaluation data against themselves"
    assert float(trainer.callback_metrics["val/bma_ood_far_auroc"]) == pytest.approx(evaluation.bma["ood_far_auroc"])
    if cycle_weights == "harmonic":
        with pytest.raises(
            ValueError, match="cycle_weights='harmonic' needs the training data, but the trainer has none"
        ):
            trainer.test(module, loaders()[1], verbose=False)
        return
    (metrics,) = trainer.test(module, loaders()[1], verbose=False)
    assert metrics["test/bma_ood_far_brier"] == pytest.approx(evaluation.bma["ood_far_brier"], rel=1e-5)
    assert "test/single_ood_near_entropy" in metrics


def test_it_survives_a_checkpoint(tmp_path: Path) -> None:
    def fit(**options: Any) -> BayesianModule:
        module = classifier()
        saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=8, save_top_k=-1, filename="{step}")
        callbacks = [CyclicalSchedule(2, 0.5, 4), BayesianModelAverage(ood=far_away()), saver]
        trainer = quiet_trainer(max_epochs=6, enable_checkpointing=True, callbacks=callbacks)
        trainer.fit(module, *loaders(), **options)
        return module

    whole, resumed = fit(), fit(ckpt_path=tmp_path / "step=16.ckpt")
    torch.load(tmp_path / "step=16.ckpt", weights_only=True)
    assert whole.evaluations["val"].running == resumed.evaluations["val"].running
    assert "ood_ood_auroc" in whole.evaluations["val"].bma


def test_two_ranks_share_the_data(tmp_path: Path) -> None:
    """The ranks' figures are one rank's, on data that they can share and on a set of one batch."""
    for count in (40, 10):
        figures = []
        for devices in (1, 2):
            # One batch for both ranks would be another step, so the run has none: the start is what is evaluated.
            module = classifier(lr=0.0, temperature=0.0)
            dump = Dump(tmp_path, lambda module: module.evaluations["val"].bma)
            callbacks = [CyclicalSchedule(1, 0.5, 1), BayesianModelAverage(ood=far_away(count)), dump]
            strategy = {"strategy": "ddp_fork"} if devices == 2 else {}
            module.net[1].momentum = 0.0  # nor do BatchNorm's statistics depend on the batches
            trainer = quiet_trainer(max_epochs=2, devices=devices, callbacks=callbacks, **strategy)
            trainer.fit(module, *loaders())
            figures.append(Dump.read(tmp_path)[devices - 1])
        assert figures[0].keys() == figures[1].keys()
        for name, value in figures[0].items():
            assert figures[1][name] == pytest.approx(value, abs=1e-5), name


class Table(ArrayDataModule):
    """Numbers with a mean and a scale, standardised by their own training part."""

    def __init__(self, mean: float, std: float, seed: int) -> None:
        super().__init__(batch_size=16)
        self.mean, self.std, self.seed = mean, std, seed

    def load(self) -> tuple[Split, Split, Split]:
        generator = torch.Generator().manual_seed(self.seed)
        parts = [self.mean + self.std * torch.randn(48, 2, generator=generator).double() for _ in range(3)]
        inputs, mean, std = standardise(*parts)
        self.input_scaling = (mean, std)
        first, second, third = (Split(part, (part.sum(1) > 0).long()) for part in inputs)
        return first, second, third


class Pictures(ImageDataModule):
    """Noise of a mean and a scale, normalised by its own training part."""

    image_shape = (1, 2, 2)

    def __init__(self, mean: float, std: float, seed: int) -> None:
        super().__init__(batch_size=16, flatten=True)
        self.mean, self.std, self.seed = mean, std, seed

    def load(self) -> tuple[Split, Split, Split]:
        generator = torch.Generator().manual_seed(self.seed)
        bytes = (self.mean + self.std * torch.randn(48, 1, 2, 2, generator=generator)).clamp(0, 255).byte()
        self._normalise_by(bytes)
        split = self._split(bytes, (bytes.float().mean((1, 2, 3)) > self.mean).long())
        return split, split, split


@pytest.mark.parametrize(
    ("kind", "known", "unknown"),
    [(Table, (10.0, 2.0, 0), (30.0, 6.0, 1)), (Pictures, (60.0, 15.0, 0), (180.0, 45.0, 1))],
)
def test_a_datamodule_is_normalised_by_the_training_datas_statistics(kind: Any, known: Any, unknown: Any) -> None:
    """In the fit and in a test without one; scaled by their own statistics they would look like the training data."""
    features = 2 if kind is Table else 4
    module = BayesianModule(net=torch.nn.Linear(features, 2), likelihood=Categorical(), lr=0.01, seed=0)
    training, others = kind(*known), kind(*unknown)
    callbacks = [SamplingSchedule(every_n_steps=5), SampleCollector(in_memory=True), BayesianModelAverage(ood=others)]
    quiet_trainer(max_epochs=5, callbacks=callbacks).fit(module, datamodule=training)
    fresh = kind(*unknown)
    trainer = quiet_trainer(callbacks=[callbacks[1], BayesianModelAverage(ood={"again": fresh})])
    trainer.test(module, datamodule=training, verbose=False)
    for source in (others, fresh):
        inputs = torch.cat([batch[0] for batch in source.test_dataloader()])
        assert inputs.mean().item() == pytest.approx((unknown[0] - known[0]) / known[1], rel=0.3)
        assert inputs.std().item() == pytest.approx(unknown[1] / known[1], rel=0.3)
    assert module.posterior is not None
    expected = module.posterior.predict(inputs)
    found = module.evaluations["test"].ood["again"].terms["probabilities"]
    torch.testing.assert_close(found, expected.probabilities)


def test_statistics_that_are_unknown_are_said() -> None:
    trainer = quiet_trainer(
        max_epochs=1, callbacks=[SamplingSchedule(every_n_steps=2), BayesianModelAverage(ood=Table(3.0, 1.0, 0))]
    )
    with pytest.warns(UserWarning, match="'table' are normalised by their own statistics, since the training data's"):
        trainer.fit(classifier(), *loaders())


def test_mistakes() -> None:
    with pytest.raises(TypeError, match="out-of-distribution data 'far' should be a datamodule or a DataLoader, got a"):
        BayesianModelAverage(ood={"far": torch.zeros(3)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="the loader of the out-of-distribution data 'ood' shuffles"):
        BayesianModelAverage(ood=far_away(shuffle=True))
    for module, ood, message in (
        (classifier(), far_away(0), "out-of-distribution data 'ood' are empty"),
        (
            BayesianModule(net=torch.nn.Linear(2, 1), likelihood=Gaussian()),
            far_away(),
            "evaluated by the entropy of class probabilities, which likelihood=Gaussian.* does not have: omit ood",
        ),
    ):
        trainer = quiet_trainer(max_epochs=2, callbacks=[CyclicalSchedule(1, 0.5, 1), BayesianModelAverage(ood=ood)])
        with pytest.raises(ValueError, match=message):
            trainer.fit(module, *loaders())
    wide = DataLoader(TensorDataset(torch.zeros(4, 3), torch.zeros(4).long()), 4)
    trainer = quiet_trainer(max_epochs=2, callbacks=[CyclicalSchedule(1, 0.5, 1), BayesianModelAverage(ood=wide)])
    with pytest.raises(RuntimeError, match=r"cannot process the out-of-distribution data 'ood': .*mat1 and mat2"):
        trainer.fit(classifier(), *loaders())
    assert trainer.global_step == 0, "it is said before the first step"


def test_a_datamodule_from_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "notmnist"
    folder.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, size=(20, 28, 28), dtype=np.uint8)
    np.savez(folder / "notmnist_test.npz", x=images, y=np.arange(20) % 10)
    assert BayesianModelAverage(ood=NotMNISTDataModule(tmp_path / "data")).ood.sources.keys() == {"notmnist"}
    arrays = {f"x_{part}": images for part in ("train", "test")} | {
        f"y_{p}": np.arange(20) % 10 for p in ("train", "test")
    }
    (tmp_path / "data" / "mnist").mkdir()
    np.savez(tmp_path / "data" / "mnist" / "mnist.npz", **arrays)
    (tmp_path / "run.yaml").write_text(f"""
model:
  class_path: lightning_sgmcmc.BayesianModule
  init_args:
    net: {{class_path: torchvision.ops.MLP, init_args: {{in_channels: 784, hidden_channels: [10]}}}}
    likelihood: lightning_sgmcmc.Categorical
data:
  class_path: lightning_sgmcmc.datamodules.MNISTDataModule
  init_args: {{root: {tmp_path / "data"}, flatten: true, val_size: 5, batch_size: 5}}
trainer:
  accelerator: cpu
  max_epochs: 2
  enable_progress_bar: false
  logger: {{class_path: pytorch_lightning.loggers.CSVLogger, init_args: {{save_dir: runs}}}}
  callbacks:
    - {{class_path: lightning_sgmcmc.callbacks.CyclicalSchedule, init_args: {{num_cycles: 1, samples_per_cycle: 1}}}}
    - class_path: lightning_sgmcmc.callbacks.BayesianModelAverage
      init_args:
        ood:
          class_path: lightning_sgmcmc.datamodules.NotMNISTDataModule
          init_args: {{root: {tmp_path / "data"}, flatten: true}}
    - class_path: lightning_sgmcmc.callbacks.RunSummary
""")
    main(["fit", "--config", str(tmp_path / "run.yaml")])
    (results,) = Path("runs").rglob("results.json")
    assert '"ood_notmnist_auroc"' in results.read_text()
