"""Trajectories: each sample's network applied to its own previous output."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.batches.inputs import as_tensors
from lightning_sgmcmc.chains.execution import StatelessCall, dtype_of, evaluation_mode
from lightning_sgmcmc.checks import check_count, check_flag
from lightning_sgmcmc.model import EnergyModel
from lightning_sgmcmc.posterior.predictive import states_in_place
from lightning_sgmcmc.posterior.store import SampleStore
from lightning_sgmcmc.seeding import derive_seed, reseed, unchanged_torch_generators
from lightning_sgmcmc.tables import as_tensor

Step = Callable[[Tensor, Tensor], Tensor]


def rolled_out(
    model: EnergyModel, store: SampleStore, x: Any, steps: int, step: Step | None, noise: bool, seed: int
) -> Tensor:
    """Return each sample's trajectory; see `Posterior.rollout`."""
    check_count("steps", steps, optional=False)
    check_flag("noise", noise)
    likelihood, columns, scaling = model.likelihood, store.columns.inputs, store.scaling
    if likelihood is None or likelihood.distribution is None:
        raise TypeError(
            f"rollout feeds numbers back, and {type(likelihood).__name__} has no distribution of numbers: roll each of "
            "posterior.networks() out in a loop of your own"
        )
    if isinstance(x, tuple | list | dict):
        raise TypeError(f"rollout needs the first inputs as one tensor or frame (n, …), got a {type(x).__name__}")
    # A frame is encoded once: its columns must be numbers to come from an output.
    first = columns.encoded(x) if columns is not None else as_tensor("x", x)
    first = as_tensors(first, model.device, dtype_of(store[0].parameters))
    mean, std = (0.0, 1.0) if columns is None else (part.to(first) for part in columns.scaling)
    call = StatelessCall(model, lambda m, inputs: m.likelihood.law(m.output_of((inputs - mean) / std)))
    paths = []
    with evaluation_mode(model), torch.no_grad(), unchanged_torch_generators([model.device]):
        reseed(derive_seed(seed, "rollout"), model.device)  # torch's distributions take no generator
        for state in states_in_place(model, store):
            inputs, path = first, []
            for _ in range(steps):
                law = call.call(state, inputs)
                output = (law.sample() if noise else law.mean).to(first)
                if scaling is not None:
                    output = output * output.new_tensor(scaling.std) + output.new_tensor(scaling.mean)
                path.append(output)
                inputs = output if step is None else step(inputs, output)
                _check_next(inputs, first, step is None)
            paths.append(torch.stack(path))
    return torch.stack(paths)


def _check_next(inputs: Any, first: Tensor, is_output: bool) -> None:
    shape = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
    if shape != tuple(first.shape):
        what = "an output" if is_output else "step(x, y)"
        raise ValueError(
            f"{what} has the shape {shape}, and inputs have {tuple(first.shape)}: pass step=…, which returns the next "
            "inputs from the inputs and the outputs"
        )
