"""What every callback must keep to, whatever it does: a new one joins by one entry in `CALLBACKS`."""

import copy
import functools
import inspect
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc import (
    AMAGOLD,
    ChainStrategy,
    ContourRules,
    GaussianPrior,
    Patience,
    Posterior,
    UnderdampedLangevin,
)
from lightning_sgmcmc.callbacks import (
    EWSG,
    SWAG,
    AutoSampling,
    BayesianModelAverage,
    ChainHealth,
    ContourGradient,
    ControlVariates,
    CovarianceFriction,
    CyclicalSchedule,
    DeepEnsemble,
    LearningCoefficient,
    MCDropout,
    MetropolisTest,
    PosteriorDashboard,
    ReplicaExchange,
    RunSummary,
    SampleCollector,
    SamplerCallback,
    SamplingSchedule,
    VarianceReducedEnergy,
    WarmStart,
)
from lightning_sgmcmc.chains.chains import Chains
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.samplers import Sampler
from tests.support.comparisons import assert_same, differences
from tests.support.problems import Data, Net
from tests.support.small_run import loader
from tests.support.trainers import OneOfMany, quiet_trainer, seeded

pytestmark = pytest.mark.filterwarnings("ignore:.*BayesianModelAverage", "ignore:.*is biased")

STEPS, SAVED = 20, 10  # the checkpoint is in mid-epoch, of eight steps each


@dataclass(frozen=True)
class Case:
    """A callback, and what it needs."""

    make: Callable[[], pl.Callback]
    module: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    is_schedule: bool = False
    interacting: bool = False
    """Whether chains learn from one another, so that one of several is not the chain alone."""


CONTOUR = functools.partial(ContourGradient, ContourRules(zeta=0.75), first_edge=20.0, width=2.0, num_bins=30)
CALLBACKS = {
    "SamplingSchedule": Case(lambda: SamplingSchedule(burn_in_steps=2, every_n_steps=3), is_schedule=True),
    "CyclicalSchedule": Case(lambda: CyclicalSchedule(2, 0.5, 2), is_schedule=True),
    "DeepEnsemble": Case(DeepEnsemble, is_schedule=True),
    "DeepEnsemble, by AdamW": Case(
        lambda: DeepEnsemble(optimizer=torch.optim.AdamW, warm_up=0.2),
        trainer={"accumulate_grad_batches": 2},
        is_schedule=True,
    ),
    "AutoSampling": Case(lambda: AutoSampling(num_draws=14), is_schedule=True, interacting=True),
    "AutoSampling, both": Case(lambda: AutoSampling("both", num_draws=14), is_schedule=True, interacting=True),
    "SWAG": Case(lambda: SWAG(rank=3, num_draws=2, num_cycles=2, collection=0.6, every_n_steps=2), is_schedule=True),
    "MCDropout": Case(lambda: MCDropout(num_draws=2)),
    "SampleCollector": Case(lambda: SampleCollector(every_n_samples=2)),
    "BayesianModelAverage": Case(BayesianModelAverage),
    "ChainHealth": Case(lambda: ChainHealth(every_n_steps=2, warn=False)),
    **{
        f"LearningCoefficient, {loss}": Case(
            lambda loss=loss: LearningCoefficient(loss, warn=False),
            module={"prior": GaussianPrior(0.5, center="start")},
            trainer={"accumulate_grad_batches": 2} if loss == "step" else {},
        )
        for loss in ("own", "full", "step")
    },
    "MetropolisTest": Case(
        lambda: MetropolisTest(5),
        module={"sampler": functools.partial(AMAGOLD, friction=5.0), "lr": 0.01},
        trainer={"accumulate_grad_batches": 8},  # an epoch is a step
    ),
    "PosteriorDashboard": Case(lambda: PosteriorDashboard(every="end", figures=["tables"])),
    "RunSummary": Case(RunSummary),
    "ContourGradient": Case(CONTOUR),
    "ContourGradient, learning its range": Case(
        lambda: ContourGradient(ContourRules(zeta=0.75), num_bins=30, warm_up_steps=4),
        interacting=True,  # the range is that of all chains' energies
    ),
    "ContourGradient, interacting": Case(lambda: CONTOUR(interacting=True, exchange_every=3), interacting=True),
    "ReplicaExchange": Case(lambda: ReplicaExchange([1.0, 2.0], [1.0, 1.2]), interacting=True),
    "EWSG": Case(lambda: EWSG(1)),
    "EWSG, accumulating": Case(
        lambda: EWSG(2),
        module={"sampler": functools.partial(UnderdampedLangevin, friction=5.0), "lr": 0.003},
        trainer={"accumulate_grad_batches": 2},
    ),
    "ControlVariates": Case(lambda: ControlVariates(0, 2, energy=True)),
    "VarianceReducedEnergy": Case(lambda: VarianceReducedEnergy(0, 2)),
    "CovarianceFriction": Case(
        lambda: CovarianceFriction(0, 2),
        module={"sampler": functools.partial(UnderdampedLangevin, friction=2.0), "lr": 0.002},
    ),
    "WarmStart": Case(
        lambda: WarmStart(lr=0.3, epochs=3, early_stopping=Patience(3)),  # a chain has stopped at SAVED, one has not
        trainer={"accumulate_grad_batches": 2, "val_check_interval": 3, "gradient_clip_val": 1.0},
        interacting=True,  # chains wait for one another
    ),
}


@pytest.fixture(params=CALLBACKS.values(), ids=CALLBACKS.keys())
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@dataclass
class Run:
    """What is left of a fit."""

    samples: list[PosteriorSample]
    state: dict[str, Any]
    callback: pl.Callback
    module: Net
    checkpoint: Path


def fit(
    case: Case,
    folder: Path,
    callback: pl.Callback | None = None,
    chains: int = 2,
    ranks: int = 1,
    extra: Any = (),
    ckpt_path: Path | None = None,
    **options: Any,
) -> Run:
    callback = case.make() if callback is None else callback
    if isinstance(callback, SampleCollector):
        callback.dirpath = folder / "samples"
    module = seeded(lambda: Net(chains, **case.module))
    if ranks > 1:
        options |= {"strategy": ChainStrategy(start_method="fork"), "devices": ranks}
    trainer = quiet_trainer(
        max_steps=STEPS,
        enable_checkpointing=True,
        default_root_dir=folder,
        callbacks=[
            *([] if case.is_schedule else [SamplingSchedule(every_n_steps=5)]),
            *([] if isinstance(callback, SampleCollector) else [SampleCollector(folder / "samples")]),
            callback,
            pl.callbacks.ModelCheckpoint(
                folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1, enable_version_counter=False
            ),
            *extra,
        ],
        **(case.trainer | options),
    )
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path)
    samples = list(Posterior.load(folder / "samples", model=Net()).store)
    state = {name: value for name, value in copy.deepcopy(callback.state_dict()).items() if name != "run"}  # its own id
    return Run(samples, state, callback, module, folder / f"step={SAVED}.ckpt")


@functools.cache
def whole(name: str) -> Run:
    """Return the run that the others are compared with: two stacked chains, from beginning to end."""
    return fit(CALLBACKS[name], Path.cwd() / "whole")


def whole_of(case: Case) -> Run:
    return whole(next(name for name, one in CALLBACKS.items() if one is case))


def weights(samples: list[PosteriorSample]) -> list[Any]:
    return [(sample.log_weight, sample.bin) for sample in samples]


def assert_same_samples(run: Run, other: Run) -> None:
    assert len(run.samples) > 0
    assert_same(run.samples, other.samples)
    for (weight, place), (other_weight, other_place) in zip(
        weights(run.samples), weights(other.samples), strict=True
    ):  # a weight by validation data has the rounding of the batches in which processes share them
        assert (weight, place) == (pytest.approx(other_weight, abs=1e-5), other_place)


# -- going on ---------------------------------------------------------------------------------------------------------


def test_a_run_from_a_checkpoint_ends_as_the_run_without_a_stop(case: Case, tmp_path: Path) -> None:
    """The same samples, weights and state of the callback, from a checkpoint in mid-epoch that needs no unpickling."""
    expected = whole_of(case)
    torch.load(expected.checkpoint, weights_only=True)
    resumed = fit(case, expected.checkpoint.parent, ckpt_path=expected.checkpoint)
    assert_same_samples(expected, resumed)
    assert not differences(expected.state, resumed.state)


@pytest.mark.by_default(
    "CyclicalSchedule",
    "DeepEnsemble]",
    "AutoSampling, both",
    "MCDropout",
    "SampleCollector",
    "ChainHealth",
    "own]",
    "full]",
    "PosteriorDashboard",
    "ContourGradient]",
    "interacting",
    "EWSG, accumulating",
    "ControlVariates",
    "CovarianceFriction",
)
def test_a_second_fit_with_the_same_callback_begins_from_scratch(case: Case, tmp_path: Path) -> None:
    first = whole_of(case)
    second = fit(case, tmp_path, first.callback)
    assert_same_samples(first, second)
    assert not differences(*({**run.state, "path": ""} for run in (first, second)))  # a store has its own folder


# -- copies -----------------------------------------------------------------------------------------------------------


def check_copies(module: Net, callback: pl.Callback) -> None:
    for copied in (copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))):
        twin = copied(module)
        assert not differences(twin.state_dict(), module.state_dict())
        assert not differences(copied(callback).state_dict(), callback.state_dict())


def test_module_and_callback_can_be_copied_after_a_fit(case: Case) -> None:
    run = whole_of(case)
    assert_nothing_is_held(run.callback)
    check_copies(run.module, run.callback)


def reachable(thing: Any, seen: set[int], path: str) -> Iterator[str]:
    """Yield the places at which an object holds a part of a fit."""
    if id(thing) in seen or isinstance(thing, type | Tensor | str | int | float | torch.dtype | ModuleType):
        return
    seen.add(id(thing))
    if isinstance(thing, OF_A_FIT):
        yield f"{path}: {type(thing).__name__}"
        return
    inner: list[Any] = []
    if isinstance(thing, Mapping):
        inner = [*thing.items()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inner = [*enumerate(thing)]
    elif isinstance(thing, FunctionType):
        inner = [("closure", cell.cell_contents) for cell in thing.__closure__ or ()]
    elif isinstance(thing, MethodType):
        inner = [("self", thing.__self__)]
    inner += getattr(thing, "__dict__", {}).items()
    for name, part in inner:
        yield from reachable(part, seen, f"{path}.{name}")


OF_A_FIT = (pl.Trainer, pl.LightningModule, Chains, Sampler, pl.strategies.Strategy)
POSTERIOR = {"SampleCollector"}
"""What provides samples after the fit has the network that they are of."""


def assert_nothing_is_held(callback: pl.Callback) -> None:
    if type(callback).__name__ not in POSTERIOR:
        assert list(reachable(callback, set(), type(callback).__name__)) == []


class Fail(pl.Callback):
    """Ends a fit in one of its hooks."""

    def __init__(self, hook: str = "on_train_batch_end", error: type[BaseException] = KeyError) -> None:
        self.error = error

        def fail(trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            self.module = pl_module
            if trainer.global_step == 7 or hook in ("setup", "on_fit_start", "on_train_start"):
                raise error("the user's own mistake")

        vars(self)[hook] = fail


@pytest.mark.by_default(
    "SamplingSchedule",
    "by AdamW",
    "AutoSampling]",
    "SWAG",
    "BayesianModelAverage",
    "step]",
    "MetropolisTest",
    "RunSummary",
    "its range",
    "ReplicaExchange",
    "EWSG]",
    "VarianceReducedEnergy",
    "WarmStart",
)
def test_after_an_exception_they_can_be_copied_and_fitted_again(case: Case, tmp_path: Path) -> None:
    callback, fail = case.make(), Fail()
    with pytest.raises(KeyError, match="the user's own mistake"):
        fit(case, tmp_path / "failed", callback, extra=[fail])
    assert_nothing_is_held(callback)
    check_copies(fail.module, callback)
    assert_same_samples(whole_of(case), fit(case, tmp_path / "again", callback))


HOOKS = ("on_train_start", "on_before_optimizer_step", "on_train_batch_start")


@pytest.mark.by_default("EWSG", "ContourGradient-", "WarmStart", "CovarianceFriction")
@pytest.mark.parametrize(("hook", "error"), [*((hook, KeyError) for hook in HOOKS), (HOOKS[1], KeyboardInterrupt)])
def test_nothing_is_held_however_a_fit_ends(case: Case, hook: str, error: Any, tmp_path: Path) -> None:
    """After an error in any hook, and after Ctrl-C."""
    callback, fail = case.make(), Fail(hook, error)
    with pytest.raises((error, SystemExit)):
        fit(case, tmp_path / "failed", callback, extra=[fail])
    assert_nothing_is_held(callback)
    check_copies(fail.module, callback)


# -- chains -----------------------------------------------------------------------------------------------------------


@pytest.mark.by_default(
    "ContourGradient, interacting",
    "ReplicaExchange",
    "EWSG, accumulating",
    "AutoSampling, both",
)
def test_two_ranks_are_two_stacked_chains(case: Case, tmp_path: Path) -> None:
    """Bit for bit, in real processes (gloo); and a checkpoint of either layout goes on in the other."""
    expected = whole_of(case)
    ranks = fit(case, tmp_path, chains=1, ranks=2)
    assert_same_samples(expected, ranks)
    assert_same_samples(expected, fit(case, tmp_path, ckpt_path=ranks.checkpoint))
    shutil.copytree(expected.checkpoint.parent / "samples", tmp_path / "copy" / "samples")
    assert_same_samples(expected, fit(case, tmp_path / "copy", chains=1, ranks=2, ckpt_path=expected.checkpoint))


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in CALLBACKS.items() if not case.interacting]
)
def test_a_stacked_chain_is_the_chain_alone(case: Case, tmp_path: Path) -> None:
    """Bit for bit, where chains do not interact."""
    expected = whole_of(case).samples
    for chain in range(2):
        alone = fit(case, tmp_path / str(chain), chains=1, strategy=OneOfMany(chain, 2)).samples
        own = [sample for sample in expected if sample.chain == chain]
        assert_same(alone, own)
        assert weights(alone) == weights(own)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_argument_of_a_callback_that_changes_the_chain_is_a_setting(name: str) -> None:
    callback = CALLBACKS[name].make()
    assert isinstance(callback, SamplerCallback)
    arguments, settings = inspect.signature(type(callback)).parameters, callback.settings()
    if callback.changes_chain:
        (part,) = (key for key in settings if "." not in key)
        assert settings.keys() == {part, *(f"{part}.{argument}" for argument in arguments)}


CHANGED: dict[str, tuple[Callable[[], pl.Callback], str]] = {
    "EWSG": (lambda: EWSG(1, "zero"), "ewsg.guess unchanged there, zero here"),
    "ContourGradient": (lambda: CONTOUR(sample_energy="step"), "contour.sample_energy own there, step here"),
    "MCDropout": (lambda: MCDropout(num_draws=3), "mc_dropout.num_draws 2 there, 3 here"),
    "WarmStart": (
        lambda: WarmStart(lr=0.2, epochs=3, early_stopping=Patience(3)),
        "warm_start.lr 0.3 there, 0.2 here",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_resume_with_another_argument_is_refused(name: str) -> None:
    case, (make, listed) = CALLBACKS[name], CHANGED[name]
    saved = whole(name).checkpoint
    with pytest.raises(ValueError, match=rf"other settings \({re.escape(listed)}\)"):
        fit(case, saved.parent, make(), ckpt_path=saved)


# -- refusal ----------------------------------------------------------------------------------------------------------


class NotBayesian(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [*(case.make for case in CALLBACKS.values()), SamplerCallback])
def test_a_plain_lightning_module_is_refused(make: Any) -> None:
    callback = make()
    name = type(callback).__name__
    with pytest.raises(TypeError, match=rf"{name} .*BayesianModule.*NotBayesian.*BayesianModule\(net=…\)"):
        quiet_trainer(max_epochs=1, callbacks=[callback]).fit(NotBayesian(), loader())
