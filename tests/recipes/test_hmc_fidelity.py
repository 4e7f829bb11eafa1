"""The recipe `hmc_fidelity`: its network, its measures, its data, and small runs of its parts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sgmcmc.evaluation.reference import tfds_order
from lightning_sgmcmc.recipes import hmc_fidelity
from lightning_sgmcmc.recipes.hmc_fidelity import problems, scores, truth
from lightning_sgmcmc.recipes.hmc_fidelity.methods import METHODS
from lightning_sgmcmc.recipes.hmc_fidelity.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.resnet import FilterResponseNorm, resnet20_frn
from lightning_sgmcmc.recipes.shared.settings import read_settings
from tests.recipes.test_cifar_recipes import in_turn

QUICK = read_settings(Settings, Options(Path(), Path()))
FULL = read_settings(Settings, Options(Path(), Path(), full=True))
TINY: dict[str, Any] = {
    "sizes": (40, 10, 12),
    "truth": replace(QUICK.truth, chains=4, warmup=4, draws=4, max_depth=3),
    "seeds": 1,
    "steps": 60,
    "warm_start": 0.1,
    "burn_in": 0.5,
    "draws": 4,
    "batch": 20,
    "cycles": 2,
    "compile": False,
}


LONG_ENOUGH = 180
"""Steps whose burn-in gives a contour the hundred energies that it needs."""


def small(settings: Settings, name: str, **changes: Any) -> Settings:
    tiny = replace(settings, **TINY | changes | ({"steps": LONG_ENOUGH} if name.startswith("contour") else {}))
    return replace(tiny, lr={name: ladder[:1] for name, ladder in tiny.lr.items()})


def test_a_filter_response_has_mean_square_one_whatever_the_other_images_are() -> None:
    x = 3 + 5 * torch.randn(4, 6, 7, 7, generator=torch.Generator().manual_seed(0))
    layer = FilterResponseNorm(6)
    with torch.no_grad():
        layer.threshold.fill_(-100.0)
        found = layer(x)
    assert torch.allclose(found.square().mean((2, 3)), torch.ones(4, 6), atol=1e-5)
    assert torch.allclose(layer(x[:1]), found[:1])
    layer.reset_parameters()
    assert torch.equal(layer(x), found.clamp_min(0))


def test_the_network_is_the_published_one() -> None:
    """274,042 parameters with ten classes: 21 convolutions with biases, as many normalisations, a linear layer."""
    with torch.device("meta"):
        net = resnet20_frn()
        assert net(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    count = sum(p.numel() for p in net.parameters())
    assert sum(isinstance(part, FilterResponseNorm) for part in net.modules()) == 21
    assert count == 274_042


def test_ambiguity_is_the_gain_of_the_geometric_mean_whatever_the_labels() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, weights = torch.randn(5, 30, 4, generator=generator), torch.tensor([0.1, 0.3, 0.2, 0.2, 0.2])
    members = logits.softmax(-1)
    mean = (weights[:, None, None] * logits).sum(0).log_softmax(-1)
    for seed in range(2):
        labels = torch.randint(4, (30,), generator=torch.Generator().manual_seed(seed))
        rows = torch.arange(30)
        of_members = -(weights * members[:, rows, labels].log().mean(-1)).sum()
        gain = float(of_members + mean[rows, labels].mean())
        assert scores.ambiguity(members, weights) == pytest.approx(gain, abs=1e-5)
    assert scores.ambiguity(members[:1].repeat(5, 1, 1), weights) == pytest.approx(0, abs=1e-6)


def test_the_prior_of_factors_gives_each_weight_the_plain_variance() -> None:
    """The variance of 200 x 140 entries, within 10 %: a false alarm has less than one chance in a million."""
    net = torch.nn.Sequential(torch.nn.Linear(20, 7))
    stds, generator = problems.factor_stds(net, 0.5), torch.Generator().manual_seed(2)
    name = "net.0.parametrizations.weight.original"
    left = stds[f"{name}1"] * torch.randn(200, 7, 7, generator=generator)
    right = stds[f"{name}2"] * torch.randn(200, 20, 20, generator=generator)
    inner = stds["*"] * torch.randn(200, 7, 20, generator=generator)
    assert float((left @ inner @ right).var()) == pytest.approx(0.25, rel=0.1)
    module = problems.module_of(QUICK, expanded=True)
    own = problems.factor_stds(problems.network(QUICK), QUICK.prior_std)
    assert set(own) - {"*"} < {name for name, _ in module.named_parameters()}


def test_chains_of_one_law_agree_and_one_elsewhere_does_not() -> None:
    """Fifty log-likelihoods of four chains; those of one law are beyond the limit in 1 % of runs."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(100, 4, 50, 3, generator=generator)
    targets = torch.zeros(50, dtype=torch.int64)
    rhat, effective, limit = truth.in_function_space(logits.softmax(-1), targets)
    assert rhat < limit
    assert effective > 150
    logits[:, 0] += torch.tensor([3.0, 0.0, 0.0])
    assert truth.in_function_space(logits.softmax(-1), targets)[0] > limit


def test_the_halves_of_the_reference_are_of_different_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, sample = [], truth.sample

    def kept(*given: Any, **options: Any) -> Any:
        drawn.append(sample(*given, **options))
        return drawn[0]

    monkeypatch.setattr(truth, "sample", kept)
    options, settings = Options(tmp_path, tmp_path), small(QUICK, "")
    found = truth.truth(0, settings, options)
    data = problems.datamodule(settings, options)
    data.setup("fit")
    members = scores.members_of(drawn[0], data.splits[2], data)
    chains = torch.tensor([one.chain for one in drawn[0]])
    assert found.halves is not None
    for half, own in zip(found.halves, (chains < 2, chains >= 2), strict=True):
        assert torch.allclose(half, members[own].mean(0), atol=1e-5)
    assert not torch.allclose(*found.halves, atol=1e-3)
    assert torch.allclose(found.scores.probabilities, members.mean(0), atol=1e-5)


def test_the_images_of_the_published_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training images are the first in the order of TensorFlow Datasets, and validation images the next."""
    images = np.arange(50, dtype=np.uint8)[:, None, None, None] * np.ones((1, 3, 32, 32), np.uint8)
    labels = np.arange(50) % 10
    (tmp_path / "cifar10").mkdir()
    arrays = {"x_train": images, "y_train": labels, "x_test": images[:20], "y_test": labels[:20]}
    np.savez(tmp_path / "cifar10" / "cifar10.npz", **arrays)
    monkeypatch.setattr(problems, "PUBLISHED_TRAIN", 30)
    data = problems.PublishedCIFAR10((25, 10, 15), root=tmp_path)
    data.setup("fit")
    order = tfds_order(50, "train")
    for part, rows in zip(data.splits, (order[:25], order[30:40], range(15)), strict=True):
        assert part.inputs[:, 0, 0, 0].tolist() == list(rows)
        assert part.targets.tolist() == [row % 10 for row in rows]


def test_cifar_without_a_file_and_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"--set reference=probs\.csv.*or a CUDA device"):
        hmc_fidelity.run(Options(tmp_path, tmp_path, full=True))
    hmc_fidelity.check(replace(FULL, reference="probs.csv"), list(METHODS))
    with pytest.raises(ValueError, match="no step sizes for SGLD"):
        hmc_fidelity.check(replace(QUICK, lr={}), ["SGLD"])


def test_without_the_file_the_samplers_have_the_data_of_the_reference() -> None:
    assert (FULL.train, replace(FULL, reference="probs.csv").train, QUICK.train) == (640, 40_960, 300)
    assert set(QUICK.lr) == set(FULL.lr) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.by_default("one network", "PX-SGHMC", "replica exchange")
def test_every_method_on_digits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chain alone has all steps; with the file of a reference there are no rows on its chains."""
    file = tmp_path / "probs.npy"
    np.save(file, np.full((12, 10), 0.1))
    monkeypatch.setattr(hmc_fidelity, "read_settings", lambda *given: small(QUICK, name, reference=str(file)))
    monkeypatch.setattr(hmc_fidelity, "run_jobs", in_turn)
    rows = hmc_fidelity.run(Options(tmp_path, tmp_path, methods=(name,)))
    found = {(row.method, row.metric): row.value for row in rows}
    assert {method for method, _ in found} == {"HMC", name}
    assert found["HMC", "NLL (nats)"] == pytest.approx(math.log(10), rel=1e-4)
    assert all(math.isfinite(value) for value in found.values())
    assert 0 <= found[name, "total variation to HMC"] < 0.9 + 1e-6  # of one class and the uniform
    if name == "one network":
        assert found[name, "ambiguity"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_full_runs_on_synthetic_images(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `full` but its size: ResNet-20-FRN-Swish, its own HMC, its step sizes."""
    settings = small(FULL, name, data="synthetic", width=2, steps=30, trial=1.0)
    monkeypatch.setattr(hmc_fidelity, "read_settings", lambda *given: settings)
    monkeypatch.setattr(hmc_fidelity, "run_jobs", in_turn)
    rows = hmc_fidelity.run(Options(tmp_path, tmp_path, full=True, methods=(name,), device="cpu"))
    found = {(row.method, row.metric): row.value for row in rows}
    assert found["HMC", "doubts of its report"] > 0  # four draws are no truth
    assert 0 <= found["HMC, one half against the other", "total variation to HMC"] <= 1
    assert all(row.paper is None for row in rows)
    assert math.isfinite(found[name, "NLL (nats)"])
