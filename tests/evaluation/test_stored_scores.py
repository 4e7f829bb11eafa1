"""Scores of stored samples and their average by `trainer.test`, and the files of references."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, HeteroscedasticGaussian
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.diagnostics import (
    aurc,
    gaussian_mixture_crps,
    pit_histogram,
    risk_at_coverage,
    sample_crps,
    total_variation,
)
from lightning_sgmcmc.evaluation import cifar10_hmc, read_probabilities
from tests.support.trainers import quiet_trainer


def run_of(module: BayesianModule, x: Tensor, y: Tensor, **options: Any) -> dict[str, float]:
    """Fit a few steps of two chains; return the metrics of the test."""
    average = BayesianModelAverage(**options)
    callbacks = [SamplingSchedule(burn_in_steps=2, every_n_steps=2), SampleCollector(in_memory=True), average]
    trainer = quiet_trainer(max_steps=8, callbacks=callbacks)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    trainer.fit(module, loader)
    trainer.test(module, loader, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_regressions_scores_are_those_of_the_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 2, generator=generator), torch.randn(24, 1, generator=generator)
    module = BayesianModule(net=nn.Linear(2, 1), likelihood=Gaussian(0.5, learned=True), lr=0.01, num_chains=2)
    found = run_of(module, x, y, scores=True)
    posterior = module.posterior
    assert posterior is not None
    means = posterior.predict(x, return_samples=True).sample_means
    stds = torch.stack([s.parameters["likelihood.log_std"].exp() for s in posterior]).expand(24, 1, -1).permute(2, 0, 1)
    crps = gaussian_mixture_crps(posterior.weights, means.double(), stds.double(), y.double()).mean()
    assert found["test/bma_crps"] == pytest.approx(float(crps), rel=1e-5)
    one = torch.ones(1).double()
    each = [
        gaussian_mixture_crps(one, m[None].double(), s[None].double(), y.double()).mean()
        for m, s in zip(means, stds, strict=True)
    ]
    assert found["test/single_crps"] == pytest.approx(float(torch.stack(each).mean()), rel=1e-5)
    assert found["test/bma_crps"] <= found["test/single_crps"], "the CRPS is convex"
    assert found["test/bma_interval_score_90"] > 0
    pit = module.evaluations["test"].pit
    assert pit is not None
    cdf = (posterior.weights[:, None, None] * torch.special.ndtr((y - means) / stds)).sum(0)
    torch.testing.assert_close(pit_histogram(pit), pit_histogram(cdf.float()))


def test_uneven_noise_is_scored_by_each_datums_own() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 2, generator=generator), torch.randn(24, 1, generator=generator)
    module = BayesianModule(net=nn.Linear(2, 2), likelihood=HeteroscedasticGaussian(), lr=0.01)
    found = run_of(module, x, y, scores=True)
    assert module.posterior is not None
    drawn = module.posterior.predict(x).sample(4000, seed=1)
    assert found["test/bma_crps"] == pytest.approx(float(sample_crps(drawn, y).mean()), rel=0.05)


def test_classes_have_selective_scores_a_reference_and_the_users_metrics(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 2, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    reference = torch.softmax(torch.randn(24, 3, generator=generator), 1)
    np.save(tmp_path / "reference.npy", reference.numpy())
    module = BayesianModule(net=nn.Linear(2, 3), likelihood=Categorical(), lr=0.01)
    mine = MulticlassAccuracy(3, average="micro")
    found = run_of(
        module, x, y, scores=True, reference=tmp_path / "reference.npy", metrics={"mine": mine, "area": aurc}
    )
    assert module.posterior is not None
    p = module.posterior.predict(x).probabilities
    assert found["test/bma_aurc"] == pytest.approx(float(aurc(p, y)), abs=1e-6)
    assert found["test/bma_area"] == found["test/bma_aurc"]
    assert found["test/bma_risk_80"] == pytest.approx(float(risk_at_coverage(p, y)), abs=1e-6)
    assert found["test/bma_total_variation"] == pytest.approx(float(total_variation(p, reference)), abs=1e-6)
    assert found["test/bma_agreement"] == pytest.approx(float((p.argmax(1) == reference.argmax(1)).float().mean()))
    assert found["test/bma_mine"] == found["test/bma_accuracy"]
    assert found["test/single_mine"] == pytest.approx(found["test/single_accuracy"])
    each = module.posterior.predict(x, return_samples=True).sample_probabilities
    mean = torch.stack([total_variation(own, reference) for own in each]).mean()
    assert found["test/single_total_variation"] == pytest.approx(float(mean), abs=1e-6)


def test_a_reference_of_other_data_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 2, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    module = BayesianModule(net=nn.Linear(2, 3), likelihood=Categorical(), lr=0.01)
    with pytest.raises(ValueError, match=r"shape \(23, 3\) and the predictions \(24, 3\)"):
        run_of(module, x, y, reference=torch.full((23, 3), 1 / 3))
    with pytest.raises(ValueError, match="cycle_weights='uniform'"):
        BayesianModelAverage(cycle_weights="harmonic", scores=True)


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_of_probabilities(tmp_path: Path) -> None:
    p = np.array([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
    np.save(tmp_path / "a.npy", p)
    np.savez(tmp_path / "b.npz", probs=p, labels=np.arange(3))
    np.savez(tmp_path / "c.npz", first=p, second=p)
    np.savetxt(tmp_path / "d.csv", p, delimiter=",")
    np.savetxt(tmp_path / "e.csv", p, delimiter=",", header="cat,dog", comments="")
    for name in ("a.npy", "b.npz", "d.csv", "e.csv"):
        np.testing.assert_allclose(read_probabilities(tmp_path / name).numpy(), p)
    with pytest.raises(ValueError, match="several arrays"):
        read_probabilities(tmp_path / "c.npz")
    with pytest.raises(ValueError, match="softmax"):
        read_probabilities(np.array([[1.0, 2.0]]))
    with pytest.raises(FileNotFoundError):
        read_probabilities(tmp_path / "missing.npy")
    (tmp_path / "f.txt").write_text("0.5 0.5")
    with pytest.raises(ValueError, match="unknown ending"):
        read_probabilities(tmp_path / "f.txt")


def test_the_published_rows_come_in_torchvisions_order(tmp_path: Path) -> None:
    """Row j of the file is the test image whose MD5 sum of "test<i>" is the j-th smallest."""
    own = np.random.default_rng(0).dirichlet(np.ones(10), 10_000)
    order = sorted(range(10_000), key=lambda i: hashlib.md5(b"test" + str(i).encode()).hexdigest())
    np.savetxt(tmp_path / "probs.csv", own[order], delimiter=",", fmt="%.9f")
    np.testing.assert_allclose(cifar10_hmc(tmp_path / "probs.csv").numpy(), own, atol=1e-6)
    np.savetxt(tmp_path / "few.csv", own[:5], delimiter=",")
    with pytest.raises(ValueError, match=r"\(10000, 10\)"):
        cifar10_hmc(tmp_path / "few.csv")
