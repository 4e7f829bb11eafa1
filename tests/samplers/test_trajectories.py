"""Trajectories of GGMC and AMAGOLD: their steps, their reverse, and the exact law that the Metropolis test gives.

The statistical tests compare means over independent chains with exact numbers. Each is at most 4.5 standard errors off
(false alarm 7e-6 for one number, 30 numbers in all: 2e-4); seeds are fixed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

from lightning_sgmcmc.samplers import AMAGOLD, GGMC, UnderdampedLangevin
from lightning_sgmcmc.samplers.reversible import ReversibleLangevin, Trajectory, log_acceptance
from lightning_sgmcmc.samplers.rows import FlatParameters

BOTH = [AMAGOLD, GGMC]
LARGEST_Z = 4.5
Force = Callable[[Tensor, int], Tensor]
Energy = Callable[[Tensor], Tensor]


def started(cls: Any, places: Tensor, **options: Any) -> tuple[nn.Parameter, Any]:
    """Return chains at places, shape (C, d), and their sampler; N is 1, so gradients are those of U."""
    parameter = nn.Parameter(places.clone())
    chains = len(places) if places.dim() > 1 else 1
    sampler = cls([parameter], **({"num_data": 1, "num_chains": chains, "seed": 3} | options))
    sampler.draw_momenta()
    return parameter, sampler


def travel(
    parameter: nn.Parameter, sampler: ReversibleLangevin, trajectory: Trajectory, force: Force, steps: int
) -> Tensor:
    """Make the steps of a trajectory without its test; return W."""
    for position in range(steps):
        trajectory.set_place(position, steps)
        parameter.grad = force(parameter.detach(), position)
        sampler.step()
    assert sampler.work is not None
    return sampler.work


def sampled(
    cls: Any,
    places: Tensor,
    force: Force,
    energy: Energy,
    steps: int,
    count: int,
    adjusted: bool = True,
    **options: Any,
) -> tuple[Tensor, float]:
    """Return the ends of `count` trajectories, shape (count, C, d), and the mean acceptance probability."""
    parameter, sampler = started(cls, places, **options)
    trajectory, generator, noise = Trajectory(sampler), torch.Generator().manual_seed(11), sampler._noise
    noise._fill = lambda: noise._buffer.normal_(generator=generator)  # one call for all chains is 30 times faster
    ends, accepted = [], 0.0
    for _ in range(count):
        trajectory.begin(energy(parameter.detach()))
        travel(parameter, sampler, trajectory, force, steps)
        chances = torch.rand(len(places), generator=generator, dtype=torch.float64).log()
        found = trajectory.end(energy(parameter.detach()), chances if adjusted else torch.full_like(chances, -math.inf))
        accepted += float(found.clamp(max=0).exp().mean()) / count
        ends.append(parameter.detach().clone())
    return torch.stack(ends), accepted


def off(values: Tensor, truth: float) -> float:
    """Return how many standard errors the mean over draws and chains, shape (count, C), is off the truth."""
    of_chains = values.double().mean(0)
    return float((of_chains.mean() - truth).abs() / (of_chains.std() / math.sqrt(len(of_chains))))


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", BOTH)
def test_without_a_trajectory_they_are_obabo(cls: Any) -> None:
    runs = []
    for make in (cls, functools.partial(UnderdampedLangevin, integrator="obabo")):
        parameter, sampler = started(make, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), lr=0.1)
        for _ in range(5):
            parameter.grad = parameter.detach().clone()
            sampler.step()
        runs.append(parameter.detach())
    assert torch.equal(*runs)


def test_amagold_is_the_published_update() -> None:
    """r' = ((1-hβ)·r - h·∇U + N(0, 4hβτ))/(1+hβ), with γ = 2·artanh(hβ)/h."""
    h, beta, temperature = 0.2, 1.5, 0.7
    parameter, sampler = started(
        AMAGOLD, torch.zeros(1), lr=h, friction=2 * math.atanh(h * beta) / h, temperature=temperature
    )
    sampler.state[parameter]["momentum_buffer"] = torch.tensor([0.4])
    with torch.no_grad():
        sampler.update(sampler.param_groups[0], [parameter], [torch.tensor([0.9])], [torch.tensor([-1.3])])
    noise = -1.3 * math.sqrt(4 * h * beta * temperature)
    published = ((1 - h * beta) * 0.4 - h * 0.9 + noise) / (1 + h * beta)
    assert float(sampler.state[parameter]["momentum_buffer"]) == pytest.approx(published, rel=1e-6)


def record(cls: Any, steps: int, h: float, friction: float) -> tuple[list[dict[str, Tensor]], Tensor, Tensor, Tensor]:
    """Return a trajectory's steps (momenta before and after, gradient), its start, its end and W, in float64."""
    generator = torch.Generator().manual_seed(4)
    draws = functools.partial(torch.randn, 2, 3, generator=generator, dtype=torch.float64)
    parameter, sampler = started(cls, draws(), lr=h, friction=friction)
    trajectory, path = Trajectory(sampler), []
    start = torch.cat([parameter.detach().clone(), sampler.momenta(sampler.param_groups[0])[0].clone()], 1)
    trajectory.begin(torch.zeros(2, dtype=torch.float64))
    for position in range(steps):
        trajectory.set_place(position, steps)
        before = sampler.state[parameter]["momentum_buffer"].clone()
        gradient = parameter.detach() ** 3 + draws()  # a noisy force
        with torch.no_grad():
            sampler.update(sampler.param_groups[0], [parameter], [gradient], [draws()])
        path.append({"r": before, "then": sampler.state[parameter]["momentum_buffer"].clone(), "g": gradient})
    return path, start, torch.cat([parameter.detach(), path[-1]["then"]], 1), sampler.work


@pytest.mark.parametrize("steps", [2, 3, 6])
@pytest.mark.parametrize("cls", BOTH)
def test_the_work_is_the_loss_of_kinetic_energy_in_the_kicks(cls: Any, steps: int) -> None:
    """O exchanges heat and A nothing, so both are left out."""
    h, friction = 0.3, 0.8
    path, _, _, work = record(cls, steps, h, friction)
    loss = torch.zeros(2, dtype=torch.float64)

    def kick(before: Tensor, gradient: Tensor) -> Tensor:
        return (before.square() - (before - h / 2 * gradient).square()).sum(1) / 2

    for position, step in enumerate(path):
        first, last = cls is GGMC and position == 0, cls is GGMC and position == steps - 1
        if not last:  # the kick that ends at `then`
            loss += kick(step["then"] + h / 2 * step["g"], step["g"])
        if not first:
            loss += kick(step["r"], step["g"])
    torch.testing.assert_close(work, loss, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [2, 3, 6])
@pytest.mark.parametrize("cls", BOTH)
def test_a_trajectory_backwards_ends_where_it_began_with_the_opposite_work(cls: Any, steps: int) -> None:
    """With its gradients in the opposite order, and the noise that undoes that of each O."""
    h, friction = 0.3, 0.8
    path, start, end, work = record(cls, steps, h, friction)
    parameter, sampler = started(cls, end[:, :3], lr=h, friction=friction)
    sampler.state[parameter]["momentum_buffer"].copy_(-end[:, 3:])
    trajectory = Trajectory(sampler)
    trajectory.begin(torch.zeros(2, dtype=torch.float64))
    for position, step in enumerate(reversed(path)):
        place, kick = steps - 1 - position, h / 2 * step["g"]
        edge = cls is GGMC and place in (0, steps - 1)
        c = math.exp(-friction * h * (0.5 if edge else 1.0))
        before = step["r"] if edge and place == 0 else step["r"] - kick
        after = step["then"] if edge and place == steps - 1 else step["then"] + kick
        trajectory.set_place(position, steps)
        with torch.no_grad():
            noise = (c * after - before) / math.sqrt(1 - c * c)
            sampler.update(sampler.param_groups[0], [parameter], [step["g"]], [noise])
    torch.testing.assert_close(parameter.detach(), start[:, :3], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(sampler.state[parameter]["momentum_buffer"], -start[:, 3:], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(sampler.work, -work, rtol=1e-11, atol=1e-11)
    assert float(work.abs().min()) > 0.1


# -- the test's outcome -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("cls", BOTH)
def test_a_rejected_chain_returns_bit_for_bit(cls: Any, chains: int) -> None:
    """Position and momentum, the momentum reversed; an accepted chain stays, and a NaN is a rejection."""
    places = torch.randn(chains, 4, generator=torch.Generator().manual_seed(0))
    parameter, sampler = started(cls, places if chains > 1 else places[0], lr=0.1, num_chains=chains)
    trajectory = Trajectory(sampler)
    momentum = sampler.momenta(sampler.param_groups[0])[0].clone()
    start = parameter.detach().clone()
    energy = torch.arange(chains, dtype=torch.float64)
    trajectory.begin(energy)
    travel(parameter, sampler, trajectory, lambda place, _: place, 3)
    end, last = parameter.detach().clone(), sampler.momenta(sampler.param_groups[0])[0].clone()
    chances = torch.tensor([math.inf, -math.inf, -1.0], dtype=torch.float64)[:chains]
    found = trajectory.end(energy + torch.tensor([1.0, 1.0, math.nan])[:chains], chances)
    assert sampler.work is None
    assert found.isnan().tolist() == [False, False, True][:chains]
    now, own = (t.view(chains, 4) for t in (parameter.detach(), sampler.momenta(sampler.param_groups[0])[0]))
    for chain in range(chains):
        stays = chain == 1
        assert torch.equal(now[chain], (end if stays else start).view(chains, 4)[chain])
        assert torch.equal(own[chain], (last if stays else -momentum).view(chains, 4)[chain])
        assert trajectory.energy[chain] == energy[chain] + float(stays)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("cls", BOTH)
def test_chains_do_not_depend_on_one_another(cls: Any, flat: bool) -> None:
    """Each of three stacked chains, by its own tensors or in rows, is the chain alone, bit for bit, in any order."""
    places = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))

    def run(chains: list[int], first: int) -> tuple[Tensor, Tensor]:
        own = places[chains] if len(chains) > 1 else places[chains[0]]
        parameter = nn.Parameter(own.clone())
        sampler = cls([parameter], lr=0.2, num_data=1, num_chains=len(chains), first_chain=first, seed=3)
        if flat:
            sampler.flat = FlatParameters([[parameter]], len(chains))
        trajectory, found = Trajectory(sampler), []
        for _ in range(3):
            trajectory.begin(parameter.detach().double().view(len(chains), -1).square().sum(1))
            for position in range(3):
                trajectory.set_place(position, 3)
                if sampler.flat is not None:
                    sampler.flat.attach_gradients()
                    parameter.grad.copy_(parameter.detach().sin())
                else:
                    parameter.grad = parameter.detach().sin()
                sampler.step()
            energy = parameter.detach().double().view(len(chains), -1).square().sum(1)
            found.append(trajectory.end(energy, torch.full((len(chains),), -0.2, dtype=torch.float64)))
        return parameter.detach().view(len(chains), -1), torch.stack(found, 1)

    stacked = run([0, 1, 2], 0)
    for chain in range(3):
        alone = run([chain], chain)
        assert torch.equal(alone[0][0], stacked[0][chain])
        assert torch.equal(alone[1][0], stacked[1][chain])


def test_log_acceptance_is_relative_to_the_temperature() -> None:
    numbers = [torch.tensor([value], dtype=torch.float64) for value in (5.0, 3.0, 1.0)]
    assert float(log_acceptance(*numbers, temperature=0.5)) == 6.0


# -- exact laws -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("cls", BOTH)
def test_full_gradients_have_the_exact_law_of_a_gaussian_at_a_large_step(cls: Any, temperature: float) -> None:
    """U = θ²/2 at h = 1.3, where OBABO's variance is 1/(1 - h²/4) = 1.73 times τ without the test."""
    options = {"lr": 1.3, "friction": 0.7, "temperature": temperature}
    places = torch.randn(1000, 1, generator=torch.Generator().manual_seed(0)) * math.sqrt(temperature)

    def energy(place: Tensor) -> Tensor:
        return place.double().square().sum(1) / 2

    force: Force = lambda place, _: place  # noqa: E731
    draws, accepted = sampled(cls, places, force, energy, 4, 120, **options)
    own = draws[20:, :, 0]
    assert 0.3 < accepted < 0.99
    assert off(own, 0.0) < LARGEST_Z
    assert off(own.square(), temperature) < LARGEST_Z
    assert off(own**4, 3 * temperature**2) < LARGEST_Z
    if cls is GGMC:
        draws, _ = sampled(cls, places, force, energy, 4, 120, adjusted=False, **options)
        own = draws[20:, :, 0].square()
        assert off(own, temperature / (1 - 1.3**2 / 4)) < LARGEST_Z
        assert off(own, temperature) > 2 * LARGEST_Z


def quartic_moments() -> tuple[float, float]:
    mass, *moments = (integrate.quad(lambda x, k=power: x**k * math.exp(-(x**4) / 4), -8, 8)[0] for power in (0, 2, 4))
    return moments[0] / mass, moments[1] / mass


@pytest.mark.parametrize("cls", BOTH)
def test_full_gradients_have_the_exact_law_of_a_quartic(cls: Any) -> None:
    """U = θ⁴/4 at a step at which the unadjusted trajectories are visibly off; moments by quadrature."""
    second, fourth = quartic_moments()

    def energy(place: Tensor) -> Tensor:
        return place.double().pow(4).sum(1) / 4

    force: Force = lambda place, _: place**3  # noqa: E731
    for adjusted in (True, False):
        draws, accepted = sampled(cls, torch.zeros(1000, 1), force, energy, 3, 120, adjusted, lr=0.4, friction=1.0)
        own = draws[20:, :, 0]
        assert 0.9 < accepted < 0.99
        deviations = [off(own.square(), second), off(own**4, fourth)]
        assert max(deviations) < LARGEST_Z if adjusted else max(deviations) > 2 * LARGEST_Z


class Regression:
    """Conjugate linear regression of 12 data and 2 weights, in 4 batches of 3 for each chain."""

    def __init__(self, chains: int) -> None:
        rng = np.random.default_rng(1)
        self.x = rng.normal(size=(12, 2))
        self.y = self.x @ np.array([1.0, -0.5]) + rng.normal(size=12)
        precision = self.x.T @ self.x + np.eye(2)
        self.covariance = np.linalg.inv(precision)
        self.mean = self.covariance @ self.x.T @ self.y
        self._x, self._y = torch.tensor(self.x), torch.tensor(self.y)
        self._generator = torch.Generator().manual_seed(2)
        self._chains = chains
        self._order = torch.empty(0)

    def energy(self, place: Tensor) -> Tensor:
        residual = self._y - place.double() @ self._x.T
        return (residual.square().sum(1) + place.double().square().sum(1)) / 2

    def force(self, place: Tensor, position: int) -> Tensor:
        """∇Ũ with a new random order of the data for each trajectory of 4 steps and each chain."""
        if position == 0:
            self._order = torch.rand(self._chains, 12, generator=self._generator).argsort(1)
        batch = self._order[:, 3 * position : 3 * position + 3]
        x, y = self._x[batch], self._y[batch]
        residual = (x @ place.double()[:, :, None])[:, :, 0] - y
        return ((x * residual[:, :, None]).sum(1) * 4 + place.double()).to(place.dtype)


@pytest.mark.parametrize("cls", BOTH)
def test_mini_batch_gradients_have_the_exact_law(cls: Any) -> None:
    """Mean and second moments of conjugate regression; unadjusted, the same steps are 40 percent too hot."""
    chains = 500
    for adjusted in (True, False):
        problem = Regression(chains)
        places = torch.tensor(problem.mean).expand(chains, 2).float()
        draws, accepted = sampled(cls, places, problem.force, problem.energy, 4, 110, adjusted, lr=0.16, friction=1.5)
        centred = draws[30:].double() - torch.tensor(problem.mean)
        squares = [
            off(centred[:, :, i] * centred[:, :, j], problem.covariance[i, j]) for i, j in ((0, 0), (0, 1), (1, 1))
        ]
        assert 0.3 < accepted < 0.7
        if adjusted:
            assert max(*squares, off(centred[:, :, 0], 0.0), off(centred[:, :, 1], 0.0)) < LARGEST_Z
        else:
            assert max(squares) > 2 * LARGEST_Z


# -- orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", BOTH)
def test_log_acceptance_vanishes_with_the_step_size(cls: Any) -> None:
    """Over one unit of time its standard deviation is of order h² with full gradients, so acceptance tends to 1."""
    generator = torch.Generator().manual_seed(0)
    spreads = []
    for steps in (10, 20, 40):
        places = torch.randn(300, 3, generator=generator, dtype=torch.float64)
        moves = steps if cls is AMAGOLD else steps - 1
        parameter, sampler = started(cls, places, lr=1 / moves, friction=0.5)
        trajectory = Trajectory(sampler)

        def energy() -> Tensor:
            place = parameter.detach()  # noqa: B023
            return (place.square() / 2 + place**4 / 4).sum(1)

        trajectory.begin(energy())
        travel(parameter, sampler, trajectory, lambda place, _: place + place**3, steps)
        found = trajectory.end(energy(), torch.full((300,), -math.inf, dtype=torch.float64))
        spreads.append(float(found.std()))
    slope = math.log(spreads[0] / spreads[2]) / math.log(4)
    assert 1.8 < slope < 2.3, (spreads, slope)
    assert spreads[2] < 0.02


def test_mini_batch_noise_lowers_the_mean_log_acceptance_as_stated() -> None:
    """By K·h²·tr C/(2τ) for independent noise of covariance C and little friction, without any force of U."""
    h, steps, temperature, chains = 0.05, 8, 0.6, 400
    generator = torch.Generator().manual_seed(5)
    parameter, sampler = started(AMAGOLD, torch.zeros(chains, 6), lr=h, friction=1e-3, temperature=temperature)
    found = []
    for _ in range(40):
        sampler.draw_momenta()
        trajectory = Trajectory(sampler)
        trajectory.begin(torch.zeros(chains, dtype=torch.float64))
        noise = torch.randn(steps, chains, 6, generator=generator) * 3.0
        work = travel(parameter, sampler, trajectory, lambda place, position: noise[position], steps)  # noqa: B023
        found.append(work / temperature)
        trajectory.leave()
    assert off(torch.stack(found), -steps * h**2 * 6 * 9.0 / (2 * temperature)) < LARGEST_Z
