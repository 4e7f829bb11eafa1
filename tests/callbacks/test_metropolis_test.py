"""MetropolisTest in a fit: the exact law, draws after tests only, a resume within a trajectory, logs, and refusals."""

import csv
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import (
    AMAGOLD,
    GGMC,
    SGHMC,
    BayesianModule,
    ContourRules,
    CyclicOrder,
    Gaussian,
    GaussianPrior,
    HierarchicalPrior,
    PolynomialDecay,
    ResumableLoader,
    SymmetricOrder,
)
from lightning_sgmcmc.callbacks import (
    EWSG,
    ChainHealth,
    ContourGradient,
    ControlVariates,
    CyclicalSchedule,
    MCDropout,
    MetropolisTest,
    ReplicaExchange,
    SampleCollector,
    SamplingSchedule,
    WarmStart,
)
from tests.support.comparisons import assert_same, differences
from tests.support.trainers import quiet_trainer

COUNT, BATCH = 12, 3
AMAGOLD_15, GGMC_15 = (functools.partial(cls, friction=1.5) for cls in (AMAGOLD, GGMC))


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, 2, generator=generator)
    return x, x @ torch.tensor([[1.0], [-0.5]]) + torch.randn(COUNT, 1, generator=generator)


def loader(batch_size: int = BATCH, **options: Any) -> ResumableLoader:
    return ResumableLoader(TensorDataset(*tensors()), batch_size, **options)


def regression(chains: int = 2, net: nn.Module | None = None, **options: Any) -> BayesianModule:
    """Return conjugate linear regression with two weights."""
    torch.manual_seed(0)
    chosen = {"prior": GaussianPrior(1.0), "sampler": AMAGOLD_15, "lr": 0.12, "seed": 5} | options
    net = nn.Linear(2, 1, bias=False) if net is None else net
    return BayesianModule(net, Gaussian(std=1.0), num_chains=chains, **chosen)


def fit(module: BayesianModule, *callbacks: pl.Callback, data: Any = None, **options: Any) -> Any:
    trainer = quiet_trainer(**({"max_epochs": 12} | options), callbacks=list(callbacks))
    trainer.fit(module, loader() if data is None else data, ckpt_path=options.pop("ckpt_path", None))
    return trainer


# -- law --------------------------------------------------------------------------------------------------------------


def moments(callbacks: list[pl.Callback], chains: int = 80) -> tuple[float, float]:
    """Return how many standard errors the draws' squared deviations are off the posterior's, and their ratio."""
    x, y = (tensor.double() for tensor in tensors())
    covariance = torch.linalg.inv(x.T @ x + torch.eye(2))
    mean = (covariance @ x.T @ y)[:, 0]
    collector = SampleCollector(in_memory=True)
    module = regression(chains, lr=0.08, chain_execution="vmap", chain_start="same")
    with torch.no_grad():
        module.net.weight.copy_(mean)
    fit(module, SamplingSchedule(burn_in_epochs=10, every_n_epochs=1), *callbacks, collector, max_epochs=70)
    assert collector.posterior is not None
    found = torch.zeros(chains, dtype=torch.float64)
    for sample in collector.posterior.store:
        centred = sample.state["net.weight"].double()[0] - mean
        found[sample.chain] += centred @ torch.linalg.inv(covariance) @ centred / 2 / 60
    return float((found.mean() - 1) / (found.std() / math.sqrt(chains))), float(found.mean())


@pytest.mark.slow
def test_mini_batches_have_the_exact_law() -> None:
    """Within 4.5 standard errors (false alarm 1e-5) in one seed, where the steps alone are too hot."""
    callback = MetropolisTest()
    z, _ = moments([callback])
    assert abs(z) < 4.5
    rates = callback.acceptance_rate
    assert rates is not None
    assert rates.shape == (80,)
    assert 0.3 < float(rates.mean()) < 0.8
    with pytest.warns(match="without a MetropolisTest"):
        _, ratio = moments([])
    assert ratio > 1.2


# -- trajectories -----------------------------------------------------------------------------------------------------


class Watch(pl.Callback):
    """Records, before and after each step, whether a trajectory is on, and the weights."""

    def __init__(self) -> None:
        self.on: list[bool] = []
        self.places: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.on.append(pl_module.sampler.work is not None)
        self.places.append(pl_module.net.weight.detach().clone())


@pytest.mark.parametrize("sampler", [AMAGOLD_15, GGMC_15])
def test_samples_are_the_states_after_tests(sampler: Any) -> None:
    """A rejected trajectory repeats its start bit for bit; acceptances are counted in the sampling stage."""
    watch, callback, collector = Watch(), MetropolisTest(), SampleCollector(in_memory=True)
    fit(regression(sampler=sampler, lr=0.1), SamplingSchedule(every_n_epochs=1), callback, watch, collector)
    assert watch.on == [True, True, True, False] * 12
    assert collector.posterior is not None
    ends, repeated = watch.places[3::4], 0
    for sample in collector.posterior.store:
        epoch = sample.step // 4 - 1
        assert torch.equal(sample.state["net.weight"], ends[epoch][sample.chain])
        repeated += epoch > 0 and torch.equal(ends[epoch][sample.chain], ends[epoch - 1][sample.chain])
    assert 0 < repeated < 22
    rates = callback.acceptance_rate
    assert rates is not None
    assert 0 < float(rates.min()) <= float(rates.max()) < 1


def test_steps_at_temperature_0_are_not_tested() -> None:
    watch, callback = Watch(), MetropolisTest(2)
    schedule = SamplingSchedule(burn_in_steps=4, every_n_steps=4, burn_in_temperature=0.0)
    fit(regression(), schedule, callback, watch, max_epochs=2)
    assert watch.on == [False] * 4 + [True, False] * 2


def test_trajectories_begin_after_a_warm_start() -> None:
    watch = Watch()
    fit(
        regression(),
        WarmStart(lr=0.1, epochs=2),
        SamplingSchedule(every_n_epochs=1),
        MetropolisTest(),
        watch,
        max_epochs=4,
    )
    assert watch.on == [False] * 8 + [True, True, True, False] * 2
    with pytest.raises(ValueError, match=r"would begin with step 3 of an epoch.*let the warm start end"):
        fit(
            regression(),
            WarmStart(lr=0.1, steps=6),
            SamplingSchedule(every_n_steps=4),
            MetropolisTest(),
            max_epochs=4,
        )


def test_accumulated_steps_are_one(tmp_path: Path) -> None:
    """Four batches a step, and trajectories of two steps, over two epochs."""
    watch = Watch()
    fit(regression(), SamplingSchedule(every_n_steps=2), MetropolisTest(2), watch, accumulate_grad_batches=4)
    assert watch.on == ([True] * 7 + [False]) * 6


@pytest.mark.parametrize("sampler", [AMAGOLD_15, GGMC_15])
@pytest.mark.parametrize("steps", [18, 20])
def test_a_resume_within_a_trajectory_is_exact(sampler: Any, steps: int, tmp_path: Path) -> None:
    """The checkpoint of step 18 is in the middle of a trajectory, that of step 20 at its end."""

    def run(folder: str, ckpt_path: Path | None = None) -> tuple[Any, Any]:
        collector, callback = SampleCollector(in_memory=True), MetropolisTest()
        saving = pl.callbacks.ModelCheckpoint(
            tmp_path / folder, filename="{step}", every_n_train_steps=steps, save_top_k=-1
        )
        module = regression(sampler=sampler, lr=0.1)
        trainer = quiet_trainer(
            max_epochs=12,
            enable_checkpointing=True,
            callbacks=[SamplingSchedule(every_n_epochs=1), collector, callback, saving],
        )
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
        assert collector.posterior is not None
        return list(collector.posterior.store), (module.state_dict(), callback.acceptance_rate)

    whole = run("whole")
    resumed = run("resumed", tmp_path / "whole" / f"step={steps}.ckpt")
    assert_same(*(samples for samples, _ in (whole, resumed)))
    assert not differences(whole[1], resumed[1])
    saved = torch.load(tmp_path / "whole" / f"step={steps}.ckpt", weights_only=True)["callbacks"]["MetropolisTest"]
    assert ("work" in saved) == (steps == 18)


def test_the_rates_are_logged_at_tests(tmp_path: Path) -> None:
    """Read back: a test is logged once `log_every_n_steps` steps have passed, with the mean over tests and chains."""
    callback = MetropolisTest(2)
    logger = CSVLogger(tmp_path)
    fit(regression(), SamplingSchedule(every_n_steps=2), callback, logger=logger, log_every_n_steps=6)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("metropolis/acceptance_rate")]
    assert [int(row["step"]) for row in rows] == list(range(6, 49, 6))
    rates = [float(row["metropolis/acceptance_rate"]) for row in rows]
    assert callback.acceptance_rate is not None
    assert sum(rates) / len(rates) == pytest.approx(float(callback.acceptance_rate.mean()), rel=1e-6)
    assert all(float(row["metropolis/log_acceptance"]) < 5 for row in rows)


def test_a_chain_that_moves_seldom_is_warned_of() -> None:
    with pytest.warns(match=r"MetropolisTest accepted .* moved seldom: use a smaller lr"):
        fit(regression(lr=0.9), SamplingSchedule(every_n_epochs=1), MetropolisTest())


def test_chain_health_reports_the_acceptance() -> None:
    callback = MetropolisTest()
    module = regression(chains=3)
    fit(module, SamplingSchedule(burn_in_epochs=2, every_n_epochs=1), callback, ChainHealth(every_n_steps=1))
    assert callback.acceptance_rate is not None
    assert module.health is not None
    assert module.health.run.acceptance == pytest.approx(float(callback.acceptance_rate.mean()))


# -- refusals ---------------------------------------------------------------------------------------------------------

PLAIN = SamplingSchedule(every_n_epochs=1)
CONTOUR = functools.partial(ContourGradient, ContourRules(zeta=0.5), first_edge=5.0, width=1.0, num_bins=10)


@pytest.mark.parametrize(
    ("options", "callbacks", "data", "message"),
    [
        ({"sampler": SGHMC}, [], None, "SGHMC has none: use sampler=AMAGOLD"),
        (
            {"sampler": GGMC},
            [MetropolisTest(1)],
            None,
            "1 step does not move with GGMC: pass every_n_steps",
        ),
        ({}, [CONTOUR()], None, "ContourGradient cannot be combined: ContourGradient changes the sampled law"),
        ({}, [ReplicaExchange([1.0, 2.0])], None, "ReplicaExchange cannot be combined"),
        ({}, [EWSG(1)], None, "EWSG cannot be combined"),
        ({}, [ControlVariates()], None, "ControlVariates cannot be combined"),
        ({"net": nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.1))}, [MCDropout()], None, "MCDropout cannot be combined"),
        ({"prior": HierarchicalPrior()}, [], None, "HierarchicalPrior draws its scales between steps"),
        ({"temperature": 0.0}, [], None, "needs a temperature above 0"),
        ({}, [], loader(order=CyclicOrder), "same order in every epoch: shuffle"),
        ({}, [], DataLoader(TensorDataset(*tensors()), BATCH), "same order in every epoch: shuffle"),
        ({}, [], loader(order=SymmetricOrder), "pass every_n_steps=8"),
        ({}, [MetropolisTest(3)], None, "takes 3 batches, which cut an epoch of 4"),
        ({}, [SamplingSchedule(every_n_steps=2)], None, "draws a sample at step 2, within a trajectory of 4 steps"),
        ({}, [SamplingSchedule(burn_in_steps=2, every_n_steps=4)], None, "draws a sample at step 6"),
        (
            {},
            [SamplingSchedule(every_n_epochs=1, lr_decay=PolynomialDecay(0.1))],
            None,
            "changes the step size or the temperature with step 2",
        ),
        (
            {},
            [SamplingSchedule(burn_in_steps=6, every_n_steps=2, burn_in_temperature=0.5)],
            None,
            "changes the step size or the temperature with step 7, within",
        ),
        ({}, [CyclicalSchedule(2, 0.5, 1)], None, "CyclicalSchedule changes the step size"),
        ({}, [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})], None, "set the trainer's accumulate_grad"),
    ],
)
def test_what_cannot_be_exact_is_refused(options: Any, callbacks: Any, data: Any, message: str) -> None:
    schedule = next((c for c in callbacks if isinstance(c, SamplingSchedule | CyclicalSchedule)), PLAIN)
    test = next((c for c in callbacks if isinstance(c, MetropolisTest)), MetropolisTest())
    others = [c for c in callbacks if c not in (schedule, test)]
    with pytest.raises(ValueError, match=message):
        fit(regression(**options), schedule, test, *others, data=data)


def test_arguments_and_the_schedule_are_checked() -> None:
    with pytest.raises(ValueError, match="every_n_steps must be"):
        MetropolisTest(0)
    with pytest.raises(ValueError, match="MetropolisTest would never see a sample"):
        fit(regression(), MetropolisTest())


@pytest.mark.parametrize("order", [SymmetricOrder, None])
def test_what_is_exact_is_allowed(order: Any) -> None:
    """A whole pair of symmetric sweeps; and independent batches in trajectories of any length."""
    data: Any
    if order is None:
        dataset = TensorDataset(*tensors())
        data = DataLoader(dataset, BATCH, sampler=torch.utils.data.RandomSampler(dataset, replacement=True))
        fit(regression(), SamplingSchedule(every_n_steps=3), MetropolisTest(3), data=data, max_epochs=3)
    else:
        fit(regression(), SamplingSchedule(every_n_steps=8), MetropolisTest(8), data=loader(order=order), max_epochs=4)


def test_laws_that_are_not_quite_the_posterior_are_warned_of() -> None:
    with pytest.warns(match="in evaluation mode, so with dropout"):
        fit(regression(net=nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.1))), PLAIN, MetropolisTest(), max_epochs=2)
    with pytest.warns(match=r"fewer data than the others.*drop_last=True"):
        fit(regression(), PLAIN, MetropolisTest(), data=loader(5), max_epochs=2)
    with pytest.warns(match="AMAGOLD takes the steps of OBABO without a MetropolisTest"):
        fit(regression(), PLAIN, max_epochs=2)
