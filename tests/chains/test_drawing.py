"""Samples that are drawn together: one flat copy holds every chain's tensors, and says whether they are finite."""

import math

import pytest
import torch
from torch import Tensor

from lightning_sgmcmc.chains.samples import Drawing, FlatStates, PosteriorSample

CHAINS = 3


def parts(chains: int = CHAINS) -> dict[str, dict[str, Tensor]]:
    """Parameters of several dtypes and shapes, strided ones, integer buffers and no elements at all."""
    shape = (chains,) if chains > 1 else ()
    generator = torch.Generator().manual_seed(0)

    def normal(*own: int) -> Tensor:
        return torch.randn((*shape, *own), generator=generator)

    return {
        "parameters": {
            "weight": normal(4, 2).transpose(-1, -2),
            "scalar": normal(),
            "half": normal(3).half(),
            "double": normal(2).double(),
        },
        "buffers": {
            "mean": normal(5),
            "norm.running_var": normal(3),
            "mask": torch.full((*shape, 2), -torch.inf),
            "count": torch.arange(chains).reshape(shape),
            "empty": normal(0),
            "flag": torch.ones(*shape, 2, dtype=torch.bool),
        },
        "scales": {"weight": normal().exp()},
    }


@pytest.mark.parametrize("chains", [1, CHAINS])
def test_every_tensor_of_every_chain_comes_back_and_owns_its_memory(chains: int) -> None:
    given = parts(chains)
    states = FlatStates(given, chains)
    expected = [
        {p: {n: (t[c] if chains > 1 else t).clone() for n, t in named.items()} for p, named in given.items()}
        for c in range(chains)
    ]
    for named in given.values():
        for tensor in named.values():
            tensor.zero_()
    for chain in range(chains):
        found = states.of_chain(chain)
        assert found.keys() == expected[chain].keys()
        for part, named in found.items():
            assert list(named) == list(expected[chain][part])
            for name, tensor in named.items():
                other = expected[chain][part][name]
                assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
                assert torch.equal(tensor, other)
    assert not states.suspects().any()


@pytest.mark.parametrize(
    ("part", "name", "value", "bad"),
    [
        ("parameters", "weight", math.nan, True),
        ("parameters", "weight", math.inf, True),
        ("parameters", "half", -math.inf, True),
        ("parameters", "scalar", math.nan, True),
        ("parameters", "double", math.nan, True),
        ("buffers", "mean", math.nan, True),
        ("buffers", "norm.running_var", math.inf, True),
        ("buffers", "norm.running_var", math.nan, True),
        ("buffers", "mask", 3.0, False),
        ("buffers", "mask", math.nan, True),
        ("parameters", "double", 1e300, False),
        ("parameters", "half", 6e4, False),
    ],
)
def test_suspects_are_the_chains_that_may_not_be_finite(part: str, name: str, value: float, bad: bool) -> None:
    given = parts()
    tensor = given[part][name]
    tensor[(1, *[-1] * (tensor.dim() - 1))] = value
    assert FlatStates(given, CHAINS).suspects().tolist() == [False, bad, False]


@pytest.mark.parametrize("flat", [True, False])
def test_host_copies_are_of_the_moment_they_were_made(flat: bool) -> None:
    states = FlatStates(parts(), CHAINS)
    samples = [PosteriorSample(5, 0, chain, 1.0, **states.of_chain(chain)) for chain in range(CHAINS)]
    chosen = samples[1:]
    drawing = Drawing(chosen, states, [1, 2]) if flat else Drawing(chosen)
    copies = [drawing.host_copy(sample) for sample in chosen]
    expected = [{name: tensor.clone() for name, tensor in sample.state.items()} for sample in chosen]
    for tensor in states.flat.values():
        tensor.zero_()
    for copy, sample, state in zip(copies, chosen, expected, strict=True):
        found = copy()
        assert (found.step, found.chain, found.energy) == (sample.step, sample.chain, sample.energy)
        assert found.state.keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in found.state.items())
    other = drawing.host_copy(samples[0])()
    assert other.chain == 0, "a sample that the drawing does not have is copied alone"
