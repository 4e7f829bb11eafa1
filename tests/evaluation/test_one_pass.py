"""The samples of a step are evaluated in one pass over the data, at once or one after another: the same numbers."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import Posterior
from lightning_sgmcmc.callbacks import AutoSampling, BayesianModelAverage, CyclicalSchedule, MCDropout, SampleCollector
from lightning_sgmcmc.chains import together
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.evaluation import scoring
from tests.support.problems import Data, Net
from tests.support.trainers import quiet_trainer

CHAINS, STEPS = 3, 8


class Counting(DataLoader[Any]):
    """A loader that counts the passes over its data."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()


class CountedData(Data):
    def __init__(self) -> None:
        super().__init__()
        x = torch.randn(9, 5, generator=torch.Generator().manual_seed(7))
        self.other = Counting(TensorDataset(x), batch_size=4)

    def val_dataloader(self) -> Any:
        split = self.load()[1]
        self.validation = Counting(TensorDataset(split.inputs, split.targets), batch_size=8)
        return self.validation


def run(folder: Path, *callbacks: pl.Callback) -> tuple[Net, CountedData]:
    """Fit three chains with two cycles of two samples each, weighed by the harmonic mean of the likelihoods."""
    torch.manual_seed(0)
    module, datamodule = Net(CHAINS), CountedData()
    average = BayesianModelAverage("harmonic", ood={"other": datamodule.other})
    own = [CyclicalSchedule(2, 0.5, 2), SampleCollector(folder / "samples"), average, *callbacks]
    trainer = quiet_trainer(max_steps=STEPS, num_sanity_val_steps=0, limit_val_batches=2, callbacks=own)
    trainer.fit(module, datamodule=datamodule)
    return module, datamodule


def numbers(module: Net) -> list[dict[str, float]]:
    evaluation = module.evaluations["val"]
    return [*evaluation.members, *evaluation.running]


def test_all_samples_of_a_step_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once the numbers agree to 1e-5: vmap computes the same sums in another order."""
    alone, datamodule = run(tmp_path / "alone")
    drawings = len({member["step"] for member in alone.evaluations["val"].members})
    assert len(alone.evaluations["val"].members) == CHAINS * drawings > CHAINS
    own_validations = 1
    assert datamodule.validation.passes == drawings + own_validations
    assert datamodule.other.passes == drawings + 1, "and a check at the start"

    monkeypatch.setattr(together, "runs_at_once", lambda device: True)
    at_once, _ = run(tmp_path / "at once")
    assert numbers(alone) != numbers(at_once), "vmap was used"
    for one, other in zip(numbers(alone), numbers(at_once), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    monkeypatch.undo()

    monkeypatch.setattr(scoring, "LARGEST_SCORES", 1)  # then one sample is evaluated after the other
    single, datamodule = run(tmp_path / "single")
    assert numbers(single) == numbers(alone)
    assert datamodule.validation.passes == drawings * CHAINS + own_validations, "the first batch shows the size"


def test_stored_samples_and_dropout_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = run(tmp_path, MCDropout(2))
    seen = module.evaluations["val"].members
    assert len({(m["step"], m["chain"]) for m in seen}) * 2 == len(seen)
    monkeypatch.setattr(together, "runs_at_once", lambda device: True)
    datamodule = CountedData()
    average = BayesianModelAverage("harmonic", ood={"other": datamodule.other})
    trainer = quiet_trainer(limit_val_batches=2, callbacks=[average], default_root_dir=tmp_path)
    trainer.validate(module, datamodule=datamodule, verbose=False)
    assert datamodule.validation.passes == -(-len(seen) // together.MOST) + 1
    for one, other in zip(module.evaluations["val"].members, seen, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_a_sample_that_no_drawing_has_is_evaluated_alone() -> None:
    scores = scoring.DrawingScores()
    samples = [PosteriorSample(step, 0, 0, 0.0) for step in range(5)]
    asked: list[list[int]] = []

    def score(some: list[PosteriorSample]) -> list[scoring.SampleScores]:
        asked.append([sample.step for sample in some])
        return [scoring.SampleScores([({}, Tensor([sample.step]), None)], 0.0, {}) for sample in some]

    scores.begin(samples[:3])
    found = [scores.of(sample, score) for sample in (*samples[:2], samples[4], samples[3])]
    assert asked == [[0, 1, 2], [4], [3]]
    assert [int(own.on_loaders[0][1]) for own in found] == [0, 1, 4, 3]


def test_a_drawn_sample_is_evaluated_once_for_all_callbacks() -> None:
    """AutoSampling and the average read the same scores; at the end the weighted average takes one pass more."""

    def fit(*callbacks: pl.Callback) -> tuple[Posterior, int]:
        torch.manual_seed(0)
        module, datamodule = Net(), CountedData()
        own = [AutoSampling(num_draws=6), SampleCollector(in_memory=True), *callbacks]
        quiet_trainer(max_steps=12, num_sanity_val_steps=0, callbacks=own).fit(module, datamodule=datamodule)
        assert module.posterior is not None
        return module.posterior, datamodule.validation.passes

    (alone, passes), (both, of_both) = fit(), fit(BayesianModelAverage())
    assert of_both == passes + 1
    assert torch.equal(both.weights, alone.weights)
    assert not torch.equal(alone.weights, alone.weights.mean().expand(6))
