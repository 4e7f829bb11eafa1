"""`reference.sample`: the posterior of a module, its store and record, resume, and what it refuses."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    SGLD,
    BayesianModule,
    Categorical,
    Gaussian,
    GaussianPrior,
    HierarchicalPrior,
    Posterior,
    expand,
    reference,
)
from lightning_sgmcmc.callbacks import SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.diagnostics.draws import chain_diagnostics
from lightning_sgmcmc.reference import sampling
from lightning_sgmcmc.reference.problem import Problem
from tests.support.small_run import loader
from tests.support.trainers import quiet_trainer

NOISE = 0.5
SHORT: dict[str, Any] = {"chains": 2, "warmup": 20, "draws": 6, "max_depth": 3}
QUIET = pytest.mark.filterwarnings("ignore:The reference draws are doubtful")
pytestmark = QUIET


def data(count: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 2, generator=generator)
    return x, x @ torch.tensor([[1.0], [-2.0]]) + 0.3 + NOISE * torch.randn(count, 1, generator=generator)


def regression(**options: Any) -> BayesianModule:
    torch.manual_seed(0)
    given = {"net": nn.Linear(2, 1), "likelihood": Gaussian(NOISE), "prior": GaussianPrior(1.0)} | options
    return BayesianModule(**given)


def network(**options: Any) -> BayesianModule:
    torch.manual_seed(0)
    return regression(**({"net": nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))} | options))


def fit_a_little(module: BayesianModule) -> None:
    trainer = quiet_trainer(max_steps=2, callbacks=[SamplingSchedule(every_n_steps=1)])
    trainer.fit(module, DataLoader(TensorDataset(*data())))


def rows(posterior: Posterior) -> Tensor:
    """Return the parameters of all samples, shape (S, P)."""
    return torch.stack([torch.cat([t.reshape(-1) for t in s.parameters.values()]) for s in posterior])


def problem(module: BayesianModule, batch_size: int = 1000, dtype: torch.dtype | None = torch.float64) -> Problem:
    return Problem(module, data(), batch_size, 3, None, 0, dtype)


@pytest.mark.parametrize("kernel", ["nuts", pytest.param("hmc", marks=pytest.mark.slow)])
def test_the_posterior_is_the_conjugate_one(kernel: Any) -> None:
    """Means and covariances of 3 parameters from 6 chains, within 4.5 Monte-Carlo standard errors by ArviZ's effective
    size: a false alarm in 10⁴ seeds for the 9 figures together."""
    x, y = data(8)
    inputs = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    covariance = torch.linalg.inv(inputs.T @ inputs / NOISE**2 + torch.eye(3).double())
    mean = covariance @ inputs.T @ y[:, 0].double() / NOISE**2
    module = regression(chain_execution="vmap")
    found = reference.sample(module, (x, y), kernel, 6, 60, 90, dtype=torch.float64)
    draws = rows(found).reshape(90, 6, 3).transpose(0, 1)
    centred = draws - mean
    upper = torch.triu_indices(3, 3)
    values = torch.cat([centred, (centred[..., :, None] * centred[..., None, :])[..., upper[0], upper[1]]], -1)
    expected = torch.cat([torch.zeros(3).double(), covariance[upper[0], upper[1]]])
    for place in range(9):
        effective = chain_diagnostics(values[..., place].numpy()).ess_bulk
        error = float(values[..., place].std()) / math.sqrt(effective)
        assert effective > 100
        assert abs(float(values[..., place].mean() - expected[place])) < 4.5 * error, place
    report = found.report
    assert report is not None
    assert report.rhat < 1.05
    assert sum(report.divergences) == 0
    assert all(0.6 < value < 1 for value in report.acceptance)


@pytest.mark.parametrize("batch_size", [1000, 7])
@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_the_energy_is_the_modules_whatever_the_pieces(batch_size: int, execution: Any) -> None:
    given = problem(network(chain_execution=execution, num_data=40), batch_size)
    energies, gradients = given.energy(given.initial)
    module = network(num_data=40).double()
    x, y = (part.double() for part in data())
    for row, energy, gradient in zip(given.initial, energies, gradients, strict=True):
        torch.nn.utils.vector_to_parameters(row, module.parameters())
        expected = module.potential_energy((x, y))
        slopes = torch.autograd.grad(expected.sum(), list(module.parameters()))
        torch.testing.assert_close(energy, expected.detach()[0], rtol=1e-6, atol=1e-6)  # σ is kept in float32
        torch.testing.assert_close(gradient, torch.cat([s.reshape(-1) for s in slopes]), rtol=1e-6, atol=1e-6)


def test_hierarchical_scales_are_integrated_out() -> None:
    """The marginal prior is the integral over log v, by quadrature; both ways of computing chains have it."""
    prior = HierarchicalPrior("all", nu=0.7, std=0.4)
    theta = torch.tensor([0.3, -0.8, 0.1], dtype=torch.float64)
    logs = torch.linspace(-12, 14, 20_001, dtype=torch.float64)
    values = [prior.log_prob({"w": theta, "prior_state.variance": v[None]}) for v in logs[::10].exp()]
    integral = torch.stack(values).logsumexp(0) + math.log(float(logs[10] - logs[0]))
    found = prior.log_marginal({"w": theta})
    torch.testing.assert_close(found, integral, rtol=1e-6, atol=1e-6)
    together = prior.log_marginal({"w": torch.stack([theta, 2 * theta])}, chains=True)
    torch.testing.assert_close(together, torch.stack([found, prior.log_marginal({"w": 2 * theta})]))
    one, other = (problem(network(prior=prior, chain_execution=how)) for how in ("loop", "vmap"))
    for a, b in zip(one.energy(one.initial), other.energy(other.initial), strict=True):
        torch.testing.assert_close(a, b)


def test_samples_of_a_hierarchical_prior_have_their_scales() -> None:
    found = reference.sample(network(prior=HierarchicalPrior("layer", every_n_steps=1)), data(), **SHORT)
    scales = [sample.scales["net.0.weight"] for sample in found]
    assert len({float(scale) for scale in scales}) == 12
    assert all(float(scale) > 0 for scale in scales)


def test_the_temperature_divides_the_energy() -> None:
    cold, plain = problem(regression(temperature=0.5)), problem(regression())
    for a, b in zip(cold.energy(cold.initial), plain.energy(plain.initial), strict=True):
        torch.testing.assert_close(a, 2 * b)
    row, energy = cold.initial[0], float(cold.energy(cold.initial)[0][0])
    assert cold.sample(row, energy, 1, 0).energy == pytest.approx(energy / 2)


def test_what_is_frozen_is_shared_and_what_is_expanded_is_collapsed(tmp_path: Path) -> None:
    found = reference.sample(network(sampled=["2.*"]), data(), out=tmp_path / "frozen", **SHORT)
    loaded = Posterior.load(tmp_path / "frozen")
    assert set(loaded[0].parameters) == {"net.2.weight", "net.2.bias"}
    assert set(loaded[0].shared) == {"net.0.weight", "net.0.bias", "likelihood.log_std"}
    torch.testing.assert_close(loaded.predict(data()[0]).mean, found.predict(data()[0]).mean)
    net = expand(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    expanded = reference.sample(regression(net=net), data(), **SHORT)
    assert expanded[0].parameters["net.0.weight"].shape == (3, 2)
    assert set(expanded[0].parameters) == {f"net.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}


def test_the_module_stays_as_it_is() -> None:
    module = network(num_chains=3).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    reference.sample(module, data(), dtype=torch.float64, **SHORT)
    assert module.training
    assert module.num_data is None
    assert module.num_chains == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    quiet_trainer(max_steps=2, callbacks=[SamplingSchedule(every_n_steps=1)]).fit(
        module, DataLoader(TensorDataset(*data()))
    )


def test_data_in_any_form_are_the_same_data() -> None:
    x, y = data()
    pairs = TensorDataset(x, y)
    forms = [(x, y), pairs, DataLoader(pairs, batch_size=7, shuffle=True), DatasetDataModule(pairs, batch_size=8)]
    found = [rows(reference.sample(regression(), form, **SHORT)) for form in forms[:3]]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert reference.sample(regression(), forms[3], **SHORT).report is not None


def test_a_chain_alone_is_that_chain_in_a_stack() -> None:
    few, many = (reference.sample(network(), data(), **(SHORT | {"chains": c})) for c in (1, 3))
    own = [sample for sample in many if sample.chain == 0]
    assert torch.equal(rows(few), torch.stack([torch.cat([t.reshape(-1) for t in s.parameters.values()]) for s in own]))


# -- the folder -------------------------------------------------------------------------------------------------------


def test_a_run_that_was_interrupted_continues_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"chains": 2, "warmup": 20, "draws": 10, "every_n_draws": 2, "max_depth": 3}
    whole = reference.sample(network(), data(), **given)
    add, adapt, calls = sampling.Traces.add_draw, sampling.HamiltonianChains._adapt, []

    def interrupted(self: Any, *values: Any) -> None:
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt
        add(self, *values)

    def stopped(self: Any, acceptance: Tensor) -> None:
        if self.iteration == 12:
            raise KeyboardInterrupt
        adapt(self, acceptance)

    for warm in (True, False):
        with monkeypatch.context() as patch:
            if warm:
                patch.setattr(sampling.HamiltonianChains, "_adapt", stopped)
            else:
                patch.setattr(sampling.Traces, "add_draw", interrupted)
            with pytest.raises(KeyboardInterrupt):
                reference.sample(network(), data(), out=tmp_path, **given)
        assert len(Posterior.load(tmp_path)) == (0 if warm else 6)
    found = reference.sample(network(), data(), out=tmp_path, **given)
    assert torch.equal(rows(found), rows(whole))
    assert found.report is not None
    assert whole.report is not None
    for name in ("divergences", "acceptance", "gradients", "step_size", "bfmi"):
        assert getattr(found.report, name) == getattr(whole.report, name)
    assert [record.energy for record in found.records] == [record.energy for record in whole.records]


def test_a_run_that_has_ended_is_opened_and_continued_to_more_draws(tmp_path: Path) -> None:
    short = reference.sample(network(), data(), out=tmp_path, **SHORT)
    files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "samples").glob("sample-*")}
    again = reference.sample(network(), data(), out=tmp_path, **SHORT)
    assert torch.equal(rows(again), rows(short))
    longer = reference.sample(network(), data(), out=tmp_path, **(SHORT | {"draws": 9}))
    whole = reference.sample(network(), data(), **(SHORT | {"draws": 9}))
    assert torch.equal(rows(longer), rows(whole))
    assert all((tmp_path / "samples" / name).stat().st_mtime_ns == time for name, time in files.items())
    with pytest.raises(ValueError, match="the folder has a run of 9 draws, and draws=6 are fewer: pass draws=9"):
        reference.sample(network(), data(), out=tmp_path, **SHORT)
    report = reference.read_report(tmp_path)
    assert (report.draws, report.chains, report.parameters, report.num_data) == (9, 2, 13, 40)
    assert json.loads((tmp_path / "reference.json").read_text())["settings"]["kernel"] == "nuts"
    assert reference.read_report(tmp_path / "samples").acceptance == report.acceptance


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The arguments of a run that is in a folder."""
    out = tmp_path_factory.mktemp("run")
    given: dict[str, Any] = {"module": regression(), "data": data()} | SHORT | {"draws": 1, "out": out}
    reference.sample(**given)
    return given


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "hmc"}, "has a run with another kernel='nuts' .now 'hmc'."),
        ({"seed": 1}, "has a run with another seed=0 .now 1."),
        ({"warmup": 21}, "has a run with another warmup=20"),
        ({"chains": 3}, "has a run with another chains=2"),
        ({"data": data(39)}, "has a run with another data "),
        ({"module": regression(likelihood=Gaussian(0.4))}, "has a run with another "),
        ({"module": regression(prior=GaussianPrior(2.0))}, "has a run with another prior="),
        ({"dtype": torch.float64}, "has a run with another "),
    ],
)
def test_another_run_in_the_same_folder_is_refused(
    kept_run: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        reference.sample(**(kept_run | change))


def test_samples_of_a_fit_are_not_overwritten(tmp_path: Path) -> None:
    reference.sample(regression(), data(), out=tmp_path, **SHORT)
    (tmp_path / "chains.pt").unlink()
    with pytest.raises(FileExistsError, match=r"has samples of another run, without chains\.pt: pass another"):
        reference.sample(regression(), data(), out=tmp_path, **SHORT)
    with pytest.raises(FileNotFoundError, match="the run has not ended, or is no reference run"):
        reference.read_report(tmp_path / "nothing")


# -- what is refused --------------------------------------------------------------------------------------------------


def test_data_with_nan_are_refused() -> None:
    x, y = data()
    x[3, 1] = math.nan
    with pytest.raises(ValueError, match="hold 1 NaN in part 0 of a batch"):
        reference.sample(regression(), (x, y), **SHORT)
    classes, labels = regression(net=nn.Linear(2, 2), likelihood=Categorical()), torch.full((24,), 5)
    with pytest.raises(ValueError, match="label"):
        reference.sample(classes, loader(labels), **SHORT)


def test_batch_norm_and_dropout_are_computed_in_evaluation_mode() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    with pytest.warns(UserWarning, match="computed in evaluation mode: dropout is off, and the running statistics"):
        given = problem(regression(net=net), 7)
    whole = problem(regression(net=net), 1000)
    torch.testing.assert_close(given.energy(whole.initial)[0], whole.energy(whole.initial)[0])
    bad = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 1))
    with pytest.raises(
        ValueError, match="BatchNorm1d without running statistics makes the energy of an example depend"
    ):
        problem(regression(net=bad))


@pytest.mark.parametrize(
    ("module", "given", "message"),
    [
        ({"temperature": 0.0}, {}, "temperature=0.0 of the module is not one positive number"),
        ({"temperature": [1.0, 2.0]}, {}, "of the module is not one positive number"),
        ({"num_data": 39}, {}, "num_data=39 contradicts the 40 training data"),
        ({}, {"chains": 0}, "chains must be at least 1, got 0"),
        ({}, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({}, {"dtype": torch.bfloat16}, "chains need float32 or float64, and the module has torch.bfloat16"),
        ({}, {"start": [{}]}, "chain_start has 1 states, and the run has 2 chains"),
        ({"net": nn.Linear(2, 1).requires_grad_(False)}, {}, "has no trainable parameters to sample"),
    ],
)
def test_what_cannot_be_is_refused(module: dict[str, Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference.sample(regression(**module), data(), **(SHORT | given))


def test_modules_and_data_of_other_kinds_are_refused() -> None:
    with pytest.raises(TypeError, match="module must be a BayesianModule, got a Linear"):
        reference.sample(nn.Linear(2, 1), data(), **SHORT)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"data must be a pair of tensors \(x, y\), a data set, a loader or"):
        reference.sample(regression(), 3, **SHORT)
    fitted = regression(num_chains=2, sampler=SGLD, lr=1e-3)
    quiet_trainer(max_steps=2, callbacks=[SamplingSchedule(every_n_steps=1)]).fit(
        fitted, DataLoader(TensorDataset(*data()))
    )
    with pytest.raises(ValueError, match="the module holds 2 stacked chains of a fit: pass a new module"):
        reference.sample(fitted, data(), **SHORT)


def test_the_cost_of_a_large_network_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sampling, "rank_zero_warn", seen.append)
    monkeypatch.setattr(sampling, "LIKELY_LEAPFROGS", (10**9, 10**10))
    reference.sample(regression(), data(), **SHORT)
    assert seen[0].startswith("A gradient over all 40 data takes ")
    assert "for 2 chains of 3 parameters, so 26 iterations of 1000000000 to" in seen[0]


def test_one_chain_and_few_draws_are_called_doubtful(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="one chain alone cannot show that it has missed a mode"):
        found = reference.sample(regression(), data(), chains=1, warmup=20, draws=3, max_depth=3, out=tmp_path)
    assert found.report is not None
    assert np.isnan(found.report.rhat)
    assert any("too few to compare chains" in text for text in found.report.warnings)
    assert json.loads((tmp_path / "reference.json").read_text())["rhat"] is None
    assert np.isnan(reference.read_report(tmp_path).rhat)
    (tmp_path / "reference.json").write_text("[]")
    with pytest.raises(ValueError, match=r"reference\.json is damaged"):
        reference.read_report(tmp_path)
