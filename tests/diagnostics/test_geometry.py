"""Sketches, scaling, segments and thinning, held against direct computations."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.diagnostics.geometry import (
    classical_scaling,
    interpolate,
    segment_pairs,
    squared_distances,
    weight_sketch,
)
from lightning_sgmcmc.fit.results import RunHistory, ThinnedSeries


def points(count: int, dimension: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_sketches_of_small_networks_keep_every_distance() -> None:
    samples = [{"a": x[:30].view(5, 6), "b": x[30:]} for x in points(8, 50).float()]
    sketches = torch.stack([weight_sketch(sample, 64) for sample in samples])
    exact = torch.stack([torch.cat([s["a"].reshape(-1), s["b"]]) for s in samples])
    torch.testing.assert_close(squared_distances(sketches), squared_distances(exact))


def test_sketches_of_large_networks_keep_distances_within_the_stated_deviation() -> None:
    """Over 200 seeds the ratio of squared distances has the mean 1 and at most the variance 2/m.

    The mean is off by more than four of its standard errors in 1 of 16,000 runs; the variance's estimate has a relative
    standard error of 0.1 and is held to four of them.
    """
    x, y = points(2, 5000)
    dimension = 64
    distance = float((x - y).square().sum())
    ratios = []
    for seed in range(200):
        a, b = (weight_sketch({"w": v[:4000].view(40, 100), "v": v[4000:]}, dimension, seed) for v in (x, y))
        ratios.append(float((a.double() - b.double()).square().sum()) / distance)
    deviation = math.sqrt(2 / dimension)
    assert abs(np.mean(ratios) - 1) < 4 * deviation / math.sqrt(200)
    assert 0.3 * 2 / dimension < np.var(ratios) < 1.4 * 2 / dimension


def test_sketching_draws_from_no_default_generator_and_is_the_same_every_time() -> None:
    before = torch.get_rng_state()
    sketch = weight_sketch({"w": points(1, 5000)[0]})
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(sketch, weight_sketch({"w": points(1, 5000)[0]}))
    assert not torch.equal(sketch, weight_sketch({"w": points(1, 5000)[0]}, seed=1))


def test_sketch_mistakes_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="no weights"):
        weight_sketch({})
    with pytest.raises(ValueError, match="at least 1, got 0"):
        weight_sketch({"w": torch.ones(3)}, 0)


def test_scaling_of_points_in_a_plane_gives_their_distances_back() -> None:
    plane = points(12, 2) @ points(2, 30, seed=1)
    distances = squared_distances(plane)
    coordinates, share = classical_scaling(distances)
    torch.testing.assert_close(squared_distances(coordinates), distances)
    assert float(share.sum()) == pytest.approx(1)
    assert share[0] >= share[1]


def test_scaling_is_principal_components() -> None:
    """For Euclidean distances the coordinates are the principal components, up to signs."""
    x = points(20, 7) * torch.arange(1, 8)
    coordinates, share = classical_scaling(squared_distances(x), 3)
    u, s, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    torch.testing.assert_close(coordinates.abs(), (u * s)[:, :3].abs())
    torch.testing.assert_close(share, (s.square() / s.square().sum())[:3])


def test_scaling_of_degenerate_points() -> None:
    for count in (1, 2, 5):
        coordinates, share = classical_scaling(torch.zeros(count, count))
        assert torch.equal(coordinates, torch.zeros(count, 2, dtype=torch.float64))
        assert torch.equal(share, torch.zeros(2, dtype=torch.float64))
    coordinates, share = classical_scaling(torch.tensor([[0.0, 4.0], [4.0, 0.0]]))
    torch.testing.assert_close(coordinates[:, 0].abs(), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(share, torch.tensor([1.0, 0.0], dtype=torch.float64))


def test_scaling_refuses_what_are_no_distances() -> None:
    with pytest.raises(ValueError, match=r"square matrix, got shape \(2, 3\)"):
        classical_scaling(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="must be finite"):
        classical_scaling(torch.full((2, 2), math.nan))


def test_interpolation_moves_weights_and_running_statistics_and_leaves_counters_whole() -> None:
    a, b = (nn.BatchNorm1d(3).state_dict() for _ in range(2))
    b = {name: tensor + 4 for name, tensor in b.items()}
    quarter = interpolate(a, b, 0.25)
    assert torch.equal(quarter["weight"], torch.full((3,), 2.0))
    assert torch.equal(quarter["running_mean"], torch.full((3,), 1.0))
    assert torch.equal(quarter["running_var"], torch.full((3,), 2.0))
    assert quarter["num_batches_tracked"] == 0
    assert interpolate(a, b, 0.75)["num_batches_tracked"] == 4
    for position, end in ((0, a), (1, b)):
        assert all(torch.equal(tensor, end[name]) for name, tensor in interpolate(a, b, position).items())


def test_segment_pairs() -> None:
    cycles = [(0, 0), (0, 0), (0, 0), (0, 1), (0, 1), (0, 2)]
    assert segment_pairs(cycles, 10) == [
        (0, 2, "within a cycle"),
        (3, 4, "within a cycle"),
        (2, 4, "between cycles"),
        (4, 5, "between cycles"),
    ]
    assert segment_pairs(cycles, 2) == [(3, 4, "within a cycle"), (4, 5, "between cycles")], "the newest, of each kind"
    chains = [(0, 0), (1, 0), (0, 0), (1, 0)]
    assert segment_pairs(chains, 9) == [
        (0, 2, "within a chain"),
        (1, 3, "within a chain"),
        (2, 3, "between chains"),
    ]
    assert segment_pairs([(0, 0)], 4) == segment_pairs([], 4) == segment_pairs(cycles, 0) == []


def test_a_thinned_series_covers_the_whole_run_evenly_and_never_overflows() -> None:
    series = ThinnedSeries(100)
    for step in range(12_345):
        series.append((step,))
        assert len(series) <= 100
    steps = series.column(0)
    assert steps[0] == 0
    assert set(np.diff(steps)) == {series.stride}
    assert steps[-1] > 12_345 - 1 - series.stride
    assert len(series) > 50
    twin = ThinnedSeries(100)
    twin.load_state_dict(series.state_dict())
    for step in range(12_345, 30_000):
        series.append((step,))
        twin.append((step,))
    assert twin.rows == series.rows


def sample(step: int, log_weight: float = 0.0) -> PosteriorSample:
    return PosteriorSample(step, 0, 0, 1.0, log_weight, {"w": torch.full((4,), float(step))})


def test_history_counts_the_effective_samples_of_any_weights() -> None:
    history = RunHistory()
    history.add_sample(sample(1, -math.inf))
    assert (history.effective_weights, history.weights) == (0, [])
    for step, weight in ((2, 1.0), (3, 3.0)):
        history.add_sample(sample(step, 1000 + math.log(weight)))
    assert history.effective_weights == pytest.approx(16 / 10)
    assert history.weights == pytest.approx([0, 0.25, 0.75])


def test_history_survives_a_checkpoint() -> None:
    history, twin = RunHistory(max_sketches=3), RunHistory(max_sketches=3)
    history.trace_names = ["w[0]"]
    for step in range(7):
        history.add_scalars(step, (0.1, 1.0, 2.0 * step), [step / 2])
        history.add_sample(sample(step, 0.1 * step), sample(step).parameters)
    twin.load_state_dict(history.state_dict())
    for each in (history, twin):
        each.add_sample(sample(9, 0.5), sample(9).parameters)
    assert twin.as_json() == history.as_json()
    assert twin.sketches.rows == history.sketches.rows
    assert twin.effective_weights == history.effective_weights
    assert twin.scalar("w[0]") == [0, 0.5, 1, 1.5, 2, 2.5, 3]


def test_json_has_no_number_that_json_has_not() -> None:
    history = RunHistory()
    history.add_scalars(1, (0.1, 0.0, math.nan))
    history.add_sample(PosteriorSample(1, 2, 3, math.inf, -math.inf))
    content = history.as_json()
    assert content["scalars"] == {"sampler/lr": [0.1], "sampler/temperature": [0.0], "sampler/energy": [None]}
    assert content["samples"] == [{"step": 1, "cycle": 2, "chain": 3, "energy": None, "log_weight": None}]
