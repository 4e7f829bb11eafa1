"""Mistakes with numbers, trainers, networks and data: which are refused, when, and in which words.

Those of callbacks and of the module's parts are in `tests/callbacks/test_misuse.py`.
"""

import functools
import math
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as lightning_callbacks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_sgmcmc import (
    SGHMC,
    SGLD,
    SGNHT,
    Annealing,
    BayesianModule,
    Bernoulli,
    Gaussian,
    GaussianPrior,
    LaplacePrior,
    PolynomialDecay,
    Posterior,
    StudentTPrior,
    UnderdampedLangevin,
    pSGLD,
)
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    CyclicalSchedule,
    RunSummary,
    SampleCollector,
    SamplerCallback,
    SamplingSchedule,
)
from lightning_sgmcmc.datamodules import DatasetDataModule, DigitsDataModule, MNISTDataModule
from tests.support.problems import Data, Net
from tests.support.processes import in_a_process
from tests.support.small_run import COUNT, loader, module, tensors
from tests.support.small_run import fit_every_step as fit
from tests.support.trainers import quiet_trainer


def test_the_run_that_the_others_are_mistakes_of() -> None:
    model = module()
    fit(model, SampleCollector(in_memory=True), BayesianModelAverage(), val=loader())
    assert model.posterior is not None
    assert len(model.posterior) == 6


PARAMETER = [nn.Parameter(torch.zeros(2))]

CONSTRUCTION: list[tuple[Any, type[Exception], str]] = [
    # numbers
    (lambda: module(lr="1e-3"), TypeError, "lr must be a number, got '1e-3' of type str"),
    (lambda: module(lr=True), TypeError, "lr must be a number, got True of type bool"),
    (lambda: module(lr=math.nan), ValueError, "lr must be a finite number and not negative, got nan"),
    (lambda: module(temperature="1"), TypeError, "temperature must be a number, got '1' of type str"),
    (lambda: module(num_data=24.0), TypeError, "num_data must be a whole number, got 24.0 of type float"),
    (lambda: module(num_data="24"), TypeError, "num_data must be a whole number, got '24' of type str"),
    (lambda: module(num_chains=1.0), TypeError, "num_chains must be a whole number, got 1.0 of type float"),
    (lambda: module(seed=-1), ValueError, "seed must be at least 0, got -1"),
    (lambda: module(seed=0.5), TypeError, "seed must be a whole number, got 0.5 of type float"),
    (lambda: module(nonfinite_energy="abort"), ValueError, "nonfinite_energy must be 'stop' or 'skip', got 'abort'"),
    (lambda: module(max_skipped_in_a_row=0), ValueError, "max_skipped_in_a_row must be at least 1, got 0"),
    (lambda: CyclicalSchedule(num_cycles=2.5), TypeError, "num_cycles must be a whole number, got 2.5"),  # type: ignore[arg-type]
    (lambda: CyclicalSchedule(samples_per_cycle="3"), TypeError, "samples_per_cycle must be a whole number, got '3'"),  # type: ignore[arg-type]
    (lambda: SamplingSchedule(every_n_steps=0.5), TypeError, "every_n_steps must be a whole number, got 0.5"),  # type: ignore[arg-type]
    (lambda: SamplingSchedule(every_n_epochs="1"), TypeError, "every_n_epochs must be a whole number, got '1'"),  # type: ignore[arg-type]
    (lambda: SampleCollector(max_samples=1.5), TypeError, "max_samples must be a whole number, got 1.5"),  # type: ignore[arg-type]
    (lambda: SampleCollector(every_n_samples=0), ValueError, "every_n_samples must be at least 1, got 0"),
    (lambda: PolynomialDecay(-1.0), ValueError, "a must be a finite number and not negative, got -1.0"),
    (lambda: Annealing(0.5), ValueError, r"divisor must be in \[1, inf\), got 0.5"),
    # priors and likelihoods
    (lambda: GaussianPrior(0.0), ValueError, r"the prior's std must be a positive number, got 0.0"),
    (
        lambda: GaussianPrior({"*.bias": -1.0}),
        ValueError,
        r"std must be a positive .* got -1.0 for '\*.bias'",
    ),
    (lambda: LaplacePrior(math.nan), ValueError, "the prior's scale must be a positive number, got nan"),
    (lambda: StudentTPrior(df=0.0), ValueError, r"the prior's df must be in \(0, inf\), got 0.0"),
    (lambda: Gaussian(std=0.0), ValueError, r"std must be in \(0, inf\), got 0.0"),
    (lambda: Gaussian(std=math.inf), ValueError, r"std must be in \(0, inf\), got inf"),
    # samplers
    (lambda: SGLD(PARAMETER), ValueError, "SGLD needs num_data, the number of training data"),
    (lambda: SGLD(PARAMETER, num_data=0), ValueError, "num_data must be at least 1, got 0"),
    (lambda: SGHMC(PARAMETER, lr=-1.0, num_data=9), ValueError, "lr must be a finite number and not negative"),
    (lambda: SGHMC(PARAMETER, friction=2.0, num_data=9), ValueError, "friction"),
    (lambda: pSGLD(PARAMETER, num_data=9, temperature=-1.0), ValueError, "temperature must be a finite number"),
    (lambda: SGNHT(PARAMETER, num_data=9, temperature=math.nan), ValueError, "temperature must be a finite number"),
    (lambda: UnderdampedLangevin(PARAMETER, lr=3.0, num_data=9), ValueError, "must be below 2 for a stable step"),
    (lambda: SGLD([nn.Parameter(torch.zeros(2).half())], num_data=9), ValueError, "parameters in half precision lose"),
    # data
    (lambda: DatasetDataModule(TensorDataset(*tensors()), batch_size=0), ValueError, "batch_size must be at least 1"),
    (
        lambda: DatasetDataModule(TensorDataset(*tensors()), num_data=25),
        ValueError,
        "num_data=25 contradicts the training data, of which there are 24: leave it out",
    ),
    (lambda: DigitsDataModule().num_data, RuntimeError, r"DigitsDataModule has no data before setup\(\)"),
    (lambda: Posterior.load("/nowhere"), FileNotFoundError, "no sample store at /nowhere: there is no manifest"),
]


@pytest.mark.parametrize(("make", "error", "message"), CONSTRUCTION)
def test_construction(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        make()
    assert "\n" not in str(caught.value), "one sentence"


# -- trainers ---------------------------------------------------------------------------------------------------------


def foreign(base: type, name: str) -> Any:
    """Return an object whose class says that it is of `lightning.pytorch`."""
    kind = types.new_class(name, (base,))
    kind.__module__ = "lightning.pytorch.somewhere"
    return types.new_class("Mine" + name, (kind,))()


class Finetuning(lightning_callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        pass

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        pass


class Freeze(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            pl_module.net.bias.requires_grad_(False)


TRAINERS: list[tuple[dict[str, Any], list[Any], type[Exception], str]] = [
    (
        {},
        [lambda: foreign(pl.Callback, "Callback")],
        TypeError,
        "MineCallback comes from lightning.pytorch: this process uses pytorch_lightning",
    ),
    (
        {"logger": lambda: foreign(pl.loggers.logger.DummyLogger, "Logger")},
        [],
        TypeError,
        "MineLogger comes from lightning.pytorch: this process uses pytorch_lightning",
    ),
    (
        {},
        [lambda: lightning_callbacks.StochasticWeightAveraging(swa_lrs=0.1)],
        ValueError,
        "StochasticWeightAveraging averages weights and sets the step size, so the chain samples nothing: remove it",
    ),
    (
        {},
        [Finetuning],
        ValueError,
        "Finetuning freezes and unfreezes parameters during the run, so the chain's state space changes",
    ),
    (
        {},
        [lambda: lightning_callbacks.ModelPruning("l1_unstructured", amount=0.5)],
        ValueError,
        "ModelPruning sets weights to zero during the run",
    ),
    (
        {"overfit_batches": 1},
        [],
        ValueError,
        "overfit_batches=1 repeats a few batches, whereas N counts",
    ),
    ({"precision": "bf16-true"}, [], ValueError, "parameters in half precision lose the injected noise to rounding"),
    ({"precision": "16-true"}, [], ValueError, "parameters in half precision lose the injected noise to rounding"),
    ({}, [lambda: CyclicalSchedule()], ValueError, "a run has one schedule, got CyclicalSchedule and SamplingSchedule"),
    (
        {},
        [Freeze],
        RuntimeError,
        "'net.bias' was frozen during the run, so this state is not a posterior sample",
    ),
]


@pytest.mark.parametrize(("options", "callbacks", "error", "message"), TRAINERS)
def test_trainers(options: Any, callbacks: Any, error: Any, message: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    made = {name: value() if callable(value) else value for name, value in options.items()}
    model = module()
    with pytest.raises(error, match=message) as caught:
        fit(model, *(make() for make in callbacks), **made)
    assert "\n" not in str(caught.value)
    if Freeze not in callbacks:
        assert model.chains.energies is None
        assert not list(tmp_path.rglob("*.safetensors")), "before the first sample"


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_sharding_strategies(name: str) -> None:
    from lightning_sgmcmc.fit.checks import _check_strategy

    kind = types.new_class(name)
    with pytest.raises(ValueError, match=f"{name} shards the parameters, but a chain's noise, prior and samples"):
        _check_strategy(types.new_class(name, (kind,))())


def test_fsdp2_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """Lightning's strategy of it runs on a CPU, in a process of its own."""

    def run() -> None:
        with pytest.raises(ValueError, match=r"ModelParallelStrategy shards the parameters, .* use strategy='chains' "):
            quiet_trainer(max_steps=1, strategy=pl.strategies.ModelParallelStrategy()).fit(Net(2), datamodule=Data())

    assert in_a_process(run, tmp_path / "said") == 0, (tmp_path / "said").read_text()[-2000:]


def test_a_module_of_the_other_namespace() -> None:
    class Other(pl.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.zeros(())

        def configure_optimizers(self) -> Any:
            return None

    Other.__module__ = "lightning.pytorch.demos"
    with pytest.raises(TypeError, match=r"Other comes from lightning.pytorch.* SGMCMC_LIGHTNING=lightning"):
        fit(Other(), callbacks=[SamplerCallback()])


def test_a_datamodule_of_the_other_namespace() -> None:
    data = DatasetDataModule(TensorDataset(*tensors()))
    data.__class__ = type("Data", (DatasetDataModule,), {"__module__": "lightning.pytorch.core"})
    with pytest.raises(TypeError, match=r"Data comes from lightning.pytorch.* SGMCMC_LIGHTNING=lightning"):
        quiet_trainer(max_epochs=1).fit(module(), datamodule=data)


@pytest.mark.parametrize(
    ("options", "callbacks", "message"),
    [
        (
            {"gradient_clip_val": 1.0},
            [],
            r"gradient_clip_val=1.0 bounds the drift of the chain: .* biased\. Raise it until few",
        ),
        ({"limit_train_batches": 2}, [], "Only the first 2 of 3 batches are used, in the same order every epoch"),
        (
            {"callbacks": [CyclicalSchedule(1, 0.0, 1), pl.callbacks.Timer("00:01:00:00")]},
            [],
            "Timer may end the run before its 1 cycles over 6 steps are complete",
        ),
    ],
)
def test_what_is_allowed_with_a_warning(options: Any, callbacks: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        fit(module(), *callbacks, **options)


def test_a_shuffled_validation_loader_is_refused_before_the_first_step() -> None:
    model = module()
    with pytest.raises(ValueError, match=r"the validation loader shuffles, so predictions .* shuffle=False"):
        fit(model, BayesianModelAverage(), val=loader(shuffle=True))
    assert model.sampler.step_count == 0


def test_a_test_without_a_callback_that_evaluates_says_so() -> None:
    model = module()
    fit(model, SampleCollector(in_memory=True))
    for callbacks in ([], [BayesianModelAverage()]):
        trainer = quiet_trainer(callbacks=callbacks)
        for test in (trainer.test, trainer.validate):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                (metrics,) = test(model, loader(), verbose=False)
            said = any(str(one.message).startswith("No metrics: ") for one in caught)
            assert said == (not metrics) == (not callbacks)


def test_parts_of_chains_that_have_begun_are_not_replaced() -> None:
    model = module(num_chains=2)
    fit(model, SampleCollector(in_memory=True))
    for name, part in (("net", nn.Linear(3, 1)), ("likelihood", Gaussian(0.3))):
        with pytest.raises(ValueError, match=rf"{name}: this module's 2 chains have begun"):
            setattr(model, name, part)
    model.metric = nn.Identity()
    fit(model, SampleCollector(in_memory=True))


def test_chains_without_a_network() -> None:
    with pytest.raises(ValueError, match=r"no layers to start chains of: pass net=…, also in load_from_checkpoint"):
        fit(BayesianModule(likelihood=Gaussian(0.3), lr=0.01, num_chains=2))


# -- networks and data ------------------------------------------------------------------------------------------------

X, Y = tensors()
NAN = torch.full((COUNT, 1), math.nan)


@pytest.mark.parametrize(
    ("make", "train", "message"),
    [
        (module, {"y": Y.float()}, r"integer labels of shape \(n,\).* got \(8, 2\) and \(8,\) of torch.float32"),
        (module, {"y": Y[:, None]}, r"integer labels of shape \(n,\).* got \(8, 2\) and \(8, 1\)"),
        (module, {"y": Y + 1}, "Categorical: labels from 1 to 2 for 2 logits; labels count from 0"),
        (module, {"y": Y - 1}, "Categorical: labels from -1 to 0 for 2 logits; labels count from 0"),
        (
            lambda: module(net=nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))),
            {},
            r"Categorical needs logits of shape \(n, K\)",
        ),
        (
            lambda: module(likelihood=Bernoulli()),
            {},
            r"Bernoulli needs an output of shape \(n,\) or \(n, 1\), got",
        ),
        (
            lambda: module(net=nn.Linear(2, 1), likelihood=Bernoulli()),
            {"y": Y + 1},
            "Bernoulli: targets must be 0 or 1, got 2",
        ),
        (
            lambda: module(net=nn.Linear(2, 1), likelihood=Gaussian()),
            {"y": X},
            r"Gaussian: outputs of shape \(8, 1\) for targets of shape \(8, 2\)",
        ),
        (
            lambda: module(net=nn.Linear(2, 1), likelihood=Gaussian()),
            {"y": NAN},
            "Gaussian: targets must be finite",
        ),
        (
            lambda: module(net=nn.LazyLinear(2)),
            {},
            "'net.weight' has no shape yet, since its layer is lazy",
        ),
        (
            lambda: module(net=nn.Linear(2, 2).requires_grad_(False)),
            {},
            "BayesianModule has no trainable parameters to sample",
        ),
        (module, {"x": X.clone().fill_(math.nan)}, "the batch holds NaN or infinite numbers"),
        (
            lambda: module(sampler=functools.partial(SGLD, lr=0.5), lr=None, num_data=25),
            {},
            "num_data=25 contradicts the training data set's length, which says 24",
        ),
        (
            lambda: module(net=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
            {"batch_size": 1},
            "more than 1 value",
        ),
    ],
)
def test_networks_and_data(make: Any, train: dict[str, Any], message: str) -> None:
    """All of them within the first step."""
    model = make()
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit(model, train=loader(**train))
    assert model.chains.progress.sample_due is False


def test_data_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*arguments: Any, **options: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", offline)
    data = MNISTDataModule(root=tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"MNIST is not at {tmp_path}.*\(no network\)"):
        quiet_trainer(max_epochs=1).fit(module(), datamodule=data)


# -- what is allowed --------------------------------------------------------------------------------------------------


def test_frozen_parameters_are_not_sampled() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    before = net[0].weight.clone()
    model = module(net=net, lr=0.5)
    fit(model, SampleCollector(in_memory=True))
    assert torch.equal(model.net[0].weight, before)  # type: ignore[index]
    assert set(model.chains.trainable) == {"net.1.weight", "net.1.bias"}
    assert model.posterior is not None
    assert torch.equal(model.posterior[0].state["net.0.weight"], before)
    assert list(model.posterior[0].parameters) == ["net.1.weight", "net.1.bias"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_tied_weights_count_once_and_come_back(tmp_path: Path) -> None:
    model = module(net=Tied(), prior=GaussianPrior(2.0), lr=0.2)
    fit(model, SampleCollector(tmp_path / "s"), RunSummary(), default_root_dir=tmp_path)
    weights = torch.cat([model.net.first.weight.view(-1), model.net.first.bias, model.net.second.bias])  # type: ignore[union-attr]
    expected = torch.distributions.Normal(0.0, 2.0).log_prob(weights).sum()
    torch.testing.assert_close(model.log_prior(), expected)
    posterior = Posterior.load(tmp_path / "s")
    assert set(posterior[0].parameters) == {"net.first.weight", "net.first.bias", "net.second.bias"}
    x, last = tensors()[0], posterior[len(posterior) - 1]
    hidden = torch.tanh(x @ last.parameters["net.first.weight"].T + last.parameters["net.first.bias"])
    logits = hidden @ last.parameters["net.first.weight"].T + last.parameters["net.second.bias"]
    found = posterior.predict(x, return_samples=True).sample_probabilities
    assert found is not None
    torch.testing.assert_close(found[-1], logits.softmax(1))


@pytest.mark.parametrize("options", [{"deterministic": True}, {"detect_anomaly": True}, {"precision": "64-true"}])
def test_options_that_are_fine(options: dict[str, Any]) -> None:
    model = module()
    fit(model, SampleCollector(in_memory=True), **options)
    torch.use_deterministic_algorithms(False)
    assert model.sampler.step_count == 6


def test_a_monitor_of_the_weight_decay_is_refused() -> None:
    with pytest.raises(ValueError, match=r"log_weight_decay=True.* leave log_weight_decay out"):
        fit(module(), callbacks=[pl.callbacks.LearningRateMonitor(log_weight_decay=True)])
