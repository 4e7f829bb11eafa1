"""The light loop: its laws, its independence of chains, and that compiled blocks are the eager steps."""

import functools
import math
from typing import Any

import pytest
import torch

from lightning_sgmcmc.contour import Contour, ContourRules, ContourState, DecayingStepSize
from lightning_sgmcmc.contour.partition import EnergyPartition
from lightning_sgmcmc.samplers import (
    MCLMC,
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
from lightning_sgmcmc.simulation import ContourRun, FullGradient, GaussianSum, densities, loop, sample_sum, simulate
from lightning_sgmcmc.simulation.loop import has_compiler
from lightning_sgmcmc.simulation.targets import CosineTarget, GaussianMixture
from tests.support.kinetic import ubu_variance

NORMAL = GaussianMixture([1.0], [[0.0, 0.0]])
MIXTURE = GaussianMixture.two_modes()
UBU = functools.partial(UnderdampedLangevin, friction=1.5, integrator="ubu")
SAMPLERS = [SGLD, functools.partial(SGHMC, friction=0.2), UnderdampedLangevin, SGNHT, pSGLD, UBU]
PARTITION = EnergyPartition(2.0, 1.0, 50)


def contour(**options: Any) -> ContourRun:
    rules = {k: options.pop(k) for k in ("zeta", "scheme", "weighting") if k in options}
    return ContourRun(Contour(PARTITION, ContourRules(**rules)), **options)


@pytest.mark.parametrize(("temperature", "noise"), [(1.0, 0.0), (0.3, 0.0), (1.0, 2.0)])
def test_sgld_has_its_exact_stationary_law(temperature: float, noise: float) -> None:
    """x' = (1-ε)x + √(2ετ)ξ + ε·s·ξ' has the variance (2τ + ε·s²)/(2 - ε) in each coordinate.

    4,000 chains of two coordinates are 8,000 independent draws: their variance is within 4.5 standard errors
    (√(2/8000) of it) but for one seed in 10⁵.
    """
    lr = 0.2
    run = simulate(NORMAL, lr=lr, num_steps=60, num_chains=4000, temperature=temperature, gradient_noise=noise, seed=1)
    expected = (2 * temperature + lr * noise**2) / (2 - lr)
    assert run.last.double().square().mean().item() == pytest.approx(expected, rel=4.5 * math.sqrt(2 / 8000))


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rule_with_two_normals_a_step_has_its_exact_law(compile: bool) -> None:
    """UBU, of 8,000 draws as above, in both loops."""
    run = simulate(NORMAL, UBU, lr=1.2, num_steps=40, num_chains=4000, seed=1, compile=compile)
    wanted = ubu_variance(1.2, 0.9)
    assert run.last.double().square().mean().item() == pytest.approx(wanted, rel=4.5 * math.sqrt(2 / 8000))
    target = GaussianSum(torch.tensor([[0.5, -0.5]]).double())
    summed = sample_sum(target, UBU, FullGradient(), lr=1.2, num_steps=40, num_chains=4000, seed=1)
    moved = summed.last - target.mean
    assert moved.square().mean().item() == pytest.approx(wanted, rel=4.5 * math.sqrt(2 / 8000))


def test_momenta_of_a_constant_length_have_the_law() -> None:
    """8,000 draws as above: 4.5 standard errors are 7 %, and the error of order h² is below 1 %."""
    run = simulate(NORMAL, MCLMC, lr=0.2, num_steps=100, num_chains=4000, seed=1)
    assert run.last.double().square().mean().item() == pytest.approx(1.0, rel=0.08)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("with_contour", [False, True])
def test_chains_do_not_depend_on_their_number(sampler: Any, with_contour: bool) -> None:
    """Chain c is the same bit for bit beside two others and beside six."""
    options = {"lr": 0.05, "num_steps": 50, "energy_noise": 0.2, "gradient_noise": 0.3, "seed": 5, "keep_every": 1}
    few, many = (
        simulate(MIXTURE, sampler, num_chains=count, contour=contour() if with_contour else None, **options)
        for count in (3, 7)
    )
    assert torch.equal(few.positions, many.positions[:, :3])
    assert torch.equal(few.log_weights, many.log_weights[:, :3])
    assert not torch.equal(few.positions[:, 0], few.positions[:, 1])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_without_zeta_chains_are_the_plain_ones(sampler: Any) -> None:
    plain, flat = (
        simulate(MIXTURE, sampler, lr=0.05, num_steps=40, num_chains=4, contour=c, seed=2)
        for c in (None, contour(zeta=0.0))
    )
    torch.testing.assert_close(plain.last, flat.last, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("learner", [None, contour(), contour(shared=True), contour(scheme="original")])
def test_compiled_blocks_are_the_eager_steps(sampler: Any, learner: ContourRun | None) -> None:
    options: dict[str, Any] = {"lr": 0.02, "num_steps": 70, "num_chains": 5, "contour": learner, "gradient_noise": 0.1}
    eager, compiled = (
        simulate(MIXTURE, sampler, keep_every=1, compile=compile, **options) for compile in (False, True)
    )
    torch.testing.assert_close(compiled.positions, eager.positions, rtol=1e-3, atol=1e-3)
    if learner is not None:
        assert eager.contour is not None
        assert compiled.contour is not None
        torch.testing.assert_close(compiled.contour.log_vector, eager.contour.log_vector, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", [pSGLD, AdamSGLD, pSGHMC, ScaleAdaptedSGHMC])
def test_a_preconditioner_is_frozen_as_in_a_loop_of_steps(sampler: Any) -> None:
    """At temperature 0 both loops make the same steps, of which the first 20 adapt."""
    made: list[Sampler] = []

    def build(params: Any, **options: Any) -> Sampler:
        made.append(sampler(params, adapt=20, **options))
        return made[-1]

    start = torch.linspace(-3.0, 3.0, 4)[:, None]
    run = simulate(MIXTURE, build, lr=0.02, num_steps=60, num_chains=4, temperature=0.0, initial=start)
    place = torch.nn.Parameter(start.clone())
    plain = build([place], lr=0.02, num_data=1, temperature=0.0, num_chains=4)
    for _ in range(60):
        place.grad = MIXTURE.gradient(place.detach())
        plain.step()
    light, known = (rule.preconditioner(rule.param_groups[0]["params"]) for rule in made)
    torch.testing.assert_close(light, known, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(run.last, place.detach(), rtol=1e-3, atol=1e-4)


def test_a_rule_that_counts_its_steps_is_not_compiled() -> None:
    options: dict[str, Any] = {"lr": 0.01, "num_steps": 2, "compile": True}
    with pytest.raises(ValueError, match="AdamSGLD counts its steps"):
        simulate(MIXTURE, AdamSGLD, **options)
    with pytest.raises(ValueError, match="AdamSGLD counts its steps"):
        sample_sum(GaussianSum(torch.ones(3, 2)), AdamSGLD, FullGradient(), **options)


@pytest.mark.slow
def test_compiled_sgld_is_eager_sgld(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(densities, "BLOCK", 4)  # steps are unrolled, so a block of 32 takes a minute to compile
    eager, compiled = (
        simulate(NORMAL, lr=0.1, num_steps=40, num_chains=5, keep_every=1, compile=compile) for compile in (False, True)
    )
    torch.testing.assert_close(compiled.positions, eager.positions, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "shared"),
    [
        ("scalable", True),
        pytest.param("original", False, marks=pytest.mark.slow),
        pytest.param("original", True, marks=pytest.mark.slow),
        pytest.param("scalable", False, marks=pytest.mark.slow),
    ],
)
def test_learned_masses_are_the_targets(scheme: str, shared: bool) -> None:
    """The total-variation error of π, after 6,000 steps of 400 chains at ε=0.1, is below 0.05 (measured 0.02 to 0.03;
    the papers' bin weights have 0.10 to 0.18 after 15,000)."""
    learner = contour(scheme=scheme, shared=shared, step_size=DecayingStepSize(1, 0.6, 100))
    start = torch.where(torch.arange(400) % 2 == 0, -6.0, 4.0)[:, None]
    run = simulate(MIXTURE, lr=0.1, num_steps=6_000, num_chains=400, contour=learner, initial=start, seed=3)
    assert run.contour is not None
    vector = run.contour.log_vector.exp()
    pi = vector if shared else vector.mean(0)
    visits = run.contour.visits if shared else run.contour.visits.sum(0)
    masses = learner.contour.log_masses(ContourState(pi.log(), visits)).exp()
    truth = MIXTURE.bin_masses(PARTITION.edges())
    assert 0.5 * (masses - truth).abs().sum().item() < 0.05


def test_draws_carry_their_own_energies_and_weights() -> None:
    learner = contour(learn=False, state=contour().contour.known_state(MIXTURE.bin_masses(PARTITION.edges()) + 1e-12))
    run = simulate(
        MIXTURE, lr=0.1, num_steps=200, num_chains=6, contour=learner, energy_noise=0.0, keep_every=7, burn_in=20
    )
    assert run.steps.tolist() == list(range(27, 201, 7))
    torch.testing.assert_close(run.energies, MIXTURE.energy(run.positions))
    assert learner.state is not None
    for draws, energies in zip(run.log_weights, run.energies, strict=True):
        place = learner.contour.locate(learner.state, energies, 1.0, PARTITION.edges())
        torch.testing.assert_close(draws, learner.contour.log_weight(place.log_density))
    assert run.contour is not None
    assert torch.equal(run.contour.log_vector, learner.state.log_vector.expand(6, -1))


def test_averages_are_those_of_the_draws() -> None:
    run = simulate(
        MIXTURE,
        lr=0.1,
        num_steps=2500,
        num_chains=3,
        contour=contour(),
        keep_every=1,
        burn_in=100,
        observe=lambda x: torch.cat([x, x.square()], -1),
        checkpoints=[101, 1024, 1030, 2500],
    )
    weights = run.log_weights.exp()[..., None]
    for note, step in zip(run.averages, run.checkpoints.tolist(), strict=True):
        chosen = run.steps <= step
        f = torch.cat([run.positions, run.positions.square()], -1).double()
        expected = (weights[chosen] * f[chosen]).sum(0) / weights[chosen].sum(0)
        torch.testing.assert_close(note.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_temperature_of_0_rests_the_contour() -> None:
    run = simulate(
        MIXTURE,
        lr=lambda k: 0.1 / k**0.1,
        temperature=lambda k: 0.0 if k <= 60 else 1.0,
        num_steps=100,
        num_chains=4,
        contour=contour(),
        keep_every=1,
    )
    assert run.contour is not None
    assert run.contour.visits.sum(1).tolist() == [40] * 4
    assert (run.multipliers[:60] == 1).all()


@pytest.mark.slow
def test_all_modes_are_found_by_a_contour() -> None:
    """A short look at the paper's nine modes: with a contour, chains get from mode to mode."""
    target = CosineTarget.nine_modes()
    shape = Contour(EnergyPartition(-6.4, 0.25, 90), ContourRules(0.75, "original"))
    learner = ContourRun(shape, DecayingStepSize(10, 0.8, 100, 0.003))
    options: dict[str, Any] = {"lr": 0.003, "num_steps": 12_000, "num_chains": 20, "keep_every": 20}
    start = torch.zeros(2)
    counts = []
    for used in (None, learner):
        run = simulate(target, contour=used, initial=start, **options)
        places = run.positions.double()[:, :, None] - target.modes
        found = (places.square().sum(-1) < 0.25).any(0).sum(-1)
        counts.append(found.double().mean().item())
    assert counts[1] > counts[0] + 2, counts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_chains": 0}, "num_chains"),
        ({"keep_every": 0}, "keep_every"),
        ({"burn_in": -1}, "burn_in"),
        ({"energy_noise": -0.1}, "energy_noise"),
        ({"gradient_noise": math.nan}, "gradient_noise"),
        ({"initial": torch.zeros(3)}, "initial"),
        ({"initial": torch.tensor([math.nan])}, "initial"),
        ({"checkpoints": [5]}, "pass observe"),
        ({"checkpoints": [5, 4], "observe": torch.square}, "must increase"),
        ({"checkpoints": [11], "observe": torch.square}, "between burn_in"),
        ({"lr": 1e20}, "smaller lr"),
        ({"lr": -1.0}, "lr"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        simulate(MIXTURE, **({"lr": 0.1, "num_steps": 10} | options))


def test_a_device_without_float64_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device must have float64.* got mps: use device='cpu'"):
        simulate(NORMAL, lr=0.1, num_steps=2, num_chains=2, device="mps")


def test_a_compiler_that_does_not_work_leaves_the_steps_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac has a `clang++` that only says what to install."""

    def shim(*_: Any) -> Any:
        raise RuntimeError("xcrun: error: invalid active developer path")

    options: dict[str, Any] = {"lr": 0.05, "num_steps": 2_500, "num_chains": 2, "seed": 1}
    expected = simulate(MIXTURE, SGLD, compile=False, **options)
    monkeypatch.setattr(torch, "compile", lambda *_, **options: shim)
    monkeypatch.setattr(loop, "WORTH_COMPILING", 1_000)
    monkeypatch.setattr(loop, "has_compiler", lambda: True)
    with pytest.warns(UserWarning, match="fails on a block of steps.*xcrun: error.*compile=False leaves it out"):
        run = simulate(MIXTURE, SGLD, **options)
    assert torch.equal(run.last, expected.last)
