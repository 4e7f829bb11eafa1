"""The picture of README: `python -m tests.benchmarks.readme_picture --out docs/readme.png`.

A regression network (1-12-12-1, N = 200 with a gap in the data): its exact posterior by full-gradient HMC, four
networks that AdamW trains, and four chains of a fit with as many gradients. Each panel has the median and the central
90 % of the function, and in its title the distance from the posterior: W₁ over the posterior's standard deviation, the
mean over inputs. HMC's own chains are as far from one another as the last figure printed.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from lightning_sgmcmc.batches import ResumableLoader
from lightning_sgmcmc.callbacks import DeepEnsemble, SampleCollector
from lightning_sgmcmc.datamodules import TensorBatches
from tests.benchmarks.truth import PROBLEMS, Setting, module_of, reference, run
from tests.support.hmc import Array, between_chains, distance
from tests.support.trainers import quiet_trainer

PROBLEM = PROBLEMS["regression"]
FIT = Setting("regression", 3_000, 1e-3, 2.0)
GREY, ORANGE, BLUE = "#777777", "#D55E00", "#0072B2"


def ensemble(steps: int, seed: int = 0) -> Array:
    """Return the functions of four networks, shape (4, 1, columns), each trained by so many steps."""
    torch.manual_seed(seed)
    module = module_of(PROBLEM, lr=0.003, num_chains=4, chain_execution="vmap", seed=seed)
    collector = SampleCollector(in_memory=True)
    data = TensorBatches(*(torch.tensor(each, dtype=torch.float32) for each in (PROBLEM.target.x, PROBLEM.target.y)))
    trainer = quiet_trainer(max_steps=steps, callbacks=[DeepEnsemble(optimizer=torch.optim.AdamW), collector])
    trainer.fit(module, ResumableLoader(data, batch_size=len(PROBLEM.target.x), seed=seed))
    assert collector.posterior is not None
    grid = torch.tensor(PROBLEM.grid, dtype=torch.float32)
    prediction = collector.posterior.predict(grid, return_samples=True)
    values: Array = prediction.sample_means.double().flatten(1).numpy()  # type: ignore[union-attr]
    return values[:, None]


def draw(panels: dict[str, tuple[str, Array]], truth: Array, path: Path) -> None:
    """Draw one panel for each title, with HMC's band below.

    Args:
        panels: colour and functions, shape (chains, draws, columns), by title.
        truth: functions of the HMC draws, of the same form.
        path: the PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    at = PROBLEM.grid[:, 0]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(7.2, 2.7), sharey=True, constrained_layout=True)
    for axis, (title, (color, values)) in zip(axes, panels.items(), strict=True):
        for draws, shade, label in ((truth, GREY, "posterior (HMC)"), (values, color, title.split("\n")[0])):
            low, middle, high = np.quantile(draws.reshape(-1, draws.shape[-1]), (0.05, 0.5, 0.95), axis=0)
            axis.fill_between(at, low, high, color=shade, alpha=0.35, linewidth=0)
            axis.plot(at, middle, color=shade, linewidth=1.2, linestyle="--" if shade == GREY else "-", label=label)
        axis.plot(PROBLEM.target.x[:, 0], PROBLEM.target.y[:, 0], ".", color="black", markersize=1.5)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("input")
        axis.legend(fontsize=7, loc="upper left")
    axes[0].set_ylabel("output")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the PNG to write")
    parser.add_argument("--draws", type=int, default=300, help="draws of each HMC chain, after as many to adapt")
    parser.add_argument("--keep", type=Path, help="file with the HMC draws, read if it exists and else written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = options.keep
    truth = np.load(kept) if kept and kept.exists() else reference(PROBLEM, 4, options.draws, options.draws)
    if kept:
        np.save(kept, truth)
    pooled = truth.reshape(-1, truth.shape[-1])
    std = pooled.std(0)
    fit, facts = run(FIT)
    members = ensemble(FIT.steps + FIT.warm_start)
    panels = {}
    for title, color, values in (("ensemble of four networks", BLUE, members), ("lightning-sgmcmc", ORANGE, fit)):
        away = distance(values.reshape(-1, values.shape[-1]), pooled, std)
        panels[f"{title}\ndistance from the posterior {away:.2f}"] = (color, values)
        print(f"{title}: {away:.3f}")
    print(f"HMC chain to chain: {between_chains(list(truth), std):.3f}; the fit is a {facts['kind']}")
    draw(panels, truth, options.out)


if __name__ == "__main__":
    main()
