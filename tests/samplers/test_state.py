"""What a sampler carries from step to step, and what it refuses."""

import copy
import io
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers import SGHMC, SGLD, SGNHT, Sampler, UnderdampedLangevin, pSGLD

SAMPLERS = [SGLD, pSGLD, SGHMC, UnderdampedLangevin, SGNHT]
TEMPERATURES = (0.0, 0.0, 1.0, 0.5, 0.0, 0.0, 1.0, 2.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def make(cls: Any, net: nn.Module, seed: int = 5) -> Sampler:
    return cls(net.parameters(), lr=0.02, num_data=20, seed=seed)


def steps(net: nn.Module, sampler: Sampler, numbers: Sequence[int]) -> None:
    """Make the steps of a schedule whose temperature and lr change, by full-batch gradients."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, 3, generator=generator)
    for k in numbers:
        sampler.set_control("temperature", TEMPERATURES[k])
        sampler.set_control("lr", 0.02 / (1 + k % 3))
        sampler.zero_grad()
        (net(x).squeeze(-1) - x.sum(1)).square().mean().backward()
        sampler.step()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def stacked(cls: Any, chains: int, seed: int = 0, first_chain: int = 0, **options: Any) -> tuple[Tensor, Sampler]:
    p = nn.Parameter(torch.zeros(chains, 6) if chains > 1 else torch.zeros(6))
    options = {"lr": 0.1, "num_data": 10} | options
    return p, cls([p], num_chains=chains, seed=seed, first_chain=first_chain, **options)


def push(p: Tensor, sampler: Sampler, count: int = 1) -> None:
    for _ in range(count):
        p.grad = torch.ones_like(p)
        sampler.step()


@pytest.mark.parametrize("stop", range(len(TEMPERATURES)))
@pytest.mark.parametrize("cls", SAMPLERS)
def test_a_saved_sampler_goes_on_exactly(cls: Any, stop: int) -> None:
    net = network()
    sampler = make(cls, net)
    steps(net, sampler, range(stop))
    saved = through_a_file({"net": net.state_dict(), "sampler": sampler.state_dict()})
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for p in twin.parameters():
            p.fill_(9.0)
    other = make(cls, twin, seed=99)
    steps(twin, other, range(3))  # what is loaded must replace whatever was there
    twin.load_state_dict(saved["net"])
    other.load_state_dict(saved["sampler"])
    assert other.step_count == stop
    assert other.seed == 5
    for net_, sampler_ in ((net, sampler), (twin, other)):
        steps(net_, sampler_, range(stop, len(TEMPERATURES)))
    assert other.step_count == len(TEMPERATURES)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert p.isfinite().all()
        assert torch.equal(p, q)


@pytest.mark.parametrize("cls", SAMPLERS)
def test_a_state_can_be_saved_right_after_it_was_loaded(cls: Any) -> None:
    net = network()
    sampler = make(cls, net)
    steps(net, sampler, range(4))
    twin = copy.deepcopy(net)
    middle = make(cls, copy.deepcopy(net))
    middle.load_state_dict(through_a_file(sampler.state_dict()))
    other = make(cls, twin)
    other.load_state_dict(through_a_file(middle.state_dict()))
    steps(net, sampler, range(4, 8))
    steps(twin, other, range(4, 8))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("cls", SAMPLERS)
def test_stacked_chains_survive_too(cls: Any) -> None:
    p, sampler = stacked(cls, 3)
    push(p, sampler, 3)
    q, other = stacked(cls, 3, seed=8)
    q.data.copy_(p.data)
    other.load_state_dict(through_a_file(sampler.state_dict()))
    push(p, sampler, 3)
    push(q, other, 3)
    assert torch.equal(p, q)


@pytest.mark.parametrize("cls", SAMPLERS)
def test_a_torch_optimizer_state_is_refused(cls: Any) -> None:
    p, sampler = stacked(cls, 1)
    state = torch.optim.SGD([nn.Parameter(torch.zeros(6))], lr=0.1, momentum=0.9).state_dict()
    with pytest.raises(ValueError, match=r"not a sampler's: .*no step counter.*cannot continue from it"):
        sampler.load_state_dict(state)
    push(p, sampler)  # and the sampler still works


def test_another_rules_state_is_refused() -> None:
    p, sampler = stacked(SGHMC, 1)
    q, other = stacked(SGLD, 1)
    push(q, other)
    try:
        sampler.load_state_dict(other.state_dict())
    except ValueError:
        return
    push(p, sampler)


@pytest.mark.parametrize(("saved", "here"), [(3, 2), (1, 3), (3, 1)])
def test_another_number_of_chains_is_refused(saved: int, here: int) -> None:
    p, sampler = stacked(SGHMC, saved)
    push(p, sampler)
    _, other = stacked(SGHMC, here)
    with pytest.raises(ValueError, match=f"saved sampler has {saved} chains, this one has {here}"):
        other.load_state_dict(through_a_file(sampler.state_dict()))


def test_another_number_of_chains_is_refused_before_any_noise() -> None:
    p, sampler = stacked(SGHMC, 3, temperature=0.0)
    push(p, sampler)
    _, other = stacked(SGHMC, 2, temperature=0.0)
    with pytest.raises(ValueError, match="chains"):
        other.load_state_dict(sampler.state_dict())


def test_a_refused_state_leaves_the_sampler_as_it_was() -> None:
    p, sampler = stacked(SGHMC, 3)
    push(p, sampler, 2)
    q, other = stacked(SGHMC, 2)
    with pytest.raises(ValueError, match="chains"):
        other.load_state_dict(sampler.state_dict())
    assert other.step_count == 0
    push(q, other)


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cls", SAMPLERS)
def test_a_group_added_later_is_sampled_or_refused(cls: Any, temperature: float) -> None:
    p, sampler = stacked(cls, 1, temperature=temperature)
    push(p, sampler, 2)
    q = nn.Parameter(torch.zeros(3))
    try:
        sampler.add_param_group({"params": [q]})
    except (ValueError, NotImplementedError):
        return
    for _ in range(2):
        p.grad, q.grad = torch.ones_like(p), torch.zeros_like(q)
        sampler.step()
    assert torch.equal(q, torch.zeros(3)) == (temperature == 0)


@pytest.mark.parametrize("added", [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float64)])
def test_an_added_group_is_checked_like_the_first(added: Tensor) -> None:
    _, sampler = stacked(SGLD, 1)
    with pytest.raises(ValueError, match="cannot be added to a running chain"):
        sampler.add_param_group({"params": [nn.Parameter(added)]})


def test_a_sampler_can_be_copied_with_its_network() -> None:
    net = nn.ModuleDict({"layer": nn.Linear(2, 2)})
    sampler = SGLD(net.parameters(), lr=0.1, num_data=10)
    twin, twin_sampler = copy.deepcopy((net, sampler))
    for model, optimizer in ((net, sampler), (twin, twin_sampler)):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", SAMPLERS)
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["lr", "temperature"])
def test_bad_controls_are_refused(cls: Any, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}.* must be .*{value}|stable step.*{value}"):
        stacked(cls, 1, **{name: value})


@pytest.mark.parametrize("own", [{"lr": -0.1}, {"temperature": math.nan}, {"lr": math.inf}])
def test_bad_controls_of_a_group_are_refused(own: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(own))):
        SGLD([{"params": [nn.Parameter(torch.zeros(2))], **own}], lr=0.1, num_data=10)


def test_set_control_refuses_what_is_no_control() -> None:
    _, sampler = stacked(SGLD, 1)
    with pytest.raises(ValueError, match="temprature"):
        sampler.set_control("temprature", 0.0)


@pytest.mark.parametrize("cls", SAMPLERS)
@pytest.mark.parametrize("temperature", [1.0, torch.tensor(0.0)])
def test_noise_needs_num_data(cls: Any, temperature: Any) -> None:
    with pytest.raises(ValueError, match="needs num_data, the number of training data"):
        stacked(cls, 1, num_data=None, temperature=temperature)


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
    with pytest.raises(ValueError, match=f"num_data must be positive, got {num_data}"):
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
        (SGLD, {"num_chains": 0}, "num_chains must be at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls([nn.Parameter(torch.zeros(2))], **({"lr": 0.1, "num_data": 10} | options))


@pytest.mark.parametrize("cls", SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(cls: Any, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"half precision lose the injected noise.*bf16-mixed"):
        cls([nn.Parameter(torch.zeros(2, dtype=dtype))], lr=0.1, num_data=10)


def test_mixed_and_strange_dtypes_are_refused() -> None:
    mixed = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    with pytest.raises(ValueError, match=r"all be float32 or all float64, got .*float32.*float64"):
        SGLD(mixed, lr=0.1, num_data=10)
    with pytest.raises(ValueError, match=r"got .*complex64"):
        SGLD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1, num_data=10)


@pytest.mark.parametrize("shape", [(), (2,), (4, 3)])
def test_the_chain_axis_is_required(shape: tuple[int, ...]) -> None:
    parameters = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(shape))]
    with pytest.raises(ValueError, match="num_chains=3 every parameter needs a leading axis"):
        SGLD(parameters, lr=0.1, num_data=10, num_chains=3)


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", SAMPLERS)
def test_chains_have_streams_of_their_own(cls: Any) -> None:
    """Chain c of a seed draws the same wherever it runs; any two chains, and any two seeds, differ."""
    four, sampler = stacked(cls, 4, seed=1)
    push(four, sampler, 3)
    two, sampler = stacked(cls, 2, seed=1, first_chain=1)
    push(two, sampler, 3)
    torch.testing.assert_close(two, four[1:3], rtol=1e-6, atol=1e-6)
    one, sampler = stacked(cls, 1, seed=1, first_chain=3)
    push(one, sampler, 3)
    torch.testing.assert_close(one, four[3], rtol=1e-6, atol=1e-6)
    other, sampler = stacked(cls, 1, seed=2, first_chain=3)
    push(other, sampler, 3)
    ends = [*four.detach(), other.detach()]
    for i in range(5):
        for j in range(i):
            assert (ends[i] - ends[j]).abs().min() > 1e-6  # 60 coordinates of density < 10: false alarm < 1e-3
