"""The microcanonical rule: its flow, its law, and what it refuses."""

import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_sgmcmc.callbacks import CyclicalSchedule, SamplingSchedule, WarmStart
from lightning_sgmcmc.datamodules import DatasetDataModule
from lightning_sgmcmc.samplers import MCLMC, UnderdampedLangevin
from tests.support.problems import blobs, classifier

NUM_DATA, TAU = 10, 0.7


def made(place: Tensor, **options: Any) -> tuple[nn.Parameter, MCLMC]:
    p = nn.Parameter(place.clone())
    return p, MCLMC([p], **({"lr": 0.1, "num_data": NUM_DATA, "temperature": TAU} | options))


def kicked(gradient: Tensor, momentum: Tensor, lr: float, multiplier: float = 1.0) -> Tensor:
    """Return r after the first line, from one step without friction or noise."""
    p, rule = made(torch.zeros_like(gradient), lr=lr, friction=1e-12)
    rule.set_control("gradient_multiplier", multiplier)
    momenta = rule.momenta(rule.param_groups[0])
    assert momenta is not None
    momenta[0].copy_(momentum)
    with torch.no_grad():
        rule.update(rule.param_groups[0], [p], [gradient.clone()], [torch.zeros_like(gradient)])
    return momenta[0].clone()


@pytest.mark.parametrize("multiplier", [1.0, -0.5])
@pytest.mark.parametrize("lr", [0.01, 0.4])
def test_the_kick_is_the_flow_on_the_sphere(lr: float, multiplier: float) -> None:
    """dr = P(r)·(-κ·N·g·d/(d-1))·dt, by ten thousand steps of the midpoint rule."""
    generator = torch.Generator().manual_seed(0)
    gradient, r = (torch.randn(5, generator=generator).double() for _ in range(2))
    r *= math.sqrt(5 * TAU) / r.norm()
    force = -multiplier * NUM_DATA * gradient * 5 / 4

    def speed(at: Tensor) -> Tensor:
        return force - at * (at @ force) / (at @ at)

    place, steps = r.clone(), 10_000
    for _ in range(steps):
        place = place + lr / steps * speed(place + lr / steps / 2 * speed(place))
    found = kicked(gradient, r, lr, multiplier)
    assert found.norm().item() == pytest.approx(math.sqrt(5 * TAU), rel=1e-12)
    torch.testing.assert_close(found, place, rtol=1e-6, atol=1e-6)


def test_a_momentum_of_zeros_starts_against_the_gradient() -> None:
    gradient = torch.tensor([3.0, 0.0, -4.0])
    torch.testing.assert_close(kicked(gradient, torch.zeros(3), 0.1), -gradient / 5 * math.sqrt(3 * TAU))
    assert kicked(torch.zeros(3), torch.zeros(3), 0.1).tolist() == [0, 0, 0]
    huge = kicked(1e9 * gradient, gradient + torch.tensor([0.0, 0.01, 0.0]), 0.1)  # nearly against the momentum
    torch.testing.assert_close(huge, -gradient / 5 * math.sqrt(3 * TAU))


CURVATURE = torch.tensor([0.5, 1.0, 1.0, 2.0, 4.0])
CHAINS = 1000


def variances(make: Any, lr: float, time: float = 25.0, heat: Any = 0.0) -> tuple[Tensor, Tensor]:
    """Return the variances over the target's, and their standard errors over chains, on U = N/2·Σλθ²."""
    p = nn.Parameter(torch.randn(CHAINS, 5, generator=torch.Generator().manual_seed(1)) * (TAU / NUM_DATA) ** 0.5)
    with torch.no_grad():
        p /= CURVATURE.sqrt()
    rule = make([p], lr=lr, friction=1.0, num_data=NUM_DATA, num_chains=CHAINS, temperature=TAU, seed=2)
    own, noise = torch.zeros(CHAINS, 5), torch.Generator().manual_seed(3)
    for _ in range(round(time / lr)):
        p.grad = CURVATURE * p.detach()
        if torch.is_tensor(heat):
            p.grad += heat * torch.randn(p.shape, generator=noise)
        rule.step()
        own += p.detach().square()
    ratio = own / round(time / lr) * NUM_DATA * CURVATURE / TAU
    return ratio.mean(0), ratio.std(0) / CHAINS**0.5


def test_its_law_has_an_error_of_second_order() -> None:
    """The bias of the variances falls as h²: at h = 0.2 and 0.1 it is 4 times as large, within 4 standard errors."""
    (coarse, first), (fine, second) = (variances(MCLMC, lr) for lr in (0.2, 0.1))
    assert (coarse - 1)[-1] > 8 * first[-1]
    excess = (coarse - 1) - 4 * (fine - 1)
    tolerance = 4 * (first.square() + 16 * second.square()).sqrt() + 0.03  # 0.03: terms of fourth order
    assert (excess.abs() < tolerance).all(), (coarse, fine, tolerance)


@pytest.mark.slow
def test_isotropic_gradient_noise_does_not_heat_it() -> None:
    """Noise that doubles the variances of the same equation without the sphere leaves them within 5 %."""
    heat = torch.tensor(math.sqrt(2 * TAU / 0.05) / NUM_DATA)  # a heat of (h·N·σ)²/(2·γ·h·τ) = 1
    langevin, _ = variances(lambda *a, **o: UnderdampedLangevin(*a, integrator="baoab", **o), 0.05, heat=heat)
    ours, errors = variances(MCLMC, 0.05, heat=heat)
    assert (langevin > 1.8).all()
    assert ((ours - 1).abs() < 0.05 + 4 * errors).all(), (ours, errors)


def test_permuted_chains_permute_the_result() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient, momentum, noise = (torch.randn(3, 7, generator=generator) for _ in range(3))
    order, ends = [2, 0, 1], []
    for chosen in ([0, 1, 2], order):
        p, rule = made(torch.zeros(3, 7), num_chains=3)
        momenta = rule.momenta(rule.param_groups[0])
        assert momenta is not None
        momenta[0].copy_(momentum[chosen])
        with torch.no_grad():
            rule.update(rule.param_groups[0], [p], [gradient[chosen]], [noise[chosen].clone()])
        ends.append(p.detach())
    assert torch.equal(ends[0][order], ends[1])


def test_what_has_no_cold_limit_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"temperature 0.*WarmStart"):
        made(torch.zeros(3), temperature=0.0)
    with pytest.raises(ValueError, match="two coordinates"):
        made(torch.zeros(1))
    trainer = pl.Trainer(
        max_steps=40,
        callbacks=[WarmStart(steps=10), CyclicalSchedule(num_cycles=2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
    )
    with pytest.raises(ValueError, match=r"MCLMC makes no steps at temperature 0.*WarmStart"):
        trainer.fit(classifier(sampler=MCLMC, lr=0.01), DatasetDataModule(blobs(), batch_size=24))
    assert trainer.global_step == 0, "the plan refuses it, before the warm start"


def test_it_samples_after_a_warm_start() -> None:
    module = classifier(sampler=MCLMC, lr=0.01, num_chains=2)
    trainer = pl.Trainer(
        max_steps=60,
        callbacks=[WarmStart(steps=20), SamplingSchedule(burn_in_steps=10, every_n_steps=5)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
    )
    trainer.fit(module, DatasetDataModule(blobs(), batch_size=24))
    assert all(p.isfinite().all() for p in module.parameters())
    momenta = module.sampler.momenta(module.sampler.param_groups[0])
    total = sum(m.square().reshape(2, -1).sum(1) for m in momenta)
    count = sum(m.numel() for m in momenta) / 2
    torch.testing.assert_close(total, torch.full((2,), count))
