"""What users do beside a sampling fit: a `predict_step` of their own, example inputs, Fabric, other checkpoints."""

import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import pytorch_lightning as pl
import rich
import torch
from lightning_fabric import Fabric
from pytorch_lightning.callbacks import ModelSummary, RichModelSummary
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import SGLD, BayesianModule, Categorical
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from tests.support.problems import CLASSES, Data, Net, Plain, network
from tests.support.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore")


def inputs() -> Tensor:
    data = Data()
    data.setup("fit")
    return data.splits[0].inputs


# -- evaluation ------------------------------------------------------------------------------------------------------


class OwnTest(Net):
    """Logs a metric of its own network."""

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())


def test_an_own_test_step_with_samples_of_the_disk_says_whose_weights_it_takes(tmp_path: Path) -> None:
    """A new program's network is as it was constructed, so its metric is far from that of the samples."""

    def told(module: BayesianModule, **options: Any) -> list[str]:
        callbacks = [SampleCollector(tmp_path / "samples"), BayesianModelAverage()]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quiet_trainer(callbacks=callbacks).test(module, datamodule=Data(), verbose=False, **options)
        return [str(one.message) for one in caught if "constructed with" in str(one.message)]

    module, callbacks = OwnTest(), [SamplingSchedule(every_n_steps=2), SampleCollector(tmp_path / "samples")]
    trainer = quiet_trainer(max_steps=4, callbacks=callbacks)
    trainer.fit(module, datamodule=Data())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    (message,) = told(OwnTest())
    assert message.startswith("OwnTest.test_step evaluates the weights that OwnTest was constructed with")
    assert told(OwnTest(), ckpt_path=tmp_path / "last.ckpt") == []
    loaded = OwnTest()
    loaded.load_state_dict(module.state_dict())
    assert [told(module), told(loaded), told(Net())] == [[], [], []]


@pytest.mark.parametrize("in_memory", [False, True])
def test_samples_after_the_checkpoint_that_is_evaluated_are_named(tmp_path: Path, in_memory: bool) -> None:
    """`ckpt_path` loads weights alone; averages are of all samples."""
    collector = SampleCollector(in_memory=True) if in_memory else SampleCollector(tmp_path / "samples")
    saved = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [SamplingSchedule(every_n_steps=1), collector, BayesianModelAverage(), saved]
    trainer, module = quiet_trainer(max_steps=5, callbacks=callbacks, enable_checkpointing=True), Net()
    trainer.fit(module, datamodule=Data())
    for step, later in ((3, 2), (5, 0), (None, 0)):
        path = None if step is None else tmp_path / f"step={step}.ckpt"
        for run in (trainer.validate, trainer.test):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run(module, datamodule=Data(), ckpt_path=path, verbose=False)
            said = [str(one.message) for one in caught if "samples were drawn after step" in str(one.message)]
            assert len(said) == (later > 0)
            assert not said or (said[0].startswith("2 of the 5 samples") and "posterior[:3]" in said[0])


def test_a_checkpoint_before_the_first_sample_has_none_to_evaluate(tmp_path: Path) -> None:
    saved = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [SamplingSchedule(burn_in_steps=2, every_n_steps=1), SampleCollector(in_memory=True), saved]
    trainer, module = quiet_trainer(max_steps=4, callbacks=callbacks, enable_checkpointing=True), Net()
    trainer.fit(module, datamodule=Data())
    with pytest.warns(UserWarning, match="2 of the 2 samples were drawn after step 0.*None was drawn until then"):
        trainer.validate(module, datamodule=Data(), ckpt_path=tmp_path / "step=1.ckpt", verbose=False)


# -- prediction -------------------------------------------------------------------------------------------------------


class Features(Net):
    """Returns a layer's output for each batch."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch).relu()


class Both(Net):
    """Averages beside its own network."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch), super().predict_step(batch, batch_idx, dataloader_idx)


def set_on_the_object() -> BayesianModule:
    module = Net()
    module.predict_step = MethodType(Features.predict_step, module)  # type: ignore[method-assign, assignment]
    return module


@pytest.mark.parametrize("make", [Features, set_on_the_object])
def test_an_own_prediction_needs_no_samples(make: Any) -> None:
    predictions: Any = quiet_trainer().predict(make(), DataLoader(inputs(), 16))
    assert torch.cat(predictions).shape == (len(inputs()), CLASSES)


@pytest.mark.parametrize("make", [Net, Both])
def test_an_average_needs_samples(make: Any) -> None:
    with pytest.raises(RuntimeError, match="there are none: add a SampleCollector"):
        quiet_trainer().predict(make(), DataLoader(inputs(), 16))


def test_an_own_prediction_may_average() -> None:
    module, x = Both(), inputs()
    trainer = quiet_trainer(max_steps=6, callbacks=[SamplingSchedule(every_n_steps=2), SampleCollector(in_memory=True)])
    trainer.fit(module, datamodule=Data())
    ((outputs, average),) = trainer.predict(module, DataLoader(x, len(x)))
    assert outputs.shape == average.probabilities.shape
    assert module.posterior is not None
    torch.testing.assert_close(average.probabilities, module.posterior.predict(x).probabilities)


# -- example inputs ---------------------------------------------------------------------------------------------------


class Example(Net):
    def __init__(self, num_chains: int = 2, **options: Any) -> None:
        super().__init__(num_chains, **options)
        self.example_input_array = inputs()[:4]


class Moved(Example):
    """What Lightning passes on is not the example itself."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch / 2 if isinstance(batch, Tensor) else batch


class Named(BayesianModule):
    """Two inputs, the example a dict."""

    def __init__(self) -> None:
        super().__init__(likelihood=Categorical(), num_chains=2, lr=0.01)
        self.inner, size = network(), inputs()[:4]
        self.example_input_array = {"x": size, "scale": torch.ones(())}

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        return self.inner(x) if scale is None else self.inner(x) * scale


@pytest.mark.parametrize("make", [Example, Moved, Named])
@pytest.mark.parametrize("summary", [ModelSummary, RichModelSummary])
def test_a_model_summary_of_several_chains(
    make: Any, summary: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rich, "_console", None)  # an earlier test's may write elsewhere
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=2,
        callbacks=[SamplingSchedule(every_n_steps=1), summary(max_depth=2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(make(), datamodule=Data())
    if summary is RichModelSummary:
        assert "Out sizes" in capsys.readouterr().out


@pytest.mark.parametrize("chains", [1, 2])
def test_tensorboard_gets_the_graph_of_one_chain(chains: int, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    trainer = quiet_trainer(max_steps=2, logger=logger, callbacks=[SamplingSchedule(every_n_steps=1)])
    trainer.fit(Example(chains), datamodule=Data())
    has_graph = any(b"aten::linear" in file.read_bytes() for file in tmp_path.rglob("ev*"))
    assert has_graph == (chains == 1)
    assert any("log_graph=True" in str(one.message) for one in recwarn) == (chains == 2)


def test_another_input_still_belongs_to_one_chain() -> None:
    module = Example()
    trainer = quiet_trainer(max_steps=2, callbacks=[SamplingSchedule(every_n_steps=1)])
    trainer.fit(module, datamodule=Data())
    module.eval()
    with module.at_chain(0), torch.no_grad():
        expected = module(inputs()[:4])
    torch.testing.assert_close(module(inputs()[:4]), expected)
    with pytest.raises(RuntimeError, match="holds 2 chains, and an output belongs to one"):
        module(inputs()[4:8])


# -- Fabric -----------------------------------------------------------------------------------------------------------


def test_fabric_steps_a_sampler_on_the_potential_energy() -> None:
    data = Data()
    data.setup("fit")
    fabric = Fabric(accelerator="cpu", devices=1)
    module = BayesianModule(net=network(), likelihood=Categorical(), num_data=60)
    before = [p.detach().clone() for p in module.parameters()]
    sampler = SGLD(module.parameters(), lr=0.01, num_data=60)
    wrapped, optimizer = fabric.setup(module, sampler)
    wrapped.mark_forward_method("potential_energy")
    for batch in fabric.setup_dataloaders(DataLoader(TensorDataset(data.splits[0].inputs, data.splits[0].targets), 20)):
        optimizer.zero_grad()
        fabric.backward(wrapped.potential_energy(batch).sum() / 60)
        optimizer.step()
    assert all((p != b).any() for p, b in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("method", ["training_step", "configure_optimizers"])
def test_fabric_says_its_way(method: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    module = Net()
    wrapped = fabric.setup(module)
    batch = (inputs()[:4], torch.zeros(4, dtype=torch.long))
    with pytest.raises(RuntimeError, match=rf"Net.{method} belongs to pl.Trainer.fit.*potential_energy"):
        wrapped.training_step(batch, 0) if method == "training_step" else module.configure_optimizers()


def test_a_step_after_the_fit_says_the_way_too() -> None:
    module = Net()
    quiet_trainer(max_steps=2, callbacks=[SamplingSchedule(every_n_steps=1)]).fit(module, datamodule=Data())
    with pytest.raises(RuntimeError, match=r"Net.training_step belongs to pl.Trainer.fit.*potential_energy"):
        module.training_step((inputs()[:4], torch.zeros(4, dtype=torch.long)), 0)


# -- checkpoints of plain Lightning -----------------------------------------------------------------------------------


class PlainNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize("chains", [1, 2])
def test_a_plain_checkpoint_names_how_to_start_from_it(chains: int, tmp_path: Path) -> None:
    trainer = quiet_trainer(max_steps=2)
    trainer.fit(PlainNet(), datamodule=Data())
    path = str(tmp_path / "plain.ckpt")
    trainer.save_checkpoint(path)

    def fit(ckpt_path: str | None = None, **options: Any) -> BayesianModule:
        options |= {"net": network(), "likelihood": Categorical(), "num_chains": chains, "lr": 1e-9, "temperature": 0}
        module = BayesianModule(**options)
        callbacks = [SamplingSchedule(every_n_steps=1)]
        quiet_trainer(max_steps=4, callbacks=callbacks).fit(module, datamodule=Data(), ckpt_path=ckpt_path)
        return module

    with pytest.raises(ValueError, match=r"ckpt_path='.*plain.ckpt' .*chain_start=.*load_from_checkpoint"):
        fit(path)
    module = fit(chain_start=[path] * chains)
    with module.at_chain(chains - 1):
        torch.testing.assert_close(module.net[0].weight, torch.load(path)["state_dict"]["net.0.weight"])
    trainer.save_checkpoint(path, weights_only=True)
    with pytest.raises(ValueError, match=r"has weights alone .*chain_start=.*load_from_checkpoint"):
        fit(path)
    loaded = BayesianModule.load_from_checkpoint(path, net=network(), likelihood=Categorical())
    torch.testing.assert_close(loaded.net[0].weight, torch.load(path)["state_dict"]["net.0.weight"])


def test_weights_alone_move_no_samples_aside(tmp_path: Path) -> None:
    """A fit that cannot continue from its checkpoint leaves the folder as it is."""
    callbacks = [SamplingSchedule(every_n_steps=1), SampleCollector(tmp_path / "samples")]
    trainer = quiet_trainer(max_steps=2, callbacks=callbacks)
    trainer.fit(Net(), datamodule=Data())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    before = sorted(tmp_path.rglob("*"))
    again = quiet_trainer(
        max_steps=4, callbacks=[SamplingSchedule(every_n_steps=1), SampleCollector(tmp_path / "samples")]
    )
    with pytest.raises(ValueError, match="has weights alone"):
        again.fit(Net(), datamodule=Data(), ckpt_path=tmp_path / "weights.ckpt")
    assert sorted(tmp_path.rglob("*")) == before


# -- a module that torch.compile has wrapped ---------------------------------------------------------------------------


@pytest.mark.by_default("2")
@pytest.mark.parametrize("chains", [1, 2])
def test_a_compiled_module_makes_the_plain_ones_steps_and_predictions(
    chains: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its fit had no blocks, and `trainer.predict` ended with an error of torch's compiler."""
    states, found = [], []
    for compiles in (False, True):
        torch.manual_seed(0)
        module, callbacks = Plain(chains), [SamplingSchedule(every_n_steps=200), SampleCollector(in_memory=True)]
        given: Any = torch.compile(module, backend="eager") if compiles else module
        trainer = quiet_trainer(max_steps=1000, max_epochs=-1, callbacks=callbacks)
        with warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO"):
            warnings.simplefilter("always")
            trainer.fit(given, datamodule=Data())
        said = [str(one.message) for one in caught if "torch.compile(Plain) has no effect" in str(one.message)]
        assert len(said) == compiles
        assert all("compile=True" in one for one in said)
        assert module.chains.counters.hidden_steps > 0
        states.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
        found.append(torch.cat([batch.probabilities for batch in trainer.predict(given, datamodule=Data())]))
    assert torch.equal(*states)
    assert torch.equal(*found)
    assert "own training_step" not in caplog.text
