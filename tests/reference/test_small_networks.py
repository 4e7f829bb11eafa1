"""Small networks: the energy is that of the project's NumPy reference, which shares no code with the library."""

import numpy as np
import pytest
import torch

from lightning_sgmcmc.reference.problem import Problem
from tests.benchmarks.truth import PROBLEMS, module_of


@pytest.mark.parametrize("execution", ["loop", "vmap"])
@pytest.mark.parametrize("name", ["regression", "classification", "smallest"])
def test_the_energy_and_its_gradient_are_those_of_the_other_reference(name: str, execution: str) -> None:
    target = PROBLEMS[name].target
    data = torch.tensor(target.x), torch.tensor(target.y)
    torch.manual_seed(0)
    own = Problem(module_of(PROBLEMS[name], chain_execution=execution), data, 64, 3, None, 0, torch.float64)
    energies, gradients = own.energy(own.initial)
    theirs, slopes = target.potential(own.initial.numpy())
    assert np.allclose(gradients.numpy(), slopes, rtol=1e-5, atol=1e-5)  # σ is kept in float32
    difference = energies.numpy() - theirs  # the constant that the other leaves out
    assert np.allclose(difference, difference[0], rtol=1e-6, atol=1e-3)
