"""The temperature of samples: what a store has of it, and the warning of exports for the posterior alone."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, Gaussian, Posterior, SampleWriter
from lightning_sgmcmc.callbacks import CyclicalSchedule, ReplicaExchange, SampleCollector, SamplingSchedule
from lightning_sgmcmc.posterior.manifest import MANIFEST
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:More chains", "ignore:.*have unequal numbers")

x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True)
COLD = "of the {} samples are not of the posterior, which has temperature 1, but of temperature {}, so ArviZ's"


def fitted(
    path: Path | None, temperature: float | tuple[float, ...] = 1.0, schedule: Any = None, *others: Any, chains: int = 1
) -> Posterior:
    module = BayesianModule(nn.Linear(3, 1), Gaussian(0.5), lr=0.01, temperature=temperature, num_chains=chains)
    collector = SampleCollector(path, in_memory=path is None)
    callbacks = [schedule or SamplingSchedule(burn_in_steps=4, every_n_steps=4), collector, *others]
    quiet_trainer(max_epochs=3, callbacks=callbacks).fit(module, DataLoader(TensorDataset(x, y), 10))
    posterior: Posterior = module.posterior
    return posterior


def known(posterior: Posterior) -> list[float]:
    """Return the temperatures of records, which are those of samples."""
    found = [record.temperature for record in posterior.store.records]
    assert found == [sample.temperature for sample in posterior]
    return found


@pytest.mark.slow
def test_a_fresh_process_is_told_that_samples_are_cold(tmp_path: Path) -> None:
    fitted(tmp_path / "samples", 0.1)
    program = (
        "import sys, torch, warnings; from lightning_sgmcmc import Posterior; "
        "posterior = Posterior.load(sys.argv[1]); data = [(torch.ones(4, 3), torch.ones(4, 1))]; "
        "densities = posterior.log_likelihood(data); posterior.to_arviz(log_likelihood=densities)"
    )
    told = subprocess.run([sys.executable, "-c", program, str(tmp_path / "samples")], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert told.stderr.count("2 " + COLD.format(2, 0.1) + " loo and waic") == 1, told.stderr
    assert "use posterior.evaluate(val)" in told.stderr


def test_samples_of_the_posterior_and_older_stores_are_not_warned_of(tmp_path: Path) -> None:
    fitted(tmp_path / "samples")
    lines = (tmp_path / "samples" / MANIFEST).read_text().splitlines()
    assert all("temperature" not in json.loads(line) for line in lines), "as in older stores, where it is unknown"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "More chains")
        Posterior.load(tmp_path / "samples").to_arviz()


def test_the_temperature_survives_what_is_done_to_samples(tmp_path: Path) -> None:
    cooled = SamplingSchedule(burn_in_steps=4, every_n_steps=4, temperature=0.1)
    cold, hot = fitted(tmp_path / "cold", 1.0, cooled), fitted(None)
    assert known(cold) == [0.1, 0.1]
    cold.save(tmp_path / "saved")
    cold.save(tmp_path / "narrow", dtype="bfloat16")
    for name in ("cold", "saved", "narrow"):
        assert known(Posterior.load(tmp_path / name)) == [0.1, 0.1], name
    for one in (cold, Posterior.load(tmp_path / "saved")):
        assert known(one[1:]) == known(one.thin(count=1)) == [0.1]
        assert known(one.resample(5)) == [0.1] * 5
        assert known(one.in_memory()) == [0.1, 0.1]
        assert known(one.compress(1, [(x, y)])) == [0.1]
    merged = Posterior.merge(cold, hot)
    assert known(merged) == [0.1, 0.1, 1, 1]
    with pytest.warns(UserWarning, match="2 " + COLD.format(4, 0.1) + " intervals"):
        merged.to_arviz()
    assert known(cold.extend([nn.Linear(3, 1)])) == [0.1, 0.1, 1], "unknown for networks from elsewhere"
    merged.save(tmp_path / "merged")
    assert known(Posterior.load(tmp_path / "merged")) == [0.1, 0.1, 1, 1]


def test_a_sample_has_the_temperature_of_its_own_step() -> None:
    cooled = SamplingSchedule(burn_in_steps=0, every_n_steps=4, temperature=0.5, burn_in_temperature=0.0)
    assert known(fitted(None, 1.0, cooled)) == [0.5] * 3
    assert known(fitted(None, 1.0, CyclicalSchedule(num_cycles=2, exploration=0.5, samples_per_cycle=1))) == [1, 1]
    assert known(fitted(None, 0.0)) == [0, 0], "an ensemble of optima"
    assert known(fitted(None, (0.1, 1.0), chains=2)) == [0.1, 1, 0.1, 1]
    ladder = ReplicaExchange(temperatures=[1.0, 4.0], lrs=[1.0, 1.2], noise_variance=0.0)
    assert set(known(fitted(None, 1.0, None, ladder, chains=2))) == {1.0}, "only the coldest chain is drawn"


def test_a_loop_of_ones_own_writes_them(tmp_path: Path) -> None:
    net = nn.Linear(3, 1)
    sampler = SGLD(net.parameters(), lr=0.01, num_data=len(x), temperature=0.3)
    schedule = SamplingSchedule(burn_in_steps=4, every_n_steps=4, burn_in_temperature=0.0)
    writer = SampleWriter(
        net, Gaussian(0.5), sampler=sampler, schedule=schedule, steps=12, dirpath=tmp_path / "samples"
    )
    for _ in range(12):
        sampler.zero_grad()
        writer.loss(net(x), y).backward()
        sampler.step()
    assert known(writer.posterior) == [0.3, 0.3]


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_resumed_run_keeps_them(tmp_path: Path, on_disk: bool) -> None:
    path, loader = tmp_path / "samples" if on_disk else None, DataLoader(TensorDataset(x, y), 10)
    for epochs in (3, 6):
        module = BayesianModule(nn.Linear(3, 1), Gaussian(0.5), lr=0.01, temperature=0.1)
        callbacks = [SamplingSchedule(every_n_steps=4), SampleCollector(path, in_memory=path is None)]
        trainer = quiet_trainer(max_epochs=epochs, callbacks=callbacks)
        trainer.fit(module, loader, ckpt_path=tmp_path / "last.ckpt" if epochs == 6 else None)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert known(module.posterior) == [0.1] * 6
