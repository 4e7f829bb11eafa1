"""Weights by the learned π: at the time of each sample or by the final one, on disk and in memory; resampling."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sgmcmc import SGLD, BayesianModule, Categorical, ContourRules, Gaussian, Posterior
from lightning_sgmcmc.callbacks import BayesianModelAverage, ContourGradient, SampleCollector, SamplingSchedule
from lightning_sgmcmc.contour import DecayingStepSize
from lightning_sgmcmc.diagnostics.draws import resample
from lightning_sgmcmc.posterior.disk import CONTOUR
from lightning_sgmcmc.recipes.shared.plane import cell_masses, divergence, mode_coverage
from lightning_sgmcmc.recipes.shared.switching import wasserstein_distance
from tests.support.problems import Data
from tests.support.trainers import quiet_trainer

# -- resampling -------------------------------------------------------------------------------------------------------


def test_systematic_resampling_repeats_each_sample_as_often_as_its_weight_says() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 7, 50, 1000):
        log_weights = 3 * torch.randn(50, generator=generator)
        log_weights[7] = -math.inf
        expected = count * log_weights.double().softmax(0)
        found = torch.bincount(resample(log_weights, count, "systematic", generator), minlength=50)
        assert (found - expected).abs().max() < 1
        assert found.sum() == count


@pytest.mark.parametrize("method", ["systematic", "multinomial"])
def test_resampling_is_unbiased(method: Any) -> None:
    """Chi-square of multinomial counts over 20,000 draws, 9 degrees of freedom: above 33.7 for one seed in 10⁴."""
    generator = torch.Generator().manual_seed(1)
    log_weights = torch.randn(10, generator=generator)
    expected = 20_000 * log_weights.double().softmax(0)
    found = sum(torch.bincount(resample(log_weights, 20, method, generator), minlength=10) for _ in range(1000))
    assert float(((found - expected) ** 2 / expected).sum()) < 33.7


def test_weight_0_is_never_drawn() -> None:
    log_weights = torch.tensor([-math.inf, 0.0, -math.inf, -math.inf])
    for method in ("systematic", "multinomial"):
        assert resample(log_weights, 100, method).tolist() == [1] * 100  # type: ignore[arg-type]
    huge = torch.tensor([-3e6, 0.0, -2e6], dtype=torch.float64)
    assert resample(huge, 5).tolist() == [1] * 5
    with pytest.raises(ValueError, match="weight 0"):
        resample(torch.full((3,), -math.inf))
    with pytest.raises(ValueError, match="method"):
        resample(torch.zeros(3), method="residual")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count"):
        resample(torch.zeros(3), 0)


# -- distances in the plane -------------------------------------------------------------------------------------------


def test_coverage_and_divergence_of_what_is_known() -> None:
    modes = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0]])
    samples = torch.tensor([[0.1, 0.0]] * 3 + [[1.0, 0.2]] * 2 + [[5.0, 5.3]] * 9)
    assert mode_coverage(samples, modes, radius=0.25, least=2) == 2
    assert mode_coverage(samples, modes, radius=0.25, least=3) == 1
    assert mode_coverage(samples, modes, radius=0.35, least=3) == 2
    masses = cell_masses(torch.tensor([[0.1, 0.1], [0.6, 0.1], [3.0, 0.0]]), torch.tensor([1.0, 2.0, 1.0]), (0, 1), 2)
    assert masses.tolist() == [0.25, 0.0, 0.5, 0.0]
    truth = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    assert divergence(truth, truth, smoothing=0.0) == pytest.approx(0)
    half = torch.tensor([0.25, 0.25, 0.5, 0.0], dtype=torch.float64)
    assert divergence(truth, half, smoothing=0.0) == pytest.approx(math.log(2))
    empty = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    mixed = 0.5 * math.log(0.5 / (0.99 + 0.0025)) + 0.5 * math.log(0.5 / 0.0025)
    assert divergence(truth, empty) == pytest.approx(mixed)


def test_wasserstein_distance_of_what_is_known() -> None:
    """Shifted numbers, sets of other sizes, and the uniform law's quantiles, by hand."""
    numbers = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert wasserstein_distance(numbers, numbers.flip(0)) == 0
    assert wasserstein_distance(numbers, numbers - 3) == pytest.approx(3)
    assert wasserstein_distance(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0, 3.0])) == pytest.approx(0.5)
    assert wasserstein_distance(torch.tensor([0.0, 0.0, 1.0, 3.0]), torch.tensor([0.0, 1.0])) == pytest.approx(0.5)
    assert wasserstein_distance((torch.arange(1000) + 0.5) / 1000, torch.zeros(1)) == pytest.approx(0.5, abs=1e-6)
    for bad in (torch.zeros(0), torch.zeros(2, 2), torch.tensor([0.0, torch.nan])):
        with pytest.raises(ValueError, match="must be one-dimensional, finite"):
            wasserstein_distance(bad, numbers)


# -- the posterior ----------------------------------------------------------------------------------------------------


def run(folder: Path, **options: Any) -> tuple[BayesianModule, Data]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    module = BayesianModule(net=net, likelihood=Categorical(), sampler=SGLD, lr=0.1, seed=2)
    callbacks = [
        SamplingSchedule(burn_in_steps=50, every_n_steps=7),
        ContourGradient(ContourRules(zeta=3.0), 20, first_edge=50.0, width=3.0, step_size=DecayingStepSize(5, 0.7, 20)),
        SampleCollector(**({"dirpath": folder / "samples"} | options)),
    ]
    data = Data()
    quiet_trainer(max_epochs=30, callbacks=callbacks, default_root_dir=folder).fit(module, datamodule=data)
    return module, data


@pytest.mark.parametrize("options", [{}, {"dirpath": None, "in_memory": True}], ids=["disk", "memory"])
def test_weights_by_the_final_vector(tmp_path: Path, options: dict[str, Any]) -> None:
    module, data = run(tmp_path, **options)
    posterior = module.posterior
    assert posterior is not None
    assert posterior.contour is not None
    assert module.contour is not None
    assert torch.equal(posterior.contour.state.log_vector, module.contour.state.log_vector)
    energies = torch.tensor([record.energy for record in posterior.records], dtype=torch.float64)
    expected = module.contour.log_weights(energies)
    final = posterior.reweighted()
    assert torch.equal(final.log_weights, expected)
    assert not torch.allclose(final.weights, posterior.weights, rtol=1e-3)
    assert torch.equal(posterior.reweighted("sample").log_weights, posterior.log_weights)
    torch.testing.assert_close(final.reweighted("final", 0.5).log_weights, 0.5 * expected)
    assert final.reweighted("sample", 0.0).weight_efficiency == pytest.approx(1)
    assert all(bin is not None for bin in (record.bin for record in posterior.records))
    x, _ = next(iter(data.val_dataloader()))
    every = posterior.predict(x, return_samples=True).sample_probabilities
    assert every is not None
    probabilities = final.predict(x).probabilities
    average = (final.weights[:, None, None] * every.double()).sum(0)
    torch.testing.assert_close(probabilities, average.float(), rtol=1e-5, atol=1e-6)


def test_a_store_read_later_knows_bins_weights_and_contour(tmp_path: Path) -> None:
    module, _ = run(tmp_path)
    later = Posterior.load(tmp_path / "samples")
    assert module.posterior is not None
    assert later.records == module.posterior.records
    assert later.contour is not None
    assert torch.equal(later.reweighted().log_weights, module.posterior.reweighted().log_weights)
    assert later[3].bin == later.records[3].bin
    assert later.in_memory().contour is not None
    (tmp_path / "samples" / CONTOUR).write_bytes(b"half of it")
    assert len(Posterior.load(tmp_path / "samples").reweighted("sample")) == len(later)
    with pytest.raises(ValueError, match="cannot be read"):
        Posterior.load(tmp_path / "samples").reweighted("final")


def test_resampled_posteriors_predict_with_equal_weights(tmp_path: Path) -> None:
    module, data = run(tmp_path)
    assert module.posterior is not None
    equal = module.posterior.resample(400, seed=3)
    assert len(equal) == 400
    assert equal.weight_efficiency == pytest.approx(1)
    x, _ = next(iter(data.val_dataloader()))
    few, weighted = equal.predict(x).probabilities, module.posterior.predict(x).probabilities
    assert few is not None
    torch.testing.assert_close(few, weighted, rtol=0, atol=0.01)
    assert [r.step for r in module.posterior.resample(seed=1).records] == [
        r.step for r in module.posterior.resample(seed=1).records
    ]
    with pytest.raises(TypeError, match="cannot be appended"):
        equal.store.append(equal[0])
    assert len(equal.in_memory()) == 400


def test_weights_are_applied_once(tmp_path: Path) -> None:
    """Draws of `resample` have their weights already, in memory and in a folder."""
    module, data = run(tmp_path)
    assert module.posterior is not None
    drawn = module.posterior.reweighted("final").resample(50)
    renewed = drawn.update_batch_norm(data.val_dataloader())
    for posterior in (drawn, drawn[:20], drawn.in_memory(), renewed, drawn.save(tmp_path / "drawn")):
        with pytest.raises(ValueError, match=r"'final'.*resample"):
            posterior.reweighted("final")
        assert posterior.reweighted("sample", 2.0).log_weights.isfinite().all()


def test_the_exponent_0_counts_samples_of_weight_0_too() -> None:
    members = [nn.Linear(1, 1) for _ in range(4)]
    posterior = Posterior.from_states(nn.Linear(1, 1), members, Gaussian(), weights=[0, 1, 2, 3])
    assert posterior.reweighted("sample", 0.0).weights.tolist() == pytest.approx([0.25] * 4)
    assert posterior.reweighted("sample", 2.0).weights.tolist() == pytest.approx([0, 1 / 14, 4 / 14, 9 / 14])


def test_first_samples_of_weight_0(tmp_path: Path) -> None:
    """As the weights of early samples may be, which have no average before a later one."""
    torch.manual_seed(0)
    members = [nn.Linear(5, 3) for _ in range(4)]
    whole = Posterior.from_states(nn.Linear(5, 3), members, Categorical(), weights=[0, 0, 1, 3]).save(tmp_path / "s")
    data, module = Data(), BayesianModule(nn.Linear(5, 3), Categorical())
    data.setup("test")
    x, y = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
    each = torch.stack([member(x).detach().softmax(-1) for member in members[2:]])
    nll = -float((each[0] / 4 + 3 * each[1] / 4)[torch.arange(len(y)), y].log().mean())
    found = whole.evaluate([(x, y)], group=["all"] * len(y))
    assert found.bma["nll"] == pytest.approx(nll, rel=1e-5)
    assert found.groups["all"]["nll"] == pytest.approx(nll, rel=1e-5)
    assert [math.isnan(running["nll"]) for running in found.running] == [True, True, False, False]
    average = BayesianModelAverage(ood={"far": data.test_dataloader()}, scores=True)
    trainer = quiet_trainer(callbacks=[SampleCollector(tmp_path / "s"), average])
    (metrics,) = trainer.test(module, datamodule=data, verbose=False)
    assert metrics["test/bma_nll"] == pytest.approx(nll, rel=1e-5)
    assert metrics["test/bma_ood_far_auroc"] == pytest.approx(0.5)
    for call in (whole[:2].evaluate, whole[:2].calibrate):
        with pytest.raises(ValueError, match="all samples have weight 0"):
            call([(x, y)])


def test_runs_without_a_contour_have_no_final_weights(tmp_path: Path) -> None:
    module = BayesianModule(net=nn.Linear(5, 3), likelihood=Categorical(), sampler=SGLD, lr=0.1)
    callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(in_memory=True)]
    quiet_trainer(max_steps=6, callbacks=callbacks).fit(module, datamodule=Data())
    assert module.posterior is not None
    assert module.posterior.contour is None
    with pytest.raises(ValueError, match="without ContourGradient"):
        module.posterior.reweighted()
    with pytest.raises(ValueError, match="importance_weights"):
        BayesianModelAverage(importance_weights="last")  # type: ignore[arg-type]


def test_tests_average_by_the_final_vector_where_asked(tmp_path: Path) -> None:
    module, data = run(tmp_path)
    figures = {}
    assert module.posterior is not None
    for weights in ("sample", "final"):
        average = BayesianModelAverage(importance_weights=weights)  # type: ignore[arg-type]
        trainer = quiet_trainer(callbacks=[SampleCollector(tmp_path / "samples"), average])
        trainer.test(module, datamodule=data, verbose=False)
        x, y = (torch.cat(parts) for parts in zip(*data.test_dataloader(), strict=True))
        probabilities = module.posterior.reweighted(weights).predict(x).probabilities  # type: ignore[arg-type]
        assert probabilities is not None
        nll = -probabilities[torch.arange(len(y)), y].double().log().mean().item()
        figures[weights] = module.evaluations["test"].bma["nll"]
        assert figures[weights] == pytest.approx(nll, rel=1e-5)
    assert figures["sample"] != figures["final"]
