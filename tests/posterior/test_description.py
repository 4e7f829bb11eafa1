"""Networks as plain data and back."""

import copy
import cProfile
import functools
import json
import pstats
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from lightning_sgmcmc import BayesianModule, Bernoulli, Categorical, Gaussian, GaussianPrior, Posterior
from lightning_sgmcmc.callbacks import SampleCollector
from lightning_sgmcmc.posterior import description
from lightning_sgmcmc.posterior.description import NotDescribableError, build, describe
from lightning_sgmcmc.samplers import SGHMC
from tests.support.recorders import Each
from tests.support.small_run import fit_every_step, module, tensors


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3, bias=False), nn.Softplus(2.0))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, (1, 3), padding="same", bias=False),
        nn.BatchNorm2d(4, eps=1e-3, momentum=0.3),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4, 4, 1, stride=1, padding=(1, 0), groups=2),
        nn.BatchNorm2d(4, affine=False),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def nested() -> nn.Module:
    block = nn.Sequential()
    block.add_module("first", nn.Linear(6, 5))
    block.add_module("norm", nn.LayerNorm(5, elementwise_affine=False))
    return nn.Sequential(block, nn.Sequential(nn.GELU("tanh"), nn.Linear(5, 3)), nn.Tanh())


class Scaled(nn.Module):
    """A layer of one's own that keeps its arguments, as torch's layers do."""

    def __init__(self, features: int, scale: float = 1.0, sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.features, self.scale, self.sizes = features, scale, sizes
        self.linear = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Outer:
    class Inner(Scaled):
        """A class inside a class can be imported; one inside a function cannot."""


class Forgetful(nn.Module):
    """Does not keep what it was made with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class ForgetfulScale(nn.Module):
    """Keeps its argument under another name, and the argument has a default."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self._scale


class Calls(nn.Module):
    """Keeps a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class Classifier(BayesianModule):
    """A subclass with arguments of its own, some positional, some handed on."""

    def __init__(
        self, width: int, depth: int = 1, *, options: dict[str, Any] | None = None, act: str = "Tanh", **rest: Any
    ) -> None:
        super().__init__(likelihood=Categorical(), prior=GaussianPrior(std=2.0), sampler=SGHMC, **rest)
        layers: list[nn.Module] = [nn.Linear(6, width), nn.BatchNorm1d(width)]
        for _ in range(depth):
            layers += [getattr(nn, act)(), nn.Linear(width, width)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, (options or {}).get("classes", 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Narrower(Classifier):
    """A subclass of a subclass, whose arguments differ from its parent's."""

    def __init__(self, half_width: int = 2) -> None:
        super().__init__(2 * half_width, act="ReLU", lr=0.3)


class Wrapping(BayesianModule):
    """A subclass without a constructor of its own."""


def again(module: nn.Module) -> nn.Module:
    """Describe, go through JSON as a manifest does, build, and load the state."""
    description = json.loads(json.dumps(describe(module)))
    twin: nn.Module = build(description)
    twin.load_state_dict(module.state_dict())
    return twin


def assert_same_network(module: nn.Module, twin: nn.Module) -> None:
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
    assert type(twin) is type(module) or isinstance(module, nn.Sequential)
    for training in (False, True):  # in training, too: momentum and dropout are part of a network
        outputs = []
        for net in (copy.deepcopy(module).train(training), copy.deepcopy(twin).train(training)):
            torch.manual_seed(1)
            outputs.append((net(x), net.state_dict()))
        assert torch.equal(outputs[0][0], outputs[1][0])
        assert outputs[0][1].keys() == outputs[1][1].keys()
        assert all(torch.equal(a, b) for a, b in zip(outputs[0][1].values(), outputs[1][1].values(), strict=True))


def prepared(net: nn.Module) -> nn.Module:
    """Materialise lazy layers and move the running statistics."""
    net(torch.randn(5, 6))
    return net


NETWORKS = {
    "mlp": mlp,
    "cnn": cnn,
    "nested": nested,
    "torchvision": lambda: torchvision.ops.MLP(6, [8, 3], norm_layer=nn.BatchNorm1d, dropout=0.1),
    "own layer": lambda: nn.Sequential(Scaled(6, scale=3.0, sizes=(1, 2)), Outer.Inner(6, scale=0.5), nn.Linear(6, 3)),
    "bare layer": lambda: nn.Linear(6, 3),
}
MODULES = {
    "net": lambda: BayesianModule(net=mlp(), likelihood=Categorical(), lr=0.1, seed=3),
    "net cnn": lambda: BayesianModule(
        net=cnn(), likelihood=Categorical(), sampler=functools.partial(SGHMC, friction=0.2)
    ),
    "torchvision": lambda: BayesianModule(net=torchvision.ops.MLP(6, [4, 2]), likelihood=Gaussian(0.3, learned=True)),
    "bernoulli": lambda: BayesianModule(net=nn.Linear(6, 1), likelihood=Bernoulli()),
    "subclass": lambda: Classifier(4, options={"classes": 5}, temperature=0.5),
    "subclass of it": lambda: Narrower(3),
    "without constructor": lambda: Wrapping(net=nested(), likelihood=Gaussian(0.4)),
    "own layer": lambda: BayesianModule(net=Scaled(6, 2.0), likelihood=Gaussian()),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_come_back(name: str) -> None:
    net = prepared(NETWORKS[name]())
    assert_same_network(net, again(net))


@pytest.mark.parametrize("name", MODULES)
def test_modules_come_back(name: str) -> None:
    module = MODULES[name]()
    prepared(module)
    twin = again(module)
    assert type(twin) is type(module)
    assert isinstance(twin, BayesianModule)
    assert_same_network(module, twin)
    assert repr(twin.likelihood) == repr(module.likelihood)
    for key in ("lr", "temperature"):
        assert getattr(twin, key) == getattr(module, key)


def test_describing_spends_no_random_numbers() -> None:
    module = MODULES["subclass"]()
    before = torch.get_rng_state()
    describe(module)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "value", [None, True, 3, -2.5, "text", [1, [2.0, None]], {"a": {"b": [1]}}, {"class": "not a module"}, {}]
)
def test_plain_values_come_back(value: Any) -> None:
    assert build(json.loads(json.dumps(describe(value)))) == value


def local_class() -> nn.Module:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    return Local()


def closure() -> nn.Module:
    factor = 3.0
    return Calls(lambda x: factor * x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (closure, "a function cannot be described"),
        (lambda: Calls(torch.relu), "cannot be described as plain data"),
        (lambda: Calls(functools.partial(torch.clamp, min=0)), "a partial cannot be described"),
        (lambda: Calls(torch.ones(3)), "a Tensor cannot be described"),
        (local_class, "defined inside a function"),
        (lambda: Forgetful(3), "Forgetful does not store its argument 'width'"),
        (lambda: nn.LSTM(6, 3), "takes variadic positional arguments"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), "."),
        (lambda: nn.ModuleList([nn.Linear(6, 3)]), "ModuleList does not store its argument"),
    ],
)
@pytest.mark.parametrize("place", ["alone", "in a Sequential", "in a module"])
def test_what_cannot_be_described(make: Any, message: str, place: str) -> None:
    net = make()
    if place != "alone":
        net = nn.Sequential(nn.Linear(6, 6), net)
    if place == "in a module":
        net = BayesianModule(net=net, likelihood=Categorical())
    with pytest.raises(NotDescribableError, match=message):
        describe(net)


def test_a_module_of_a_local_class_cannot_be_described() -> None:
    class Local(BayesianModule):
        def __init__(self) -> None:
            super().__init__(net=nn.Linear(6, 3), likelihood=Categorical())

    with pytest.raises(NotDescribableError, match="defined inside a function"):
        describe(Local())


def test_a_network_that_was_changed_after_it_was_made() -> None:
    module = Classifier(4)
    module.head = nn.Linear(4, 9)
    with pytest.raises(NotDescribableError, match="is a different network"):
        describe(module)
    scaled = Scaled(6)
    scaled.linear = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    with pytest.raises(NotDescribableError, match="is a different network"):
        describe(scaled)


@pytest.mark.parametrize("inside", [False, True])
def test_an_activation_in_two_places(inside: bool) -> None:
    """`act = nn.ReLU()` once, and used after every layer."""
    act = nn.ReLU()
    net: nn.Module = nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 3), act)
    if inside:
        net = BayesianModule(net=net, likelihood=Gaussian())
    try:
        twin = again(net)
    except NotDescribableError:
        return
    assert_same_network(net, twin)


def test_an_argument_that_is_not_kept_and_has_a_default() -> None:
    net = ForgetfulScale(scale=5.0)
    try:
        twin = again(net)
    except NotDescribableError:
        return
    assert_same_network(net, twin)


def test_identity_comes_back() -> None:
    net = nn.Sequential(nn.Linear(6, 3), nn.Identity())
    assert_same_network(net, again(net))


def test_tied_layers_are_refused() -> None:
    linear = nn.Linear(6, 6)
    module = BayesianModule(net=nn.Sequential(linear, nn.Tanh(), linear), likelihood=Gaussian())
    with pytest.raises(NotDescribableError, match="is a different network"):
        describe(module)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_anywhere:Net", "no_such_module_anywhere is not imported, and a store does not choose what is"),
        ("torch.nn.no_such_module:Net", "cannot import torch.nn.no_such_module"),
        ("torch.nn:NoSuchLayer", "cannot import torch.nn:NoSuchLayer"),
        ("os:system", "os:system is not a torch module"),
        ("builtins:dict", "builtins:dict is not a torch module"),
        ("torch.nn:functional.relu", "torch.nn has no functional.relu"),
        ("unittest.__main__:Net", "unittest.__main__ is not imported"),
        ("torch.jit:ScriptModule", "torch.jit has no networks that a store may name"),
        ("torch.nn", "is not the name of a class"),
        (["torch.nn:Linear"], "is not the name of a class"),
    ],
)
def test_only_torch_modules_are_built(path: str, message: str) -> None:
    """A manifest names classes; nothing but a module is ever called."""
    with pytest.raises(NotDescribableError, match=message):
        build({"class": path, "arguments": {"command": "false"}})


def test_a_network_with_endlessly_many_parts_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "MOST_PARTS", 10_000)
    endless = {"class": "torch.nn.modules.transformer:Transformer", "arguments": {"num_encoder_layers": 10**9}}
    with torch.device("meta"), pytest.raises(NotDescribableError, match="too many parts"):
        build(endless)


def test_a_users_profiler_counts_on(tmp_path: Path) -> None:
    """`cProfile`, coverage and debuggers are Python's hooks; a fit and a load in their midst leave them alone."""
    hooks: list[Any] = []

    def after(*_: Any) -> int:
        hooks.append(sys.getprofile())
        counted()
        return 0

    def counted() -> None:
        """What the profile should have."""

    profile = cProfile.Profile()
    profile.enable()
    before = sys.getprofile()
    fit_every_step(module(), SampleCollector(tmp_path), Each("on_train_batch_end", after))
    posterior = Posterior.load(tmp_path)
    posterior.predict(tensors()[0])
    counted()
    assert sys.getprofile() is before
    profile.disable()
    assert all(hook is before for hook in hooks)
    calls = {name: count for (_, _, name), (count, *_) in pstats.Stats(profile).stats.items()}  # type: ignore[attr-defined]
    assert calls["counted"] == len(hooks) + 1 == 7


@pytest.mark.parametrize("set_hook", ["setprofile", "settrace"])
def test_python_hooks_of_the_user_stay(tmp_path: Path, set_hook: str) -> None:
    calls: list[str] = []

    def hook(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "fit_loop_of_the_test":
            calls.append(event)

    def fit_loop_of_the_test(*_: Any) -> int:
        return 0

    before = getattr(sys, set_hook.replace("set", "get"))()
    getattr(sys, set_hook)(hook)
    try:
        fit_every_step(module(), SampleCollector(tmp_path), Each("on_train_batch_end", fit_loop_of_the_test))
        Posterior.load(tmp_path)
        fit_loop_of_the_test()
    finally:
        getattr(sys, set_hook)(before)
    assert len(calls) == 7
