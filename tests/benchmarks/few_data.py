"""AutoSampling with few data: its prior for few data, the prior of many, a wide one, and an ensemble.

    python -m tests.benchmarks.few_data [--seeds 3] [--json FILE]

Digits 64-50-10, 1,000 steps in batches of 32, of which the ensemble's four networks have a quarter each. `AutoSampling`
takes a fifth of the data, at least four, for validation; the ensemble trains on all.
"""

import argparse
import json
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
from lightning_sgmcmc.seeding import derive_seed
from tests.benchmarks.timing import measure_quietly
from tests.support.trainers import quiet_trainer

COUNTS, STEPS, BATCH, TEST = (20, 50, 100, 200, 400), 1000, 32, 600
AUTO: dict[str, dict[str, Any]] = {
    "AutoSampling": {},
    "prior std 0.3": {"prior_std": 0.3},
    "prior std 1": {"prior_std": 1.0},
    "AutoSampling, ood": {"objective": "ood"},
    "ood, prior std 0.2": {"objective": "ood", "prior_std": 0.2},
}
ENSEMBLE = "ensemble of 4"


def run(method: str, count: int, seed: int, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return the error in percent and the NLL on test data."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held_out = max(count // 5, 4)
    split = count if method == ENSEMBLE else count - held_out
    train, val, test = order[:split], order[count - held_out : count], order[-TEST:]
    torch.manual_seed(derive_seed(seed, "network"))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    if method == ENSEMBLE:
        module = BayesianModule(net, Categorical(), 1.0, lr=0.1, num_chains=4, seed=seed)
        schedule: pl.Callback = DeepEnsemble()
    else:
        module = BayesianModule(net, Categorical(), seed=seed)
        schedule = AutoSampling(num_draws=40, **AUTO[method])
    steps = STEPS // module.num_chains
    trainer = quiet_trainer(max_steps=steps, callbacks=[schedule, SampleCollector(in_memory=True)])
    batches = DataLoader(TensorDataset(x[train], y[train]), min(BATCH, split), shuffle=True)
    trainer.fit(module, batches, DataLoader(TensorDataset(x[val], y[val]), held_out))
    assert module.posterior is not None
    found = module.posterior.evaluate([(x[test], y[test])]).bma
    return 100 * (1 - found["accuracy"]), found["nll"]


def main() -> None:
    """Print the table, and write it with the command and the date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measure_quietly()
    data = DigitsDataModule()
    data.setup("fit")
    x, y = (torch.cat([getattr(part, name) for part in data.splits]) for name in ("inputs", "targets"))
    header, rows = ["labels", *AUTO, ENSEMBLE], []
    for count in COUNTS:
        cells = []
        for method in header[1:]:
            errors, nll = zip(*(run(method, count, seed, x, y) for seed in range(options.seeds)), strict=True)
            cells.append(f"{sum(errors) / len(errors):.1f} %, {sum(nll) / len(nll):.2f}")
        rows.append([str(count), *cells])
        print(rows[-1], flush=True)
    if options.json is not None:
        command = f"python -m tests.benchmarks.few_data --seeds {options.seeds}"
        content = {"command": command, "date": date.today().isoformat(), "header": header, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
