"""What the weights of AutoSampling's samples are worth: windows of them, stacking, and an ensemble of equal cost.

    python -m tests.benchmarks.window_weights --root DIR [--seeds 4] [--unseen] [--only WORD] [--keep DIR] [--few]

Each row is a problem, network, number of steps and number of validation data; its fits differ in seed, split and
training data. `in use` is the test NLL with AutoSampling's weights. The columns after it are minus it, above 0 is
worse, with a 95 % interval of Student's t over seeds. An overfit is what weights gain over even ones on the validation
data, less what they gain on the test data. `--unseen` runs the problems that were not looked at before the rule was
fixed. `--keep` stores the densities, so that another rule needs no fit. `--few` prints instead what 5, 10 and 20 of the
samples lose, over all cases of both kinds.
"""

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy import stats
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical, FlatPrior, Posterior
from lightning_sgmcmc.callbacks import AutoSampling, DeepEnsemble, SampleCollector
from lightning_sgmcmc.datamodules import (
    CovertypeDataModule,
    DigitsDataModule,
    MNISTDataModule,
    UCIClassificationDataModule,
)
from lightning_sgmcmc.diagnostics.decisions import stacking_weights, window_weights
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.posterior.distillation import chosen_samples
from lightning_sgmcmc.posterior.stored import thinned
from lightning_sgmcmc.seeding import derive_seed
from tests.benchmarks.small_networks import QUIET
from tests.benchmarks.timing import measure_quietly

BATCH, MEMBERS, TEST = 50, 4, 4_000


class Case(NamedTuple):
    """A row of the table: data, network, optimizer steps, and numbers of training and validation data."""

    data: str
    network: str
    steps: int
    train: int
    val: int

    def __str__(self) -> str:
        return f"{self.data} {self.network}, {self.steps:,} steps, {self.val:,} val"


def cases(unseen: bool) -> list[Case]:
    if unseen:
        tables = [("german", 600, 150), ("pima", 450, 115), ("australian", 400, 100), ("heart", 150, 50)]
        small = [Case(name, "MLP", steps, *sizes) for name, *sizes in tables for steps in (200, 3_000)]
        return small + [
            Case("covertype", network, steps, 2_000, val)
            for network in ("MLP", "MLP+BN")
            for steps in (200, 3_000)
            for val in (100, 1_000)
        ]
    digits = [Case("digits", network, steps, 1_000, 100) for network in ("MLP", "CNN+BN") for steps in LENGTHS]
    return digits + [
        Case("mnist", network, steps, 2_000, val)
        for network in ("MLP", "CNN+BN")
        for steps in LENGTHS
        for val in (100, 1_000)
    ]


LENGTHS = (160, 800, 4_000)


def parts(case: Case, root: Path, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return training, validation and test data, drawn by the seed and standardised."""
    if case.data == "mnist":
        data: Any = MNISTDataModule(root, flatten=True)
    elif case.data == "digits":
        data = DigitsDataModule(val_fraction=0.0, test_fraction=0.0)
    elif case.data == "covertype":
        data = CovertypeDataModule(root, binary=False, test_fraction=0.0)
    else:
        data = UCIClassificationDataModule(case.data, root, test_fraction=0.0)
    data.setup("fit")
    x, y = data.splits[0].inputs.float(), data.splits[0].targets
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(derive_seed(seed, "windows", case.data)))
    # Test data are the same for each number of validation data.
    ends = (0, case.train, case.train + case.val, len(y) if len(y) < 2_000 else max(len(y) - TEST, 0))
    rows = [order[: ends[1]], order[ends[1] : ends[2]], order[ends[2] :] if len(y) < 2_000 else order[-TEST:]]
    shift, scale = x[rows[0]].mean(), x[rows[0]].std()
    return [((x[own] - shift) / scale, y[own]) for own in rows]


def network(case: Case, inputs: int, outputs: int) -> nn.Module:
    if case.network == "MLP":
        return nn.Sequential(nn.Linear(inputs, 50), nn.ReLU(), nn.Linear(50, outputs))
    if case.network == "MLP+BN":
        return nn.Sequential(nn.Linear(inputs, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, outputs))
    side, stride = math.isqrt(inputs), 2 if inputs > 64 else 1
    last = math.ceil(math.ceil(side / stride) / 2)
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        *(nn.Conv2d(1, 8, 3, stride=stride, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * last**2, outputs)),
    )


class Densities(NamedTuple):
    """log p(y_i) of validation and test data by each sample (S, n), and of test data by the ensemble's average (n,)."""

    val: Tensor
    test: Tensor
    ensemble: Tensor


def densities(case: Case, root: Path, seed: int) -> Densities:
    """Fit, and return the samples' densities."""
    train, val, test = parts(case, root, seed)
    samples = fitted(case, AutoSampling(), case.steps, train, val, seed)
    own = [samples.log_likelihood([part]) for part in (val, test)]
    return Densities(*own, ensemble(case._replace(val=0), root, seed))


@functools.cache
def ensemble(case: Case, root: Path, seed: int) -> Tensor:
    """Return the test densities of the average of networks that have the same number of gradients together."""
    train, _, test = parts(case, root, seed)
    schedule = DeepEnsemble(optimizer=functools.partial(AdamW, weight_decay=0.05), warm_up=0.03)
    options = {"prior": FlatPrior(), "lr": 0.01, "num_chains": MEMBERS}
    members = fitted(case, schedule, case.steps // MEMBERS, train, test, seed, **options)
    return mixture(members.log_likelihood([test]))


def fitted(
    case: Case,
    schedule: pl.Callback,
    steps: int,
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    seed: int,
    **options: Any,
) -> Posterior:
    """Return the samples of a fit."""
    pl.seed_everything(seed, verbose=False)
    outputs = 7 if case.data == "covertype" else int(train[1].max()) + 1
    module = BayesianModule(network(case, train[0].shape[1], outputs), Categorical(), seed=seed, **options)
    collector = SampleCollector(in_memory=True)
    loaders = [DataLoader(TensorDataset(*train), BATCH, shuffle=True), DataLoader(TensorDataset(*val), 1_000)]
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        callbacks=[schedule, collector],
        limit_val_batches=1,
        check_val_every_n_epoch=10**6,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(module, *loaders)
    assert collector.posterior is not None
    return collector.posterior


def mixture(logs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return log Σ_j w_j·p_j(y_i), shape (n,)."""
    weights = torch.full((len(logs),), 1 / len(logs), dtype=torch.float64) if weights is None else weights
    return (logs + weights.log()[:, None]).logsumexp(0)


def window(share: float) -> Callable[[Tensor], Tensor]:
    """Return even weights of the last samples."""

    def weights(val: Tensor) -> Tensor:
        count = max(1, round(share * len(val)))
        return torch.cat([torch.zeros(len(val) - count), torch.full((count,), 1 / count)]).double()

    return weights


def before(val: Tensor) -> Tensor:
    """Return the weights of stacking from even ones, the rule before this one."""
    return stacking_weights(val, pseudo_count=0.02 * val.shape[1])


def in_use(val: Tensor) -> Tensor:
    """Return the weights of AutoSampling."""
    return stacking_weights(val, window_weights(val, range(len(val))))


RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "last": window(0.0),
    "last tenth": window(0.1),
    "last half": window(0.5),
    "all": window(1.0),
    "stacking from all": before,
}


def interval(values: list[float]) -> str:
    """Return mean and 95 % interval's half width; * where it is off zero."""
    found = torch.tensor(values, dtype=torch.float64)
    half = (
        float(stats.t.ppf(0.975, len(values) - 1) * found.std() / len(values) ** 0.5) if len(values) > 1 else math.nan
    )
    return f"{float(found.mean()):+.4f} ± {half:.4f}{'*' if abs(float(found.mean())) > half else ''}"


def row(case: Case, found: list[Densities]) -> list[str]:
    """Return a row's cells."""

    def loss(rule: Callable[[Tensor], Tensor], own: Densities) -> float:
        return -float(mixture(own.test, rule(own.val)).mean())

    used = [loss(in_use, own) for own in found]
    cells = [str(case), f"{sum(used) / len(used):.4f}"]
    for rule in RULES.values():
        cells.append(interval([loss(rule, own) - base for own, base in zip(found, used, strict=True)]))
    cells.append(interval([-float(own.ensemble.mean()) - base for own, base in zip(found, used, strict=True)]))
    return [*cells, *(interval([overfitting(rule, own) for own in found]) for rule in (before, in_use))]


def overfitting(rule: Callable[[Tensor], Tensor], own: Densities) -> float:
    """Return what the weights gain over even ones on the data that chose them, less what they gain on others."""
    gains = [float((mixture(logs, rule(own.val)) - mixture(logs)).mean()) for logs in (own.val, own.test)]
    return gains[0] - gains[1]


def lost(own: Densities, indices: Sequence[int], weights: Tensor | None = None) -> float:
    """Return by how much some samples' test NLL is above that of all; their own weights are those of all."""
    whole, kept = in_use(own.val), list(indices)
    weights = whole[kept] / whole[kept].sum() if weights is None else weights
    return float((mixture(own.test, whole) - mixture(own.test[kept], weights)).mean())


def few(of_cases: dict[Case, list[Densities]], count: int) -> None:
    """Print what some samples lose in the mean over cases, at worst, and in how many cases at most 0.003."""
    ways: dict[str, Callable[[Densities], float]] = {
        "chosen": lambda own: lost(own, *chosen_samples(own.val, in_use(own.val), count)),
        "evenly spaced": lambda own: lost(own, thinned([0] * len(own.val), None, count)),
        "newest": lambda own: lost(own, range(len(own.val) - count, len(own.val))),
    }
    for name, way in ways.items():
        each = {case: sum(map(way, found)) / len(found) for case, found in of_cases.items()}
        worst = max(each, key=lambda case: each[case])
        small = sum(loss <= 0.003 for loss in each.values())
        mean = sum(each.values()) / len(each)
        print(f"| {count} {name} | {mean:+.4f} | {each[worst]:+.4f} ({worst}) | {small} of {len(each)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--unseen", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--few", action="store_true")
    chosen = parser.parse_args()
    measure_quietly()

    def fits_of(case: Case, seeds: int) -> list[Densities]:
        found = []
        for seed in range(seeds):
            file = None if chosen.keep is None else chosen.keep / f"{case} {seed}.pt"
            if file is not None and file.is_file():
                found.append(Densities(*torch.load(file)))
                continue
            found.append(densities(case, chosen.root, seed))
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(tuple(found[-1]), file)
        return found

    if chosen.few:
        print("| samples | mean | worst case | cases at most +0.003 |\n|---|---|---|---|")
        seeds = {case: chosen.seeds for case in cases(False)} | {case: 2 for case in cases(True)}
        of_cases = {case: fits_of(case, count) for case, count in seeds.items()}
        for count in (5, 10, 20):
            few(of_cases, count)
        return
    columns = ("case", "in use", *RULES, "ensemble", "overfit before", "overfit in use")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for case in cases(chosen.unseen):
        if chosen.only in str(case):
            print(f"| {' | '.join(row(case, fits_of(case, chosen.seeds)))} |", flush=True)


if __name__ == "__main__":
    main()
