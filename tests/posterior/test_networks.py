"""Samples as plain networks, and their average as one network: equal to the posterior's predictions, and exportable."""

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior, StudentT, bayesianize
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.posterior.store import MemoryStore, TargetScaling
from lightning_sgmcmc.predictions import ClassPrediction
from tests.pretrained.networks import Sentences, encoder, lora
from tests.support.posteriors import MODULES, classifier, convolutional, filled, in_memory, inputs, states
from tests.support.small_run import loader
from tests.support.trainers import quiet_trainer


def expected(posterior: Posterior, x: Tensor) -> list[Tensor]:
    prediction = posterior.predict(x)
    return [prediction.probabilities] if isinstance(prediction, ClassPrediction) else [prediction.mean, prediction.std]


def found(output: Any) -> list[Tensor]:
    return list(output) if isinstance(output, tuple) else [output]


@pytest.mark.parametrize("name", MODULES)
def test_each_network_is_a_plain_copy_of_a_sample(name: str) -> None:
    module = MODULES[name]()
    posterior, x = in_memory(module), inputs()
    networks = list(posterior.networks())
    for network, twin in zip(networks, states(module), strict=True):
        assert not any(isinstance(part, pl.LightningModule) for part in network.modules())
        assert not network.training
        torch.testing.assert_close(network(x), twin(x))
    before = posterior.predict(x).parts
    with torch.no_grad():
        next(iter(networks[0].parameters())).zero_()
    for part, again in zip(before.values(), posterior.predict(x).parts.values(), strict=True):
        assert torch.equal(part, again), "a network shares no memory with the samples"


@pytest.mark.parametrize("name", MODULES)
def test_an_ensemble_returns_the_weighted_predictive(name: str) -> None:
    """Also after torch.save and torch.load, and when a trainer would set it to training mode."""
    posterior, x = in_memory(MODULES[name]()), inputs()
    ensemble = posterior.ensemble()
    assert not ensemble.train().training
    file = io.BytesIO()
    torch.save(ensemble, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for network in (ensemble, loaded, copy.deepcopy(ensemble)):
        for own, part in zip(found(network(x)), expected(posterior, x), strict=True):
            torch.testing.assert_close(own, part, rtol=1e-5, atol=1e-6)


def test_a_zero_weight_takes_no_memory_and_other_parts_are_returned() -> None:
    posterior, x = in_memory(classifier(), (0.0, -torch.inf, 1.0, -torch.inf)), inputs()
    ensemble = posterior.ensemble(("probabilities", "mutual_information"))
    assert len(ensemble.members) == 2
    probabilities, information = ensemble(x)
    torch.testing.assert_close(probabilities, posterior.predict(x).probabilities)
    torch.testing.assert_close(information, posterior.predict(x).mutual_information, rtol=1e-4, atol=1e-6)


def test_an_ensemble_has_the_calibration_and_the_units() -> None:
    module = BayesianModule(net=nn.Linear(5, 2), likelihood=Gaussian(0.5, learned=True))
    store = filled(MemoryStore(), module)
    store.scaling = TargetScaling((3.0, -1.0), (2.0, 10.0))
    x = inputs()
    posterior = Posterior(store, module).calibrate([(x, torch.randn(len(x), 2))])
    assert abs(posterior.calibration.value - 1) > 0.05  # type: ignore[union-attr]
    for own, part in zip(posterior.ensemble()(x), expected(posterior, x), strict=True):
        torch.testing.assert_close(own, part, rtol=1e-5, atol=1e-5)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param("cnn", marks=SLOW), "subclass", pytest.param("regression", marks=SLOW)])
def test_an_exported_program_predicts_what_the_posterior_does(name: str, tmp_path: Path) -> None:
    posterior, x = in_memory(MODULES[name]()), inputs()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(posterior.ensemble(), (x,), dynamic_shapes=({0: batch},), strict=False)
    torch.export.save(program, tmp_path / "ensemble.pt2")
    again = torch.export.load(tmp_path / "ensemble.pt2").module()
    for own, part in zip(found(again(x[:7])), expected(posterior, x[:7]), strict=True):
        torch.testing.assert_close(own, part, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("cnn", marks=SLOW), "regression", "student"])
def test_onnxruntime_predicts_what_the_posterior_does(name: str, tmp_path: Path) -> None:
    """Torch's Student's t looks at its arguments, which ONNX cannot."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript", minversion="0.4")  # 0.3 cannot convert the opset of what torch 2.6 exports
    others = {"student": lambda: BayesianModule(nn.Linear(5, 2), StudentT(learned=True))}
    posterior, x = in_memory((MODULES | others)[name]()), inputs()
    file = str(tmp_path / "ensemble.onnx")
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    torch.onnx.export(
        posterior.ensemble(), (x,), file, input_names=["x"], dynamo=True, dynamic_shapes=shapes, verbose=False
    )
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for count in (1, 9):
        outputs = session.run(None, {"x": x[:count].numpy()})
        for own, part in zip(outputs, expected(posterior, x[:count]), strict=True):
            np.testing.assert_allclose(own, part.numpy(), rtol=1e-4, atol=1e-5)


def test_stacked_chains_after_a_fit() -> None:
    """The module of a fit holds four chains, and its samples one each."""
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    module = BayesianModule(net=net, likelihood=Categorical(), lr=1e-2, num_chains=4)
    callbacks = [SamplingSchedule(burn_in_steps=2, every_n_steps=2), SampleCollector(in_memory=True)]
    quiet_trainer(max_steps=6, callbacks=callbacks).fit(module, loader())
    posterior = module.posterior
    assert posterior is not None
    x = next(iter(loader()))[0]
    torch.testing.assert_close(posterior.ensemble()(x), posterior.predict(x).probabilities)
    first = next(posterior.networks())
    assert {name: tuple(p.shape) for name, p in first.named_parameters()}["0.weight"] == (4, 2)


def test_what_a_training_step_left_in_the_network_is_no_obstacle() -> None:
    """A network that keeps an activation, as torch's old weight_norm does, holds a graph after a fit."""

    class Keeping(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = [x := super().forward(x)]
            return x

    torch.manual_seed(0)
    module = BayesianModule(Keeping(nn.Linear(3, 2)), Categorical(), lr=0.01, num_chains=2)
    trainer = quiet_trainer(
        callbacks=[SamplingSchedule(1, every_n_steps=1), SampleCollector(in_memory=True)], max_steps=4
    )
    trainer.fit(module, DataLoader([(torch.ones(3), 0), (-torch.ones(3), 1)], 2))
    assert module.posterior is not None
    assert module.net.hidden[0].requires_grad
    x, weights = torch.randn(5, 3), module.posterior.weights.float()
    average = torch.stack([network(x).softmax(1) for network in module.posterior.networks()])
    whole = module.posterior.ensemble()(x)
    torch.testing.assert_close(torch.einsum("s,snk->nk", weights, average).detach(), whole.detach())
    torch.testing.assert_close(whole.detach(), module.posterior.predict(x).probabilities)


def test_dropout_masks_are_refused() -> None:
    module = classifier()
    twin = next(states(module))
    seed = {"dropout_seed": torch.tensor(3)}
    store = MemoryStore()
    store.append(
        PosteriorSample(0, 0, 0, 1.0, 0.0, dict(twin.named_parameters()), {**dict(twin.named_buffers()), **seed})
    )
    with pytest.raises(ValueError, match="dropout masks"):
        Posterior(store, module).ensemble()


def test_shared_layers_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    network = next(in_memory(classifier(Tied())).networks())
    assert network.second.weight is network.first.weight


def test_a_stream_predicts_what_one_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = in_memory(classifier(convolutional())), inputs()
    batches = list(x.split(10))
    streamed = [prediction.probabilities for prediction in posterior.predict_batches(iter(batches))]
    assert [len(part) for part in streamed] == [10, 10, 3]
    torch.testing.assert_close(torch.cat(streamed), posterior.predict(x).probabilities)
    with pytest.raises(TypeError, match="predict\\(x\\) for one array"):
        posterior.predict_batches(x)
    monkeypatch.setattr("lightning_sgmcmc.posterior.predictive.free_memory", lambda device=None: 80)
    with pytest.warns(UserWarning, match="again for every batch"):
        list(in_memory(classifier()).predict_batches(batches))


def test_what_is_not_sampled_is_one_tensor_of_all_networks() -> None:
    """A frozen trunk is in memory once, and is the store's, whatever the module holds."""
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    module = BayesianModule(net=net, likelihood=Categorical(), lr=1e-2, num_chains=2)
    callbacks = [SamplingSchedule(burn_in_steps=2, every_n_steps=2), SampleCollector(in_memory=True)]
    quiet_trainer(max_steps=6, callbacks=callbacks).fit(module, loader())
    posterior = module.posterior
    assert posterior is not None
    x = next(iter(loader()))[0]
    first, second, *_ = posterior.networks()
    assert first[0].weight is second[0].weight
    assert not torch.equal(first[2].weight, second[2].weight)
    ensemble = posterior.ensemble()
    torch.testing.assert_close(ensemble(x), posterior.predict(x).probabilities)
    file = io.BytesIO()
    torch.save(ensemble, file)
    assert len({tensor.data_ptr() for name, tensor in ensemble.state_dict().items() if "net.0" in name}) == 2


class Shifted(BayesianModule):
    def output_of(self, inputs: Any) -> Tensor:
        return self(inputs) + 1.0 * torch.arange(3)


def test_the_modules_own_output_is_the_ensembles() -> None:
    module = Shifted(net=nn.Linear(5, 3), likelihood=Categorical())
    posterior, x = in_memory(module), inputs()
    torch.testing.assert_close(posterior.ensemble()(x), posterior.predict(x).probabilities)
    torch.testing.assert_close(next(posterior.networks())(x), next(states(module))(x))


@SLOW
def test_dicts_of_inputs_and_a_model_of_transformers() -> None:
    """LoRA adapters on a frozen encoder: by a dict, by name, streamed, exported, and distilled."""
    pytest.importorskip("peft")
    data = Sentences(8)
    module = bayesianize(encoder(), lora(), Categorical(), lr=1e-3)
    callbacks = [SamplingSchedule(burn_in_steps=1, every_n_steps=1), SampleCollector(in_memory=True)]
    quiet_trainer(max_steps=3, callbacks=callbacks).fit(module, DataLoader(data, batch_size=4))
    posterior = module.posterior
    assert posterior is not None
    expected = posterior.predict(data.inputs).probabilities
    ensemble = posterior.ensemble()
    torch.testing.assert_close(ensemble(data.inputs), expected)
    torch.testing.assert_close(ensemble(**data.inputs), expected)
    streamed = posterior.predict_batches(DataLoader(data, batch_size=4))
    torch.testing.assert_close(torch.cat([part.probabilities for part in streamed]), expected)
    kept = sum(p.numel() for p in ensemble.parameters())
    assert kept < 1.5 * sum(p.numel() for p in module.parameters()), "the encoder is in the ensemble once"
    student = posterior.distill(encoder(num_labels=3), DataLoader(data, batch_size=4), epochs=1)
    assert student.predict(data.inputs).mutual_information.shape == (8,)
