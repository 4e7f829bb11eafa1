"""Randomness belongs to a run: fits and runs in a process differ, and the process keeps its own generators."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGHMC, SGNHT, BayesianModule, Gaussian, GaussianPrior, pSGHMC
from lightning_sgmcmc.batches.loader import ResumableLoader
from lightning_sgmcmc.callbacks import EWSG, MetropolisTest, SampleCollector, SamplingSchedule
from lightning_sgmcmc.priors import HierarchicalPrior
from lightning_sgmcmc.samplers import AMAGOLD
from tests.support.random_runs import (
    DATA,
    Fails,
    States,
    as_in_a_new_process,
    datamodule,
    fit,
    linear,
    plain_loader,
    state,
)
from tests.support.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_a_new_process(monkeypatch)


# -- two fits of a module ----------------------------------------------------------------------------------------------

COLD = functools.partial(linear, temperature=0.0)
"""Only the batches and the network are random."""


class Dropping(BayesianModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)), Gaussian(), lr=0.01, **options)


def whole() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=24)


MEMBERS: dict[str, tuple[Callable[[], BayesianModule], Callable[[], Any], Callable[[], list[Any]]]] = {
    "noise": (linear, whole, list),
    "noise with a seed": (lambda: linear(seed=0), whole, list),
    "noise of several chains": (lambda: linear(num_chains=2, seed=3), whole, list),
    "noise of pSGHMC": (lambda: linear(sampler=pSGHMC), whole, list),
    "thermostat": (lambda: linear(sampler=SGNHT), whole, list),
    "batches of a datamodule": (COLD, datamodule, list),
    "batches with a seed": (lambda: COLD(seed=1), datamodule, list),
    "batches of a seeded loader": (COLD, lambda: ResumableLoader(DATA, 4, seed=9), list),
    "batches of a plain loader": (lambda: COLD(seed=1), plain_loader, list),
    "batches of several chains": (lambda: COLD(num_chains=2), datamodule, list),
    "dropout": (lambda: Dropping(temperature=0.0, seed=1), whole, list),
    "dropout of several chains": (lambda: Dropping(temperature=0.0, num_chains=2), whole, list),
    "candidates": (lambda: linear(sampler=SGHMC, seed=1), datamodule, lambda: [EWSG()]),
    "scales drawn by Gibbs": (lambda: linear(prior=HierarchicalPrior(), seed=1), whole, list),
    "tested steps": (
        lambda: linear(sampler=AMAGOLD, lr=0.1, seed=1),
        whole,
        lambda: [SamplingSchedule(every_n_steps=1), MetropolisTest(every_n_steps=1)],
    ),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_second_fit_draws_anew_and_a_new_module_repeats_the_first(name: str) -> None:
    make, data, callbacks = MEMBERS[name]
    pl.seed_everything(0, verbose=False)
    module = make()
    module.configure_model()
    start = copy.deepcopy(module.state_dict())
    first = fit(module, data(), callbacks())
    module.load_state_dict(start)
    second = fit(module, data(), callbacks())
    # A rejected step stays at the start, and a pass over all batches depends little on their order.
    assert torch.isclose(first, second, rtol=1e-3, atol=1e-6).all(1).float().mean() < 0.6

    pl.seed_everything(0, verbose=False)  # as a notebook's cell that runs again
    again = make()
    again.configure_model()
    assert torch.equal(fit(again, data(), callbacks()), first)
    again.load_state_dict(start)
    assert torch.equal(fit(again, data(), callbacks()), second)


def conjugate(**options: Any) -> BayesianModule:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.m.expand(len(x), 1)

        def reset_parameters(self) -> None:
            pass

    return BayesianModule(Constant(), Gaussian(std=1.0), GaussianPrior(std=10.0), lr=0.1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"seed": 0}, {}, {"num_chains": 2, "seed": 0}])
def test_a_chain_in_rounds_has_the_posterior(options: dict[str, Any]) -> None:
    """Active learning: the states after 60 rounds have the conjugate posterior's mean and spread, 1/√(N + 0.01)."""
    y = 1 + torch.randn(100, 1, generator=torch.Generator().manual_seed(0))
    data, module = TensorDataset(torch.zeros(100, 1), y), conjugate(**options)
    last = []
    for _ in range(60):
        trainer = quiet_trainer(max_epochs=4)
        trainer.fit(module, DataLoader(data, 50, shuffle=True))
        last.append(state(module))
    draws = torch.stack(last[5:])
    std, effective = 100.01**-0.5, 55 * 0.7  # a round of 8 steps at lr 0.1 forgets 1 - 0.43²
    assert abs(draws.mean() - y.sum() / 100.01) < 4 * std / effective**0.5
    assert abs(draws.std() / std - 1) < 4 / (2 * effective) ** 0.5


def test_a_raised_trainer_makes_another_fit() -> None:
    module, states = linear(seed=0), States()
    trainer = quiet_trainer(
        max_epochs=2, callbacks=[SamplingSchedule(every_n_steps=2), SampleCollector(in_memory=True), states]
    )
    trainer.fit(module, whole())
    trainer.fit_loop.max_epochs = 10
    trainer.fit(module, whole())
    assert len(states.found) == trainer.global_step == 10
    assert module.chains.seeds.fits == 2
    assert [draw.step for draw in module.posterior or ()] == [2, 4, 6, 8]  # of the fit's eight steps


@pytest.mark.parametrize("path", ["last", None])
def test_a_finished_trainer_keeps_the_samples(path: str | None, tmp_path: Path) -> None:
    folder = None if path is None else tmp_path / "samples"
    module, collector = linear(seed=0), SampleCollector(folder, in_memory=folder is None)
    trainer = quiet_trainer(max_epochs=2, callbacks=[SamplingSchedule(every_n_steps=2), collector])
    trainer.fit(module, plain_loader())
    assert module.posterior is not None
    before, generator = [draw.step for draw in module.posterior], state(module)
    with pytest.warns(UserWarning, match="has made its 12 steps in 2 epochs, so the fit makes no step"):
        trainer.fit(module, plain_loader())
    assert [draw.step for draw in module.posterior] == before == [2, 4, 6, 8, 10, 12]
    assert torch.equal(state(module), generator)
    assert module.chains.seeds.fits == 1  # no step, no fit
    assert folder is None or [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["samples"]


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fits", [0, 1, 2])
@pytest.mark.parametrize("options", [{"seed": 0}, {}, {"num_chains": 2}])
def test_every_fit_resumes_bit_for_bit(fits: int, options: dict[str, Any], tmp_path: Path) -> None:
    """In a new module, of a later run in the process: the checkpoint has the run's seed and the fit's number."""
    module = linear(**options)
    for _ in range(fits):
        fit(module, datamodule())
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    rest = fit(module, datamodule(), [saver], enable_checkpointing=True, max_steps=10)[4:]
    found = linear(**options)
    states = States()
    trainer = quiet_trainer(max_steps=10, callbacks=[states])
    trainer.fit(found, datamodule=datamodule(), ckpt_path=tmp_path / "step=4.ckpt")
    assert torch.equal(torch.stack(states.found), rest)
    assert found.chains.seeds.fits == fits + 1
    assert torch.equal(fit(found, datamodule()), fit(module, datamodule()))  # the next fit is the same, too


def test_a_fit_after_load_from_checkpoint_is_the_next_fit(tmp_path: Path) -> None:
    module = linear(seed=0)
    first = fit(module, whole(), [pl.callbacks.ModelCheckpoint(tmp_path, "a")], enable_checkpointing=True)
    loaded = BayesianModule.load_from_checkpoint(
        tmp_path / "a.ckpt", net=nn.Linear(3, 1), likelihood=Gaussian(), weights_only=True
    )
    assert torch.equal(state(loaded), first[-1])
    found = fit(loaded, whole())
    assert torch.equal(found, fit(module, whole()))  # as if the module had been fitted on
    assert not torch.isclose(found - first[-1], first - first[-1], rtol=1e-2).any()


# -- runs of a process -------------------------------------------------------------------------------------------------


def plain_start(seed: int, runs: int) -> list[Tensor]:
    """Return the networks' first parameters of a loop of plain Lightning."""

    class Plain(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    pl.seed_everything(seed, verbose=False)
    starts = []
    for _ in range(runs):
        module = Plain()
        starts.append(state(module))
        quiet_trainer(max_epochs=2).fit(module, plain_loader())
    return starts


@pytest.mark.parametrize("options", [{}, {"num_chains": 2, "chain_start": "same"}, {"sampler": SGHMC}])
def test_the_networks_of_a_loop_are_plain_lightnings(options: dict[str, Any]) -> None:
    wanted = plain_start(3, 4)
    pl.seed_everything(3, verbose=False)
    ends = []
    for start in wanted:
        module = linear(**options)
        assert torch.equal(state(module), start)
        fit(module, max_epochs=2, max_steps=-1)
        ends.append(state(module) - (0 if options.get("num_chains") else start))
    assert all(not torch.isclose(a, b, rtol=1e-3).any() for k, a in enumerate(ends) for b in ends[:k])


class Batches:
    def __iter__(self) -> Any:
        return iter([DATA.tensors] * 6)


LOOPS: dict[str, Callable[[nn.Module], tuple[BayesianModule, Any]]] = {
    "cross-validation": lambda net: (linear(net=net), DataLoader(DATA, 24)),
    "a datamodule": lambda net: (linear(net=net), datamodule()),
    "one for each temperature": lambda net: (linear(net=net, temperature=1.0), datamodule()),
    "several chains": lambda net: (linear(net=net, num_chains=2), datamodule()),
    "batches alone": lambda net: (COLD(net=net), datamodule()),
    "bare batches": lambda net: (linear(net=net, num_data=24), Batches()),
    "starts alone": lambda net: (COLD(net=net, num_chains=2, lr=1e-9), whole()),
    "a subclass": lambda net: (Dropping(temperature=0.0), whole()),
}


@pytest.mark.parametrize("name", LOOPS)
def test_runs_of_a_loop_differ_and_a_repeated_loop_repeats_them(name: str) -> None:
    """Copies of one network, so that all randomness is the run's."""
    net = nn.Linear(3, 1)

    def loop(count: int) -> list[Tensor]:
        pl.seed_everything(4, verbose=False)
        found = []
        for _ in range(count):
            module, data = LOOPS[name](copy.deepcopy(net))
            fit(module, data, max_epochs=1, max_steps=-1)
            found.append(state(module))
        return found

    runs = loop(3)
    if name != "bare batches":  # draws nothing from the process: what follows cannot be told from a loop
        assert all(torch.equal(a, b) for a, b in zip(runs, loop(3), strict=True))
    assert all(not torch.equal(a, b) for k, a in enumerate(runs) for b in runs[:k])


def test_the_first_run_has_the_seed_itself_and_a_fit_without_steps_is_no_run() -> None:
    failing = linear()
    with pytest.raises(ValueError, match="no steps"):
        fit(failing, callbacks=[Fails("on_train_start", ValueError("no steps"))])
    module = linear()
    fit(module)
    given = fit(linear(seed=0, net=copy.deepcopy(module.net)), whole())
    assert module.chains.seeds.run == 0
    assert len(given) == 6
