"""The running averages against direct float64 sums over all members."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.chains.execution import evaluation_mode
from lightning_sgmcmc.evaluation.averages import CycleAverage, WeightedAverage
from lightning_sgmcmc.evaluation.scoring import concatenate

DATA = 12


@dataclass
class Member:
    terms: dict[str, Tensor]
    log_density: Tensor
    log_weight: float
    chain: int = 0
    cycle: int = 0
    log_likelihood: float = 0.0


def members(count: int, log_weights: Sequence[float], seed: int = 0) -> list[Member]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Member(
            {
                "p": torch.rand(DATA, 3, generator=generator, dtype=torch.float64),
                "f": torch.randn(DATA, generator=generator, dtype=torch.float64),
            },
            3 * torch.randn(DATA, generator=generator, dtype=torch.float64) - 2,
            float(log_weights[index]),
        )
        for index in range(count)
    ]


def averaged(items: Sequence[Member]) -> WeightedAverage:
    average = WeightedAverage()
    for item in items:
        average.add(item.terms, item.log_density, item.log_weight)
    return average


def direct(items: Sequence[Member], weights: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the weighted means, with weights that sum to 1."""
    terms = {
        name: torch.einsum("j,j...->...", weights, torch.stack([item.terms[name] for item in items]))
        for name in items[0].terms
    }
    densities = torch.stack([item.log_density for item in items])
    return terms, torch.logsumexp(densities + weights.log()[:, None], 0)


def assert_is(average: WeightedAverage, expected: tuple[dict[str, Tensor], Tensor], tolerance: float = 1e-10) -> None:
    terms, log_density = expected
    assert set(average.terms) == set(terms)
    for name, term in terms.items():
        torch.testing.assert_close(average.terms[name], term, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(average.log_density, log_density, rtol=tolerance, atol=tolerance)


def normalised(log_weights: Sequence[float]) -> Tensor:
    return torch.tensor(log_weights, dtype=torch.float64).softmax(0)


LOG_WEIGHTS = {
    "equal": [0.0] * 8,
    "random": [0.3, -1.2, 2.0, 0.0, -0.4, 1.1, 0.9, -3.0],
    "offset": [1e6 + w for w in (0.3, -1.2, 2.0, 0.0, -0.4, 1.1, 0.9, -3.0)],
    "negative offset": [-1e6 + w for w in (0.3, -1.2, 2.0, 0.0, -0.4, 1.1, 0.9, -3.0)],
    "both ends": [-1e6, 1e6, 0.0, 1e6 - 1, -1e6, 1e6 + 0.5, 3.0, 1e6],
    "rising": [-1e6, -1e3, 0.0, 1e2, 1e4, 5e5, 1e6, 1e6 + 1],
}


@pytest.mark.parametrize("name", LOG_WEIGHTS)
def test_weighted_average_is_the_weighted_mean(name: str) -> None:
    log_weights = LOG_WEIGHTS[name]
    items = members(8, log_weights)
    for count in range(1, 9):  # after every member, not only at the end
        expected = direct(items[:count], normalised(log_weights[:count]))
        assert_is(averaged(items[:count]), expected, 1e-9)


@pytest.mark.parametrize("name", LOG_WEIGHTS)
def test_the_order_does_not_matter(name: str) -> None:
    items = members(8, LOG_WEIGHTS[name])
    forwards, backwards = averaged(items), averaged(items[::-1])
    assert_is(backwards, (forwards.terms, forwards.log_density), 1e-9)
    assert backwards.log_total == pytest.approx(forwards.log_total, rel=1e-15)


def test_log_total_is_the_log_of_the_sum() -> None:
    items = members(8, LOG_WEIGHTS["random"])
    expected = torch.tensor(LOG_WEIGHTS["random"], dtype=torch.float64).logsumexp(0).item()
    assert averaged(items).log_total == pytest.approx(expected, rel=1e-14)


def test_a_thousand_float32_members_stay_near_float64() -> None:
    """Rounding of the running mean, 1e-7 a member at worst, must not pile up."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(1000, DATA, generator=generator)
    average = WeightedAverage()
    for value in values:
        average.add({"p": value}, value.log(), 0.0)
    torch.testing.assert_close(average.terms["p"].double(), values.double().mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(average.log_density, values.log().double().exp().mean(0).log(), rtol=1e-6, atol=1e-7)
    assert average.log_density.dtype == torch.float64


@pytest.mark.parametrize("place", [0, 3, 7])
def test_weight_zero_does_not_count(place: int) -> None:
    log_weights = list(LOG_WEIGHTS["random"])
    log_weights[place] = -math.inf
    items = members(8, log_weights)
    items[place].terms["p"].fill_(math.nan)
    rest = [item for index, item in enumerate(items) if index != place]
    assert_is(averaged(items), direct(rest, normalised([item.log_weight for item in rest])))


def test_impossible_data_have_density_zero() -> None:
    items = members(2, [0.0, 0.0])
    items[0].log_density[0] = items[1].log_density[0] = -math.inf
    items[0].log_density[1] = -math.inf
    found = averaged(items).log_density
    assert found[0] == -math.inf
    assert found[1].item() == pytest.approx(items[1].log_density[1].item() - math.log(2))
    assert found[2:].isfinite().all()


@pytest.mark.parametrize("log_weight", [math.nan, math.inf])
def test_bad_weights_are_refused(log_weight: float) -> None:
    average = averaged(members(2, [0.0, 1.0]))
    before = {name: term.clone() for name, term in average.terms.items()}
    with pytest.raises(ValueError, match=f"log-weight must be a number or -inf, got {log_weight}"):
        average.add(members(1, [0.0])[0].terms, torch.zeros(DATA), log_weight)
    assert all(torch.equal(average.terms[name], term) for name, term in before.items())


def test_a_member_is_not_changed_and_a_copy_is_its_own() -> None:
    items = members(3, [0.0, 1.0, 0.5])
    before = [item.terms["p"].clone() for item in items]
    average = averaged(items[:2])
    twin = average.copy()
    average.add(items[2].terms, items[2].log_density, 0.5)
    assert all(torch.equal(item.terms["p"], value) for item, value in zip(items, before, strict=True))
    assert_is(twin, direct(items[:2], normalised([0.0, 1.0])))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("stop", range(5))
def test_a_saved_average_goes_on_exactly(stop: int) -> None:
    items = members(5, LOG_WEIGHTS["random"])
    again = WeightedAverage()
    again.load_state_dict(through_a_file(averaged(items[:stop]).state_dict()))
    for item in items[stop:]:
        again.add(item.terms, item.log_density, item.log_weight)
    whole = averaged(items)
    assert again.log_total == whole.log_total
    assert torch.equal(again.log_density, whole.log_density)
    assert all(torch.equal(again.terms[name], whole.terms[name]) for name in whole.terms)


def test_a_loaded_average_is_independent_of_where_it_came_from() -> None:
    items = members(3, [0.0, 1.0, 0.5])
    average, twin = averaged(items[:2]), WeightedAverage()
    twin.load_state_dict(average.state_dict())
    average.add(items[2].terms, items[2].log_density, 0.5)
    assert_is(twin, direct(items[:2], normalised([0.0, 1.0])))


# -- cycles -----------------------------------------------------------------------------------------------------------


def cycle_members(chains: int = 2, seed: int = 1, level: float = -1e5, weighted: bool = False) -> list[Member]:
    """Three cycles of 1 to 3 samples for each chain, interleaved, with log likelihoods about `level`."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for cycle, count in enumerate((3, 1, 2)):
        for _ in range(count):
            for chain in range(chains):
                log_weight = torch.randn((), generator=generator).item() if weighted else 0.0
                (item,) = members(1, [log_weight], seed=len(items) + 50)
                item.chain, item.cycle = chain, cycle
                item.log_likelihood = level + 2 * torch.randn((), generator=generator).item()
                items.append(item)
    return items


def equation_4(items: Sequence[Member]) -> tuple[dict[str, Tensor], Tensor]:
    """f̂ = Σ_m w_m·f̂_m, ŵ_m = [K_m⁻¹·Σ_j 1/p(D|θ_j)]⁻¹; likelihoods relative to the largest, in plain float64."""
    top = max(item.log_likelihood for item in items)
    shares = torch.zeros(len(items), dtype=torch.float64)
    for key in {(item.chain, item.cycle) for item in items}:
        own = [index for index, item in enumerate(items) if (item.chain, item.cycle) == key]
        harmonic = 1 / (sum(1 / math.exp(items[i].log_likelihood - top) for i in own) / len(own))
        within = normalised([items[i].log_weight for i in own])
        for i, share in zip(own, within, strict=True):
            shares[i] = harmonic * share
    return direct(items, shares / shares.sum())


def add(average: CycleAverage, item: Member) -> None:
    average.add(
        item.terms,
        item.log_density,
        item.log_weight,
        chain=item.chain,
        cycle=item.cycle,
        log_likelihood=item.log_likelihood,
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("level", [-1e5, -3.0, 1e5])
@pytest.mark.parametrize("chains", [1, 3])
def test_cycle_average_is_equation_4(chains: int, level: float, weighted: bool) -> None:
    """... after every sample, where the last cycle of each chain is open."""
    items = cycle_members(chains, level=level, weighted=weighted)
    average = CycleAverage()
    for count, item in enumerate(items, start=1):
        add(average, item)
        assert_is(average.combined(), equation_4(items[:count]), 1e-8)


def test_a_cycle_far_below_counts_for_nothing_and_not_for_nan() -> None:
    items = cycle_members(1)
    for item in items:
        item.log_likelihood = -1e5 if item.cycle == 1 else -3e5
    average = CycleAverage()
    for item in items:
        add(average, item)
    best = [item for item in items if item.cycle == 1]
    assert_is(average.combined(), direct(best, normalised([0.0] * len(best))))


def test_one_bad_sample_takes_its_cycle_down() -> None:
    """The harmonic mean is ruled by the smallest likelihood: 2/(1/a + 1/b) with b ≪ a is 2b."""
    items = members(3, [0.0] * 3)
    for item, cycle, log_likelihood in zip(items, (0, 0, 1), (-10.0, -1000.0, -1000.0), strict=True):
        item.cycle, item.log_likelihood = cycle, log_likelihood
    average = CycleAverage()
    for item in items:
        add(average, item)
    assert_is(average.combined(), direct(items, torch.tensor([1 / 3, 1 / 3, 1 / 3], dtype=torch.float64)))


def test_looking_at_the_combination_changes_nothing() -> None:
    items = cycle_members()
    looked, blind = CycleAverage(), CycleAverage()
    for item in items:
        add(looked, item)
        looked.combined()
        add(blind, item)
    assert_is(looked.combined(), (blind.combined().terms, blind.combined().log_density), 0.0)


@pytest.mark.parametrize("stop", range(0, 13, 2))
def test_a_saved_cycle_average_goes_on_exactly(stop: int) -> None:
    items = cycle_members()
    first, again, whole = CycleAverage(), CycleAverage(), CycleAverage()
    for item in items[:stop]:
        add(first, item)
    again.load_state_dict(through_a_file(first.state_dict()))
    for item in items[stop:]:
        add(again, item)
    for item in items:
        add(whole, item)
    assert torch.equal(again.combined().log_density, whole.combined().log_density)
    for name, term in whole.combined().terms.items():
        assert torch.equal(again.combined().terms[name], term)


def test_a_cycle_without_weight_does_not_count() -> None:
    """A first cycle whose only sample has the weight 0 (as importance weights may be), and then one that counts."""
    items = members(2, [-math.inf, 0.0])
    items[1].cycle = 1
    average = CycleAverage()
    for item in items:
        add(average, item)
    assert_is(average.combined(), direct(items[1:], normalised([0.0])))


def test_impossible_training_data_give_a_cycle_weight_zero() -> None:
    """Two samples with p(D|θ) = 0 make the harmonic mean 0, not NaN."""
    items = members(3, [0.0] * 3)
    for item, cycle, log_likelihood in zip(items, (0, 0, 1), (-math.inf, -math.inf, -5.0), strict=True):
        item.cycle, item.log_likelihood = cycle, log_likelihood
    average = CycleAverage()
    for item in items:
        add(average, item)
    assert_is(average.combined(), direct(items[2:], normalised([0.0])))


# -- modes and joining ------------------------------------------------------------------------------------------------


def test_evaluation_mode_gives_every_part_its_own_mode_back() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1), torch.nn.Dropout())
    net.train()
    net[1].eval()

    def fail_inside() -> None:
        with evaluation_mode(net):
            assert not any(part.training for part in net.modules())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_inside()
    assert [part.training for part in net.modules()] == [True, True, False, True]


def test_concatenate() -> None:
    joined = concatenate([{"a": torch.zeros(2, 3)}, {"a": torch.ones(1, 3)}])
    assert torch.equal(joined["a"], torch.tensor([[0.0] * 3, [0.0] * 3, [1.0] * 3]))
    assert concatenate([]) == {}
