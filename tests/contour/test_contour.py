"""The contour's numerics against the formulas written out in plain Python, and against what must hold for any input."""

import math

import pytest
import torch

from lightning_sgmcmc.contour import (
    Contour,
    ContourRules,
    ContourState,
    DecayingStepSize,
    EnergyPartition,
    LearnedContour,
)
from lightning_sgmcmc.contour.partition import bin_index
from tests.support import contour_reference as reference

SCHEMES = ("scalable", "original", "high-order")


def make(**options):
    defaults = {"first_edge": -1.3, "width": 0.37, "num_bins": 9}
    partition = {name: options.pop(name, value) for name, value in defaults.items()}
    return Contour(EnergyPartition(**partition), ContourRules(**options))


def options_of(contour):
    return vars(contour.partition) | vars(contour.rules)


def random_state(generator, m, chains=None, unvisited=0.2):
    shape = (m,) if chains is None else (chains, m)
    log_vector = torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)
    visits = (torch.rand(shape, generator=generator) > unvisited).long() * 3
    return ContourState(log_vector, visits)


def random_energies(generator, contour, count):
    """Energies in and beyond the partition, some exactly on edges and one step of rounding beside them."""
    edges = contour.partition.edges()
    spread = torch.rand(count, generator=generator, dtype=torch.float64) * contour.partition.width * 14 - 2.5
    picked = edges[torch.randint(len(edges), (count,), generator=generator)]
    kind = torch.arange(count) % 4
    above, below = picked.nextafter(torch.tensor(math.inf)), picked.nextafter(torch.tensor(-math.inf))
    return torch.where(kind == 0, picked, torch.where(kind == 1, above, torch.where(kind == 2, below, spread)))


# -- the partition ----------------------------------------------------------------------------------------------------


def test_an_edge_belongs_to_the_bin_below_it():
    edges = EnergyPartition(0.1, 0.1, 12).edges()
    just_above, just_below = edges.nextafter(torch.tensor(math.inf)), edges.nextafter(torch.tensor(-math.inf))
    assert bin_index(edges, edges).tolist() == list(range(11))
    assert bin_index(just_below, edges).tolist() == list(range(11))
    assert bin_index(just_above, edges).tolist() == list(range(1, 12))
    far = torch.tensor([-1e300, -math.inf, 1e300, math.inf], dtype=torch.float64)
    assert bin_index(far, edges).tolist() == [0, 0, 11, 11]


def test_a_nan_energy_is_refused():
    contour = make()
    state = contour.initial_state(2)
    with pytest.raises(ValueError, match="NaN"):
        contour.locate(state, torch.tensor([0.0, math.nan]), 1.0, contour.partition.edges())


def test_the_range_is_learned_from_energies():
    energies = torch.linspace(100, 200, 1001)
    partition = EnergyPartition.from_energies(energies, num_bins=52, lowest=0.05, headroom=1.0)
    assert partition.first_edge == pytest.approx(105)
    assert partition.last_edge == pytest.approx(105 + 2 * 95)
    assert EnergyPartition.from_energies(energies, 52, width=3.0).width == 3.0
    for bad in (torch.full((5,), 7.0), torch.tensor([1.0, math.nan]), torch.empty(0)):
        with pytest.raises(ValueError, match="warm-up"):
            EnergyPartition.from_energies(bad, 10)


# -- against plain Python ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("difference", ["backward", "forward"])
@pytest.mark.parametrize("weighting", ["interpolated", "bin"])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("limits", [(None, None), (-2.0, 3.0)])
def test_index_multiplier_and_density_are_those_of_the_formulas(difference, weighting, flat, limits):
    generator = torch.Generator().manual_seed(1)
    contour = make(
        zeta=0.9,
        difference=difference,
        weighting=weighting,
        flat_last_bin=flat,
        min_multiplier=limits[0],
        max_multiplier=limits[1],
    )
    options, chains, temperature = options_of(contour), 200, 0.7
    for shared in (True, False):
        state = random_state(generator, contour.partition.num_bins, None if shared else chains)
        energy = random_energies(generator, contour, chains)
        location = contour.locate(state, energy, temperature, contour.partition.edges())
        for c in range(chains):
            row = (lambda t: t) if shared else (lambda t: t[c])  # noqa: B023
            pi, visits = row(state.log_vector).exp().tolist(), row(state.visits).tolist()
            index, multiplier, density = reference.locate(pi, visits, energy[c].item(), temperature, options)
            assert location.index[c].item() == index
            assert location.multiplier[c].item() == pytest.approx(multiplier, rel=1e-12, abs=1e-12)
            assert location.log_density[c].item() == pytest.approx(density, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shared", [True, False])
def test_updates_are_those_of_the_formulas(scheme, shared):
    generator = torch.Generator().manual_seed(2)
    contour = make(zeta=0.8, scheme=scheme, correction=0.6)
    options, chains, m = options_of(contour), 5, contour.partition.num_bins
    state = random_state(generator, m, None if shared else chains, unvisited=0)
    pis = [state.log_vector.exp().tolist()] if shared else state.log_vector.exp().tolist()
    visits = state.visits.clone()
    for step in range(1, 200):
        energy = random_energies(generator, contour, chains)
        location = contour.locate(state, energy, 1.0, contour.partition.edges())
        step_size = DecayingStepSize(3, 0.7, 4).at(step)
        contour.learn_(state, location.index, location.log_density, step_size)
        places = []
        for c in range(chains):
            pi = pis[0 if shared else c]
            places.append(reference.locate(pi, [1] * m, energy[c].item(), 1.0, options))
        bins, densities = [p[0] for p in places], [p[2] for p in places]
        if shared:
            pis = [reference.learn(pis[0], bins, densities, step_size, options)]
        else:
            pis = [reference.learn(pis[c], [bins[c]], [densities[c]], step_size, options) for c in range(chains)]
        for c, j in enumerate(bins):
            visits[(j,) if shared else (c, j)] += 1
    expected = torch.tensor(pis[0] if shared else pis, dtype=torch.float64)
    torch.testing.assert_close(state.log_vector.exp(), expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(state.log_vector.exp().sum(-1), expected.sum(-1), rtol=0, atol=1e-12)
    assert torch.equal(state.visits, visits)


# -- what must hold ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_chains_with_a_vector_each_do_not_notice_each_other(scheme):
    generator = torch.Generator().manual_seed(3)
    contour = make(scheme=scheme)
    state = random_state(generator, 9, 6)
    energy = random_energies(generator, contour, 6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = ContourState(state.log_vector[order], state.visits[order])
    for current, energies in ((state, energy), (permuted, energy[order])):
        place = contour.locate(current, energies, 1.0, contour.partition.edges())
        contour.learn_(current, place.index, place.log_density, 0.1)
    assert torch.equal(permuted.log_vector, state.log_vector[order])
    assert torch.equal(permuted.visits, state.visits[order])


def test_one_chain_learns_the_same_whether_its_vector_is_shared_or_not():
    generator = torch.Generator().manual_seed(4)
    contour = make()
    own = contour.initial_state(1)
    shared = contour.initial_state()
    for step in range(1, 100):
        energy = random_energies(generator, contour, 4)[step % 4][None]
        for state in (own, shared):
            place = contour.locate(state, energy, 1.0, contour.partition.edges())
            contour.learn_(state, place.index, place.log_density, 1 / (step + 1))
    assert torch.equal(own.log_vector[0], shared.log_vector)


@pytest.mark.parametrize("zeta", [1e3, 3e6])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("weighting", ["interpolated", "bin"])
def test_nothing_overflows_at_large_zeta(zeta, scheme, weighting):
    generator = torch.Generator().manual_seed(5)
    contour = make(zeta=zeta, scheme=scheme, weighting=weighting, first_edge=0.0, width=200.0, num_bins=200)
    state = contour.initial_state(3)
    edges = contour.partition.edges()
    for step in range(1, 500):
        energy = 20_000 + 3000 * torch.randn(3, generator=generator, dtype=torch.float64)
        place = contour.locate(state, energy, 3e-4, edges)
        contour.learn_(state, place.index, place.log_density, 0.003)
        assert place.multiplier.isfinite().all()
        assert contour.log_weight(place.log_density).isfinite().all()
        assert step < 499 or state.log_vector.isfinite().all()
    torch.testing.assert_close(state.log_vector.logsumexp(-1), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-9)
    masses = contour.log_masses(state)
    assert masses.exp().sum(-1).tolist() == pytest.approx([1, 1, 1])
    assert (masses[state.visits == 0] == -math.inf).all()


def test_never_visited_bins_do_not_push():
    contour = make(scheme="original")
    state = contour.initial_state(1)
    edges = contour.partition.edges()
    inside = edges[3:4] - 0.1
    for _ in range(5000):
        place = contour.locate(state, inside, 1.0, edges)
        contour.learn_(state, place.index, place.log_density, 0.1)
        assert place.multiplier.item() == 1
    beside = contour.locate(state, inside + contour.partition.width, 1.0, edges)
    assert beside.multiplier.item() == 1


def test_without_zeta_nothing_is_flattened_or_weighed():
    generator = torch.Generator().manual_seed(6)
    contour = make(zeta=0.0)
    energies = random_energies(generator, contour, 7)
    place = contour.locate(random_state(generator, 9, 7), energies, 1.0, edges_of(contour))
    assert place.multiplier.tolist() == [1.0] * 7
    assert contour.log_weight(place.log_density).tolist() == [0.0] * 7


def edges_of(contour):
    return contour.partition.edges()


@pytest.mark.parametrize("difference", ["backward", "forward"])
@pytest.mark.parametrize("flat", [True, False])
def test_the_multiplier_is_the_derivative_of_the_weight(difference, flat):
    """κ = 1 + ζ·τ·d log Ψ/du everywhere inside the bins, and Ψ is continuous across all edges."""
    generator = torch.Generator().manual_seed(7)
    contour = make(zeta=1.3, difference=difference, flat_last_bin=flat)
    state = random_state(generator, 9, unvisited=0)
    edges = contour.partition.edges()
    inside = torch.cat([edges - 0.2, edges[-1:] + torch.tensor([0.3, 5.0])]).requires_grad_()
    place = contour.locate(state, inside, 0.6, edges)
    if place.log_density.requires_grad:
        (slope,) = torch.autograd.grad(place.log_density.sum(), inside)
    torch.testing.assert_close(place.multiplier.detach(), 1 + 1.3 * 0.6 * slope)
    below, above = edges - 1e-9, edges + 1e-9
    left = contour.locate(state, below, 1.0, edges).log_density
    right = contour.locate(state, above, 1.0, edges).log_density
    torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scheme", ["scalable", "original"])
@pytest.mark.parametrize("weighting", ["interpolated", "bin"])
def test_learning_stands_still_at_the_known_masses(scheme, weighting):
    """The mean field of the update is zero at the limit that `known_state` gives, for the law that is flattened there.

    The energies are exponential, p(u) ∝ exp(-u), so integrals over bins are sums over a fine grid.
    """
    contour = make(zeta=0.75, scheme=scheme, weighting=weighting, first_edge=0.2, width=0.2, num_bins=30)
    edges = contour.partition.edges()
    u = (torch.arange(400_000, dtype=torch.float64) + 0.5) * 2e-5
    target = torch.exp(-u)
    masses = torch.zeros(30, dtype=torch.float64).index_add_(0, bin_index(u, edges), target)
    state = contour.known_state(masses / masses.sum())
    place = contour.locate(state, u, 1.0, edges)
    flattened = target * torch.exp(-contour.rules.zeta * place.log_density)
    flattened /= flattened.sum()
    pi = state.log_vector.exp()
    if scheme == "scalable":
        here = state.log_vector[place.index]
        factor = (here + contour.rules.zeta * (place.log_density - here)).exp()
    else:
        factor = (contour.rules.zeta * place.log_density).exp()
    arriving = torch.zeros_like(pi).index_add_(0, place.index, flattened * factor)
    drift = arriving - pi * (flattened * factor).sum()
    assert drift.abs().max() < 1e-12 * arriving.max() + 1e-15


def test_learned_contours_survive_as_bytes():
    generator = torch.Generator().manual_seed(8)
    contour = make(zeta=2.5, scheme="high-order", min_multiplier=-5.0, weight_exponent=0.5)
    learned = LearnedContour(contour, random_state(generator, 9))
    again = LearnedContour.from_bytes(learned.to_bytes())
    assert again.contour == contour
    energies = random_energies(generator, contour, 20)
    assert torch.equal(again.log_weights(energies), learned.log_weights(energies))
    for damaged in (b"", b"nonsense", learned.to_bytes()[:-9]):
        with pytest.raises(ValueError, match="damaged"):
            LearnedContour.from_bytes(damaged)


def test_weights_of_chains_with_vectors_of_their_own():
    generator = torch.Generator().manual_seed(9)
    contour = make()
    state = random_state(generator, 9, 3)
    energies = random_energies(generator, contour, 4)
    chains = torch.tensor([2, 0, 2, 1])
    weights = LearnedContour(contour, state).log_weights(energies, chains)
    for s, c in enumerate(chains.tolist()):
        own = LearnedContour(contour, ContourState(state.log_vector[c], state.visits[c]))
        assert own.log_weights(energies[s : s + 1]).item() == weights[s].item()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_bins": 1}, "num_bins"),
        ({"width": 0.0}, "width"),
        ({"width": math.inf}, "width"),
        ({"first_edge": math.nan}, "first_edge"),
        ({"zeta": -1.0}, "zeta"),
        ({"zeta": math.inf}, "zeta"),
        ({"scheme": "orignal"}, "scheme"),
        ({"difference": "central"}, "difference"),
        ({"weighting": "none"}, "weighting"),
        ({"min_multiplier": 2.0}, "min_multiplier"),
        ({"max_multiplier": 0.5}, "max_multiplier"),
        ({"weight_exponent": 1.5}, "weight_exponent"),
        ({"floor": 0.2}, "floor"),
        ({"correction": -1.0}, "correction"),
    ],
)
def test_bad_rules_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        make(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"numerator": 0}, "numerator"),
        ({"exponent": 1.5}, "exponent"),
        ({"offset": -1}, "offset"),
        ({"maximum": 2}, "maximum"),
    ],
)
def test_bad_step_sizes_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        DecayingStepSize(**options)


def test_step_sizes_of_the_papers():
    assert DecayingStepSize(1, 0.6, 100).at(1) == 1 / 101
    assert DecayingStepSize(10, 0.8, 100, 0.003).at(1000) == 0.003
    assert DecayingStepSize(10, 0.8, 100, 0.003).at(10**6) == pytest.approx(10 / (10**4.8 + 100))
    assert DecayingStepSize(0.003, 0, 0).at(77) == 0.003


@pytest.mark.parametrize("chains", [None, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("floor", [0.0, 1e-3])
def test_learning_densely_is_learning(scheme, chains, floor):
    """The form for compilers, without scatters, moves π and counts visits as the other; several chains share a bin."""
    generator = torch.Generator().manual_seed(3)
    contour = make(scheme=scheme, zeta=0.75, floor=floor)
    for _ in range(20):
        one = random_state(generator, 9, chains, unvisited=0.0)
        other = ContourState(*(tensor.clone() for tensor in one))
        index = torch.randint(9, (5,), generator=generator)
        log_density = torch.randn(5, generator=generator, dtype=torch.float64)
        contour.learn_(one, index, log_density, 0.1)
        contour.learn_densely_(other, index, log_density, torch.tensor(0.1, dtype=torch.float64))
        torch.testing.assert_close(one.log_vector, other.log_vector, rtol=1e-12, atol=1e-12)
        assert torch.equal(one.visits, other.visits)


def test_known_bins_are_not_searched():
    generator = torch.Generator().manual_seed(4)
    contour = make(zeta=0.75)
    state, edges = random_state(generator, 9), contour.partition.edges()
    energies = random_energies(generator, contour, 40)
    expected = contour.locate(state, energies, 1.0, edges)
    found = contour.locate(state, energies, 1.0, edges, expected.index)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.equal(found.log_weight, contour.log_weight(found.log_density))
