"""A module of several chains in a user's hands: one network at a time, copies, loading, reports, stores, and misuse."""

import copy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import (
    SGHMC,
    BayesianModule,
    Categorical,
    ContourRules,
    Posterior,
)
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    PosteriorDashboard,
    RunSummary,
    SampleCollector,
    SamplingSchedule,
)
from lightning_sgmcmc.chains.stacked import clip_each_chain
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.tune import propose_lr
from tests.support.comparisons import assert_same
from tests.support.problems import CHAINS, ConjugateRegression, Data, Decoded, Net, data
from tests.support.trainers import fit_chains, quiet_trainer, seeded


def test_a_module_with_chains_speaks_of_one_network_at_a_time() -> None:
    module = seeded(lambda: Net(CHAINS))
    fit_chains(module, 10)
    x = torch.randn(4, 5)
    with pytest.raises(RuntimeError, match="holds 3 chains, and an output belongs to one"):
        module(x)
    module.eval()
    outputs = []
    for chain in range(CHAINS):
        with module.at_chain(chain), torch.no_grad():
            outputs.append(module(x))
            assert set(module.state_dict()) == set(Net().state_dict())
            assert module.net[0].weight.shape == (16, 5)
    assert not torch.equal(outputs[0], outputs[1])
    with pytest.raises(IndexError, match="chain must be between 0 and 2, got 3"), module.at_chain(3):
        pass
    energies = module.potential_energy((x, torch.zeros(4, dtype=torch.int64)))
    assert energies.shape == (CHAINS,)
    module.zero_grad()
    energies[1].backward()
    gradient = module.net[0].weight.grad
    assert gradient is not None
    assert float(gradient[1].abs().sum()) > 0
    assert float(gradient[0].abs().sum()) == 0


def test_copies_and_moves_keep_the_chains_together(tmp_path: Path) -> None:
    module = seeded(lambda: Net(2))
    fit_chains(module, 10)
    twin = copy.deepcopy(module)
    assert_same(fit_chains(module, 10), fit_chains(twin, 10))
    torch.save(module, tmp_path / "module.pt")
    again = torch.load(tmp_path / "module.pt", weights_only=False)
    double = again.double().float()
    assert_same(fit_chains(module, 10), fit_chains(double, 10))


def test_a_checkpoint_loads_without_a_trainer(tmp_path: Path) -> None:
    module = seeded(lambda: Net(2))
    trainer = quiet_trainer(max_steps=3, callbacks=[])
    trainer.fit(module, datamodule=Data())
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "run.ckpt", num_chains=2)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_everything_after_a_fit(tmp_path: Path) -> None:
    """Test, predictions, re-estimated BatchNorm and the chain's health with several chains, from the fit's own module;
    predictions are those of a module with one chain."""
    module = seeded(lambda: Net(CHAINS))
    callbacks = [SamplingSchedule(every_n_steps=8), SampleCollector(tmp_path / "samples"), BayesianModelAverage()]
    contour = ContourGradient(ContourRules(zeta=0.3), warm_up_steps=6)
    trainer = quiet_trainer(
        max_steps=24,
        default_root_dir=tmp_path,
        gradient_clip_val=50.0,
        callbacks=[*callbacks, ChainHealth(every_n_steps=2, warn=False), PosteriorDashboard(), RunSummary(), contour],
    )
    trainer.fit(module, datamodule=Data())
    assert module.health is not None
    assert set(module.health.tensors) == {name for name, _ in Net().named_parameters()}
    (metrics,) = trainer.test(module, datamodule=Data(), verbose=False)
    assert 0 < metrics["test/bma_accuracy"] <= 1
    (prediction,) = trainer.predict(module, datamodule=Data(batch_size=20))
    inputs = data(20, 2).inputs
    again = Posterior.load(tmp_path / "samples", model=Net()).predict(inputs)
    torch.testing.assert_close(prediction.probabilities, again.probabilities)
    assert len(module.posterior.update_batch_norm([data(60, 0).inputs])) == 9


@pytest.mark.slow
def test_health_of_several_chains_is_the_mean_of_theirs() -> None:
    """Chains at temperatures of their own are each held against its own; SGHMC's kinetic one is right with any."""
    problem = ConjugateRegression()
    module = problem.module(sampler=SGHMC, lr=[0.005, 0.01], temperature=[1.0, 8.0], num_chains=2, seed=3)
    health = ChainHealth(every_n_steps=2, warn=False)
    trainer = quiet_trainer(max_steps=3000, callbacks=[SamplingSchedule(every_n_steps=100), health])
    trainer.fit(module, problem.loader(100))
    assert module.health is not None
    assert module.health.total is not None
    kinetic = (module.health.total.kinetic or 0.0) / module.health.temperature
    assert kinetic == pytest.approx(1, abs=0.08)  # the mini-batches' share and five standard errors


def test_a_step_size_for_several_chains() -> None:
    """Tuning leaves the chains where they were, each at its own start."""
    module = seeded(lambda: Net(2))
    proposal = propose_lr(
        module, datamodule=Data(), steps=100, burn_in_steps=20, max_probes=2, make_trainer=quiet_trainer
    )
    assert proposal.probes
    tuned = fit_chains(module, 10)
    assert_same(fit_chains(seeded(lambda: Net(2)), 10), tuned)


def test_the_store_holds_single_networks(tmp_path: Path) -> None:
    """Samples open without the number of chains, and predict as the run's own average does."""
    module = seeded(lambda: Net(CHAINS))
    collector = SampleCollector(tmp_path / "samples")
    trainer = quiet_trainer(
        max_steps=16, callbacks=[SamplingSchedule(every_n_steps=8), collector, BayesianModelAverage()]
    )
    trainer.fit(module, datamodule=Data())
    posterior = Posterior.load(tmp_path / "samples", model=Net())
    assert [record.chain for record in posterior.records] == [0, 1, 2, 0, 1, 2]
    validation = data(20, 1)
    predicted = posterior.predict(validation.inputs).probabilities
    assert predicted is not None
    nll = -predicted[torch.arange(20), validation.targets].double().log().mean().item()
    assert float(trainer.callback_metrics["val/bma_nll"]) == pytest.approx(nll, rel=1e-5)


def test_clipping_bounds_each_chain_by_its_own_norm() -> None:
    gradients = [torch.randn(3, 4, 2), torch.randn(3, 5)]
    gradients[0][1] *= 1e-3
    gradients[1][1] *= 1e-3
    before = [gradient.clone() for gradient in gradients]
    clip_each_chain(gradients, 0.5)
    for chain in range(3):
        alone = [nn.Parameter(torch.zeros_like(gradient[chain])) for gradient in before]
        for parameter, gradient in zip(alone, before, strict=True):
            parameter.grad = gradient[chain].clone()
        nn.utils.clip_grad_norm_(alone, 0.5)
        for parameter, gradient in zip(alone, gradients, strict=True):
            assert torch.equal(parameter.grad, gradient[chain])
    assert torch.equal(gradients[0][1], before[0][1])


@pytest.mark.parametrize("execution", ["loop", "vmap", "unrolled"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tied_and_replaced_tensors(execution: Any, compiled: bool) -> None:
    """Layers that share a weight share it in every chain; a buffer that is replaced is kept by chain."""

    class Tied(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.second = nn.Linear(5, 5)
            self.second.weight = self.first.weight
            self.out = nn.Linear(5, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls = self.calls + 1
            return self.out(self.second(self.first(x)))  # type: ignore[no-any-return]

    options: dict[str, Any] = {"chain_execution": execution, "compile": compiled}
    module = BayesianModule(net=Tied(), likelihood=Categorical(), lr=0.01, num_chains=2, seed=1, **options)
    samples = fit_chains(module, 10)
    assert module.net.first.weight is module.net.second.weight
    assert module.net.first.weight.shape == (2, 5, 5)
    assert module.net.calls.tolist() == [10.0, 10.0]
    assert "net.second.weight" not in samples[0].parameters


def test_misuse() -> None:
    with pytest.raises(ValueError, match="lr has 3 values, and the run has 2 chains"):
        fit_chains(Net(2, lr=[0.1, 0.1, 0.1]))
    with pytest.raises(ValueError, match="LearningRateMonitor logs one number"):
        fit_chains(Net(2, lr=[0.1, 0.2]), callbacks=[pl.callbacks.LearningRateMonitor()], logger=True)
    with pytest.raises(ValueError, match="pass the plain network and compile=True"):
        BayesianModule(net=torch.compile(nn.Linear(2, 2)), likelihood=Categorical(), num_chains=2)
    with pytest.raises(ValueError, match="chain_execution must be 'auto' or 'loop' or 'vmap'"):
        Net(2, chain_execution="parallel")
    with pytest.raises(ValueError, match="temperature has no values"):
        Net(2, temperature=[])


def test_a_chain_that_leaves_for_infinity_is_named() -> None:
    from lightning_sgmcmc import NonFiniteEnergyError

    class Broken(Net):
        def log_likelihood(self, batch: Any) -> Tensor:
            value = super().log_likelihood(batch)
            worst = self.trainer.global_step == 4 and self.net[0].weight.data_ptr() == self.third
            return value * float("nan") if worst else value

    module = seeded(lambda: Broken(CHAINS))
    module.third = -1

    class Find(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            with pl_module.at_chain(2):
                pl_module.third = pl_module.net[0].weight.data_ptr()

    with pytest.raises(NonFiniteEnergyError, match=r"the run stops before step \d of chain 2") as caught:
        fit_chains(module, callbacks=[Find()])
    assert caught.value.chain == 2


def test_user_hooks_and_data_sets(tmp_path: Path) -> None:
    """A datamodule of a data set that is decoded item by item runs with several chains too."""
    train = Decoded(data(60, 0), True)
    module = seeded(lambda: Net(2))
    trainer = quiet_trainer(max_epochs=2, callbacks=[SamplingSchedule(every_n_steps=5)])
    trainer.fit(module, datamodule=DatasetDataModule(train, batch_size=8))
    assert module.sampler.step_count == 16
