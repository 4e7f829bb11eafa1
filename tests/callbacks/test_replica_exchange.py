"""Replica exchange under a trainer: the coldest slot samples its target, and rare modes are found."""

import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_sgmcmc import SGHMC, SGLD, BayesianModule, Categorical, ContourRules, Posterior
from lightning_sgmcmc.callbacks import (
    ContourGradient,
    CyclicalSchedule,
    ReplicaExchange,
    SampleCollector,
    SamplerCallback,
    SamplingSchedule,
    VarianceReducedEnergy,
)
from lightning_sgmcmc.simulation import TargetDataModule, TargetModule
from lightning_sgmcmc.simulation.targets import GaussianMixture
from tests.support.problems import Data, Net
from tests.support.trainers import quiet_trainer, seeded

LADDERS = 144


class Places(SamplerCallback):
    """The coldest slots' places by ladder."""

    def __init__(self) -> None:
        self.places: dict[int, list[float]] = {}

    def on_posterior_sample(self, trainer: Any, pl_module: Any, sample: Any) -> None:
        self.places.setdefault(sample.chain, []).append(float(sample.parameters["x"]))


@pytest.mark.parametrize(
    ("sampler", "energy_noise"),
    [
        (SGHMC, 0.5),
        pytest.param(SGLD, 0.5, marks=pytest.mark.slow),
        pytest.param(SGLD, 0.0, marks=pytest.mark.slow),
        pytest.param(SGHMC, 0.0, marks=pytest.mark.slow),
    ],
)
def test_the_coldest_slot_has_the_right_masses(sampler: Any, energy_noise: float) -> None:
    """A mixture with 6 nats between its modes, which SGLD alone crosses once in thousands of steps.

    144 independent ladders give the mean's standard error; beyond 5 of them lies a chance of 2e-6 (t, 143 degrees).
    With SGHMC, momenta that were not rescaled would heat the coldest slot.
    """
    target = GaussianMixture([0.3, 0.7], [[-3.2], [3.2]])
    module = TargetModule(
        target,
        torch.tensor([-3.2]),
        sampler=sampler,
        lr=0.1 if sampler is SGLD else 0.03,
        energy_noise=energy_noise,
        num_chains=3 * LADDERS,
        shared_batch=True,
        chain_execution="vmap",
        seed=4,
    )
    places = Places()
    exchange = ReplicaExchange([1.0, 2.5, 6.0], noise_variance=energy_noise**2)
    trainer = quiet_trainer(
        max_steps=680, callbacks=[SamplingSchedule(burn_in_steps=400, every_n_steps=10), exchange, places]
    )
    trainer.fit(module, datamodule=TargetDataModule())
    assert sorted(places.places) == [3 * ladder for ladder in range(LADDERS)]
    masses = torch.tensor([[x > 0 for x in row] for row in places.places.values()]).double().mean(1)
    error = float(masses.std()) / math.sqrt(LADDERS)
    assert error < 0.02, "the test must be able to see an error of a quarter"
    assert abs(float(masses.mean()) - 0.7) < 5 * error
    inside = torch.tensor([[abs(x) - 3.2 for x in row] for row in places.places.values()]).double()
    variance, spread = inside.var(1).mean(), inside.var(1).std() / math.sqrt(LADDERS)
    assert abs(float(variance) - 1) < 5 * float(spread) + 0.06  # lr adds some per cent


def fit(num_chains: int = 2, callbacks: Any = (), **options: Any) -> tuple[BayesianModule, list[Any]]:
    collector = SampleCollector(in_memory=True)
    module = seeded(lambda: Net(num_chains, sampler=options.pop("sampler", SGHMC)))
    trainer = quiet_trainer(
        max_steps=40, callbacks=[SamplingSchedule(every_n_steps=4), collector, *callbacks], **options
    )
    trainer.fit(module, datamodule=Data())
    assert collector.posterior is not None
    return module, list(collector.posterior.store)


def test_controls_during_and_outside_of_a_step() -> None:
    """Each chain's update has its slot's temperature and step size; schedules see the run's own ones."""
    seen: list[tuple[Any, Any]] = []

    class Watch(SamplerCallback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            group = pl_module.sampler.param_groups[0]
            assert (group["lr"], group["temperature"]) == (0.05, 1.0)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            group = pl_module.sampler.param_groups[0]
            seen.append((group["lr"].tolist(), group["temperature"].tolist()))

    fit(2, [ReplicaExchange([1.0, 3.0], [1.0, 2.0], noise_variance=1e8), Watch()])
    assert seen[0] == (pytest.approx([0.05, 0.1]), [1.0, 3.0])


def test_swaps_are_logged_and_only_the_coldest_draws_are_samples(tmp_path: Path) -> None:
    """Equal temperatures but for rounding always swap; the sample's chain is its slot."""
    logger = pl.loggers.CSVLogger(tmp_path)
    exchange = ReplicaExchange([1.0, 1.0 + 1e-6], every_n_steps=2)
    _, samples = fit(2, [exchange], logger=logger, log_every_n_steps=10)
    assert [(s.step, s.chain) for s in samples] == [(step, 0) for step in range(4, 41, 4)]
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    columns = lines[0].split(",")
    rates = [row.split(",")[columns.index("exchange/swap_rate_0_1")] for row in lines[1:]]
    assert [float(rate) for rate in rates if rate] == [1.0] * 4
    assert float(next(r for r in (row.split(",")[columns.index("exchange/energy_std")] for row in lines[1:]) if r)) > 0
    _, both = fit(2, [ReplicaExchange([1.0, 2.0], sampled_slots=2)])
    assert {s.chain for s in both} == {0, 1}


def test_the_estimated_noise_of_an_energy() -> None:
    """σ̂² against the variance of Ũ over many batches of one state; the chains stand at the same one.

    200 batches know their variance to 10 %, and the average over as many estimates is better known: tolerance 40 %.
    """
    found: list[float] = []
    energies: list[float] = []

    class Look(SamplerCallback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            energies.append(float(pl_module.chains.observed.energy[0]))
            assert exchange._variance is not None
            found.append(float(exchange._variance[0, 0]))

    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    module = BayesianModule(net=net, likelihood=Categorical(), lr=0.0, num_chains=2, chain_start="same", seed=1)
    exchange = ReplicaExchange([1.0, 2.0], smoothing=1.0)
    trainer = quiet_trainer(max_steps=200, callbacks=[SamplingSchedule(every_n_steps=50), exchange, Look()])
    trainer.fit(module, datamodule=Data(batch_size=12))
    variance = float(torch.tensor(energies).var())
    assert sum(found) / len(found) == pytest.approx(variance, rel=0.4)


def test_a_snapshot_takes_the_noise_out_of_the_estimate() -> None:
    """While the chain stands on its snapshot, an energy has no noise but the augmentation's, and none is estimated."""

    class Still(Data):
        def train_transform(self) -> Any:
            return None

    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    module = BayesianModule(net=net, likelihood=Categorical(), lr=0.0, num_chains=2, seed=1)
    exchange = ReplicaExchange([1.0, 2.0])
    trainer = quiet_trainer(
        max_steps=20, callbacks=[SamplingSchedule(every_n_steps=5), VarianceReducedEnergy(0, 1), exchange]
    )
    trainer.fit(module, datamodule=Still())
    assert exchange._variance is not None
    assert float(exchange._variance.max()) < 1e-6


def test_exploration_rests_and_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    def run(ckpt_path: Path | None) -> list[Any]:
        trainer = quiet_trainer(
            max_steps=40,
            enable_checkpointing=True,
            callbacks=[
                CyclicalSchedule(num_cycles=2, exploration=0.5, samples_per_cycle=4),
                SampleCollector(tmp_path / "samples"),
                ReplicaExchange([1.0, 1.5, 2.0]),
                pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=15, save_top_k=-1),
            ],
        )
        trainer.fit(seeded(lambda: Net(3)), datamodule=Data(), ckpt_path=ckpt_path)
        return list(Posterior.load(tmp_path / "samples", model=Net()).store)

    whole = run(None)
    again = run(tmp_path / "step=15.ckpt")
    assert [(s.step, s.chain, s.energy) for s in whole] == [(s.step, s.chain, s.energy) for s in again]
    assert all(torch.equal(t, again[-1].state[n]) for n, t in whole[-1].state.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperatures": [1.0]}, "two or more increasing positive numbers"),
        ({"temperatures": [2.0, 1.0]}, "two or more increasing positive numbers"),
        ({"temperatures": [1.0, 2.0], "lrs": [1.0]}, "lrs must be 2 positive numbers"),
        ({"temperatures": [1.0, 2.0], "correction": 0.5}, r"correction must be in \[1, inf\), got 0.5"),
        ({"temperatures": [1.0, 2.0], "smoothing": 0.0}, r"smoothing must be in \(0, 1\]"),
        ({"temperatures": [1.0, 2.0], "sampled_slots": 3}, "sampled_slots must be at most the 2 slots, got 3"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplicaExchange(**arguments)


def test_bad_runs() -> None:
    with pytest.raises(ValueError, match=r"a ladder of 2 temperatures, but the run has 3 chains: pass num_chains=2"):
        fit(3, [ReplicaExchange([1.0, 2.0])])
    contour = ContourGradient(ContourRules(zeta=0.5), warm_up_steps=10)
    with pytest.raises(ValueError, match="to cross the same barriers"):
        fit(2, [ReplicaExchange([1.0, 2.0]), contour])
    trainer = quiet_trainer(max_steps=4, callbacks=[ReplicaExchange([1.0, 2.0])])
    with pytest.raises(ValueError, match="sets each chain's temperature by its slot"):
        trainer.fit(Net(2, temperature=[1.0, 2.0]), datamodule=Data())
    trainer = quiet_trainer(max_steps=4, callbacks=[ReplicaExchange([1.0, 2.0])])
    with pytest.raises(ValueError, match="needs a temperature above 0"):
        trainer.fit(Net(2, temperature=0.0), datamodule=Data())
    module = TargetModule(GaussianMixture.two_modes(), num_chains=2, lr=0.1)
    trainer = quiet_trainer(max_steps=4, callbacks=[ReplicaExchange([1.0, 2.0])])
    with pytest.raises(ValueError, match="pass noise_variance, or use larger batches"):
        trainer.fit(module, datamodule=TargetDataModule())
