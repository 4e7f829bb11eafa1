"""MCLMC's energy errors against their law on a Gaussian, and the step size that the tuner finds by them.

On an isotropic Gaussian of many coordinates with frequency ω the radius of the full-gradient chain is known: the
variances are ρ² times the target's, with ρ·tanh(hωρ/2) = hω/2, about 1 + (hω)²/12. A step's energy error is
√d·hω·(1-1/ρ²)·(y + y')/2 - (hω)²/8·(y'² - y²), with y and y' of mean 0, variance about ρ² - (hω)²/4 and correlation
c = exp(-γ·h). So in many coordinates the variance for each is about (hω)⁶/144, and the bias of the variances is that
over 12, to the power 1/3.
"""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Gaussian, GaussianPrior
from lightning_sgmcmc.callbacks import CyclicalSchedule, SamplingSchedule
from lightning_sgmcmc.cli.before_fit import _print_setting, _table
from lightning_sgmcmc.diagnostics import autocorrelation_time
from lightning_sgmcmc.samplers import MCLMC, pMCLMC
from lightning_sgmcmc.tune import Limit, propose_lr
from lightning_sgmcmc.tune.proposal import Probe, StepProposal
from lightning_sgmcmc.tune.propose import WANTED, choose_by_energy, corrected, solve
from tests.support.trainers import quiet_trainer

CHAINS, DIMENSION, NUM_DATA, TAU = 100, 200, 10, 0.7


def radius(step: float) -> float:
    """Return ρ at hω."""
    low, high = 1.0, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.tanh(step * middle / 2) < step / 2 else (low, middle)
    return low


def law(step: float, decay: float = 1.0) -> float:
    """Return the energy error's variance for each coordinate at hω and c."""
    rho = radius(step)
    linear = step**2 * (1 - 1 / rho**2) ** 2 * (rho**2 - step**2 / 4) * (1 + decay) / 2
    return linear + step**4 * (1 - decay**2) / 16 / DIMENSION


def walked(lr: float, frequency: float, steps: int, friction: float = 1.0) -> tuple[float, float, float]:
    """Return the energy errors' variance for each coordinate, the mean of |θ|² over the target's, and its error."""
    p = nn.Parameter(torch.randn(CHAINS, DIMENSION, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    scale = frequency / math.sqrt(TAU)  # of θ at temperature τ: N·λ = ω²
    with torch.no_grad():
        p /= scale
    rule = MCLMC([p], lr=lr, friction=friction, num_data=NUM_DATA, num_chains=CHAINS, temperature=TAU, seed=2)
    rule.draw_momenta()
    group, errors, sizes = rule.param_groups[0], [], torch.zeros(CHAINS, dtype=torch.float64)

    def gradient() -> Tensor:
        return p.detach() * frequency**2 / NUM_DATA

    def potential() -> Tensor:
        return (p.detach() * frequency).square().sum(1) / 2 / TAU

    for step in range(2 * steps):
        p.grad, before = gradient(), potential()
        last = rule.kinetic_gain(group, [p], [p.grad]) - rule.kinetic_gain(group, [p], [p.grad], 0.5)
        rule.step()
        if step >= steps:
            errors.append(last + potential() - before + rule.kinetic_gain(group, [p], [gradient()], 0.5))
            sizes += (p.detach() * scale).square().sum(1) / DIMENSION / steps
    return float(torch.stack(errors).var(0).mean()) / DIMENSION, float(sizes.mean()), float(sizes.std()) / CHAINS**0.5


@pytest.mark.parametrize("step", [0.3, 0.6])
def test_energy_errors_have_the_law_of_the_isotropic_gaussian(step: float) -> None:
    """The variance within 6 %, the bias within four standard errors and 0.3 %, for the finite dimension.

    The variance of the other sign, h⁶/16 of a chain without the sphere, would be nine times as large.
    """
    frequency = 3.0
    variance, size, error = walked(step / frequency, frequency, 150)
    assert variance / law(step, math.exp(-step / frequency)) == pytest.approx(1, abs=0.06)
    assert size - radius(step) ** 2 == pytest.approx(0, abs=4 * error + 0.003)
    assert law(step) == pytest.approx(step**6 / 144, rel=0.2)


def test_the_kinetic_gain_is_the_integral_of_the_force() -> None:
    """∫ -N·g·r/τ·dt·... over the flow, by the midpoint rule, and gains of parts add up."""
    generator = torch.Generator().manual_seed(0)
    place, gradient, r = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    p = nn.Parameter(place)
    rule = MCLMC([p], lr=0.2, num_data=NUM_DATA, temperature=TAU)
    group = rule.param_groups[0]
    (momentum,) = rule.momenta(group) or []
    momentum.copy_(r * math.sqrt(5 * TAU) / r.norm())
    at, steps, work = momentum.clone(), 4000, 0.0
    force = -NUM_DATA * gradient * 5 / 4

    def speed(x: Tensor) -> Tensor:
        return force - x * (x @ force) / (x @ x)

    for _ in range(steps):
        middle = at + 0.2 / steps / 2 * speed(at)
        work += 0.2 / steps * float(-NUM_DATA * gradient @ middle) / TAU
        at = at + 0.2 / steps * speed(middle)
    assert float(rule.kinetic_gain(group, [p], [gradient])) == pytest.approx(work, rel=1e-5)


# -- the search -------------------------------------------------------------------------------------------------------


def test_the_search_follows_the_law_of_sixth_order() -> None:
    """From far below and far above, in four probes each."""
    for start in (1e-2, 30.0):
        probes = solve(lambda lr: Probe(lr, energy=0.0, energy_variance=WANTED * lr**6, friction=2.0), start, 10)
        lr, friction, is_healthy, _ = choose_by_energy(probes)
        assert (lr, friction) == (pytest.approx(1), pytest.approx(2))
        assert is_healthy
        assert len(probes) <= 7
    assert corrected(Probe(1.0)) == 0.25
    lr, friction, is_healthy, reason = choose_by_energy([Probe(1.0)])
    assert (lr, friction, is_healthy) == (0.25, None, False)
    assert "No probe" in reason


ROWS, OUTPUTS = 64, 25
PRECISION = ROWS + 1.0


def regression() -> TensorDataset:
    """Return data with XᵀX = 64·I: the posterior of 100 weights is isotropic, with precision 65."""
    signs = torch.ones(1, 1)
    for _ in range(6):
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    x = signs[:, 1:5]
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        x, x @ torch.randn(4, OUTPUTS, generator=generator) + torch.randn(ROWS, OUTPUTS, generator=generator)
    )


def tuned(batch: int, sampler: Any = MCLMC, lr: Any = 0.05, max_probes: int = 10, **options: Any) -> Any:
    """Tune four chains, whose energy errors together have the wanted precision in short probes."""
    torch.manual_seed(0)
    module = BayesianModule(
        net=nn.Linear(4, OUTPUTS, bias=False),
        likelihood=Gaussian(std=1.0),
        prior=GaussianPrior(std=1.0),
        sampler=sampler,
        lr=lr,
        seed=0,
        num_chains=4,
        chain_execution="vmap",
        **options,
    )
    loader = DataLoader(regression(), batch, shuffle=True, generator=torch.Generator().manual_seed(0))
    schedule = SamplingSchedule(burn_in_steps=500, every_n_steps=5)
    make = functools.partial(quiet_trainer, max_steps=4000, callbacks=[schedule])
    return propose_lr(module, loader, make_trainer=make, steps=150, burn_in_steps=50, max_probes=max_probes)


@pytest.fixture(scope="module")
def proposal() -> Any:
    return tuned(ROWS)


@pytest.mark.slow
def test_the_proposal_has_the_wanted_energy_variance(proposal: Any) -> None:
    """Within 20 % in long runs of 100 chains of their own, whose bias is that of the law; the friction is √(τ/s²)."""
    assert proposal.limit is Limit.ENERGY_ERROR
    assert proposal.is_healthy
    factor = math.sqrt(PRECISION) / 3.0
    variance, size, error = walked(proposal.lr * factor, 3.0, 150, friction=1 / factor)
    assert variance / WANTED == pytest.approx(1, abs=0.2)
    assert 0 < size - 1 < (WANTED * 1.2 / 12) ** (1 / 3) + 4 * error
    assert proposal.friction == pytest.approx(math.sqrt(PRECISION), rel=0.2)
    assert all(probe.energy_variance is not None for probe in proposal.probes)
    assert proposal.as_json()["friction"] == proposal.friction


@pytest.mark.slow
def test_the_proposal_gets_smaller_as_the_gradient_noise_grows(proposal: Any) -> None:
    """By the batch's own potential: the gradient of a batch of 4 has 16 times the square, which alone makes the step
    smaller by 16^(-1/6) = 0.63, and its curvature differs between directions."""
    assert tuned(4).lr / proposal.lr < 0.8


def test_several_step_sizes_are_scaled_together() -> None:
    found = tuned(ROWS, lr=[0.01, 0.02, 0.01, 0.005], max_probes=1)
    assert found.setting == pytest.approx([found.lr / 2, found.lr, found.lr / 2, found.lr / 4])


@pytest.mark.slow
def test_a_preconditioned_form_is_tuned_in_its_coordinates(proposal: Any) -> None:
    """The target is isotropic already; the scales of a short burn-in scatter, so some coordinates are sharper."""
    scaled = tuned(ROWS, functools.partial(pMCLMC, friction=8.0))
    assert 0.6 < scaled.lr / proposal.lr < 1.1
    assert scaled.is_healthy


@pytest.mark.slow
@pytest.mark.parametrize("condition", [1.0, 100.0, 10_000.0])
def test_the_friction_of_the_width_is_near_that_of_autocorrelation_times(condition: float) -> None:
    """Robnik et al. find γ in a third stage, as 1/(0.4·h·t) with t the mean autocorrelation time of the coordinates.

    At γ = √(τ/s²), with s² the target's own mean variance, that changes γ by less than a factor of 1.5.
    """
    chains, dimension, steps = 8, 50, 6000
    curvature = torch.logspace(0, math.log10(condition), dimension, dtype=torch.float64)
    lr, friction = 0.7 / math.sqrt(condition), float(curvature.reciprocal().mean().rsqrt())
    p = nn.Parameter(torch.randn(chains, dimension, generator=torch.Generator().manual_seed(1)) / curvature.sqrt())
    rule = MCLMC([p], lr=lr, friction=friction, num_data=1, num_chains=chains, seed=0)
    rule.draw_momenta()
    draws = torch.empty(steps, *p.shape)
    for place in draws:
        p.grad = curvature * p.detach()
        rule.step()
        place.copy_(p.detach())
    time = float(autocorrelation_time(draws).mean())
    assert 1 / 1.5 < 1 / (0.4 * lr * time) / friction < 1.5


def test_a_cold_stage_is_refused() -> None:
    module = BayesianModule(net=nn.Linear(4, OUTPUTS), likelihood=Gaussian(std=1.0), sampler=MCLMC, lr=0.01)
    make = functools.partial(quiet_trainer, max_steps=400, callbacks=[CyclicalSchedule(num_cycles=2)])
    with pytest.raises(ValueError, match=r"MCLMC makes no steps at temperature 0.*WarmStart"):
        propose_lr(module, DataLoader(regression(), ROWS), make_trainer=make)


def test_the_report_has_the_energies_figures() -> None:
    probes = [Probe(lr, energy=-1234.5, energy_variance=WANTED * lr**6, friction=2.0) for lr in (0.5, 1.0)]
    proposal = StepProposal(1.0, 1.0, Limit.ENERGY_ERROR, True, "", tuple(probes), friction=2.0)
    console = Console(width=80, record=True)
    console.print(_table(proposal, Path("tune.json")))
    _print_setting(console, proposal)
    text = console.export_text()
    assert "0.0005" in text
    assert "friction: 2" in text
    assert proposal.as_json()["probes"][1]["energy_variance"] == WANTED
    assert "friction" not in StepProposal(1.0, 1.0, Limit.TRIED, True, "", ()).as_json()
