"""The leapfrog: reversible, volume-preserving, of second order; trajectories that turn."""

import math

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.reference.kernels import Phase, Segment, kinetic, leapfrog, subtree, turns
from tests.reference.densities import banana, gaussian

VARIANCE = torch.tensor([[0.5, 2.0], [1.0, 0.3], [3.0, 1.0]], dtype=torch.float64)


def phase(momentum: Tensor | None = None) -> Phase:
    generator = torch.Generator().manual_seed(0)
    place = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    own = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    return Phase(place, *banana(place), own if momentum is None else momentum)


def error_after(step: float, time: float = 1.0) -> Tensor:
    """Return the error of H at the end of trajectories of a given time."""
    start = at = phase()
    for _ in range(round(time / step)):
        at = leapfrog(banana, at, torch.full((3,), step), VARIANCE)
    ends = [p.energy + kinetic(p.momentum, VARIANCE) for p in (at, start)]
    return (ends[0] - ends[1]).abs()


def test_a_trajectory_can_be_reversed() -> None:
    start = at = phase()
    step = torch.tensor([0.1, 0.05, 0.02], dtype=torch.float64)
    for sign in (1, -1):
        for _ in range(20):
            at = leapfrog(banana, at, sign * step, VARIANCE)
        if sign == 1:
            assert not torch.allclose(at.place, start.place, atol=1e-2)
    torch.testing.assert_close(at.place, start.place, rtol=0, atol=1e-12)
    torch.testing.assert_close(at.momentum, start.momentum, rtol=0, atol=1e-12)


def test_the_error_of_the_energy_is_of_second_order() -> None:
    """Halving the step four times divides the error by 4 each time: slopes of its logarithm within 0.1 of 2."""
    steps = [0.02 / 2**k for k in range(4)]
    errors = torch.stack([error_after(step) for step in steps])
    slopes = (errors[:-1] / errors[1:]).log2()
    assert bool(((slopes - 2).abs() < 0.1).all()), slopes


def test_a_step_preserves_volume() -> None:
    def step(joined: Tensor) -> Tensor:
        place = joined[None, :2]
        energy, gradient = banana(place)
        after = leapfrog(banana, Phase(place, energy, gradient, joined[None, 2:]), torch.tensor([0.3]), VARIANCE[:1])
        return torch.cat([after.place[0], after.momentum[0]])

    jacobian = torch.autograd.functional.jacobian(step, torch.tensor([0.4, -0.3, 0.7, 0.2], dtype=torch.float64))
    assert isinstance(jacobian, Tensor)
    assert float(torch.linalg.det(jacobian)) == pytest.approx(1, abs=1e-12)


def test_a_harmonic_trajectory_turns_after_half_a_period() -> None:
    """On N(0, 1) a trajectory from its lowest point has turned after time π; its two halves have not."""
    one = torch.ones(1, 1, dtype=torch.float64)

    def segment(begin: float, end: float) -> Segment:
        times = torch.linspace(begin, end, 200, dtype=torch.float64)
        momenta = times.cos()
        return Segment(momenta[:1, None], momenta[-1:, None], momenta.sum()[None, None])

    assert not bool(turns(segment(0, 0.7), segment(0.71, 1.4), one))
    assert bool(turns(segment(0, 1.5), segment(1.51, 3.2), one))
    assert bool(turns(segment(0, 3.3), segment(3.31, 6.2), one))


def test_the_leaves_are_those_of_a_trajectory_and_are_chosen_by_their_weights() -> None:
    """Of a subtree of 4 leaves of 4000 equal chains each leaf is chosen as often as its weight says; the limit is 4.5
    standard deviations of a binomial: a false alarm in 4 of 10⁵ seeds."""
    count, step, scale = 4000, 1.3, torch.ones(1, dtype=torch.float64)
    start = torch.full((count, 1), 0.3, dtype=torch.float64)
    potential = gaussian(scale)
    begin = Phase(start, *potential(start), torch.full_like(start, 0.05))
    variance, steps = torch.ones_like(start), torch.full((count,), step, dtype=torch.float64)
    hamiltonian = begin.energy + kinetic(begin.momentum, variance)
    uniforms = torch.rand(count, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = subtree(potential, begin, steps, variance, hamiltonian, uniforms)
    at, places, weights = begin, [], []
    for _ in range(2):
        at = leapfrog(potential, at, steps, variance)
        places.append(float(at.place[0, 0]))
        weights.append(math.exp(-float(at.energy[0] + kinetic(at.momentum, variance)[0])))
    assert len(found.sound) == count
    torch.testing.assert_close(found.end.place, at.place)
    for place, weight in zip(places, weights, strict=True):
        share = weight / sum(weights)
        chosen = float(((found.sample.place[:, 0] - place).abs() < 1e-9).double().mean())
        assert abs(chosen - share) < 4.5 * math.sqrt(share * (1 - share) / count)
    expected = torch.tensor(weights, dtype=torch.float64).log().logsumexp(0) + hamiltonian[0]
    torch.testing.assert_close(found.log_weight, expected.expand(count))
