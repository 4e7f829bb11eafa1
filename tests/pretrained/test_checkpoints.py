"""Weights that a checkpoint has, and how it names them: none is left out, exchanged or guessed without a word."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior, Posterior, bayesianize
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule
from tests.support.trainers import quiet_trainer

State = dict[str, Tensor]


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def trained() -> nn.Sequential:
    torch.manual_seed(1)
    net = make()
    net(torch.randn(20, 3) + 1)
    return net.eval()


def named(state: State, beginning: str, middle: str = "") -> State:
    """The state under the names that wrappers give."""
    return {f"{beginning}{name.replace('.', f'.{middle}', 1)}": tensor for name, tensor in state.items()}


def other(state: State) -> State:
    return {name: tensor + 1 for name, tensor in state.items()}


FITTING: dict[str, Callable[[State], Any]] = {
    "plain": lambda s: s,
    "of a loop": lambda s: {"model": s, "epoch": 3},
    "Lightning": lambda s: {"state_dict": named(s, "model.")},
    "torch.compile in Lightning": lambda s: {"state_dict": named(s, "model._orig_mod.")},
    "a compiled layer": lambda s: named(s, "", "_orig_mod."),
    "activation checkpointing in DDP": lambda s: named(s, "module.", "_checkpoint_wrapped_module."),
    "one network under two names": lambda s: named(s, "model.") | named(s, "net."),
    "averages by Lightning": lambda s: {"state_dict": s, "current_model_state": other(s)},
    "without counts": lambda s: {n: t for n, t in s.items() if not n.endswith("num_batches_tracked")},
}


@pytest.mark.parametrize("form", FITTING)
def test_all_of_the_network_is_loaded(form: str, trained: nn.Sequential, tmp_path: Path) -> None:
    content, net = FITTING[form](trained.state_dict()), make()
    torch.save(content, tmp_path / "run.ckpt")
    x = torch.randn(5, 3)
    for source in (content, tmp_path / "run.ckpt"):
        module = bayesianize(make(), checkpoint=source)
        assert torch.equal(module.net.eval()(x), trained(x))
        posterior = Posterior.from_states(net, [source], Categorical())
        torch.testing.assert_close(posterior.predict(x).probabilities, trained(x).softmax(-1))


REFUSED: dict[str, tuple[Callable[[State], Any], str]] = {
    "no statistics": (lambda s: {n: t for n, t in s.items() if "running" not in n}, r"has no '1\.running_mean'"),
    "an average beside": (
        lambda s: named(s, "model.") | named(other(s), "ema."),
        "holds the network 2 times, under 'm",
    ),
    "an average of timm": (
        lambda s: {"state_dict": s, "state_dict_ema": other(s)},
        "holds weights 2 times, as 'state_dict', 'state_dict_ema': pass one",
    ),
    "no head": (lambda s: {n: t for n, t in s.items() if n[0] != "3"}, r"no '3.weight'.*load a part .* strict=False"),
    "another head": (
        lambda s: s | {"3.weight": torch.zeros(5, 4)},
        r"has '3.weight' of shape \(5, 4\), .* replace its head afterwards",
    ),
    "a diverged run": (lambda s: s | {"0.bias": torch.full((4,), torch.nan)}, "NaN or infinite numbers in '0.bias'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_network_is_refused(case: str, trained: nn.Sequential) -> None:
    change, message = REFUSED[case]
    content = change(trained.state_dict())
    for call in (
        lambda: bayesianize(make(), checkpoint=content),
        lambda: Posterior.from_states(make(), [content], Categorical()),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_layers_that_the_network_lacks_are_named(trained: nn.Sequential) -> None:
    """As where the weights of a resnet34 are loaded into a resnet18, all of whose names they have."""
    deeper = trained.state_dict() | {"4.weight": torch.zeros(2, 2), "4.bias": torch.zeros(2)}
    with pytest.warns(UserWarning, match=r"checkpoint has 2 tensors that this Sequential has not \(4.weight, 4.bias\)"):
        bayesianize(make(), checkpoint=deeper)


class Tied(nn.Module):
    def __init__(self, shares: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        if shares:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x))
        return output


@pytest.mark.parametrize("left_out", ["first.weight", "last.weight", None])
def test_a_shared_weight_may_have_either_name(left_out: str | None) -> None:
    trained, x = Tied(), torch.randn(4, 3)
    state = {name: tensor for name, tensor in trained.state_dict().items() if name != left_out}
    assert torch.equal(bayesianize(Tied(), "all", checkpoint=state).net(x), trained(x))


def test_two_weights_do_not_become_one() -> None:
    message = "has other values as 'first.weight' than as 'last.weight', which are one tensor in this Tied"
    with pytest.raises(ValueError, match=message):
        bayesianize(Tied(), "all", checkpoint=Tied(shares=False).state_dict())


STARTS = ["plain", "Lightning", "torch.compile in Lightning", "activation checkpointing in DDP"]


@pytest.mark.parametrize("form", STARTS)
def test_starts_and_centres_have_these_names_too(form: str, trained: nn.Sequential, tmp_path: Path) -> None:
    torch.save(FITTING[form](trained.state_dict()), tmp_path / "run.ckpt")
    prior = GaussianPrior(0.1, center=tmp_path / "run.ckpt")
    module = BayesianModule(
        make(), Categorical(), prior, lr=1e-9, num_chains=2, chain_start=[tmp_path / "run.ckpt"] * 2
    )
    callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(in_memory=True)]
    rows = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    quiet_trainer(max_steps=2, callbacks=callbacks).fit(module, DataLoader(rows, 4))
    assert module.posterior is not None
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(module.posterior[1].state[f"net.{name}"], parameter.detach(), rtol=0, atol=1e-3)
        shift = prior.log_prob({f"net.{name}": parameter.detach()})
        assert torch.equal(shift, GaussianPrior(0.1).log_prob({"w": torch.zeros_like(parameter)}))


def test_a_centre_of_another_network_is_refused(trained: nn.Sequential) -> None:
    """Names of one layer end like those of another."""
    center = {"a.0.weight": torch.zeros(4, 3), "b.3.bias": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"center has no tensor for the parameter 'net.0.bias'"):
        GaussianPrior(center=center).log_prob({f"net.{name}": p for name, p in trained.named_parameters()})


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "orthogonal"])
@pytest.mark.parametrize("what", ["all", "last_layer"])
def test_parametrized_layers_have_a_centre(norm: str, what: str) -> None:
    net = make()
    getattr(nn.utils.parametrizations, norm)(net[3])
    module = bayesianize(net, what, lr=0.01, num_chains=2)
    rows = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    callbacks = [SamplingSchedule(every_n_steps=2), SampleCollector(in_memory=True)]
    quiet_trainer(max_steps=2, callbacks=callbacks).fit(module, DataLoader(rows, 4))
    assert module.posterior is not None
    assert any("parametrizations" in name for name in module.posterior[0].parameters)
