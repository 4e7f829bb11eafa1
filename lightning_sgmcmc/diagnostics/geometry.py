"""Geometry of samples in weight space: pure functions of tensors; memory does not depend on the network's size."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sgmcmc.checks import check_count
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.tensors import widest

State = Mapping[str, Tensor]


def weight_sketch(parameters: State, dimension: int = 1024, seed: int = 0) -> Tensor:
    """Return a short vector S·θ of all weights that preserves squared distances, exactly or in expectation.

        (S·θ)_b = Σ_{i: h(i)=b} s(i)·θ_i,   h(i) uniform in 0..m-1,   s(i) = ±1

    With at most m weights it is θ, padded with zeros. With more, E‖S·(θ-θ')‖² = ‖θ-θ'‖², and its relative standard
    deviation is at most √(2/m) (4.4 % for m = 1024). It takes one pass over the weights. h and s depend only on the
    seed and the tensors' names; torch's default generator is not used.

    Args:
        parameters: the weights by name.
        dimension: m, at least 1.
        seed: seed of h and s; only sketches with the same seed are comparable.

    Returns:
        float32, shape (m,), on the CPU.

    Raises:
        ValueError: if there are no weights, or the dimension is below 1.

    Source: Charikar, Chen & Farach-Colton 2002 (count sketch); Weinberger et al. 2009, theorem 2 (its variance).
    """
    check_count("dimension", dimension)
    total = sum(tensor.numel() for tensor in parameters.values())
    if total == 0:
        raise ValueError("parameters has no weights to sketch: pass at least one tensor")
    if total <= dimension:
        flat = torch.cat([tensor.detach().reshape(-1).cpu().double() for tensor in parameters.values()])
        return torch.nn.functional.pad(flat, (0, dimension - total)).float()
    sketch = torch.zeros(dimension, dtype=torch.float64)
    for name, tensor in parameters.items():
        generator = torch.Generator().manual_seed(derive_seed(seed, "sketch", name))
        hashed = torch.randint(2 * dimension, (tensor.numel(),), generator=generator)
        signs = widest(hashed % 2).mul_(2).sub_(1)
        sketch.index_add_(0, hashed // 2, signs.mul_(tensor.detach().reshape(-1).cpu().double()))
    return sketch.float()


def squared_distances(points: Tensor) -> Tensor:
    """Return ‖x_i - x_j‖² for all pairs of rows; (S, m) to (S, S), float64, symmetric with a zero diagonal."""
    return torch.cdist(widest(points), widest(points), compute_mode="donot_use_mm_for_euclid_dist").square()


def classical_scaling(distances: Tensor, dimensions: int = 2) -> tuple[Tensor, Tensor]:
    """Return points that best reproduce the given distances, by classical multidimensional scaling.

        B = -J·D²·J/2 = V·Λ·Vᵀ,   J = I - 11ᵀ/S,   X = V·Λ^½ (the largest eigenvalues)

    Args:
        distances: D², squared distances, shape (S, S).
        dimensions: number of coordinates.

    Returns:
        X, shape (S, dimensions), float64, centred, padded with zeros if the points span fewer; and each coordinate's
        share of the variance, shape (dimensions,). The largest entry of each coordinate is positive.

    Raises:
        ValueError: if the distances are not a square matrix, or not finite.

    Source: Torgerson 1952.
    """
    if distances.dim() != 2 or distances.shape[0] != distances.shape[1]:
        raise ValueError(f"distances must be a square matrix, got shape {tuple(distances.shape)}")
    if not bool(distances.isfinite().all()):
        raise ValueError("distances must be finite, got an infinite or NaN entry")
    distances = widest(distances)
    centred = distances - distances.mean(0) - distances.mean(1, keepdim=True) + distances.mean()
    eigenvalues, vectors = torch.linalg.eigh(-centred / 2)
    eigenvalues, vectors = eigenvalues.flip(0).clamp_min(0)[:dimensions], vectors.flip(1)[:, :dimensions]
    coordinates = vectors * eigenvalues.sqrt()
    signs = coordinates.gather(0, coordinates.abs().argmax(0, keepdim=True)).sign()
    coordinates = coordinates * torch.where(signs == 0, 1, signs)
    variance = torch.diagonal(-centred / 2).sum()
    share = eigenvalues / variance if variance > 0 else torch.zeros_like(eigenvalues)
    missing = dimensions - len(share)
    pad = torch.nn.functional.pad
    return pad(coordinates, (0, missing)), pad(share, (0, missing))


def interpolate(first: State, second: State, position: float) -> dict[str, Tensor]:
    """Return the point (1-t)·a + t·b between two states.

    Floating-point buffers (BatchNorm's running means and variances) are interpolated like the weights; integers (its
    counter) are copied from the nearer end.

    Args:
        first: a, at t = 0.
        second: b, at t = 1, with the same names and shapes.
        position: t.
    """
    nearer = first if position < 0.5 else second
    return {
        name: torch.lerp(start, second[name], position) if start.is_floating_point() else nearer[name]
        for name, start in first.items()
    }


def segment_pairs(places: Sequence[tuple[int, int]], limit: int) -> list[tuple[int, int, str]]:
    """Choose pairs of samples whose segments are evaluated, from (chain, cycle) of each in the order of drawing.

    Within a cycle, or a chain without cycles, it is the first and last sample; between two cycles or chains the last
    of each. The newest are chosen, as evenly over the three kinds as possible.
    """
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    for index, place in enumerate(places):
        first.setdefault(place, index)
        last[place] = index
    chains: dict[int, list[int]] = {}
    for (chain, _), index in sorted(last.items(), key=lambda item: item[1]):
        chains.setdefault(chain, []).append(index)
    ends = [chains[chain][-1] for chain in sorted(chains)]
    within = "within a cycle" if len({cycle for _, cycle in last}) > 1 else "within a chain"
    kinds = {
        within: [(first[place], last[place]) for place in last if first[place] != last[place]],
        "between cycles": [pair for of_chain in chains.values() for pair in itertools.pairwise(of_chain)],
        "between chains": list(itertools.pairwise(ends)),
    }
    waiting = {kind: sorted(pairs, key=max) for kind, pairs in kinds.items()}
    chosen: list[tuple[int, int, str]] = []
    while len(chosen) < limit and any(waiting.values()):
        for kind, pairs in waiting.items():
            if pairs and len(chosen) < limit:
                chosen.append((*pairs.pop(), kind))
    order = list(kinds)
    return sorted(chosen, key=lambda pair: (order.index(pair[2]), pair[1], pair[0]))
