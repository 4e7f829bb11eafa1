"""NLL after fine-tuning on few images of new digits: AdamW, and `bayesianize` with its defaults and others.

    python -m tests.benchmarks.fine_tuning --root DIR [--seeds 3] [--json FILE]

A convolutional network is trained on MNIST's digits 0 to 4, at 14 by 14 pixels, and gets a new last layer for the
digits 5 to 9. The validation data are a fourth of the training data, at least 100; AdamW (step size 1e-3, 1e-2 for the
last layer alone; a cosine) stops at its best epoch on them. All methods make the same number of steps.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sgmcmc import Categorical, FeatureDataModule, GaussianPrior, bayesianize
from lightning_sgmcmc.callbacks import AutoSampling, SampleCollector
from lightning_sgmcmc.datamodules import MNISTDataModule
from tests.benchmarks.timing import measure_quietly
from tests.support.trainers import quiet_trainer

Data = tuple[Tensor, Tensor]
BATCH = 50
COUNTS = {100: 240, 400: 480, 2000: 800}
"""Steps by the number of training data."""
MORE = 3_200
"""Steps of the last layer with 400 data."""
METHODS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "all, default prior": {"what": "all"},
    "all, GaussianPrior()": {"what": "all", "prior": GaussianPrior()},
    "AdamW, last layer": {"what": "last_layer"},
    "last layer": {"what": "last_layer"},
}


class Network(nn.Module):
    """Two convolutions with BatchNorm, a dense layer and the last one."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.classes = classes
        first = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)
        self.trunk = nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(288, 64), nn.ReLU())
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(self.trunk(x))
        return output


def pretrained(x: Tensor, y: Tensor, seed: int) -> Network:
    """Return a network of the digits 0 to 4 with a new last layer."""
    torch.manual_seed(seed)
    rows = (y < 5).nonzero()[:, 0]
    rows, net = rows[torch.randperm(len(rows))[:8000]], Network()
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    for _ in range(3):
        for some in rows[torch.randperm(len(rows))].split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[some]), y[some]).backward()
            optimizer.step()
    net.fc = nn.Linear(64, 5)
    return net


def adamw(net: Network, train: Data, val: Data, steps: int, parameters: Iterable[Tensor], lr: float) -> Network:
    """Return the network of the best epoch."""
    optimizer, best = torch.optim.AdamW(parameters, lr), (float("inf"), net.state_dict())
    epochs = steps * BATCH // len(train[1])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(train[1])).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net.train()(train[0][rows]), train[1][rows]).backward()
            optimizer.step()
        schedule.step()
        nll = float(F.cross_entropy(net.eval()(val[0]), val[1]).detach())
        if nll < best[0]:
            best = nll, copy.deepcopy(net.state_dict())
    net.load_state_dict(best[1])
    return net.eval()


def probabilities(
    method: str, net: Network, train: Data, val: Data, steps: int, seed: int
) -> Callable[[Tensor], Tensor]:
    """Return the predictions of a method as a function of the images."""
    torch.manual_seed(seed)
    options = copy.deepcopy(METHODS[method])
    is_last = options.get("what") == "last_layer"
    if method.startswith("AdamW"):
        chosen = net.fc.parameters() if is_last else net.parameters()
        trunk = net.trunk.eval()
        net.trunk.train = (lambda mode=True: trunk) if is_last else net.trunk.train  # type: ignore[method-assign]
        fitted = adamw(net, train, val, steps, chosen, 1e-2 if is_last else 1e-3)
        return lambda x: fitted(x).softmax(-1).detach()
    module = bayesianize(net, likelihood=Categorical(), seed=seed, **options)
    loaders: Any = DataLoader(TensorDataset(*train), BATCH, shuffle=True), DataLoader(TensorDataset(*val), 200)
    trainer = quiet_trainer(max_steps=steps, callbacks=[AutoSampling(), SampleCollector(in_memory=True)])
    if is_last:
        trainer.fit(module, datamodule=FeatureDataModule(module, loaders[0], val=loaders[1]))
    else:
        trainer.fit(module, *loaders)
    posterior: Any = module.posterior
    return lambda x: posterior.predict(x).probabilities


def main() -> None:
    """Print the table, and write it with the command and the date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measure_quietly()
    data: Any = MNISTDataModule(options.root)
    data.setup("fit")
    scaled = [(F.avg_pool2d((s.inputs.float() / 255 - 0.13) / 0.31, 2), s.targets) for s in data.splits]
    (x, y), test = scaled[0], scaled[-1]
    new, unseen = (y >= 5).nonzero()[:, 0], test[1] >= 5
    rows: list[list[str]] = []
    for count, steps in [*COUNTS.items(), (400, MORE)]:
        found: dict[str, list[float]] = {}
        for seed in range(options.seeds):
            net = pretrained(x, y, seed)
            order = new[torch.randperm(len(new), generator=torch.Generator().manual_seed(seed))]
            held_out = order[count : count + max(100, count // 4)]
            train, val = ((x[part], y[part] - 5) for part in (order[:count], held_out))
            for method in METHODS:
                if steps == MORE and "last layer" not in method:
                    continue
                predict = probabilities(method, copy.deepcopy(net), train, val, steps, seed)
                each = predict(test[0][unseen])[torch.arange(int(unseen.sum())), test[1][unseen] - 5]
                found.setdefault(method, []).append(-float(each.clamp_min(1e-12).log().mean()))
        for method, nlls in found.items():
            rows.append([f"{count}", f"{steps}", method, f"{sum(nlls) / len(nlls):.3f}", f"{min(nlls):.3f}"])
            rows[-1].append(f"{max(nlls):.3f}")
            print(rows[-1], flush=True)
    if options.json is not None:
        command = f"python -m tests.benchmarks.fine_tuning --root DIR --seeds {options.seeds}"
        header = ["images", "steps", "method", "NLL", "smallest", "largest"]
        content = {"command": command, "date": date.today().isoformat(), "header": header, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
