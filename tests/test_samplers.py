"""The update rules: against torch's optimizers, against the formulas written out, and along the chain axis."""

import functools
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers import SGHMC, SGLD, SGNHT, Sampler, UnderdampedLangevin, pSGLD
from lightning_sgmcmc.samplers.noise import ChainNoise
from tests.benchmarks.networks import resnet20

ALL = [SGLD, pSGLD, SGHMC, UnderdampedLangevin, SGNHT]
N = 50


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def tiny_resnet() -> nn.Module:
    torch.manual_seed(0)
    return resnet20()


def train(make: Callable[[Any], torch.optim.Optimizer], net: nn.Module, x: Tensor, steps: int, cycle: bool) -> Tensor:
    optimizer = make(net.parameters())
    y = torch.arange(len(x)) % 2
    for k in range(steps):
        for group in optimizer.param_groups:
            group.setdefault("base", group["lr"])
            group["lr"] = group["base"] * (1 - (k % 10) / 11 if cycle else 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


PAIRS = {
    "SGLD is SGD": (functools.partial(SGLD, lr=0.05, temperature=0), functools.partial(torch.optim.SGD, lr=0.05)),
    "SGHMC is momentum SGD": (
        functools.partial(SGHMC, lr=0.05, temperature=0, friction=0.1),
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    ),
    "SGHMC with little momentum": (
        functools.partial(SGHMC, lr=0.05, temperature=0, friction=0.75),
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.25),
    ),
    "pSGLD is RMSprop": (
        functools.partial(pSGLD, lr=0.01, temperature=0, alpha=0.99, eps=1e-5),
        functools.partial(torch.optim.RMSprop, lr=0.01, alpha=0.99, eps=1e-5),
    ),
}


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_without_temperature_they_are_torchs_optimizers_bit_for_bit(name: str, cycle: bool) -> None:
    ours, torchs = PAIRS[name]
    x = torch.randn(30, 5)
    results = [train(make, small(), x, 120, cycle) for make in (ours, torchs)]
    assert torch.equal(*results)
    doubles = [train(make, small().double(), x.double(), 60, cycle) for make in (ours, torchs)]
    assert torch.equal(*doubles)


@pytest.mark.parametrize("name", ["SGLD is SGD", "SGHMC is momentum SGD"])
def test_bit_for_bit_on_a_network_with_59_tensors(name: str) -> None:
    images = torch.randn(4, 3, 8, 8)
    results = [train(make, tiny_resnet(), images, 5, True) for make in PAIRS[name]]
    assert torch.equal(*results)


def test_parameter_groups_keep_their_own_lr() -> None:
    x, results = torch.randn(30, 5), []
    for make in PAIRS["SGHMC is momentum SGD"]:
        net = small()
        groups = [{"params": list(net[0].parameters()), "lr": 0.1}, {"params": list(net[2].parameters())}]  # type: ignore[index]
        results.append(train(lambda _, make=make, groups=groups: make(groups), net, x, 50, True))  # type: ignore[misc]
    assert torch.equal(*results)
    assert not torch.equal(results[0], train(PAIRS["SGHMC is momentum SGD"][0], small(), x, 50, True))


# -- the formulas, one number at a time ------------------------------------------------------------------------------


def reference(name: str, theta: Tensor, steps: list[dict[str, float]], noise: list[Tensor]) -> Tensor:
    """Follow algorithms of section 1 in float64 with g(θ) = θ³ + 1; noise holds ξ of each noisy step."""
    theta, v = theta.double(), torch.zeros_like(theta, dtype=torch.float64)
    square, eta, drawn = torch.zeros_like(v), 0.1, iter(noise)
    friction, last_lr, was_noisy = 0.1, steps[0]["lr"], False
    for step in steps:
        lr, tau, kappa = step["lr"], step["temperature"], step["multiplier"]
        g = theta**3 + 1
        xi = next(drawn).double() if tau > 0 else torch.zeros_like(theta)
        if name == "SGLD":
            theta = theta - lr * kappa * g + math.sqrt(2 * lr * tau / N) * xi
        elif name == "pSGLD":
            square = 0.99 * square + 0.01 * g**2
            precondition = 1 / (1e-5 + square.sqrt())
            theta = theta - lr * kappa * precondition * g + (2 * lr * tau * precondition / N).sqrt() * xi
        elif name == "SGHMC":
            if tau == 0 and not was_noisy:  # torch's momentum keeps b = -v/lr when lr changes
                v = v * lr / last_lr
            v = (1 - friction) * v - lr * kappa * g + math.sqrt(2 * friction * lr * tau / N) * xi
            theta = theta + v
            last_lr, was_noisy = lr, tau > 0
        elif name == "UnderdampedLangevin":
            h, gamma = lr, 1.0
            theta, v = theta + h * v, v - h * (kappa * N * g + gamma * v) + math.sqrt(2 * gamma * tau * h) * xi
        elif name == "SGNHT":
            v = (1 - eta) * v - lr * kappa * g + math.sqrt(2 * 0.1 * lr * tau / N) * xi
            theta = theta + v
            if tau > 0:
                eta = eta + float((N / lr * v.square().mean() - tau) * lr / N)
    return theta


STEPS = [
    {"lr": lr, "temperature": tau, "multiplier": kappa}
    for lr, tau, kappa in [
        (0.02, 0.0, 1.0),
        (0.03, 0.0, 1.0),
        (0.02, 1.0, 1.0),
        (0.01, 2.0, -1.5),
        (0.01, 0.5, 3.0),
        (0.03, 0.0, 1.0),
        (0.02, 0.0, 0.5),
        (0.02, 1.0, 1.0),
    ]
]


def set_controls(sampler: Sampler, step: dict[str, float], as_tensor: bool) -> None:
    wrap = (lambda value: torch.tensor(value, dtype=torch.float64)) if as_tensor else float
    sampler.set_control("lr", step["lr"] if isinstance(sampler, SGHMC) else wrap(step["lr"]))
    sampler.set_control("temperature", wrap(step["temperature"]) if step["temperature"] > 0 else 0.0)
    sampler.set_control("gradient_multiplier", wrap(step["multiplier"]))


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("sampler", ALL)
def test_updates_are_the_formulas(sampler: Any, as_tensor: bool) -> None:
    start = torch.linspace(-1, 1, 40, dtype=torch.float64)
    p = nn.Parameter(start.clone().view(5, 8))
    optimizer = sampler([p], lr=0.02, num_data=N, seed=3)
    source = ChainNoise([p.detach()], 1, seed=3)
    noise = [source.draw()[0].flatten().clone() for step in STEPS if step["temperature"] > 0]
    for step in STEPS:
        set_controls(optimizer, step, as_tensor)
        p.grad = p.detach() ** 3 + 1
        optimizer.step()
    expected = reference(sampler.__name__, start, STEPS, noise)
    torch.testing.assert_close(p.detach().flatten(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sampler", ALL)
def test_stacked_chains_are_separate_chains(sampler: Any) -> None:
    """... with a control for each, and permuting the controls permutes what they do."""
    start = torch.randn(3, 4, 2, dtype=torch.float64)
    temperature, multiplier = [0.5, 1.0, 2.0], [0.5, -1.0, 2.0]
    stacked = nn.Parameter(start.clone())
    together = sampler([stacked], lr=0.02, num_data=N, num_chains=3, seed=5)
    together.set_control("temperature", torch.tensor(temperature, dtype=torch.float64))
    together.set_control("gradient_multiplier", torch.tensor(multiplier, dtype=torch.float64))
    alone = []
    for chain in range(3):
        p = nn.Parameter(start[chain].clone())
        one = sampler([p], lr=0.02, num_data=N, seed=5, first_chain=chain)
        one.set_control("temperature", temperature[chain])
        one.set_control("gradient_multiplier", multiplier[chain])
        alone.append((p, one))
    for _ in range(6):
        stacked.grad = stacked.detach() ** 3
        together.step()
        for p, one in alone:
            p.grad = p.detach() ** 3
            one.step()
    for chain, (p, _) in enumerate(alone):
        torch.testing.assert_close(stacked.detach()[chain], p.detach(), rtol=1e-12, atol=1e-14)


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ALL)
def test_goes_on_bit_for_bit_from_a_saved_state(sampler: Any) -> None:
    def run(p: nn.Parameter, optimizer: Sampler, steps: range) -> None:
        for k in steps:
            optimizer.set_control("temperature", float(k % 4 > 0))
            p.grad = p.detach() + 1
            optimizer.step()

    for stop in (1, 4, 7):
        p = nn.Parameter(torch.linspace(-1, 1, 12))
        optimizer = sampler([p], lr=0.02, num_data=N, seed=3)
        run(p, optimizer, range(stop))
        file = io.BytesIO()
        torch.save({"sampler": optimizer.state_dict(), "p": p.detach().clone()}, file)
        run(p, optimizer, range(stop, 10))
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        q = nn.Parameter(saved["p"])
        again = sampler([q], lr=0.5, num_data=N, seed=99)
        again.load_state_dict(saved["sampler"])
        assert again.step_count == stop
        run(q, again, range(stop, 10))
        assert torch.equal(p, q)
        assert again.step_count == 10


def test_controls_are_read_after_the_closure() -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = SGLD([p], lr=1.0, temperature=0.0)

    def closure() -> Tensor:
        optimizer.set_control("lr", 0.25)
        p.grad = torch.ones(3)
        return torch.tensor(7.0)

    assert optimizer.step(closure) == 7.0
    assert torch.equal(p.detach(), torch.full((3,), -0.25))


def test_parameters_without_gradient_rest() -> None:
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    optimizer = SGHMC([p, q], lr=0.1, num_data=N)
    q.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(p.detach(), torch.zeros(3))
    assert (q != 0).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: SGLD([p], lr=-0.1, num_data=N), "lr must be a finite number and not negative, got -0.1"),
        (lambda p: SGLD([p], lr=math.nan, num_data=N), "lr must be a finite number"),
        (lambda p: SGLD([p], temperature=-1.0, num_data=N), "temperature must be a finite number and not negative"),
        (lambda p: SGLD([p], temperature=math.inf, num_data=N), "temperature must be a finite number"),
        (lambda p: SGLD([p]), "SGLD needs num_data"),
        (lambda p: UnderdampedLangevin([p], temperature=0.0), "UnderdampedLangevin needs num_data"),
        (lambda p: SGLD([p], num_data=0), "num_data must be positive, got 0"),
        (lambda p: SGLD([p], num_data=N, num_chains=0), "num_chains must be at least 1"),
        (lambda p: SGLD([p], num_data=N, num_chains=2), "every parameter needs a leading axis"),
        (lambda p: SGLD([nn.Parameter(torch.zeros(3).bfloat16())], num_data=N), "lose the injected noise to rounding"),
        (lambda p: SGLD([p, nn.Parameter(torch.zeros(3).double())], num_data=N), "all be float32 or all float64"),
        (lambda p: SGHMC([p], num_data=N, friction=0.0), r"friction must be in \(0, 1\], got 0.0"),
        (lambda p: SGHMC([p], num_data=N, noise_estimate=0.2), "noise_estimate must be between 0 and friction=0.1"),
        (lambda p: pSGLD([p], num_data=N, alpha=1.0), r"alpha must be in \[0, 1\), got 1.0"),
        (lambda p: pSGLD([p], num_data=N, eps=0.0), "eps must be positive"),
        (lambda p: UnderdampedLangevin([p], lr=1.0, friction=3.0, num_data=N), "must be below 2 for a stable step"),
        (lambda p: SGNHT([p], num_data=N, thermal_inertia=0.0), "thermal_inertia must be positive"),
    ],
)
def test_mistakes_say_what_is_wrong(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(nn.Parameter(torch.zeros(3)))


def test_a_running_chain_takes_no_more_parameters() -> None:
    sampler = SGLD([nn.Parameter(torch.zeros(3))], num_data=N)
    with pytest.raises(ValueError, match="cannot be added to a running chain"):
        sampler.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_foreign_states_are_refused() -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    sampler = SGHMC([p], lr=0.1, num_data=N)
    with pytest.raises(ValueError, match="not a sampler's"):
        sampler.load_state_dict(torch.optim.SGD([p], lr=0.1, momentum=0.9).state_dict())
    stacked = nn.Parameter(torch.zeros(2, 3))
    stacked.grad = torch.ones(2, 3)
    two = SGHMC([stacked], lr=0.1, num_data=N, num_chains=2)
    two.step()
    with pytest.raises(ValueError, match="has 2 chains, this one has 1"):
        sampler.load_state_dict(two.state_dict())


def test_a_sampler_built_without_n_stays_at_temperature_zero() -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    sampler = SGLD([p], lr=0.1, temperature=0.0)
    sampler.step()
    sampler.set_control("temperature", 1.0)
    with pytest.raises(ValueError, match="built without num_data"):
        sampler.step()
