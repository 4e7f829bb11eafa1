"""Samples whose tensors are functions of their step."""

from pathlib import Path
from typing import Any

import torch

from lightning_sgmcmc.chains.samples import PosteriorSample
from lightning_sgmcmc.posterior.manifest import MANIFEST


def sample(step: int = 1, chain: int = 0, **options: Any) -> PosteriorSample:
    """Return a sample whose tensors are functions of its step."""
    parameters = {"w": torch.full((4, 3), float(step)), "b": torch.arange(5.0) + step}
    buffers = {"count": torch.tensor(step)}
    return PosteriorSample(step, step // 10, chain, -2.5 * step, 0.5 * step, parameters, buffers, **options)


def assert_is_sample(found: PosteriorSample, step: int) -> None:
    expected = sample(step)
    assert vars(found).keys() == vars(expected).keys()
    assert (found.step, found.cycle, found.energy, found.log_weight) == (step, step // 10, -2.5 * step, 0.5 * step)
    assert found.state.keys() == expected.state.keys()
    assert all(torch.equal(found.state[name], tensor) for name, tensor in expected.state.items())


def files(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.name != MANIFEST)
