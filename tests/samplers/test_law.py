"""The law that a sampler states of its step, and the momenta that others may rescale."""

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_sgmcmc.samplers import MCLMC, SGHMC, SGLD, SGNHT, Sampler, StepLaw, UnderdampedLangevin, pSGLD

KAPPA = 1.7
RULES = [
    pytest.param(SGLD, {}, id="SGLD"),
    pytest.param(SGHMC, {}, id="SGHMC"),
    pytest.param(SGHMC, {"friction": 0.2, "noise_estimate": 0.05}, id="SGHMC-estimate"),
    pytest.param(SGNHT, {}, id="SGNHT"),
    pytest.param(UnderdampedLangevin, {"friction": 2.0}, id="UnderdampedLangevin"),
    pytest.param(UnderdampedLangevin, {"friction": 2.0, "integrator": "baoab"}, id="UnderdampedLangevin-baoab"),
    pytest.param(UnderdampedLangevin, {"friction": 2.0, "integrator": "obabo"}, id="UnderdampedLangevin-obabo"),
    pytest.param(UnderdampedLangevin, {"friction": 2.0, "integrator": "ubu"}, id="UnderdampedLangevin-ubu"),
]


def stated(cls: Any, options: dict[str, Any], temperature: Any = 0.5, lr: Any = 0.1) -> StepLaw:
    rule = cls([nn.Parameter(torch.zeros(3))], lr=lr, num_data=30, temperature=temperature, **options)
    rule.set_control("gradient_multiplier", KAPPA)
    law: StepLaw = rule.law(rule.param_groups[0])
    return law


@pytest.mark.parametrize(("cls", "options"), RULES)
def test_what_a_law_says_of_gradient_noise_follows_from_its_step(cls: Any, options: dict[str, Any]) -> None:
    law = stated(cls, options)
    removed = law.variance if law.thermal is None or law.adapts else 2 * law.damping * law.thermal
    assert law.gradient_noise_factor == pytest.approx(float((law.force / KAPPA) ** 2 / removed), rel=1e-12)
    if not law.adapts:
        assert law.gradient_noise_allowance == pytest.approx(float(1 - law.variance / removed), abs=1e-12)
    assert law.adapts == (cls is SGNHT)
    assert (law.thermal is None) == (law.momentum_variance() is None) == (cls is SGLD)


@pytest.mark.parametrize(("cls", "options"), RULES)
def test_the_stationary_momentum_variance_stays_in_a_step(cls: Any, options: dict[str, Any]) -> None:
    law = stated(cls, options)
    stationary = law.momentum_variance()
    assert law.momentum_variance(stationary) == (None if stationary is None else pytest.approx(float(stationary)))


@pytest.mark.parametrize(("cls", "options"), RULES)
def test_a_law_at_temperature_zero(cls: Any, options: dict[str, Any]) -> None:
    law = stated(cls, options, temperature=0.0)
    assert law.variance == 0
    assert law.gradient_noise_factor == math.inf
    assert law.momentum_variance() in (0, None)


@pytest.mark.parametrize(("cls", "options"), RULES)
def test_a_control_for_each_chain_gives_a_law_for_each(cls: Any, options: dict[str, Any]) -> None:
    both = stated(cls, options, torch.tensor([0.5, 2.0]).double(), torch.tensor([0.1, 0.02]).double())
    for chain, (temperature, lr) in enumerate([(0.5, 0.1), (2.0, 0.02)]):
        one = stated(cls, options, temperature, lr)
        for name in ("force", "variance", "gradient_noise_factor"):
            assert float(getattr(both, name)[chain]) == pytest.approx(float(getattr(one, name)), rel=1e-6)


def test_a_rule_without_a_law_is_read_as_langevin_dynamics() -> None:
    rule = pSGLD([nn.Parameter(torch.zeros(3))], lr=0.1, num_data=30, temperature=0.5)
    group = rule.param_groups[0]
    assert rule.law(group) is None
    reference = SGLD([nn.Parameter(torch.zeros(3))], lr=0.1, num_data=30, temperature=0.5)
    assert rule.langevin_law(group) == reference.law(reference.param_groups[0])


# -- momenta ----------------------------------------------------------------------------------------------------------


class Fourth(Sampler):
    """A rule that keeps its momentum under a name of its own."""

    momentum_buffer: ClassVar[str] = "speed"

    def update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], noise: Any) -> None:
        speeds = self._buffers(params, self.momentum_buffer)
        self._add(speeds, grads, -group["lr"])
        torch._foreach_add_(params, speeds)


@pytest.mark.parametrize("cls", [SGHMC, SGNHT, UnderdampedLangevin, Fourth])
def test_momenta_are_rescaled_by_the_sampler_that_holds_them(cls: Any) -> None:
    moving, idle = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))
    rule = cls([moving, idle], lr=0.1, num_data=30, num_chains=2)
    group = rule.param_groups[0]
    rule.rescale_momenta(group, 3.0)
    assert rule.stored_momenta(group) == [None, None]
    moving.grad = torch.ones_like(moving)
    rule.step()
    before, nothing = rule.stored_momenta(group)
    assert nothing is None, "asking makes no buffer"
    before = before.clone()
    rule.rescale_momenta(group, torch.tensor([2.0, 0.5]))
    assert torch.equal(rule.stored_momenta(group)[0], before * torch.tensor([[2.0], [0.5]]))
    rule.rescale_momenta(group, 2.0)
    assert torch.equal(rule.momenta(group)[0], before * torch.tensor([[4.0], [1.0]]))


def test_momenta_of_a_step_without_noise_are_not_rescaled() -> None:
    p = nn.Parameter(torch.zeros(3))
    rule = SGHMC([p], lr=0.1, num_data=30, temperature=0.0)
    p.grad = torch.ones_like(p)
    rule.step()
    rule.rescale_momenta(rule.param_groups[0], 2.0)
    assert torch.equal(rule.stored_momenta(rule.param_groups[0])[0], torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [SGLD, pSGLD])
def test_rules_without_momentum_have_nothing_to_rescale(cls: Any) -> None:
    p = nn.Parameter(torch.zeros(3))
    rule = cls([p], lr=0.1, num_data=30)
    p.grad = torch.ones_like(p)
    rule.step()
    rule.rescale_momenta(rule.param_groups[0], 2.0)
    assert rule.momenta(rule.param_groups[0]) is None
    assert rule.stored_momenta(rule.param_groups[0]) == [None]


@pytest.mark.by_default("0.4-noisy")
@pytest.mark.parametrize("heat", [0.0, 0.05], ids=["full", "noisy"])
@pytest.mark.parametrize("friction", [0.1, 0.4])
def test_a_thermostat_holds_the_temperature_of_positions(friction: float, heat: float) -> None:
    """The variance of θ is 1/N for any friction, with noisy gradients too. A thermostat that holds the mean of v² holds
    positions at 1 - friction/2, whatever lr."""
    torch.manual_seed(0)
    chains, num_data, lr = 200, 50, 0.02
    theta = torch.nn.Parameter(torch.randn(chains, 8) / num_data**0.5)
    inertia = 40 / friction * lr / (friction * num_data)
    sampler = SGNHT(
        [theta], lr=lr, num_data=num_data, num_chains=chains, friction=friction, thermal_inertia=max(inertia, 0.02)
    )
    squares = []
    for step in range(3000):
        theta.grad = theta.detach() + heat * torch.randn_like(theta)
        sampler.step()
        if step >= 1000:
            squares.append(theta.detach().square().mean(1))
    ratio = num_data * torch.stack(squares).mean(0)
    assert abs(ratio.mean() - 1) < 0.015 + 4 * ratio.std() / chains**0.5


def test_momenta_of_a_constant_length_have_the_temperature_as_variance() -> None:
    """... and not that of a momentum with friction, which is larger by 1/(1 - a/2)."""
    theta = nn.Parameter(torch.zeros(3))
    sampler = MCLMC([theta], lr=0.1, num_data=10, temperature=0.7, friction=5.0)
    law = sampler.law(sampler.param_groups[0])
    assert law.momentum_variance() == law.momentum_variance(2.0) == 0.7
