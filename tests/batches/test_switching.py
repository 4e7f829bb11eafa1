"""Held and switched batches: their law.

False alarms: Kolmogorov-Smirnov and chi-square tests at p < 1e-4. Seeds are fixed.
"""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg, stats

from lightning_sgmcmc import SwitchingOrder
from lightning_sgmcmc.batches.orders import OrderSpec
from lightning_sgmcmc.batches.switching import CHUNK
from tests.support.problems import BATCH, NUM_DATA
from tests.support.switching import order, states

# -- the split --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_data", "batch", "ranks"), [(60, 8, 1), (61, 8, 1), (64, 8, 2), (61, 7, 3), (3, 5, 1), (2, 1, 3)]
)
def test_the_data_are_split_once_into_equal_batches(num_data: int, batch: int, ranks: int) -> None:
    made = [order(1e-6, 1.0, num_data, batch, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    count = made[0].batches_per_epoch
    of_state: dict[int, torch.Tensor] = {}
    for k in range(40 * count):
        whole = torch.cat([one.indices(k) for one in made])
        assert {len(one.indices(k)) for one in made} == {len(whole) // ranks}
        assert torch.equal(of_state.setdefault(made[0].state(k), whole), whole)
    assert set(of_state) == set(range(count))
    assert len(made[0].indices(0)) <= batch
    taken = torch.cat(list(of_state.values())).bincount(minlength=num_data)
    assert len(taken) == num_data
    assert int(taken.min()) == 1 or num_data < count * ranks
    assert int(taken.sum()) - num_data < count * ranks, "no more data twice than are needed for equal batches"


def test_every_chain_and_seed_has_its_own_split_and_switching() -> None:
    made = [order(), order(chain=1), SwitchingOrder(OrderSpec(NUM_DATA, BATCH, 4), switching_time=1.0, time_step=0.02)]
    splits = [one._split[range(NUM_DATA)] for one in made]
    paths = [states(one, 300) for one in made]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(splits[a], splits[b])
        assert not torch.equal(paths[a], paths[b])
    assert torch.equal(states(order(), 300), paths[0])


# -- the law of the switching -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [3.0, 0.3, 1e-4])
def test_the_transition_matrix_is_that_of_the_continuous_chain(eta: float) -> None:
    """Counts of (state, next state) against exp(Q·dt), from slow switching to independent batches."""
    made, steps, dt = order(eta, 0.05, num_data=4, batch=1), 40_000, 0.05
    path = states(made, steps)
    found = torch.bincount(4 * path[:-1] + path[1:], minlength=16).double().view(4, 4)
    matrix = linalg.expm((np.ones((4, 4)) - 4 * np.eye(4)) / eta * dt)
    for row, expected in zip(found, matrix, strict=True):
        assert stats.chisquare(row, expected * float(row.sum())).pvalue > 1e-4


def test_states_three_steps_apart_are_those_of_a_markov_chain() -> None:
    """Pairs three steps apart against exp(3Q·dt), across the chunks' borders too."""
    made, eta, dt = order(0.5, 0.05, num_data=3, batch=1), 0.5, 0.05
    path = states(made, 40 * CHUNK)
    matrix = linalg.expm((np.ones((3, 3)) - 3 * np.eye(3)) / eta * 3 * dt)
    for one, other in ((path[:-3], path[3:]), (path[CHUNK - 2 :: CHUNK][:-1], path[CHUNK + 1 :: CHUNK])):
        stays = int((one == other).sum())
        assert stats.binomtest(stays, len(one), matrix[0, 0]).pvalue > 1e-4


@pytest.mark.parametrize("count", [2, 6])
def test_holding_times_are_exponential_and_the_next_state_uniform(count: int) -> None:
    """With 500 steps to a mean holding time η/(S-1): rounding to steps moves the distribution function by 0.002, and
    the test sees 0.04 for 3,000 holdings."""
    eta, mean = 1.0, 1.0 / (count - 1)
    dt = mean / 500
    made = order(eta, dt, num_data=count, batch=1)
    path = states(made, 1_500_000)
    jumps = (path.diff() != 0).nonzero()[:, 0]
    holding = jumps.diff()[:3000].double() * dt
    assert len(holding) > 2500
    assert stats.kstest(holding, stats.expon(scale=mean).cdf).pvalue > 1e-4
    if count > 2:
        moves = torch.bincount(((path[jumps + 1] - path[jumps]) % count) - 1, minlength=count - 1)
        assert stats.chisquare(moves).pvalue > 1e-4
    first = [
        SwitchingOrder(OrderSpec(count, 1, seed), switching_time=eta, time_step=dt).state(0) for seed in range(600)
    ]
    assert stats.chisquare(np.bincount(first, minlength=count)).pvalue > 1e-4


def test_a_time_step_may_change_from_step_to_step() -> None:
    """A schedule that stands still, and then runs: no switch while no time passes, then the law of the step's time."""
    made = order(0.4, lambda k: 0.0 if k < 3000 else 0.1, num_data=5, batch=1)
    path = states(made, 24_000)
    assert (path[:3000] == path[0]).all()
    stays = float((path[3000:-1] == path[3001:]).double().sum())
    share = linalg.expm((np.ones((5, 5)) - 5 * np.eye(5)) / 0.4 * 0.1)[0, 0]
    assert stats.binomtest(int(stays), 20_999, share).pvalue > 1e-4
    # A function that returns a number gives what the number gives.
    assert torch.equal(states(order(dt=lambda k: 0.02), 2000), states(order(), 2000))


def test_step_k_advances_by_its_own_time() -> None:
    """Only the step k = 2 takes time, so the state may change at the position 2 alone (counted from 0)."""
    changes = set()
    for chain in range(40):
        path = states(order(0.01, lambda k: 1.0 if k == 2 else 0.0, num_data=9, batch=1, chain=chain), 6)
        changes |= set((path.diff() != 0).nonzero()[:, 0].tolist())
    assert changes == {1}  # between positions 1 and 2


@pytest.mark.parametrize("eta", [1.0, 1e5])
def test_any_position_can_be_asked_for_at_once(eta: float) -> None:
    path = states(order(eta), 5 * CHUNK)
    for position in (4 * CHUNK + 7, 3, 2 * CHUNK, 5 * CHUNK - 1, CHUNK - 1):
        assert order(eta).state(position) == path[position]
    made = order(eta)
    for position in (4000, 10, 5000, 1023, 1024):
        assert made.state(position) == path[position]


def test_a_batch_is_held_across_the_borders_of_chunks() -> None:
    """The state goes on from one chunk to the next, and over many: changes are as seldom there as elsewhere."""
    assert len(states(order(1e9), 4 * CHUNK).unique()) == 1
    changes, borders = 0, range(CHUNK, 4 * CHUNK, CHUNK)
    for chain in range(200):
        made = order(10.0, chain=chain)
        changes += sum(made.state(at - 1) != made.state(at) for at in borders)
    share = 7 / 8 * -np.expm1(-8 * 0.02 / 10.0)
    assert stats.binomtest(changes, 200 * len(borders), share).pvalue > 1e-4


def test_one_batch_is_held_for_ever() -> None:
    made = order(batch=NUM_DATA)
    assert made.batches_per_epoch == 1
    assert torch.equal(made.indices(0).sort().values, torch.arange(NUM_DATA))
    assert torch.equal(made.indices(0), made.indices(3000))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"switching_time": 0.0}, ValueError, "switching_time must be positive, got 0"),
        ({"switching_time": -1.0}, ValueError, "switching_time must be a finite number and not negative, got -1"),
        ({"switching_time": float("inf")}, ValueError, "switching_time must be a finite number"),
        ({"switching_time": "long"}, TypeError, "switching_time must be a number"),
        ({"time_step": 0.0}, ValueError, "time_step must be positive, got 0"),
        ({"time_step": None}, TypeError, "time_step must be a number"),
        ({"drop_last": True}, ValueError, "would leave out the same 4 of 60 data for the whole run"),
    ],
)
def test_mistakes(change: dict[str, Any], error: type[Exception], message: str) -> None:
    options: dict[str, Any] = {"switching_time": 1.0, "time_step": 0.1} | change
    spec = OrderSpec(NUM_DATA, BATCH, 0, drop_last=options.pop("drop_last", False))
    with pytest.raises(error, match=message):
        SwitchingOrder(spec, **options)


def test_a_schedule_of_senseless_times_is_refused() -> None:
    for bad in (-0.1, float("nan")):
        with pytest.raises(ValueError, match=r"time_step must be finite and not negative, got .* at the step 7"):
            order(dt=lambda k, bad=bad: bad if k == 7 else 0.1).state(0)
