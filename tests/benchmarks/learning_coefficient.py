"""Learning coefficients of linear networks beside closed forms: `python -m tests.benchmarks.learning_coefficient`.

Prints a table: size, number of weights, λ, the estimate with its standard error, seconds, and the same of devinterp
where that package is installed (1.3.2 is the last version that takes any loss: `uv run --with devinterp==1.3.2 python
-m …`), on the same network with the same n·β, γ, chains, steps and draws.
"""

import argparse
import copy
import functools
import importlib.util
import logging
import time
import warnings
from typing import Any

import torch
from torch import nn

from lightning_sgmcmc import SGHMC, SGLD, Gaussian, UnderdampedLangevin
from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.singular import learning_coefficient
from tests.support.singular import DEEP, REDUCED_RANK, LinearNetworkProblem

NBETA, GAMMA, CHAINS = 4000.0, 1.0, 8
SAMPLERS: dict[str, tuple[Any, float]] = {
    "SGLD": (SGLD, 0.02),
    "SGHMC": (functools.partial(SGHMC, friction=0.1), 0.02),
    "BAOAB": (functools.partial(UnderdampedLangevin, integrator="baoab", friction=5.0), 0.02),
}
"""Samplers with their lr."""


def ours(problem: LinearNetworkProblem, sampler: str, steps: int, seed: int) -> tuple[str, float]:
    """Return the estimate as text, and seconds."""
    factory, lr = SAMPLERS[sampler]
    begun = time.perf_counter()
    found = learning_coefficient(
        problem.network(),
        problem.data(),
        Gaussian(1.0),
        gamma=GAMMA,
        nbeta=NBETA,
        sampler=factory,
        lr=lr,
        num_steps=steps,
        num_chains=CHAINS,
        batch_size=problem.num_data,
        loss="step",
        seed=seed,
        module={"chain_execution": "vmap", "compile": False},
    )
    mark = "" if found.verdict == "ok" else f" ({found.verdict})"
    return f"{found.value:.2f} ± {found.standard_error:.2f}{mark}", time.perf_counter() - begun


class HalfSquares(nn.Module):
    """The loss of `Gaussian(1)` without its constant: half the squared error, the mean over data."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().sum(1).mean() / 2


class Whole(torch.utils.data.Dataset[Any]):
    """All data as one item, so that no rows are collated, in the form from which devinterp reads a batch size."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        return [self.tensors]


def devinterp(problem: LinearNetworkProblem, steps: int, seed: int) -> tuple[str, float]:
    """Return the estimate of devinterp 1.x by SGLD as text, and seconds; its step is ε = 2·lr/(n·β)."""
    from devinterp.optim.sgld import SGLD as TheirSGLD  # type: ignore[import-not-found]
    from devinterp.slt.sampler import estimate_learning_coeff_with_summary  # type: ignore[import-not-found]

    loss = HalfSquares()
    data = Whole(problem.data())
    loader = torch.utils.data.DataLoader(data, batch_size=len(data))
    begun = time.perf_counter()
    found = estimate_learning_coeff_with_summary(
        copy.deepcopy(problem.network()),
        loader=loader,
        evaluate=lambda model, batch: loss(model(batch[0][0]), batch[1][0]),
        sampling_method=TheirSGLD,
        optimizer_kwargs={"lr": 2 * SAMPLERS["SGLD"][1] / NBETA, "localization": GAMMA, "nbeta": NBETA},
        num_chains=CHAINS,
        num_draws=3 * steps // 4,
        num_burnin_steps=steps // 4,
        seed=seed,
        verbose=False,
    )
    return f"{found['llc/mean']:.2f} ± {found['llc/std'] / CHAINS**0.5:.2f}", time.perf_counter() - begun


def row(problem: LinearNetworkProblem, options: argparse.Namespace) -> list[str]:
    weights = sum(parameter.numel() for parameter in problem.network().parameters())
    value, seconds = ours(problem, options.sampler, options.steps, options.seed)
    cells = [problem.name, str(weights), f"{problem.truth.value:g}", value, f"{seconds:.1f}"]
    if importlib.util.find_spec("devinterp") is not None:
        value, seconds = devinterp(problem, options.steps, options.seed)
        cells += [value, f"{seconds:.1f}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampler", choices=SAMPLERS, default="BAOAB", help="ours; devinterp's is SGLD")
    parser.add_argument("--sizes", type=int, default=10, help="of the five two-layer and five deeper networks")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    columns = ["widths", "weights", "λ", "ours", "seconds"]
    if importlib.util.find_spec("devinterp") is not None:
        columns += ["devinterp", "seconds"]
    rows = [row(problem, options) for problem in (*REDUCED_RANK, *DEEP)[: options.sizes]]
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    main()
