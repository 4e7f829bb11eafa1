"""How parameters mix without validation data, by what a user with a small model prints: the verdict and the summary."""

import functools
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGHMC, BayesianModule, Gaussian, UnderdampedLangevin
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ChainHealth,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.health.findings import FindingKind
from lightning_sgmcmc.health.report import HealthReport
from tests.support.trainers import quiet_trainer


def rows(correlated: bool) -> TensorDataset:
    """50 rows of four inputs, which are one and the same up to a tenth, or have nothing in common."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=generator)
    if correlated:
        x = torch.randn(50, 1, generator=generator) + 0.1 * x
    y = x @ torch.tensor([[1.0], [0.5], [-1.0], [0.3]]) + 0.3 * torch.randn(50, 1, generator=generator)
    return TensorDataset(x, y)


class Square(nn.Module):
    """Two modes, at w and -w, in which a chain stays."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w**2 * x


def fit(
    data: TensorDataset,
    net: nn.Module,
    steps: int = 3000,
    extra: tuple[pl.Callback, ...] = (),
    val: Any = None,
    batch_size: int = 50,
    burn_in: int = 1000,
    **options: Any,
) -> tuple[HealthReport, list[str]]:
    """Return the verdict and the warnings of a fit by the lines of the first tutorial."""
    torch.manual_seed(0)
    usual: dict[str, Any] = {"sampler": functools.partial(SGHMC, friction=0.05), "lr": 0.004, "num_chains": 4}
    module = BayesianModule(net, Gaussian(std=0.3), 1.0, seed=0, **(usual | options))
    callbacks: list[Any] = [SamplingSchedule(burn_in_steps=burn_in, every_n_steps=10), SampleCollector(in_memory=True)]
    callbacks += [*extra, ChainHealth(), RunSummary()]
    trainer = quiet_trainer(max_steps=steps, callbacks=callbacks, check_val_every_n_epoch=500)  # of one step each
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, batch_size), val)
    assert module.health is not None
    return module.health, [str(one.message) for one in caught]


def test_parameters_that_do_not_mix_are_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """Correlated inputs: temperatures are right, and the weights' R-hat is 1.5."""
    report, caught = fit(rows(correlated=True), nn.Linear(4, 1), sampler=SGHMC, lr=None, steps=6000)
    printed = " ".join(capsys.readouterr().out.split())
    (finding,) = (one for one in report.findings if one.kind == FindingKind.CHAINS)
    assert finding.severity == "problem"
    assert finding.tensor == "net.weight"
    assert "R-hat of net.weight[0, " in finding.sentence
    assert "reference.sample" in finding.remedy
    assert "Sampled the posterior? Not shown; chains: they disagree on a parameter" in printed
    assert any("ChainHealth: chains:" in one for one in caught)


def test_parameters_that_mix_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    report, caught = fit(rows(correlated=False), nn.Linear(4, 1))
    printed = " ".join(capsys.readouterr().out.split())
    assert report.findings == ()
    assert "Sampled the posterior? Yes" in printed
    assert "mixes worst: R-hat 1.0" in printed
    assert "was not measured" not in report.reason
    assert not any("ChainHealth" in one for one in caught)
    alone, _ = fit(rows(correlated=False), nn.Linear(4, 1), num_chains=1)
    assert alone.findings == ()
    assert "mixes worst: R-hat 1.0" in alone.reason


def test_chains_in_two_modes(capsys: pytest.CaptureFixture[str]) -> None:
    data = rows(correlated=False)
    data = TensorDataset(data.tensors[0][:, :1], data.tensors[0][:, :1])
    starts = [{"net.w": torch.tensor(sign)} for sign in (1.0, -1.0)]
    report, _ = fit(data, Square(), num_chains=2, chain_start=starts)
    assert report.findings[0].kind == FindingKind.CHAINS
    assert "R-hat of net.w is" in report.findings[0].sentence
    assert "separate modes" in report.findings[0].remedy
    held_out = DataLoader(data, 50)
    same, caught = fit(data, Square(), num_chains=2, chain_start=starts, extra=(BayesianModelAverage(),), val=held_out)
    assert [one.severity for one in same.findings if one.kind == FindingKind.CHAINS] == ["note"], "predictions agree"
    assert "Sampled the posterior? Yes" in capsys.readouterr().out
    assert not any("ChainHealth" in one for one in caught)


def test_a_network_with_hidden_units_has_no_such_parameters() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    report, _ = fit(rows(correlated=False), net)
    assert "for which pass BayesianModelAverage with validation data" in report.reason
    assert FindingKind.CHAINS not in {one.kind for one in report.findings}


def test_heat_that_grows_without_end_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """Euler's scheme is unstable here: the energy grows from 17 to millions of nats, and was called a cold ensemble."""
    report, caught = fit(rows(correlated=True), nn.Linear(4, 1), sampler=UnderdampedLangevin, lr=1e-3, steps=6000)
    printed = capsys.readouterr().out
    assert report.findings[0].kind == FindingKind.KINETIC
    assert report.kind is None
    assert "cold ensemble" not in printed
    assert "Sampled the posterior? Not shown; kinetic temperature" in printed
    assert any("ChainHealth: kinetic temperature" in one for one in caught)


def test_a_run_that_was_not_measured_is_not_called_a_posterior_sample(capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = fit(rows(correlated=False), nn.Linear(4, 1), steps=160, lr=0.02, burn_in=60)
    printed = " ".join(capsys.readouterr().out.split())
    assert report.kind is None
    assert "Sampled the posterior? Yes" not in printed
    assert "the plan expects a posterior sample" in printed


def test_first_samples_from_the_way_to_the_posterior_are_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """They are in the quarter of the stage that the temperatures leave out, and widen the intervals of the samples."""
    net = nn.Linear(4, 1)
    with torch.no_grad():
        net.weight.fill_(4.0)
    report, _ = fit(rows(correlated=False), net, burn_in=0, steps=6000, lr=0.002, chain_start="same")
    printed = " ".join(capsys.readouterr().out.split())
    (finding,) = report.findings
    assert finding.kind == FindingKind.ENERGY
    assert "in the first quarter of the samples" in finding.sentence
    assert "Sampled the posterior? Not shown; energy" in printed
    net = nn.Linear(4, 1)
    report, _ = fit(rows(correlated=False), net, burn_in=1500, steps=7500, lr=0.002, chain_start="same")
    assert report.findings == ()


def test_chains_that_share_full_batches_are_no_warning() -> None:
    for batch_size, warned in ((50, False), (64, False), (25, True)):
        _, caught = fit(rows(correlated=False), nn.Linear(4, 1), steps=60, burn_in=10, batch_size=batch_size)
        assert any("only one data order" in one for one in caught) == warned
