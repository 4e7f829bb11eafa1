"""Dict batches on the stand-in, which has no LSTM: the steps and predictions of the CPU; and posteriors there."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior, bayesianize
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from tests.cuda.stand_in import StandIn
from tests.cuda.trainer import stand_in_trainer
from tests.pretrained.networks import Sentences, encoder, lora
from tests.support.trainers import quiet_trainer
from tests.test_inputs import Texts, padded, pooled

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def _module(kind: str) -> BayesianModule:
    options: dict[str, Any] = {"lr": 0.01, "seed": 0, "num_chains": 4}
    if kind == "encoder":
        return bayesianize(encoder(), lora(), **options)
    return BayesianModule(pooled(), Categorical(), chain_start="same", **options)


def _data(kind: str) -> tuple[DatasetDataModule, Any]:
    if kind == "encoder":
        rows = Sentences()
        return DatasetDataModule(rows, rows, batch_size=8), rows.inputs
    texts = Texts("")
    return DatasetDataModule(texts, texts, batch_size=2, collate_fn=padded), {"input_ids": texts.ids}


def _fitted(kind: str, trainer_of: Any) -> tuple[BayesianModule, dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    module, (data, inputs) = _module(kind), _data(kind)
    collected: list[pl.Callback] = [SamplingSchedule(every_n_steps=2), SampleCollector(in_memory=True)]
    options = QUIET | {"max_steps": 4, "max_epochs": -1, "callbacks": [*collected, BayesianModelAverage()]}
    trainer_of(**options).fit(module, data)
    assert module.posterior is not None
    state = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    return module, state, module.posterior.predict(inputs).probabilities.cpu()


def several_inputs_are_those_of_the_cpu(device: StandIn) -> None:
    """Dicts with masks, padded to different lengths, and a text encoder with adapters."""
    for kind in ("texts", "encoder"):
        _, own, predicted = _fitted(kind, lambda **options: stand_in_trainer("32-true", **options))
        _, other, expected = _fitted(kind, quiet_trainer)
        largest = max(float((own[n].double() - other[n].double()).abs().max()) for n in own if n in other)
        assert largest < 2e-4, (kind, largest)
        assert torch.allclose(predicted, expected, atol=1e-4), kind


def _told(likelihood: Any, outputs: int, device: str) -> dict[str, Tensor]:
    """Return what five networks on a device say of data."""
    generator = torch.Generator().manual_seed(0)
    states = [
        {"weight": torch.randn(outputs, 3, generator=generator), "bias": torch.randn(outputs, generator=generator)}
        for _ in range(5)
    ]
    x = torch.randn(40, 3, generator=generator)
    y = (x.sum(1) > 0).long() if isinstance(likelihood, Categorical) else x.sum(1, keepdim=True)
    data = DataLoader(TensorDataset(x, y), 20)
    posterior = Posterior.from_states(nn.Linear(3, outputs), states, likelihood, device=device)
    prediction, acquired = posterior.predict(x), posterior.acquire(x, 3)
    few = posterior.compress(2, data)
    return {
        "nll": torch.tensor(posterior.evaluate(data).bma["nll"]),
        "acquired": acquired.scores,
        "of few": few.predict(x).total,
        "drawn": torch.tensor(prediction.sample(4).shape),
        "quantile": prediction.quantile(0.3),
        "joint": torch.tensor(posterior.joint_nll(data).nll),
    }


def a_posterior_tells_what_it_tells_on_the_cpu(device: StandIn) -> None:
    """Evaluations, choices of data and of samples, and draws, of classes and of numbers."""
    for likelihood, outputs in ((Categorical(), 3), (Gaussian(0.5), 1)):
        own, other = (_told(likelihood, outputs, place) for place in ("cuda", "cpu"))
        for name, value in own.items():
            assert torch.allclose(value.cpu().double(), other[name].double(), rtol=1e-3, atol=1e-3), name


CHECKS = {
    check.__name__: check for check in (several_inputs_are_those_of_the_cpu, a_posterior_tells_what_it_tells_on_the_cpu)
}
