"""Controls, schedulers, idle parameters and arguments of samplers; what all must keep to is in `test_contract.py`."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers import SGHMC, SGLD, SGNHT, Sampler, UnderdampedLangevin, pSGLD

SAMPLERS = [SGLD, pSGLD, SGHMC, UnderdampedLangevin, SGNHT]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def stacked(cls: Any, chains: int, **options: Any) -> tuple[Tensor, Sampler]:
    p = nn.Parameter(torch.zeros(chains, 6) if chains > 1 else torch.zeros(6))
    options = {"lr": 0.1, "num_data": 10, "seed": 0} | options
    return p, cls([p], num_chains=chains, **options)


def push(p: Tensor, sampler: Sampler, count: int = 1) -> None:
    for _ in range(count):
        p.grad = torch.ones_like(p)
        sampler.step()


# -- controls ---------------------------------------------------------------------------------------------------------


def test_controls_are_read_after_the_closure() -> None:
    p, sampler = stacked(SGLD, 1)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        sampler.zero_grad()
        loss = p.sum()
        loss.backward()
        sampler.set_control("lr", 0.25)
        sampler.set_control("temperature", 0.0)
        sampler.set_control("gradient_multiplier", -2.0)
        return loss

    loss = sampler.step(closure)
    assert loss.item() == 0.0
    assert torch.equal(p, torch.full((6,), 0.5))
    assert sampler.step_count == 1


@pytest.mark.parametrize("cls", SAMPLERS)
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda s: torch.optim.lr_scheduler.ExponentialLR(s, 0.5),
        lambda s: torch.optim.lr_scheduler.CosineAnnealingLR(s, 5),
        lambda s: torch.optim.lr_scheduler.OneCycleLR(s, 0.1, total_steps=10, cycle_momentum=False),
        lambda s: torch.optim.lr_scheduler.SequentialLR(
            s,
            [torch.optim.lr_scheduler.LinearLR(s, 0.1, 1.0, 2), torch.optim.lr_scheduler.StepLR(s, 1, 0.5)],
            milestones=[2],
        ),
    ],
    ids=["exponential", "cosine", "one-cycle", "sequential"],
)
def test_torch_schedulers_work(cls: Any, scheduler: Any) -> None:
    """The lr follows torch's own optimizer under the same scheduler, and the step uses it."""
    net, reference = network(), network()
    ours = cls(net.parameters(), lr=0.2, num_data=20, temperature=0.0)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.2)
    schedulers = [scheduler(ours), scheduler(theirs)]
    lrs: list[float] = []
    for _ in range(6):
        for optimizer, model in ((ours, net), (theirs, reference)):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        for s in schedulers:
            s.step()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
        lrs.append(ours.param_groups[0]["lr"])
    assert len(set(lrs)) > 3
    if cls is SGLD:
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), reference.parameters(), strict=True))


# -- parameters without a gradient, more parameters -------------------------------------------------------------------


@pytest.mark.parametrize("cls", SAMPLERS)
def test_a_parameter_without_gradient_stays_and_takes_no_ones_noise(cls: Any) -> None:
    """It does not move, and what the others draw does not depend on it."""
    trajectories = []
    for idle in (False, True):
        a, b, c = (nn.Parameter(torch.zeros(4)) for _ in range(3))
        sampler = cls([a, b, c], lr=0.1, num_data=10, seed=2)
        for step in range(4):
            a.grad, c.grad = torch.ones(4), torch.ones(4)
            b.grad = None if idle and step < 3 else torch.ones(4)
            before = b.detach().clone()
            sampler.step()
            if idle and step < 3:
                assert torch.equal(b, before)
        assert not torch.equal(b, torch.zeros(4)) or cls is UnderdampedLangevin
        trajectories.append(torch.stack([a.detach(), c.detach()]))
    if cls is not SGNHT:  # whose thermostat is shared by the group
        assert torch.equal(*trajectories)


@pytest.mark.parametrize("cls", SAMPLERS)
def test_no_gradient_at_all(cls: Any) -> None:
    p, sampler = stacked(cls, 1)
    sampler.step()
    assert torch.equal(p, torch.zeros(6))
    assert sampler.step_count == 1


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [{"lr": -0.1}, {"temperature": math.nan}, {"lr": math.inf}])
def test_bad_controls_of_a_group_are_refused(own: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(own))):
        SGLD([{"params": [nn.Parameter(torch.zeros(2))], **own}], lr=0.1, num_data=10)


def test_set_control_refuses_what_is_no_control() -> None:
    _, sampler = stacked(SGLD, 1)
    with pytest.raises(ValueError, match="temprature"):
        sampler.set_control("temprature", 0.0)


def test_num_data_is_missed_when_the_temperature_rises_later() -> None:
    p, sampler = stacked(SGLD, 1, num_data=None, temperature=0.0)
    push(p, sampler)
    sampler.set_control("temperature", 1.0)
    with pytest.raises(ValueError, match="without num_data, so its temperature must stay 0"):
        push(p, sampler)


def test_underdamped_needs_num_data_at_any_temperature() -> None:
    with pytest.raises(ValueError, match="needs num_data"):
        stacked(UnderdampedLangevin, 1, num_data=None, temperature=0.0)


@pytest.mark.parametrize("num_data", [0, -5])
def test_num_data_must_be_positive(num_data: int) -> None:
    with pytest.raises(ValueError, match=f"num_data must be (at least 1|a whole number), got {num_data}"):
        stacked(SGLD, 1, num_data=num_data)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (SGHMC, {"friction": 0.0}, r"friction must be in \(0, 1\], got 0.0"),
        (SGHMC, {"friction": 1.5}, r"friction must be in \(0, 1\], got 1.5"),
        (SGHMC, {"friction": math.nan}, "friction must be in"),
        (SGHMC, {"friction": 0.1, "noise_estimate": 0.2}, "noise_estimate must be between 0 and friction=0.1, got 0.2"),
        (SGHMC, {"noise_estimate": -0.1}, "noise_estimate must be between 0"),
        (pSGLD, {"alpha": 1.0}, r"alpha must be in \[0, 1\), got 1.0"),
        (pSGLD, {"alpha": -0.1}, r"alpha must be in \[0, 1\), got -0.1"),
        (pSGLD, {"eps": 0.0}, "eps must be positive, got 0.0"),
        (SGNHT, {"friction": 0.0}, r"friction must be in \(0, 1\], got 0.0"),
        (SGNHT, {"thermal_inertia": 0.0}, "thermal_inertia must be positive, got 0.0"),
        (UnderdampedLangevin, {"friction": 0.0}, "friction must be positive, got 0.0"),
        (UnderdampedLangevin, {"lr": 1.0, "friction": 2.0}, "must be below 2 for a stable step, got 1.0·2.0"),
        (UnderdampedLangevin, {"integrator": "verlet"}, "integrator must be .*'ubu'.*, got 'verlet'"),
        (SGLD, {"num_chains": 0}, "num_chains must be at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls([nn.Parameter(torch.zeros(2))], **({"lr": 0.1, "num_data": 10} | options))


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (SGHMC, {"friction": 3.0}, r"friction must be in \(0, 1\], got 3.0"),
        (SGHMC, {"friction": "low"}, "friction must be a number, got 'low'"),
        (SGHMC, {"noise_estimate": 0.5}, "noise_estimate must be between 0 and friction=0.1, got 0.5"),
        (SGNHT, {"thermal_inertia": 0.0}, "thermal_inertia must be positive, got 0.0"),
        (pSGLD, {"eps": 0.0}, "eps must be positive, got 0.0"),
        (UnderdampedLangevin, {"lr": 1.0, "friction": 2.0}, "must be below 2 for a stable step"),
        (UnderdampedLangevin, {"integrator": "verlet"}, "integrator must be .*, got 'verlet'"),
    ],
)
def test_bad_options_of_a_group_are_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    """They were taken, and the group's samples were of no posterior, or of none at all."""
    groups = [{"params": [nn.Parameter(torch.zeros(2))], **own} for own in (options, {})]
    with pytest.raises((TypeError, ValueError), match=message):
        cls(groups, lr=0.1, num_data=10)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (SGLD, {"weight_decay": 0.1}, "a parameter group of SGLD has no argument 'weight_decay'"),
        (SGHMC, {"frictoin": 0.3}, "no argument 'frictoin'; did you mean 'friction'?"),
        (SGHMC, {"num_data": 5}, r"num_data is one for all groups of parameters: pass SGHMC\(…, num_data=…\)"),
    ],
)
def test_options_of_a_group_that_nothing_reads_are_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    """Groups of torch's optimizers have a weight decay each: without an error the samples would have no prior."""
    with pytest.raises(TypeError, match=message):
        cls([{"params": [nn.Parameter(torch.zeros(2))], **options}], lr=0.1, num_data=10)


def test_mixed_and_strange_dtypes_are_refused() -> None:
    mixed = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    with pytest.raises(ValueError, match=r"all be float32 or all float64, got .*float32.*float64"):
        SGLD(mixed, lr=0.1, num_data=10)
    with pytest.raises(ValueError, match=r"got .*complex64"):
        SGLD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1, num_data=10)
