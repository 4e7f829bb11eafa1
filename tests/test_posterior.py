"""The collected posterior: predictions, weights, BatchNorm, and networks as plain data."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.ops import MLP

from lightning_sgmcmc import BayesianModule, Categorical, Gaussian, Posterior
from lightning_sgmcmc.description import NotDescribableError, build, describe
from lightning_sgmcmc.store import DiskStore, MemoryStore, PosteriorSample


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))


class Sized(BayesianModule):
    """A subclass with an argument of its own."""

    def __init__(self, hidden: int = 5, **options: Any) -> None:
        super().__init__(likelihood=Categorical(), **options)
        self.body = MLP(4, [hidden, 3])

    def forward(self, x: Any) -> Any:
        return self.body(x)


def samples(module: nn.Module, count: int = 5) -> list[PosteriorSample]:
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for step in range(count):
        parameters = {n: torch.randn(p.shape, generator=generator) for n, p in module.named_parameters()}
        buffers = {n: b.clone() for n, b in module.named_buffers()}
        drawn.append(PosteriorSample(step, 0, 0, 0.0, log_weight=0.5 * step, parameters=parameters, buffers=buffers))
    return drawn


def posterior(module: BayesianModule, store: Any = None) -> Posterior:
    store = store if store is not None else MemoryStore()
    for drawn in samples(module):
        store.append(drawn)
    return Posterior(store, module)


def test_prediction_is_the_weighted_mean_of_the_samples_own() -> None:
    module = BayesianModule(net=network(), likelihood=Categorical())
    module.train()
    before, x = copy.deepcopy(module.state_dict()), torch.randn(11, 4)
    found = posterior(module)
    prediction = found.predict(x, return_samples=True)
    per_sample = []
    for drawn in samples(module):
        net = network()
        net.load_state_dict({n.removeprefix("net."): t for n, t in drawn.state.items()})
        per_sample.append(net.eval()(x).softmax(1).detach())
    expected = torch.stack(per_sample)
    weights = (0.5 * torch.arange(5.0)).softmax(0)
    mean = (weights[:, None, None] * expected).sum(0)
    torch.testing.assert_close(prediction.sample_probabilities, expected)
    torch.testing.assert_close(prediction.probabilities, mean)
    entropy = -(mean * mean.log()).sum(1)
    own = -(expected * expected.log()).sum(2)
    torch.testing.assert_close(prediction.entropy, entropy)
    torch.testing.assert_close(
        prediction.mutual_information, entropy - (weights[:, None] * own).sum(0), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(found.weights.float(), weights)
    assert found.effective_sample_size == pytest.approx(1 / weights.square().sum().item(), rel=1e-5)
    for batches in (DataLoader(TensorDataset(x, torch.zeros(11)), 4), [x[:3], x[3:]]):
        torch.testing.assert_close(found.predict(batches).probabilities, mean)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items()), "its own weights stay untouched"
    assert module.training
    assert module.net.training


def test_batch_norm_is_estimated_anew_for_every_sample() -> None:
    module = BayesianModule(net=network(), likelihood=Categorical())
    loader = DataLoader(TensorDataset(torch.randn(64, 4) * 3 + 1, torch.zeros(64)), 16)
    old = posterior(module)
    new = old.update_batch_norm(loader)
    for before, after in zip(old, new, strict=True):
        net = network()
        net.load_state_dict({n.removeprefix("net."): t for n, t in before.state.items()})
        torch.optim.swa_utils.update_bn(loader, net)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(after.buffers[f"net.1.{name}"], net[1].state_dict()[name])  # type: ignore[index]
        assert before.buffers["net.1.num_batches_tracked"] == 0
        assert torch.equal(before.parameters["net.0.weight"], after.parameters["net.0.weight"])
    assert module.net[1].momentum == 0.1
    x = torch.randn(5, 4)
    assert not torch.allclose(old.predict(x).probabilities, new.predict(x).probabilities)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(BayesianModule(net=network(), likelihood=Categorical()), id="layers"),
        pytest.param(BayesianModule(net=MLP(4, [5, 3]), likelihood=Categorical(), lr=0.1), id="torchvision"),
        pytest.param(Sized(hidden=7, lr=0.3), id="subclass"),
        pytest.param(
            BayesianModule(
                net=nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, (2, 2), bias=False), nn.Flatten()),
                likelihood=Categorical(),
            ),
            id="convolution",
        ),
        pytest.param(BayesianModule(net=nn.Linear(4, 1), likelihood=Gaussian(0.2, learned=True)), id="regression"),
    ],
)
def test_a_store_is_loaded_without_its_program(tmp_path: Path, module: BayesianModule) -> None:
    state = torch.get_rng_state()
    description = describe(module)
    assert torch.equal(torch.get_rng_state(), state), "describing spends no random numbers"
    known = posterior(module, DiskStore.create(tmp_path / "s", description))
    alone = Posterior.load(tmp_path / "s")
    x = torch.randn(6, 4)
    for a, b in zip(vars(alone.predict(x)).values(), vars(known.predict(x)).values(), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


class Odd(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2 * width)


def test_what_cannot_be_described_is_said_and_still_loads(tmp_path: Path) -> None:
    class Local(nn.Linear):
        pass

    for net in (Odd(3), Local(4, 3)):
        with pytest.raises(NotDescribableError):
            describe(BayesianModule(net=net, likelihood=Categorical()))
    module = BayesianModule(net=nn.Linear(4, 3), likelihood=Categorical())
    posterior(module, DiskStore.create(tmp_path / "s"))
    nameless = Posterior.load(tmp_path / "s")
    assert len(list(nameless)) == 5
    with pytest.raises(RuntimeError, match=r"no description of its network: use Posterior.load\(path, model=…\)"):
        nameless.predict(torch.randn(2, 4))
    assert Posterior.load(tmp_path / "s", module).predict(torch.randn(2, 4)).probabilities is not None
    with pytest.raises(NotDescribableError, match="not a torch module"):
        build({"class": "os:system", "arguments": {}})


def test_foreign_networks_are_refused(tmp_path: Path) -> None:
    module = BayesianModule(net=nn.Linear(4, 3), likelihood=Categorical())
    posterior(module, DiskStore.create(tmp_path / "s"))
    other = BayesianModule(net=nn.Linear(5, 3), likelihood=Categorical())
    with pytest.raises(ValueError, match=r"of another network than the model: 'net.weight' has shape \(3, 4\) in the"):
        Posterior.load(tmp_path / "s", other)


def test_an_empty_posterior_says_so() -> None:
    empty = Posterior(MemoryStore(), BayesianModule(net=nn.Linear(4, 3), likelihood=Categorical()))
    with pytest.raises(RuntimeError, match="no posterior samples"):
        empty.predict(torch.randn(2, 4))
    with pytest.raises(ValueError, match="no samples to weigh"):
        _ = empty.weights
