"""Runs of the library against full-gradient HMC on small networks: `python -m tests.benchmarks.truth --out DIR`.

Every setting is a fit through `Trainer.fit` at temperature 1, and the measure is the functions that its samples
predict: W₁ between the laws of the network's output at an input, over the posterior's standard deviation there, the
mean over a grid of inputs. The yardstick is the same distance between two HMC chains. Parameters would not do, since
hidden units can be exchanged. Writes truth.md, truth.json and truth.png; keeps the HMC draws in DIR.
"""

import argparse
import functools
import json
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_sgmcmc import (
    SGHMC,
    BayesianModule,
    Categorical,
    Gaussian,
    GaussianPrior,
    HierarchicalPrior,
    UnderdampedLangevin,
)
from lightning_sgmcmc.batches import ResumableLoader
from lightning_sgmcmc.callbacks import SampleCollector, SamplingSchedule, WarmStart
from lightning_sgmcmc.datamodules import TensorBatches
from lightning_sgmcmc.diagnostics.draws import chain_diagnostics
from lightning_sgmcmc.plain import markdown_table
from lightning_sgmcmc.recipes.shared.small_networks import NETWORKS, curve
from tests.support.hmc import Array, Target, between_chains, distance, hmc
from tests.support.trainers import quiet_trainer


@dataclass(frozen=True)
class Problem:
    """A posterior, and the inputs at which functions are compared."""

    name: str
    target: Target
    grid: Array


@dataclass(frozen=True)
class Setting:
    """A fit: BAOAB with the full gradient, or SGHMC with mini-batches.

    Attributes:
        problem: name of the problem.
        steps: optimizer steps after the warm start.
        lr: the sampler's.
        friction: the sampler's.
        batch: batch size, 0 for all data.
        chains: stacked chains.
        draws: samples of each chain, at most.
        warm_start: steps of Adam.
    """

    problem: str
    steps: int
    lr: float
    friction: float
    batch: int = 0
    chains: int = 4
    draws: int = 500
    warm_start: int = 500


def regression(name: str, sizes: tuple[int, ...], count: int, noise_std: float, nu: float | None = None) -> Problem:
    """Return noisy data of a smooth function on two intervals with a gap between them."""
    x, y = curve(count, noise_std)
    return Problem(name, Target(sizes, "gaussian", x, y, 1.0, noise_std, nu), np.linspace(-2.5, 2.5, 41)[:, None])


def classification() -> Problem:
    """Return three classes around the origin of a plane."""
    known = NETWORKS["classification"]
    return Problem("classification", Target(known.sizes, "categorical", known.x, known.y), known.grid)


PROBLEMS = {
    problem.name: problem
    for problem in (
        regression("regression", (1, 12, 12, 1), 200, 0.1),
        classification(),
        regression("hierarchical", (1, 10, 1), 100, 0.2, nu=1.0),
        regression("smallest", (1, 4, 1), 40, 0.3),
    )
}


def module_of(problem: Problem, **options: Any) -> BayesianModule:
    """Return the library's module of a problem's posterior."""
    target = problem.target
    layers: list[nn.Module] = []
    for inputs, outputs in zip(target.sizes[:-1], target.sizes[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    fixed, drawn = GaussianPrior(target.prior_std), HierarchicalPrior("layer", target.nu or 1.0, target.prior_std)
    return BayesianModule(
        net=nn.Sequential(*layers[:-1]),
        likelihood=Categorical() if target.likelihood == "categorical" else Gaussian(target.noise_std),
        prior=fixed if target.nu is None else drawn,
        num_data=len(target.x),
        **options,
    )


def functions(problem: Problem, outputs: Any) -> Array:
    """Return what is compared: means, or class probabilities, shape (draws, columns)."""
    values = torch.tensor(outputs, dtype=torch.float64)
    if problem.target.likelihood == "categorical":
        values = values.softmax(-1)
    found: Array = values.flatten(1).numpy()
    return found


def reference(problem: Problem, chains: int, warm_up: int, draws: int, seed: int = 0) -> Array:
    """Return the functions of HMC draws, shape (chains, draws, columns)."""
    states, _ = hmc(problem.target, chains, warm_up, draws, seed=seed)
    return np.stack([functions(problem, problem.target.outputs(chain, problem.grid)) for chain in states])


def run(setting: Setting, seed: int = 0) -> tuple[Array, dict[str, Any]]:
    """Fit; return the functions of its samples, shape (chains, draws, columns), and its plan."""
    problem = PROBLEMS[setting.problem]
    torch.manual_seed(seed)
    sampler: Any = SGHMC if setting.batch else UnderdampedLangevin
    integrator = {} if setting.batch else {"integrator": "baoab"}
    module = module_of(
        problem,
        sampler=functools.partial(sampler, friction=setting.friction, **integrator),
        lr=setting.lr,
        num_chains=setting.chains,
        chain_execution="vmap",
        seed=seed,
    )
    burn_in = setting.steps // 4
    every = max(1, (setting.steps - burn_in) // setting.draws)
    collector = SampleCollector(in_memory=True)
    callbacks = [SamplingSchedule(burn_in_steps=burn_in, every_n_steps=every), collector]
    if setting.warm_start:
        callbacks.insert(0, WarmStart(lr=0.01, steps=setting.warm_start))
    x = torch.tensor(problem.target.x, dtype=torch.float32)
    y = torch.tensor(problem.target.y)
    data = TensorBatches(x, y if problem.target.likelihood == "categorical" else y.float())
    begun = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(max_steps=setting.steps + setting.warm_start, callbacks=callbacks).fit(
            module, ResumableLoader(data, batch_size=setting.batch or len(x), seed=seed)
        )
    seconds, plan, posterior = time.monotonic() - begun, module.plan, collector.posterior
    assert plan is not None
    assert posterior is not None
    grid = torch.tensor(problem.grid, dtype=torch.float32)
    prediction: Any = posterior.predict(grid, return_samples=True)
    is_classes = problem.target.likelihood == "categorical"
    values = prediction.sample_probabilities if is_classes else prediction.sample_means
    order = np.array([sample.chain for sample in posterior])
    found = values.double().flatten(1).numpy()
    chains = np.stack([found[order == chain] for chain in range(setting.chains)])
    facts = {
        "relaxation_times": plan.relaxation_times,
        "independent_draws": plan.independent_draws,
        "kind": None if plan.kind is None else plan.kind.value,
        "sentences": plan.sentences(),
        "warnings": plan.warnings,
        "seconds": seconds,
    }
    return chains, facts


GAUSSIAN = 1.28
"""√n times the expected W₁ between n independent draws of a normal distribution and its law, in its standard deviation:
√(2/π)·∫√(Φ(1-Φ))."""


def compared(setting: Setting, draws: Array, facts: dict[str, Any], truth: Array) -> dict[str, Any]:
    """Return a row of the table.

    Args:
        setting: of the fit.
        draws: functions of its samples, shape (chains, draws, columns).
        facts: of its plan.
        truth: functions of the HMC draws, of the same form.
    """
    pooled = truth.reshape(-1, truth.shape[-1])
    std = pooled.std(0)
    every = max(1, truth.shape[-1] // 12)
    found, of_hmc = (
        [chain_diagnostics(each[:, :, column]) for column in range(0, each.shape[-1], every)] for each in (draws, truth)
    )
    yardstick = between_chains(list(truth), std)
    ours = distance(draws.reshape(-1, draws.shape[-1]), pooled, std)
    planned = facts["independent_draws"]
    return {
        **asdict(setting),
        "distance": ours,
        "between_hmc": yardstick,
        "ratio": ours / yardstick,
        "planned_distance": None if planned is None else GAUSSIAN / planned**0.5,
        "std_ratio": float((draws.reshape(-1, draws.shape[-1]).std(0) / std).mean()),
        "between_ours": between_chains(list(draws), std),
        "rhat": float(np.max([one.rhat for one in found])),
        "ess": float(np.median([one.ess_bulk for one in found])),
        "ess_of_hmc": float(np.median([one.ess_bulk for one in of_hmc])),
        **facts,
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    names = {
        "problem": "posterior",
        "batch": "batch",
        "steps": "steps",
        "lr": "lr",
        "relaxation_times": "relaxation times planned",
        "independent_draws": "draws planned",
        "kind": "called",
        "ess": "ESS",
        "rhat": "R-hat",
        "distance": "distance",
        "planned_distance": "of so many draws",
        "between_hmc": "HMC to HMC",
        "ratio": "ratio",
        "std_ratio": "std over truth's",
    }
    return markdown_table(list(names.values()), [[_shown(row[name]) for name in names] for row in rows])


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def draw(name: str, axis: Any, truth: Array, chains: Array, title: str) -> None:
    """Draw the central 90 % and the median of the functions along the grid."""
    at = PROBLEMS[name].grid[:, 0] if PROBLEMS[name].grid.shape[1] == 1 else np.arange(truth.shape[-1])
    for draws, color, label in ((truth, "0.4", "HMC"), (chains, "C1", "fit")):
        low, middle, high = np.quantile(draws.reshape(-1, draws.shape[-1]), (0.05, 0.5, 0.95), axis=0)
        axis.fill_between(at, low, high, color=color, alpha=0.3, linewidth=0)
        axis.plot(at, middle, color=color, linewidth=1, label=label)
    axis.set_title(title, fontsize=8)
    axis.legend(fontsize=6)


SETTINGS = [
    Setting("smallest", 3_000, 3e-3, 2.0),
    Setting("classification", 600, 0.05, 2.0, draws=150, warm_start=200),
    Setting("regression", 3_000, 1e-3, 2.0),
    Setting("regression", 20_000, 1e-3, 2.0),
    Setting("regression", 3_000, 3e-5, 0.1, batch=50),
    Setting("classification", 120, 0.03, 2.0),
    Setting("classification", 4_000, 0.03, 2.0),
    Setting("hierarchical", 1_000, 3e-3, 2.0),
    Setting("hierarchical", 10_000, 3e-3, 2.0),
]
"""Each posterior at the length that the plan wants, and longer; SGHMC with mini-batches is far from it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="part of the problems' names")
    parser.add_argument("--draws", type=int, default=300, help="draws of each HMC chain, after as many to adapt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    rows, pictures = [], []
    for setting in SETTINGS:
        if options.only not in setting.problem:
            continue
        kept = options.out / f"hmc_{setting.problem}.npy"
        if not kept.exists():
            np.save(kept, reference(PROBLEMS[setting.problem], 4, options.draws, options.draws))
        truth = np.load(kept)
        chains, facts = run(setting)
        rows.append(compared(setting, chains, facts, truth))
        pictures.append((setting.problem, truth, chains))
        print(" ".join(f"{name}={_shown(value)}" for name, value in rows[-1].items()), flush=True)
        write(rows, pictures, options.out)


def write(rows: list[dict[str, Any]], pictures: list[tuple[str, Array, Array]], out: Path) -> None:
    """Write the table, the numbers and the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (out / "truth.json").write_text(json.dumps(rows, indent=1) + "\n")
    (out / "truth.md").write_text(as_table(rows))
    figure, axes = pyplot.subplots(1, len(rows), figsize=(3.2 * len(rows), 3), squeeze=False, constrained_layout=True)
    for axis, row, (name, truth, chains) in zip(axes[0], rows, pictures, strict=True):
        title = f"{name}, {row['steps']:,} steps\n{_shown(row['relaxation_times'])} relaxation times"
        draw(name, axis, truth, chains, f"{title}, ratio {row['ratio']:.2g}")
    figure.savefig(out / "truth.png", dpi=80)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
