"""The last layer of a trained network, sampled on few data of new classes (MNIST), beside optimization at equal cost.

A small CNN learns the digits 0 to 4. It then gets a new last layer for the digits 5 to 9, of which 50 images each are
known. Its other layers are frozen: all chains share them, they compute the features of all images once
(`FeatureDataModule`), and a sample has only the last layer's weights.

* `point`: one last layer, trained by AdamW.
* `ensemble`: four, each with a quarter of the steps.
* `posterior`: four chains of SGHMC at temperature 1 from those starts, each with a quarter of the steps.

All have the same prior (weight decay) and the same number of gradient evaluations. The digits 0 to 4, which the frozen
layers know and the last layer does not, are the other distribution of the AUROC.

quick is 2 seeds (`python -m recipes last_layer --data-root DIR`), full 8.
"""

import functools
import time
from dataclasses import dataclass
from typing import Any

from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import kept_samples, quiet_trainer, resumed_fit, silence_lightning

KNOWN = 5
"""Digits of the first task; the others are the second's."""


@dataclass(frozen=True)
class Settings:
    """The settings of `last_layer.yaml`.

    Attributes:
        seeds: number of repeats.
        trunk_images, trunk_epochs, trunk_lr: of the network's training on the known digits.
        per_class: images of each new digit.
        tested: test images of each task.
        epochs: passes over the new digits' images, of all networks or chains together.
        batch: images per batch.
        chains, samples: chains or networks, and samples of all chains.
        prior_std: of the last layer.
        lr: step size of each method.
    """

    seeds: int
    trunk_images: int
    trunk_epochs: int
    trunk_lr: float
    per_class: int
    tested: int
    epochs: int
    batch: int
    chains: int
    samples: int
    prior_std: float
    lr: dict[str, float]

    @property
    def work(self) -> float:
        """The seeds, which have the same work."""
        return float(self.seeds)


METHODS = ("point", "ensemble", "posterior")
METRICS = ("accuracy", "nll", "ece", "auroc", "bytes", "gradients", "seconds")
LABELS = {
    "auroc": "AUROC against digits 0 to 4",
    "bytes": "bytes of a sample's tensors",
    "gradients": "gradient evaluations",
    "seconds": "processor seconds of a fit",
}


def run(options: Options) -> list[Row]:
    """Run all methods with every seed, return the table."""
    from lightning_sgmcmc.datamodules import MNISTDataModule

    require(MNISTDataModule(options.data_root))
    settings = read_settings(Settings, options)
    seeds, methods = options.seeds(settings.seeds), options.chosen(METHODS)
    outcomes = run_jobs(one, [(seed,) for seed in seeds], options, settings, methods)
    found = {method: [outcomes[seed,][method] for seed in seeds] for method in methods}
    rows = [
        mean_row(method, LABELS.get(name, name), [each[name] for each in found[method]])
        for method in methods
        for name in METRICS
    ]
    for other in ("point", "ensemble") if len(methods) == len(METHODS) else ():
        gains = [a["nll"] - b["nll"] for a, b in zip(found["posterior"], found[other], strict=True)]
        rows.append(mean_row(f"posterior - {other}", "nll", gains))
    return rows


def one(seed: int, settings: Settings, methods: list[str], options: Options) -> dict[str, dict[str, float]]:
    """Train the frozen layers, then fit and score the methods; return their metrics."""
    import torch

    silence_lightning()
    torch.set_num_threads(1)
    train, test = digits(options)
    generator = torch.Generator().manual_seed(seed)
    new = torch.cat([_of_digit(train, digit, generator)[: settings.per_class] for digit in range(KNOWN, 10)])
    old = torch.cat([_of_digit(train, digit, generator) for digit in range(KNOWN)])
    old = old[torch.randperm(len(old), generator=generator)[: settings.trunk_images]]
    trunk = trained((train[0][old], train[1][old]), settings, seed)
    data = (train[0][new], train[1][new] - KNOWN)
    held_out, others = test[1] >= KNOWN, test[1] < KNOWN
    count = settings.tested
    parts = ((test[0][held_out][:count], test[1][held_out][:count] - KNOWN), test[0][others][:count])
    return {method: fit_and_score(method, trunk, data, *parts, settings, seed) for method in methods}


def digits(options: Options) -> tuple[Any, Any]:
    """Return images and labels of MNIST, for training and for the test."""
    from lightning_sgmcmc.datamodules import MNISTDataModule

    source = MNISTDataModule(options.data_root, val_size=0)
    source.setup("test")
    source.setup("fit")
    normalise = source.transform()
    train, _, test = source.splits
    return (normalise(train.inputs), train.targets), (normalise(test.inputs), test.targets)


def network(classes: int) -> Any:
    """Return a small CNN whose last layer is `6`."""
    from torch import nn

    layers = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 64), nn.ReLU())
    return nn.Sequential(body, nn.Linear(64, classes))


def trained(data: Any, settings: Settings, seed: int) -> dict[str, Any]:
    """Return the weights of the first layers after training on the known digits."""
    import torch
    from torch.nn.functional import cross_entropy

    torch.manual_seed(seed)
    net = network(KNOWN)
    optimizer = torch.optim.AdamW(net.parameters(), lr=settings.trunk_lr)
    for _ in range(settings.trunk_epochs):
        for rows in torch.randperm(len(data[1])).split(100):
            optimizer.zero_grad()
            cross_entropy(net(data[0][rows]), data[1][rows]).backward()
            optimizer.step()
    return dict(net[0].state_dict())


def fit_and_score(
    method: str, trunk: dict[str, Any], data: Any, test: Any, others: Any, settings: Settings, seed: int
) -> dict[str, float]:
    """Fit the last layer on `data` and return its metrics on `test`, with `others` as the other distribution."""
    import torch
    from torch.optim import AdamW

    from lightning_sgmcmc import SGHMC, Categorical, FeatureDataModule, GaussianPrior, bayesianize
    from lightning_sgmcmc.callbacks import DeepEnsemble, SamplingSchedule
    from lightning_sgmcmc.datamodules import ArrayDataModule, Split
    from lightning_sgmcmc.diagnostics.scores import classification_metrics, out_of_distribution_metrics

    class Images(ArrayDataModule):
        def load(self) -> tuple[Split, Split, Split]:
            nothing = Split(data[0][:0], data[1][:0])
            return Split(*data), nothing, nothing

    torch.manual_seed(seed)
    net = network(10 - KNOWN)
    net[0].load_state_dict(trunk)
    chains = 1 if method == "point" else settings.chains
    steps = settings.epochs * (len(data[1]) // settings.batch) // chains
    every = steps * 3 // 4 * chains // settings.samples
    schedules = {"posterior": SamplingSchedule(burn_in_steps=steps // 4, every_n_steps=every)}
    module = bayesianize(
        net,
        "last_layer",
        Categorical(),
        prior=GaussianPrior(settings.prior_std),  # the layer is new, so its centre is 0
        chain_start="own",
        sampler=functools.partial(SGHMC, friction=0.1),
        lr=settings.lr[method],
        num_chains=chains,
        seed=seed,
    )
    trainer = quiet_trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[schedules.get(method, DeepEnsemble(optimizer=AdamW)), kept_samples()],
    )
    start = time.process_time()
    resumed_fit(trainer, module, FeatureDataModule(module, Images(settings.batch, seed=seed)))
    seconds = time.process_time() - start
    assert module.posterior is not None
    probabilities, unknown = (module.posterior.predict(x).probabilities for x in (test[0], others))
    metrics = classification_metrics(probabilities, test[1]) | out_of_distribution_metrics(probabilities, unknown)
    found = {name: float(metrics[name]) for name in ("accuracy", "nll", "ece", "auroc")}
    return found | {
        "bytes": float(sum(tensor.nbytes for tensor in module.posterior[0].own_state.values())),
        "gradients": float(module.chains.counters.gradient_evaluations * chains),
        "seconds": seconds,
    }


def _of_digit(data: Any, digit: int, generator: Any) -> Any:
    """Return the indices of a digit's images in random order."""
    import torch

    rows = (data[1] == digit).nonzero()[:, 0]
    return rows[torch.randperm(len(rows), generator=generator)]
