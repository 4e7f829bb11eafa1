"""AutoSampling with few labels, clean or noisy: with and without validation data, other priors, and an ensemble.

    python -m tests.benchmarks.few_data [--seeds 3] [--root DIR] [--json FILE]

Digits 64-50-10, 1,000 steps in batches of 32, of which the ensemble's four networks have a quarter each. `AutoSampling`
takes a fifth of the data, at least four, for validation, or none; the ensemble trains on all. `--root` has 4,000 steps
on sets of recipe `equal_cost`, with a hidden layer of 50 too, and on labels with noise: digits of which a part has a
random label, and laws of 20 columns with P(y = 1) = 1/(1 + exp(-s·z)), z ~ N(0, 1) a linear form of them. `--clear`
has digits and many classes, with 4,000 steps: clusters in 32 dimensions with centres from N(0, 1), and data around
them with a standard deviation s. There the ensemble has the best of three step sizes, by the test data, and
`AutoSampling` four chains too, which make a quarter of the steps each.
"""

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import BayesianModule, Categorical
from lightning_sgmcmc.callbacks import AutoSampling, DeepEnsemble, SampleCollector
from lightning_sgmcmc.datamodules import DigitsDataModule
from lightning_sgmcmc.namespace import pl
from lightning_sgmcmc.recipes.equal_cost.problems import Problem
from lightning_sgmcmc.recipes.equal_cost.settings import Settings
from lightning_sgmcmc.recipes.shared.options import Options
from lightning_sgmcmc.recipes.shared.settings import read_settings
from lightning_sgmcmc.seeding import derive_seed
from tests.benchmarks.timing import measure_quietly
from tests.support.trainers import quiet_trainer

NOISY: dict[str, Sequence[int]] = {
    "digits, 30 % random": (100, 400, 1200),
    "logistic law, s = 1": (50, 100, 400, 2000),
    "logistic law, s = 3": (50, 100, 400, 2000),
    "logistic law, s = 0": (100, 1000),
}
CLEAR: dict[str, Sequence[int]] = {
    "digits": (100, 400, 1200),
    "20 classes, s = 0.8": (600,),
    "20 classes, s = 1.2": (600,),
    "100 classes, s = 0.8": (1000, 2500),
    "100 classes, s = 1.2": (1000,),
}
COUNTS: dict[str, Sequence[int]] = {
    "mnist": (100, 400, 2000),
    "german": (50, 200, 600),
    "pima": (50, 200, 460),
    "covertype": (100, 400, 2000),
}
OF_DIGITS, STEPS, STEPS_OF_SETS, BATCH = (20, 50, 100, 200, 400), 1_000, 4_000, 32
LR, LRS_OF_CLEAR = 0.1, (0.1, 0.3, 1.0)
AUTO: dict[str, dict[str, Any]] = {
    "AutoSampling": {},
    "no validation data": {},
    "prior std 0.3": {"prior_std": 0.3},
    "prior std 1": {"prior_std": 1.0},
    "AutoSampling, ood": {"objective": "ood"},
    "ood, prior std 0.2": {"objective": "ood", "prior_std": 0.2},
    "temperature 0.03": {"temperature": 0.03},
    "cold, no validation data": {"temperature": 0.03},
}
ENSEMBLE, GUESSING = "ensemble of 4", "guessing"
ON_ALL = (ENSEMBLE, "no validation data", "cold, no validation data")
OF_SETS = ("AutoSampling", *reversed(ON_ALL), GUESSING)
CHAINS = "4 chains"
OF_CLEAR = ("AutoSampling", CHAINS, "temperature 0.03", "no validation data", ENSEMBLE, GUESSING)


def data_of(name: str | None, root: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all inputs (n, d) and labels of a set, of digits without a name."""
    if name is not None and name.startswith("logistic"):
        drawn = torch.Generator().manual_seed(0)
        x, direction = torch.randn(6000, 20, generator=drawn), torch.randn(20, generator=drawn)
        odds = float(name.split()[-1]) * (x @ direction) / direction.norm()
        return x, (torch.rand(6000, generator=drawn) < odds.sigmoid()).long()
    if name is not None and "classes" in name:
        drawn = torch.Generator().manual_seed(0)
        y = torch.randint(0, int(name.split()[0]), (6000,), generator=drawn)
        centres = torch.randn(int(name.split()[0]), 32, generator=drawn)
        x = centres[y] + float(name.split()[-1]) * torch.randn(6000, 32, generator=drawn)
        return (x - x.mean(0)) / x.std(0), y
    if name is None or name.startswith("digits"):
        data: Any = DigitsDataModule()
    else:
        settings = read_settings(Settings, Options(Path("."), root, full=True))
        data = Problem(name, settings.sets[name], root, seed=0)
    data.setup("fit")
    x, y = (torch.cat([getattr(part, kind) for part in data.splits]) for kind in ("inputs", "targets"))
    if name == "digits, 30 % random":
        drawn = torch.Generator().manual_seed(0)
        y = torch.where(torch.rand(len(y), generator=drawn) < 0.3, torch.randint(0, 10, y.shape, generator=drawn), y)
    return x.float().flatten(1), y


def run(
    method: str, count: int, seed: int, x: torch.Tensor, y: torch.Tensor, steps: int, lr: float = LR
) -> tuple[float, ...]:
    """Return the error in percent, the NLL and the joint NLL on test data; `lr` is the ensemble's."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held_out = max(count // 5, 4)
    split = count if method in ON_ALL else count - held_out
    train, val, test = order[:split], order[count - held_out : count], order[-min(len(x) // 3, 2000) :]
    if method == GUESSING:
        shares = (torch.bincount(y[order[:count]], minlength=int(y.max()) + 1) + 1) / (count + int(y.max()) + 1)
        nll = -float(shares.log()[y[test]].mean())
        return 100 * float((y[test] != shares.argmax()).float().mean()), nll, nll
    torch.manual_seed(derive_seed(seed, "network"))
    net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, int(y.max()) + 1))
    if method == ENSEMBLE:
        module = BayesianModule(net, Categorical(), 1.0, lr=lr, num_chains=4, seed=seed)
        schedule: pl.Callback = DeepEnsemble()
    else:
        module = BayesianModule(net, Categorical(), num_chains=4 if method == CHAINS else 1, seed=seed)
        schedule = AutoSampling(num_draws=40 // module.num_chains, **AUTO.get(method, {}))
    trainer = quiet_trainer(max_steps=steps // module.num_chains, callbacks=[schedule, SampleCollector(in_memory=True)])
    batches = DataLoader(TensorDataset(x[train], y[train]), min(BATCH, split), shuffle=True)
    trainer.fit(module, batches, None if method in ON_ALL else DataLoader(TensorDataset(x[val], y[val]), held_out))
    assert module.posterior is not None
    found = module.posterior.evaluate([(x[test], y[test])]).bma
    return 100 * (1 - found["accuracy"]), found["nll"], module.posterior.joint_nll([(x[test], y[test])]).nll


def main() -> None:
    """Print the table, and write it with the command and the date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--sets", nargs="+", choices=[*NOISY, *COUNTS, *CLEAR])
    parser.add_argument("--clear", action="store_true", help="digits and many classes without noise")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measure_quietly()
    is_digits = options.root is None and not options.clear
    sets: dict[str | None, Sequence[int]] = {None: OF_DIGITS} if is_digits else {**NOISY, **COUNTS}
    sets = {**CLEAR} if options.clear else sets
    sets = {name: sets[name] for name in options.sets} if options.sets else sets
    methods = [*list(AUTO)[:-2], ENSEMBLE] if is_digits else list(OF_CLEAR if options.clear else OF_SETS)
    steps = STEPS if is_digits else STEPS_OF_SETS
    header, rows = ["labels" if is_digits else "data, labels", *methods], []
    for name, counts in sets.items():
        x, y = data_of(name, options.root)
        for count in counts:
            cells = []
            for method in methods:
                means = []
                for lr in LRS_OF_CLEAR if options.clear and method == ENSEMBLE else (LR,):
                    found = [run(method, count, seed, x, y, steps, lr) for seed in range(options.seeds)]
                    means.append([sum(each) / len(found) for each in zip(*found, strict=True)])
                error, *nll = min(means, key=lambda each: each[1])
                shown = ", ".join(f"{each:.2f}" for each in (nll if options.clear else nll[:1]))
                cells.append(f"{error:.1f} %, {shown}")
            rows.append([f"{count}" if name is None else f"{name}, {count}", *cells])
            print(rows[-1], flush=True)
    if options.json is not None:
        command = f"python -m tests.benchmarks.few_data --seeds {options.seeds}"
        command += " --clear" if options.clear else "" if is_digits else " --root DIR"
        content = {"command": command, "date": date.today().isoformat(), "header": header, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
