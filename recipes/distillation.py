"""A posterior's average in one network: quality and cost of students beside the ensemble and one sample, on MNIST.

Four chains sample a perceptron on 6,000 images of MNIST, and students of its size and of four times its width learn
the average's predictions (`Posterior.distill`) of the training images, half of them perturbed by noise, erased
rectangles or another image mixed in. The table has the test images' metrics, how well entropy and mutual information
separate notMNIST from them, and the cost of a prediction. The student has the average's predictive close to the
training inputs at one sample's cost; what it knows of other inputs comes from the perturbations alone. With 8 seeds the
average of 24 samples has an NLL of 0.152, one sample 0.247, a student of its size 0.174 and the wide one 0.152; the
AUROC by mutual information is 0.963, 0.5, 0.983 and 0.958.

Quick is 2 seeds, full 8.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from lightning_sgmcmc.recipes.shared.jobs import run_jobs
from lightning_sgmcmc.recipes.shared.needs import require
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.results import Row, mean_row
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.recipes.shared.trainers import kept_samples, quiet_trainer, resumed_fit, silence_lightning


@dataclass(frozen=True)
class Settings:
    """The settings of `distillation.yaml`.

    Attributes:
        seeds: number of repeats.
        images: of MNIST, for training.
        hidden: width of the sampled network's two layers.
        students: width of each student, by its name.
        chains, cycles, samples: chains, cycles of each and samples of a cycle.
        epochs, student_epochs: passes over the images.
    """

    seeds: int
    images: int
    hidden: int
    students: dict[str, int]
    chains: int
    cycles: int
    samples: int
    epochs: int
    student_epochs: int

    @property
    def work(self) -> float:
        """The passes of chains and students over the images, of all seeds."""
        return float(self.seeds * self.images * (self.chains * self.epochs + len(self.students) * self.student_epochs))


def run(options: Options) -> list[Row]:
    """Sample, distil and score with each seed; return the table."""
    from lightning_sgmcmc.datamodules import MNISTDataModule, NotMNISTDataModule

    require(MNISTDataModule(options.data_root), NotMNISTDataModule(options.data_root))
    settings = read_settings(Settings, options)
    outcomes = run_jobs(one, [(seed,) for seed in options.seeds(settings.seeds)], options, settings)
    found: dict[tuple[str, str], list[float]] = {}
    for outcome in outcomes.values():
        for key, value in outcome.items():
            found.setdefault(key, []).append(value)
    return [mean_row(method, metric, values) for (method, metric), values in found.items()]


def one(seed: int, settings: Settings, options: Options) -> dict[tuple[str, str], float]:
    """Return each method's figures for one seed."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from torchvision.ops import MLP

    from lightning_sgmcmc import SGHMC, BayesianModule, Categorical, GaussianPrior
    from lightning_sgmcmc.callbacks import CyclicalSchedule
    from lightning_sgmcmc.datamodules import DatasetDataModule, MNISTDataModule, NotMNISTDataModule
    from lightning_sgmcmc.namespace import pl

    silence_lightning()
    pl.seed_everything(seed, verbose=False)
    data = MNISTDataModule(options.data_root, val_size=0, flatten=True)
    unknown = NotMNISTDataModule(options.data_root, flatten=True)
    for source in (data, unknown):
        source.setup("fit")
    unknown.normalise_as(data)
    chosen = torch.randperm(data.num_data)[: settings.images]
    train = data.splits[0].inputs[chosen], data.splits[0].targets[chosen]
    x, x_test, x_unknown = (
        data.transform()(part) for part in (train[0], data.splits[2].inputs, unknown.splits[2].inputs)
    )
    module = BayesianModule(
        net=MLP(28 * 28, [settings.hidden, settings.hidden, 10], inplace=False),
        likelihood=Categorical(),
        prior=GaussianPrior(0.3),
        sampler=SGHMC,
        lr=0.1,
        num_chains=settings.chains,
    )
    schedule = CyclicalSchedule(settings.cycles, 0.7, settings.samples)
    callbacks = [schedule, kept_samples()]
    trainer = quiet_trainer(accelerator="cpu", max_epochs=settings.epochs, callbacks=callbacks)
    resumed_fit(trainer, module, DatasetDataModule(TensorDataset(x, train[1])))
    posterior = module.posterior
    assert posterior is not None
    loader = DataLoader(cast(Any, x), batch_size=100, shuffle=True, collate_fn=perturbed)
    tests = x_test, data.splits[2].targets, x_unknown
    found = scores("one sample", posterior[-1:].predict, tests, posterior[0])
    found |= scores(f"average of {len(posterior)} samples", posterior.predict, tests, posterior)
    for name, width in settings.students.items():
        net = MLP(28 * 28, [width, width, 11], inplace=False)
        start = time.perf_counter()
        student = posterior.distill(net, loader, settings.student_epochs, lr=2e-3, accelerator="cpu")
        seconds = time.perf_counter() - start
        found |= scores(name, student.predict, tests, student) | {(name, "seconds of distillation"): seconds}
    return found


def perturbed(images: list[Any]) -> Any:
    """Return a batch whose second half has noise, erased rectangles, or another image mixed in."""
    import torch

    from lightning_sgmcmc.datamodules.augmentation import random_erase

    batch = torch.stack(images)
    half = len(batch) // 2
    rest = batch[half:].clone()
    kind = torch.randint(3, (len(rest), 1))
    noisy = rest + torch.rand(len(rest), 1) * torch.randn_like(rest)
    erased = random_erase(rest.view(-1, 1, 28, 28), 1.0).flatten(1)
    mixed = torch.lerp(rest, rest.roll(1, 0), 0.5 * torch.rand(len(rest), 1))
    return torch.cat([batch[:half], torch.where(kind == 0, noisy, torch.where(kind == 1, erased, mixed))])


def scores(method: str, predict: Callable[[Any], Any], tests: Any, what: Any) -> dict[tuple[str, str], float]:
    """Return a method's figures.

    Args:
        method: its name.
        predict: returns the predictive of inputs.
        tests: test images, their labels, and images of another distribution.
        what: the posterior, sample or student, whose bytes count.
    """
    import torch
    from torchmetrics.functional.classification import binary_auroc

    from lightning_sgmcmc.diagnostics.scores import classification_metrics

    known, other = predict(tests[0]), predict(tests[2])
    metrics = {name: float(v) for name, v in classification_metrics(known.probabilities, tests[1]).items()}
    found = {(method, name): metrics[name] for name in ("accuracy", "nll", "ece")}
    is_other = torch.cat([torch.zeros(len(known)), torch.ones(len(other))]).long()
    for name in ("entropy", "mutual_information"):
        values = torch.cat([getattr(known, name), getattr(other, name)]).float()
        found[method, f"AUROC of notMNIST by {name.replace('_', ' ')}"] = float(
            binary_auroc(values / (1 + values), is_other)
        )
    few, rounds = tests[0][:1000], 5
    start = time.perf_counter()
    for _ in range(rounds):
        predict(few)
    found[method, "ms for 1,000 images"] = (time.perf_counter() - start) / rounds * 1e3
    found[method, "MB"] = _bytes(what) / 1e6
    return found


def _bytes(what: Any) -> int:
    if hasattr(what, "state"):
        return sum(tensor.nbytes for tensor in what.state.values())
    if hasattr(what, "store"):
        return sum(_bytes(sample) for sample in what)
    return sum(parameter.nbytes for parameter in what.parameters())
