"""Joint NLL at equal cost, beside ensembles, on tasks of the Neural Testbed's kind with 1 to 100 inputs.

`python -m tests.benchmarks.testbed [--inputs 1 10 100] [--seeds 4] [--json FILE]`

A task has two classes with the probabilities of a random network with two hidden layers of 50, whose logits are divided
by 0.1, so that labels are nearly sure where the network is not near 0. There are 10 training data for each input
dimension, at least 20, and as many for validation. Every method makes the same number of gradients. Scores are over the
truth's own: 0 is a method that knows the probabilities. The joint NLL is of 10 inputs, drawn from pairs of new points,
with fresh labels (Osband et al. 2022). A mean is over tasks; the interval is that of the difference to the ensemble.
"""

import argparse
import json
import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sgmcmc import SGHMC, BayesianModule, Categorical
from lightning_sgmcmc.callbacks import AutoSampling, CyclicalSchedule, DeepEnsemble, SampleCollector, SamplingSchedule
from lightning_sgmcmc.datamodules import TableDataModule
from lightning_sgmcmc.diagnostics import joint_nll
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.seeding import derive_seed
from tests.benchmarks.small_networks import QUIET

TAU, PAIRS, NEW = 10, 1_000, 1_000
WIDTH, SHARPNESS = 50, 10.0
BATCH, GRADIENTS, MEMBERS = 10, 10_000, 10


def network(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


class Task:
    """A random network's classes: training, validation and new data, and the new data's true probabilities."""

    def __init__(self, inputs: int, seed: int) -> None:
        self.inputs, self.seed = inputs, seed
        own = torch.Generator().manual_seed(derive_seed(seed, "testbed", inputs))
        sizes = [(WIDTH, inputs), (WIDTH, WIDTH), (2, WIDTH)]
        layers = [torch.randn(size, generator=own) * (2 / size[1]) ** 0.5 for size in sizes]
        count = max(20, 10 * inputs)
        x = torch.randn(2 * count + NEW, inputs, generator=own)
        hidden = x
        for layer in layers[:-1]:
            hidden = (hidden @ layer.T).relu()
        probabilities = (SHARPNESS * (hidden @ layers[-1].T) / math.sqrt(2)).softmax(1)
        y = torch.multinomial(probabilities, 1, generator=own)[:, 0]
        self.data = TableDataModule(
            x[: 2 * count],
            y[: 2 * count],
            min(BATCH, count),
            standardise=False,
            task="classes",
            splits=(range(count), range(count, 2 * count), []),
        )
        self.count, self.x, self.truth = count, x[2 * count :], probabilities[2 * count :]
        # τ inputs of two points each, and their labels
        pairs = torch.randint(NEW, (PAIRS, 2), generator=own)
        self.groups = pairs.gather(1, torch.randint(2, (PAIRS, TAU), generator=own))
        self.labels = torch.multinomial(self.truth[self.groups.view(-1)], 1, generator=own).view(PAIRS, TAU)

    def scores(self, log_probabilities: Tensor, weights: Tensor | None = None) -> dict[str, float]:
        """Return the NLL and the joint NLL of log p(k | x, θ_s), shape (S, n, 2)."""
        every = log_probabilities[:, self.groups.view(-1)].gather(
            2, self.labels.view(1, -1, 1).expand(len(log_probabilities), -1, 1)
        )[..., 0]
        score = joint_nll(every, torch.arange(PAIRS * TAU).view(PAIRS, TAU), weights)
        return {"nll": score.marginal_nll, "joint": score.nll}


METHODS: dict[str, tuple[int, dict[str, Any], Callable[[int], list[pl.Callback]]]] = {
    "one network": (1, {"sampler": SGHMC, "lr": 0.1}, lambda epochs: [DeepEnsemble()]),
    "ensemble of 10": (MEMBERS, {"sampler": SGHMC, "lr": 0.1}, lambda epochs: [DeepEnsemble()]),
    "AutoSampling": (2, {}, lambda epochs: [AutoSampling(num_draws=40)]),
    "AutoSampling, ood": (2, {}, lambda epochs: [AutoSampling("ood", num_draws=40)]),
    "SGHMC, τ = 1": (
        2,
        {"sampler": SGHMC, "lr": 0.02},
        lambda epochs: [SamplingSchedule(burn_in_epochs=epochs // 3, every_n_epochs=max(1, epochs // 60))],
    ),
    "cyclical SGHMC, τ = 1": (
        2,
        {"sampler": SGHMC, "lr": 0.1},
        lambda epochs: [CyclicalSchedule(num_cycles=4, exploration=0.5, samples_per_cycle=10)],
    ),
}
"""Number of chains, arguments of the module and schedule of each method."""


def run(task: Task, method: str) -> dict[str, float]:
    """Return a method's scores on a task, less the truth's."""
    chains, arguments, callbacks = METHODS[method]
    torch.manual_seed(derive_seed(task.seed, "network"))
    module = BayesianModule(
        network(task.inputs), Categorical(), 1.0 / math.sqrt(2), num_chains=chains, seed=task.seed, **arguments
    )
    steps = max(1, task.count // BATCH)
    epochs = GRADIENTS // (chains * steps) if chains > 1 else GRADIENTS // (MEMBERS * steps)
    trainer = pl.Trainer(max_epochs=epochs, callbacks=[*callbacks(epochs), SampleCollector(in_memory=True)], **QUIET)
    trainer.fit(module, datamodule=task.data)
    posterior = module.posterior
    assert posterior is not None
    prediction = posterior.predict(task.x, return_samples=True)
    found = task.scores(prediction.sample_probabilities.clamp_min(1e-12).log(), posterior.weights)
    truth = task.scores(task.truth.clamp_min(1e-12).log()[None])
    return {name: value - truth[name] for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--inputs", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "lightning", "lightning_sgmcmc"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print("| inputs | method | NLL over the truth's | joint NLL | less than the ensemble's by |\n|---|---|---|---|---|")
    every = {}
    for inputs in options.inputs:
        tasks = [Task(inputs, seed) for seed in range(options.seeds)]
        found = {method: [run(task, method) for task in tasks] for method in options.methods}
        every[inputs] = found
        ensemble = found.get("ensemble of 10")
        for method, scores in found.items():
            nll, joint = (torch.tensor([score[name] for score in scores]) for name in ("nll", "joint"))
            gain = ""
            if ensemble is not None and scores is not ensemble:
                difference = torch.tensor([score["joint"] for score in ensemble]) - joint
                error = float(difference.std()) / math.sqrt(len(scores)) if len(scores) > 1 else math.nan
                gain = f"{float(difference.mean()):+.3f} ± {1.96 * error:.3f}"
            print(f"| {inputs} | {method} | {nll.mean():.3f} | {joint.mean():.3f} | {gain} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()
