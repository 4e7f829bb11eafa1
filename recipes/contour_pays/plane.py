"""The methods on the plane with 25 modes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc.contour import ContourState, DecayingStepSize, choose_contour
from lightning_sgmcmc.recipes.shared.plane import Squares, cell_masses, divergence
from lightning_sgmcmc.schedules import CyclicalPlan
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation import ContourRun, ExchangeRun, simulate
from lightning_sgmcmc.simulation.targets import CosineTarget

TARGET = CosineTarget.twenty_five_modes()
CHAINS, PILOT, EVERY = 5, 0.1, 5
"""Chains, the pilot's share of their steps, and steps between draws."""
LR, NOISE, CELLS = 3e-3, 0.25, 50
LADDER = (1.0, 2.0, 3.0, 4.0, 5.0)
CYCLES, EXPLORED, CYCLICAL_LR = 5, 0.5, 1e-2
STARTS = ((0.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (0.0, 1.0), (1.0, 0.0))


def on_plane(methods: Sequence[str], repeats: int, steps: int, seed: int) -> dict[str, list[dict[str, float]]]:
    """Return each method's figures, one mapping for each repeat; repeats run side by side."""
    truth, squares = TARGET.cell_masses(CELLS), Squares(TARGET)
    found: dict[str, list[dict[str, float]]] = {}
    for method in methods:
        places, log_weights = draws(method, repeats, steps, seed)
        found[method] = []
        for repeat in range(repeats):
            own = slice(repeat * CHAINS, (repeat + 1) * CHAINS)
            x, weights = places[:, own].reshape(-1, 2), log_weights[:, own].reshape(-1).double().softmax(0)
            figures = {
                "distance": divergence(truth, cell_masses(x, weights, TARGET.bounds, CELLS)),
                "modes found": float(squares.found(squares.masses(x, weights))),
            }
            if method.startswith("contour"):
                figures["efficiency"] = float(1 / (weights.square().sum() * len(weights)))
            found[method].append(figures)
    return found


def draws(method: str, repeats: int, steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return all repeats' draws (S, R·P, 2) and their log-weights (S, R·P), -inf where a state is no draw."""
    pilot_steps = round(PILOT * steps)
    options: dict[str, Any] = {"lr": LR, "initial": torch.tensor(STARTS).repeat(repeats, 1), "num_steps": steps}
    options |= {"num_chains": repeats * CHAINS, "gradient_noise": NOISE, "keep_every": EVERY, "burn_in": pilot_steps}
    options |= {"seed": derive_seed(seed, "plane"), "compile": False}
    plan = CyclicalPlan(steps, CYCLES, EXPLORED, 1)
    if method.startswith("contour"):
        pilot = simulate(
            TARGET,
            **options | {"num_steps": pilot_steps, "keep_every": 1, "burn_in": pilot_steps // 2, "energy_noise": NOISE},
        )
        generator = torch.Generator().manual_seed(derive_seed(seed, "pilot's energies"))
        energies = pilot.energies[:, :CHAINS]  # those of one repeat choose for all, since repeats share the bins
        energies = energies + NOISE * torch.randn(energies.shape, generator=generator)
        choice = choose_contour(energies)
        state = ContourState(*(part.expand(repeats, -1) for part in choice.initial_state(energies)))
        run = ContourRun(choice.contour, DecayingStepSize(), shared=True, groups=repeats, state=state)
        options |= {"contour": run, "energy_noise": NOISE, "num_steps": steps - pilot_steps, "burn_in": 0}
        options |= {"initial": pilot.positions[-1]}
    elif method == "replica exchange":
        options |= {"exchange": ExchangeRun(LADDER, variance=NOISE**2), "energy_noise": NOISE, "keep_every": 1}
    elif method == "cyclical":
        options["lr"] = lambda k: CYCLICAL_LR * plan.lr_factor(k)
    done = simulate(TARGET, **options)
    log_weights = done.log_weights.clone()
    if done.slots is not None:
        log_weights[done.slots != 0] = -torch.inf
    if method == "cyclical":
        log_weights[[plan.is_exploration(k) for k in done.steps.tolist()]] = -torch.inf
    return done.positions, log_weights
