"""Several modes of a small network: the frequency of a wave in few noisy data, by chains at equal gradients.

    python -m tests.benchmarks.frequency [--data 3] [--repeats 40] [--out FILE]

A network of two sine units has the weights f (with the prior N(1, 0.3²)), a, b and c (N(0, 1) each):

    y_i = a·sin(2πf·t_i) + b·cos(2πf·t_i) + c + noise of standard deviation 0.7,   12 times t_i in [0, 10]

Given f the model is linear, so the posterior of f is known by quadrature: narrow modes 0.1 apart, of unequal masses,
with some nats between them. Every method has five chains of as many steps, warm-ups included, from draws of the prior.
The measure is the total variation of the mass in 60 cells of f from the truth, the mean over repeats, with its
standard error; "prior" is that of the prior itself.
"""

import argparse
import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc import ContourRules
from lightning_sgmcmc.contour import Contour, ContourState, DecayingStepSize, EnergyPartition, choose_contour
from lightning_sgmcmc.recipes.shared.pages import table_of
from lightning_sgmcmc.seeding import derive_seed
from lightning_sgmcmc.simulation import ContourRun, ExchangeRun, simulate
from tests.benchmarks.timing import measure_quietly

COUNT, SPAN, NOISE_STD = 12, 10.0, 0.7
PRIOR_MEAN, PRIOR_STD, UNIT = 1.0, 0.3, 0.05
"""Of f, and the unit in which chains move it: modes are then as wide in f as in a and b."""
CELLS, RANGE = 60, (0.1, 1.9)
CHAINS, STEPS, PILOT, EVERY, LR = 5, 20_000, 0.1, 10, 0.01
LADDER = (1.0, 1.7, 2.9, 5.0, 8.5)


class Wave:
    """The posterior of the unit frequency (f - 1)/0.05, a, b and c."""

    dimension = 4

    def __init__(self, seed: int) -> None:
        own = torch.Generator().manual_seed(derive_seed(seed, "wave"))
        self.times = SPAN * torch.rand(COUNT, generator=own)
        f, a, b, c = (torch.randn(4, generator=own) * torch.tensor([PRIOR_STD, 1, 1, 1])).unbind()
        turns = 2 * math.pi * (PRIOR_MEAN + f) * self.times
        self.values = a * turns.sin() + b * turns.cos() + c + NOISE_STD * torch.randn(COUNT, generator=own)

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turns = 2 * math.pi * (PRIOR_MEAN + UNIT * x[..., :1]) * self.times.to(x)
        sine, cosine = turns.sin(), turns.cos()
        error = x[..., 1:2] * sine + x[..., 2:3] * cosine + x[..., 3:] - self.values.to(x)
        return sine, cosine, error

    def energy(self, x: Tensor) -> Tensor:
        """Return U, shape (…), in nats."""
        x = x.double()
        prior = (UNIT / PRIOR_STD * x[..., 0]).square() + x[..., 1:].square().sum(-1)
        return (self._parts(x)[2] / NOISE_STD).square().sum(-1) / 2 + prior / 2

    def gradient(self, x: Tensor) -> Tensor:
        """Return its gradient, shape (…, 4)."""
        sine, cosine, error = self._parts(x)
        error = error / NOISE_STD**2
        slope = 2 * math.pi * UNIT * self.times.to(x) * (x[..., 1:2] * cosine - x[..., 2:3] * sine)
        of_data = [(error * part).sum(-1) for part in (slope, sine, cosine, torch.ones_like(sine))]
        return torch.stack(of_data, -1) + x * x.new_tensor([(UNIT / PRIOR_STD) ** 2, 1, 1, 1])

    def masses(self) -> Tensor:
        """Return the posterior mass in each cell of f, by quadrature over f and the closed form over a, b and c."""
        fine = 100
        f = torch.linspace(*RANGE, CELLS * fine + 1).double()[:-1] + (RANGE[1] - RANGE[0]) / CELLS / fine / 2
        turns = 2 * math.pi * f[:, None] * self.times.double()
        design = torch.stack([turns.sin(), turns.cos(), torch.ones_like(turns)], -1)
        covariance = design @ design.transpose(1, 2) + NOISE_STD**2 * torch.eye(COUNT).double()
        law = torch.distributions.MultivariateNormal(torch.zeros(COUNT).double(), covariance)
        logs = law.log_prob(self.values.double()) - ((f - PRIOR_MEAN) / PRIOR_STD).square() / 2
        return logs.softmax(0).reshape(CELLS, fine).sum(1)


def draws(target: Wave, method: str, repeats: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return all repeats' draws (S, R·P, 4) and log-weights (S, R·P), -inf where a state is no draw."""
    own = torch.Generator().manual_seed(derive_seed(seed, "starts"))
    starts = torch.randn(repeats * CHAINS, 4, generator=own) * torch.tensor([PRIOR_STD / UNIT, 1, 1, 1])
    pilot = round(PILOT * STEPS)
    options: dict[str, Any] = {"lr": LR, "initial": starts, "num_steps": STEPS, "num_chains": len(starts)}
    options |= {"keep_every": EVERY, "burn_in": pilot, "seed": derive_seed(seed, "wave's chains"), "compile": False}
    if method.startswith("contour"):
        warm = simulate(target, **options | {"num_steps": pilot, "keep_every": 1, "burn_in": pilot // 2})
        energies = warm.energies[:, :CHAINS]  # those of one repeat choose for all
        if method == "contour, auto":
            choice = choose_contour(energies)
            contour, first = choice.contour, choice.initial_state(energies)
            state = ContourState(*(part.expand(repeats, -1) for part in first)) if repeats > 1 else first
            print(f"  {choice.sentence}")
        else:
            rules = ContourRules(0.75, scheme="original")
            contour, state = Contour(EnergyPartition.from_energies(energies, 50), rules), None
        run = ContourRun(contour, DecayingStepSize(), shared=True, groups=repeats, state=state)
        options |= {"contour": run, "num_steps": STEPS - pilot, "burn_in": 0, "initial": warm.positions[-1]}
    elif method == "replica exchange":
        options |= {"exchange": ExchangeRun(LADDER)}
    done = simulate(target, **options)
    log_weights = done.log_weights.clone()
    if done.slots is not None:
        log_weights[done.slots != 0] = -torch.inf
    return done.positions, log_weights


def distances(target: Wave, method: str, repeats: int, seed: int) -> list[float]:
    """Return the total variation of each repeat."""
    positions, log_weights = draws(target, method, repeats, seed)
    low, high = RANGE
    cells = (((PRIOR_MEAN + UNIT * positions[..., 0].double()) - low) / (high - low) * CELLS).long().clamp(0, CELLS - 1)
    found, truth = [], target.masses()
    for repeat in range(repeats):
        own = slice(repeat * CHAINS, (repeat + 1) * CHAINS)
        weights = log_weights[:, own].double().flatten().softmax(0)
        masses = torch.zeros(CELLS).double().index_add(0, cells[:, own].flatten(), weights)
        found.append(float((masses - truth).abs().sum() / 2))
    return found


METHODS = ("plain", "contour, auto", "contour, zeta 0.75", "replica exchange")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    measure_quietly()
    table = []
    for seed in range(chosen.data):
        target = Wave(seed)
        truth = target.masses()
        centres = torch.linspace(*RANGE, CELLS + 1).double()[:-1] + (RANGE[1] - RANGE[0]) / CELLS / 2
        prior = (-((centres - PRIOR_MEAN) / PRIOR_STD).square() / 2).softmax(0)
        cells = [str(seed), f"{1 / float(truth.square().sum()):.1f}", f"{float((prior - truth).abs().sum() / 2):.2f}"]
        for method in METHODS:
            values = torch.tensor(distances(target, method, chosen.repeats, seed))
            cells.append(f"{values.mean():.3f} ± {values.std() / math.sqrt(len(values)):.3f}")
        table.append(cells)
        print(cells, flush=True)
    header = ["data", "cells of the posterior", "prior", *METHODS]
    print(table_of(header, table))
    if chosen.out is not None:
        content = {
            "title": "The frequency of a wave, at equal gradients",
            "command": f"python -m tests.benchmarks.frequency --data {chosen.data} --repeats {chosen.repeats}",
            "n": f"{chosen.repeats} repeats",
            "date": date.today().isoformat(),
            "header": header,
            "rows": table,
        }
        chosen.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
