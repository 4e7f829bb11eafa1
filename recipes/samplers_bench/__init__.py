"""Which sampler: all of them at equal gradient evaluations, on posteriors whose moments or functions are known.

* Four densities under four kinds of gradient noise, whose root mean square is that of the gradient itself: twenty
  Gaussian coordinates of variances from 0.001 to 1, along the axes or turned; a banana; a funnel. Sixteen chains start
  around the origin, with a standard deviation of 0.1.
* A linear and a logistic regression with mini-batches of 25, the same number of chains, from around the mode.
* Three small networks whose functions are known from Hamiltonian Monte Carlo, by `Trainer.fit`: four chains, batches of
  a quarter of the data, after a warm start by Adam, which counts.

The error is the root mean square, over x and x² of all coordinates, of the error of the draws' mean over the function's
standard deviation; on networks the distance to the truth, as in `contour_pays`. Each sampler has the friction 0.1 a
step. Its step size is the best of a ladder below the largest stable one, chosen by the same error on another seed; so
the table compares samplers at their best, and nobody's budget has paid for that choice. Preconditioners adapt in the
burn-in, of 30 % of the steps, and are then frozen. Rows "over SGHMC's" are geometric means over all problems of
a kind of the ratio of a sampler's error to that of SGHMC in the same repeat; below 1 it is better. Chains that diverge
count with an error of 10.

`GGMC` and `AMAGOLD` have a Metropolis test for each ten steps, on networks (by `MetropolisTest`) for each epoch; else
both are `OBABO`. A test counts as a gradient of all data: one gradient of a density, 20 batches of the linear
regression. `NUTS` is the reference: its gradients are of all data and without noise, so it shows what noise costs. It
counts in epochs: on a density a gradient is a gradient, and on the linear regression it has 1 for 20 batches,
warm-up and search for step sizes included. It has no row on networks, whose truth is made of such chains and whose
budget ends within its warm-up. Parameter expansion (`expand`) has no row: densities and regressions have no products of
matrices, and on networks its prior on the factors makes another posterior, whose distance to this truth says nothing.

quick is one repeat of short chains with one of the noises and the smallest network; full has two repeats, all noises
and three networks.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from lightning_sgmcmc.recipes.samplers_bench.methods import METHODS, NUTS, Settings
from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings

BATCHES = "mini-batches"
KINDS = {
    "Gaussians": ("Gaussian", "turned Gaussian"),
    "banana and funnel": ("banana", "funnel"),
    "regressions": ("linear regression", "logistic regression"),
}
NOISES = ("isotropic", "anisotropic", "correlated", "spatially varying")
BASE = "SGHMC"
Problem = tuple[str, str]
"""A problem's name and its noise."""


def run(options: Options) -> list[Row]:
    """Run every sampler on every problem, return the table."""
    settings = read_settings(Settings, options)
    methods = options.chosen((*METHODS, NUTS))
    repeats = len(options.repeated(settings.repeats))
    kinds = {kind: problems_of(kind, settings.noises) for kind in KINDS}
    kinds["networks"] = [(name, BATCHES) for name in settings.networks]
    of_problem = {
        problem: [method for method in methods if method != NUTS or kind != "networks"]
        for kind, problems in kinds.items()
        for problem in problems
    }
    jobs = [(*problem, method, options.seed, repeats) for problem, own in of_problem.items() for method in own]
    found = run_jobs(one, jobs, options, settings)
    by_problem = {
        (name, noise): {method: found[name, noise, method, options.seed, repeats] for method in own}
        for (name, noise), own in of_problem.items()
    }
    rows = []
    for kind, members in kinds.items():
        if members:
            rows += summary(kind, [by_problem[member] for member in members])
    for problem, of_methods in by_problem.items():
        rows += rows_of(problem, of_methods)
    return rows


def problems_of(kind: str, noises: Sequence[str] = NOISES) -> list[Problem]:
    """Return the problems of a kind, densities with each of the noises."""
    noises = (BATCHES,) if kind == "regressions" else noises
    return [(name, noise) for name in KINDS[kind] for noise in noises]


def one(
    problem: str, noise: str, method: str, seed: int, repeats: int, settings: Settings, options: Options
) -> dict[str, Any]:
    """Return the step size of a sampler on a problem, over the largest stable one, and the figures of its repeats.

    The step size of NUTS is None.
    """
    settings = replace(settings, repeats=repeats)
    if problem in settings.networks:
        from lightning_sgmcmc.recipes.samplers_bench.chains import best_fits

        factor, fits = best_fits(problem, method, settings, seed)
        return {"factor": factor, "runs": [{"error": fit["distance"], "nll": fit["nll"]} for fit in fits]}
    from lightning_sgmcmc.recipes.samplers_bench.chains import best_runs

    chosen, runs = best_runs(problem, noise, method, settings, seed)
    return {"factor": chosen, "runs": [asdict(figures) for figures in runs]}


LABELS = {
    "error": "error",
    "ess": "effective draws for 1,000 gradients",
    "seconds": "processor seconds of a step",
    "nll": "NLL of test data (nats)",
}


def rows_of(problem: Problem, found: dict[str, dict[str, Any]]) -> list[Row]:
    """Return the rows of a problem, given what `one` returns by sampler: its figures and its step size."""
    rows, title = [], f"{problem[0]}, {problem[1]}"
    for method, outcome in found.items():
        for key in outcome["runs"][0]:
            rows.append(mean_row(f"{title}: {method}", LABELS[key], [figures[key] for figures in outcome["runs"]]))
        if outcome["factor"] is not None:
            rows.append(Row(f"{title}: {method}", "step / largest stable", outcome["factor"]))
    return rows


def summary(kind: str, found: list[dict[str, dict[str, Any]]]) -> list[Row]:
    """Return a row for each sampler: the geometric mean over problems of its error over that of SGHMC.

    `found` has for each problem what `one` returns, by sampler; without SGHMC there are no rows.
    """
    rows = []
    for method in found[0]:
        if BASE not in found[0] or method == BASE:
            continue
        ratios = [
            math.exp(sum(math.log(mine["error"] / base["error"]) for mine, base in pairs) / len(pairs))
            for pairs in zip(*(zip(of[method]["runs"], of[BASE]["runs"], strict=True) for of in found), strict=True)
        ]
        rows.append(mean_row(f"{kind}: {method}", f"error over {BASE}'s", ratios))
    return rows
