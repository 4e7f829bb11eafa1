"""The fits of the recipe: data, network, schedule, training time, and the figures of the draws over time."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from lightning_sgmcmc import BayesianModule, Categorical, GaussianPrior
from lightning_sgmcmc.callbacks import CyclicalSchedule, DeepEnsemble, SampleCollector
from lightning_sgmcmc.diagnostics.scores import classification_metrics, out_of_distribution_metrics
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.cifar_sprint.clock import TIMED, UNTIMED, Clock
from lightning_sgmcmc.recipes.cifar_sprint.network import WHITENED_IMAGES, SprintNetwork, whitening_filters
from lightning_sgmcmc.recipes.cifar_sprint.settings import SYNTHETIC, Settings
from lightning_sgmcmc.recipes.shared.averages import grouped_probabilities
from lightning_sgmcmc.recipes.shared.image_sets import photographs, unknown_images
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.synthetic_images import SyntheticImages
from lightning_sgmcmc.recipes.shared.trainers import prepare_run, quiet_trainer, resumed_fit
from lightning_sgmcmc.samplers import SGHMC

CYCLICAL = ("chains", "snapshots")
"""The methods with cycles; the others are trained to the end of one cosine."""

Point = tuple[float, dict[str, float]]
"""Seconds of training, and the figures of the average after the drawing at that time."""


def datamodules(settings: Settings, options: Options) -> tuple[Any, Any]:
    """Return the images, and those of unknown classes; None if there are none."""
    sizes: dict[str, Any] = {"size": settings.size, "limit": settings.limit}
    unknown = functools.partial(unknown_images, options, settings.outside_folder, **sizes)
    data = settings.folder or settings.data
    if data != SYNTHETIC:
        return photographs(data, options, settings.batch, augment=settings.augment, **sizes), unknown()
    count, tested = settings.num_data, settings.num_test
    how: dict[str, Any] = {"seed": options.seed, "strength": settings.strength}
    known = SyntheticImages(settings.batch, sizes=(count, 0, tested), augment=settings.augment, **how)
    if settings.outside_folder is not None:
        return known, unknown()
    return known, SyntheticImages(1000, sizes=(1, 0, tested), unknown=True, **how)


def module_of(method: str, chains: int, data: Any, settings: Settings) -> BayesianModule:
    """Return the stacked chains of a method, each with its own start, batches and noise.

    Args:
        method: its name; all but "chains" have the temperature 0, at which SGHMC is SGD with momentum.
        chains: C.
        data: the images, after `setup`.
        settings: the recipe's.
    """
    images, normalise = data.splits[0].inputs[:WHITENED_IMAGES], data.transform()
    filters = whitening_filters(images if normalise is None else normalise(images), settings.filters, settings.patch)
    return BayesianModule(
        net=SprintNetwork(data.num_classes, filters.cpu(), settings.widths, settings.groups, settings.scale),
        likelihood=Categorical(),
        prior=GaussianPrior(settings.prior_std),
        sampler=functools.partial(SGHMC, friction=settings.friction),
        lr=settings.lr,
        temperature=settings.temperature if method == "chains" else 0.0,
        num_chains=chains,
        compile=settings.compile,
    )


def schedule_of(method: str, settings: Settings) -> pl.Callback:
    """Return the callback of a method's step sizes and draws: cycles, or one cosine whose end is the draw."""
    if method in CYCLICAL:
        return CyclicalSchedule(settings.cycles, settings.exploration, settings.samples)
    return DeepEnsemble()


def steps_of(chains: int, length: float, data: Any, settings: Settings, options: Options) -> int:
    """Return the steps of a fit within a share of the budget.

    Args:
        chains: C.
        length: the share.
        data: the images, after `setup`.
        settings: the recipe's.
        options: the recipe's.
    """
    if settings.seconds is not None:
        return max(UNTIMED + 1, round(length * settings.seconds / seconds_of_a_step(chains, settings, options)))
    assert settings.epochs is not None
    return max(UNTIMED + 1, round(length * settings.epochs * math.ceil(data.num_data / settings.batch) / chains))


def seconds_of_a_step(chains: int, settings: Settings, options: Options) -> float:
    """Return the training time of a step of stacked chains, measured in a short fit.

    Args:
        chains: C.
        settings: the recipe's.
        options: the recipe's.
    """
    data, _ = datamodules(settings, options)
    data.setup("fit")
    clock = Clock()
    trainer = trainer_of([DeepEnsemble(), clock], TIMED, settings, options, enable_checkpointing=False)
    trainer.fit(module_of("ensemble", chains, data, settings), datamodule=data)
    return clock.seconds / TIMED


def trainer_of(
    callbacks: list[pl.Callback], steps: int, settings: Settings, options: Options, **more: Any
) -> pl.Trainer:
    """Return the trainer of a fit, which validates nothing.

    Args:
        callbacks: its callbacks.
        steps: optimizer steps.
        settings: the recipe's.
        options: the recipe's.
        more: the trainer's other options.
    """
    return quiet_trainer(
        accelerator=options.accelerator(),
        devices=1,
        precision=settings.precision,
        max_steps=steps,
        max_epochs=-1,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        **more,
    )


def one(method: str, chains: int, length: float, seed: int, settings: Settings, options: Options) -> dict[str, Any]:
    """Train the stacked networks of a method within a share of the budget, and test their draws.

    Returns:
        `seconds` of training; `steps`; `networks`, the number of draws in the last average; `curve`, a `Point` for
        each drawing.
    """
    prepare_run(options)
    pl.seed_everything(seed, verbose=False)
    data, unknown = datamodules(settings, options)
    data.setup("fit")
    clock = Clock()
    steps = steps_of(chains, length, data, settings, options)
    callbacks = [schedule_of(method, settings), SampleCollector(in_memory=True), clock]
    trainer = trainer_of(callbacks, steps, settings, options)
    module = module_of(method, chains, data, settings)
    resumed_fit(trainer, module, data)
    figures = figures_of_draws(module, data, unknown, settings.burn_in, trainer.strategy.root_device)
    return {
        "seconds": clock.seconds,
        "steps": steps,
        "networks": chains * len(newest(clock.drawn, settings.burn_in)),
        "curve": list(zip(clock.drawn, figures, strict=True)),
    }


def newest(drawings: list[Any], burn_in: float) -> list[Any]:
    """Return the newest drawings of a list, at least one.

    Args:
        drawings: in their order.
        burn_in: share that is left out, in [0, 1).

    >>> newest([1, 2, 3, 4, 5], 0.5)
    [3, 4, 5]
    """
    return drawings[math.floor(burn_in * len(drawings)) :]


def figures_of_draws(
    module: BayesianModule, data: Any, unknown: Any, burn_in: float, device: torch.device
) -> list[dict[str, float]]:
    """Return after each drawing the figures of the average of the newest drawings.

    Args:
        module: with its posterior.
        data: the images.
        unknown: images of unknown classes, or None.
        burn_in: see `newest`.
        device: where to compute.
    """

    def averages(loader: Any) -> tuple[list[Tensor], Tensor]:
        drawn, labels = grouped_probabilities(module, loader, device, lambda sample: sample.step)
        known = [newest(drawn[: count + 1], burn_in) for count in range(len(drawn))]
        return [torch.stack(some).mean(0) for some in known], labels

    of_known, labels = averages(data.test_dataloader())
    found: list[dict[str, float]] = []
    for probabilities in of_known:
        metrics = classification_metrics(probabilities, labels)
        shown = {"error %": 100 * (1 - metrics["accuracy"]), "NLL (nats)": metrics["nll"], "ECE": metrics["ece"]}
        found.append({name: float(value) for name, value in shown.items()})
    if unknown is not None:
        unknown.setup("test")
        unknown.normalise_as(data)
        of_unknown, _ = averages(unknown.test_dataloader())
        for own, known, outside in zip(found, of_known, of_unknown, strict=True):
            own["AUROC, out of distribution"] = float(out_of_distribution_metrics(known, outside)["auroc"])
    return found
