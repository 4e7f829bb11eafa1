"""Models, data and evaluations that a run refuses, when it does, and in which words."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_sgmcmc import (
    BayesianModule,
    Categorical,
    GaussianPrior,
    UnderdampedLangevin,
)
from lightning_sgmcmc.callbacks import (
    BayesianModelAverage,
    PredictionWriter,
    SampleCollector,
)
from tests.support.problems import Stream
from tests.support.small_run import BATCH, COUNT, data, every_step, fit, loader, module
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*has no validation data to evaluate")


# -- the model and its data -------------------------------------------------------------------------------------------


class Forward(BayesianModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Unnamed(BayesianModule):
    """Has parameters, and nowhere a network."""

    def __init__(self) -> None:
        super().__init__(likelihood=Categorical())
        self.layer = nn.Linear(2, 2)


class Manual(BayesianModule):
    def __init__(self) -> None:
        super().__init__(net=nn.Linear(2, 2), likelihood=Categorical())
        self.automatic_optimization = False


class TorchOptimizer(BayesianModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MeanLikelihood(BayesianModule):
    def log_likelihood(self, batch: Any) -> Tensor:
        return super().log_likelihood(batch).mean()


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Forward, ValueError, r"Forward needs a likelihood: pass likelihood=… or define log_likelihood\(batch\)"),
        (lambda: module(likelihood=None), ValueError, "BayesianModule needs a likelihood: pass likelihood=…"),
        (Unnamed, ValueError, "Unnamed needs a network: pass net=… or define forward"),
        (lambda: module(net=None), ValueError, "BayesianModule needs a network: pass net=… or define forward"),
        (Manual, ValueError, "Manual samples by automatic optimization: leave automatic_optimization at True"),
        (lambda: module(net=frozen()), ValueError, "BayesianModule has no trainable parameters to sample"),
        (
            lambda: module(prior=GaussianPrior({"*.weight": 1.0})),
            ValueError,
            "prior's std has no pattern for the parameter 'net.bias': add one",
        ),
        (
            lambda: module(sampler=lambda params, **options: torch.optim.SGD(params, lr=options["lr"])),
            TypeError,
            "sampler=<lambda> returned a SGD, which adds no noise: use one of lightning_sgmcmc.samplers",
        ),
        (
            lambda: TorchOptimizer(net=nn.Linear(2, 2), likelihood=Categorical()),
            TypeError,
            "TorchOptimizer defines configure_optimizers, and BayesianModule has its own",
        ),
        (
            lambda: MeanLikelihood(net=nn.Linear(2, 2), likelihood=Categorical()),
            ValueError,
            r"log_likelihood\(batch\) must return one number per example, shape \(n,\), got \(\)",
        ),
        (
            lambda: module(sampler=UnderdampedLangevin, lr=3.0),
            ValueError,
            "lr·friction must be below 2 for a stable step, got 3.0·1.0",
        ),
    ],
)
def test_models_that_cannot_sample(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fit(make(), every_step())


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_parameters_in_half_precision(precision: str) -> None:
    with pytest.raises(ValueError, match=r"half precision lose the injected noise.*Trainer\(precision='bf16-mixed'\)"):
        fit(module(), every_step(), precision=precision)


def test_mixed_precision_is_fine() -> None:
    model = module()
    fit(model, every_step(), precision="bf16-mixed")
    assert next(model.parameters()).dtype == torch.float32


class Batches:
    """A loader of one's own."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loader())


class Looping(torch.utils.data.Sampler[int]):
    """A sampler of one's own that draws without an end."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(COUNT)


class Declared(pl.LightningDataModule):
    num_data = 100

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (DataLoader(Stream(data()), BATCH), "the training data set has no length"),
        (loader(sampler=Looping()), "the training loader draws by a Looping"),
        (Batches(), "the training loader is not a torch DataLoader"),
    ],
)
def test_the_number_of_data_is_not_known(train: Any, reason: str) -> None:
    message = rf"number of training data is not known \({reason}\): pass num_data=… to BayesianModule"
    with pytest.raises(ValueError, match=message):
        fit(module(), every_step(), train=train)
    told = module(num_data=COUNT)
    fit(told, every_step(), train=train, max_epochs=None, max_steps=4)
    assert told.sampler.num_data == COUNT


def test_epochs_of_a_loader_without_length() -> None:
    """Steps are asked for, so the run's length need not be known."""
    model = module(num_data=COUNT)
    fit(model, every_step(), train=DataLoader(Stream(data()), BATCH), max_epochs=2)
    assert model.sampler.step_count == 6


def test_the_number_of_data_is_contradicted() -> None:
    message = "num_data=25 contradicts the training data set's length, which says 24; leave num_data out"
    with pytest.raises(ValueError, match=message):
        fit(module(num_data=25), every_step())
    with pytest.raises(ValueError, match=r"num_data=24 contradicts Declared\.num_data, which says 100"):
        quiet_trainer(max_epochs=1).fit(module(num_data=24), datamodule=Declared())
    with pytest.raises(ValueError, match=r"num_data=100 contradicts the training data set's length, which says 24"):
        quiet_trainer(max_epochs=1).fit(module(), datamodule=Declared())


def test_batches_of_another_form() -> None:
    class Triples(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int) -> Any:
            return (*data()[index], index)

    message = r"should be a pair \(x, y\), got list of 3: nest several inputs.*override inputs_and_target\(batch\)"
    with pytest.raises(TypeError, match=message):
        fit(module(), every_step(), train=DataLoader(Triples(), BATCH))


def test_energies_outside_a_fit_need_the_number_of_data() -> None:
    batch = data().tensors
    with pytest.raises(RuntimeError, match="num_data is unknown before the fit starts: pass num_data=…"):
        module().potential_energy(batch)
    assert module(num_data=COUNT).potential_energy(batch).shape == (1,)


def test_uses_without_likelihood_or_network() -> None:
    with pytest.raises(NotImplementedError, match="Forward needs a likelihood: pass likelihood=…"):
        Forward().log_likelihood(data().tensors)
    with pytest.raises(NotImplementedError, match="Unnamed needs a network: pass net=… or define forward"):
        Unnamed()(torch.zeros(1, 2))


# -- evaluation -------------------------------------------------------------------------------------------------------


def test_a_shuffled_validation_loader() -> None:
    torch.manual_seed(0)
    message = "the validation loader shuffles, so .* create the validation or test loader with shuffle=False"
    with pytest.raises(ValueError, match=message):
        fit(module(), every_step(), BayesianModelAverage(), val=loader(shuffle=True))
    subset = DataLoader(data(), 4, sampler=SubsetRandomSampler(range(8)))
    with pytest.raises(ValueError, match=message):
        fit(module(), every_step(), BayesianModelAverage(), val=subset)


def test_a_shuffled_test_loader_gives_the_same_figures_or_none() -> None:
    callbacks = [every_step(), SampleCollector(in_memory=True), BayesianModelAverage()]
    model, trainer = module(lr=0.5), quiet_trainer(max_epochs=2, callbacks=callbacks)
    trainer.fit(model, loader())
    (expected,) = trainer.test(model, loader(), verbose=False)
    torch.manual_seed(0)
    try:
        (found,) = trainer.test(model, loader(shuffle=True), verbose=False)
    except ValueError:
        return
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", ["test", "validate"])
def test_evaluating_without_samples(stage: str) -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=[BayesianModelAverage(), SampleCollector()])
    short = "val" if stage == "validate" else stage
    message = f"BayesianModelAverage found no samples to evaluate on the {short} data: add a SampleCollector to the fit"
    with pytest.raises(RuntimeError, match=message):
        getattr(trainer, stage)(module(), loader(), verbose=False)


@pytest.mark.parametrize("callbacks", [[], [SampleCollector()], [PredictionWriter()]])
def test_predicting_without_samples(callbacks: list[pl.Callback]) -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=callbacks)
    with pytest.raises(
        RuntimeError, match="prediction averages over posterior samples, and there are none: add a Sample"
    ):
        trainer.predict(module(), loader())


def test_a_shuffled_prediction_loader_predicts_every_input() -> None:
    """The rows come in the loader's order, and each is the prediction of one input."""
    model, collector = module(lr=0.5), SampleCollector(in_memory=True)
    trainer = quiet_trainer(max_epochs=2, callbacks=[every_step(), collector])
    trainer.fit(model, loader())
    assert collector.posterior is not None
    expected = collector.posterior.predict(data().tensors[0]).probabilities
    torch.manual_seed(0)
    parts = trainer.predict(model, loader(shuffle=True))
    found = torch.cat([part.probabilities for part in parts])  # type: ignore[union-attr, misc]
    torch.testing.assert_close(found[:, 0].sort().values, expected[:, 0].sort().values)  # type: ignore[index]


def test_a_checkpoint_whose_samples_are_gone(tmp_path: Path) -> None:
    def run(**options: Any) -> None:
        checkpoint = pl.callbacks.ModelCheckpoint(
            tmp_path, filename="last", every_n_epochs=1, enable_version_counter=False
        )
        callbacks = [every_step(), SampleCollector(tmp_path / "s"), checkpoint]
        trainer = quiet_trainer(max_epochs=options.pop("epochs"), enable_checkpointing=True, callbacks=callbacks)
        trainer.fit(module(), loader(), **options)

    run(epochs=2)
    manifest = tmp_path / "s" / "manifest.jsonl"
    manifest.write_bytes(b"".join(manifest.read_bytes().splitlines(keepends=True)[:3]))
    message = "the checkpoint refers to 6 samples in .*s, which holds 2: restore the folder, or start a new run"
    with pytest.raises(ValueError, match=message):
        run(epochs=3, ckpt_path=tmp_path / "last.ckpt")
