"""A posterior of networks that were trained elsewhere: state dicts, modules, files, checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector
from lightning_sgmcmc.datamodules import TableDataModule
from tests.support.trainers import quiet_trainer

x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def trained() -> list[nn.Sequential]:
    """Networks with statistics of their own."""
    torch.manual_seed(1)
    nets = [make() for _ in range(3)]
    for net in nets:
        net(torch.randn(20, 3) + 1)
        net.eval().requires_grad_(False)
    return nets


def files_of(nets: list[nn.Sequential], folder: Path) -> Path:
    torch.save(nets[0].state_dict(), folder / "a.pt")
    wrapped = {f"model.{name}": tensor for name, tensor in nets[1].state_dict().items()}
    torch.save({"state_dict": wrapped | {"head.weight": torch.zeros(1)}, "epoch": 3}, folder / "b.ckpt")
    save_file(nets[2].state_dict(), folder / "c.safetensors")
    (folder / "notes.txt").write_text("not weights")
    return folder


def checkpoints_of(nets: list[nn.Sequential], folder: Path) -> list[Any]:
    """The networks as loops save them: beside an optimizer's state, under any name."""
    optimizer = torch.optim.Adam(make().parameters())
    others = {"epoch": 3, "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save({"model_state_dict": nets[0].state_dict(), **others}, folder / "a.pt")
    torch.save({"net": {f"module.{name}": t for name, t in nets[1].state_dict().items()}, **others}, folder / "b.pt")
    return [folder / "a.pt", folder / "b.pt", {"model": nets[2].state_dict(), **others}]


FORMS: dict[str, Callable[[list[nn.Sequential], Path], Any]] = {
    "modules": lambda nets, folder: nets,
    "state dicts": lambda nets, folder: [net.state_dict() for net in nets],
    "a folder": files_of,
    "checkpoints of loops": checkpoints_of,
    "of several kinds": lambda nets, folder: [files_of(nets, folder) / "a.pt", nets[1], nets[2].state_dict()],
}


@pytest.mark.parametrize("form", FORMS)
def test_it_predicts_the_networks_average(form: str, trained: list[nn.Sequential], tmp_path: Path) -> None:
    net = make()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    posterior = Posterior.from_states(net, FORMS[form](trained, tmp_path), Categorical())
    each = torch.stack([one(x).softmax(-1) for one in trained])
    torch.testing.assert_close(posterior.predict(x).probabilities, each.mean(0))
    weighed = Posterior.from_states(net, trained, Categorical(), weights=[1, 0, 3])
    torch.testing.assert_close(weighed.predict(x).probabilities, 0.25 * each[0] + 0.75 * each[2])
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert [type(one) for one in posterior.networks()] == [nn.Sequential] * 3


class Plain(pl.LightningModule):
    """A user's module that knows nothing of this library."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_checkpoints_of_a_plain_lightning_run(tmp_path: Path) -> None:
    keeper = pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=3, callbacks=keeper, logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    module = Plain()
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :1]), batch_size=3))
    posterior = Posterior.from_states(nn.Linear(3, 1), tmp_path, Gaussian(0.1))
    assert len(posterior) == 3
    last = posterior[2].state["net.weight"]
    assert torch.equal(last, module.model.weight)
    assert posterior.predict(x).mean.shape == (9, 1)


@pytest.mark.parametrize(
    ("states", "kind", "message"),
    [
        (lambda: [], ValueError, "states is empty"),
        (lambda: [nn.Linear(3, 2)], ValueError, r"states\[0\] has no '0.weight'"),
        (lambda: [make(), {"a": torch.zeros(1)}], ValueError, r"states\[1\] has no '0.weight'"),
        (lambda: [{f"{p}.{k}": v for p in "ab" for k, v in make().state_dict().items()}], ValueError, "'a.', 'b.'"),
        (lambda: [nn.Sequential(nn.Linear(3, 5), *make()[1:])], ValueError, r"has '0.weight' of shape \(5, 3\)"),
        (lambda: [3], TypeError, r"states\[0\] should be a state dict, a module or a file of one, got a int"),
        (lambda: "nowhere", FileNotFoundError, "states='nowhere' does not exist"),
        (lambda: Path(__file__).parent, FileNotFoundError, "has no file that ends with .ckpt"),
        (lambda: [Path(__file__)], ValueError, "test_from_states.py cannot be read as weights"),
    ],
)
def test_other_states_are_refused(states: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Posterior.from_states(make(), states(), Categorical())


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [float("nan"), 1.0]])
def test_other_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be 2 finite numbers"):
        Posterior.from_states(make(), [make(), make()], Categorical(), weights=weights)


def test_models_of_transformers_have_buffers_that_are_not_saved(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=50, num_labels=3, **sizes)
    trained = [BertForSequenceClassification(config).eval() for _ in range(2)]
    for number, net in enumerate(trained):
        net.save_pretrained(tmp_path / str(number))
    net, folders = BertForSequenceClassification(config), [tmp_path / "0", tmp_path / "1"]
    ids = torch.randint(50, (4, 6))
    each = torch.stack([one(ids).logits.softmax(-1) for one in trained])
    for states in (trained, folders, [folder / "model.safetensors" for folder in folders]):
        posterior = Posterior.from_states(net, states, Categorical())
        torch.testing.assert_close(posterior.predict({"input_ids": ids}).probabilities, each.mean(0))
    torch.save(trained[0].state_dict(), tmp_path / "0" / "a.pt")
    with pytest.raises(ValueError, match="has 2 files of weights: pass one file for each network"):
        Posterior.from_states(net, folders, Categorical())


def test_weights_that_are_there_twice_are_named() -> None:
    with pytest.raises(ValueError, match=r"states\[0\] holds weights 2 times, as 'model', 'ema'"):
        Posterior.from_states(make(), [{"model": make().state_dict(), "ema": make().state_dict()}], Categorical())


def test_a_fitted_posterior_is_extended_in_its_units_with_its_noise(tmp_path: Path) -> None:
    """y = 500 + 40·x: another network of the standardised targets, and the same from the folder in the end."""
    frame = pd.DataFrame({"a": np.linspace(-1, 1, 105)})
    frame["y"] = 500 + 40 * frame["a"] + np.random.default_rng(0).normal(0, 8, 105)
    data = TableDataModule(frame, target="y", task="regression", batch_size=20)
    module = BayesianModule(nn.Linear(1, 1), Gaussian(learned=True), num_chains=2)
    quiet_trainer(max_epochs=30, callbacks=[AutoSampling(num_draws=6), SampleCollector(tmp_path)]).fit(module, data)
    other = nn.Linear(1, 1)
    nn.init.zeros_(other.weight)
    nn.init.zeros_(other.bias)
    x = frame[["a"]]
    for fitted in (module.posterior, Posterior.load(tmp_path)):
        assert fitted is not None
        count = len(fitted)
        longer = fitted.extend([other])
        assert len(longer) == count + 1
        prediction = longer.predict(x, return_samples=True)
        mean = count / (count + 1) * fitted.predict(x).mean + frame["y"].mean() / (count + 1)
        torch.testing.assert_close(prediction.mean, mean.to(prediction.mean), rtol=0, atol=2.0)
        own = [sample.state["likelihood.log_std"] for sample in fitted]
        noise = fitted.weights @ torch.stack(own).double().flatten()
        torch.testing.assert_close(longer[count].state["likelihood.log_std"].double().flatten()[0], noise)


@pytest.mark.parametrize("dtypes", [["float16"] * 3, ["bfloat16"] * 3, ["float64", "float32", "bfloat16"]])
def test_states_are_computed_in_the_networks_type(dtypes: list[str], trained: list[nn.Sequential]) -> None:
    """As after `load_state_dict`: files of 16 bits are rounded, and the network computes in its own type."""
    states = [
        {name: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for name, t in net.state_dict().items()}
        for net, dtype in zip(trained, dtypes, strict=True)
    ]
    for net, state in zip(trained, states, strict=True):
        net.load_state_dict(state)
    each = torch.stack([net(x).softmax(-1) for net in trained])
    posterior = Posterior.from_states(make(), states, Categorical())
    torch.testing.assert_close(posterior.predict(x).probabilities, each.mean(0))
    torch.testing.assert_close(posterior.ensemble()(x), each.mean(0))
    double = Posterior.from_states(make().double(), states[:1], Categorical()).extend(states[1:])
    torch.testing.assert_close(double.predict(x).probabilities, each.mean(0).double(), atol=1e-6, rtol=0)
    assert double.ensemble()(x.double()).dtype == torch.float64


def test_further_networks_extend_a_posterior(trained: list[nn.Sequential], tmp_path: Path) -> None:
    posterior = Posterior.from_states(make(), trained[:2], Categorical())
    longer = posterior.extend([trained[2].state_dict()])
    assert [record.chain for record in longer.records] == [0, 1, 2]
    each = torch.stack([one(x).softmax(-1) for one in trained])
    torch.testing.assert_close(longer.predict(x).probabilities, each.mean(0))
    assert len(posterior) == 2
    with pytest.raises(ValueError, match="pass the weights of a network like this Sequential"):
        posterior.extend([nn.Linear(3, 2)])
    with pytest.raises(RuntimeError, match="network"):
        Posterior(posterior.store).extend(trained)
