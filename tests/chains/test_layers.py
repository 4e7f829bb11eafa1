"""Layers with rules of their own: padding rows, sparse gradients, activations that are computed again, refusals."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, FlatPrior
from lightning_sgmcmc.callbacks import BayesianModelAverage, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.reference.problem import FullEnergy
from tests.support.trainers import quiet_trainer

CHAINS, WORDS, PADDING = 3, 7, 2
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(WORDS, (24, 5), generator=GENERATOR)
LABELS = (IDS[:, 0] > 3).long()


class Texts(nn.Module):
    """The mean of embeddings, and a linear layer; `again` computes the latter again in the backward pass."""

    def __init__(self, again: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 4, **options)
        self.last = nn.Linear(4, 3)
        self.again = again

    def forward(self, ids: Tensor) -> Tensor:
        features = self.words(input=ids).mean(1)
        if not self.again:
            return self.last(features)
        return checkpoint(lambda x: self.last(x).tanh(), features, use_reentrant=False)


def fitted(net: nn.Module, chains: int = CHAINS, *callbacks: Any, **options: Any) -> BayesianModule:
    """Return a module after eight steps."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"sampler": SGHMC, "lr": 0.1, "seed": 1, "chain_start": "same", "num_chains": chains}
    module = BayesianModule(copy.deepcopy(net), Categorical(), **(settings | options))
    trainer = quiet_trainer(max_steps=8, callbacks=[SamplingSchedule(every_n_steps=4), *callbacks])
    trainer.fit(module, DatasetDataModule(TensorDataset(IDS, LABELS), batch_size=12))
    return module


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("execution", "compiled"),
    [("vmap", False), ("unrolled", False), pytest.param("vmap", True, marks=pytest.mark.slow)],
)
def test_the_likelihood_leaves_the_padding_row_of_every_chain_alone(execution: str, compiled: bool) -> None:
    """Without a prior and without noise the row stays where it began; all other rows are those of the loop."""
    net = Texts(padding_idx=PADDING)
    start = net.words.weight[PADDING].detach()
    options: dict[str, Any] = {"prior": FlatPrior(), "temperature": 1e-12, "compile": compiled}
    together = state(fitted(net, chain_execution=execution, **options))
    torch.testing.assert_close(together["net.words.weight"][:, PADDING], start.expand(CHAINS, -1))
    alone = state(fitted(net, chain_execution="loop", prior=FlatPrior(), temperature=1e-12))
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-4, atol=1e-6)


def test_the_reference_leaves_the_padding_row_of_every_chain_alone() -> None:
    gradients = []
    for vmapped in (False, True):
        module = BayesianModule(Texts(padding_idx=PADDING), Categorical(), prior=FlatPrior(), num_data=len(IDS))
        energy = FullEnergy(module, [(IDS, LABELS)], vmapped=vmapped)
        rows = energy.present + torch.linspace(0, 1, CHAINS)[:, None]
        gradients.append(energy.sampled(energy(rows)[1]))
    assert gradients[1]["net.words.weight"].shape == (CHAINS, WORDS - 1, 4)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_a_masked_embedding_is_masked_once() -> None:
    module = fitted(Texts(padding_idx=PADDING))
    assert len(copy.deepcopy(module).net.words._forward_hooks) == 1
    assert not fitted(Texts()).net.words._forward_hooks


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_sparse_gradients_become_dense_ones(execution: str) -> None:
    sparse, dense = (state(fitted(Texts(sparse=each), chain_execution=execution)) for each in (True, False))
    assert all(torch.equal(sparse[name], tensor) for name, tensor in dense.items())


def test_one_chain_may_compute_activations_again() -> None:
    again, once = Texts(again=True), Texts()
    once.load_state_dict(again.state_dict())
    once.last = nn.Sequential(once.last, nn.Tanh())
    found, expected = (list(state(fitted(net, chains=1)).values()) for net in (again, once))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("execution", ["loop", "vmap"])
def test_several_chains_that_compute_activations_again_are_refused(execution: str) -> None:
    """Under vmap older versions of torch already refuse the forward pass, and the loop says the rest."""
    refused = r"torch.utils.checkpoint\), where its layers hold all 3 chains: switch"
    with pytest.raises(RuntimeError, match=refused if execution == "loop" else f"{refused}|NoopSaveInputs.*'loop'"):
        fitted(Texts(again=True), chain_execution=execution)


class Fails(Texts):
    """A network whose backward pass fails."""

    def forward(self, ids: Tensor) -> Tensor:
        output = super().forward(ids)
        if output.requires_grad:
            output.register_hook(self.fail)
        return output

    def fail(self, gradient: Tensor) -> None:
        raise RuntimeError("a fault of the network's own")


class As(nn.Module):
    """Gives its input a type, as autocast on CUDA gives one to the outputs of convolutions."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)])
def test_chains_at_once_have_norms_of_inputs_in_half_precision(norm: nn.Module) -> None:
    """torch.vmap's own gradient refuses them; chains at once are one chain after another."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(5, 8),
        nn.Unflatten(1, (4, 2)),
        As(torch.bfloat16),
        norm,
        As(torch.float32),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    states = {execution: fitted_numbers(net, execution) for execution in ("loop", "vmap")}
    for name, value in states["loop"].items():
        assert torch.allclose(states["vmap"][name], value, rtol=0.02, atol=0.01), name


def fitted_numbers(net: nn.Module, execution: str) -> dict[str, Tensor]:
    """Return the state after a fit without noise, whose samples are evaluated too."""
    module = BayesianModule(
        copy.deepcopy(net), Categorical(), num_chains=CHAINS, lr=0.1, seed=1, temperature=0.0, chain_execution=execution
    )
    callbacks = [SamplingSchedule(every_n_steps=4), SampleCollector(in_memory=True), BayesianModelAverage()]
    data = DatasetDataModule(TensorDataset(IDS.float(), LABELS), batch_size=12, val=TensorDataset(IDS.float(), LABELS))
    quiet_trainer(max_steps=8, callbacks=callbacks).fit(module, data)
    return {name: tensor.detach().float() for name, tensor in module.state_dict().items()}


def test_other_errors_of_the_backward_pass_are_their_own() -> None:
    with pytest.raises(RuntimeError, match=r"^a fault of the network's own"):
        fitted(Fails())


class Spectral(nn.Module):
    """A convolution in Fourier space, with complex weights as pairs of numbers behind a tensor of odd size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 5)
        self.waves = nn.Parameter(torch.randn(1, 3, 2))
        self.last = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.first(ids.float())) * torch.view_as_complex(self.waves)
        output: Tensor = self.last(torch.fft.irfft(waves, 5))
        return output


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize("chains", [1, 3])
def test_pairs_of_numbers_may_be_viewed_as_complex_ones(chains: int, execution: str) -> None:
    """In training, and in samples, which predict what the chains' own states do."""
    collector = SampleCollector(in_memory=True)
    module = fitted(Spectral(), chains, collector, chain_execution=execution)
    assert collector.posterior is not None
    sampled = collector.posterior[-1:].predict(IDS).probabilities
    with module.at_chain(chains - 1), torch.no_grad():
        torch.testing.assert_close(sampled, module(IDS).softmax(1).to(sampled))


def with_sparse_buffer() -> nn.Module:
    net = Texts()
    net.register_buffer("graph", torch.eye(3).to_sparse())
    return net


@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        (Texts(max_norm=0.5), "'net.words' has max_norm=0.5, so each forward pass rescales rows of the weights"),
        (Texts(scale_grad_by_freq=True), "'net.words' has scale_grad_by_freq=True, so its gradients are not those"),
        (
            with_sparse_buffer(),
            "the buffer 'net.graph' is a sparse tensor, which samples cannot hold: register it dense",
        ),
        (torch.jit.script(nn.Linear(5, 3)), "'net' is scripted by torch.jit, so its parameters cannot be replaced"),
    ],
)
@pytest.mark.parametrize("chains", [1, 2])
def test_layers_that_cannot_be_sampled_are_refused(net: nn.Module, sentence: str, chains: int) -> None:
    torch.manual_seed(0)
    module = BayesianModule(net, Categorical(), sampler=SGHMC, lr=0.1, num_chains=chains)
    trainer = quiet_trainer(max_steps=1, callbacks=[SamplingSchedule(every_n_steps=1)])
    with pytest.raises(ValueError, match=sentence):
        trainer.fit(module, DatasetDataModule(TensorDataset(IDS, LABELS), batch_size=12))


def test_a_frozen_embedding_may_be_of_any_kind() -> None:
    net = Texts(max_norm=0.5, scale_grad_by_freq=True)
    net.words.requires_grad_(False)
    assert state(fitted(net))["net.last.weight"].isfinite().all()
