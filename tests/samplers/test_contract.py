"""What every sampler must keep to, whatever its rule: a new one joins by one line in `SAMPLERS`.

The rules' formulas are in `test_updates.py`, their laws in `test_conjugate_regression.py`.
"""

import copy
import io
import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers import (
    AMAGOLD,
    GGMC,
    MCLMC,
    SGHMC,
    SGLD,
    SGNHT,
    AdamSGLD,
    Sampler,
    ScaleAdaptedSGHMC,
    UnderdampedLangevin,
    pMCLMC,
    pSGHMC,
    pSGLD,
)
from lightning_sgmcmc.samplers.contract import SHAPES
from tests.support.comparisons import assert_same
from tests.support.trainers import fit_in_layout


@dataclass(frozen=True)
class Rule:
    """A sampler, its options, and torch's optimizer that it is at temperature 0, where there is one."""

    make: Any
    options: dict[str, Any] = field(default_factory=dict)
    twin: Any = None
    twin_options: dict[str, Any] = field(default_factory=dict)


SAMPLERS = [
    Rule(SGLD, {}, torch.optim.SGD),
    Rule(pSGLD, {"alpha": 0.9, "eps": 1e-3}, torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-3}),
    Rule(pSGHMC, {"friction": 0.3, "alpha": 0.9}),
    Rule(pSGHMC, {"friction": 0.3, "alpha": 0.9, "adapt": 5}),
    Rule(AdamSGLD, {"betas": (0.8, 0.9), "eps": 1e-3}, torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-3}),
    Rule(AdamSGLD, {"betas": (0.8, 0.9), "eps": 1e-3, "adapt": 4}),
    Rule(ScaleAdaptedSGHMC, {"friction": 0.3}),
    Rule(ScaleAdaptedSGHMC, {"friction": 0.3, "floor": 0.0, "adapt": 4}),
    Rule(SGHMC, {"friction": 0.3, "noise_estimate": 0.1}, torch.optim.SGD, {"momentum": 1 - 0.3}),
    Rule(UnderdampedLangevin, {"friction": 1.5}),
    Rule(UnderdampedLangevin, {"friction": 1.5, "integrator": "baoab"}),
    Rule(UnderdampedLangevin, {"friction": 1.5, "integrator": "obabo"}),
    Rule(UnderdampedLangevin, {"friction": 1.5, "integrator": "ubu"}),
    Rule(GGMC, {"friction": 1.5}),
    Rule(AMAGOLD, {"friction": 1.5}),
    Rule(SGNHT, {"friction": 0.2, "thermal_inertia": 0.5}),
    Rule(MCLMC, {"friction": 1.5}),
    Rule(pMCLMC, {"friction": 1.5, "alpha": 0.9}),
    Rule(pMCLMC, {"friction": 1.5, "alpha": 0.9, "adapt": 4}),
]

NUM_DATA, CHAINS = 20, 3
LRS = (0.1, 0.05, 0.2, 0.1, 0.02, 0.1, 0.1, 0.05)
TEMPERATURES = (0.0, 0.0, 1.0, 0.5, 0.0, 0.0, 1.0, 2.0)


@pytest.fixture(
    params=SAMPLERS,
    ids=lambda rule: "-".join([rule.make.__name__, *filter(str.isalpha, map(str, rule.options.values()))]),
)
def rule(request: pytest.FixtureRequest) -> Rule:
    found: Rule = request.param
    return found


def start(chain: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + chain)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def gradients(step: int, chain: int, places: list[Tensor]) -> list[Tensor]:
    """Return gradients that depend on the place, so that an error in the state shows in all later steps."""
    generator = torch.Generator().manual_seed(1000 * chain + step)
    return [0.3 * place + 0.5 * torch.randn(place.shape, generator=generator) for place in places]


def make(rule: Rule, chains: tuple[int, ...] = (0,), **options: Any) -> tuple[list[nn.Parameter], Sampler]:
    """Return parameters, stacked where there are several chains, and their sampler."""
    parameters = [
        nn.Parameter(torch.stack(own) if len(chains) > 1 else own[0]) for own in zip(*map(start, chains), strict=True)
    ]
    settings = {"lr": 0.1, "num_data": NUM_DATA, "seed": 5, "num_chains": len(chains), "first_chain": chains[0]}
    return parameters, rule.make(parameters, **(settings | rule.options | options))


def walk(
    parameters: list[nn.Parameter],
    sampler: Sampler,
    steps: range = range(len(LRS)),
    chains: tuple[int, ...] = (0,),
    lr: Any = LRS.__getitem__,
    temperature: Any = TEMPERATURES.__getitem__,
) -> None:
    """Make steps with changing step sizes and temperatures; a rule without a limit at 0 keeps the one before."""
    for step in steps:
        sampler.set_control("lr", lr(step))
        heat = temperature(step)
        if sampler.has_cold_limit or isinstance(heat, Tensor) or heat > 0:
            sampler.set_control("temperature", heat)
        places = [p.detach() for p in parameters]
        if len(chains) > 1:
            each = [gradients(step, c, [place[i] for place in places]) for i, c in enumerate(chains)]
            own = [torch.stack(parts) for parts in zip(*each, strict=True)]
        else:
            own = gradients(step, chains[0], places)
        for p, gradient in zip(parameters, own, strict=True):
            p.grad = gradient
        sampler.step()


def equal(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    assert all(p.isfinite().all() for p in a)
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- what a sampler carries from step to step -------------------------------------------------------------------------


@pytest.mark.by_default("chains1")
@pytest.mark.parametrize("chains", [(0,), (0, 1, 2)])
def test_a_saved_sampler_continues_bit_for_bit(rule: Rule, chains: tuple[int, ...]) -> None:
    """From every step, in a sampler that held something else; also if it is saved again right after it was loaded."""

    def loaded(saved: Any) -> tuple[list[nn.Parameter], Sampler]:
        saved = through_a_file(saved)
        parameters, sampler = make(rule, chains, seed=99, lr=0.3)
        walk(parameters, sampler, range(3), chains)
        for p, q in zip(parameters, saved["parameters"], strict=True):
            p.data.copy_(q)
        sampler.load_state_dict(saved["sampler"])
        return parameters, sampler

    whole, sampler = make(rule, chains)
    walk(whole, sampler, chains=chains)
    for stop in range(len(LRS)):
        parameters, sampler = make(rule, chains)
        walk(parameters, sampler, range(stop), chains)
        for _ in range(2):
            parameters, sampler = loaded({"parameters": parameters, "sampler": sampler.state_dict()})
        assert (sampler.step_count, sampler.seed) == (stop, 5)
        walk(parameters, sampler, range(stop, len(LRS)), chains)
        assert equal(whole, parameters), stop


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("chains", [(0,), (0, 1, 2)])
def test_a_copy_with_its_parameters_continues_bit_for_bit(rule: Rule, copied: Any, chains: tuple[int, ...]) -> None:
    parameters, sampler = make(rule, chains)
    walk(parameters, sampler, range(3), chains)
    twins, twin = copied((parameters, sampler))
    for parameter, other in ((parameters, sampler), (twins, twin)):
        walk(parameter, other, range(3, len(LRS)), chains)
    assert equal(parameters, twins)
    assert all(p is not q for p, q in zip(parameters, twins, strict=True))


# -- chains -----------------------------------------------------------------------------------------------------------


def test_a_stacked_chain_is_the_chain_alone(rule: Rule) -> None:
    """Bit for bit, on a CPU."""
    stack, sampler = make(rule, tuple(range(CHAINS)))
    walk(stack, sampler, chains=tuple(range(CHAINS)))
    for chain in range(CHAINS):
        alone, sampler = make(rule, (chain,))
        walk(alone, sampler, chains=(chain,))
        for p, q in zip(alone, stack, strict=True):
            assert torch.equal(p.detach(), q.detach()[chain])


def test_chains_and_seeds_have_streams_of_their_own(rule: Rule) -> None:
    """Chain c of a seed draws the same in any part of a run; any two chains, and any two seeds, differ."""
    chains = tuple(range(CHAINS))

    def noise(chains: tuple[int, ...], seed: int = 5) -> Tensor:
        """Return where the chains go from one place by the same gradients."""
        p = nn.Parameter(torch.zeros(len(chains), 60) if len(chains) > 1 else torch.zeros(60))
        options = {"lr": 0.1, "num_data": NUM_DATA, "num_chains": len(chains), "first_chain": chains[0], "seed": seed}
        sampler = rule.make([p], **(options | rule.options))
        for _ in range(3):
            p.grad = torch.ones_like(p)
            sampler.step()
        return p.detach().reshape(-1, 60)

    together = noise(chains)
    assert torch.equal(noise((1, 2)), together[1:3])
    ends = [*together, *noise((0,), seed=6)]
    for i, end in enumerate(ends):
        for other in ends[:i]:
            assert (end - other).abs().min() > 1e-6  # 360 numbers with a density below 10; seeds are fixed


def test_permuted_chains_permute_the_result(rule: Rule) -> None:
    """Without noise, which belongs to a chain's number: starts, gradients and step sizes may change places."""
    if not rule.make.has_cold_limit:
        pytest.skip("no step is without noise")
    rates = torch.tensor([0.1, 0.02, 0.2])
    ends = []
    for order in ((0, 1, 2), (2, 0, 1)):
        parameters, sampler = make(rule, order, first_chain=0, temperature=0.0)
        walk(
            parameters,
            sampler,
            chains=order,
            lr=lambda step, order=order: rates[list(order)] / (1 + step % 3),
            temperature=lambda step: 0.0,
        )
        ends.append(parameters)
    for p, q in zip(*ends, strict=True):
        assert torch.equal(p[[2, 0, 1]], q)
        assert (p[0] - p[1]).abs().max() > 1e-3


def test_a_schedule_may_give_each_chain_its_own_step_size_and_temperature(rule: Rule) -> None:
    """A tensor over chains is to rounding what the numbers in it are to the chains alone."""
    chains = tuple(range(CHAINS))
    rates, heats = torch.tensor([0.1, 0.02, 0.2]), torch.tensor([1.0, 0.3, 2.0])
    stack, sampler = make(rule, chains)
    walk(stack, sampler, chains=chains, lr=lambda k: rates / (1 + k % 3), temperature=lambda k: heats * (1 + k % 2))
    for chain in chains:
        alone, sampler = make(rule, (chain,))
        rate, heat = float(rates[chain]), float(heats[chain])
        walk(alone, sampler, chains=(chain,), lr=lambda k: rate / (1 + k % 3), temperature=lambda k: heat * (1 + k % 2))  # noqa: B023
        for p, q in zip(alone, stack, strict=True):
            torch.testing.assert_close(p.detach(), q.detach()[chain], rtol=1e-5, atol=1e-6)


@pytest.mark.by_default("SGHMC", "MCLMC")
def test_two_ranks_are_two_stacked_chains(rule: Rule, tmp_path: Path) -> None:
    """Under a trainer, in real processes (gloo): bit for bit the same samples."""
    options = {"sampler": lambda *args, **more: rule.make(*args, **(rule.options | more)), "lr": 0.003}.items()
    stacked, _ = fit_in_layout(tmp_path / "stacked", 2, 1, steps=10, burn_in_steps=5, module_options=options)
    ranks, _ = fit_in_layout(tmp_path / "ranks", 1, 2, steps=10, burn_in_steps=5, module_options=options)
    assert {sample.chain for sample in stacked} == {0, 1}
    assert_same(stacked, ranks)
    assert not torch.equal(stacked[0].parameters["net.0.weight"], stacked[1].parameters["net.0.weight"])


# -- noise ------------------------------------------------------------------------------------------------------------


def test_at_temperature_zero_no_noise_is_drawn(rule: Rule) -> None:
    if not rule.make.has_cold_limit:
        pytest.skip("no step is without noise")

    def streams() -> list[Tensor]:
        return [state.clone() for state in sampler.state_dict()["sampler"]["noise"]["generators"]]

    parameters, sampler = make(rule)
    walk(parameters, sampler, range(2), temperature=lambda k: 1.0)
    before = streams()
    walk(parameters, sampler, range(2, 7), temperature=lambda k: 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, streams(), strict=True))
    walk(parameters, sampler, range(7, 8), temperature=lambda k: 0.5)
    assert not any(torch.equal(a, b) for a, b in zip(before, streams(), strict=True))


@pytest.mark.parametrize("rule", [rule for rule in SAMPLERS if rule.twin], ids=lambda rule: rule.make.__name__)
def test_at_temperature_zero_it_is_torchs_optimizer(rule: Rule) -> None:
    """Bit for bit, while the step size changes and touches 0; networks are in `test_against_torch.py`."""
    options = rule.options.copy()
    options.pop("noise_estimate", None)
    ours, theirs = ([nn.Parameter(place) for place in start(0)] for _ in range(2))
    rates = [0.1, 0.05, 0.0, 0.1]
    pair = (
        (ours, rule.make(ours, lr=0.1, temperature=0.0, **options)),
        (theirs, rule.twin(theirs, lr=0.1, **rule.twin_options)),
    )
    for parameters, optimizer in pair:
        for step in range(40):
            optimizer.param_groups[0]["lr"] = rates[step % 4]
            for p, gradient in zip(parameters, gradients(step, 0, [p.detach() for p in parameters]), strict=True):
                p.grad = gradient
            optimizer.step()
    assert equal(ours, theirs)
    assert not torch.equal(ours[0], start(0)[0])


def test_the_default_generator_is_not_touched_and_has_no_say(rule: Rule) -> None:
    ends = []
    for seed in (17, 18):
        p = nn.Parameter(torch.ones(30_000))  # large enough to be drawn beside the gradient
        sampler = rule.make([p], lr=0.01, num_data=100, seed=3, **rule.options)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        for _ in range(5):
            p.grad = torch.ones_like(p)
            sampler.step()
            sampler.state_dict()
        assert torch.equal(torch.get_rng_state(), before)
        ends.append(p.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
def test_a_step_size_of_zero_adds_no_heat(rule: Rule, lr: Any) -> None:
    """As at the start of a warm-up of the step size, and while EWSG looks at its candidates."""
    _, sampler = make(rule)
    sampler.set_control("lr", lr)
    law = sampler.law(sampler.param_groups[0])
    if law is not None:
        assert float(law.gradient_noise_factor) == 0.0


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["lr", "temperature"])
def test_a_control_that_is_no_finite_number_is_refused(rule: Rule, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}.* must be .*{value}|stable step.*{value}"):
        make(rule, **{name: value})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(rule: Rule, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"half precision.*bf16-mixed"):
        rule.make([nn.Parameter(torch.zeros(2, dtype=dtype))], lr=0.1, num_data=NUM_DATA, **rule.options)


@pytest.mark.parametrize("temperature", [1.0, torch.tensor(0.0)])
def test_noise_without_num_data_is_refused(rule: Rule, temperature: Any) -> None:
    with pytest.raises(ValueError, match="num_data"):
        make(rule, num_data=None, temperature=temperature)


@pytest.mark.parametrize("shape", [(), (2,), (4, 3)])
def test_a_parameter_without_the_chain_axis_is_refused(rule: Rule, shape: tuple[int, ...]) -> None:
    parameters = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(shape))]
    with pytest.raises(ValueError, match="num_chains=3"):
        rule.make(parameters, lr=0.1, num_data=NUM_DATA, num_chains=3, **rule.options)


def test_the_state_of_another_rule_is_refused(rule: Rule) -> None:
    parameters, sampler = make(rule)
    for other in SAMPLERS:
        if other.make is not rule.make:
            with pytest.raises(ValueError, match=f"state is a.* {other.make.__name__}'s"):
                sampler.load_state_dict(make(other)[1].state_dict())
    walk(parameters, sampler)  # and the sampler still works


def test_the_state_of_a_torch_optimizer_is_refused(rule: Rule) -> None:
    parameters, sampler = make(rule)
    state = torch.optim.SGD([nn.Parameter(torch.zeros(shape)) for shape in SHAPES], lr=0.1, momentum=0.9).state_dict()
    with pytest.raises(ValueError, match=r"not a sampler's"):
        sampler.load_state_dict(state)
    walk(parameters, sampler)  # and the sampler still works


@pytest.mark.parametrize(("saved", "here"), [(3, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_state_of_another_number_of_chains_is_refused(
    rule: Rule, saved: int, here: int, temperature: float
) -> None:
    """Also before any noise was drawn; and the sampler stays as it was."""
    parameters, sampler = make(rule, tuple(range(saved)))
    walk(parameters, sampler, range(2), tuple(range(saved)), temperature=lambda k: temperature)
    others, other = make(rule, tuple(range(here)))
    with pytest.raises(ValueError, match=f"{saved} chains.*{here}"):
        other.load_state_dict(through_a_file(sampler.state_dict()))
    assert other.step_count == 0
    fresh, sampler = make(rule, tuple(range(here)))
    for each, its in ((others, other), (fresh, sampler)):
        walk(each, its, chains=tuple(range(here)))
    assert equal(others, fresh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_group_added_to_a_running_chain_is_refused(rule: Rule, dtype: torch.dtype) -> None:
    parameters, sampler = make(rule)
    walk(parameters, sampler, range(2))
    with pytest.raises(ValueError, match="cannot be added to a running chain"):
        sampler.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=dtype))]})
    walk(parameters, sampler, range(2, 8))
