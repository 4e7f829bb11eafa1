"""Each update rule against a slow reference that is written coordinate by coordinate from its formula."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.samplers import (
    SGHMC,
    SGLD,
    SGNHT,
    AdamSGLD,
    Sampler,
    ScaleAdaptedSGHMC,
    UnderdampedLangevin,
    pSGHMC,
    pSGLD,
)
from lightning_sgmcmc.samplers.noise import ChainNoise
from tests.support.update_rules import (
    SHAPES,
    AdamSGLDReference,
    BAOABReference,
    Controls,
    N,
    OBABOReference,
    PaperReference,
    PSGHMCReference,
    PSGLDReference,
    Reference,
    ScaleAdaptedReference,
    SGHMCReference,
    SGLDReference,
    SGNHTReference,
    UBUReference,
    UnderdampedReference,
    start,
)

SIZE = sum(math.prod(shape) for shape in SHAPES)
SEED = 7


# Temperature 0 -> positive -> 0 -> positive, with the lr changing within and across the stages, κ < 0 in all of them.
COURSE = [
    Controls(0.30, 0.0, 1.0),
    Controls(0.25, 0.0, -0.5),
    Controls(0.20, 0.0, 1.0),
    Controls(0.40, 1.0, 1.0),
    Controls(0.10, 0.3, -2.0),
    Controls(0.15, 2.0, 0.7),
    Controls(0.35, 0.0, 1.0),
    Controls(0.20, 0.0, -1.0),
    Controls(0.05, 0.5, 1.5),
    Controls(0.30, 1.0, 1.0),
]


RULES = [
    pytest.param(SGLD, {}, SGLDReference, id="SGLD"),
    pytest.param(pSGLD, {"alpha": 0.9, "eps": 1e-3}, PSGLDReference, id="pSGLD"),
    pytest.param(SGHMC, {"friction": 0.3, "noise_estimate": 0.1}, SGHMCReference, id="SGHMC"),
    pytest.param(pSGHMC, {"friction": 0.3, "alpha": 0.9}, PSGHMCReference, id="pSGHMC"),
    pytest.param(AdamSGLD, {"betas": (0.8, 0.9), "eps": 1e-3, "adapt": 6}, AdamSGLDReference, id="AdamSGLD"),
    pytest.param(ScaleAdaptedSGHMC, {"friction": 0.3, "adapt": 6}, ScaleAdaptedReference, id="ScaleAdaptedSGHMC"),
    pytest.param(
        ScaleAdaptedSGHMC,
        {"friction": 0.3, "adapt": 6, "floor": 0.0, "subtract_noise": True},
        PaperReference,
        id="ScaleAdaptedSGHMC-paper",
    ),
    pytest.param(UnderdampedLangevin, {"friction": 1.5}, UnderdampedReference, id="UnderdampedLangevin"),
    pytest.param(
        UnderdampedLangevin,
        {"friction": 1.5, "integrator": "baoab"},
        BAOABReference,
        id="UnderdampedLangevin-baoab",
    ),
    pytest.param(
        UnderdampedLangevin,
        {"friction": 1.5, "integrator": "obabo"},
        OBABOReference,
        id="UnderdampedLangevin-obabo",
    ),
    pytest.param(
        UnderdampedLangevin,
        {"friction": 1.5, "integrator": "ubu"},
        UBUReference,
        id="UnderdampedLangevin-ubu",
    ),
    pytest.param(SGNHT, {"friction": 0.2, "thermal_inertia": 0.5}, SGNHTReference, id="SGNHT"),
]
RULES_WITHOUT_REFERENCE = [pytest.param(*rule.values[:2], id=rule.id) for rule in RULES]


def pushes(step: int, chain: int = 0) -> list[Tensor]:
    """Return what is added to 0.3·θ to make the gradient, which so carries an error in the state on."""
    generator = torch.Generator().manual_seed(1000 * chain + step)
    return [0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def run(
    cls: Any,
    options: dict[str, Any],
    course: Sequence[Controls],
    as_control: Callable[[float], Any] = float,
    chain: int = 0,
    keep: slice = slice(None),
) -> tuple[list[Tensor], Sampler]:
    """Run one chain (or some of its tensors) through the course; return its state after each step, and the sampler."""
    params = [torch.nn.Parameter(p) for p in start(chain)][keep]
    sampler = cls(params, lr=0.1, num_data=N, seed=SEED, first_chain=chain, **options)
    states = []
    for step, controls in enumerate(course):
        set_controls(sampler, *map(as_control, (controls.lr, controls.temperature, controls.multiplier)))
        for p, push in zip(params, pushes(step, chain)[keep], strict=True):
            p.grad = 0.3 * p.detach() + push
        sampler.step()
        states.append(flat(params))
    return states, sampler


def set_controls(sampler: Sampler, lr: Any, temperature: Any, multiplier: Any) -> None:
    sampler.set_control("lr", lr)
    sampler.set_control("temperature", temperature)
    sampler.set_control("gradient_multiplier", multiplier)


@pytest.mark.parametrize(("cls", "options", "reference_class"), RULES)
def test_against_the_formula(cls: Any, options: dict[str, Any], reference_class: type[Reference]) -> None:
    states, sampler = run(cls, options, COURSE)
    noise = ChainNoise(start(), 1, SEED, ahead=False, draws=sampler.draws)
    reference = reference_class(flat(start()).tolist())
    for step, (controls, state) in enumerate(zip(COURSE, states, strict=True)):
        xi = flat(noise.draw()).tolist() if controls.temperature > 0 else [0.0] * SIZE * sampler.draws
        g = [0.3 * t + push for t, push in zip(reference.theta, flat(pushes(step)).tolist(), strict=True)]
        reference.update(g, xi, controls)
        torch.testing.assert_close(
            state, torch.tensor(reference.theta, dtype=torch.float64), rtol=1e-11, atol=1e-11, msg=f"step {step}"
        )


@pytest.mark.parametrize(("cls", "options"), RULES_WITHOUT_REFERENCE)
def test_noise_has_the_variance_of_the_convention(cls: Any, options: dict[str, Any]) -> None:
    """The variance per step (2·lr·τ/N and its kin), by 200,000 coordinates at gradient 0, within 5 standard errors.

    False alarm: 6e-7 for each sampler.
    """
    p = torch.nn.Parameter(torch.zeros(200_000))
    sampler = cls([p], lr=0.1, num_data=N, temperature=0.7, seed=1, **options)
    is_euler = cls is UnderdampedLangevin and "integrator" not in options
    for _ in range(2 if is_euler else 1):  # Euler's noise reaches θ a step later
        p.grad = torch.zeros_like(p)
        sampler.step()
    expected = {
        SGLD: 2 * 0.1 * 0.7 / N,
        pSGLD: 2 * 0.1 * 0.7 * 10,  # the preconditioner is at most 10·N, as here, where the gradient was always 0
        SGHMC: 2 * (0.3 - 0.1) * 0.1 * 0.7 / N,
        pSGHMC: 2 * 0.3**2 * 0.1 * 0.7 * 10,
        AdamSGLD: 2 * 0.1 * 0.7 * 10,
        ScaleAdaptedSGHMC: 2 * 0.3 * 0.1 * 0.7 * (10 if options.get("floor", 1) else 1 / N / 1e-8),
        UnderdampedLangevin: 0.1**2 * 2 * 1.5 * 0.7 * 0.1,
        SGNHT: 2 * 0.2 * 0.1 * 0.7 / N,
    }[cls]
    decay = math.exp(-1.5 * 0.1)
    expected = {
        "baoab": 0.05**2 * 0.7 * (1 - decay**2),  # the noise moves θ for half a time step
        "obabo": 0.1**2 * 0.7 * (1 - decay**2),
        "ubu": 0.7 * (2 * 1.5 * 0.1 - 3 + 4 * decay - decay**2) / 1.5**2,
    }.get(options.get("integrator", ""), expected)
    assert abs(p.var().item() / expected - 1) < 5 * math.sqrt(2 / 200_000)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("cls", "options"), RULES_WITHOUT_REFERENCE)
def test_floats_and_tensors_are_the_same_controls(cls: Any, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """... at positive temperature, where both mean noise."""
    course = [c for c in COURSE if c.temperature > 0]
    by_floats, _ = run(cls, options, course)
    by_tensors, _ = run(cls, options, course, lambda value: torch.full(shape, value, dtype=torch.float64))
    for a, b in zip(by_floats, by_tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("cls", "options"), RULES_WITHOUT_REFERENCE)
def test_tensor_lr_and_multiplier_without_noise(cls: Any, options: dict[str, Any]) -> None:
    """A temperature that is the number 0 stays that; the other controls are tensors."""
    course = [c for c in COURSE if c.temperature == 0]
    by_floats, _ = run(cls, options, course)
    values = iter(range(10**6))

    def lr_and_multiplier_as_tensors(value: float) -> Any:
        return value if next(values) % 3 == 1 else torch.tensor(value, dtype=torch.float64)

    by_tensors, _ = run(cls, options, course, lr_and_multiplier_as_tensors)
    for a, b in zip(by_floats, by_tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        pytest.param(
            *rule.values,
            id=rule.id,
        )
        for rule in RULES_WITHOUT_REFERENCE
    ],
)
def test_an_lr_tensor_that_is_filled_in_place(cls: Any, options: dict[str, Any]) -> None:
    """Torch's schedulers fill an lr that is a tensor; the step must not remember the tensor in place of its value."""
    by_floats, _ = run(cls, options, COURSE)
    kept = torch.zeros((), dtype=torch.float64)
    values = iter(range(10**6))

    def lr_in_place(value: float) -> Any:
        return kept.fill_(value) if next(values) % 3 == 0 else value

    by_tensor, _ = run(cls, options, COURSE, lr_in_place)
    for a, b in zip(by_floats, by_tensor, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("cls", "options"), [p for p in RULES_WITHOUT_REFERENCE if p.values[0] not in (SGHMC, SGNHT)])
def test_zero_temperature_as_number_and_as_tensor_without_momentum(cls: Any, options: dict[str, Any]) -> None:
    course = [c for c in COURSE if c.temperature == 0]
    by_numbers, _ = run(cls, options, course)
    by_tensors, _ = run(cls, options, course, lambda value: torch.tensor(value, dtype=torch.float64))
    for a, b in zip(by_numbers, by_tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


CHAIN_COURSES = [
    [Controls(0.3, 1.0, 1.0), Controls(0.1, 0.5, -1.0), Controls(0.2, 0.2, 2.0)],
    [Controls(0.1, 2.0, -0.5), Controls(0.3, 0.1, 1.0), Controls(0.4, 1.0, 0.0)],
    [Controls(0.2, 0.3, 1.0), Controls(0.2, 1.5, 0.3), Controls(0.1, 0.7, -3.0)],
]
STACKED_RULES = [pytest.param(*rule.values, slice(2), id=str(rule.id)) for rule in RULES_WITHOUT_REFERENCE]
STACKED_RULES += [
    pytest.param(
        *rule.values,
        slice(None),
        id=f"{rule.id}-with-scalar",
    )
    for rule in RULES_WITHOUT_REFERENCE
]


def run_stacked(cls: Any, options: dict[str, Any], order: Sequence[int], keep: slice = slice(None)) -> list[Tensor]:
    """Run the chains as one stack, chain c with the controls of CHAIN_COURSES[order[c]]; (C, SIZE) after each step."""
    count = len(order)
    params = [torch.nn.Parameter(torch.stack(ps)) for ps in zip(*map(start, range(count)), strict=True)][keep]
    sampler = cls(params, lr=0.1, num_data=N, seed=SEED, num_chains=count, **options)
    states = []
    for step in range(len(CHAIN_COURSES[0])):
        now = [CHAIN_COURSES[c][step] for c in order]
        values = [[getattr(c, name) for c in now] for name in ("lr", "temperature", "multiplier")]
        set_controls(sampler, *(torch.tensor(v, dtype=torch.float64) for v in values))
        # Every chain has the gradients of its own place, not of its controls.
        per_chain = [
            [0.3 * p.detach()[c] + push for p, push in zip(params, pushes(step, c)[keep], strict=True)]
            for c in range(count)
        ]
        for p, g in zip(params, zip(*per_chain, strict=True), strict=True):
            p.grad = torch.stack(g)
        sampler.step()
        states.append(torch.stack([flat([p[c] for p in params]) for c in range(count)]))
    return states


@pytest.mark.parametrize(("cls", "options", "keep"), STACKED_RULES)
def test_stacked_chains_are_separate_chains(cls: Any, options: dict[str, Any], keep: slice) -> None:
    stacked = run_stacked(cls, options, (0, 1, 2), keep)
    for chain, course in enumerate(CHAIN_COURSES):
        alone, _ = run(cls, options, course, chain=chain, keep=keep)
        for step, state in enumerate(alone):
            torch.testing.assert_close(stacked[step][chain], state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("cls", "options", "decay"),
    [(SGHMC, {"friction": 0.3}, 0.7), (UnderdampedLangevin, {"friction": 1.5}, 1 - 0.2 * 1.5), (SGNHT, {}, 0.9)],
)
def test_the_multiplier_does_not_rescale_momentum(cls: Any, options: dict[str, Any], decay: float) -> None:
    """One push, then steps without a gradient: whatever κ is, the displacement shrinks by the friction alone."""
    for multiplier in (1.0, -7.0, torch.tensor(-7.0, dtype=torch.float64)):
        p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        sampler = cls([p], lr=0.2, num_data=N, temperature=0.0, **options)
        places = [p.detach().clone()]
        for step in range(5):
            sampler.set_control("gradient_multiplier", 1.0 if step == 0 else multiplier)
            p.grad = torch.full_like(p, 1.0 if step == 0 else 0.0)
            sampler.step()
            places.append(p.detach().clone())
        first = 1 if cls is UnderdampedLangevin else 0  # whose momentum moves θ a step later
        for i in range(first, 4):
            torch.testing.assert_close(places[i + 2] - places[i + 1], decay * (places[i + 1] - places[i]))
        assert places[-1].abs().min() > 0
